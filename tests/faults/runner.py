"""All campaigns, three processes at a time, and the table of what they report."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["FOLDER", "campaign_names", "command_of", "run_all", "table"]

FOLDER: Final = Path(__file__).parent

_AT_A_TIME: Final = 3
"""More than there are cores: most of a campaign is waiting for processes, for terms and for the server."""
_LONGEST: Final = ("lost_commits", "killed_writers")
_COLUMNS: Final = (
    *("campaign", "database", "first seed", "trials", "of"),
    *("seconds", "per minute", "failures", "bound"),
)


def campaign_names() -> list[str]:
    """The test modules of this folder that contain a campaign."""
    marker = "@pytest.mark.campaign\n"
    return sorted(p.stem.removeprefix("test_") for p in FOLDER.glob("test_*.py") if marker in p.read_text())


def command_of(*names: str) -> list[str]:
    files = [str(FOLDER / f"test_{name}.py") for name in names]
    return [sys.executable, "-m", "pytest", "-s", "-q", "-m", "campaign", *files]


def run_all(
    environment: Mapping[str, str], databases: str, report: Path | None, *, minutes: float | None
) -> int:
    """Run every campaign on ``databases``, print the table, and return 1 if one has failed.

    The processes share one server.
    In ``minutes``, each campaign ends when its share of the time is over.
    """
    names = sorted(campaign_names(), key=lambda name: name not in _LONGEST)
    environment = {**environment, "HELIX_TEST_DATABASES": databases}
    if minutes is not None:
        share = minutes * 60 * _AT_A_TIME / (len(names) * (2 if databases == "both" else 1))
        environment["HELIX_FAULTS_SECONDS"] = str(share)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reports.jsonl"
        done = subprocess.run(
            # The longest first, and the next one for whoever is ready.
            [*command_of(*names), "-n", str(_AT_A_TIME)],
            env={**environment, "HELIX_FAULTS_REPORT": str(file)},
            cwd=FOLDER.parents[1],
            check=False,
        )
        lines = file.read_text().splitlines() if file.exists() else []
    if report is not None:
        with report.open("a") as kept:
            kept.writelines(line + "\n" for line in lines)
    _print(table(sorted(map(json.loads, lines), key=lambda each: (each["name"], each["database"]))))
    _print(f"{time.monotonic() - started:.0f} seconds")
    return 0 if done.returncode == 0 and lines else 1


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
