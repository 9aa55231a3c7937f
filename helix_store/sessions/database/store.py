"""The state store in the project's own database."""

from __future__ import annotations

from helix_store import conf
from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.engine.database import Database
from helix_store.sessions.database.checkpoints import DatabaseCheckpoints
from helix_store.sessions.database.messages import DatabaseMessages
from helix_store.sessions.database.runs import DatabaseInterrupts, DatabaseRuns, DatabaseSubSessions
from helix_store.sessions.database.sessions import DatabaseSessions
from helix_store.sessions.database.steps import DatabaseStaging, DatabaseSteps
from helix_store.sessions.database.waiting import DatabaseSuspensions, DatabaseToolCalls
from helix_store.sessions.store import StateStoreBase

__all__ = ["DatabaseBackend", "DatabaseStateStore"]


class DatabaseBackend:
    def __init__(self, db: Database) -> None:
        self.sessions = DatabaseSessions(db)
        self.messages = DatabaseMessages(db)
        self.staging = DatabaseStaging(db)
        self.steps = DatabaseSteps(db)
        self.checkpoints = DatabaseCheckpoints(db)
        self.runs = DatabaseRuns(db)
        self.sub_sessions = DatabaseSubSessions(db)
        self.interrupts = DatabaseInterrupts(db)
        self.tool_calls = DatabaseToolCalls(db)
        self.suspensions = DatabaseSuspensions(db)


class DatabaseStateStore(StateStoreBase):
    """Durable agent sessions in a Django database.

    ``using`` is a database alias, by default the one that the project's routers name for writing sessions.
    Ids are unique within ``tenant`` and another tenant's ids do not exist. Each write is one transaction
    that joins the caller's own ``atomic()`` block: a step and the caller's rows commit together.
    Source: the state store of the PostgreSQL store document.
    """

    def __init__(self, using: str | None = None, *, tenant: str = "", limits: Limits | None = None) -> None:
        conf.require_usable_prefix()
        db = Database(using, validation.tenant(tenant), limits)
        super().__init__(DatabaseBackend(db), tenant=db.tenant, limits=limits)
        self._db = db

    @property
    def alias(self) -> str:
        """The database that the store works on."""
        return self._db.alias
