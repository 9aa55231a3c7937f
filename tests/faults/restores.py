"""A database that goes back to an earlier moment while connections to it are open."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from django.core.management import call_command
from django.db import connections

from example_project.settings import SQLITE_OPTIONS
from tests.database.separate import execute, separate_connection

__all__ = ["Restorable", "restorable_postgres", "restorable_sqlite"]

_ADDRESS = ("ENGINE", "HOST", "PORT", "USER", "PASSWORD", "OPTIONS")


class Restorable(Protocol):
    """``worker`` and ``successor`` are aliases of it, each with one connection, as two processes have."""

    worker: str
    successor: str

    def remember(self) -> None:
        """Keep a copy of everything that is stored now."""

    def restore(self) -> None:
        """Put the copy in the place of the database. Once for each `remember`."""


class _Postgres:
    """The copy is another database, which takes the name: the server ends all connections for that."""

    def __init__(self, server: str, name: str, worker: str, successor: str) -> None:
        self.worker, self.successor = worker, successor
        self._server, self._name, self._copy = server, name, f"{name}_kept"

    def remember(self) -> None:
        # A database that somebody is connected to cannot be copied.
        for alias in (self.worker, self.successor):
            connections[alias].close()
        self._run(f"CREATE DATABASE {self._copy} TEMPLATE {self._name}")

    def restore(self) -> None:
        self._run(f"DROP DATABASE {self._name} WITH (FORCE)")
        self._run(f"ALTER DATABASE {self._copy} RENAME TO {self._name}")

    def drop(self) -> None:
        for name in (self._copy, self._name):
            self._run(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def _run(self, sql: str) -> None:
        execute(connections[self._server], sql)


class _Sqlite:
    """The copy is written into the file through SQLite, which keeps other connections off meanwhile."""

    def __init__(self, file: Path, worker: str, successor: str) -> None:
        self.worker, self.successor = worker, successor
        self._file, self._copy = file, file.with_suffix(".kept")

    def remember(self) -> None:
        _copy(self._file, self._copy)

    def restore(self) -> None:
        _copy(self._copy, self._file)


def _copy(source: Path, target: Path) -> None:
    read, write = sqlite3.connect(source), sqlite3.connect(target)
    try:
        read.backup(write)
    finally:
        read.close()
        write.close()


@contextmanager
def _two_connections(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    with ExitStack() as stack:
        worker, successor = (stack.enter_context(separate_connection(**settings)).alias for _ in range(2))
        call_command("migrate", database=worker, verbosity=0)
        yield worker, successor


@contextmanager
def restorable_postgres(server: str) -> Iterator[Restorable]:
    """A database of its own on the server of this alias."""
    name = f"restorable_{uuid.uuid4().hex}"
    execute(connections[server], f"CREATE DATABASE {name}")
    settings = connections[server].settings_dict
    with _two_connections({**{key: settings[key] for key in _ADDRESS}, "NAME": name}) as aliases:
        database = _Postgres(server, name, *aliases)
        try:
            yield database
        finally:
            database.drop()


@contextmanager
def restorable_sqlite(file: Path) -> Iterator[Restorable]:
    settings = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(file), "OPTIONS": SQLITE_OPTIONS}
    with _two_connections(settings) as aliases:
        yield _Sqlite(file, *aliases)
