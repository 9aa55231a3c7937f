"""The sessions that a cleanup finds, the outcome for each, and the counts of cleanups and erasures."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum, auto
from typing import Any, Final, NamedTuple, Self

from django.db.models import Model

from helix_store import conf
from helix_store.core.serialization import Serializable
from helix_store.core.types import PendingToolCall

_PREFIX: Final = conf.table_name("")


class SessionKey(NamedTuple):
    """A session of a tenant. ``key`` is specific to the back end: in a database it is the primary key."""

    session_id: str
    tenant: str = ""
    key: int = 0


class CleanupOutcome(Enum):
    """The result of a cleanup for one session."""

    MARKED = auto()
    ALREADY_TERMINAL = auto()
    RENEWED = auto()
    GONE = auto()
    FAILED = auto()
    BUSY = auto()
    """Another worker holds its lock or has just written to it, so the cleanup must try again."""


@dataclass(frozen=True, slots=True)
class ExpiryCandidate:
    """An expired session as it was read. The version shows whether the session has changed since."""

    key: SessionKey
    version: int
    is_terminal: bool
    expires_at: datetime | None
    workspace_refs: dict[str, Any]

    def known_outcome(self, now: datetime) -> CleanupOutcome | None:
        """Return the outcome for a session that must not be marked, or ``None`` if it can be marked."""
        if self.is_terminal:
            return CleanupOutcome.ALREADY_TERMINAL
        if self.expires_at is None or self.expires_at > now:
            return CleanupOutcome.RENEWED
        return None


@dataclass(frozen=True, slots=True)
class Counts(Serializable):
    """Counts, and numbers of rows by table name without prefix; zeros are omitted, and names are in order."""

    def plus(self, **more: int | Mapping[type[Model], int]) -> Self:
        """Return the counts with these numbers, or numbers of rows by model, added to the named fields."""
        sums: dict[str, Any] = {}
        for name, rows in more.items():
            if isinstance(rows, int):
                sums[name] = getattr(self, name) + rows
                continue
            total = Counter(getattr(self, name))
            for model, number in rows.items():
                total[model._meta.db_table.removeprefix(_PREFIX)] += number
            sums[name] = {table: number for table, number in sorted(total.items()) if number}
        return replace(self, **sums)


@dataclass(frozen=True, slots=True)
class CleanupSummary(Counts):
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


@dataclass(frozen=True, slots=True)
class CleanupDetails:
    """The sessions and calls that the counts refer to. Several cleanups may share them.

    A dry run adds the ``expired`` sessions and the ``overdue`` calls of other sessions. Every cleanup adds
    the sessions ``with_problems``; a session with repeated problems is only added once. ``not_swept`` holds
    the records of tables of other apps whose expired rows could not be deleted.
    """

    expired: list[SessionKey] = field(default_factory=list)
    overdue: list[tuple[SessionKey, PendingToolCall]] = field(default_factory=list)
    with_problems: set[SessionKey] = field(default_factory=set)
    not_swept: set[str] = field(default_factory=set)


# --- Erasure -------------------------------------------------------------------------------------------


def digest_of(identifier: str) -> str:
    """Return the SHA-256 of an id. The owner of the id can use it to find the receipt."""
    return hashlib.sha256(identifier.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureReceipt(Counts):
    """A record of the rows that an erasure deleted, or would delete in a dry run. ``to_dict()`` is plain
    JSON. It only contains numbers and digests, and nothing that was erased.

    ``subject`` is ``user``, ``session`` or ``tenant``. ``deleted`` and ``changed`` are numbers of rows by
    table; ``changed`` rows belong to others and lost their reference to the erased data. ``sessions_left``
    counts trees in use, and sources of branches in use; ``errors`` counts trees with a problem. ``complete``
    is true if nothing is left to erase.
    """

    subject: str
    subject_sha256: str
    tenant_sha256: str | None
    dry_run: bool
    started_at: datetime
    finished_at: datetime | None = None
    complete: bool = False
    deleted: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    trees: int = 0
    branches: int = 0
    snapshots_deleted: int = 0
    sessions_left: int = 0
    locks_left: int = 0
    errors: int = 0
