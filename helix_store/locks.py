"""Locks: leases with fencing tokens, the statements that change them, and the managers.

The SQL of locks: one row per name that is never deleted, and one statement for each call.

An acquisition never waits. On PostgreSQL, contenders try a transaction-scoped advisory lock without waiting,
and skip a lock row that another transaction has locked. The row is locked ``FOR UPDATE``, which conflicts
with the share lock of guarded writes (`NEWEST_TOKEN`). A holder's refresh and release do not conflict with
it. Every condition of a write is on the lock's own row: PostgreSQL checks the condition again after a wait.

Parameters are named: ``tenant``, ``name``, and some of ``owner``, ``term_id``, ``ttl_ms`` and ``key``.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from django.db import connections

from helix_store import conf
from helix_store.catalogue import Table
from helix_store.core import moments, validation
from helix_store.core.limits import MAX_TTL_MS as MAX_TTL_MS
from helix_store.core.moments import as_utc
from helix_store.core.types import Duration, LockInfo
from helix_store.core.validation import Guard, milliseconds
from helix_store.engine.async_twins import async_twin, async_twin_of_an_end
from helix_store.engine.database import Call, Database, DatabaseOperations, new_call_id
from helix_store.engine.memory import MemoryRows, MemoryWorld
from helix_store.engine.statement import CITUS, POSTGRESQL, SQLITE, Clock, Statement, table
from helix_store.engine.uncommitted import UncommittedWrite
from helix_store.exceptions import HelixStoreError, LockLostError, StoreBusy
from helix_store.models import Lock as LockRow
from helix_store.models import Session

ttl_milliseconds: Final = partial(milliseconds, minimum=1, maximum=MAX_TTL_MS)
"""Return a checked TTL, as `milliseconds` does. Raises `InvalidPayload`."""

_FIRST_PAUSE_SECONDS: Final = 0.01
_LONGEST_PAUSE_SECONDS: Final = 0.25
_LONGEST_HOST_NAME: Final = 150
_LONGEST_GAP: Final = 2**31
"""Four billion claims on one row fit into a ``bigint``."""


@dataclass(frozen=True, slots=True)
class Term:
    """One period of holding a name. Its token is larger than the tokens of all earlier terms of the name."""

    fencing_token: int
    expires_at: datetime | str
    """In the form that the database returns, for `core.moments.as_utc`."""
    id: str
    """The random id of the call that has begun the term. A rollback takes a token back, so that the next term
    gets the same one. No other term has this id.
    """


def claim_gap() -> int:
    """Return the distance between the tokens of two claims on a row that has no column for the id of a call.

    A rollback takes a token back. With a random distance, the next claim does not get it again.
    """
    return 1 + secrets.randbelow(_LONGEST_GAP)


def process_owner(nonce: str) -> str:
    """Return the default owner. Host names and process ids may repeat after a reboot; the nonce does not."""
    return f"{socket.gethostname()[:_LONGEST_HOST_NAME]}:{os.getpid()}:{nonce}"


def retry_pauses(timeout_ms: int) -> Iterator[float]:
    """Yield the seconds to pause after each attempt, which grow and are jittered so that waiters spread out.
    The last attempt is at the timeout; its pause is 0.
    """
    deadline = time.monotonic() + timeout_ms / 1000
    longest = _FIRST_PAUSE_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        yield min(left, random.uniform(longest / 2, longest))  # noqa: S311  jitter, not a secret
        longest = min(2 * longest, _LONGEST_PAUSE_SECONDS)
    yield 0.0


_TABLE: Final = table(LockRow)
_ROW: Final = "tenant = %(tenant)s AND name = %(name)s"
_IS_FREE: Final = "(expires_at IS NULL OR expires_at <= {now})"
_IS_HELD: Final = "expires_at > {now}"
_IS_NEW: Final = f"NOT EXISTS (SELECT 1 FROM {_TABLE} WHERE {_ROW})"
_OWN_TERM: Final = f"{_ROW} AND call_id = %(term_id)s AND {_IS_HELD}"

_SESSION: Final = f"""
    SELECT 1 FROM {table(Session)} WHERE tenant = (SELECT %(tenant)s) AND session_id = %(name)s"""
_TRY_SESSION: Final = f"""
    CASE WHEN EXISTS ({_SESSION}) THEN EXISTS ({_SESSION} FOR NO KEY UPDATE SKIP LOCKED) ELSE true END"""
_TRY_ADVISORY: Final = f"pg_catalog.pg_try_advisory_xact_lock(%(key)s # '{_TABLE}'::regclass::oid::bigint)"


_LOCK_ROW: Final = f"SELECT id FROM {_TABLE} WHERE {_ROW} FOR NO KEY UPDATE"


def _by_clock(postgresql: str, sqlite: str | None = None, citus: Sequence[str] = ()) -> Statement:
    """Return a statement with ``{now}`` for each database, and with ``{until}``, the end of a new term."""

    def on(clock: Clock, text: str) -> str:
        return text.format(now=clock.now, until=clock.after("ttl_ms"))

    return Statement(
        postgresql=on(POSTGRESQL, postgresql),
        sqlite=on(SQLITE, sqlite or postgresql),
        citus=[on(CITUS, text) for text in citus or [postgresql]],
    )


def _of_held_row(text: str) -> Statement:
    """Return a write that may wait for the row."""
    return _by_clock(text, citus=(_LOCK_ROW, text))


def _in_order(first: str, *others: str) -> str:
    """Return all conditions combined; PostgreSQL evaluates each one only if those before it are true."""
    return f"CASE WHEN {first} THEN {_in_order(*others)} ELSE false END" if others else first


def _acquire_known(condition: str, row_lock: str = "") -> str:
    return f"""
        UPDATE {_TABLE}
        SET owner = %(owner)s, token = token + 1, acquired_at = {{now}}, expires_at = {{until}},
            call_id = %(call_id)s
        WHERE id = (SELECT id FROM {_TABLE} WHERE {_ROW} AND {condition} {row_lock})
        RETURNING token, expires_at"""


def _acquire_new(condition: str) -> str:
    return f"""
        INSERT INTO {_TABLE} (tenant, name, owner, token, acquired_at, expires_at, call_id)
        SELECT CAST(%(tenant)s AS text), CAST(%(name)s AS text), %(owner)s, 1, {{now}}, {{until}}, %(call_id)s
        WHERE {condition}
        ON CONFLICT (tenant, name) DO NOTHING
        RETURNING token, expires_at"""


def _acquisition(*try_locks: str, condition: str = _IS_FREE) -> tuple[Statement, Statement]:
    """Return statements to try in this order: for a name with a row, and for a new name.

    Each returns the token and the end of the new term, or no row. The update comes first because it refuses a
    held name without writing. ``try_locks`` comes last, because contenders for a held name must not take
    these locks, which last as long as the caller's transaction. On Citus, separate queries try to take them.
    """
    tried = [f"SELECT 1 WHERE {each}" for each in try_locks]
    skip = "FOR UPDATE SKIP LOCKED"
    return (
        _by_clock(
            postgresql=_acquire_known(_in_order(condition, *try_locks), skip),
            sqlite=_acquire_known(condition),
            citus=(
                f"SELECT 1 FROM {_TABLE} WHERE {_ROW} AND {condition}",
                *tried,
                _acquire_known(condition, skip),
            ),
        ),
        _by_clock(
            postgresql=_acquire_new(_in_order(_IS_NEW, *try_locks)),
            sqlite=_acquire_new(_IS_NEW),
            citus=(f"SELECT 1 WHERE {_IS_NEW}", *tried, _acquire_new(_IS_NEW)),
        ),
    )


ACQUIRE: Final = _acquisition(_TRY_ADVISORY)
ACQUIRE_AFTER_SESSION: Final = _acquisition(_TRY_SESSION, _TRY_ADVISORY)
"""`ACQUIRE` as part of a larger transaction: the row of the session with that name is locked first.

Guarded writes lock the session row first and then the lock row. The reverse order could cause a deadlock with
them. No row is returned if the session exists and its row is busy.
"""

TAKE_OVER: Final = _acquisition(_TRY_ADVISORY, condition="true")
TAKE_OVER_AFTER_SESSION: Final = _acquisition(_TRY_SESSION, _TRY_ADVISORY, condition="true")
"""The same for a name that may be held; it returns no row during a guarded write or an acquisition."""

BEGUN: Final = _by_clock(
    f"SELECT token, expires_at FROM {_TABLE} WHERE {_ROW} AND call_id = %(call_id)s AND {_IS_HELD}"
)
"""The term that a call has begun, if it has not ended."""

WAIT_FOR_CONTENDERS: Final = Statement(
    f"SELECT pg_catalog.pg_advisory_xact_lock(%(key)s # '{_TABLE}'::regclass::oid::bigint)"
)
"""Wait for the end of a running acquisition, on PostgreSQL."""

REFRESH: Final = _of_held_row(
    f"UPDATE {_TABLE} SET expires_at = {{until}} WHERE {_OWN_TERM} RETURNING expires_at"
)
RELEASE: Final = _of_held_row(
    f"UPDATE {_TABLE} SET expires_at = NULL, call_id = %(call_id)s WHERE {_OWN_TERM} RETURNING token"
)
WAS_RELEASED: Final = Statement(
    f"SELECT 1 FROM {_TABLE} WHERE {_ROW} AND call_id = %(call_id)s AND expires_at IS NULL"
)
FORCE_RELEASE: Final = _of_held_row(
    f"""
        UPDATE {_TABLE} SET expires_at = NULL, token = token + 1 WHERE {_ROW} AND {_IS_HELD}
        RETURNING token"""
)
NEWEST_TOKEN: Final = Statement(
    postgresql=f"SELECT token FROM {_TABLE} WHERE {_ROW} FOR KEY SHARE",
    sqlite=f"SELECT token FROM {_TABLE} WHERE {_ROW}",
)
IS_LOCKED: Final = _by_clock(f"SELECT 1 FROM {_TABLE} WHERE {_ROW} AND {_IS_HELD}")
ACTIVE: Final = _by_clock(
    f"""
        SELECT name, owner, token, expires_at FROM {_TABLE} WHERE tenant = %(tenant)s AND {_IS_HELD}
        ORDER BY name"""
)


_LEASE: Final = "The lease belongs to a process that writes to the other database. Only the token is copied."

TABLES: Final = (
    Table(
        LockRow,
        record="lock",
        order=("name",),
        parent="tenant",
        not_exported=dict.fromkeys(("owner", "acquired_at", "expires_at"), _LEASE),
        unit="locks",
        session_id="name",
    ),
)


class DatabaseLocks(DatabaseOperations):
    """The database back end. Arguments have already been checked, and no operation waits for a lock.

    A term is over once it has been released, its TTL has passed, or a newer term has begun.
    """

    @cached_property
    def _looks_first(self) -> bool:
        # On SQLite a write waits for every other write, even if it only finds that the name is held.
        return not self.db.has_row_locks

    @property
    def identity(self) -> object:
        return self.db.alias, self.db.tenant

    def acquire(self, name: str, *, owner: str, ttl_ms: int) -> Term | None:
        """Begin a term, or return ``None`` while another term lasts, even one of the same owner."""
        if self._looks_first and self.is_locked(name):
            return None
        return self._begin_term(ACQUIRE_AFTER_SESSION, ACQUIRE, name, owner, ttl_ms)

    def take_over(self, name: str, *, owner: str, ttl_ms: int) -> Term | None:
        """Begin a term that replaces any other, or return ``None`` while a guarded write is running."""
        return self._begin_term(TAKE_OVER_AFTER_SESSION, TAKE_OVER, name, owner, ttl_ms)

    def _begin_term(
        self, joining: Iterable[Statement], alone: Iterable[Statement], name: str, owner: str, ttl_ms: int
    ) -> Term | None:
        """Run ``joining`` in the caller's transaction, else ``alone``, until a statement begins a term."""
        parameters = {
            **self._row(name),
            "owner": owner,
            "ttl_ms": ttl_ms,
            "key": self._advisory_key(name),
        }

        def begin(statements: Iterable[Statement], call: Call) -> Term | None:
            recorded = {**parameters, "call_id": call.id}
            for statement in statements:
                for token, expires_at in call.write(statement, recorded):
                    return Term(token, expires_at, call.id)
            return None

        def begin_again(call: Call) -> Term | None:
            if self.db.is_postgresql:
                self.db.execute(WAIT_FOR_CONTENDERS, {"key": parameters["key"]})
            for token, expires_at in self.db.execute(BEGUN, {**parameters, "call_id": call.id}):
                return Term(token, expires_at, call.id)
            return begin(alone, call)

        return self.db.committed_once(
            lambda call: begin(joining if call.in_transaction else alone, call),
            begin_again,
            operation_id=lambda: name,
        )

    def refresh(self, name: str, term: Term, *, ttl_ms: int) -> datetime | None:
        """Restart the TTL and return the new end of the term, or ``None`` if the term is over."""
        parameters = {**self._row(name), "term_id": term.id, "ttl_ms": ttl_ms}

        def refresh(call: Call) -> datetime | None:
            rows = call.write(REFRESH, parameters)
            return as_utc(rows[0][0]) if rows else None

        return self.db.committed_once(refresh, refresh, operation_id=lambda: name)

    def release(self, name: str, term: Term) -> bool:
        """End this term; return ``False`` if it is already over."""
        parameters = {**self._row(name), "term_id": term.id}

        def release(call: Call) -> bool:
            return bool(call.write(RELEASE, {**parameters, "call_id": call.id}))

        def look_too(call: Call) -> bool:
            return release(call) or bool(self.db.execute(WAS_RELEASED, {**parameters, "call_id": call.id}))

        return self.db.committed_once(release, look_too, operation_id=lambda: name)

    def force_release(self, name: str) -> bool:
        """End the current term and fence out its holder; return ``False`` if the name is not held."""
        # This needs a transaction, because no stored value shows who ended a term.
        return bool(self.db.transaction(lambda: self.db.execute(FORCE_RELEASE, self._row(name))))

    def write_in_block(self) -> UncommittedWrite | None:
        return self.db.write_in_block()

    def is_locked(self, name: str) -> bool:
        return bool(self.db.read(IS_LOCKED, self._row(name)))

    def active(self) -> list[LockInfo]:
        rows = self.db.read(ACTIVE, {"tenant": self.db.tenant})
        return [
            LockInfo(name=name, owner=owner, fencing_token=token, expires_at=as_utc(expires_at))
            for name, owner, token, expires_at in rows
        ]

    def _row(self, name: str) -> dict[str, Any]:
        return {"tenant": self.db.tenant, "name": name}

    def _advisory_key(self, name: str) -> int:
        """Return 64 bits of a digest; colliding names only block each other while one is being acquired."""
        text = f"helix_store lock {len(self.db.tenant)} {self.db.tenant} {name}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def hold_fence(db: Database, name: str, guard: Guard) -> None:
    """Refuse writes of former holders, and prevent a takeover until the transaction ends.

    Takes a share lock on the lock's row. Call this in a transaction, after the session row is locked. Raises
    `FencedOutError`.
    """
    if guard.fencing_token is not None:
        rows = db.execute(NEWEST_TOKEN, {"tenant": db.tenant, "name": name})
        guard.check_fence(rows[0][0] if rows else None)


_RELEASED: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class StoredLock:
    """The newest term of a name, which may be over."""

    owner: str
    token: int
    expires_at: datetime
    deadline: float
    """The end of the term on the monotonic clock, which decides; ``expires_at`` is only reported."""
    term_id: str

    @classmethod
    def until(cls, owner: str, token: int, ttl_ms: int, *, term_id: str | None = None) -> Self:
        """Return a term that begins now, by default a new one."""
        expires_at = moments.now() + timedelta(milliseconds=ttl_ms)
        deadline = time.monotonic() + ttl_ms / 1000
        return cls(owner, token, expires_at, deadline, new_call_id() if term_id is None else term_id)

    @property
    def lasts(self) -> bool:
        return time.monotonic() < self.deadline

    @property
    def was_released(self) -> bool:
        return self.deadline == _RELEASED

    def ended(self) -> Self:
        """Return the term after its release."""
        return replace(self, deadline=_RELEASED)


class LockTable(MemoryRows[StoredLock]):
    """The newest term of each name. It is never deleted, because the tokens of a name only grow."""

    def is_held(self, name: str, token: int | None) -> bool:
        """Return whether the name is held with this token."""
        lock = self.get(name)
        return lock is not None and lock.lasts and lock.token == token

    def check_fence(self, name: str, guard: Guard) -> None:
        """Raise `FencedOutError` for a write with an older token than the newest one of this name."""
        lock = self.get(name)
        guard.check_fence(None if lock is None else lock.token)


class MemoryLocks:
    """The in-memory back end; see `DatabaseLocks` for its operations."""

    def __init__(self, world: MemoryWorld, tenant: str) -> None:
        self.identity: Final = id(world), tenant
        self._world = world
        self._lock = world.lock
        self._stored = world.table(LockTable, tenant)

    def acquire(self, name: str, *, owner: str, ttl_ms: int) -> Term | None:
        with self._lock:
            newest = self._stored.get(name)
            if newest is not None and newest.lasts:
                return None
            return self.take_over(name, owner=owner, ttl_ms=ttl_ms)

    def take_over(self, name: str, *, owner: str, ttl_ms: int) -> Term:
        with self._lock:
            newest = self._stored.get(name)
            token = 1 if newest is None else newest.token + 1
            lock = self._stored[name] = StoredLock.until(owner, token, ttl_ms)
        return Term(lock.token, lock.expires_at, lock.term_id)

    def refresh(self, name: str, term: Term, *, ttl_ms: int) -> datetime | None:
        with self._lock:
            held = self._own_term(name, term)
            if held is None:
                return None
            lock = StoredLock.until(held.owner, held.token, ttl_ms, term_id=held.term_id)
            self._stored[name] = lock
        return lock.expires_at

    def release(self, name: str, term: Term) -> bool:
        with self._lock:
            held = self._own_term(name, term)
            if held is None:
                return False
            self._stored[name] = held.ended()
        return True

    def force_release(self, name: str) -> bool:
        with self._lock:
            lock = self._stored.get(name)
            if lock is None or not lock.lasts:
                return False
            self._stored[name] = replace(lock.ended(), token=lock.token + 1)
        return True

    def is_locked(self, name: str) -> bool:
        lock = self._stored.get(name)
        return lock is not None and lock.lasts

    def active(self) -> list[LockInfo]:
        with self._lock:
            stored = sorted(self._stored.items())
        return [
            LockInfo(name=name, owner=lock.owner, fencing_token=lock.token, expires_at=lock.expires_at)
            for name, lock in stored
            if lock.lasts
        ]

    def write_in_block(self) -> UncommittedWrite | None:
        return self._world.open_transaction

    def _own_term(self, name: str, term: Term) -> StoredLock | None:
        """Return the stored form of a term, or ``None`` if the term is over."""
        lock = self._stored.get(name)
        return lock if lock is not None and lock.lasts and lock.term_id == term.id else None


class NoOpLocks:
    """The back end of a manager whose calls always succeed and lock nothing."""

    _mutex = threading.Lock()
    _newest_token = 0

    @property
    def identity(self) -> object:
        return self

    def acquire(self, name: str, *, owner: str, ttl_ms: int) -> Term:
        with self._mutex:
            # Microseconds since 1970, in all managers of this process.
            token = NoOpLocks._newest_token = max(NoOpLocks._newest_token + 1, time.time_ns() // 1000)
        return Term(token, moments.now() + timedelta(milliseconds=ttl_ms), str(token))

    take_over = acquire

    def refresh(self, name: str, term: Term, *, ttl_ms: int) -> datetime:
        return moments.now() + timedelta(milliseconds=ttl_ms)

    def release(self, name: str, term: Term) -> bool:
        return True

    def write_in_block(self) -> None:
        return None

    def force_release(self, name: str) -> bool:
        return True

    def is_locked(self, name: str) -> bool:
        return False

    def active(self) -> list[LockInfo]:
        return []


LockBackend = DatabaseLocks | MemoryLocks | NoOpLocks

_RULES: Final[dict[str, validation.Rule]] = {"name": validation.identifier, "owner": validation.identifier}
_HELD: Final = "The lock was held until the timeout; try again later."

_BEATS_PER_TERM: Final = 3
_BEATS_PER_TERM_AFTER_A_FAILURE: Final = 10
_LONGEST_STOP_SECONDS: Final = 5.0
"""The longest wait in `stop`, because a refresh may wait for a row that the stopping thread has locked."""

_TRUSTED_PART: Final = 0.9
"""The last tenth of a term is a margin for clocks that differ in speed and for the holder's reaction."""

_NEVER: Final = float("-inf")

_logger = logging.getLogger(__name__)


class LockManagerBase:
    """The lock manager of the contract; subclasses provide the back end.

    Names are unique within ``tenant``. ``default_ttl_ms`` is the TTL for calls without a ``ttl_ms``, by
    default ``HELIX_STORE["DEFAULT_LOCK_TTL_MS"]``.
    """

    def __init__(self, backend: LockBackend, *, tenant: str, default_ttl_ms: Duration | None) -> None:
        self._backend = backend
        self.tenant: Final = tenant
        self._default_ttl_ms = (
            None if default_ttl_ms is None else ttl_milliseconds(default_ttl_ms, "default_ttl_ms")
        )
        self._nonce = uuid.uuid4().hex

    @property
    def default_ttl_ms(self) -> int:
        if self._default_ttl_ms is not None:
            return self._default_ttl_ms
        return conf.default_lock_ttl_ms()

    def acquire(self, name: str, *, ttl_ms: Duration | None = None, owner: str | None = None) -> Lock | None:
        """Acquire a lock for one term, or return ``None`` at once if it is held, even by the same owner.

        It joins the caller's transaction: others see the term only after the commit. Inside the caller's
        transaction, the session row of that name is locked before the lock row, as in every guarded write;
        the call returns ``None`` if that row is busy. It never waits for a holder, a contender or a session.
        Raises `InvalidPayload` and then stores nothing. Not idempotent: a repeat finds the name held.
        """
        return self._begin(self._backend.acquire, name, ttl_ms, owner)

    def take_over(
        self,
        name: str,
        *,
        ttl_ms: Duration | None = None,
        owner: str | None = None,
        timeout_ms: Duration = 10_000,
    ) -> Lock:
        """End the term of the current holder and begin a new one, for a worker that replaces another. This is
        one statement, so no one can acquire the name in between, and later guarded writes of the former
        holder are refused. While a guarded write is running, the call retries after jittered pauses. Raises
        `StoreBusy` if a guarded write is still running after ``timeout_ms``, and `InvalidPayload`. The call
        is not idempotent: a repeat ends the term of the first call.
        """
        for pause in retry_pauses(validation.milliseconds(timeout_ms, "timeout_ms")):
            if lock := self._begin(self._backend.take_over, name, ttl_ms, owner):
                return lock
            time.sleep(pause)
        raise StoreBusy(_HELD)

    def wait_acquire(
        self, name: str, *, timeout_ms: Duration, ttl_ms: Duration | None = None, owner: str | None = None
    ) -> Lock:
        """Acquire a lock; while it is held, retry after jittered pauses.

        Raises `StoreBusy` if it is still held after ``timeout_ms``. Waiters are not served in order.
        """
        for pause in retry_pauses(validation.milliseconds(timeout_ms, "timeout_ms")):
            if lock := self.acquire(name, ttl_ms=ttl_ms, owner=owner):
                return lock
            time.sleep(pause)
        raise StoreBusy(_HELD)

    async def await_acquire(
        self, name: str, *, timeout_ms: Duration, ttl_ms: Duration | None = None, owner: str | None = None
    ) -> Lock:
        """Async version of `wait_acquire`."""
        # This is not an `async_twin`: pauses in the shared thread would block the holder's release.
        for pause in retry_pauses(validation.milliseconds(timeout_ms, "timeout_ms")):
            if lock := await self.aacquire(name, ttl_ms=ttl_ms, owner=owner):
                return lock
            await asyncio.sleep(pause)
        raise StoreBusy(_HELD)

    async def atake_over(
        self,
        name: str,
        *,
        ttl_ms: Duration | None = None,
        owner: str | None = None,
        timeout_ms: Duration = 10_000,
    ) -> Lock:
        """Async version of `take_over`."""
        # This is not an `async_twin`: pauses in the shared thread would block the guarded write.
        for pause in retry_pauses(validation.milliseconds(timeout_ms, "timeout_ms")):
            if lock := await self._abegin(self._backend.take_over, name, ttl_ms, owner):
                return lock
            await asyncio.sleep(pause)
        raise StoreBusy(_HELD)

    def is_locked(self, name: str) -> bool:
        """Return whether the lock is held now."""
        return self._backend.is_locked(validation.identifier(name, "name"))

    def get_active_locks(self) -> list[LockInfo]:
        """Return the locks of the tenant that are currently held, ordered by name."""
        return self._backend.active()

    def force_release(self, name: str) -> bool:
        """End the term of the current holder; return ``False`` if the name is not held. For operators.

        One statement, which joins the caller's transaction. It increments the token, so later guarded writes
        of the former holder are refused. While a guarded write is running, the name cannot be acquired. Safe
        to repeat.
        """
        return self._backend.force_release(validation.identifier(name, "name"))

    def _begin(
        self, begin: Callable[..., Term | None], name: str, ttl_ms: Duration | None, owner: str | None
    ) -> Lock | None:
        owner = process_owner(self._nonce) if owner is None else owner
        validation.arguments(_RULES, name=name, owner=owner)
        ttl_ms = self.default_ttl_ms if ttl_ms is None else ttl_milliseconds(ttl_ms, "ttl_ms")
        requested_at = time.monotonic()
        term = begin(name, owner=owner, ttl_ms=ttl_ms)
        if term is None:
            return None
        return Lock(self._backend, name, owner, term, ttl_ms=ttl_ms, requested_at=requested_at)

    aacquire = async_twin(acquire)
    _abegin = async_twin(_begin)
    ais_locked = async_twin(is_locked)
    aget_active_locks = async_twin(get_active_locks)
    aforce_release = async_twin(force_release)


class KeepAlive(AbstractContextManager["KeepAlive"]):
    """A thread that refreshes one lock; leaving it as a context manager stops it.

    The thread ends when the lock is lost. While the database cannot be reached, it keeps trying, and the
    lock's trust window runs out.
    """

    def __init__(self, refresh: Callable[[], object], ttl_ms: Callable[[], int], *, name: str) -> None:
        self._refresh = refresh
        self._ttl_ms = ttl_ms
        self._name = name
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="helix_store keep-alive", daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        """True while the lock is refreshed: until it is lost or `stop` is called."""
        return not self._stopped.is_set() and self._thread.is_alive()

    def stop(self) -> None:
        """Stop refreshing; the lock stays held for the rest of its term. Safe to repeat."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_LONGEST_STOP_SECONDS)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _beat(self) -> None:
        beats = _BEATS_PER_TERM
        while not self._stopped.wait(self._ttl_ms() / 1000 / beats):
            try:
                self._refresh()
            except LockLostError:
                _logger.warning("The lock %r was lost; its keep-alive ends.", self._name)
                return
            except HelixStoreError as exc:
                _logger.warning("The lock %r was not refreshed (%s); trying again.", self._name, exc.code)
                beats = _BEATS_PER_TERM_AFTER_A_FAILURE
            else:
                beats = _BEATS_PER_TERM
            finally:
                # If each lock kept a connection open between two refreshes, they would exhaust the server.
                connections.close_all()


def trust_ends(requested_at: float, ttl_ms: int) -> float:
    """Return the end of the trust window in seconds, on the clock of ``requested_at``.

    The window starts before the request is sent. The database starts the term later than that, so the term
    also ends later, even after a slow reply.
    """
    return requested_at + _TRUSTED_PART * ttl_ms / 1000


class _Window(NamedTuple):
    """What a successful request has set, and the trust window that began with it."""

    ends: float
    ttl_ms: int
    expires_at: datetime | str
    request: UncommittedWrite | None
    """The request, if its transaction was still open."""

    @property
    def is_final(self) -> bool:
        """True if no rollback can take the request back."""
        return self.request is None or self.request.is_committed


class _Refreshed(NamedTuple):
    """The new end of a term, and the TTL of the newest request before that was not rolled back."""

    expires_at: datetime
    ttl_before: int


class Lock(AbstractContextManager["Lock"], AbstractAsyncContextManager["Lock"]):
    """An acquired lock; leaving it as a context manager releases it.

    Pass ``fencing_token`` to every write that the lock protects: the token stops a former holder that does
    not know that its term is over. Threads may share a lock. Source: the lock manager of
    `@helix-agents/store-postgres`.

    Example::

        with store.locks.wait_acquire("trip", timeout_ms=1_000) as lock, lock.keep_alive():
            session = store.session("trip", fencing_token=lock.fencing_token)
            session.say({"role": "assistant", "content": "The train leaves at ten."})
    """

    def __init__(
        self, backend: LockBackend, name: str, owner: str, term: Term, *, ttl_ms: int, requested_at: float
    ) -> None:
        self._backend = backend
        self._term = term
        self.name: Final = name
        self.owner: Final = owner
        self.fencing_token: Final = term.fencing_token
        ends = trust_ends(requested_at, ttl_ms)
        # The newest window comes last. Those before it apply if the caller rolls its request back.
        self._windows: tuple[_Window, ...] = (
            _Window(ends, ttl_ms, term.expires_at, backend.write_in_block()),
        )
        self._changes = 0
        self._mutex = threading.Lock()
        self._keep_alive: KeepAlive | None = None

    def __repr__(self) -> str:
        return f"<Lock {self.name!r} token {self.fencing_token} of {self.owner!r}>"

    @property
    def expires_at(self) -> datetime:
        """The end of the term on the database's clock; a worker should check `is_trusted` instead."""
        return as_utc(self._window.expires_at)

    @property
    def ttl_ms(self) -> int:
        """The TTL of the last successful request that was not rolled back, in milliseconds."""
        return self._window.ttl_ms

    @property
    def requested_at(self) -> datetime:
        """The time of that request on the database's clock."""
        window = self._window
        return as_utc(window.expires_at) - timedelta(milliseconds=window.ttl_ms)

    def is_trusted(self) -> bool:
        """Return whether the term is certain to be active, without querying the database. It is true until
        nine tenths of the TTL have passed on this process's monotonic clock since the last successful request
        was sent. A request that the caller's transaction has rolled back does not count. It is always false
        after `release` or a `LockLostError`, and after the acquisition was rolled back.
        """
        return time.monotonic() < self._window.ends

    @property
    def _window(self) -> _Window:
        """The newest window whose request was not rolled back. If all were, trust has ended."""
        for window in reversed(self._windows):
            if window.request is None or not window.request.is_lost:
                return window
        return self._windows[0]._replace(ends=_NEVER)

    def refresh(self, ttl_ms: Duration | None = None) -> datetime:
        """Restart the TTL, or start a different one, and return the new end of the term.

        One statement, which joins the caller's transaction: a rollback undoes the new end and the new TTL,
        and trust ends as if you had not called this. Raises `LockLostError` if the term was released, has
        expired, was taken over, or was acquired in a transaction that was rolled back. Safe to repeat.
        """
        if ttl_ms is not None:
            return self._refreshed(ttl_milliseconds(ttl_ms, "ttl_ms")).expires_at
        sent = self.ttl_ms
        refreshed = self._refreshed(sent)
        if refreshed.ttl_before != sent:
            # It has waited for a transaction that has changed the TTL, or was rolled back.
            refreshed = self._refreshed(refreshed.ttl_before)
        return refreshed.expires_at

    def _refreshed(self, ttl_ms: int) -> _Refreshed:
        changes, requested_at = self._changes, time.monotonic()
        expires_at = self._backend.refresh(self.name, self._term, ttl_ms=ttl_ms)
        if expires_at is None:
            self._end_trust()
            raise LockLostError(name=self.name, fencing_token=self.fencing_token)
        request = self._backend.write_in_block()
        with self._mutex:
            ends, ttl_before = trust_ends(requested_at, ttl_ms), self.ttl_ms
            if self._changes != changes:
                # Another request was answered in the meantime. The order in which the database ran them is
                # unknown.
                ends = min(ends, self._window.ends)
            self._changes += 1
            self._windows = _needed((*self._windows, _Window(ends, ttl_ms, expires_at, request)))
        return _Refreshed(expires_at, ttl_before)

    def release(self) -> bool:
        """End the term and its keep-alive; return ``False`` if the term is already over.

        One statement, which joins the caller's transaction. Safe to repeat: a former holder cannot release
        anything.
        """
        if self._keep_alive is not None:
            self._keep_alive.stop()
        self._end_trust()
        return self._backend.release(self.name, self._term)

    def keep_alive(self) -> KeepAlive:
        """Refresh the lock from a thread until `release` is called or the returned keep-alive is stopped.

        A second call returns the running keep-alive. The thread has a separate connection: start it after
        the commit of the transaction in which the lock was acquired.
        """
        with self._mutex:
            if self._keep_alive is None or not self._keep_alive.is_running():
                self._keep_alive = KeepAlive(self.refresh, lambda: self.ttl_ms, name=self.name)
            return self._keep_alive

    arefresh = async_twin(refresh)
    arelease = async_twin_of_an_end(release)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.arelease()

    def _end_trust(self) -> None:
        with self._mutex:
            self._changes += 1
            self._windows = (self._window._replace(ends=_NEVER, request=None),)


def _needed(windows: tuple[_Window, ...]) -> tuple[_Window, ...]:
    """Return the newest window that no rollback can take back, and those after it; if there is none, all."""
    final = (number for number in reversed(range(len(windows))) if windows[number].is_final)
    return windows[next(final, 0) :]


class DatabaseLockManager(LockManagerBase):
    """Locks in a Django database, shared by every process that uses it.

    Pass the ``using`` and ``tenant`` of the stores that the locks protect: a guarded write compares its token
    with the lock in that database and tenant. Each name has one row, which is never deleted, so tokens only
    grow. Works through PgBouncer in transaction mode.

    Inside an ``atomic()`` block, `acquire` first locks the row of the session with the same name, without
    waiting. It returns ``None`` while another transaction writes to that session, just as for a held name.

    Example::

        locks = DatabaseLockManager()
        with locks.wait_acquire("trip", timeout_ms=1_000) as lock:
            store.session("trip", fencing_token=lock.fencing_token).say({"role": "user", "content": "Hello?"})
    """

    def __init__(
        self, using: str | None = None, *, tenant: str = "", default_ttl_ms: Duration | None = None
    ) -> None:
        conf.require_usable_prefix()
        db = Database(using, validation.tenant(tenant), None)
        super().__init__(DatabaseLocks(db), tenant=db.tenant, default_ttl_ms=default_ttl_ms)


class InMemoryLockManager(LockManagerBase):
    """Locks in one process, with the same contract as locks in the database; for tests and experiments.

    An `InMemoryStateStore` with the same ``world`` checks the tokens of these locks.

    Example::

        locks = InMemoryLockManager()
        with locks.acquire("trip"):
            print(locks.is_locked("trip"))
    """

    def __init__(
        self, *, tenant: str = "", world: MemoryWorld | None = None, default_ttl_ms: Duration | None = None
    ) -> None:
        tenant = validation.tenant(tenant)
        self._locks = MemoryLocks(MemoryWorld() if world is None else world, tenant)
        super().__init__(self._locks, tenant=tenant, default_ttl_ms=default_ttl_ms)

    def clear(self) -> None:
        """Release every lock of the tenant; tokens keep growing. Safe to repeat."""
        for lock in self.get_active_locks():
            self.force_release(lock.name)


def are_same_locks(one: object, other: object) -> bool:
    """Return whether two managers work on the same locks."""
    return (
        isinstance(one, LockManagerBase)
        and isinstance(other, LockManagerBase)
        and one._backend.identity == other._backend.identity
    )


class NoOpLockManager(LockManagerBase):
    """A manager whose calls always succeed and lock nothing; for a single worker, and for tests.

    Arguments are checked. Tokens grow with the clock of this process, so they are larger than the tokens of
    any real locks that a store knows.

    Example::

        with session.turn(locks=NoOpLockManager()) as turn, turn.step() as step:
            step.say({"role": "assistant", "content": "Only this worker is running."})
    """

    def __init__(self, *, tenant: str = "", default_ttl_ms: Duration | None = None) -> None:
        super().__init__(NoOpLocks(), tenant=validation.tenant(tenant), default_ttl_ms=default_ttl_ms)
