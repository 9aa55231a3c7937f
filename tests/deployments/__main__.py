"""Every contract suite in every deployment: ``python -m tests.deployments``. Prints a table."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path


def main() -> int:
    folder = Path(__file__).parent
    parser = argparse.ArgumentParser(
        prog="python -m tests.deployments",
        epilog="example: python -m tests.deployments --only pgbouncer --suite locks",
    )
    parser.add_argument("--only", default="all", metavar="NAME", help="a deployment; without it all of them")
    parser.add_argument(
        "--suite", default="", metavar="TEXT", help="the suites whose name contains this text"
    )
    given = parser.parse_args()
    files = (folder / "contracts").glob("test_*.py")
    paths = sorted(str(path) for path in files if given.suite in path.name)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--quiet", *paths],
        env={**os.environ, "HELIX_DEPLOYMENTS": given.only},
        cwd=folder.parents[1],
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
