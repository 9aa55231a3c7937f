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

A call takes a connection when it enters the engine, and releases it when it ends. `engine.threads` says which
threads release theirs, and which calls are refused because they would wait for their own caller.
"""

from __future__ import annotations

import functools
import hashlib
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar, cast

from django.apps import apps
from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model
from django.utils.connection import ConnectionDoesNotExist

from helix_store import conf
from helix_store.conf import TENANT_VARIABLE
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
    WAIT_BRIEFLY,
    Statement,
    patient_pauses,
    run_in_order,
    table,
)
from helix_store.engine.tasks import require_task_of_block, task_blocks
from helix_store.engine.threads import (
    UNWATCHED,
    has_waited,
    is_kept_open,
    note_opened_by_call,
    open_blocks,
    refuse_again,
    refused_threads,
    release,
    release_once,
    remember_pool,
    require_thread_of_caller,
    short_waits,
    used_aliases,
    watched_wait,
)
from helix_store.engine.uncommitted import UncommittedWrite
from helix_store.exceptions import (
    HelixStoreError,
    InvalidQuery,
    OutcomeUnknown,
    OutsideTransaction,
    StoreBusy,
    StoreUnavailable,
    TenantMoved,
)

if TYPE_CHECKING:
    from helix_store.engine.postgres import WatchedTransaction

__all__ = [
    "Call",
    "Database",
    "DatabaseOperations",
    "Parameters",
    "Rows",
    "WriteInDatabase",
    "reads",
    "writes",
]


@functools.cache
def _routed_model() -> type[Model]:
    """The model about which the routers are asked. All other tables of a tenant are in the same database."""
    return apps.get_model(conf.ROUTED_MODEL)


def alias_of(tenant: str) -> str:
    """Return the database of a tenant: the one to which the routers send writes with the hint ``tenant``."""
    return router.db_for_write(_routed_model(), tenant=tenant)


def _is_connected(alias: str) -> bool:
    """Return whether a connection was added to Django's beside those of ``DATABASES``, as tests do."""
    try:
        return bool(connections[alias])
    except ConnectionDoesNotExist:
        return False


def _unknown_alias(alias: Any) -> InvalidQuery:
    if not isinstance(alias, str):
        return InvalidQuery(f"using is an alias of DATABASES, not {type(alias).__name__}.", path="using")
    known = ", ".join(map(repr, connections))
    return InvalidQuery(f"There is no database {alias!r} in DATABASES, which has {known}.", path="using")


def app_aliases() -> list[str]:
    """Return the databases that the routers let the app migrate, in the order of ``DATABASES``."""
    return [alias for alias in connections if router.allow_migrate_model(alias, _routed_model())]


def app_connections(vendor: str | None, only: str | None = None) -> list[BaseDatabaseWrapper]:
    """Return connections to the databases that may contain the app's tables, or to one such database.

    ``None`` stands for every vendor.
    """
    return [
        connections[alias]
        for alias in app_aliases()
        if vendor in (None, connections[alias].vendor) and only in (None, alias)
    ]


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


@dataclass(eq=False, slots=True)
class WriteInDatabase(UncommittedWrite):
    """A write in an open transaction of ``connection``."""

    connection: BaseDatabaseWrapper
    is_committed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.connection.in_atomic_block:
            transaction.on_commit(self.commit, using=self.connection.alias, robust=True)
        # With autocommit off, Django has no hooks: only the store knows the outcome.

    def commit(self) -> None:
        self.is_committed = True

    @property
    def is_open(self) -> bool:
        # Django drops the hooks of a savepoint that is rolled back, and all hooks when COMMIT fails.
        return any(entry[1] == self.commit for entry in self.connection.run_on_commit)


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
        """The alias ``using``, or that of the routers. Raises `InvalidQuery` if Django has no such alias."""
        alias = self.using
        if alias is None or alias == "":
            # Reads go to the same database as writes, because decisions based on a replica would be stale.
            placed = self._placed.get(self.tenant)
            alias = placed or self._placed.setdefault(self.tenant, alias_of(self.tenant))
        if not isinstance(alias, str) or (alias not in connections.settings and not _is_connected(alias)):
            raise _unknown_alias(alias)
        return alias

    @property
    def connection(self) -> BaseDatabaseWrapper:
        """The connection of this thread, for a call of a store. Raises `OutsideTransaction`."""
        alias = self.alias
        connection = connections[alias]
        used_aliases.add(alias)
        if connection.in_atomic_block or alias in open_blocks.get():
            if task_blocks:
                require_task_of_block(connection)
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

    def write_in_block(self) -> WriteInDatabase | None:
        """Return a record of a write that was just made, if it is part of an ``atomic()`` block.

        With autocommit off there is none, because Django would not report the outcome.
        """
        connection = connections[self.alias]
        return WriteInDatabase(connection) if connection.in_atomic_block else None

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
        retry. Otherwise, a transaction that the database aborted because of another one runs again, unless
        SQLite has waited for its ``timeout``, and so does a transaction whose COMMIT did not reach the
        server. If only the reply was lost, the result of the transaction is returned.
        """
        _, connection, features, *_ = call or self.enter()
        if features.tells_tenant:
            body = functools.partial(self._after, _SET_TENANT, body)
        elif features.is_citus and not only_reads:
            body = functools.partial(self._after, stay_on_node(), body)
        is_own = not connection.in_atomic_block
        # On Citus, the node with the tables may have committed a transaction that the entry node rolled back.
        is_watched = is_own and connection.vendor == "postgresql" and not (only_reads or features.is_citus)
        driver = postgres_module() if is_watched else None
        attempts = _ATTEMPTS if is_own else 1
        attempt, began = 0, time.monotonic()
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
                    if is_last or not is_retryable_transaction(exc) or has_waited(connection, began):
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
    """Release the connection, unless an enclosing block or call will do so, or the main thread keeps it."""
    if connection.in_atomic_block or is_kept_open.get():
        return
    # The main thread returns only a pooled connection: most calls need not ask further.
    if current_thread() is not main_thread() or "pool" in connection.settings_dict["OPTIONS"]:
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
    is_new = connection.connection is None
    # This is called even if the connection is open, because pytest-django makes it refuse tests that may not
    # use a database.
    connection.ensure_connection()
    if is_new:
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


def reading_moments(connection: BaseDatabaseWrapper, *, many: bool = False) -> AbstractContextManager[None]:
    """Make Django's cursors read aware datetimes inside the block, even in a project without ``USE_TZ``. Pass
    ``many`` if they may read so many that our own way of reading them saves time.
    """
    # Without ``USE_TZ``, Django reads naive local times on PostgreSQL.
    is_needed = connection.vendor == "postgresql" and (many or connection.timezone is None)
    psycopg = postgres_module() if is_needed else None
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


@functools.cache
def stay_on_node() -> Statement:
    """Return the statement that makes a move of the schema wait for the end of the transaction, on Citus.

    A move waits for transactions that have written, but not for those that have only locked a row. Without
    this statement, a transaction could lock a row on the old node and write on the new one, where the row is
    not locked, so that two transactions could both write what only one of them may.
    """
    return Statement(f"DELETE FROM {table(_routed_model())} WHERE id = 0")


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
    "SELECT 1 FROM pg_catalog.pg_trigger WHERE tgrelid = pg_catalog.to_regclass(%(table)s)"
    " AND tgname = %(trigger)s AND tgenabled <> 'D'",
    "SELECT 1 FROM sqlite_master WHERE type = 'trigger' AND name = %(trigger)s || '_INSERT'",
)


def refuse_moved(db: Database) -> None:
    """Raise `TenantMoved` if the tenant is fenced. Call this after a lookup that found nothing."""
    fenced = table(_routed_model())
    if db.read(_IS_FENCED, {"table": fenced, "trigger": trigger_name(fenced, db.tenant)}):
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
