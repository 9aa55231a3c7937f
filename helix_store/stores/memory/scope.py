"""The sessions of one tenant, and the only way to change one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from helix_store import conf
from helix_store.core.limits import Limits
from helix_store.core.requests import Guard
from helix_store.exceptions import SessionNotFound
from helix_store.stores.memory.records import SessionRecord
from helix_store.stores.memory.world import MemoryWorld

__all__ = ["TenantScope"]

_UNGUARDED = Guard()


class TenantScope:
    """What the verbs of one store share: its world, its tenant's data and its limits."""

    def __init__(self, world: MemoryWorld, *, tenant: str, limits: Limits | None) -> None:
        self.lock = world.lock
        self.stream_watchers = world.stream_watchers
        self.data = world.tenant(tenant)
        self._given_limits = limits

    @property
    def limits(self) -> Limits:
        return self._given_limits or conf.limits()

    def find(self, session_id: str) -> SessionRecord | None:
        """The published record, which is safe to read without the lock: it never changes."""
        return self.data.sessions.get(session_id)

    def require(self, session_id: str) -> SessionRecord:
        record = self.find(session_id)
        if record is None:
            raise SessionNotFound(session_id)
        return record

    @contextmanager
    def writing(self, session_id: str, guard: Guard = _UNGUARDED) -> Iterator[SessionRecord]:
        """A draft of the session to change at will: published at the end, dropped if anything fails."""
        with self.lock:
            draft = self.require(session_id).draft()
            self.admit(draft, guard)
            yield draft
            self.data.sessions[session_id] = draft

    def admit(self, record: SessionRecord, guard: Guard) -> None:
        """Check what the caller requires of the write. Raises `FencedOutError` and `StaleStateError`."""
        lock = self.data.locks.get(record.session_id)
        guard.check_fence(None if lock is None else lock.token)
        guard.check_version(record.version)

    def forget(self, session_id: str, *, keep_usage: bool = False) -> None:
        """Drop a session with everything recorded for it. The lock is held."""
        stream_id = self.data.sessions.pop(session_id).columns["stream_id"]
        if stream_id in self.data.streams and not self._is_named(stream_id):
            self.forget_stream(stream_id)
        self.data.usage.session_is_gone(session_id, keep=keep_usage)

    def _is_named(self, stream_id: str) -> bool:
        return any(record.columns["stream_id"] == stream_id for record in self.data.sessions.values())

    def forget_stream(self, stream_id: str) -> bool:
        """Drop a stream and tell its readers; ``False`` when there is none. The lock is held."""
        stream = self.data.streams.pop(stream_id, None)
        if stream is not None:
            self.stream_watchers.wake(stream.key)
        return stream is not None
