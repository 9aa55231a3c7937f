"""Checkpointers that use the state store's tables: checkpoints of graphs, and snapshots of agents."""

from helix_store.checkpointers.graph.store import GraphCheckpointStore
from helix_store.checkpointers.snapshots import Claim, InMemorySnapshotCheckpointer, SnapshotCheckpointer

__all__ = ["Claim", "GraphCheckpointStore", "InMemorySnapshotCheckpointer", "SnapshotCheckpointer"]
