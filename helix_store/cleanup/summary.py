"""The results of a cleanup: its counts, and the sessions and calls behind them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from helix_store.cleanup.backend import SessionKey
from helix_store.core.serialization import Serializable
from helix_store.core.types import PendingToolCall

__all__ = ["CleanupDetails", "CleanupSummary"]


@dataclass(frozen=True, slots=True)
class CleanupSummary(Serializable):
    """The counts of one cleanup. A dry run only detects.

    ``detected`` is the sum of ``marked``, ``already_terminal``, ``renewed`` and the sessions that failed. A
    session whose workspaces are too large to list is marked, and also counts as an error.
    ``errors`` counts sessions, tool calls and sweeps with a problem, ``defaults_applied`` tool calls that got
    their default after their deadline, ``deleted`` deleted sessions, and ``swept`` other apps' rows.
    """

    detected: int = 0
    marked: int = 0
    already_terminal: int = 0
    snapshots_deleted: int = 0
    errors: int = 0
    renewed: int = 0
    defaults_applied: int = 0
    deleted: int = 0
    swept: int = 0

    def __add__(self, other: CleanupSummary) -> CleanupSummary:
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return CleanupSummary(**sums)


@dataclass(frozen=True, slots=True)
class CleanupDetails:
    """The sessions and calls behind the counts. Several cleanups may share them.

    A dry run adds the ``expired`` sessions and the ``overdue`` calls of other sessions. Every cleanup adds
    the sessions ``with_problems``; a session with repeated problems is only added once. ``not_swept`` holds
    the records of tables of other apps whose expired rows could not be deleted.
    """

    expired: list[SessionKey] = field(default_factory=list)
    overdue: list[tuple[SessionKey, PendingToolCall]] = field(default_factory=list)
    with_problems: set[SessionKey] = field(default_factory=set)
    not_swept: set[str] = field(default_factory=set)
