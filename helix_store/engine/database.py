"""Access to a database: every statement of the app goes through `Database`. Its methods differ in four
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
`engine.citus`) only reads are prepared, and a write that has a form for Citus is a transaction.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store import conf
from helix_store.core.limits import Limits
from helix_store.core.moments import as_sqlite_text, as_utc
from helix_store.core.tenants import TENANT_VARIABLE
from helix_store.engine.aliases import alias_of
from helix_store.engine.citus import run_in_order
from helix_store.engine.clocks import NOW
from helix_store.engine.commits import NO_ANSWER, WatchedTransaction, patient_pauses
from helix_store.engine.connections import enter, is_kept_open, note_opened_by_call, release, release_once
from helix_store.engine.errors import (
    is_retryable_transaction,
    is_serialization_failure,
    mapped_errors,
    raise_mapped,
)
from helix_store.engine.statement import Statement
from helix_store.exceptions import HelixStoreError, OutcomeUnknown, StoreBusy, StoreUnavailable

__all__ = ["Database", "DatabaseOperations", "Parameters", "Rows", "reads", "writes"]

P = ParamSpec("P")
R = TypeVar("R")

Rows = list[tuple[Any, ...]]
Parameters = Mapping[str, Any] | Sequence[Any]

_ATTEMPTS: Final = 5
_FIRST_PAUSE_SECONDS: Final = 0.01
_UNCHANGED: Final = nullcontext()
_ONE_MOMENT: Final = Statement("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
_BEGIN: Final = Statement("BEGIN DEFERRED")
# This lasts until the end of the transaction: behind a pooler, the connection then serves another client.
_SET_TENANT: Final = Statement(f"SELECT pg_catalog.set_config('{TENANT_VARIABLE}', ':' || %(tenant)s, true)")
# The lost transaction keeps its locks until the server notices that its client is gone, which can take hours.
_WAIT_BRIEFLY: Final = Statement("SELECT pg_catalog.set_config('lock_timeout', '500ms', true)")
# Its statement may be running, or may arrive later from network buffers.
_END_SESSION: Final = Statement(
    """
    SELECT pg_catalog.pg_terminate_backend(pid, 1000) FROM pg_catalog.pg_stat_activity
    WHERE pid = %(number)s::integer AND usename = current_user AND wait_event IS DISTINCT FROM 'SyncRep'
        AND backend_start < pg_catalog.clock_timestamp() - %(seconds)s::float8 * interval '1 second'"""
)


@dataclass(frozen=True, slots=True)
class Database:
    """The database of a store: an alias, a tenant and the limits, which are read from the settings at each
    use by default. Without an alias, the project's routers are asked once, with the hint ``tenant``, so that
    all statements of a call use one database even if the routers change their answer.
    """

    using: str | None
    tenant: str
    given_limits: Limits | None = None
    _placed: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def alias(self) -> str:
        if self.using:
            return self.using
        # Reads go where writes go, because decisions based on a replica would be stale.
        placed = self._placed.get(self.tenant)
        return placed or self._placed.setdefault(self.tenant, alias_of(self.tenant))

    @property
    def connection(self) -> BaseDatabaseWrapper:
        """The connection of this thread, for a call that enters the engine."""
        return enter(self.alias)

    @property
    def limits(self) -> Limits:
        return conf.limits(self.given_limits)

    @property
    def has_row_locks(self) -> bool:
        """False on SQLite, which has one write transaction at a time instead."""
        return connections[self.alias].features.has_select_for_update

    @property
    def is_postgresql(self) -> bool:
        """Used for differences outside of a `Statement`: arrays as parameters, and NOTIFY."""
        return connections[self.alias].vendor == "postgresql"

    @property
    def in_transaction(self) -> bool:
        """True if a write becomes part of the caller's transaction."""
        return _is_in_transaction(connections[self.alias])

    @property
    def has_fast_reads(self) -> bool:
        """True if a read may use the forms that only PostgreSQL runs."""
        return _form(connections[self.alias]).has_fast_reads

    @property
    def has_fast_writes(self) -> bool:
        """True if a write may be one statement with all of its conditions.

        This needs PostgreSQL, where a statement commits alone or is part of an ``atomic()`` block.
        """
        connection = self.connection
        if not _form(connection).has_fast_writes:
            return False
        if connection.in_atomic_block:
            return True
        _open(connection)
        return bool(connection.autocommit)

    def read_if_fast(self, statement: Statement, parameters: Parameters) -> Rows | None:
        """Run a read that only PostgreSQL supports; return ``None`` unless the database has fast reads."""
        connection = self.connection
        form = _form(connection)
        return self._read(connection, form, statement, parameters) if form.has_fast_reads else None

    def read(self, statement: Statement, parameters: Parameters) -> Rows:
        """Run a statement that only reads, and return its rows."""
        connection = self.connection
        return self._read(connection, _form(connection), statement, parameters)

    def _read(
        self, connection: BaseDatabaseWrapper, form: conf.Form, statement: Statement, parameters: Parameters
    ) -> Rows:
        if form.tells_tenant:
            return self._transaction(lambda: self.execute(statement, parameters), only_reads=True)
        is_prepared = form.has_fast_reads and not (form.is_citus and statement.citus)
        try:
            _connect_first(connection)
            return (_run_prepared if is_prepared else _run)(connection, statement, parameters)
        except Exception as exc:
            raise_mapped(connection, exc)
            raise
        finally:
            _release(connection)

    def write(self, statement: Statement, parameters: Parameters) -> Rows:
        """Run a statement that writes, and return its rows.

        Outside a block the statement is a whole transaction, which saves the round trips of ``BEGIN`` and
        ``COMMIT``. Inside the caller's block it is a savepoint: the caller owns the commit and any retry.
        """
        connection = self.connection
        form = _form(connection)
        if form.tells_tenant or (form.is_citus and statement.citus):
            return self.transaction(lambda: self.execute(statement, parameters))
        is_alone = False
        try:
            if not connection.in_atomic_block:
                _connect(connection)
                is_alone = connection.autocommit
            if is_alone or (connection.in_atomic_block and form.has_fast_writes):
                return (_run_prepared if form.has_fast_writes else _run)(connection, statement, parameters)
        except Exception as exc:
            if not (is_alone and is_serialization_failure(exc)):
                # Once the connection is open, a connection error does not show whether the statement was
                # committed.
                raise_mapped(connection, exc, committing=is_alone, is_single_statement=is_alone)
                raise
        finally:
            _release(connection)
        return self.transaction(lambda: _run(connection, statement, parameters))

    def try_write(self, statement: Statement, parameters: Parameters) -> Rows:
        """Call `write` right after `has_fast_writes`; return no rows if another transaction made it fail."""
        connection = connections[self.alias]
        is_alone = not connection.in_atomic_block
        try:
            return _run_prepared(connection, statement, parameters)
        except Exception as exc:
            if is_alone and is_retryable_transaction(exc):
                return []
            raise_mapped(connection, exc, committing=is_alone, is_single_statement=is_alone)
            raise
        finally:
            _release(connection)

    def query(self, body: Callable[[], R]) -> R:
        """Run ORM queries that only read."""
        connection = self.connection
        # The doctor reads the migrations of a project whose other settings cannot be read.
        if self.is_postgresql and conf.row_level_security():
            return self._transaction(body, only_reads=True)
        try:
            with _reading_moments(connection):
                _connect_first(connection)
                return body()
        except Exception as exc:
            raise_mapped(connection, exc)
            raise
        finally:
            _release(connection)

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Make all reads of a ``with`` block see the database at one moment. No one waits for them. In the
        caller's transaction, its isolation level applies.
        """
        connection = self.connection
        if self.in_transaction:
            yield
            return
        with release_once(connection), mapped_errors(connection):
            if self.is_postgresql:
                _connect_first(connection)
                with transaction.atomic(using=connection.alias):
                    _run(connection, _ONE_MOMENT, {})
                    yield
                return
            # Not atomic(): with transaction_mode=IMMEDIATE it would lock writers out.
            _run(connection, _BEGIN, {})
            try:
                yield
            finally:
                # A method, not a statement: after some errors SQLite has already rolled back and refuses
                # another ROLLBACK.
                connection.rollback()

    @contextmanager
    def rolled_back(self, *, dry_run: bool = True) -> Iterator[None]:
        """Roll back the work of a ``with`` block, so that a dry run can count by doing the work.

        The block is one transaction, which holds the locks of everything in it until the end. Functions that
        it passes to ``on_commit`` are not called. Unless it is a ``dry_run``, the block runs as usual.
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
            try:
                yield
            finally:
                transaction.set_rollback(True, using=self.alias)

    def transaction(self, body: Callable[[], R]) -> R:
        """Run ``body`` in one transaction.

        Inside the caller's ``atomic()`` block it is a savepoint: the caller owns the commit and any retry.
        Otherwise a transaction that the database aborted because of another one runs again, and so does a
        transaction whose COMMIT did not reach the server. If only the reply was lost, the transaction's
        result is returned.
        """
        return self._transaction(body, only_reads=False)

    def _transaction(self, body: Callable[[], R], *, only_reads: bool) -> R:
        connection = self.connection
        form = _form(connection)
        if form.tells_tenant:
            body = functools.partial(self._after_the_tenant, body)
        # On Citus, the node with the tables may have committed what the entry node rolled back.
        is_watched = connection.vendor == "postgresql" and not (only_reads or form.is_citus)
        driver = _psycopg() if is_watched else None
        attempts = 1 if connection.in_atomic_block else _ATTEMPTS
        try:
            for attempt in range(attempts):
                is_last = attempt + 1 == attempts
                watched = None if driver is None else WatchedTransaction(connection, driver)
                try:
                    return _attempt(connection, body, watched)
                except OutcomeUnknown as exc:
                    if watched is None:
                        raise
                    if watched.has_committed(exc):
                        return cast(R, watched.finish())
                    if is_last:
                        raise StoreUnavailable from exc.__cause__
                except StoreBusy as exc:
                    if is_last or not is_retryable_transaction(exc):
                        raise
                pause = random.uniform(0, _FIRST_PAUSE_SECONDS * 2**attempt)  # noqa: S311  jitter, no secret
                time.sleep(pause)
            raise AssertionError("the last attempt returns or raises")
        finally:
            _release(connection)

    def _after_the_tenant(self, body: Callable[[], R]) -> R:
        """Set the tenant for the policies of the database, and run ``body``."""
        self.execute(_SET_TENANT, {"tenant": self.tenant})
        return body()

    def committed_once(
        self, write: Callable[[], R], again: Callable[[], R], *, operation_id: Callable[[], str | None]
    ) -> R:
        """Return the result of ``write``, or of ``again`` if the reply to its COMMIT is lost.

        ``again`` runs in one transaction on another connection. It takes the lock that ``write`` had, so that
        ``write`` has ended, looks for what ``write`` stored, and writes it if it is not there. It is repeated
        for a few seconds while the server does not answer; then `OutcomeUnknown` is raised with the
        ``operation_id``. In the caller's transaction nothing is repeated, because the caller owns the commit.
        """
        connection = self.connection
        if _is_in_transaction(connection):
            return write()
        began = time.monotonic()
        # All statements of the call are sent in one session.
        token = is_kept_open.set(True)
        try:
            session = _session_number(connection)
            return write()
        except OutcomeUnknown as exc:
            lost = exc
        finally:
            is_kept_open.reset(token)
            _release(connection)

        def after_the_lost_one() -> R:
            if self.is_postgresql:
                self.execute(_WAIT_BRIEFLY, {})
            return again()

        # With an id, the store has already waited for its transaction.
        for pause in patient_pauses() if lost.operation_id is None else (0.0,):
            try:
                if session:
                    self.read(_END_SESSION, {"number": session, "seconds": time.monotonic() - began})
                return self.transaction(after_the_lost_one)
            except NO_ANSWER as exc:
                if isinstance(exc, OutcomeUnknown) and exc.operation_id is not None:
                    break
                time.sleep(pause)
        raise OutcomeUnknown(operation_id()) from lost.__cause__

    def execute(self, statement: Statement, parameters: Parameters) -> Rows:
        """Run a statement as part of the open transaction or query, and return its rows."""
        return _run(connections[self.alias], statement, parameters)

    def now(self) -> datetime:
        """Return the database's time with one statement, inside a query or transaction."""
        ((value,),) = self.execute(NOW, {})
        return as_utc(value)


class DatabaseOperations:
    """A group of operations on one database."""

    def __init__(self, db: Database) -> None:
        self.db = db


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


def _is_in_transaction(connection: BaseDatabaseWrapper) -> bool:
    is_connected = connection.connection is not None
    autocommit = connection.autocommit if is_connected else connection.settings_dict["AUTOCOMMIT"]
    return connection.in_atomic_block or not autocommit


def _form(connection: BaseDatabaseWrapper) -> conf.Form:
    """Return the forms of statements for a connection; ask once per call."""
    return conf.form(connection.settings_dict) if connection.vendor == "postgresql" else conf.PORTABLE


def _session_number(connection: BaseDatabaseWrapper) -> int:
    """Open the connection and return the number of its session on the server.

    It is 0 on SQLite and with a driver that does not know it. Behind a pooler, the number is made up by the
    pooler.
    """
    if connection.vendor != "postgresql":
        return 0
    _open(connection)
    pgconn = getattr(connection.connection, "pgconn", None)
    return 0 if pgconn is None else int(pgconn.backend_pid)


def _release(connection: BaseDatabaseWrapper) -> None:
    """Release the connection, unless the caller's block or call does so."""
    if not (connection.in_atomic_block or is_kept_open.get()):
        release(connection)


def _open(connection: BaseDatabaseWrapper) -> None:
    """Connect, and map the driver's errors."""
    try:
        _connect(connection)
    except Exception as exc:
        raise_mapped(connection, exc)
        raise


def _connect(connection: BaseDatabaseWrapper) -> None:
    """Do what Django's ``cursor()`` does before a statement, ``CONN_HEALTH_CHECKS`` included."""
    if connection.health_check_enabled:  # type: ignore[attr-defined]  # an attribute of Django's own
        connection.close_if_health_check_failed()
    if connection.connection is None:
        connection.ensure_connection()
        note_opened_by_call(connection)


def _connect_first(connection: BaseDatabaseWrapper) -> None:
    """Connect before Django does, to note that a call of the store has opened the connection."""
    if connection.vendor == "postgresql" and not connection.in_atomic_block:
        _connect(connection)


def _run(connection: BaseDatabaseWrapper, statement: Statement, parameters: Parameters) -> Rows:
    """Run a statement with a Django cursor."""
    # Not closed, because a cursor of either driver holds no resources after its rows are fetched.
    cursor = connection.cursor()
    if connection.vendor == "sqlite":
        cursor.execute(statement.sqlite, _as_sqlite_takes(parameters))
        rows: Rows = cursor.fetchall()
        return rows
    with _reading_moments(connection):
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
    psycopg = _psycopg()
    rows: Rows | None = None
    if psycopg is not None:
        rows = psycopg.fetch_prepared(connection, statement, parameters, in_savepoint=in_savepoint)
    if rows is not None:
        return rows
    if not in_savepoint:
        return _run(connection, statement, parameters)
    with transaction.atomic(using=connection.alias):
        return _run(connection, statement, parameters)


def _reading_moments(connection: BaseDatabaseWrapper) -> AbstractContextManager[None]:
    """Make Django's cursors read aware datetimes inside, even in a project without ``USE_TZ``."""
    # Django reads naive local times on PostgreSQL without ``USE_TZ``.
    is_local = connection.vendor == "postgresql" and connection.timezone is None
    psycopg = _psycopg() if is_local else None
    return _UNCHANGED if psycopg is None else connection.execute_wrapper(psycopg.read_moments)


def _read_committed(connection: BaseDatabaseWrapper) -> AbstractContextManager[None]:
    """Give new transactions in the block the isolation level that the statements need."""
    if connection.vendor != "postgresql" or connection.in_atomic_block:
        return _UNCHANGED
    _connect(connection)
    psycopg = _psycopg() if connection.autocommit else None
    return _UNCHANGED if psycopg is None else psycopg.read_committed(connection.connection)


@functools.cache
def _psycopg() -> Any:
    """Return `engine.postgres`; ``None`` with another driver, which cannot prepare."""
    try:
        from helix_store.engine import postgres
    except ImportError:
        return None
    return postgres


def _as_sqlite_takes(parameters: Parameters) -> Parameters:
    if type(parameters) is dict:
        # Only PostgreSQL's form needs a list; the query log of DEBUG would also bind it here.
        return {
            name: as_sqlite_text(value) if type(value) is datetime else value
            for name, value in parameters.items()
            if type(value) is not list
        }
    return [as_sqlite_text(value) if type(value) is datetime else value for value in parameters]


def _attempt(connection: BaseDatabaseWrapper, body: Callable[[], R], watched: WatchedTransaction | None) -> R:
    committing = committed = False

    def mark_committed() -> None:
        nonlocal committed
        committed = True

    try:
        try:
            atomic = transaction.atomic(using=connection.alias)
            with _reading_moments(connection), _read_committed(connection), atomic:
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
        # An error of an on_commit hook comes after the commit: the write must not run again.
        if committed and exc.__cause__ is not None:
            raise exc.__cause__ from None
        raise
