"""One filled database after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.apps import apps
from django.db import connections
from pytest_django import DjangoDbBlocker

from tests import databases
from tests.databases import ALIASES, CommittedDatabase, close_connections, delete_all_rows, fresh_tenant
from tests.plans.calls import ANALYSED, POSTGRES, SQLITE
from tests.plans.rows import World, fill

_ALIASES = {
    SQLITE: ALIASES.get("sqlite"),
    ANALYSED: ALIASES.get("sqlite"),
    POSTGRES: ALIASES.get("postgres"),
}


@pytest.fixture(scope="package", params=[name for name, alias in _ALIASES.items() if alias is not None])
def world(
    request: pytest.FixtureRequest, django_db_setup: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[World]:
    """Committed, and deleted in the end: a fast path is another statement in a transaction."""
    name: str = request.param
    alias = _ALIASES[name]
    assert alias is not None
    with django_db_blocker.unblock():
        delete_all_rows(alias)
        forget_statistics(alias)
        world = World(name, CommittedDatabase(alias=alias, tenant=fresh_tenant()))
        try:
            fill(world)
            if name != SQLITE:
                _run(alias, "ANALYZE" if name == ANALYSED else "VACUUM ANALYZE")
            yield world
        finally:
            delete_all_rows(alias)
            forget_statistics(alias)
            close_connections()


def _run(alias: str, sql: str) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)


def forget_statistics(alias: str) -> None:
    if connections[alias].vendor == "sqlite":
        databases.forget_statistics(alias)
    else:
        # Deleted rows have left large and empty indexes, and the planner goes by their size.
        tables = ", ".join(
            f'"{model._meta.db_table}"' for model in apps.get_app_config("helix_store").get_models()
        )
        _run(alias, f"TRUNCATE {tables}")
        _run(alias, "VACUUM ANALYZE")
