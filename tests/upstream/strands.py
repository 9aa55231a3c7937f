"""Strands' tests of session managers on `DjangoSessionRepository`: ``python -m tests.upstream.strands``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.upstream.databases import NAMES, database
from tests.upstream.sdists import unpacked

_ROOT: Final = Path(__file__).resolve().parents[2]
_FILE: Final = "tests/strands/session/test_repository_session_manager.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=NAMES, default="sqlite")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "--no-header",
        "--disable-warnings",
        "-o",
        "addopts=",
    ]
    # Upstream's conftest is for its tests of S3, and imports what they need.
    command += ["--noconftest", "-p", "no:cacheprovider", "-p", "no:django", "-p", "helix_strands"]
    with database(parser.parse_args().database) as settings:
        plugins = Path(__file__).with_name("plugins")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(plugins), str(_ROOT)]),
            "HELIX_UPSTREAM_DATABASE": json.dumps(settings),
        }
        environment.pop("DJANGO_SETTINGS_MODULE", None)
        folder = unpacked("strands-agents")
        return subprocess.run([*command, _FILE], cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
