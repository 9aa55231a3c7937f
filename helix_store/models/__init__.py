"""The tables. Models are storage, not API: write only through ``helix_store.stores``."""

from helix_store.models.budgets import Budget, BudgetCounter
from helix_store.models.checkpoints import Checkpoint, CheckpointKind
from helix_store.models.items import Item
from helix_store.models.locks import Lock
from helix_store.models.messages import Message, Post, PostState
from helix_store.models.runs import InterruptRequest, Run, SubSessionRef
from helix_store.models.sessions import Session
from helix_store.models.steps import Operation, StagedChange
from helix_store.models.streams import Stream, StreamChunk
from helix_store.models.usage import UsageEntry

__all__ = [
    "Budget",
    "BudgetCounter",
    "Checkpoint",
    "CheckpointKind",
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
    "UsageEntry",
]
