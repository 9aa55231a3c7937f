"""Everything one process remembers, shared by the stores that are given the same world."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from helix_store.stores.memory.lock_records import StoredLock
from helix_store.stores.memory.records import SessionRecord
from helix_store.stores.memory.stream_records import StreamRecord
from helix_store.stores.memory.usage_ledger import UsageLedger
from helix_store.stores.stream_watchers import Watchers

__all__ = ["MemoryWorld", "TenantData"]


@dataclass(slots=True)
class TenantData:
    """What one tenant owns; change it with the world's lock held."""

    sessions: dict[str, SessionRecord] = field(default_factory=dict)
    usage: UsageLedger = field(default_factory=UsageLedger)
    locks: dict[str, StoredLock] = field(default_factory=dict)
    """One per name for ever: without its lock a name's token would start again."""
    streams: dict[str, StreamRecord] = field(default_factory=dict)


class MemoryWorld:
    """A stand-in for the database: in-memory classes that share one see each other's data.

    ``lock`` is held for the whole of every write, as one transaction at a time would be.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.stream_watchers: Watchers[int] = Watchers()
        self._tenants: dict[str, TenantData] = {}

    def tenant(self, name: str) -> TenantData:
        with self.lock:
            return self._tenants.setdefault(name, TenantData())
