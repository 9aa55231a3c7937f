"""The stores that handles are tested on: this package's, and a third party's that has the protocol alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from helix_store.core.contracts import REQUIRED_METHODS, StateStore, UsageStore
from helix_store.core.types import SessionState
from helix_store.engine.memory import MemoryWorld
from helix_store.handles import SessionHandle, Turn
from helix_store.locks import LockManagerBase
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseUsageStore,
    InMemoryLockManager,
    InMemoryStateStore,
    InMemoryUsageStore,
)
from helix_store.stores.store import StoreTransaction
from tests.databases import CommittedDatabase

__all__ = ["OnlyTheProtocol", "World", "database_world", "leave_started", "memory_world"]


class OnlyTheProtocol:
    """A third party's store: it has the methods of the protocol and nothing else."""

    def __init__(self, store: Any) -> None:
        self._elsewhere = store
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name not in REQUIRED_METHODS:
            raise AttributeError(name)
        self.calls.append(name)
        return getattr(self._elsewhere, name)


@dataclass
class World:
    """A store, and the managers that belong to it; ``is_foreign`` hides everything but the protocol."""

    own: Any
    locks: LockManagerBase
    usage: UsageStore
    is_foreign: bool = False
    store: StateStore = field(init=False)

    def __post_init__(self) -> None:
        self.store = cast("StateStore", OnlyTheProtocol(self.own)) if self.is_foreign else self.own

    def session(self, session_id: str = "session", **options: Any) -> SessionHandle:
        return SessionHandle(self.store, session_id, **options)

    def new_session(self, session_id: str = "session", **fields: Any) -> SessionHandle:
        self.store.create_session(session_id, **{"agent_type": "agent", **fields})
        return self.session(session_id)

    def turn(self, session: SessionHandle, **options: Any) -> Turn:
        """A turn with the defaults of the store's kind, which a third party's store has to be given."""
        managers = {"locks": self.locks, "usage": self.usage} if self.is_foreign else {}
        return session.turn(**{**managers, **options})

    def transaction(self) -> StoreTransaction:
        """A transaction of the caller, which an exception rolls back."""
        transaction: StoreTransaction = self.own._stores.transaction()
        return transaction

    def loaded(self, session_id: str = "session") -> SessionState:
        state = self.store.load_state(session_id)
        assert state is not None
        return state

    def contents(self, session_id: str = "session") -> dict[str, str]:
        """Everything about a session that a refused call must leave alone."""
        store = self.store
        seen = {
            "state": store.load_state(session_id),
            "messages": store.get_messages(session_id).messages,
            "checkpoints": store.list_checkpoints(session_id).items,
            "staged": [store.get_staged_changes(session_id, f"step-{number}") for number in range(1, 4)],
            "runs": store.list_runs(session_id),
            "usage": self.usage.get_entries(session_id),
        }
        return {name: repr(value) for name, value in seen.items()}


def memory_world(*, is_foreign: bool = False) -> World:
    world = MemoryWorld()
    return World(
        own=InMemoryStateStore(world=world),
        locks=InMemoryLockManager(world=world),
        usage=InMemoryUsageStore(world=world),
        is_foreign=is_foreign,
    )


def database_world(database: CommittedDatabase, *, is_foreign: bool = False) -> World:
    alias, tenant = database.alias, database.tenant
    return World(
        own=DatabaseStateStore(alias, tenant=tenant),
        locks=DatabaseLockManager(alias, tenant=tenant),
        usage=DatabaseUsageStore(alias, tenant=tenant),
        is_foreign=is_foreign,
    )


def leave_started(world: World, effect_id: str = "pay", **call: Any) -> None:
    """Enter an effect and never leave it, like a worker that is killed. Only the lock is released."""
    turn = world.turn(world.session())
    turn.__enter__()
    turn.effect(effect_id, **call).__enter__()
    assert turn._lock is not None
    turn._lock.release()
