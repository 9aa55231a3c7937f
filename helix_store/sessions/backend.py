"""The back ends of a state store, and the base class of the public calls.

A back end receives checked arguments, valid ids and encoded payloads. Every write is atomic, takes the
session's lock first and raises `SessionNotFound` if the session is unknown. A returned version is the new
version. Session ids belong to the back end's tenant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from helix_store import conf
from helix_store.core.limits import Limits

if TYPE_CHECKING:
    from helix_store.sessions.database.checkpoints import DatabaseCheckpoints
    from helix_store.sessions.database.messages import DatabaseMessages
    from helix_store.sessions.database.posts import DatabasePosts
    from helix_store.sessions.database.runs import DatabaseRuns
    from helix_store.sessions.database.sessions import DatabaseSessions
    from helix_store.sessions.database.steps import DatabaseSteps
    from helix_store.sessions.database.waiting import DatabaseWaiting
    from helix_store.sessions.memory.checkpoints import MemoryCheckpoints
    from helix_store.sessions.memory.posts import MemoryPosts
    from helix_store.sessions.memory.runs import MemoryRuns
    from helix_store.sessions.memory.sessions import MemorySessions
    from helix_store.sessions.memory.steps import MemoryMessages, MemorySteps
    from helix_store.sessions.memory.waiting import MemoryWaiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """All operations of a back end, by subject. Both back ends have the same operations."""

    sessions: DatabaseSessions | MemorySessions
    messages: DatabaseMessages | MemoryMessages
    steps: DatabaseSteps | MemorySteps
    checkpoints: DatabaseCheckpoints | MemoryCheckpoints
    runs: DatabaseRuns | MemoryRuns
    waiting: DatabaseWaiting | MemoryWaiting
    posts: DatabasePosts | MemoryPosts


class StoreCalls:
    """The base class of the public calls, for one tenant. ``limits`` replaces ``HELIX_STORE["LIMITS"]``."""

    def __init__(self, backend: Backend, *, tenant: str, limits: Limits | None) -> None:
        self._backend = backend
        self.tenant = tenant
        self._given_limits = limits

    @property
    def limits(self) -> Limits:
        return conf.limits(self._given_limits)
