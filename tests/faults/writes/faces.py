"""The stores that a write is made through: of a database, or of a world in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

from asgiref.sync import async_to_sync

from helix_store.core.contracts import UsageStore
from helix_store.engine.memory import MemoryWorld
from helix_store.locks import LockManagerBase
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
    InMemoryLockManager,
    InMemoryStateStore,
    InMemoryStreamManager,
    InMemoryUsageStore,
)
from helix_store.streams.manager import StreamManagerBase

__all__ = ["AsyncWrite", "Faces", "Write", "synchronous"]


@dataclass(frozen=True)
class Faces:
    """The stores of one tenant. ``alias`` is empty in memory.

    What the handles do as one transaction of a database is one in memory inside ``one_transaction``.
    """

    alias: str
    tenant: str
    store: DatabaseStateStore | InMemoryStateStore
    locks: LockManagerBase
    usage: UsageStore
    streams: StreamManagerBase
    one_transaction: Callable[[], AbstractContextManager[object]] = nullcontext
    between: Callable[[], None] = lambda: None
    """Called between two transactions of one write."""

    @classmethod
    def of_database(cls, alias: str, tenant: str) -> Self:
        return cls(
            alias,
            tenant,
            store=DatabaseStateStore(alias, tenant=tenant),
            locks=DatabaseLockManager(alias, tenant=tenant),
            usage=DatabaseUsageStore(alias, tenant=tenant),
            streams=DatabaseStreamManager(alias, tenant=tenant),
        )

    @classmethod
    def in_memory(cls, world: MemoryWorld) -> Self:
        return cls(
            "",
            "",
            store=InMemoryStateStore(world=world),
            locks=InMemoryLockManager(world=world),
            usage=InMemoryUsageStore(world=world),
            streams=InMemoryStreamManager(world=world),
            one_transaction=lambda: world.lock,
        )


Write = Callable[[Faces, str], object]
"""Writes with the stores to what has the key."""
AsyncWrite = Callable[[Faces, str], Awaitable[object]]


def synchronous(write: AsyncWrite) -> Write:
    async def run(faces: Faces, key: str) -> object:
        return await write(faces, key)

    return async_to_sync(run)
