"""The database of an upstream suite, as Django's settings: a file, or a server for this run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import environ

from tests.postgres import NOT_DURABLE, PostgresCluster

__all__ = ["NAMES", "database"]

NAMES: Final = ("sqlite", "postgres")


@contextmanager
def database(name: str) -> Iterator[dict[str, Any]]:
    if name == "postgres":
        with PostgresCluster(options=NOT_DURABLE) as cluster:
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
