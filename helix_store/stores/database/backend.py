"""The database back end: all verbs on one scope."""

from __future__ import annotations

from helix_store.stores.database.fast_paths import (
    FastCheckpoints,
    FastMessages,
    FastSessions,
    FastStaging,
    FastSteps,
)
from helix_store.stores.database.interrupts import DatabaseInterrupts
from helix_store.stores.database.runs import DatabaseRuns
from helix_store.stores.database.scope import Scope
from helix_store.stores.database.sub_sessions import DatabaseSubSessions
from helix_store.stores.database.suspension import DatabaseSuspensions
from helix_store.stores.database.tool_calls import DatabaseToolCalls

__all__ = ["DatabaseBackend"]


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
