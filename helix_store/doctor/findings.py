"""The doctor's report: findings, sample rows and the sizes of tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from helix_store.core.serialization import Serializable


class Severity(StrEnum):
    """Errors lose data or break calls, and warnings may turn into errors. Only these count as problems."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def is_problem(self) -> bool:
        return self is not Severity.INFO


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Serializable):
    """One place with a fault: a session or stream by its id, or one of its rows by a distinguishing value."""

    tenant: str | None = None
    name: str | None = None
    row: str | None = None

    def __str__(self) -> str:
        return " ".join(part for part in (self.name, self.row) if part is not None)


class Fault(NamedTuple):
    """One place where a rule is broken. ``key`` is the key of the row that a fix has to lock."""

    rule_id: str
    table: str | None
    sample: Sample
    key: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Serializable):
    """All places in one table in which the same rule is broken. ``samples`` holds the first of them."""

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
        """True if some of the faults have not been fixed."""
        return self.severity.is_problem and self.count > self.fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSize(Serializable):
    """The estimated rows and the bytes of a table and its indexes, or ``None`` if they are not reported."""

    table: str
    rows: int | None
    table_bytes: int | None
    index_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Serializable):
    """The result of one examination. ``stopped_at`` is ``None`` if the examination is complete."""

    database: str
    schema_version: int
    findings: list[Finding]
    tables: list[TableSize]
    stopped_at: str | None = None

    @property
    def has_problems(self) -> bool:
        return any(finding.is_problem for finding in self.findings)
