"""Django settings of the test suite.

``HELIX_TEST_DATABASES`` chooses what the suite runs on: ``both`` (the default), ``sqlite`` or ``postgres``.
With ``both`` the alias ``default`` is SQLite and ``postgres`` is PostgreSQL; with one, it is that one.
``HELIX_TEST_USE_TZ=0`` runs it in a project without time zones, at the place of ``HELIX_TEST_TIME_ZONE``.
The server is that of ``DATABASE_URL`` when it names a PostgreSQL, else the suite starts its own. Without
pgvector on it, the tests of vectors are skipped.
"""

from __future__ import annotations

import os
from typing import Any

import environ
from django.core.exceptions import ImproperlyConfigured

from example_project.settings import (
    BASE_DIR,
    HELIX_STORE,
    MIDDLEWARE,
    ROOT_URLCONF,
    SQLITE_OPTIONS,
    STATIC_URL,
    TEMPLATES,
)
from example_project.settings import INSTALLED_APPS as _INSTALLED_APPS

__all__ = [
    "CARD_SERVICE",
    "DATABASES",
    "HELIX_STORE",
    "INSTALLED_APPS",
    "MIDDLEWARE",
    "PASSWORD_HASHERS",
    "POSTGRES_URL",
    "ROOT_URLCONF",
    "SECRET_KEY",
    "SILENCED_SYSTEM_CHECKS",
    "STATIC_URL",
    "TEMPLATES",
    "TEST_DATABASES",
    "TIME_ZONE",
    "USE_TZ",
    "postgres_database",
]

_CHOICES = {"both": ("sqlite", "postgres"), "sqlite": ("sqlite",), "postgres": ("postgres",)}


def _chosen_databases() -> tuple[str, ...]:
    choice = os.environ.get("HELIX_TEST_DATABASES", "both")
    if choice not in _CHOICES:
        raise ImproperlyConfigured(
            f"HELIX_TEST_DATABASES must be one of {', '.join(_CHOICES)}, not {choice!r}."
        )
    return _CHOICES[choice]


def _postgres_url() -> str | None:
    for variable in ("HELIX_TEST_POSTGRES_URL", "DATABASE_URL"):
        url = os.environ.get(variable, "")
        if url.startswith(("postgres://", "postgresql://")):
            return url
    return None


def postgres_database(url: str | None) -> dict[str, Any]:
    """The settings of a database on a server; without a URL its address is filled in when the server runs."""
    address = environ.Env.db_url_config(url) if url else {"NAME": "postgres"}
    return {"ENGINE": "django.db.backends.postgresql", "CONN_HEALTH_CHECKS": True, **address}


TEST_DATABASES: tuple[str, ...] = _chosen_databases()
POSTGRES_URL: str | None = _postgres_url()

_SQLITE = {
    "ENGINE": "django.db.backends.sqlite3",
    "NAME": BASE_DIR / "db.sqlite3",
    "OPTIONS": SQLITE_OPTIONS,
    # A file: threads and processes cannot share a database in memory.
    "TEST": {"NAME": BASE_DIR / "test.sqlite3"},
}
DATABASES: dict[str, dict[str, Any]] = {
    "default": _SQLITE
    if "sqlite" in TEST_DATABASES
    else {**postgres_database(POSTGRES_URL), "TEST": {"NAME": "test_helix_default"}}
}
if "postgres" in TEST_DATABASES:
    DATABASES["postgres"] = {**postgres_database(POSTGRES_URL), "TEST": {"NAME": "test_helix"}}


def _has_pgvector() -> bool:
    """Whether the server has pgvector; the suite's own server has it."""
    if "HELIX_TEST_CITUS" in os.environ:
        # The cluster may not have it, and the role of a shard may not create it.
        return False
    url = os.environ.get("DATABASE_URL", "")
    if "postgres" not in TEST_DATABASES or not url.startswith(("postgres://", "postgresql://")):
        return True
    import psycopg

    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'").fetchone()
    return found is not None


_VECTORS = ["helix_store.contrib.langgraph.vectors"] if _has_pgvector() else []
# The last app keeps rows of its own with sessions, as packages of others do.
INSTALLED_APPS = [*_INSTALLED_APPS, *_VECTORS, "tests.adapters.third_party"]

USE_TZ = os.environ.get("HELIX_TEST_USE_TZ", "1") != "0"
# A zone whose clocks are set back, where naive local times are ambiguous.
TIME_ZONE = "UTC" if USE_TZ else os.environ.get("HELIX_TEST_TIME_ZONE", "America/New_York")

SECRET_KEY = "for-tests-only"
CARD_SERVICE = BASE_DIR / "test-card-service.jsonl"
SILENCED_SYSTEM_CHECKS = ["helix_store.E011"]  # the suite's server does not wait for the disk
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
