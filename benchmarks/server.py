"""A PostgreSQL server of our own, and Django on it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import django
import psycopg
from django.core.management import call_command
from django.db import connections

from tests.postgres import PostgresCluster

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "OPTIONS",
    "benchmark_server",
    "commits_that_take",
    "connection_url",
    "create_database",
    "database_name",
    "server_settings",
    "settle",
]

# Durable, as it comes; with room for the working set, so that no checkpoint of the server falls into a round.
# Tables are vacuumed between the paths: an automatic vacuum would hit one leg and not the other.
OPTIONS = {
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "60min",
    "autovacuum": "off",
}

ENVIRONMENT_VARIABLE = "HELIX_BENCHMARK_SERVER"
"""Tells the settings, also in worker processes, where the server is."""


def commits_that_take(microseconds: int) -> dict[str, str]:
    """Settings for commits that take so much longer: the server sleeps before each flush, others or not."""
    return {"commit_delay": str(microseconds), "commit_siblings": "0"}


@contextmanager
def benchmark_server(*, commit_delay: int = 0) -> Iterator[PostgresCluster]:
    """A running server and a set-up Django whose databases are there when `create_database` made them."""
    options = {**OPTIONS, **commits_that_take(commit_delay)} if commit_delay else OPTIONS
    with PostgresCluster(options=options) as cluster, TemporaryDirectory() as directory:
        os.environ[ENVIRONMENT_VARIABLE] = json.dumps(
            {
                # Through TCP, as most installations are.
                "host": "127.0.0.1",
                "port": cluster.port,
                "user": cluster.user,
                "password": cluster.password,
                "sqlite_file": str(Path(directory) / "benchmark.sqlite3"),
            }
        )
        os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
        django.setup()
        try:
            yield cluster
        finally:
            connections.close_all()


def create_database(cluster: PostgresCluster, alias: str, *, is_empty: bool = False) -> None:
    """Create the database of an alias, with our tables in it unless it is to be empty."""
    if is_empty:
        _execute(cluster, f'CREATE DATABASE "{database_name(alias)}"')
        return
    template = database_name("template")
    if not _execute(cluster, f"SELECT 1 FROM pg_database WHERE datname = '{template}'"):
        create_database(cluster, "template", is_empty=True)
        call_command("migrate", database="template", verbosity=0, skip_checks=True)
        connections["template"].close()
    _execute(cluster, f'CREATE DATABASE "{database_name(alias)}" TEMPLATE "{template}"')


def database_name(alias: str) -> str:
    return str(connections[alias].settings_dict["NAME"])


def connection_url(alias: str, *, scheme: str = "postgresql") -> str:
    """A database for clients that do not go through Django."""
    settings = connections[alias].settings_dict
    address = f"{settings['USER']}:{settings['PASSWORD']}@{settings['HOST']}:{settings['PORT']}"
    return f"{scheme}://{address}/{settings['NAME']}"


@contextmanager
def server_settings(cluster: PostgresCluster, **settings: str) -> Iterator[None]:
    """Other settings of the server for a while."""
    for name, value in settings.items():
        _execute(cluster, f"ALTER SYSTEM SET {name} = '{value}'")
    _execute(cluster, "SELECT pg_reload_conf()")
    try:
        yield
    finally:
        for name in settings:
            _execute(cluster, f"ALTER SYSTEM RESET {name}")
        _execute(cluster, "SELECT pg_reload_conf()")


def settle(alias: str) -> None:
    """Leave no work of what was done before to what is measured next."""
    with connections[alias].cursor() as cursor:
        cursor.execute("VACUUM (ANALYZE)")
        cursor.execute("CHECKPOINT")


def _execute(cluster: PostgresCluster, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(cluster.url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []
