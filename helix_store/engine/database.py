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
`engine.citus`), only reads are prepared, and a write that has a form for Citus is a transaction.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, TypeVar, cast

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store import conf
from helix_store.core.moments import as_utc
from helix_store.core.tenants import TENANT_VARIABLE
from helix_store.engine.access import (
    Access,
    Call,
    Parameters,
    Rows,
    connect,
    connect_first,
    postgres_module,
    reading_moments,
    release_unless_kept,
    run,
)
from helix_store.engine.citus import STAY_ON_NODE
from helix_store.engine.clocks import NOW
from helix_store.engine.connections import release_once
from helix_store.engine.errors import is_retryable_transaction, mapped_errors, raise_mapped
from helix_store.engine.statement import Statement
from helix_store.exceptions import HelixStoreError, OutcomeUnknown, StoreBusy, StoreUnavailable

if TYPE_CHECKING:
    from helix_store.engine.postgres import WatchedTransaction

__all__ = ["Call", "Database", "DatabaseOperations", "Parameters", "Rows", "reads", "writes"]

P = ParamSpec("P")
R = TypeVar("R")

_ATTEMPTS: Final = 5
_FIRST_PAUSE_SECONDS: Final = 0.01
_UNCHANGED: Final = nullcontext()
_OPERATIONS: Final = 100_000
"""The number of instructions of SQLite's virtual machine that take a few milliseconds."""
_ONE_MOMENT: Final = Statement("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
_BEGIN: Final = Statement("BEGIN DEFERRED")
# This lasts until the end of the transaction: behind a pooler, the connection then serves another client.
_SET_TENANT: Final = Statement(f"SELECT pg_catalog.set_config('{TENANT_VARIABLE}', ':' || %(tenant)s, true)")


class Database(Access):
    """The database of a store, with transactions and queries of the ORM."""

    __slots__ = ()

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
        _, connection, form, *_ = call or self.enter()
        if form.tells_tenant:
            body = functools.partial(self._after, _SET_TENANT, body)
        elif form.is_citus and not only_reads:
            body = functools.partial(self._after, STAY_ON_NODE, body)
        is_own = not connection.in_atomic_block
        # On Citus, the node with the tables may have committed a transaction that the entry node rolled back.
        is_watched = is_own and connection.vendor == "postgresql" and not (only_reads or form.is_citus)
        driver = postgres_module() if is_watched else None
        attempts = _ATTEMPTS if is_own else 1
        try:
            for attempt in range(attempts):
                is_last = attempt + 1 == attempts
                watched = None if driver is None else driver.WatchedTransaction(connection)
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
            if call is None:
                release_unless_kept(connection)

    def _after(self, first: Statement, body: Callable[[], R]) -> R:
        """Run ``body`` after the statement with which every transaction begins here."""
        self.execute(first, {"tenant": self.tenant})
        return body()


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
            with reading_moments(connection), _read_committed(connection), atomic:
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
