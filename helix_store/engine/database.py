"""Access to a database: every statement of the app goes through `Database`. The methods differ in four
points: whether they map the driver's errors, whether they release the connection afterwards, which
transaction the statement joins, and whether it is prepared.

============== ====== ======== ===================================================== ========
method         errors released transaction                                           prepared
============== ====== ======== ===================================================== ========
`read`         yes    yes      the caller's, if one is open                          yes
`write`        yes    yes      the statement's own; a savepoint in the caller's      yes
`query`        yes    yes      the caller's, if one is open; for ORM reads           no
`transaction`  yes    yes      its own, repeated if the database aborts it           no
`snapshot`     yes    yes      its own for reads, or the caller's, if one is open    no
`rolled_back`  yes    yes      its own; a savepoint in the caller's                  no
`execute`      no     no       the open one of another method in this table          no
============== ====== ======== ===================================================== ========

Statements are prepared on PostgreSQL, unless ``HELIX_STORE["FAST_PATHS"]`` is False. On Citus (see
`engine.statement`), only reads are prepared, and a write that has a form for Citus is a transaction.

A call takes a connection when it enters the engine, and releases it when it ends. A connection belongs to a
thread, so a call cannot join the transaction of a caller that waits for it in another thread. If it ran, it
would commit even if the caller rolls back, or wait forever for rows that the caller has locked.

Django closes a thread's connections when a request ends there. A thread of an agent framework's executor,
or one that the project started, never ends a request, so it would keep its connection forever.

Some calls would wait forever for a lock of a caller that itself waits for the call. A caller in an
``atomic()`` block may wait for another thread, as `graph.invoke` does. If that thread waits for a row that
the block has locked, neither ever continues, and the database cannot see why. The context of the call
usually names the block (see `require_thread_of_caller`), but some frameworks make calls with an empty
context. So a statement that has waited for a while, in a thread that Django does not manage, looks for the
open blocks of the other threads of this process. If the thread of such a block does nothing but wait, the
call is refused.

On PostgreSQL, psycopg already wakes up every tenth of a second while it waits, so this costs no statement.
It asks the server over another connection which transactions the statement waits for, and cancels it. On
SQLite, a call waits in shorter turns while another thread of this process has a block open.
"""

from __future__ import annotations

import functools
import hashlib
import random
import secrets
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from threading import current_thread, main_thread
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary, ref

from django.apps import apps
from django.core.signals import request_finished, request_started
from django.db import Error, connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store import conf
from helix_store.conf import TENANT_VARIABLE
from helix_store.core.ids import after_fork
from helix_store.core.limits import Limits
from helix_store.core.moments import as_sqlite_text, as_utc
from helix_store.engine.errors import (
    TENANT_MOVED,
    is_retryable_transaction,
    is_serialization_failure,
    mapped_errors,
    raise_mapped,
)
from helix_store.engine.statement import (
    CALL_ID_BYTES,
    END_SESSION,
    NO_ANSWER,
    NOW,
    STAY_ON_NODE,
    WAIT_BRIEFLY,
    Statement,
    patient_pauses,
    run_in_order,
    table,
)
from helix_store.engine.threads import frames_of, opened_connections, used_aliases, waits_in
from helix_store.exceptions import (
    HelixStoreError,
    OutcomeUnknown,
    OutsideTransaction,
    StoreBusy,
    StoreUnavailable,
    TenantMoved,
)
from helix_store.models import Session

if TYPE_CHECKING:
    from helix_store.engine.postgres import WatchedTransaction

__all__ = ["Call", "Database", "DatabaseOperations", "Parameters", "Rows", "reads", "writes"]


def alias_of(tenant: str) -> str:
    """Return the database of a tenant: the one to which the routers send writes with the hint ``tenant``."""
    return router.db_for_write(Session, tenant=tenant)


def app_aliases() -> list[str]:
    """Return the databases that the routers let the app migrate, in the order of ``DATABASES``."""
    return [alias for alias in connections if router.allow_migrate_model(alias, Session)]


def app_connections(vendor: str, only: str | None = None) -> list[BaseDatabaseWrapper]:
    """Return connections to the databases that may contain the app's tables, or to one such database."""
    return [
        connections[alias]
        for alias in app_aliases()
        if connections[alias].vendor == vendor and only in (None, alias)
    ]


# This is not a context variable: a thread that copies the context of a request does not serve that request.
_requests: Final = threading.local()
_opened_by_calls: Final[WeakKeyDictionary[BaseDatabaseWrapper, ref[Any]]] = WeakKeyDictionary()
"""The driver's connection that a call has opened, until the call ends."""
is_kept_open: ContextVar[bool] = ContextVar("helix_store_connection_is_kept_open", default=False)


class _Block(NamedTuple):
    """The outermost ``atomic()`` of a connection, with weak references because contexts may live long."""

    connection: ref[Any]
    block: ref[Any]

    def is_open(self) -> bool:
        connection, block = self.connection(), self.block()
        return connection is not None and block is not None and outermost_block(connection) is block


# Executors of agent frameworks copy the context of the thread that waits for them.
open_blocks: Final[ContextVar[Mapping[str, _Block]]] = ContextVar(
    "helix_store_open_blocks",
    default=MappingProxyType({}),
)


def require_thread_of_caller(connection: BaseDatabaseWrapper) -> None:
    """Raise `OutsideTransaction` if a caller has a transaction of this database open in another thread.

    A caller is recognised by its context: through a call in its block, or through `note_transactions_of`.
    """
    blocks = open_blocks.get()
    known = blocks.get(connection.alias)
    if known is not None and known.is_open():
        if known.connection() is not connection:
            raise OutsideTransaction
    elif connection.in_atomic_block:
        _note(connection)
    elif known is not None:
        open_blocks.set({alias: block for alias, block in blocks.items() if block is not known})


def note_transactions_of(threads: Collection[int]) -> None:
    """Record the open transactions of threads that wait for this context; ``threads`` are thread idents."""
    for connection in opened_connections():
        if connection.in_atomic_block and connection._thread_ident in threads:  # type: ignore[attr-defined]
            _note(connection)


def _note(connection: BaseDatabaseWrapper) -> None:
    block = outermost_block(connection)
    if block is not None:
        open_blocks.set({**open_blocks.get(), connection.alias: _Block(ref(connection), ref(block))})


def outermost_block(connection: Any) -> object | None:
    """Return the outermost ``atomic()`` block that is open on a connection."""
    # Another thread may end the block in the meantime.
    return next(iter(connection.atomic_blocks), None)


def release(connection: BaseDatabaseWrapper) -> None:
    """Close what the end of a request would close, in a thread that Django does not manage.

    As at the end of a request, this honours ``CONN_MAX_AGE`` and returns a pooled connection. A connection
    with an open transaction stays open: it belongs to the caller, in an ``atomic()`` block or with autocommit
    off.

    The main thread returns a pooled connection that a call of the store has opened, because it may run for
    hours, and a small pool cannot spare the connection.
    """
    if connection.in_atomic_block or is_kept_open.get():
        return
    if is_managed():
        _return_what_calls_opened(connection)
        return
    if connection.connection is None or connection.autocommit:
        connection.close_if_unusable_or_obsolete()


def note_opened_by_call(connection: BaseDatabaseWrapper) -> None:
    """Record that a call of the store, not other code in its thread, has taken a pooled connection."""
    if connection.settings_dict["OPTIONS"].get("pool"):
        _opened_by_calls[connection] = ref(connection.connection)


def _return_what_calls_opened(connection: BaseDatabaseWrapper) -> None:
    if not connection.settings_dict["OPTIONS"].get("pool"):
        return
    opened = _opened_by_calls.pop(connection, None)
    is_ours = opened is not None and opened() is connection.connection
    if is_ours and connection.autocommit and not getattr(_requests, "is_served", False):
        return_to_pool(connection)


@contextmanager
def keep_open() -> Iterator[None]:
    """Leave connections open in a ``with`` block, because the caller of the thread releases them."""
    token = is_kept_open.set(True)
    try:
        yield
    finally:
        is_kept_open.reset(token)


@contextmanager
def return_to_pool_after() -> Iterator[None]:
    """Leave connections open in a ``with`` block, then return the pooled ones that calls in it have opened.

    Use this for one of Django's threads outside of requests, where nothing else closes its connections.
    """
    try:
        with keep_open():
            yield
    finally:
        for connection in connections.all(initialized_only=True):
            if not connection.in_atomic_block:
                _return_what_calls_opened(connection)


@contextmanager
def release_once(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """`release` the connection once after several calls instead of after each one."""
    try:
        with keep_open():
            yield
    finally:
        release(connection)


def return_to_pool(connection: BaseDatabaseWrapper) -> None:
    """Return a pooled connection; keep any other one open.

    Use this for a background thread between two uses: it must not occupy a place in a small pool while it
    waits.
    """
    if connection.settings_dict["OPTIONS"].get("pool"):
        connection.close()


def watch_requests() -> None:
    """Track which threads serve a Django request; called once, when the app is ready."""
    request_started.connect(_begin_request, dispatch_uid="helix_store.connections")
    request_finished.connect(_end_request, dispatch_uid="helix_store.connections")


def _begin_request(**kwargs: Any) -> None:
    _requests.is_served = True


def _end_request(**kwargs: Any) -> None:
    _requests.is_served = False


def is_managed() -> bool:
    """Return whether the end of a request or of the process releases the connections of this thread."""
    if threading.current_thread() is threading.main_thread():
        return True
    return getattr(_requests, "is_served", False)


_IDLE_SECONDS: Final = 0.3
"""The time for which the thread of a block must have done nothing but wait."""
_LONGEST_SECONDS: Final = 5.0
"""The time after which a call stops waiting for a block of this process, whatever its thread does."""
_SERVER_SECONDS: Final = 5
_OWN_THREADS: Final = "helix_store "
"""The names of the store's background threads begin with this. No caller waits for them."""
_HELD_HERE: Final = (
    "Another thread of this process has held the lock for several seconds in an atomic() block. If it waits "
    "for this call, leave the block first, or make the call in its thread; otherwise try again shortly."
)
# A statement may wait behind another one that waits for the same row. Through a pooler, the server does not
# know the number of the session; then any ungranted lock counts.
_BLOCKERS: Final = """
    WITH RECURSIVE blockers(pid) AS (
        SELECT unnest(pg_catalog.pg_blocking_pids(%(waiting)s))
        UNION SELECT unnest(pg_catalog.pg_blocking_pids(pid)) FROM blockers
    )
    SELECT
        EXISTS (SELECT 1 FROM pg_catalog.pg_stat_activity WHERE pid = %(waiting)s),
        EXISTS (SELECT 1 FROM blockers WHERE pid = ANY(%(holding)s)),
        EXISTS (SELECT 1 FROM pg_catalog.pg_locks WHERE NOT granted)"""


class _Refused(NamedTuple):
    """The block because of which a thread was refused, with weak references: none of them is kept alive."""

    connection: Any
    block: Any
    thread: Any
    """The thread, because the system gives its ident to another one after its end. None for a pool."""

    def is_open(self) -> bool:
        connection, block = self.connection(), self.block()
        if self.thread is not None:
            thread = self.thread()
            if thread is None or not thread.is_alive():
                return False
        return connection is not None and block is not None and outermost_block(connection) is block


refused_threads: Final[dict[int | str, _Refused]] = {}
"""Threads, by their ident, that waited for a block, and pools that work for the caller of one, by their name.
Their next calls need not wait: see `refuse_again`.
"""
after_fork(refused_threads.clear)


def remember_refused(holder: BaseDatabaseWrapper | None) -> None:
    """Remember that this thread works for the thread that has this connection, while its block is open."""
    block = None if holder is None else outermost_block(holder)
    if holder is not None and block is not None:
        thread = threading.current_thread()
        refused_threads[threading.get_ident()] = _Refused(ref(holder), ref(block), ref(thread))


def remember_pool(holder: BaseDatabaseWrapper | None) -> None:
    """Remember that the pool of this thread works for the thread that has this connection.

    The context of a call has shown it. The pool's other calls may have an empty context, and would commit
    even if the caller rolls back.
    """
    pool = _pool_of_thread()
    block = None if holder is None else outermost_block(holder)
    if holder is not None and block is not None and pool:
        refused_threads[pool] = _Refused(ref(holder), ref(block), None)


def _pool_of_thread() -> str:
    """Return the name of the executor whose thread this is, if the name is that of no other executor."""
    pool, _, _ = threading.current_thread().name.rpartition("_")
    return pool if pool.startswith("ThreadPoolExecutor-") else ""


def refuse_again(connection: BaseDatabaseWrapper) -> None:
    """Raise `OutsideTransaction` if this thread was refused because of a block that is still waiting."""
    thread = threading.get_ident()
    for key in (_pool_of_thread(), thread):
        refused = refused_threads.get(key)
        if refused is None or not refused.is_open():
            continue
        holder = refused.connection()
        is_other = holder is not connection and holder.alias == connection.alias
        if is_other and (type(key) is str or _waits_at(holder) is not None):
            raise OutsideTransaction
    for ident, each in list(refused_threads.items()):
        if not each.is_open():
            refused_threads.pop(ident, None)


def blocks_elsewhere(connection: BaseDatabaseWrapper) -> list[BaseDatabaseWrapper]:
    """Return the connections to the same database on which other threads have a block open."""
    thread = threading.get_ident()
    return [
        each
        for each in opened_connections()
        if each.in_atomic_block and each.alias == connection.alias and _thread_of(each) != thread
    ]


def _thread_of(connection: Any) -> int:
    return connection._thread_ident  # type: ignore[no-any-return]


def _waits_at(holder: BaseDatabaseWrapper) -> tuple[int, int] | None:
    """Return a mark of the place where the thread of a connection waits for another thread, or ``None``.

    A mark that is the same a while later means that the thread has done nothing in between.
    """
    frames = frames_of(_thread_of(holder))
    if not frames:
        # The thread has ended, and nothing ends its block.
        return 0, 0
    innermost = frames[0]
    return (id(innermost), innermost.f_lasti) if waits_in(innermost) else None


class Wait:
    """A call in a thread that Django does not manage, which must not wait for its own caller."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection: Any = connection
        self._began: float | None = None
        self._marks: dict[int, tuple[tuple[int, int], float]] = {}

    def _idle_holders(self, holders: list[BaseDatabaseWrapper], now: float) -> list[BaseDatabaseWrapper]:
        """Return the holders that have done nothing but wait since an earlier call."""
        idle, marks = [], {}
        for holder in holders:
            mark = _waits_at(holder)
            if mark is None:
                continue
            known, since = self._marks.get(id(holder), (mark, now))
            marks[id(holder)] = (mark, since if known == mark else now)
            if known == mark and now - since >= _IDLE_SECONDS:
                idle.append(holder)
        self._marks = marks
        return idle


# --- PostgreSQL --------------------------------------------------------------------------------------


class _WaitOnServer(Wait):
    """A block in which psycopg's waits on one connection are watched."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        super().__init__(connection)
        self._native = connection.connection
        self._refusal: HelixStoreError | None = None

    def __enter__(self) -> None:
        native = self._native
        wait = type(native).wait

        def watched(statement: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
            return wait(native, _ticking(statement, self._tick), *args, **kwargs)

        native.wait = watched

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Otherwise the connection would refer to itself.
        del self._native.wait
        if self._refusal is not None and isinstance(error, Error | HelixStoreError):
            raise self._refusal from error

    def _tick(self, began: float) -> None:
        """Called every tenth of a second while a statement, which ``began`` at this time, waits."""
        now = time.monotonic()
        if self._refusal is not None:
            return
        if began != self._began:
            self._began, self._marks = began, {}
        holders = blocks_elsewhere(self._connection)
        idle = self._idle_holders(holders, now)
        is_late = now - began >= _LONGEST_SECONDS
        blocking = idle or (holders if is_late else [])
        if not blocking or not self._is_blocked_by(blocking):
            return
        self._refusal = OutsideTransaction() if idle else StoreBusy(_HELD_HERE, database_code="57014")
        if idle:
            remember_refused(idle[0])
        with suppress(self._connection.Database.Error):
            self._native.cancel_safe(timeout=_SERVER_SECONDS)

    def _is_blocked_by(self, holders: list[BaseDatabaseWrapper]) -> bool:
        """Ask the server over another connection; assume that it is blocked if the server cannot tell."""
        if conf.is_citus(self._connection.settings_dict):
            return True
        params = {**self._connection.get_connection_params(), "connect_timeout": _SERVER_SECONDS}
        holding = [
            pgconn.backend_pid for each in holders if (pgconn := getattr(each.connection, "pgconn", None))
        ]
        waiting = self._native.pgconn.backend_pid
        try:
            with self._connection.Database.connect(**params) as other:
                row = other.execute(_BLOCKERS, {"waiting": waiting, "holding": holding}).fetchone()
        except self._connection.Database.Error:
            return True
        is_known, is_blocked, waits_anybody = row
        return bool(is_blocked or (not is_known and waits_anybody))


def _ticking(statement: Generator[Any, Any, Any], tick: Callable[[float], None]) -> Generator[Any, Any, Any]:
    """Run one of psycopg's generators, and call ``tick`` whenever psycopg wakes up without an answer."""
    began = time.monotonic()
    try:
        wanted = next(statement)
        while True:
            ready = yield wanted
            if not ready:
                tick(began)
            wanted = statement.send(ready)
    except StopIteration as end:
        return end.value


UNWATCHED: Final = nullcontext()
"""The wait of a main thread, which works for no other thread's block. Hot calls check this themselves."""


def watched_wait(connection: BaseDatabaseWrapper) -> AbstractContextManager[object]:
    """Return a context in which a statement on PostgreSQL never waits for the caller of this thread.

    Enter it with an open connection. Raises `OutsideTransaction`, or `StoreBusy` after several seconds.
    """
    if connection.vendor != "postgresql" or _may_wait():
        return UNWATCHED
    native = connection.connection
    if not hasattr(native, "cancel_safe") or "wait" in vars(native):
        # This is another driver, or an enclosing block watches the connection.
        return UNWATCHED
    return _WaitOnServer(connection)


def _may_wait() -> bool:
    return is_managed() or threading.current_thread().name.startswith(_OWN_THREADS)


# --- SQLite ------------------------------------------------------------------------------------------


class ShortWaits(Wait):
    """The attempts of a transaction on SQLite while another thread of this process has a block open.

    SQLite reports nothing while it waits for a lock, so that each attempt waits only for a short time.
    """

    def __enter__(self) -> None:
        try:
            self._connection.ensure_connection()
        except Exception as exc:
            raise_mapped(self._connection, exc)
            raise
        self._attempt_began = time.monotonic()
        self._began = self._began or self._attempt_began
        self._idle_holders(blocks_elsewhere(self._connection), self._attempt_began)
        self._wait_up_to(round(_IDLE_SECONDS * 1000))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wait_up_to(round(self._longest * 1000))

    @property
    def _longest(self) -> float:
        return float(self._connection.settings_dict["OPTIONS"].get("timeout", 5.0))

    def _wait_up_to(self, milliseconds: int) -> None:
        native = self._connection.connection
        if native is not None:
            native.execute(f"PRAGMA busy_timeout = {milliseconds}")

    def may_go_on(self, busy: StoreBusy) -> bool:
        """Return whether to try again because less time has passed than SQLite would have waited.

        Raises `OutsideTransaction` if the thread of an open block has done nothing but wait.
        """
        now = time.monotonic()
        if now - self._attempt_began < _IDLE_SECONDS:
            # This was no wait: the transaction had read something that has changed since.
            return False
        if idle := self._idle_holders(blocks_elsewhere(self._connection), now):
            remember_refused(idle[0])
            raise OutsideTransaction from busy
        return now - (self._began or now) < min(self._longest, _LONGEST_SECONDS)


def short_waits(connection: BaseDatabaseWrapper) -> ShortWaits | None:
    """Return how a call waits on SQLite, or ``None`` if it may wait as long as SQLite does."""
    if connection.vendor != "sqlite" or connection.in_atomic_block or _may_wait():
        return None
    return ShortWaits(connection) if blocks_elsewhere(connection) else None


R = TypeVar("R")

Rows = list[tuple[Any, ...]]
Parameters = Mapping[str, Any] | Sequence[Any]

_UNCHANGED: Final = nullcontext()


class Call(NamedTuple):
    """A call that has entered a database, with the connection of its thread. Its statements enter no more."""

    database: Database
    connection: BaseDatabaseWrapper
    features: conf.Features
    id: str = ""
    """A random id by which a write can find its own result after a lost reply (see `engine.statement`)."""

    @property
    def in_transaction(self) -> bool:
        """True if a write becomes part of the caller's transaction."""
        return _is_in_transaction(self.connection)

    @property
    def has_fast_writes(self) -> bool:
        """True if a write may be one statement with all of its conditions. This needs PostgreSQL, where a
        statement commits alone or is part of an ``atomic()`` block.
        """
        connection = self.connection
        if not self.features.has_fast_writes:
            return False
        if connection.in_atomic_block:
            return True
        _open(connection)
        return bool(connection.autocommit)

    def read(self, statement: Statement, parameters: Parameters) -> Rows:
        """Run a statement that only reads, and return its rows."""
        connection, features = self.connection, self.features
        if features.tells_tenant:
            execute = functools.partial(self.database.execute, statement, parameters)
            return self.database.transaction(execute, only_reads=True)
        is_prepared = features.has_fast_reads and not (features.is_citus and statement.citus)
        try:
            connect_first(connection)
            return (_run_prepared if is_prepared else run)(connection, statement, parameters)
        except Exception as exc:
            raise_mapped(connection, exc)
            raise
        finally:
            release_unless_kept(connection)

    def write(self, statement: Statement, parameters: Parameters) -> Rows:
        """Run a statement that writes, and return its rows.

        Outside a block the statement is a whole transaction, which saves the round trips of ``BEGIN`` and
        ``COMMIT``. Inside the caller's block it is a savepoint: the caller owns the commit and any retry.
        """
        connection, features = self.connection, self.features
        if features.tells_tenant or (features.is_citus and statement.citus):
            return self.database.transaction(lambda: self.database.execute(statement, parameters))
        is_alone = False
        try:
            if not connection.in_atomic_block:
                connect(connection)
                is_alone = connection.autocommit
            if (
                is_alone
                and connection.vendor == "sqlite"
                and current_thread() is not main_thread()
                and short_waits(connection) is not None
            ):
                return self.database.transaction(lambda: run(connection, statement, parameters))
            if is_alone or (connection.in_atomic_block and features.has_fast_writes):
                with UNWATCHED if current_thread() is main_thread() else watched_wait(connection):
                    return (_run_prepared if features.has_fast_writes else run)(
                        connection, statement, parameters
                    )
        except Exception as exc:
            if not (is_alone and is_serialization_failure(exc)):
                # Once the connection is open, a connection error does not reveal whether the statement was
                # committed.
                raise_mapped(connection, exc, committing=is_alone, is_single_statement=is_alone)
                raise
        finally:
            release_unless_kept(connection)
        return self.database.transaction(lambda: run(connection, statement, parameters))

    def try_write(self, statement: Statement, parameters: Parameters) -> Rows:
        """Call `write` right after `has_fast_writes`; return no rows if another transaction made it fail."""
        connection = self.connection
        is_alone = not connection.in_atomic_block
        try:
            with UNWATCHED if current_thread() is main_thread() else watched_wait(connection):
                return _run_prepared(connection, statement, parameters)
        except Exception as exc:
            if is_alone and is_retryable_transaction(exc):
                return []
            raise_mapped(connection, exc, committing=is_alone, is_single_statement=is_alone)
            raise
        finally:
            release_unless_kept(connection)


@dataclass(frozen=True, slots=True)
class Database:
    """The database of a store: an alias, a tenant and the limits, which by default are read from the settings
    at each use. Without an alias, the project's routers are asked once per call, with the hint ``tenant``, so
    that all statements of a call use one database even if the routers change their answer.
    """

    using: str | None
    tenant: str
    given_limits: Limits | None = None
    _placed: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def alias(self) -> str:
        if self.using:
            return self.using
        # Reads go to the same database as writes, because decisions based on a replica would be stale.
        placed = self._placed.get(self.tenant)
        return placed or self._placed.setdefault(self.tenant, alias_of(self.tenant))

    @property
    def connection(self) -> BaseDatabaseWrapper:
        """The connection of this thread, for a call of a store. Raises `OutsideTransaction`."""
        alias = self.alias
        connection = connections[alias]
        used_aliases.add(alias)
        if connection.in_atomic_block or alias in open_blocks.get():
            try:
                require_thread_of_caller(connection)
            except OutsideTransaction:
                remember_pool(open_blocks.get()[alias].connection())
                raise
        elif refused_threads:
            refuse_again(connection)
        return connection

    @property
    def limits(self) -> Limits:
        return conf.limits(self.given_limits)

    @property
    def is_postgresql(self) -> bool:
        """For differences that a `Statement` cannot express: arrays as parameters, and NOTIFY."""
        return connections[self.alias].vendor == "postgresql"

    @property
    def in_transaction(self) -> bool:
        """True if a write becomes part of a transaction of the caller."""
        return _is_in_transaction(connections[self.alias])

    def enter(self) -> Call:
        """Begin a call. Raises `OutsideTransaction`."""
        connection = self.connection
        is_postgresql = connection.vendor == "postgresql"
        return Call(
            self, connection, conf.features(connection.settings_dict) if is_postgresql else conf.PORTABLE
        )

    def read(self, statement: Statement, parameters: Parameters) -> Rows:
        """Run a statement that only reads, and return its rows."""
        return self.enter().read(statement, parameters)

    def write(self, statement: Statement, parameters: Parameters) -> Rows:
        """Run a statement that writes, in a call of its own, as `Call.write` does."""
        return self.enter().write(statement, parameters)

    def write_once(
        self,
        statement: Statement,
        parameters: Mapping[str, Any],
        read: Callable[[tuple[Any, ...]], R],
        *,
        otherwise: Callable[[str], R],
        look_first: Callable[[str], R],
        operation_id: str,
    ) -> R:
        """Return the result of ``read`` for the row of a write in one statement, as `committed_once` does.

        If a write may not be one statement here, or if this one changes nothing, return the result of
        ``otherwise``, the portable form. Both forms record the id of the call: ``%(call_id)s``, and the
        argument of ``otherwise``, which is empty on SQLite. If the reply to the COMMIT is lost,
        ``look_first`` looks for this id.
        """
        call = self.enter()
        if call.connection.vendor != "postgresql":
            return otherwise("")

        def write(call: Call) -> R:
            if call.has_fast_writes:
                for row in call.try_write(statement, {**parameters, "call_id": call.id}):
                    return read(row)
            return otherwise(call.id)

        return self.committed_once(
            write, lambda call: look_first(call.id), operation_id=lambda: operation_id, call=call
        )

    def committed_once(
        self,
        write: Callable[[Call], R],
        again: Callable[[Call], R],
        *,
        operation_id: Callable[[], str | None],
        call: Call | None = None,
    ) -> R:
        """Return the result of ``write``; if the reply to its COMMIT is lost, return that of ``again``.

        ``again`` runs in one transaction on another connection. It takes the same lock as ``write``, which
        has therefore ended, looks for the rows that ``write`` stored, and writes them if they are missing. It
        is repeated for a few seconds while the server does not answer; after that, `OutcomeUnknown` is raised
        with the ``operation_id``. In the caller's transaction nothing is repeated, because the caller owns
        the commit. By default, ``call`` is a new one.
        """
        entered = (call or self.enter())._replace(id=new_call_id())
        if entered.in_transaction:
            return write(entered)
        connection = entered.connection
        began = time.monotonic()
        # All statements of the call are sent in one session.
        token = is_kept_open.set(True)
        session = 0
        try:
            session = _session_number(connection)
            return write(entered)
        except OutcomeUnknown as exc:
            lost = exc
        finally:
            is_kept_open.reset(token)
            release_unless_kept(connection)

        def write_again() -> R:
            if self.is_postgresql:
                self.execute(WAIT_BRIEFLY, {})
            return again(self.enter()._replace(id=entered.id))

        # If an id is given, the store has already waited for its transaction.
        for pause in patient_pauses() if lost.operation_id is None else (0.0,):
            try:
                if session:
                    self.read(END_SESSION, {"number": session, "seconds": time.monotonic() - began})
                return self.transaction(write_again)
            except NO_ANSWER as exc:
                if isinstance(exc, OutcomeUnknown) and exc.operation_id is not None:
                    break
                time.sleep(pause)
        raise OutcomeUnknown(operation_id()) from lost.__cause__

    def execute(self, statement: Statement, parameters: Parameters) -> Rows:
        """Run a statement as part of the open transaction or query, and return its rows."""
        return run(connections[self.alias], statement, parameters)

    def after_commit(self, call: Callable[[str], object]) -> None:
        """Call a function with the alias after the open transaction commits, or at once outside a block."""
        alias = self.alias
        if connections[alias].in_atomic_block:
            transaction.on_commit(functools.partial(call, alias), using=alias, robust=True)
        else:
            # Outside a block, on_commit() would open a connection only to check its autocommit mode.
            call(alias)

    @property
    def has_row_locks(self) -> bool:
        """False on SQLite, which has one write transaction at a time instead."""
        return connections[self.alias].features.has_select_for_update

    @property
    def has_fast_writes(self) -> bool:
        """True if a write may be one statement, as for a `Call`."""
        return self.enter().has_fast_writes

    def query(self, body: Callable[[], R]) -> R:
        """Run ORM queries that only read."""
        connection = self.connection
        # The doctor reads the migrations even if other settings of the project cannot be read.
        if self.is_postgresql and conf.row_level_security():
            return self.transaction(body, only_reads=True)
        try:
            with reading_moments(connection):
                connect_first(connection)
                return body()
        except Exception as exc:
            raise_mapped(connection, exc)
            raise
        finally:
            release_unless_kept(connection)

    def now(self) -> datetime:
        """Return the database's time with one statement, inside a query or transaction."""
        ((value,),) = self.execute(NOW, {})
        return as_utc(value)

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Make all reads in a ``with`` block see the database at the same moment. They block no one. In
        the caller's transaction, that transaction's isolation level applies.
        """
        connection = self.connection
        if self.in_transaction:
            yield
            return
        with release_once(connection), mapped_errors(connection):
            if self.is_postgresql:
                connect_first(connection)
                with transaction.atomic(using=connection.alias):
                    run(connection, _ONE_MOMENT, {})
                    yield
                return
            # This is not atomic(), which would lock writers out with transaction_mode=IMMEDIATE.
            run(connection, _BEGIN, {})
            try:
                yield
            finally:
                # This is a method, not a statement: after some errors SQLite has already rolled back and
                # refuses another ROLLBACK.
                connection.rollback()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """End the statement of this thread if a signal handler raises an error in a ``with`` block.

        PostgreSQL's driver does this itself and cancels the statement. SQLite calls back between steps of
        a statement: Python then runs the handler, and a failed callback ends the statement with an
        `OperationalError`.
        """
        if self.is_postgresql:
            yield
            return
        self.connection.ensure_connection()
        native = self.connection.connection
        native.set_progress_handler(lambda: 0, _OPERATIONS)
        try:
            yield
        finally:
            native.set_progress_handler(None, 0)

    @contextmanager
    def rolled_back(self, *, dry_run: bool = True) -> Iterator[None]:
        """Roll back the work of a ``with`` block, so that a dry run can do the work in order to count it.

        The block is one transaction, which holds all of its locks until the end. Functions that
        it passes to ``on_commit`` are not called. If ``dry_run`` is false, the block runs as usual.
        """
        if not dry_run:
            yield
            return
        connection = self.connection
        with (
            release_once(connection),
            mapped_errors(connection),
            _read_committed(connection),
            transaction.atomic(using=self.alias),
        ):
            yield
            transaction.set_rollback(True, using=self.alias)

    def transaction(self, body: Callable[[], R], call: Call | None = None, *, only_reads: bool = False) -> R:
        """Run ``body`` in one transaction, by default in a call of its own.

        Inside the caller's ``atomic()`` block it is a savepoint, because the caller owns the commit and any
        retry. Otherwise, a transaction that the database aborted because of another one runs again, and so
        does a transaction whose COMMIT did not reach the server. If only the reply was lost, the result of
        the transaction is returned.
        """
        _, connection, features, *_ = call or self.enter()
        if features.tells_tenant:
            body = functools.partial(self._after, _SET_TENANT, body)
        elif features.is_citus and not only_reads:
            body = functools.partial(self._after, STAY_ON_NODE, body)
        is_own = not connection.in_atomic_block
        # On Citus, the node with the tables may have committed a transaction that the entry node rolled back.
        is_watched = is_own and connection.vendor == "postgresql" and not (only_reads or features.is_citus)
        driver = postgres_module() if is_watched else None
        attempts = _ATTEMPTS if is_own else 1
        attempt = 0
        waits = None if current_thread() is main_thread() else short_waits(connection)
        try:
            while True:
                is_last = attempt + 1 == attempts
                watched = None if driver is None else driver.WatchedTransaction(connection)
                try:
                    with waits or _UNCHANGED:
                        return _attempt(connection, body, watched)
                except OutcomeUnknown as exc:
                    if watched is None:
                        raise
                    if watched.has_committed(exc):
                        return cast(R, watched.finish())
                    if is_last:
                        raise StoreUnavailable from exc.__cause__
                except StoreBusy as exc:
                    if waits is not None and waits.may_go_on(exc):
                        continue
                    if is_last or not is_retryable_transaction(exc):
                        raise
                pause = random.uniform(0, _FIRST_PAUSE_SECONDS * 2**attempt)  # noqa: S311  jitter, no secret
                time.sleep(pause)
                attempt += 1
        finally:
            if call is None:
                release_unless_kept(connection)

    def _after(self, first: Statement, body: Callable[[], R]) -> R:
        """Run ``body`` after the statement with which every transaction begins here."""
        self.execute(first, {"tenant": self.tenant})
        return body()


def new_call_id() -> str:
    """Return a random id for one call."""
    return secrets.token_urlsafe(CALL_ID_BYTES)


def _is_in_transaction(connection: BaseDatabaseWrapper) -> bool:
    is_connected = connection.connection is not None
    autocommit = connection.autocommit if is_connected else connection.settings_dict["AUTOCOMMIT"]
    return connection.in_atomic_block or not autocommit


def _session_number(connection: BaseDatabaseWrapper) -> int:
    """Open the connection and return the process ID of the server's backend that serves it.

    It is 0 on SQLite, and with a driver that cannot report it. A pooler reports an ID of its own.
    """
    if connection.vendor != "postgresql":
        return 0
    _open(connection)
    pgconn = getattr(connection.connection, "pgconn", None)
    return 0 if pgconn is None else int(pgconn.backend_pid)


def release_unless_kept(connection: BaseDatabaseWrapper) -> None:
    """Release the connection, unless an enclosing block or call will do so."""
    if not (connection.in_atomic_block or is_kept_open.get()):
        release(connection)


def _open(connection: BaseDatabaseWrapper) -> None:
    """Connect, and map the driver's errors."""
    try:
        connect(connection)
    except Exception as exc:
        raise_mapped(connection, exc)
        raise


def connect(connection: BaseDatabaseWrapper) -> None:
    """Do everything that Django's ``cursor()`` does before a statement, including ``CONN_HEALTH_CHECKS``."""
    if connection.health_check_enabled:  # type: ignore[attr-defined]  # an attribute of Django's own
        connection.close_if_health_check_failed()
    if connection.connection is None:
        connection.ensure_connection()
        note_opened_by_call(connection)


def connect_first(connection: BaseDatabaseWrapper) -> None:
    """Connect before Django does, to record that a call of the store has opened the connection."""
    if connection.vendor == "postgresql" and not connection.in_atomic_block:
        connect(connection)


def run(connection: BaseDatabaseWrapper, statement: Statement, parameters: Parameters) -> Rows:
    """Run a statement with a Django cursor."""
    # It is not closed, because a cursor of either driver holds no resources after its rows are fetched.
    cursor = connection.cursor()
    if connection.vendor == "sqlite":
        cursor.execute(statement.sqlite, _as_sqlite_takes(parameters))
        rows: Rows = cursor.fetchall()
        return rows
    with reading_moments(connection):
        if statement.citus and conf.is_citus(connection.settings_dict):
            return run_in_order(cursor, statement.citus, cast(Mapping[str, Any], parameters))
        cursor.execute(statement.postgresql, parameters)
    rows = [] if cursor.description is None else cursor.fetchall()
    return rows


def _run_prepared(connection: BaseDatabaseWrapper, statement: Statement, parameters: Any) -> Rows:
    """Run a statement on an open connection, prepared if the driver can do so. If it fails in an open
    transaction, it has no effect.
    """
    in_savepoint = connection.in_atomic_block or not connection.autocommit
    psycopg = postgres_module()
    rows: Rows | None = None
    if psycopg is not None:
        rows = psycopg.fetch_prepared(connection, statement, parameters, in_savepoint=in_savepoint)
    if rows is not None:
        return rows
    if not in_savepoint:
        return run(connection, statement, parameters)
    with transaction.atomic(using=connection.alias):
        return run(connection, statement, parameters)


def reading_moments(connection: BaseDatabaseWrapper) -> AbstractContextManager[None]:
    """Make Django's cursors read aware datetimes inside the block, even in a project without ``USE_TZ``."""
    # Without ``USE_TZ``, Django reads naive local times on PostgreSQL.
    is_local = connection.vendor == "postgresql" and connection.timezone is None
    psycopg = postgres_module() if is_local else None
    return _UNCHANGED if psycopg is None else connection.execute_wrapper(psycopg.read_moments)


@functools.cache
def postgres_module() -> Any:
    """Return `engine.postgres`, or ``None`` if another driver is used, which cannot prepare."""
    try:
        from helix_store.engine import postgres
    except ImportError:
        return None
    return postgres


@functools.lru_cache(16)
def _sqlite_text(moment: datetime, fold: int) -> str:
    """Return a moment as text; most writes store the same moment in several rows.

    Python considers two times equal if they differ only in their ``fold``, so the key includes it.
    """
    return as_sqlite_text(moment)


def _as_sqlite_takes(parameters: Parameters) -> Parameters:
    if type(parameters) is dict:
        # Only the form for PostgreSQL needs a list; the query log of DEBUG would also bind it here.
        return {
            name: _sqlite_text(value, value.fold) if type(value) is datetime else value
            for name, value in parameters.items()
            if type(value) is not list
        }
    return [_sqlite_text(value, value.fold) if type(value) is datetime else value for value in parameters]


P = ParamSpec("P")

_ATTEMPTS: Final = 5
_FIRST_PAUSE_SECONDS: Final = 0.01
_OPERATIONS: Final = 100_000
"""The number of instructions of SQLite's virtual machine that take a few milliseconds."""
_ONE_MOMENT: Final = Statement("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
_BEGIN: Final = Statement("BEGIN DEFERRED")
# This lasts until the end of the transaction: behind a pooler, the connection then serves another client.
_SET_TENANT: Final = Statement(f"SELECT pg_catalog.set_config('{TENANT_VARIABLE}', ':' || %(tenant)s, true)")


@dataclass(eq=False, repr=False)
class DatabaseOperations:
    """A group of operations on one database."""

    db: Database


S = TypeVar("S", bound=DatabaseOperations)


def writes(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make the whole method one `Database.transaction`."""

    @functools.wraps(method)
    def in_transaction(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.db.transaction(functools.partial(method, self, *args, **kwargs))

    return in_transaction


def reads(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make the whole method one `Database.query`."""

    @functools.wraps(method)
    def as_query(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.db.query(functools.partial(method, self, *args, **kwargs))

    return as_query


def _read_committed(connection: BaseDatabaseWrapper) -> AbstractContextManager[None]:
    """Give new transactions in the block the isolation level that the statements require."""
    if connection.vendor != "postgresql" or connection.in_atomic_block:
        return _UNCHANGED
    connect(connection)
    psycopg = postgres_module() if connection.autocommit else None
    return _UNCHANGED if psycopg is None else psycopg.read_committed(connection.connection)


def _attempt(connection: BaseDatabaseWrapper, body: Callable[[], R], watched: WatchedTransaction | None) -> R:
    committing = committed = False

    def mark_committed() -> None:
        nonlocal committed
        committed = True

    try:
        try:
            atomic = transaction.atomic(using=connection.alias)
            is_main = current_thread() is main_thread()
            with (
                reading_moments(connection),
                _read_committed(connection),  # opens the connection, which the next one needs
                UNWATCHED if is_main else watched_wait(connection),
                atomic,
            ):
                transaction.on_commit(mark_committed, using=connection.alias)
                with watched or _UNCHANGED:
                    result = body()
                    if watched is not None:
                        watched.result = result
                committing = not connection.savepoint_ids
            return result
        except Exception as exc:
            raise_mapped(connection, exc, committing=committing)
            raise
    except HelixStoreError as exc:
        # An error in an on_commit hook comes after the commit, so the write must not run again.
        if committed and exc.__cause__ is not None:
            raise exc.__cause__ from None
        raise


# Every role may read the catalog, even without privileges on the fences' table. A removed fence may have
# left a disabled trigger behind.
_IS_FENCED: Final = Statement(
    f"SELECT 1 FROM pg_catalog.pg_trigger WHERE tgrelid = pg_catalog.to_regclass('{table(Session)}')"
    " AND tgname = %(trigger)s AND tgenabled <> 'D'",
    "SELECT 1 FROM sqlite_master WHERE type = 'trigger' AND name = %(trigger)s || '_INSERT'",
)


def refuse_moved(db: Database) -> None:
    """Raise `TenantMoved` if the tenant is fenced. Call this after a lookup that found nothing."""
    if db.read(_IS_FENCED, {"trigger": trigger_name(table(Session), db.tenant)}):
        raise TenantMoved(database_code=TENANT_MOVED)


def trigger_name(fenced_table: str, tenant: str) -> str:
    """Return the name of the trigger that fences a tenant in a table (see `engine.statement.table`)."""
    return f"helix_fence_{digest_of_names(fenced_table, tenant)}"


def digest_of_names(*names: str) -> str:
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:24]


def rows_without_model(db: Database, prefix: str, column: str, value: int) -> dict[str, int]:
    """Return how many rows have this value, by table, for tables without a model in any installed app.

    The name of such a table begins with ``prefix``. Tables without rows of this value are left out.
    """
    connection = db.connection
    known = {model._meta.db_table for model in apps.get_models(include_auto_created=True)}
    found = {}
    with connection.cursor() as cursor:
        listed = connection.introspection.table_names(cursor)
        for name in sorted(name for name in listed if name.startswith(prefix) and name not in known):
            columns = connection.introspection.get_table_description(cursor, name)
            if not any(each.name == column for each in columns):
                continue
            quoted, quoted_column = map(connection.ops.quote_name, (name, column))
            cursor.execute(f"SELECT count(*) FROM {quoted} WHERE {quoted_column} = %s", [value])
            if count := cursor.fetchone()[0]:
                found[name] = count
    return found
