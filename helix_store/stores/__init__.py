"""The public stores."""

from helix_store.stores.database import DatabaseStateStore
from helix_store.stores.memory import InMemoryStateStore, MemoryWorld

__all__ = ["DatabaseStateStore", "InMemoryStateStore", "MemoryWorld"]
