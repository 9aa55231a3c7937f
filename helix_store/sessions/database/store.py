"""The state store in the project's own database."""

from __future__ import annotations

from helix_store import conf
from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.engine.database import Database
from helix_store.sessions.backend import Backend
from helix_store.sessions.database.checkpoints import DatabaseCheckpoints
from helix_store.sessions.database.messages import DatabaseMessages
from helix_store.sessions.database.runs import DatabaseRuns
from helix_store.sessions.database.sessions import DatabaseSessions
from helix_store.sessions.database.steps import DatabaseStaging, DatabaseSteps
from helix_store.sessions.database.waiting import DatabaseWaiting
from helix_store.sessions.store import StateStoreBase

__all__ = ["DatabaseStateStore"]


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
        backend = Backend(
            sessions=DatabaseSessions(db),
            messages=DatabaseMessages(db),
            staging=DatabaseStaging(db),
            steps=DatabaseSteps(db),
            checkpoints=DatabaseCheckpoints(db),
            runs=DatabaseRuns(db),
            waiting=DatabaseWaiting(db),
        )
        super().__init__(backend, tenant=db.tenant, limits=limits)
        self._db = db

    @property
    def alias(self) -> str:
        """The database that the store works on."""
        return self._db.alias
