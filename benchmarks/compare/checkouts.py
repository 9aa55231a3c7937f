"""The two checkouts, each with worker processes of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.compare import callgrind
from benchmarks.compare.worker import ENVIRONMENT_VARIABLE
from example_project.settings import SQLITE_OPTIONS
from tests.postgres import PostgresCluster

__all__ = ["Checkout", "WorkerProcess"]


class WorkerProcess:
    """Answers one request after the other; what it prints as an error goes to our standard error."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(  # noqa: S603  our own module
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def send(self, verb: str, path: str = "", count: int = 0) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, path, count]) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("A worker ended; its error stands above.")
        return json.loads(line)

    def ask(self, verb: str, path: str = "", count: int = 0) -> Any:
        self.send(verb, path, count)
        return self.receive()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Checkout:
    """One side: its package, seen by workers beside these benchmarks, and its two databases."""

    name: str
    root: Path
    directory: Path
    cluster: PostgresCluster

    def create_database(self) -> None:
        with psycopg.connect(self.cluster.url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{self.name}"'.encode())

    def number(self, sql: str) -> int:
        """Run a statement in the database that returns one whole number."""
        with psycopg.connect(self._url(), autocommit=True) as connection:
            row = connection.execute(sql.encode()).fetchone()
            assert row is not None
            return int(row[0])

    def settle(self) -> None:
        """Leave no work of what was done before to what is measured next."""
        with psycopg.connect(self._url(), autocommit=True) as connection:
            connection.execute("VACUUM (ANALYZE)")
            connection.execute("CHECKPOINT")

    @contextmanager
    def worker(self, *, under_callgrind: bool = False) -> Iterator[WorkerProcess]:
        """A worker process on this checkout's package."""
        output = self.directory / f"{self.name}.callgrind" if under_callgrind else None
        prefix = callgrind.command(output) if output else []
        worker = WorkerProcess(
            [*prefix, sys.executable, "-P", "-m", "benchmarks.compare.worker"], self._environment(output)
        )
        try:
            yield worker
        finally:
            worker.close()

    def _environment(self, callgrind_output: Path | None) -> dict[str, str]:
        given = {
            "modules": str(self._modules()),
            "databases": self._databases(),
            "callgrind_output": str(callgrind_output) if callgrind_output else None,
        }
        return {
            **os.environ,
            "PYTHONPATH": str(self._modules()),
            "PYTHONHASHSEED": "0",
            ENVIRONMENT_VARIABLE: json.dumps(given),
        }

    def _modules(self) -> Path:
        """A directory with a copy of the checkout's package beside these benchmarks.

        A copy, because bytecode is not written to the checkout, and an edit during the run changes nothing.
        """
        modules = self.directory / f"{self.name}.modules"
        if not modules.exists():
            modules.mkdir()
            shutil.copytree(self.root / "helix_store", modules / "helix_store")
            (modules / "benchmarks").symlink_to(Path(__file__).resolve().parent.parent)
        return modules

    def _databases(self) -> dict[str, Any]:
        return {
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": self.name,
                "HOST": "127.0.0.1",
                "PORT": self.cluster.port,
                "USER": self.cluster.user,
                "PASSWORD": self.cluster.password,
                "CONN_MAX_AGE": None,
            },
            "sqlite": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": str(self.directory / f"{self.name}.sqlite3"),
                "OPTIONS": SQLITE_OPTIONS,
            },
        }

    def _url(self) -> str:
        return self.cluster.url.replace("@/postgres?", f"@/{self.name}?")
