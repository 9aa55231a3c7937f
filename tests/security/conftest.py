"""What the tests of this folder tried, counted and printed at the end of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import pytest

_PROPERTY: Final = "security"


@pytest.fixture
def security_counts(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """Numbers by name, as in ``security_counts["tenant calls"] += 1``; they are summed up over all tests."""
    counts: Counter[str] = Counter()
    yield counts
    # A property of the report also reaches the terminal from a worker of pytest-xdist.
    request.node.user_properties.append((_PROPERTY, dict(counts)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    sums: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":
                for name, counts in report.user_properties:
                    if name == _PROPERTY:
                        sums.update(counts)
    for name, count in sorted(sums.items()):
        terminalreporter.write_line(f"security: {count} {name}")
