"""What a cleanup asks of a store: to find expired sessions and overdue calls, and to mark or delete them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from helix_store.cleanup.app_rows import Sweep
from helix_store.core.contracts import StateStore
from helix_store.core.types import PendingToolCall

__all__ = ["CleanupBackend", "CleanupOutcome", "ExpiryCandidate", "Page", "SessionKey", "known_outcome"]


class SessionKey(NamedTuple):
    """A session of a tenant. ``key`` is the back end's own: the primary key in a database."""

    session_id: str
    tenant: str = ""
    key: int = 0


class Page(NamedTuple):
    """Some sessions, and the position of the next page: ``None`` at the end."""

    keys: list[SessionKey]
    position: Any


@dataclass(frozen=True, slots=True)
class ExpiryCandidate:
    """An expired session as it was read. The version shows whether it was changed since."""

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
    """Another worker holds its lock or has just written to it: try again."""


def known_outcome(candidate: ExpiryCandidate, now: datetime) -> CleanupOutcome | None:
    """The outcome for a session that is not to be marked; ``None`` for one that is."""
    if candidate.is_terminal:
        return CleanupOutcome.ALREADY_TERMINAL
    if candidate.expires_at is None or candidate.expires_at > now:
        return CleanupOutcome.RENEWED
    return None


class CleanupBackend(Protocol):
    """Pages start at the position ``None``; their order does not change while sessions are marked."""

    def now(self) -> datetime: ...

    def expired(self, now: datetime, after: Any, limit: int) -> Page:
        """Non-terminal sessions past their expiry."""
        ...

    def overdue(self, now: datetime, after: Any, limit: int) -> Page:
        """Non-terminal sessions with calls past their deadline."""
        ...

    def deletable(self, before: datetime, after: Any, limit: int) -> Page:
        """Sessions that a cleanup has marked and that expired before this time."""
        ...

    def non_terminal(self, keys: list[SessionKey]) -> list[SessionKey]:
        """Those of the sessions that are not terminal, by one query; all of them if that is not possible."""
        ...

    def mark_in_bulk(self, keys: list[SessionKey], now: datetime) -> list[SessionKey]:
        """Mark the sessions that can be marked by one statement, and return the others."""
        ...

    def inspect(self, key: SessionKey) -> ExpiryCandidate | None: ...

    def mark(
        self, candidate: ExpiryCandidate, delete_snapshots: Callable[[], None], *, wait: bool
    ) -> CleanupOutcome:
        """Delete the snapshots and mark the session: `MARKED`, or `BUSY` if it was changed since `inspect`.

        With ``wait=False`` a session that another worker has locked is `BUSY`. An error of
        ``delete_snapshots`` is raised and leaves the session as it is.
        """
        ...

    def overdue_calls(self, key: SessionKey, now: datetime) -> tuple[StateStore, list[PendingToolCall]]:
        """The calls of a session past their deadline, and the store that takes their answers."""
        ...

    def sweeps(self) -> Iterator[Sweep]:
        """What deletes the expired rows of other apps."""
        ...

    def delete(self, key: SessionKey, before: datetime) -> int:
        """Delete a session and its tree, but no usage, and return the number of deleted sessions.

        Nothing is deleted while a session of the tree is non-terminal.
        """
        ...
