"""What belongs to a store: the managers of its kind, and the transaction that its calls can share.

The stores of this package are known here. Of any other store the handles know the protocol alone.
"""

from __future__ import annotations

from collections.abc import Callable

from helix_store import conf
from helix_store.core.contracts import StateStore, UsageStore
from helix_store.core.limits import Limits
from helix_store.core.manager_contracts import LockManager
from helix_store.core.types import StepCommit
from helix_store.engine.database import Database
from helix_store.engine.outcomes import committed_once
from helix_store.exceptions import InvalidPayload
from helix_store.locks.database import DatabaseLockManager
from helix_store.locks.memory import InMemoryLockManager
from helix_store.sessions.database.locking import lock_session
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


def in_one_transaction(store: StateStore, session_id: str, body: Callable[[], StepCommit]) -> StepCommit:
    """Run the calls of a step as one transaction of a database store, and in their order with any other.

    When the reply to COMMIT is lost, they run again unless the database has the step.
    """
    if not isinstance(store, DatabaseStateStore):
        return body()
    db = Database(store.alias, store.tenant)
    commit: StepCommit | None = None

    def write() -> StepCommit:
        nonlocal commit
        commit = body()
        return commit

    def write_again() -> StepCommit:
        lock_session(db, session_id)
        if commit is not None and store.get_checkpoint(session_id, commit.checkpoint_id) is not None:
            return commit
        return write()

    return committed_once(
        db,
        lambda: db.transaction(write),
        write_again,
        operation_id=lambda: None if commit is None else commit.checkpoint_id,
    )


def can_see_commits(store: StateStore) -> bool:
    """Whether other connections see what is written now: not inside a transaction of the caller."""
    return not (isinstance(store, DatabaseStateStore) and Database(store.alias, store.tenant).in_transaction)


def _has_none(store: StateStore, argument: str, what: str) -> InvalidPayload:
    reason = f"a {type(store).__name__} has no {what[2:]} of its kind; give the call {what}"
    return InvalidPayload(path=argument, reason=reason)
