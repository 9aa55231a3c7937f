"""The public stores."""

from helix_store.stores.api.held_lock import Lock
from helix_store.stores.database import DatabaseStateStore
from helix_store.stores.database.locks import DatabaseLockManager
from helix_store.stores.database.streams import DatabaseStreamManager
from helix_store.stores.database.usage import DatabaseUsageStore
from helix_store.stores.memory import InMemoryStateStore, MemoryWorld
from helix_store.stores.memory.locks import InMemoryLockManager
from helix_store.stores.memory.streams import InMemoryStreamManager
from helix_store.stores.memory.usage import InMemoryUsageStore
from helix_store.stores.noop_locks import NoOpLockManager

__all__ = [
    "DatabaseLockManager",
    "DatabaseStateStore",
    "DatabaseStreamManager",
    "DatabaseUsageStore",
    "InMemoryLockManager",
    "InMemoryStateStore",
    "InMemoryStreamManager",
    "InMemoryUsageStore",
    "Lock",
    "MemoryWorld",
    "NoOpLockManager",
]
