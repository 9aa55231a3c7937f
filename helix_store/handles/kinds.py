"""What belongs to a store: the managers of its kind, and the transaction that its calls can share.

The stores of this package are known here. Of any other store the handles know the protocol alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from helix_store import conf
from helix_store.core.contracts import StateStore, UsageStore
from helix_store.core.limits import Limits
from helix_store.core.manager_contracts import LockManager
from helix_store.engine.database import Database
from helix_store.exceptions import InvalidPayload
from helix_store.locks.database import DatabaseLockManager
from helix_store.locks.memory import InMemoryLockManager
from helix_store.sessions.database.store import DatabaseStateStore
from helix_store.sessions.memory.store import InMemoryStateStore
from helix_store.usage.database import DatabaseUsageStore
from helix_store.usage.memory import InMemoryUsageStore

__all__ = [
    "can_see_commits",
    "in_one_transaction",
    "limits_of",
    "locks_of",
    "shares_transactions",
    "usage_of",
]

R = TypeVar("R")


def locks_of(store: StateStore) -> LockManager:
    """The lock manager of the store's kind, database and tenant. Raises `InvalidPayload`."""
    if isinstance(store, DatabaseStateStore):
        return DatabaseLockManager(store.alias, tenant=store.tenant)
    if isinstance(store, InMemoryStateStore):
        return InMemoryLockManager(tenant=store.tenant, world=store.world)
    raise _has_none(store, "locks", "a lock manager")


def usage_of(store: StateStore) -> UsageStore:
    """The usage store of the store's kind, database and tenant. Raises `InvalidPayload`."""
    if isinstance(store, DatabaseStateStore):
        return DatabaseUsageStore(store.alias, tenant=store.tenant)
    if isinstance(store, InMemoryStateStore):
        return InMemoryUsageStore(tenant=store.tenant, world=store.world)
    raise _has_none(store, "usage", "a usage store")


def limits_of(store: StateStore) -> Limits:
    limits = getattr(store, "limits", None)
    return limits if isinstance(limits, Limits) else conf.limits()


def shares_transactions(store: StateStore) -> bool:
    """Whether several calls of the store can be one transaction, or die with the process together."""
    return isinstance(store, DatabaseStateStore | InMemoryStateStore)


def in_one_transaction(store: StateStore, body: Callable[[], R]) -> R:
    """Run calls as one transaction of a database store, and in their order with any other store."""
    if isinstance(store, DatabaseStateStore):
        return Database(store.alias, store.tenant).transaction(body)
    return body()


def can_see_commits(store: StateStore) -> bool:
    """Whether other connections see what is written now: not inside a transaction of the caller."""
    return not (isinstance(store, DatabaseStateStore) and Database(store.alias, store.tenant).in_transaction)


def _has_none(store: StateStore, argument: str, what: str) -> InvalidPayload:
    reason = f"a {type(store).__name__} has no {what[2:]} of its kind; give the call {what}"
    return InvalidPayload(path=argument, reason=reason)
