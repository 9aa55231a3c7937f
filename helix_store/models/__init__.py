"""The tables, one file per aggregate.

Models are the storage, not the API: read them in queries and the admin, write through
``helix_store.stores``.
"""

from helix_store.models.checkpoints import Checkpoint, CheckpointKind
from helix_store.models.locks import Lock
from helix_store.models.messages import Message
from helix_store.models.operations import Operation
from helix_store.models.runs import InterruptRequest, Run
from helix_store.models.sessions import Session
from helix_store.models.staging import StagedChange
from helix_store.models.streams import Stream, StreamChunk
from helix_store.models.sub_sessions import SubSessionRef
from helix_store.models.usage import UsageEntry

__all__ = [
    "Checkpoint",
    "CheckpointKind",
    "InterruptRequest",
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
