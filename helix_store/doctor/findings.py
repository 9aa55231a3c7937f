"""What the doctor reports: findings, the rows that show them, and the sizes of tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from helix_store.core.serialization import Serializable

__all__ = ["Diagnosis", "Fault", "Finding", "Sample", "Severity", "TableSize"]


class Severity(StrEnum):
    """Errors lose data or break calls, warnings may become errors; both are problems. The rest is known."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def is_problem(self) -> bool:
        return self is not Severity.INFO


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Serializable):
    """One faulty place: a session or stream by its id, or a row of it by what tells it from the others."""

    tenant: str | None = None
    name: str | None = None
    row: str | None = None

    def __str__(self) -> str:
        return " ".join(part for part in (self.name, self.row) if part is not None)


class Fault(NamedTuple):
    """One place where a rule is broken. ``key`` is that of the row which a fix locks."""

    rule_id: str
    table: str | None
    sample: Sample
    key: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Serializable):
    """All places of one table where the same rule is broken; ``samples`` are the first of them."""

    id: str
    severity: Severity
    table: str | None
    count: int
    fixed: int = 0
    what: str
    advice: str
    is_fixable: bool = False
    samples: list[Sample] = field(default_factory=list)

    @property
    def is_problem(self) -> bool:
        """Whether something is left to do."""
        return self.severity.is_problem and self.count > self.fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSize(Serializable):
    """Estimated rows, and bytes of a table and of its indexes; ``None`` where the database does not tell."""

    table: str
    rows: int | None
    table_bytes: int | None
    index_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Serializable):
    """The result of one examination. ``stopped_at`` is ``None`` for a whole one."""

    database: str
    schema_version: int
    findings: list[Finding]
    tables: list[TableSize]
    stopped_at: str | None = None

    @property
    def has_problems(self) -> bool:
        return any(finding.is_problem for finding in self.findings)
