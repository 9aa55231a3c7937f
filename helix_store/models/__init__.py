"""The tables. Models are storage, not API: write only through ``helix_store.stores``."""

from helix_store.models.locks import Lock
from helix_store.models.sessions import (
    Checkpoint,
    CheckpointKind,
    Decision,
    DecisionOutcome,
    Effect,
    EffectState,
    InterruptRequest,
    Item,
    Message,
    Operation,
    Post,
    PostState,
    Run,
    Session,
    StagedChange,
    SubSessionRef,
    Tombstone,
)
from helix_store.models.streams import Stream, StreamChunk
from helix_store.models.usage import Budget, BudgetCounter, UsageEntry

__all__ = [
    "Budget",
    "BudgetCounter",
    "Checkpoint",
    "CheckpointKind",
    "Decision",
    "DecisionOutcome",
    "Effect",
    "EffectState",
    "InterruptRequest",
    "Item",
    "Lock",
    "Message",
    "Operation",
    "Post",
    "PostState",
    "Run",
    "Session",
    "StagedChange",
    "Stream",
    "StreamChunk",
    "SubSessionRef",
    "Tombstone",
    "UsageEntry",
]
