"""The store's side of a cleanup: find expired sessions and overdue calls, and mark or delete them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from helix_store.catalogue.rows import Sweep
from helix_store.core.contracts import StateStore
from helix_store.core.types import PendingToolCall

__all__ = [
    "CleanupBackend",
    "CleanupOutcome",
    "ExpiryCandidate",
    "SessionKey",
    "SessionKeys",
    "known_outcome",
]


class SessionKey(NamedTuple):
    """A session of a tenant. ``key`` is specific to the back end: in a database it is the primary key."""

    session_id: str
    tenant: str = ""
    key: int = 0


class SessionKeys(NamedTuple):
    """Some sessions, and the position of the next page, which is ``None`` at the end."""

    keys: list[SessionKey]
    position: Any


@dataclass(frozen=True, slots=True)
class ExpiryCandidate:
    """An expired session as it was read. The version shows whether it has changed since."""

    key: SessionKey
    version: int
    is_terminal: bool
    expires_at: datetime | None
    workspace_refs: dict[str, Any]


class CleanupOutcome(Enum):
    """The result of a cleanup for one session."""

    MARKED = auto()
    ALREADY_TERMINAL = auto()
    RENEWED = auto()
    GONE = auto()
    FAILED = auto()
    BUSY = auto()
    """Another worker holds its lock or has just written to it, so it must be tried again."""


def known_outcome(candidate: ExpiryCandidate, now: datetime) -> CleanupOutcome | None:
    """Return the outcome for a session that must not be marked, or ``None`` if it can be marked."""
    if candidate.is_terminal:
        return CleanupOutcome.ALREADY_TERMINAL
    if candidate.expires_at is None or candidate.expires_at > now:
        return CleanupOutcome.RENEWED
    return None


class CleanupBackend(Protocol):
    """The back end of a cleanup. Paging starts at ``None``, and marking a session keeps the order."""

    def now(self) -> datetime: ...

    def expired(self, now: datetime, after: Any, limit: int) -> SessionKeys:
        """Return non-terminal sessions past their expiry."""
        ...

    def overdue(self, now: datetime, after: Any, limit: int) -> SessionKeys:
        """Return non-terminal sessions with calls past their deadline."""
        ...

    def deletable(self, before: datetime, after: Any, limit: int) -> SessionKeys:
        """Return sessions that a cleanup has marked and that expired before this time."""
        ...

    def non_terminal(self, keys: list[SessionKey]) -> list[SessionKey]:
        """Return the non-terminal sessions, using one query, or all sessions if that is not possible."""
        ...

    def mark_in_bulk(self, keys: list[SessionKey], now: datetime) -> list[SessionKey]:
        """Mark the sessions that one statement can mark, and return the others."""
        ...

    def inspect(self, key: SessionKey) -> ExpiryCandidate | None: ...

    def mark(
        self, candidate: ExpiryCandidate, delete_snapshots: Callable[[], None], *, wait: bool
    ) -> CleanupOutcome:
        """Delete the snapshots and mark the session. Return `BUSY` if it has changed since `inspect`.

        Return `MARKED` on success. With ``wait=False``, return `BUSY` if another worker has locked the
        session. An error of ``delete_snapshots`` is raised and leaves the session unchanged.
        """
        ...

    def overdue_calls(self, key: SessionKey, now: datetime) -> tuple[StateStore, list[PendingToolCall]]:
        """Return a session's calls past their deadline, and the store that takes their answers."""
        ...

    def sweeps(self) -> Iterator[Sweep]:
        """Yield the sweeps that delete expired rows of other apps."""
        ...

    def delete(self, key: SessionKey, before: datetime) -> int:
        """Delete a session and its tree, but no usage, and return the number of deleted sessions.

        Nothing is deleted if a session of the tree is non-terminal.
        """
        ...
