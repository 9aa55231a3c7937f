"""Storage-independent rules of streams: status changes, positions, chunks and pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count, repeat
from typing import Any, Final, NamedTuple, Self

from helix_store.core import validation
from helix_store.core.limits import MAX_BIGINT, UNLIMITED, Limits
from helix_store.core.payloads import decode_all, decode_optional, encode, encode_all
from helix_store.core.streams import LONGEST_SECONDS, StoredChunk, StreamInfo
from helix_store.core.types import StreamStatus
from helix_store.exceptions import (
    InvalidPayload,
    InvalidQuery,
    StreamClosed,
    StreamTruncated,
)

LARGEST_SEQUENCE: Final = MAX_BIGINT
FIRST_PAGE_LENGTH: Final = 20
"""The number of chunks to read before their size is known."""
TERMINAL_STATUSES: Final = frozenset({StreamStatus.ENDED, StreamStatus.FAILED})
WRITER_LOST: Final = encode(
    {"code": "writer_lost", "message": "The writer stopped without ending the stream."}
)
"""The stored form of the error of a stream whose writer's lease has expired."""

_PAGE_BYTES: Final = 512 * 1024
_LONGEST_PAGE: Final = 500

_SET_CHUNK: Final[Callable[[StoredChunk, Any], None]] = StoredChunk.__dict__["chunk"].__set__
_SET_SEQUENCE: Final[Callable[[StoredChunk, Any], None]] = StoredChunk.__dict__["sequence"].__set__


HEAD_COLUMNS: Final = ("id", "generation", "status", "last_sequence", "floor")
"""The columns of a `StreamHead`."""


class StreamHead(NamedTuple):
    """The row of a stream without its chunks. Two heads differ if a reader has something new to read.

    ``identity`` is the key of the stream and the number of its resets: a stream that was deleted and created
    again, or reset, has a different one. Chunks up to ``floor`` were removed.
    """

    identity: tuple[int, int]
    status: StreamStatus
    last_sequence: int
    floor: int

    @classmethod
    def of(cls, key: int, generation: int, status: str, last_sequence: int, floor: int) -> Self:
        """Return the head with these `HEAD_COLUMNS`."""
        return cls((key, generation), StreamStatus(status), last_sequence, floor)

    @property
    def was_reset(self) -> bool:
        return self.identity[1] > 0

    def check_readable(self, after: int) -> None:
        """Raise `StreamTruncated` if chunks after this position were removed.

        In a stream that was reset, a position beyond the end belongs to chunks that the reset removed.
        """
        if after < self.floor:
            raise StreamTruncated(self.floor + 1)
        if self.was_reset and after > self.last_sequence:
            raise StreamTruncated(1)


class StreamSlice(NamedTuple):
    """A head and the encoded chunks that follow a position, both read at the same time."""

    head: StreamHead
    first_sequence: int
    texts: Sequence[str]

    def chunks(self) -> list[StoredChunk]:
        """Decode the chunks.

        This bypasses the constructor of `StoredChunk`, which takes twice as long because the class is frozen.
        """
        stored = list(map(object.__new__, repeat(StoredChunk, len(self.texts))))
        for set_field, values in (
            (_SET_CHUNK, decode_all(self.texts)),
            (_SET_SEQUENCE, count(self.first_sequence)),
        ):
            deque(map(set_field, stored, values), maxlen=0)
        return stored


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWriter:
    writer_id: str
    run_id: str
    agent_name: str
    lease_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChange:
    """The next status of a stream. Its chunks are kept for at least ``keep_ms`` after its end."""

    status: StreamStatus
    output: str | None = None
    error: str | None = None
    keep_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneRequest:
    """The arguments of pruning; ``older_than`` applies to ended streams, on the storage's clock."""

    older_than: timedelta | datetime | None
    keep_chunks: int | None
    dry_run: bool

    @classmethod
    def checked(
        cls, *, older_than: timedelta | datetime | None, keep_chunks: int | None, dry_run: bool
    ) -> Self:
        """Check a caller's arguments. Raises `InvalidQuery`."""
        if isinstance(older_than, timedelta):
            if not validation.is_age(older_than):
                raise InvalidQuery("older_than must be from 0 to a hundred years.", path="older_than")
        elif older_than is not None:
            if not isinstance(older_than, datetime):
                raise InvalidQuery("older_than must be a timedelta or an aware datetime.", path="older_than")
            older_than = validation.aware_datetime(older_than, "older_than")
        if keep_chunks is not None:
            validation.query_number(keep_chunks, "keep_chunks", maximum=UNLIMITED)
        return cls(older_than=older_than, keep_chunks=keep_chunks, dry_run=dry_run)


def info_of(stream_id: str, stored: Any) -> StreamInfo:
    """Return the result of `get_info` for a stored stream, which has the attributes of its columns."""
    return StreamInfo(
        stream_id=stream_id,
        status=StreamStatus(stored.status),
        chunk_count=stored.last_sequence - stored.floor,
        last_sequence=stored.last_sequence,
        output=decode_optional(stored.output),
        error=decode_optional(stored.error),
        run_id=stored.run_id,
        agent_name=stored.agent_name,
        created_at=stored.created_at,
        updated_at=stored.updated_at,
        ended_at=stored.ended_at,
    )


def changes_status(current: StreamStatus, wanted: StreamStatus) -> bool:
    """Return whether a stream's status changes; it does not if the stream already has that status.

    A stream that ended or failed can only become active again; otherwise `StreamClosed` is raised.
    """
    if current is wanted:
        return False
    if current in TERMINAL_STATUSES and wanted is not StreamStatus.ACTIVE:
        raise StreamClosed
    return True


def encode_chunks(chunks: Iterable[Any], limits: Limits) -> list[str]:
    """Encode chunks, each a dict with a ``type``. Raises `InvalidPayload` and `LimitExceeded`."""
    given = validation.items(chunks, "chunks")
    for index, chunk in enumerate(given):
        if type(chunk) is not dict:
            reason = f"expected a dict, got {type(chunk).__name__}"
            raise InvalidPayload(path=f"chunks/{index}", reason=reason)
        if type(chunk.get("type")) is not str or not chunk["type"]:
            raise InvalidPayload(path=f"chunks/{index}/type", reason="expected a string that is not empty")
    return encode_all(given, limit=limits.max_chunk_bytes, name="max_chunk_bytes", path="chunks")


def position(value: Any) -> int:
    """Check a position: the last sequence that a reader has seen, 0 at the start. Raises `InvalidQuery`."""
    if type(value) is not int or not 0 <= value <= LARGEST_SEQUENCE:
        raise InvalidQuery(
            "A position must be a whole number from 0 to 2**63 - 1: the last sequence that was seen.",
            path="from_sequence",
        )
    return value


def next_page_length(texts: Sequence[str]) -> int:
    """Return the number of chunks to read next, so that a page stays small even if chunks are large."""
    if not texts:
        return FIRST_PAGE_LENGTH
    average = sum(map(len, texts)) // len(texts) + 1
    return max(1, min(_LONGEST_PAGE, _PAGE_BYTES // average))


def seconds(value: Any, name: str) -> float:
    """Return seconds from a number or a timedelta of at most seven days. Raises `InvalidPayload`."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if type(number) not in (int, float) or not 0 < number <= LONGEST_SECONDS:
        raise InvalidPayload(path=name, reason="expected seconds above 0, at most seven days")
    return float(number)


def duration_ms(value: Any, name: str) -> int:
    """Return the whole milliseconds of an age. Raises `InvalidPayload`."""
    if not isinstance(value, timedelta) or not validation.is_age(value):
        raise InvalidPayload(path=name, reason="expected a timedelta from 0 to a hundred years")
    return value // timedelta(milliseconds=1)
