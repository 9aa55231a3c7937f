"""The state store in the project's own database."""

from __future__ import annotations

from helix_store import conf
from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.engine.database import Scope
from helix_store.sessions.database.fast_reads import FastCheckpoints, FastMessages
from helix_store.sessions.database.fast_sessions import FastSessions
from helix_store.sessions.database.fast_steps import FastStaging, FastSteps
from helix_store.sessions.database.runs import DatabaseInterrupts, DatabaseRuns, DatabaseSubSessions
from helix_store.sessions.database.waiting import DatabaseSuspensions, DatabaseToolCalls
from helix_store.sessions.store import StateStoreBase

__all__ = ["DatabaseBackend", "DatabaseStateStore"]


class DatabaseBackend:
    def __init__(self, scope: Scope) -> None:
        self.sessions = FastSessions(scope)
        self.messages = FastMessages(scope)
        self.staging = FastStaging(scope)
        self.steps = FastSteps(scope)
        self.checkpoints = FastCheckpoints(scope)
        self.runs = DatabaseRuns(scope)
        self.sub_sessions = DatabaseSubSessions(scope)
        self.interrupts = DatabaseInterrupts(scope)
        self.tool_calls = DatabaseToolCalls(scope)
        self.suspensions = DatabaseSuspensions(scope)


class DatabaseStateStore(StateStoreBase):
    """Durable agent sessions in a Django database.

    ``using`` is a database alias, by default the one that the project's routers name for writing sessions.
    Ids are unique within ``tenant`` and another tenant's ids do not exist. Each write is one transaction
    that joins the caller's own ``atomic()`` block: a step and the caller's rows commit together.
    Source: the state store of the PostgreSQL store document.
    """

    def __init__(self, using: str | None = None, *, tenant: str = "", limits: Limits | None = None) -> None:
        conf.require_usable_prefix()
        scope = Scope(using, validation.tenant(tenant), limits)
        super().__init__(DatabaseBackend(scope), tenant=scope.tenant, limits=limits)
        self._scope = scope

    @property
    def alias(self) -> str:
        """The database that the store works on."""
        return self._scope.alias
