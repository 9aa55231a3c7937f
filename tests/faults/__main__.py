"""Run one campaign, or all of them: ``python -m tests.faults lost_commits --seed 17``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.faults.runner import FOLDER, campaign_names, command_of, run_all


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        epilog="example: python -m tests.faults lost_commits --seed 17; python -m tests.faults --tier 2",
    )
    parser.add_argument("name", nargs="?", choices=campaign_names(), help="by default all, three at a time")
    parser.add_argument(
        "--tier", type=int, choices=[1, 2, 3], default=1, help="1 is seconds, 2 minutes, 3 a night"
    )
    parser.add_argument("--seed", type=int, help="the seed of the first trial; with it, one trial by default")
    parser.add_argument("--count", type=int, help="the number of trials, each with the next seed")
    parser.add_argument("--database", choices=["both", "sqlite", "postgres"], default="both")
    parser.add_argument("--minutes", type=float, help="make as many trials as all campaigns can in this time")
    parser.add_argument("--report", type=Path, help="a file to append the reports to, a line for each")
    given = parser.parse_args()
    if given.name is not None and given.minutes is not None:
        parser.error("--minutes is for all campaigns")
    if given.name is None and (given.seed is not None or given.count is not None):
        parser.error("--seed and --count need the name of a campaign")
    environment = {**os.environ, "HELIX_FAULTS_TIER": str(given.tier)}
    if given.name is None:
        return run_all(environment, given.database, given.report, minutes=given.minutes)
    environment["HELIX_TEST_DATABASES"] = given.database
    if given.seed is not None:
        environment["HELIX_FAULTS_SEED"] = str(given.seed)
    if given.seed is not None or given.count is not None:
        environment["HELIX_FAULTS_COUNT"] = str(given.count or 1)
    if given.report is not None:
        environment["HELIX_FAULTS_REPORT"] = str(given.report.resolve())
    return subprocess.run(
        command_of(given.name), env=environment, cwd=FOLDER.parents[1], check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
