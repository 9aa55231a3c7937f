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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, TypeVar, cast

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.core.tenants import TENANT_VARIABLE
from helix_store.engine.access import (
    Access,
    Call,
    LostReply,
    Parameters,
    Rows,
    connect,
    connect_first,
    postgres_module,
    reading_moments,
    release_unless_kept,
    run,
)
from helix_store.engine.commits import NO_ANSWER, patient_pauses
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


class Database(Access):
    """The database of a store, with transactions."""

    __slots__ = ()

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
                connect_first(connection)
                with transaction.atomic(using=connection.alias):
                    run(connection, _ONE_MOMENT, {})
                    yield
                return
            # Not atomic(): with transaction_mode=IMMEDIATE it would lock writers out.
            run(connection, _BEGIN, {})
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

    def transaction(self, body: Callable[[], R], call: Call | None = None) -> R:
        """Run ``body`` in one transaction, by default in a call of its own.

        Inside the caller's ``atomic()`` block it is a savepoint: the caller owns the commit and any retry.
        Otherwise a transaction that the database aborted because of another one runs again, and so does a
        transaction whose COMMIT did not reach the server. If only the reply was lost, the transaction's
        result is returned.
        """
        return self._transaction(body, call, only_reads=False)

    def _transaction(self, body: Callable[[], R], call: Call | None, *, only_reads: bool) -> R:
        _, connection, form, *_ = call or self.enter()
        if form.tells_tenant:
            body = functools.partial(self._after_the_tenant, body)
        is_own = not connection.in_atomic_block
        # On Citus, the node with the tables may have committed what the entry node rolled back.
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

    def _after_the_tenant(self, body: Callable[[], R]) -> R:
        """Set the tenant for the policies of the database, and run ``body``."""
        self.execute(_SET_TENANT, {"tenant": self.tenant})
        return body()

    def read_in_transaction(self, body: Callable[[], R]) -> R:
        return self._transaction(body, None, only_reads=True)

    def _after_lost_reply(self, lost: LostReply, again: Callable[[Call], R]) -> R:
        def after_the_lost_one() -> R:
            if self.is_postgresql:
                self.execute(_WAIT_BRIEFLY, {})
            return again(self.enter()._replace(id=lost.call.id))

        # With an id, the store has already waited for its transaction.
        for pause in patient_pauses() if lost.error.operation_id is None else (0.0,):
            try:
                if lost.session:
                    seconds = time.monotonic() - lost.began
                    self.read(_END_SESSION, {"number": lost.session, "seconds": seconds})
                return self.transaction(after_the_lost_one)
            except NO_ANSWER as exc:
                if isinstance(exc, OutcomeUnknown) and exc.operation_id is not None:
                    break
                time.sleep(pause)
        raise OutcomeUnknown(lost.operation_id()) from lost.error.__cause__


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


@contextmanager
def _on_postgresql(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Set what the statements of a transaction need."""
    with reading_moments(connection), _read_committed(connection):
        yield


def _read_committed(connection: BaseDatabaseWrapper) -> AbstractContextManager[None]:
    """Give new transactions in the block the isolation level that the statements need."""
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
            with _on_postgresql(connection) if connection.vendor == "postgresql" else _UNCHANGED, atomic:
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
