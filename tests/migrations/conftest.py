"""Empty databases, and processes that run management commands on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from django.db.backends.base.base import BaseDatabaseWrapper
from pytest_django import DjangoDbBlocker

from example_project.settings import SQLITE_OPTIONS
from tests.database.separate import separate_connection
from tests.databases import ALIASES, CommittedDatabase

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class FreshDatabase:
    """A database that nothing has been migrated on, by its settings."""

    settings: dict[str, Any]
    connection: BaseDatabaseWrapper = field(repr=False)

    def start(self, *command: str, **helix_store: Any) -> subprocess.Popen[str]:
        """Start ``manage.py command`` on this database in a process of its own."""
        given = json.dumps({"database": self.settings, "helix_store": helix_store}, default=str)
        return subprocess.Popen(
            [sys.executable, "-m", "django", *command],
            cwd=ROOT,
            env={
                **os.environ,
                "FRESH_SETTINGS": given,
                "DJANGO_SETTINGS_MODULE": "tests.migrations.fresh_settings",
                "PYTHONPATH": str(ROOT),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str, **helix_store: Any) -> str:
        """Run a command to its end and return what it printed; it must succeed."""
        process = self.start(*command, **helix_store)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        return output

    def tables(self) -> set[str]:
        return {
            name for name in self.connection.introspection.table_names() if not name.startswith("django_")
        }


@pytest.fixture(params=list(ALIASES))
def fresh_database(
    request: pytest.FixtureRequest, django_db_blocker: DjangoDbBlocker, tmp_path: Path
) -> Iterator[FreshDatabase]:
    """An empty SQLite file, then an empty PostgreSQL database."""
    if request.param == "postgres":
        yield from _fresh_postgres(request.getfixturevalue("postgres_db"))
        return
    with django_db_blocker.unblock():
        yield from _fresh(
            {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": str(tmp_path / "fresh"),
                "OPTIONS": SQLITE_OPTIONS,
            }
        )


@pytest.fixture
def fresh_postgres(postgres_db: CommittedDatabase) -> Iterator[FreshDatabase]:
    yield from _fresh_postgres(postgres_db)


def _fresh_postgres(server: CommittedDatabase) -> Iterator[FreshDatabase]:
    name = f"fresh_{uuid.uuid4().hex}"
    with server.connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name}")
    address = ("ENGINE", "HOST", "PORT", "USER", "PASSWORD", "OPTIONS")
    try:
        yield from _fresh({**{key: server.connection.settings_dict[key] for key in address}, "NAME": name})
    finally:
        with server.connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _fresh(settings: dict[str, Any]) -> Iterator[FreshDatabase]:
    with separate_connection(**settings) as connection:
        yield FreshDatabase(settings, connection)
