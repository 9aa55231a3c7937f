"""Access to a database by single statements: a call enters a database, runs statements on the connection of
its thread, and releases the connection. `engine.database` adds transactions.
"""

from __future__ import annotations

import functools
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeVar, cast

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store import conf
from helix_store.core.limits import Limits
from helix_store.core.moments import as_sqlite_text
from helix_store.engine.aliases import alias_of
from helix_store.engine.citus import run_in_order
from helix_store.engine.commits import (
    CALL_ID_BYTES,
    END_SESSION,
    NO_ANSWER,
    WAIT_BRIEFLY,
    patient_pauses,
)
from helix_store.engine.connections import (
    is_kept_open,
    note_opened_by_call,
    open_blocks,
    release,
    require_thread_of_caller,
)
from helix_store.engine.errors import is_retryable_transaction, is_serialization_failure, raise_mapped
from helix_store.engine.forks import used_aliases
from helix_store.engine.statement import Statement
from helix_store.exceptions import OutcomeUnknown

R = TypeVar("R")

Rows = list[tuple[Any, ...]]
Parameters = Mapping[str, Any] | Sequence[Any]

_UNCHANGED: Final = nullcontext()


class Call(NamedTuple):
    """A call that has entered a database, with the connection of its thread. Its statements enter no more."""

    database: Access
    connection: BaseDatabaseWrapper
    form: conf.Form
    id: str = ""
    """A random id by which a write can find its own result after a lost reply (see `engine.commits`)."""

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
        if not self.form.has_fast_writes:
            return False
        if connection.in_atomic_block:
            return True
        _open(connection)
        return bool(connection.autocommit)

    def read(self, statement: Statement, parameters: Parameters) -> Rows:
        """Run a statement that only reads, and return its rows."""
        connection, form = self.connection, self.form
        if form.tells_tenant:
            execute = functools.partial(self.database.execute, statement, parameters)
            return self.database.transaction(execute, only_reads=True)
        is_prepared = form.has_fast_reads and not (form.is_citus and statement.citus)
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
        connection, form = self.connection, self.form
        if form.tells_tenant or (form.is_citus and statement.citus):
            return self.database.transaction(lambda: self.database.execute(statement, parameters))
        is_alone = False
        try:
            if not connection.in_atomic_block:
                connect(connection)
                is_alone = connection.autocommit
            if is_alone or (connection.in_atomic_block and form.has_fast_writes):
                return (_run_prepared if form.has_fast_writes else run)(connection, statement, parameters)
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
            return _run_prepared(connection, statement, parameters)
        except Exception as exc:
            if is_alone and is_retryable_transaction(exc):
                return []
            raise_mapped(connection, exc, committing=is_alone, is_single_statement=is_alone)
            raise
        finally:
            release_unless_kept(connection)


@dataclass(frozen=True, slots=True)
class Access(ABC):
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
            require_thread_of_caller(connection)
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
        return Call(self, connection, conf.form(connection.settings_dict) if is_postgresql else conf.PORTABLE)

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
        otherwise: Callable[[], R],
        look_first: Callable[[str], R],
        operation_id: str,
    ) -> R:
        """Return the result of ``read`` for the row of a write in one statement, as `committed_once` does.

        If a write may not be one statement here, or if this one changes nothing, return the result of
        ``otherwise``, the portable form. The statement records the id of the call, ``%(call_id)s``; if the
        reply to its COMMIT is lost, ``look_first`` looks for this id.
        """
        call = self.enter()
        if not call.has_fast_writes:
            return otherwise()

        def write(call: Call) -> R:
            for row in call.try_write(statement, {**parameters, "call_id": call.id}):
                return read(row)
            return otherwise()

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

    @abstractmethod
    def transaction(self, body: Callable[[], R], call: Call | None = None, *, only_reads: bool = False) -> R:
        """Run ``body`` in one transaction."""

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
