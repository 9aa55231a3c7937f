"""Django settings of a run: the databases on the server that ``benchmarks.server`` started."""

from __future__ import annotations

import json
import os
from typing import Any

from benchmarks.server import ENVIRONMENT_VARIABLE
from example_project.settings import MIDDLEWARE, SQLITE_OPTIONS, TEMPLATES

__all__ = ["DATABASES", "MIDDLEWARE", "TEMPLATES"]

_server = json.loads(os.environ[ENVIRONMENT_VARIABLE])


def _postgres(name: str) -> dict[str, Any]:
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        "HOST": _server["host"],
        "PORT": _server["port"],
        "USER": _server["user"],
        "PASSWORD": _server["password"],
        # Connections stay, as in a worker of an agent. The rest is as in a stock project.
        "CONN_MAX_AGE": None,
    }


DATABASES = {
    # The hot paths, ours and the limit's tables side by side.
    "default": _postgres("hot"),
    # Migrated once; the others are copies.
    "template": _postgres("helix_template"),
    "first": _postgres("first"),
    "growth": _postgres("growth"),
    "large": _postgres("large"),
    "storage": _postgres("storage"),
    "peers": _postgres("peers"),
    "sqlite": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": _server["sqlite_file"],
        "OPTIONS": SQLITE_OPTIONS,
    },
    "second_sqlite": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": _server["sqlite_file"] + ".second",
        "OPTIONS": SQLITE_OPTIONS,
    },
}
# With the admin, for the answer that `benchmarks.trace` traces.
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "helix_store",
    "helix_store.contrib.langgraph",
]
ROOT_URLCONF = "benchmarks.urls"
ALLOWED_HOSTS = ["testserver"]
USE_TZ = True
SECRET_KEY = "benchmarks"  # noqa: S105  signs cursors for the length of a run
HELIX_STORE: dict[str, Any] = {
    "RETENTION": {"sessions_idle_days": {"completed": 30}, "checkpoints_keep": 2, "streams_ended_days": 7}
}
