"""Two more faces of the store: checkpoints of graphs, and snapshots of agents."""

from helix_store.checkpointers.claims import Claim
from helix_store.checkpointers.graph import GraphCheckpointStore
from helix_store.checkpointers.snapshots import InMemorySnapshotCheckpointer, SnapshotCheckpointer

__all__ = ["Claim", "GraphCheckpointStore", "InMemorySnapshotCheckpointer", "SnapshotCheckpointer"]
