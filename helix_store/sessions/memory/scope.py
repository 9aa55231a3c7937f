"""The sessions of one tenant, and the methods through which every change to a session goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from django.dispatch import Signal

from helix_store import conf
from helix_store.core.guards import Guard
from helix_store.core.limits import Limits
from helix_store.engine.memory import MemoryRows, MemoryTable, MemoryWorld
from helix_store.exceptions import SessionNotFound
from helix_store.locks.memory import LockTable
from helix_store.sessions.memory.records import SessionRecord
from helix_store.signals import send_signals, signals_of_status
from helix_store.streams.memory import StreamTable

T = TypeVar("T", bound=MemoryTable)

_UNGUARDED = Guard()


class SessionTable(MemoryRows[SessionRecord]):
    """The sessions of a tenant by id, in the order in which they were created."""


class TenantScope:
    """The part of a world that one store uses: the tables of its tenant, and its limits."""

    def __init__(self, world: MemoryWorld, *, tenant: str, limits: Limits | None) -> None:
        self.world = world
        self.lock = world.lock
        self.sessions = world.table(SessionTable, tenant)
        self._tenant = tenant
        self._locks = world.table(LockTable, tenant)
        self._streams = world.table(StreamTable, tenant)
        self._given_limits = limits

    def table(self, kind: type[T]) -> T:
        """Return this tenant's table of a given kind."""
        return self.world.table(kind, self._tenant)

    @property
    def limits(self) -> Limits:
        return conf.limits(self._given_limits)

    def find(self, session_id: str) -> SessionRecord | None:
        """Return the published record, which can be read without the lock because it never changes."""
        return self.sessions.get(session_id)

    def require(self, session_id: str) -> SessionRecord:
        record = self.find(session_id)
        if record is None:
            raise SessionNotFound(session_id)
        return record

    @contextmanager
    def writing(self, session_id: str, guard: Guard = _UNGUARDED) -> Iterator[SessionRecord]:
        """Yield a draft of the session to modify; publish it at the end, or drop it after an exception.

        Every status change goes through this method, which also announces it.
        """
        with self.lock:
            published = self.require(session_id)
            draft = published.draft()
            self.check_guard(draft, guard)
            yield draft
            self.sessions[session_id] = draft
        before, after = published.columns["status"], draft.columns["status"]
        self.announce(session_id, signals_of_status(before, after, draft.columns["failure_reason"]))

    def announce(self, session_id: str, signals: Sequence[Signal], **details: str | None) -> None:
        """Send signals. Call this without the lock: a receiver may wait for another thread that writes."""
        send_signals(None, signals=signals, session_id=session_id, tenant=self._tenant, **details)

    def is_locked(self, session_id: str) -> bool:
        lock = self._locks.get(session_id)
        return lock is not None and lock.lasts

    def check_guard(self, record: SessionRecord, guard: Guard) -> None:
        """Check the conditions of a write. Raises `FencedOutError` and `StaleStateError`."""
        self.check_fence(record.session_id, guard)
        guard.check_version(record.version)

    def check_fence(self, session_id: str, guard: Guard) -> None:
        """Raises `FencedOutError`."""
        self._locks.check_fence(session_id, guard)

    def forget(self, session_id: str, *, keep_usage: bool = False) -> None:
        """Delete a session with all its data. The lock must be held."""
        stream_id = self.sessions.pop(session_id).columns["stream_id"]
        others = (record.columns["stream_id"] for record in self.sessions.values())
        if stream_id in self._streams and stream_id not in others:
            self._streams.forget(stream_id)
        self.world.session_is_gone(self._tenant, session_id, keep_usage=keep_usage)


class MemoryOperations:
    """A group of operations on the sessions of one tenant."""

    def __init__(self, scope: TenantScope) -> None:
        self._scope = scope
