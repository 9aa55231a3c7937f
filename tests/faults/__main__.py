"""Run one campaign: ``python -m tests.faults lost_commits --seed 17``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path


def main() -> int:
    folder = Path(__file__).parent
    names = sorted(path.stem.removeprefix("test_") for path in folder.glob("test_*.py"))
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", epilog="example: python -m tests.faults lost_commits --seed 17"
    )
    parser.add_argument("name", choices=names)
    parser.add_argument("--seed", type=int, default=1, help="the seed of the first trial")
    parser.add_argument("--count", type=int, default=1, help="the number of trials, each with the next seed")
    parser.add_argument("--database", choices=["both", "sqlite", "postgres"], default="both")
    parser.add_argument("--report", type=Path, help="a file to which the report is appended, as one line")
    given = parser.parse_args()
    environment = {
        **os.environ,
        "HELIX_FAULTS_SEED": str(given.seed),
        "HELIX_FAULTS_COUNT": str(given.count),
        "HELIX_TEST_DATABASES": given.database,
    }
    if given.report is not None:
        environment["HELIX_FAULTS_REPORT"] = str(given.report.resolve())
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-s",
        "-q",
        "-m",
        "campaign",
        str(folder / f"test_{given.name}.py"),
    ]
    return subprocess.run(command, env=environment, cwd=folder.parents[1], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
