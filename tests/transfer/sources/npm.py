"""The two other stores themselves: npm packages that are installed for a test run, and run by node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from psycopg.conninfo import conninfo_to_dict

__all__ = ["install", "run_script"]

HERE: Final = Path(__file__).parent
PACKAGES: Final = {"@obsku/checkpoint-postgres": "0.2.3", "@ziro-agent/checkpoint-postgres": "0.3.21"}
# Both are packed and not installed: what they depend on they have in their own file, or need for types only.
DRIVER: Final = "pg@8"
VARIABLES: Final = {
    "PGUSER": "user",
    "PGPASSWORD": "password",
    "PGDATABASE": "dbname",
    "PGHOST": "host",
    "PGPORT": "port",
}
PATIENCE: Final = ("--fetch-retries=1", "--fetch-timeout=30000", "--no-audit", "--no-fund")


def install(directory: Path) -> Path:
    """A folder in which node finds the packages. Skips the test where that is not possible."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed, and the original packages need it")
    names = [f"{name}@{version}" for name, version in PACKAGES.items()]
    _npm(directory, "pack", "--json", *names)
    _npm(directory, "install", "--prefix", ".", DRIVER)
    for name, version in PACKAGES.items():
        target = directory / "node_modules" / name
        archive = f"{name.removeprefix('@').replace('/', '-')}-{version}.tgz"
        with tarfile.open(directory / archive) as tar:
            tar.extractall(directory / "unpacked" / name, filter="data")
        target.parent.mkdir(parents=True, exist_ok=True)
        (directory / "unpacked" / name / "package").rename(target)
    _make_runnable_by_node(directory / "node_modules/@obsku/checkpoint-postgres/dist/index.js")
    return directory


def _npm(directory: Path, *arguments: str) -> None:
    reason = "no answer in time"
    with suppress(subprocess.TimeoutExpired):
        ended = subprocess.run(
            ["npm", *arguments, *PATIENCE],  # noqa: S607
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if ended.returncode == 0:
            return
        reason = next((line for line in ended.stderr.splitlines() if "error" in line), "")
    pytest.skip(f"npm {arguments[0]} did not get the original packages: {reason}")


def _make_runnable_by_node(path: Path) -> None:
    """The package is built for bun, which has ``import.meta.require``."""
    text = path.read_text()
    assert text.count("import.meta.require") == 1
    node = '(await import("node:module")).createRequire(import.meta.url)'
    path.write_text(text.replace("import.meta.require", node))


def run_script(directory: Path, name: str, *arguments: str, dsn: str) -> Any:
    """What a script of this folder prints, as JSON."""
    shutil.copy(HERE / name, directory)
    address = conninfo_to_dict(dsn)
    variables = {
        "PGUSER": "user",
        "PGPASSWORD": "password",
        "PGDATABASE": "dbname",
        "PGHOST": "host",
        "PGPORT": "port",
    }
    given = {key: str(address[part]) for key, part in variables.items() if part in address}
    ended = subprocess.run(
        ["node", name, *arguments],  # noqa: S607
        cwd=directory,
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)
