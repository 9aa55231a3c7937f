"""Strands' tests of session managers on `DjangoSessionRepository`: ``python -m tests.upstream.strands``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import environ

from tests.postgres import PostgresCluster
from tests.upstream.sdists import unpacked

_ROOT: Final = Path(__file__).resolve().parents[2]
_FILE: Final = "tests/strands/session/test_repository_session_manager.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
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
    with _database(parser.parse_args().database) as settings:
        plugins = Path(__file__).with_name("plugins")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(plugins), str(_ROOT)]),
            "HELIX_UPSTREAM_DATABASE": json.dumps(settings),
        }
        environment.pop("DJANGO_SETTINGS_MODULE", None)
        folder = unpacked("strands-agents")
        return subprocess.run([*command, _FILE], cwd=folder, env=environment, check=False).returncode


@contextmanager
def _database(name: str) -> Iterator[dict[str, Any]]:
    if name == "postgres":
        with PostgresCluster() as cluster:
            address = environ.Env.db_url_config(cluster.url)
            yield {**address, "ENGINE": "django.db.backends.postgresql"}
        return
    options = {
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL",
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "db.sqlite3"
        yield {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path), "OPTIONS": options}


if __name__ == "__main__":
    raise SystemExit(main())
