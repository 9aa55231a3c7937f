"""The one door to a database: every statement of the app goes through `Database`.

For each it answers four questions: are the driver's errors mapped, is the connection released afterwards,
which transaction is it part of, and is it prepared.

============== ====== ======== ===================================================== ========
method         errors released transaction                                           prepared
============== ====== ======== ===================================================== ========
`read`         yes    yes      the caller's, if one is open                          yes
`write`        yes    yes      one statement is one; a savepoint in the caller's     yes
`query`        yes    yes      the caller's, if one is open; for reads by the ORM    no
`transaction`  yes    yes      one, run again when the database gave it up           no
`snapshot`     yes    yes      one for reads, or the caller's, if one is open        no
`execute`      no     no       the one that is open: part of one of the above        no
============== ====== ======== ===================================================== ========

Statements are prepared on PostgreSQL, unless ``HELIX_STORE["FAST_PATHS"]`` is False. On Citus, see
`engine.citus`, none is, and a write that has a form for it is a transaction.
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
from helix_store.core.tenants import TENANT_VARIABLE
from helix_store.engine.aliases import alias_of
from helix_store.engine.citus import run_in_order
from helix_store.engine.commits import WatchedTransaction
from helix_store.engine.connections import release, release_after, release_once
from helix_store.engine.errors import (
    is_retryable_transaction,
    is_serialization_failure,
    mapped_errors,
    raise_mapped,
)
from helix_store.engine.statement import Statement
from helix_store.exceptions import HelixStoreError, OutcomeUnknown, StoreBusy, StoreUnavailable
from helix_store.models.fields import is_read_as_local_time, stored_moment

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
# Until the end of the transaction: behind a pooler the connection then serves another client.
_SET_TENANT: Final = Statement(f"SELECT pg_catalog.set_config('{TENANT_VARIABLE}', ':' || %(tenant)s, true)")


@dataclass(frozen=True, slots=True)
class Database:
    """An alias, a tenant and the limits. The limits that are not given are looked up at each use.

    Without an alias, the project's routers are asked once, with the hint ``tenant``: the statements of a
    call, and the keys that they pass on, belong to one database also while the answer of the routers changes.
    """

    using: str | None
    tenant: str
    given_limits: Limits | None = None
    _placed: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def alias(self) -> str:
        if self.using:
            return self.using
        # Reads go where writes go: a decision taken on a replica would be a stale one.
        placed = self._placed.get(self.tenant)
        return placed or self._placed.setdefault(self.tenant, alias_of(self.tenant))

    @property
    def connection(self) -> BaseDatabaseWrapper:
        return connections[self.alias]

    @property
    def limits(self) -> Limits:
        return conf.limits(self.given_limits)

    @property
    def has_row_locks(self) -> bool:
        """False on SQLite, where one write transaction at a time takes their place."""
        return self.connection.features.has_select_for_update

    @property
    def is_postgresql(self) -> bool:
        """For differences outside of a `Statement`: arrays as parameters, and NOTIFY."""
        return self.connection.vendor == "postgresql"

    @property
    def tells_tenant(self) -> bool:
        """Whether policies of the database look at the tenant: then each transaction begins with it."""
        return conf.row_level_security() and self.is_postgresql

    @property
    def in_transaction(self) -> bool:
        """Whether a write becomes part of a transaction of the caller."""
        connection = self.connection
        is_connected = connection.connection is not None
        autocommit = connection.autocommit if is_connected else connection.settings_dict["AUTOCOMMIT"]
        return connection.in_atomic_block or not autocommit

    @property
    def session_number(self) -> int:
        """The number of the server's session; 0 on SQLite, and with a driver that does not know it.

        Opens the connection. Behind a pooler it is a number that the pooler made up.
        """
        connection = self.connection
        if connection.vendor != "postgresql":
            return 0
        try:
            _connect(connection)
        except Exception as exc:
            raise_mapped(connection, exc)
            raise
        pgconn = getattr(connection.connection, "pgconn", None)
        return 0 if pgconn is None else int(pgconn.backend_pid)

    @property
    def has_fast_reads(self) -> bool:
        """Whether the forms that only PostgreSQL runs may be used for a read."""
        return _is_fast(self.connection)

    @property
    def has_fast_writes(self) -> bool:
        """Whether a write may take the form of one statement with all of its conditions.

        On PostgreSQL, where a statement commits alone or is part of an ``atomic()`` block.
        """
        connection = self.connection
        if not _is_fast(connection):
            return False
        if connection.in_atomic_block:
            return True
        try:
            _connect(connection)
        except Exception as exc:
            raise_mapped(connection, exc)
            raise
        return bool(connection.autocommit)

    def read(self, statement: Statement, parameters: Parameters) -> Rows:
        """Run a statement that only reads, and return its rows."""
        if self.tells_tenant:
            return self._transaction(lambda: self.execute(statement, parameters), only_reads=True)
        connection = self.connection
        try:
            if not _is_fast(connection):
                return _run(connection, statement, parameters)
            if not connection.in_atomic_block:
                _connect(connection)
            return _run_prepared(connection, statement, parameters)
        except Exception as exc:
            raise_mapped(connection, exc)
            raise
        finally:
            release(connection)

    def write(self, statement: Statement, parameters: Parameters) -> Rows:
        """Run a statement that writes, and return its rows.

        Outside a block the statement is a whole transaction, which saves the trips for ``BEGIN`` and
        ``COMMIT``. Inside the caller's block it is a savepoint: the caller owns the commit and any retry.
        """
        connection = self.connection
        if self.tells_tenant or (statement.citus and conf.is_citus(connection.settings_dict)):
            return self.transaction(lambda: self.execute(statement, parameters))
        is_alone = False
        try:
            if not connection.in_atomic_block:
                _connect(connection)
                is_alone = connection.autocommit
            if is_alone or (connection.in_atomic_block and _is_fast(connection)):
                run = _run_prepared if _is_fast(connection) else _run
                return run(connection, statement, parameters)
        except Exception as exc:
            if not (is_alone and is_serialization_failure(exc)):
                # Once connected, an error of the connection leaves open whether the statement was committed.
                raise_mapped(connection, exc, committing=is_alone, is_single_statement=is_alone)
                raise
        finally:
            release(connection)
        return self.transaction(lambda: _run(connection, statement, parameters))

    def try_write(self, statement: Statement, parameters: Parameters) -> Rows:
        """`write`, right after `has_fast_writes`: no rows when it was given up for another transaction."""
        connection = self.connection
        is_alone = not connection.in_atomic_block
        try:
            return _run_prepared(connection, statement, parameters)
        except Exception as exc:
            if is_alone and is_retryable_transaction(exc):
                return []
            raise_mapped(connection, exc, committing=is_alone, is_single_statement=is_alone)
            raise
        finally:
            release(connection)

    def query(self, body: Callable[[], R]) -> R:
        """Run queries of the ORM that only read."""
        if self.tells_tenant:
            return self._transaction(body, only_reads=True)
        connection = self.connection
        with release_after(connection), mapped_errors(connection), _reading_moments(connection):
            return body()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Make all reads of a ``with`` block see the database at one moment. Nothing waits for them.

        In a transaction of the caller, they see what its isolation level shows.
        """
        connection = self.connection
        if self.in_transaction:
            yield
            return
        with release_once(connection), mapped_errors(connection):
            if self.is_postgresql:
                with transaction.atomic(using=connection.alias):
                    _run(connection, _ONE_MOMENT, {})
                    yield
                return
            # Not atomic(): with transaction_mode=IMMEDIATE it would lock writers out.
            _run(connection, _BEGIN, {})
            try:
                yield
            finally:
                # Not a statement: after some errors SQLite has rolled back already, and refuses another one.
                connection.rollback()

    def transaction(self, body: Callable[[], R]) -> R:
        """Run ``body`` in one transaction.

        Inside the caller's ``atomic()`` block it is a savepoint: the caller owns the commit and any retry.
        Otherwise a transaction that the database gave up for another one is run again, and so is one whose
        COMMIT was lost on the way. When only the reply was lost, the transaction's result is returned.
        """
        return self._transaction(body, only_reads=False)

    def _transaction(self, body: Callable[[], R], *, only_reads: bool) -> R:
        connection = self.connection
        body = self._telling_tenant(body)
        with release_after(connection):
            attempts = 1 if connection.in_atomic_block else _ATTEMPTS
            for attempt in range(attempts):
                is_last = attempt + 1 == attempts
                watched = WatchedTransaction(connection, only_reads=only_reads)
                try:
                    return _attempt(connection, body, watched)
                except OutcomeUnknown as exc:
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

    def _telling_tenant(self, body: Callable[[], R]) -> Callable[[], R]:
        """``body``, after the tenant was told to the policies of the database, if there may be any."""
        if not self.tells_tenant:
            return body

        def after_the_tenant() -> R:
            self.execute(_SET_TENANT, {"tenant": self.tenant})
            return body()

        return after_the_tenant

    def execute(self, statement: Statement, parameters: Parameters) -> Rows:
        """Run a statement as part of the transaction or query that is open, and return its rows."""
        return _run(self.connection, statement, parameters)


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


def _is_fast(connection: BaseDatabaseWrapper) -> bool:
    is_postgresql = connection.vendor == "postgresql"
    return is_postgresql and conf.fast_paths() and not conf.is_citus(connection.settings_dict)


def _connect(connection: BaseDatabaseWrapper) -> None:
    """Do what Django's ``cursor()`` does before a statement, ``CONN_HEALTH_CHECKS`` included."""
    if connection.health_check_enabled:  # type: ignore[attr-defined]  # an attribute of Django's own
        connection.close_if_health_check_failed()
    if connection.connection is None:
        connection.ensure_connection()


def _run(connection: BaseDatabaseWrapper, statement: Statement, parameters: Parameters) -> Rows:
    """Run a statement by a cursor of Django."""
    # Not closed: a cursor of either driver holds no resource after its rows were fetched.
    cursor = connection.cursor()
    if connection.vendor == "sqlite":
        cursor.execute(statement.sqlite, _as_sqlite_takes(connection, parameters))
        rows: Rows = cursor.fetchall()
        return rows
    with _reading_moments(connection):
        if statement.citus and conf.is_citus(connection.settings_dict):
            return run_in_order(cursor, statement.citus, cast(Mapping[str, Any], parameters))
        cursor.execute(statement.postgresql, parameters)
    rows = [] if cursor.description is None else cursor.fetchall()
    return rows


def _run_prepared(connection: BaseDatabaseWrapper, statement: Statement, parameters: Any) -> Rows:
    """Run a statement on an open connection, prepared if the driver can.

    In an open transaction it leaves no trace if it fails.
    """
    in_savepoint = connection.in_atomic_block or not connection.autocommit
    fetch = _of_psycopg("fetch_prepared")
    rows: Rows | None = None
    if fetch is not None:
        rows = fetch(connection, statement, parameters, in_savepoint=in_savepoint)
    if rows is not None:
        return rows
    if not in_savepoint:
        return _run(connection, statement, parameters)
    with transaction.atomic(using=connection.alias):
        return _run(connection, statement, parameters)


def _reading_moments(connection: BaseDatabaseWrapper) -> AbstractContextManager[None]:
    """Inside, cursors of Django read aware datetimes, also in a project without ``USE_TZ``."""
    if is_read_as_local_time(connection) and (read_moments := _of_psycopg("read_moments")):
        return connection.execute_wrapper(read_moments)
    return _UNCHANGED


def _read_committed(connection: BaseDatabaseWrapper) -> AbstractContextManager[None]:
    """Inside, a new transaction has the isolation that the statements need, whatever the default is."""
    if connection.vendor != "postgresql" or connection.in_atomic_block:
        return _UNCHANGED
    _connect(connection)
    read_committed = _of_psycopg("read_committed") if connection.autocommit else None
    return read_committed(connection.connection) if read_committed else _UNCHANGED


@functools.cache
def _of_psycopg(name: str) -> Any:
    """A function of `engine.postgres`; ``None`` with another driver, which cannot prepare."""
    try:
        from helix_store.engine import postgres
    except ImportError:
        return None
    return getattr(postgres, name)


def _as_sqlite_takes(connection: BaseDatabaseWrapper, parameters: Parameters) -> Parameters:
    if type(parameters) is dict:
        # A list is for the form of PostgreSQL. The query log of DEBUG would bind it here too.
        return {
            name: stored_moment(connection, value) if type(value) is datetime else value
            for name, value in parameters.items()
            if type(value) is not list
        }
    return [stored_moment(connection, value) if type(value) is datetime else value for value in parameters]


def _attempt(connection: BaseDatabaseWrapper, body: Callable[[], R], watched: WatchedTransaction) -> R:
    committing = committed = False

    def mark_committed() -> None:
        nonlocal committed
        committed = True

    try:
        with mapped_errors(connection, committing=lambda: committing), _reading_moments(connection):
            with _read_committed(connection), transaction.atomic(using=connection.alias):
                transaction.on_commit(mark_committed, using=connection.alias)
                with watched:
                    result = watched.result = body()
                committing = not connection.savepoint_ids
            return result
    except HelixStoreError as exc:
        # An error of an on_commit hook comes after the commit: the write must not run again.
        if committed and exc.__cause__ is not None:
            raise exc.__cause__ from None
        raise
