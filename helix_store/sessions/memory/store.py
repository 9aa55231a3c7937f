"""The state store in memory."""

from __future__ import annotations

from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.core.types import SessionState
from helix_store.engine.memory import MemoryWorld
from helix_store.sessions.backend import Backend
from helix_store.sessions.memory.checkpoints import MemoryCheckpoints
from helix_store.sessions.memory.runs import MemoryRuns
from helix_store.sessions.memory.scope import TenantScope
from helix_store.sessions.memory.sessions import MemorySessions
from helix_store.sessions.memory.steps import MemoryMessages, MemoryStaging, MemorySteps
from helix_store.sessions.memory.waiting import MemoryWaiting
from helix_store.sessions.store import StateStoreBase

__all__ = ["InMemoryStateStore"]


class InMemoryStateStore(StateStoreBase):
    """Sessions in the memory of this process, under the contract of the database store; for tests and trials.

    Stores with the same ``world`` share their data; by default a store has a new one.
    """

    def __init__(
        self, *, tenant: str = "", limits: Limits | None = None, world: MemoryWorld | None = None
    ) -> None:
        tenant = validation.tenant(tenant)
        self._scope = TenantScope(MemoryWorld() if world is None else world, tenant=tenant, limits=limits)
        backend = Backend(
            sessions=MemorySessions(self._scope),
            messages=MemoryMessages(self._scope),
            staging=MemoryStaging(self._scope),
            steps=MemorySteps(self._scope),
            checkpoints=MemoryCheckpoints(self._scope),
            runs=MemoryRuns(self._scope),
            waiting=MemoryWaiting(self._scope),
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
        """The ids of the tenant's sessions, in the order of their creation."""
        with self._scope.lock:
            return list(self._scope.sessions)

    def get_sync(self, session_id: str) -> SessionState | None:
        """The current state, exactly as `load_state` returns it."""
        return self.load_state(session_id)
