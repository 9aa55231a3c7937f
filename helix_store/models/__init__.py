"""The tables. Models are the storage, not the API: write through ``helix_store.stores`` only."""

from helix_store.models.checkpoints import Checkpoint, CheckpointKind
from helix_store.models.items import Item
from helix_store.models.locks import Lock
from helix_store.models.messages import Message
from helix_store.models.runs import InterruptRequest, Run, SubSessionRef
from helix_store.models.sessions import Session
from helix_store.models.steps import Operation, StagedChange
from helix_store.models.streams import Stream, StreamChunk
from helix_store.models.usage import UsageEntry

__all__ = [
    "Checkpoint",
    "CheckpointKind",
    "InterruptRequest",
    "Item",
    "Lock",
    "Message",
    "Operation",
    "Run",
    "Session",
    "StagedChange",
    "Stream",
    "StreamChunk",
    "SubSessionRef",
    "UsageEntry",
]
