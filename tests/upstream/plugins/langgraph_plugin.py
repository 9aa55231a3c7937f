"""Points upstream's checkpointer "memory" at `DjangoSaver`, on a database for each worker.

Loaded by name, in the folder of upstream's tests: their package ``tests`` takes the place of ours.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import django
import environ
import psycopg
from django.conf import settings

# Before upstream's conftest imports from its package.
sys.path.insert(0, str(Path.cwd()))

_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")


def _database() -> dict[str, Any]:
    given = json.loads(os.environ["HELIX_UPSTREAM_DATABASE"])
    if "url" not in given:
        options = {
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        }
        name = str(Path(given["sqlite"]) / f"{_WORKER}.sqlite3")
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": name, "OPTIONS": options}
    name = f"langgraph_{_WORKER}"
    with psycopg.connect(given["url"], autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    address = environ.Env.db_url_config(given["url"])
    pool = {"pool": {"min_size": 0, "max_size": 4, "timeout": 30}}
    return {**address, "NAME": name, "OPTIONS": pool}


@cache
def _set_up() -> None:
    from django.core.management import call_command

    settings.configure(
        DATABASES={"default": _database()},
        INSTALLED_APPS=["django.contrib.contenttypes", "helix_store", "helix_store.contrib.langgraph"],
        SECRET_KEY="for-tests-only",
        USE_TZ=True,
    )
    django.setup()
    call_command("migrate", verbosity=0, skip_checks=True)


def _delete_rows() -> None:
    """Upstream uses the same thread ids in many tests."""
    _set_up()
    from django.db import connections

    from helix_store.models import Session

    with connections["default"].cursor() as cursor:
        models: list[Any] = [Session, *(each.related_model for each in Session._meta.related_objects)]
        for model in models:
            cursor.execute(f'DELETE FROM "{model._meta.db_table}"')
    connections.close_all()


@contextmanager
def _checkpointer() -> Iterator[Any]:
    # In a thread: async fixtures open this one beside a running event loop.
    thread = threading.Thread(target=_delete_rows)
    thread.start()
    thread.join()
    from helix_store.contrib.langgraph import DjangoSaver

    yield DjangoSaver()


upstream: Any = import_module("tests.conftest_checkpointer")
upstream._checkpointer_memory = _checkpointer
