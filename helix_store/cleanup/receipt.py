"""The receipt of an erasure. It only contains numbers and digests, and nothing that was erased."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from datetime import datetime

from helix_store.cleanup.outcomes import Counts


def digest_of(identifier: str) -> str:
    """Return the SHA-256 of an id. The owner of the id can find the receipt by it."""
    return hashlib.sha256(identifier.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureReceipt(Counts):
    """A record of the rows that an erasure deleted, or would delete in a dry run. ``to_dict()`` is plain
    JSON.

    ``subject`` is ``user``, ``session`` or ``tenant``. ``deleted`` and ``changed`` are numbers of rows by
    table; ``changed`` rows belong to others and lost their reference to the erased data. ``sessions_left``
    counts trees in use, and sources of branches in use; ``errors`` counts trees with a problem. ``complete``
    is true if nothing was left.
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
