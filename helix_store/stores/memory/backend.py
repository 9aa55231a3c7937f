"""The in-memory back end: all verbs over one scope."""

from __future__ import annotations

from helix_store.stores.backend import (
    CheckpointVerbs,
    InterruptVerbs,
    MessageVerbs,
    RunVerbs,
    SessionVerbs,
    StagingVerbs,
    StepVerbs,
    SubSessionVerbs,
    SuspensionVerbs,
    ToolCallVerbs,
)
from helix_store.stores.memory.checkpoints import MemoryCheckpoints
from helix_store.stores.memory.interrupts import MemoryInterrupts
from helix_store.stores.memory.messages import MemoryMessages
from helix_store.stores.memory.runs import MemoryRuns
from helix_store.stores.memory.scope import TenantScope
from helix_store.stores.memory.sessions import MemorySessions
from helix_store.stores.memory.staging import MemoryStaging
from helix_store.stores.memory.steps import MemorySteps
from helix_store.stores.memory.sub_sessions import MemorySubSessions
from helix_store.stores.memory.suspension import MemorySuspensions
from helix_store.stores.memory.tool_calls import MemoryToolCalls

__all__ = ["MemoryBackend"]


class MemoryBackend:
    def __init__(self, scope: TenantScope) -> None:
        self.sessions: SessionVerbs = MemorySessions(scope)
        self.messages: MessageVerbs = MemoryMessages(scope)
        self.staging: StagingVerbs = MemoryStaging(scope)
        self.steps: StepVerbs = MemorySteps(scope)
        self.checkpoints: CheckpointVerbs = MemoryCheckpoints(scope)
        self.runs: RunVerbs = MemoryRuns(scope)
        self.sub_sessions: SubSessionVerbs = MemorySubSessions(scope)
        self.interrupts: InterruptVerbs = MemoryInterrupts(scope)
        self.tool_calls: ToolCallVerbs = MemoryToolCalls(scope)
        self.suspensions: SuspensionVerbs = MemorySuspensions(scope)
