"""The public stores, the handles, steps and turns that they open, and the values that they return."""

from helix_store.budgets import DatabaseBudgetStore, InMemoryBudgetStore
from helix_store.core.streams import StoredChunk, StreamInfo
from helix_store.core.types import LockInfo
from helix_store.core.usage import TokenCounts, UsageBucket, UsageEntry, UsagePage, UsageRollup, UsageSource
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
from helix_store.streams.manager import DatabaseStreamManager, InMemoryStreamManager, StreamWriter
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
    "LockInfo",
    "MemoryWorld",
    "NoOpLockManager",
    "OpenEffect",
    "SessionHandle",
    "Step",
    "Store",
    "StoredChunk",
    "StreamInfo",
    "StreamWriter",
    "TokenCounts",
    "Turn",
    "UsageBucket",
    "UsageEntry",
    "UsagePage",
    "UsageRollup",
    "UsageSource",
]
