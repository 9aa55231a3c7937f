"""The contracts of the stores in one process, without a database."""

from helix_store.stores.memory.state_store import InMemoryStateStore
from helix_store.stores.memory.world import MemoryWorld

__all__ = ["InMemoryStateStore", "MemoryWorld"]
