"""The public stores, and the handles, steps and turns that they open."""

from helix_store.budgets.database import DatabaseBudgetStore
from helix_store.budgets.memory import InMemoryBudgetStore
from helix_store.engine.memory import MemoryWorld
from helix_store.locks.database import DatabaseLockManager
from helix_store.locks.manager import Lock
from helix_store.locks.memory import InMemoryLockManager, NoOpLockManager
from helix_store.stores.database import DatabaseStateStore, Store
from helix_store.stores.handle import SessionHandle
from helix_store.stores.memory import InMemoryStateStore, InMemoryStore
from helix_store.stores.step import Step
from helix_store.stores.turn import Turn
from helix_store.streams.database import DatabaseStreamManager
from helix_store.streams.memory import InMemoryStreamManager
from helix_store.usage.database import DatabaseUsageStore
from helix_store.usage.memory import InMemoryUsageStore

__all__ = [
    "DatabaseBudgetStore",
    "DatabaseLockManager",
    "DatabaseStateStore",
    "DatabaseStreamManager",
    "DatabaseUsageStore",
    "InMemoryBudgetStore",
    "InMemoryLockManager",
    "InMemoryStateStore",
    "InMemoryStore",
    "InMemoryStreamManager",
    "InMemoryUsageStore",
    "Lock",
    "MemoryWorld",
    "NoOpLockManager",
    "SessionHandle",
    "Step",
    "Store",
    "Turn",
]
