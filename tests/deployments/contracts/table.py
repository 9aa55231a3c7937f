"""What a run of the contract suites printed, by deployment and suite."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

__all__ = ["PROPERTY", "table_of"]

PROPERTY: Final = "deployment"
"""The property of a test that names its deployment."""

_COLUMNS: Final = {"passed": "passed", "failed": "failed", "error": "failed", "skipped": "skipped"}


def table_of(stats: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Lines of Markdown; ``stats`` are the reports of pytest by their outcome."""
    rows: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for outcome, column in _COLUMNS.items():
        for report in stats.get(outcome, ()):
            deployment = dict(report.user_properties).get(PROPERTY, "?")
            row = rows[deployment, PurePath(report.nodeid.partition("::")[0]).stem.removeprefix("test_")]
            row[column] += 1
            row["milliseconds"] += round(1000 * report.duration)
    yield "| deployment | suite | passed | failed | skipped | seconds |"
    yield "|---|---|---|---|---|---|"
    for (deployment, suite), row in sorted(rows.items()):
        numbers = [row["passed"], row["failed"], row["skipped"], round(row["milliseconds"] / 1000)]
        yield f"| {deployment} | {suite} | {' | '.join(map(str, numbers))} |"
