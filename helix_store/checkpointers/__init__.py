"""Checkpointers that use the state store's tables: checkpoints of graphs, and snapshots of agents."""

from helix_store.checkpointers.graph.store import GraphCheckpointStore
from helix_store.checkpointers.graph.types import GraphCheckpoint, GraphSession, StoredMessage
from helix_store.checkpointers.snapshots import (
    CheckpointMeta,
    Claim,
    InMemorySnapshotCheckpointer,
    SnapshotCheckpointer,
)

__all__ = [
    "CheckpointMeta",
    "Claim",
    "GraphCheckpoint",
    "GraphCheckpointStore",
    "GraphSession",
    "InMemorySnapshotCheckpointer",
    "SnapshotCheckpointer",
    "StoredMessage",
]
