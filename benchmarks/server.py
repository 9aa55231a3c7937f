"""A PostgreSQL server of our own, and Django on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import django
from django.conf import settings
from django.core.management import call_command

from example_project.settings import SQLITE_OPTIONS
from tests.postgres import PostgresCluster
from tests.settings import postgres_database

__all__ = ["OPTIONS", "benchmark_databases"]

# Durable, as it comes; with room for the working set, so that no checkpoint of the server falls into a round.
OPTIONS = {"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "30min"}


@contextmanager
def benchmark_databases() -> Iterator[PostgresCluster]:
    """A running server as Django's ``default`` and an SQLite file as ``sqlite``, both migrated."""
    with PostgresCluster(options=OPTIONS) as cluster, TemporaryDirectory() as directory:
        # Through TCP, as most installations are.
        configure(cluster.tcp_url, Path(directory) / "benchmark.sqlite3")
        for alias in settings.DATABASES:
            call_command("migrate", database=alias, verbosity=0, skip_checks=True)
        yield cluster


def configure(url: str, sqlite_file: Path | str) -> None:
    os.environ["HELIX_BENCHMARK"] = f"{url}\n{sqlite_file}"
    settings.configure(
        DATABASES={
            # CONN_MAX_AGE and the rest as in a stock project: no prepared statements, no server-side binding.
            "default": postgres_database(url),
            "sqlite": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": str(sqlite_file),
                "OPTIONS": SQLITE_OPTIONS,
            },
        },
        INSTALLED_APPS=["django.contrib.contenttypes", "helix_store"],
        USE_TZ=True,
        SECRET_KEY="benchmarks",  # noqa: S106  signs cursors for the length of a run
    )
    django.setup()


def configure_again() -> None:
    """In a worker process: the same databases."""
    if not settings.configured:
        url, sqlite_file = os.environ["HELIX_BENCHMARK"].split("\n")
        configure(url, sqlite_file)
