"""The stores in the project's own database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store import conf
from helix_store.budgets.store import DatabaseBudgetStore
from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.core.types import SessionState, StagedChanges
from helix_store.engine.connections import release
from helix_store.engine.database import Call, Database
from helix_store.items import ItemLog
from helix_store.items.rules import ITEMS_AGENT_TYPE
from helix_store.locks.manager import DatabaseLockManager
from helix_store.sessions.backend import Backend
from helix_store.sessions.database.checkpoints import DatabaseCheckpoints
from helix_store.sessions.database.locking import lock_session
from helix_store.sessions.database.messages import DatabaseMessages
from helix_store.sessions.database.posts import DatabasePosts
from helix_store.sessions.database.runs import DatabaseRuns
from helix_store.sessions.database.sessions import DatabaseSessions
from helix_store.sessions.database.steps import DatabaseSteps
from helix_store.sessions.database.waiting import DatabaseWaiting
from helix_store.sessions.requests import CommittedStep, OpenedStep, StagedRow, StepWrite
from helix_store.sessions.store import StateStoreBase
from helix_store.stores.handle import OpensSessions
from helix_store.stores.store import StoreBase, StoreTransaction
from helix_store.streams.manager import DatabaseStreamManager
from helix_store.usage.store import DatabaseUsageStore


class DatabaseStateStore(OpensSessions, StateStoreBase):
    """Durable agent sessions in a Django database.

    ``using`` is a database alias, by default the one that the project's routers return for writing sessions.
    Ids are unique within ``tenant``, and other tenants' ids are invisible. Each write is one transaction that
    joins the caller's own ``atomic()`` block, so a step and the caller's rows commit together.
    Source: the state store of the PostgreSQL store document.
    """

    def __init__(self, using: str | None = None, *, tenant: str = "", limits: Limits | None = None) -> None:
        conf.require_usable_prefix()
        db = Database(using, validation.tenant(tenant), limits)
        sessions = DatabaseSessions(db)
        backend = Backend(
            sessions=sessions,
            messages=DatabaseMessages(db),
            steps=DatabaseSteps(db),
            checkpoints=DatabaseCheckpoints(db),
            runs=DatabaseRuns(db),
            waiting=DatabaseWaiting(db),
            posts=DatabasePosts(db),
        )
        super().__init__(backend, tenant=db.tenant, limits=limits)
        self._db = db
        self._rows = sessions

    @property
    def alias(self) -> str:
        """The database that the store works on."""
        return self._db.alias

    @property
    def _parts(self) -> Store:
        return Store._around(self)


class Store(StoreBase):
    """All stores for one database and tenant.

    ``using`` is a database alias, by default the one that the project's routers return for writing sessions.
    A store is cheap to create and holds no connection. Stores of the same database and tenant are equal.
    """

    sessions: DatabaseStateStore

    def __init__(self, using: str | None = None, *, tenant: str = "") -> None:
        self.sessions = DatabaseStateStore(using, tenant=tenant)

    @property
    def alias(self) -> str:
        """The database that the store works on."""
        return self.sessions.alias

    @cached_property
    def locks(self) -> DatabaseLockManager:
        """The lock manager."""
        return DatabaseLockManager(self.alias, tenant=self.tenant)

    @cached_property
    def usage(self) -> DatabaseUsageStore:
        """The usage store."""
        return DatabaseUsageStore(self.alias, tenant=self.tenant)

    @cached_property
    def budgets(self) -> DatabaseBudgetStore:
        """The budget store."""
        return DatabaseBudgetStore(self.alias, tenant=self.tenant)

    @cached_property
    def streams(self) -> DatabaseStreamManager:
        """The stream manager."""
        return DatabaseStreamManager(self.alias, tenant=self.tenant)

    def items(self, session_id: str, lane: str = "", *, agent_type: str = ITEMS_AGENT_TYPE) -> ItemLog:
        """Return the items of one lane of a session. Sends no query."""
        return ItemLog(session_id, lane, using=self.alias, tenant=self.tenant, agent_type=agent_type)

    def transaction(self) -> StoreTransaction:
        """Run all calls of a ``with`` or ``async with`` block in one transaction, which commits at its end.

        An exception rolls the transaction back and propagates. The block is an ``atomic()`` block: it
        includes your own rows in the same database, and inside another block it is a savepoint. If
        ``ASYNC_THREADS`` is set, ``async with`` raises `OutsideTransaction`.
        """
        return StoreTransaction(self._block())

    @contextmanager
    def _block(self) -> Iterator[None]:
        connection = self.sessions._db.connection
        try:
            with transaction.atomic(using=self.alias):
                yield
        finally:
            release(connection)

    @property
    def connection_of_caller(self) -> BaseDatabaseWrapper | None:
        db = self.sessions._db
        return db.connection if db.in_transaction else None

    def load(self, session_id: str) -> SessionState | None:
        return self.sessions._rows.load(session_id)

    def open_step(
        self, session_id: str, step_id: str | None, run_id: str | None, *, is_capped: bool
    ) -> OpenedStep | None:
        return self.sessions._rows.open_step(session_id, step_id, run_id, is_capped=is_capped)

    def stage(self, session_id: str, step_id: str, changes: StagedChanges) -> StagedRow | None:
        return self.sessions._stage(session_id, step_id, changes)

    def commit_step(self, step: StepWrite) -> CommittedStep:
        """Commit a step and the calls that belong to it, in one transaction.

        If the reply to COMMIT is lost, the transaction runs again unless the database has the step.
        """
        if not (step.after or step.record):
            return self.sessions._commit_step(step)
        db = self.sessions._db
        committed: CommittedStep | None = None

        def write() -> CommittedStep:
            nonlocal committed
            committed = step.written_by(self.sessions._commit_step)
            return committed

        def write_again(call: Call) -> CommittedStep:
            lock_session(db, step.session_id)
            if committed is not None:
                checkpoint_id = committed[0].checkpoint_id
                if self.sessions.get_checkpoint(step.session_id, checkpoint_id) is not None:
                    return committed
            return write()

        return db.committed_once(
            partial(db.transaction, write),
            write_again,
            operation_id=lambda: None if committed is None else committed[0].checkpoint_id,
        )

    @property
    def _identity(self) -> tuple[object, str]:
        return self.alias, self.tenant

    def __repr__(self) -> str:
        return f"<Store {self.alias!r} tenant={self.tenant!r}>"
