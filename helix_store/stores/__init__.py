"""The public stores."""

from helix_store.engine.memory import MemoryWorld
from helix_store.locks.database import DatabaseLockManager
from helix_store.locks.lock import Lock
from helix_store.locks.memory import InMemoryLockManager, NoOpLockManager
from helix_store.sessions.database.store import DatabaseStateStore
from helix_store.sessions.memory.store import InMemoryStateStore
from helix_store.streams.database import DatabaseStreamManager
from helix_store.streams.memory import InMemoryStreamManager
from helix_store.usage.database import DatabaseUsageStore
from helix_store.usage.memory import InMemoryUsageStore

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
