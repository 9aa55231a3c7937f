"""The options of streams, as ``HELIX_STORE["STREAMS"]`` gives them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from itertools import count, repeat
from typing import Any, Final, NamedTuple

from helix_store.core.limits import Limits
from helix_store.core.payloads import decode_all, encode
from helix_store.core.serialization import Serializable
from helix_store.core.types import StreamStatus
from helix_store.exceptions import (
    InvalidPayload,
    InvalidQuery,
    StreamClosed,
    StreamNotFound,
    StreamTruncated,
)

__all__ = [
    "CLOSED",
    "FIRST_PAGE",
    "WRITER_LOST",
    "PrunedStreams",
    "StoredChunk",
    "StreamHead",
    "StreamInfo",
    "StreamOptions",
    "StreamPage",
    "duration_ms",
    "encode_chunks",
    "next_page_length",
    "page_length",
    "position",
    "same_stream",
    "seconds",
    "settles",
]

_LONGEST_SECONDS = 7 * 24 * 60 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Times are in seconds."""

    poll_interval: float = 0.2
    """How often streams with waiting readers are looked at; a lost notification costs at most this."""
    notify: bool = True
    """Whether PostgreSQL wakes readers with NOTIFY."""
    writer_lease: float = 60.0
    """How long a writer may be silent before it counts as dead."""
    heartbeat: float = 15.0
    """How often the stream view writes a comment, so that proxies and browsers see a living connection."""
    using: str | None = None
    """The database that the stream view reads."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "notify":
                if type(value) is not bool:
                    raise ValueError("notify must be True or False")
            elif field.name == "using":
                if value is not None and type(value) is not str:
                    raise ValueError("using must be the name of a database or None")
            elif type(value) not in (int, float) or not 0 < value <= _LONGEST_SECONDS:
                raise ValueError(f"{field.name} must be a number of seconds above 0, at most seven days")


def seconds(value: Any, name: str) -> float:
    """Seconds from a number or a timedelta, above 0 and at most seven days. Raises `InvalidPayload`."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if type(number) not in (int, float) or not 0 < number <= _LONGEST_SECONDS:
        raise InvalidPayload(path=name, reason="expected seconds above 0, at most seven days")
    return float(number)


def duration_ms(value: Any, name: str) -> int:
    """Whole milliseconds of a timedelta that is not negative. Raises `InvalidPayload`."""
    if not isinstance(value, timedelta) or value < timedelta(0):
        raise InvalidPayload(path=name, reason="expected a timedelta that is not negative")
    return value // timedelta(milliseconds=1)


WRITER_LOST: Final = {
    "code": "writer_lost",
    "message": "The writer stopped without ending the stream.",
}
"""The error of a stream whose writer's lease ran out."""

_LARGEST_BIGINT: Final = 2**63 - 1
_PAGE_BYTES: Final = 512 * 1024
_LONGEST_PAGE: Final = 500
FIRST_PAGE: Final = 20
"""How many chunks to read before anything is known of their size."""
CLOSED: Final = frozenset({StreamStatus.ENDED, StreamStatus.FAILED})


@dataclass(frozen=True, slots=True)
class StoredChunk(Serializable):
    chunk: dict[str, Any]
    sequence: int


_SET_CHUNK: Final[Callable[[StoredChunk, Any], None]] = StoredChunk.__dict__["chunk"].__set__
_SET_SEQUENCE: Final[Callable[[StoredChunk, Any], None]] = StoredChunk.__dict__["sequence"].__set__


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamInfo(Serializable):
    """``chunk_count`` is what is stored: after pruning it is less than ``last_sequence``.

    ``run_id`` and ``agent_name`` are those of the newest writer.
    """

    stream_id: str
    status: StreamStatus
    chunk_count: int
    last_sequence: int
    output: Any
    error: Any
    run_id: str
    agent_name: str
    created_at: datetime
    updated_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedStreams(Serializable):
    """What was removed, or would be: chunks, of how many streams, and how many streams were failed."""

    streams: int
    chunks: int
    failed: int


class StreamHead(NamedTuple):
    """What a reader has to know before it reads: two heads differ when there is something new to see.

    ``incarnation`` tells a stream from one of the same name that took its place after a reset or a deletion.
    Chunks up to ``floor`` were removed.
    """

    incarnation: tuple[int, int]
    status: StreamStatus
    last_sequence: int
    floor: int

    @property
    def was_reset(self) -> bool:
        return self.incarnation[1] > 0

    def check_open(self) -> None:
        """Raise `StreamClosed` unless the stream takes chunks."""
        if self.status is not StreamStatus.ACTIVE:
            raise StreamClosed

    def check_readable(self, after: int) -> None:
        """Raise `StreamTruncated` when chunks after this position are gone.

        A position beyond the end of a stream that was reset is one of chunks that the reset removed.
        """
        if after < self.floor:
            raise StreamTruncated(self.floor + 1)
        if self.was_reset and after > self.last_sequence:
            raise StreamTruncated(1)


class StreamPage(NamedTuple):
    """A head, and the texts of the chunks that follow a position, read at one moment."""

    head: StreamHead
    first_sequence: int
    texts: Sequence[str]

    def chunks(self) -> list[StoredChunk]:
        """The chunks decoded.

        They are not made by their constructor: it takes twice as long, because a frozen class may set its
        fields only by a detour.
        """
        stored = list(map(object.__new__, repeat(StoredChunk, len(self.texts))))
        for set_field, values in (
            (_SET_CHUNK, decode_all(self.texts)),
            (_SET_SEQUENCE, count(self.first_sequence)),
        ):
            deque(map(set_field, stored, values), maxlen=0)
        return stored


def same_stream(page: StreamPage | None, stream_id: str, incarnation: tuple[int, int]) -> StreamPage:
    """The page, if its stream is still the one that the reader began with.

    Raises `StreamNotFound` once the stream is gone, and `StreamTruncated` once another one has its name.
    """
    if page is None:
        raise StreamNotFound(stream_id)
    if page.head.incarnation != incarnation:
        raise StreamTruncated(1)
    return page


def settles(current: StreamStatus, wanted: StreamStatus) -> bool:
    """Whether a stream goes from one status to another; ``False`` when it is there already.

    Only a reactivation leaves a terminal status. Raises `StreamClosed`.
    """
    if current is wanted:
        return False
    if current in CLOSED and wanted is not StreamStatus.ACTIVE:
        raise StreamClosed
    return True


def encode_chunks(chunks: Iterable[Any], limits: Limits) -> list[str]:
    """The texts of chunks, each a dict with a ``type``. Raises `InvalidPayload` and `LimitExceeded`."""
    if isinstance(chunks, dict | str | bytes) or not isinstance(chunks, Iterable):
        raise InvalidPayload(path="chunks", reason=f"expected chunks, got {type(chunks).__name__}")
    return [_encoded(chunk, f"chunks/{index}", limits) for index, chunk in enumerate(chunks)]


def _encoded(chunk: Any, path: str, limits: Limits) -> str:
    if type(chunk) is not dict:
        raise InvalidPayload(path=path, reason=f"expected a dict, got {type(chunk).__name__}")
    if type(chunk.get("type")) is not str or not chunk["type"]:
        raise InvalidPayload(path=f"{path}/type", reason="expected a text that is not empty")
    return encode(chunk, limit=limits.max_chunk_bytes, name="max_chunk_bytes", path=path)


def position(value: Any) -> int:
    """The last sequence that a reader has seen; 0 for none. Raises `InvalidQuery`."""
    if type(value) is not int or not 0 <= value <= _LARGEST_BIGINT:
        raise InvalidQuery(
            "A stream is read from a whole number from 0 to 2**63 - 1: the last sequence that was seen.",
            path="from_sequence",
        )
    return value


def page_length(value: Any) -> int:
    """How many chunks a caller takes at once. Raises `InvalidQuery`."""
    if type(value) is not int or not 1 <= value <= _LARGEST_BIGINT:
        raise InvalidQuery("limit must be a whole number from 1.", path="limit")
    return value


def next_page_length(texts: Sequence[str]) -> int:
    """How many chunks to read next so that a page stays small, whatever the size of the chunks."""
    if not texts:
        return FIRST_PAGE
    average = sum(map(len, texts)) // len(texts) + 1
    return max(1, min(_LONGEST_PAGE, _PAGE_BYTES // average))
