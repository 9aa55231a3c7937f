"""A pytest plugin for the tests of OpenAI Agents SDK: ``SQLiteSession`` in them is our session.

The folder of upstream's tests is named ``tests`` too, so that nothing of ours can be imported from there.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import django
import pytest
from django.conf import settings

settings.configure(
    SECRET_KEY="for-tests-only",
    DATABASES={"default": json.loads(os.environ["HELIX_UPSTREAM_DATABASE"])},
    INSTALLED_APPS=[
        "django.contrib.contenttypes",
        "django.contrib.auth",
        "helix_store",
        "helix_store.contrib.openai_agents",
    ],
    USE_TZ=True,
)
django.setup()

FAILS: dict[str, str] = json.loads(os.environ["HELIX_UPSTREAM_FAILS"])
LEFT_OUT: dict[str, str] = json.loads(os.environ["HELIX_UPSTREAM_LEFT_OUT"])


def pytest_sessionstart(session: pytest.Session) -> None:
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    left_out = [item for item in items if item.originalname in LEFT_OUT]
    missing = LEFT_OUT.keys() - {item.originalname for item in left_out}
    assert not missing, f"upstream has no {missing} any more"
    for item in left_out:
        print(f"not run: {item.name}: {LEFT_OUT[item.originalname]}")
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    shim = _shim()
    for item in items:
        item.module.SQLiteSession = shim
        if reason := FAILS.get(item.name):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def _shim() -> type[Any]:
    from helix_store.contrib.openai_agents import DjangoSession

    memory_databases = iter(range(1_000_000))

    class Shim(DjangoSession):
        """Each file of upstream's sessions is a tenant, and so is each database in memory."""

        def __init__(
            self, session_id: str, db_path: str | Path = ":memory:", *, session_settings: Any = None
        ) -> None:
            place = f"memory {next(memory_databases)}" if db_path == ":memory:" else str(db_path)
            tenant = hashlib.sha256(place.encode()).hexdigest()
            super().__init__(session_id, tenant=tenant, session_settings=session_settings)

        def close(self) -> None:
            """Connections are those of Django."""

    return Shim
