"""All campaigns, two processes at a time, and the table of what they report."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

__all__ = ["FOLDER", "campaign_names", "command_of", "run_all", "table"]

FOLDER: Final = Path(__file__).parent

_AT_A_TIME: Final = 2
_NOTHING_TO_RUN: Final = 5
"""The exit code of pytest where no test is chosen."""
_COLUMNS: Final = (
    *("campaign", "database", "first seed", "trials", "of"),
    *("seconds", "per minute", "failures", "bound"),
)


def campaign_names() -> list[str]:
    """The test modules of this folder that contain a campaign."""
    marker = "@pytest.mark.campaign\n"
    return sorted(p.stem.removeprefix("test_") for p in FOLDER.glob("test_*.py") if marker in p.read_text())


def command_of(name: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-s", "-q", "-m", "campaign", str(FOLDER / f"test_{name}.py")]


def run_all(
    environment: Mapping[str, str], databases: Sequence[str], report: Path | None, *, minutes: float | None
) -> int:
    """Run every campaign on each database, print the table, and return 1 if one has failed.

    In ``minutes``, each campaign ends when its share of the time is over.
    """
    jobs = [(name, database) for database in databases for name in campaign_names()]
    if minutes is not None:
        share = minutes * 60 * _AT_A_TIME / len(jobs)
        environment = {**environment, "HELIX_FAULTS_SECONDS": str(share)}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_AT_A_TIME) as pool:

        def run(job: tuple[str, str]) -> tuple[bool, list[dict[str, Any]]]:
            name, database = job
            file = Path(folder) / f"{name}-{database}.jsonl"
            given = {**environment, "HELIX_TEST_DATABASES": database, "HELIX_FAULTS_REPORT": str(file)}
            done = subprocess.run(
                command_of(name),
                env=given,
                cwd=FOLDER.parents[1],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            succeeded = done.returncode in (0, _NOTHING_TO_RUN)
            if not succeeded:
                _print(done.stdout)
            lines = file.read_text().splitlines() if file.exists() else []
            return succeeded, [json.loads(line) for line in lines]

        outcomes = list(pool.map(run, jobs))
    reports = [each for _, found in outcomes for each in found]
    if report is not None:
        with report.open("a") as lines:
            lines.writelines(json.dumps(each) + "\n" for each in reports)
    _print(table(reports))
    _print(f"{time.monotonic() - started:.0f} seconds")
    return 0 if all(succeeded for succeeded, _ in outcomes) and reports else 1


def table(reports: Sequence[Mapping[str, Any]]) -> str:
    """A line for each report, as Markdown. Without a failure the bound of the rate is 3/n, at 95 %."""
    rows = [
        (
            each["name"],
            each["database"],
            each["first_seed"],
            each["trials"],
            each["of"],
            each["seconds"],
            each["per_minute"],
            len(each["failures"]),
            "" if each["failures"] or not each["trials"] else f"{3 / each['trials']:.2g}",
        )
        for each in reports
    ]
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201  a program's output
