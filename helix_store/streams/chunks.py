"""The chunks of a stream: what may be written and read, and the statements.

The SQL of streams, which uses only the database's clock.

The update of the head locks it until the commit, so readers see sequences in commit order. All
conditions of a write are on that row, so that PostgreSQL checks them again after a wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count, repeat
from typing import Any, Final, NamedTuple, Self, TypeVar

from helix_store.catalogue import Table
from helix_store.core import validation
from helix_store.core.limits import MAX_BIGINT, UNLIMITED, Limits
from helix_store.core.payloads import decode_all, decode_object, decode_optional, encode, encode_all
from helix_store.core.streams import LONGEST_SECONDS, StoredChunk, StreamInfo
from helix_store.core.types import StreamStatus
from helix_store.engine.expressions import for_keys, tenants_with
from helix_store.engine.statement import CITUS, POSTGRESQL, SQLITE, Clock, Statement, table, with_clock
from helix_store.exceptions import (
    IntegrityFault,
    InvalidPayload,
    InvalidQuery,
    StreamClosed,
    StreamTruncated,
)
from helix_store.models import Session, Stream, StreamChunk, Tombstone

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
        validation.query_flag(dry_run, "dry_run")
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


def decode_chunk(text: str) -> dict[str, Any]:
    """Return a chunk that `encode_chunks` has written. Raises `IntegrityFault`."""
    chunk = decode_object(text)
    if type(chunk.get("type")) is not str:
        raise IntegrityFault("A stored chunk has no type; other rows are not affected.")
    return chunk


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


_STREAM: Final = table(Stream)
_CHUNK: Final = table(StreamChunk)

STREAM_BY_ID: Final = "tenant = %(tenant)s AND stream_id = %(stream_id)s"
_ACTIVE: Final = f"{STREAM_BY_ID} AND status = 'active'"
_LOCK_ACTIVE: Final = f"SELECT id FROM {_STREAM} WHERE {_ACTIVE} FOR NO KEY UPDATE"

# --- Writers ---------------------------------------------------------------------------------------


# A session with the stream's id was erased, and nobody has created it again.
_TENANT: Final = "CAST(%(tenant)s AS varchar)"
_ID: Final = "CAST(%(stream_id)s AS varchar)"
_IS_ERASED: Final = f"""EXISTS (
                SELECT 1 FROM {table(Tombstone)} WHERE tenant IN ({_TENANT}{{}}) AND digest = %(digest)s)
            AND NOT EXISTS (
                SELECT 1 FROM {table(Session)} WHERE tenant = {_TENANT} AND session_id = {_ID})"""


def _insert(clock: Clock) -> str:
    # Citus asks a single node, which has no tombstones of erased tenants.
    is_erased = _IS_ERASED.format("" if clock is CITUS else ", ''")
    return f"""
        INSERT INTO {_STREAM} AS known
            (tenant, stream_id, status, last_sequence, floor, generation, is_emptied,
             run_id, agent_name, writer_id, lease_expires_at, created_at, updated_at)
        SELECT {_TENANT}, {_ID}, 'active', 0, 0, 0, FALSE,
            CAST(%(run_id)s AS varchar), CAST(%(agent_name)s AS varchar), CAST(%(writer_id)s AS varchar),
            {clock.after("lease_ms")}, {clock.now}, {clock.now}
        WHERE NOT ({is_erased})
        ON CONFLICT (tenant, stream_id)"""


def _open(clock: Clock) -> str:
    return f"""{_insert(clock)} DO UPDATE SET
            run_id = excluded.run_id, agent_name = excluded.agent_name,
            writer_id = excluded.writer_id, lease_expires_at = excluded.lease_expires_at,
            updated_at = excluded.updated_at
        WHERE known.status = 'active'
        RETURNING id"""


OPEN: Final = Statement(
    _open(POSTGRESQL),
    _open(SQLITE),
    # The row exists after the first statement, so the lease begins after any wait for the row.
    citus=(f"{_insert(CITUS)} DO NOTHING", _LOCK_ACTIVE, _open(CITUS)),
)
"""Create the stream, or give the lease of an active stream to another writer. If the stream belongs to an
erased session, it stays away."""


def _advance(clock: Clock) -> str:
    return f"""
        UPDATE {_STREAM} SET
            last_sequence = last_sequence + %(count)s,
            updated_at = {clock.now},
            writer_id = COALESCE(CAST(%(writer_id)s AS varchar), writer_id),
            lease_expires_at = CASE
                WHEN CAST(%(writer_id)s AS varchar) IS NULL AND lease_expires_at IS NULL THEN NULL
                ELSE {clock.after("lease_ms")} END
        WHERE {_ACTIVE}
        RETURNING id, last_sequence"""


_CALL_ID: Final = "CASE WHEN part.number = 1 THEN %(call_id)s END"

APPEND: Final = Statement(
    f"""
    WITH head AS ({_advance(POSTGRESQL)}), written AS (
        INSERT INTO {_CHUNK} (stream_id, sequence, payload, call_id)
        SELECT head.id, head.last_sequence - %(count)s + part.number, part.payload, {_CALL_ID}
        FROM head, unnest(%(texts)s::text[]) WITH ORDINALITY AS part(payload, number)
    )
    SELECT id, last_sequence FROM head"""
)
"""`ADVANCE` and `INSERT_CHUNKS` in one statement, for PostgreSQL. ``texts`` is a list."""

ADVANCE: Final = with_clock(_advance, locks=_LOCK_ACTIVE)
"""Take the sequences of new chunks and renew the lease. It returns nothing if the stream is not active."""

INSERT_CHUNKS: Final = Statement(
    postgresql=f"""
        INSERT INTO {_CHUNK} (stream_id, sequence, payload, call_id)
        SELECT %(key)s, %(before)s + part.number, part.payload, {_CALL_ID}
        FROM json_array_elements_text(%(texts)s::json) WITH ORDINALITY AS part(payload, number)""",
    sqlite=f"""
        INSERT INTO {_CHUNK} (stream_id, sequence, payload, call_id)
        SELECT %(key)s, %(before)s + 1 + part.key, part.value,
            CASE WHEN part.key = 0 THEN %(call_id)s END
        FROM json_each(%(texts)s) AS part""",
)
"""Store chunks under the sequences after ``before``.

``texts`` is a JSON array, so that one statement text serves any number of rows.
"""

RENEW: Final = with_clock(
    lambda clock: (
        f"""
        UPDATE {_STREAM} SET writer_id = %(writer_id)s, lease_expires_at = {clock.after("lease_ms")}
        WHERE {_ACTIVE} RETURNING id"""
    ),
    locks=_LOCK_ACTIVE,
)

RELEASE: Final = Statement(
    f"""
    UPDATE {_STREAM} SET lease_expires_at = NULL
    WHERE {STREAM_BY_ID} AND writer_id = %(writer_id)s RETURNING id"""
)

SET_STATUS: Final = with_clock(
    lambda clock: (
        f"""
        UPDATE {_STREAM} SET
            status = %(status)s, output = %(output)s, error = %(error)s, lease_expires_at = NULL,
            updated_at = {clock.now},
            ended_at = CASE WHEN %(is_over)s THEN {clock.now} END,
            keep_until = CASE WHEN %(is_kept)s THEN {clock.after("keep_ms")} END,
            is_emptied = FALSE
        WHERE id = %(key)s"""
    )
)

# --- Readers ---------------------------------------------------------------------------------------

_OF_PAGE: Final = f"""
        FROM {_CHUNK} WHERE stream_id = stream.id AND sequence > %(after)s AND sequence <= %(last)s"""


def _page(chunks: str) -> str:
    return f"""
    SELECT stream.id, generation, status, last_sequence, floor, {chunks}
    WHERE stream.tenant = %(tenant)s AND stream.stream_id = %(stream_id)s"""


PAGE: Final = Statement(
    postgresql=_page(f"""first_sequence, payloads FROM {_STREAM} AS stream CROSS JOIN LATERAL (
        SELECT min(sequence) AS first_sequence, string_agg(payload, chr(10) ORDER BY sequence) AS payloads
        {_OF_PAGE}) AS chunks"""),
    sqlite=_page(f"""
        (SELECT min(sequence) {_OF_PAGE}),
        (SELECT group_concat(payload, char(10)) FROM (SELECT payload {_OF_PAGE} ORDER BY sequence))
    FROM {_STREAM} AS stream"""),
)
"""A head with the first sequence and the payloads of a range, or NULL if there are no chunks; no row for an
unknown stream. The payloads are joined by line breaks, which no payload contains, because transferring many
rows takes longer than finding them.
"""

TENANTS_OF: Final = tenants_with(_STREAM, "stream_id")
"""The tenants that have a stream with this id."""

# --- Pruning and deleting --------------------------------------------------------------------------


def _is_lost(clock: Clock) -> str:
    """Select active streams whose writer's lease has expired, of one tenant or of all."""
    of_tenant = "(CAST(%(tenant)s AS varchar) IS NULL OR tenant = %(tenant)s)"
    return f"status = 'active' AND lease_expires_at <= {clock.now} AND {of_tenant}"


def _fail_lost(clock: Clock, lock: str = "") -> str:
    return f"""
        UPDATE {_STREAM} SET
            status = 'failed', error = %(error)s, lease_expires_at = NULL,
            ended_at = {clock.now}, updated_at = {clock.now}, is_emptied = FALSE
        WHERE id IN (SELECT id FROM {_STREAM} WHERE {_is_lost(clock)} ORDER BY id LIMIT %(limit)s {lock})
        RETURNING id, last_sequence"""


_SKIP_LOCKED: Final = "FOR NO KEY UPDATE SKIP LOCKED"
FAIL_LOST: Final = Statement(
    _fail_lost(POSTGRESQL, _SKIP_LOCKED), _fail_lost(SQLITE), citus=(_fail_lost(CITUS, _SKIP_LOCKED),)
)
COUNT_LOST: Final = with_clock(lambda clock: f"SELECT count(*) FROM {_STREAM} WHERE {_is_lost(clock)}")

DELETE_CHUNKS: Final = Statement(f"DELETE FROM {_CHUNK} WHERE stream_id = %(key)s AND sequence <= %(last)s")
DELETE_ALL_CHUNKS: Final = for_keys(f"DELETE FROM {_CHUNK} WHERE stream_id IN %(keys)s")
DELETE_STREAMS: Final = for_keys(f"DELETE FROM {_STREAM} WHERE id IN %(keys)s")

# --- Notifications ---------------------------------------------------------------------------------

SEND_NOTIFICATIONS: Final = Statement(
    """
    SELECT set_config('synchronous_commit', 'off', true), pg_notify(%(channel)s, payload)
    FROM unnest(%(payloads)s::text[]) AS payload"""
)
"""For PostgreSQL. The commit does not wait for the disk, because polling finds what a crash loses."""


def _check_stream(values: Mapping[str, Any]) -> None:
    for name in ("output", "error"):
        decode_optional(values[name])
    if values["floor"] > values["last_sequence"]:
        raise InvalidPayload(path="/floor", reason="the first chunks that are gone end behind the last one")


TABLES: Final = (
    Table(
        Stream,
        record="stream",
        order=("stream_id",),
        parent="tenant",
        unit="stream",
        reads=None,
        check_import=_check_stream,
        session_id="stream_id",
    ),
    Table(StreamChunk, record="stream_chunk", order=("sequence",), parent="stream_id", reads=decode_chunk),
)


R = TypeVar("R")


class Watch:
    """A handle with which one reader in one event loop reads a stream and waits for changes. The reader must
    close it.

    ``run`` executes the query of a key. ``interval`` is the time between two polls, in seconds; ``seen`` is
    the head that the reader has seen.
    """

    def __init__(
        self,
        watches: Watches,
        run: Callable[[tuple[object, ...], Callable[[], Any]], Awaitable[Any]],
        interval: float = 0.0,
    ) -> None:
        self.interval = interval
        self.seen: StreamHead | None = None
        self._watches = watches
        self._run = run
        self._key: int | None = None
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    async def read(self, query: Callable[[], R], key: tuple[object, ...]) -> R:
        """Run a query. Readers that wait for a query with the same key may share its result."""
        # It is cleared before the query, so that the reader does not miss a later change.
        self._event.clear()
        result: R = await self._run(key, query)
        return result

    async def changed(self, seen: StreamHead, timeout: float | None) -> bool:  # noqa: ASYNC109  it ends the wait, not the reader
        """Wait until the stream may differ from ``seen``; return ``False`` after the timeout, in seconds."""
        self.seen = seen
        if self._key is None:
            self._key = seen.identity[0]
            self._watches.add(self._key, self)
            # No change has woken the reader so far, so it reads once more.
            return True
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return False
        return True

    def wake(self) -> None:
        """It can be called from any thread."""
        if self._event.is_set():
            return
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:
            # The loop was closed before the reader, which can no longer run.
            return

    def close(self) -> None:
        if self._key is not None:
            self._watches.remove(self._key, self)
            self._key = None


class Watches:
    """The watches of readers by the key of their stream. It can be used from any thread."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._by_key: dict[int, set[Watch]] = {}

    def add(self, key: int, watch: Watch) -> None:
        with self._mutex:
            self._by_key.setdefault(key, set()).add(watch)

    def remove(self, key: int, watch: Watch) -> None:
        with self._mutex:
            watches = self._by_key.get(key, set())
            watches.discard(watch)
            if not watches:
                self._by_key.pop(key, None)

    def of(self, key: int) -> list[Watch]:
        with self._mutex:
            return list(self._by_key.get(key, ()))

    def keys(self) -> list[int]:
        with self._mutex:
            return list(self._by_key)

    def wake(self, key: int) -> None:
        for watch in self.of(key):
            watch.wake()

    def wake_all(self) -> None:
        for key in self.keys():
            self.wake(key)
