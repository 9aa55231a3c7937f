"""The public stores, and the handles, steps and turns that they open."""

from helix_store.budgets import DatabaseBudgetStore, InMemoryBudgetStore
from helix_store.engine.memory import MemoryWorld
from helix_store.locks import DatabaseLockManager, InMemoryLockManager, Lock, NoOpLockManager
from helix_store.stores.effect import OpenEffect
from helix_store.stores.step import Step
from helix_store.stores.store import (
    DatabaseStateStore,
    InMemoryStateStore,
    InMemoryStore,
    SessionHandle,
    Store,
)
from helix_store.stores.turn import Turn
from helix_store.streams.manager import DatabaseStreamManager, InMemoryStreamManager
from helix_store.usage.store import DatabaseUsageStore, InMemoryUsageStore

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
    "OpenEffect",
    "SessionHandle",
    "Step",
    "Store",
    "Turn",
]
