"""The results of an export or an import."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from helix_store.transfer.records import Counts, Problem

__all__ = ["ExportSummary", "ImportSummary"]


@dataclass(slots=True)
class ExportSummary:
    """Counts of complete units in ``counts``, by the name of the record, and of other units in ``failed``.

    ``sha256`` is the hash of the file without its last line, or ``None`` if the export was stopped.
    """

    counts: Counts = field(default_factory=Counter)
    failed: int = 0
    sha256: str | None = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def sessions(self) -> int:
        return self.counts["session"]

    def to_dict(self) -> dict[str, Any]:
        return {
            "sessions": self.sessions,
            "records": dict(sorted(self.counts.items())),
            "failed": self.failed,
            "sha256": self.sha256,
            "problems": [str(problem) for problem in self.problems],
        }


@dataclass(slots=True)
class ImportSummary:
    """Units by kind: ``imported``, ``identical`` to stored ones, of another tenant, or with a problem.

    ``records`` counts the rows that were written, by the name of their record.
    """

    imported: Counter[str] = field(default_factory=Counter)
    identical: Counter[str] = field(default_factory=Counter)
    other_tenants: int = 0
    records: Counts = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    is_complete: bool = False

    @property
    def sessions(self) -> int:
        """The number of sessions that are stored as in the file."""
        return self.imported["session"] + self.identical["session"]

    def to_dict(self) -> dict[str, Any]:
        return {
            "imported": dict(sorted(self.imported.items())),
            "identical": dict(sorted(self.identical.items())),
            "other_tenants": self.other_tenants,
            "records": dict(sorted(self.records.items())),
            "is_complete": self.is_complete,
            "problems": [str(problem) for problem in self.problems],
        }
