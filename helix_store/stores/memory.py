"""The stores in memory."""

from __future__ import annotations

from functools import cached_property
from typing import NoReturn

from helix_store.budgets.store import InMemoryBudgetStore
from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.core.types import SessionState
from helix_store.engine.memory import MemoryWorld
from helix_store.exceptions import NotSupportedOnBackend
from helix_store.locks.manager import InMemoryLockManager
from helix_store.sessions.backend import Backend
from helix_store.sessions.memory.checkpoints import MemoryCheckpoints
from helix_store.sessions.memory.posts import MemoryPosts
from helix_store.sessions.memory.runs import MemoryRuns
from helix_store.sessions.memory.scope import TenantScope
from helix_store.sessions.memory.sessions import MemorySessions
from helix_store.sessions.memory.steps import MemoryMessages, MemorySteps
from helix_store.sessions.memory.waiting import MemoryWaiting
from helix_store.sessions.store import StateStoreBase
from helix_store.stores.handle import OpensSessions
from helix_store.stores.store import StoreBase, StoreTransaction
from helix_store.streams.manager import InMemoryStreamManager
from helix_store.usage.store import InMemoryUsageStore


class InMemoryStateStore(OpensSessions, StateStoreBase):
    """Sessions in the memory of this process, as in the database store; for tests and experiments.

    Stores with the same ``world`` share their data; by default each store gets a new one.
    """

    def __init__(
        self, *, tenant: str = "", limits: Limits | None = None, world: MemoryWorld | None = None
    ) -> None:
        tenant = validation.tenant(tenant)
        self._scope = TenantScope(MemoryWorld() if world is None else world, tenant=tenant, limits=limits)
        backend = Backend(
            sessions=MemorySessions(self._scope),
            messages=MemoryMessages(self._scope),
            steps=MemorySteps(self._scope),
            checkpoints=MemoryCheckpoints(self._scope),
            runs=MemoryRuns(self._scope),
            waiting=MemoryWaiting(self._scope),
            posts=MemoryPosts(self._scope),
        )
        super().__init__(backend, tenant=tenant, limits=limits)

    @property
    def world(self) -> MemoryWorld:
        """The in-memory database that the store works on."""
        return self._scope.world

    def clear(self) -> None:
        """Delete every session of the tenant, with its usage. Safe to repeat."""
        with self._scope.lock:
            for session_id in self.get_all_session_ids():
                self._scope.forget(session_id)

    def get_all_session_ids(self) -> list[str]:
        """List the ids of the tenant's sessions, in the order in which they were created."""
        with self._scope.lock:
            return list(self._scope.sessions)

    def get_sync(self, session_id: str) -> SessionState | None:
        """Return the current state, exactly as `load_state` does."""
        return self.load_state(session_id)

    @property
    def _parts(self) -> InMemoryStore:
        return InMemoryStore._around(self)


class InMemoryStore(StoreBase):
    """All stores for one tenant in the memory of this process; for tests and experiments.

    Stores with the same ``world`` share their data; by default each store gets a new one. Stores of the same
    world and tenant are equal.
    """

    sessions: InMemoryStateStore

    def __init__(self, *, tenant: str = "", world: MemoryWorld | None = None) -> None:
        self.sessions = InMemoryStateStore(tenant=tenant, world=world)

    @property
    def world(self) -> MemoryWorld:
        """The in-memory database that the store works on."""
        return self.sessions.world

    @cached_property
    def locks(self) -> InMemoryLockManager:
        """The lock manager."""
        return InMemoryLockManager(tenant=self.tenant, world=self.world)

    @cached_property
    def usage(self) -> InMemoryUsageStore:
        """The usage store."""
        return InMemoryUsageStore(tenant=self.tenant, world=self.world)

    @cached_property
    def budgets(self) -> InMemoryBudgetStore:
        """The budget store."""
        return InMemoryBudgetStore(tenant=self.tenant, world=self.world)

    @cached_property
    def streams(self) -> InMemoryStreamManager:
        """The stream manager."""
        return InMemoryStreamManager(tenant=self.tenant, world=self.world)

    def items(self, session_id: str, lane: str = "", *, agent_type: str = "") -> NoReturn:
        """Raise `NotSupportedOnBackend`: items need a database."""
        raise NotSupportedOnBackend("Items need a database; use Store.")

    def transaction(self) -> StoreTransaction:
        """Run all calls of a ``with`` or ``async with`` block in one transaction.

        Other threads wait until it ends. An exception restores the data of all stores of the world and
        propagates. Signals are sent during the block.
        """
        # A table is saved only if it existed before the block.
        _ = self.locks, self.usage, self.budgets, self.streams
        return StoreTransaction(self.world.transaction())

    @property
    def _identity(self) -> tuple[object, str]:
        return self.world, self.tenant

    def __repr__(self) -> str:
        return f"<InMemoryStore tenant={self.tenant!r}>"
