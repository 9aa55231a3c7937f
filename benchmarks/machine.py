"""The facts without which a figure says nothing."""

from __future__ import annotations

import os
import platform
import sqlite3
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psycopg
from django.conf import settings

from benchmarks.server import OPTIONS
from tests.postgres import PostgresCluster

__all__ = ["machine_facts"]

_PACKAGES = (
    "Django",
    "psycopg",
    "psycopg-binary",
    "langgraph-checkpoint-postgres",
    "langgraph-checkpoint",
    "openai-agents",
    "SQLAlchemy",
    "asyncpg",
)


def machine_facts(cluster: PostgresCluster) -> dict[str, Any]:
    with psycopg.connect(cluster.url) as connection:
        row = connection.execute("SELECT current_setting('server_version')").fetchone()
        durability = {
            name: connection.execute("SELECT current_setting(%s)", [name]).fetchone()
            for name in (
                "fsync",
                "synchronous_commit",
                "full_page_writes",
                "commit_delay",
                "default_toast_compression",
            )
        }
        compressions = connection.execute(
            "SELECT enumvals FROM pg_settings WHERE name = 'default_toast_compression'"
        ).fetchone()
    return {
        "cores": os.cpu_count(),
        "cpu": _cpu_model(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "postgresql": row and row[0],
        "sqlite": sqlite3.sqlite_version,
        "packages": {name: _version(name) for name in _PACKAGES},
        "server_settings": {**OPTIONS, **{name: found and found[0] for name, found in durability.items()}},
        # The packaged binaries are built without lz4; a server that has it compresses payloads faster.
        "toast_compressions": compressions and compressions[0],
        "django_settings": {
            "CONN_MAX_AGE": settings.DATABASES["default"]["CONN_MAX_AGE"],
            "HELIX_STORE": getattr(settings, "HELIX_STORE", {}),
        },
        "load_before": os.getloadavg()[0],
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
