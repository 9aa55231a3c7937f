"""Expired sessions and overdue calls: what a cleanup needs of a store."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from typing import Any, NamedTuple

from helix_store.core.serialization import Serializable

__all__ = ["CleanupSummary", "SeenSession", "SessionKey", "Settlement", "settlement_of"]


@dataclass(frozen=True, slots=True)
class CleanupSummary(Serializable):
    """What one cleanup did; ``detected`` is the sum of marked, already terminal, renewed and failed ones.

    A dry run only detects. ``errors`` counts sessions and tool calls with a problem, ``defaults_applied``
    tool calls past their deadline that got their default, ``deleted`` sessions that were deleted.
    """

    detected: int = 0
    marked: int = 0
    already_terminal: int = 0
    snapshots_deleted: int = 0
    errors: int = 0
    renewed: int = 0
    defaults_applied: int = 0
    deleted: int = 0


class SessionKey(NamedTuple):
    """A session of some tenant; ``key`` means something to whoever found it."""

    session_id: str
    tenant: str = ""
    key: int = 0


@dataclass(frozen=True, slots=True)
class SeenSession:
    """A session as it was when somebody looked."""

    key: SessionKey
    version: int
    is_terminal: bool
    expires_at: datetime | None
    workspace_refs: dict[str, Any]


class Settlement(Enum):
    """What became of an expired session."""

    MARKED = auto()
    ALREADY_TERMINAL = auto()
    RENEWED = auto()
    GONE = auto()
    BUSY = auto()
    """Somebody holds it or has just written to it: look again."""


def settlement_of(seen: SeenSession | None, now: datetime) -> Settlement | None:
    """What has become of a session already, or ``None`` when it still is to be marked."""
    if seen is None:
        return Settlement.GONE
    if seen.is_terminal:
        return Settlement.ALREADY_TERMINAL
    if seen.expires_at is None or seen.expires_at > now:
        return Settlement.RENEWED
    return None
