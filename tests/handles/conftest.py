"""Each test of a handle runs on every kind of store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pytest_django import DjangoDbBlocker

from tests.databases import (
    ALIASES,
    CommittedDatabase,
    close_connections,
    fresh_tenant,
    stop_keep_alives,
)
from tests.handles.worlds import World, database_world, memory_world
from tests.selection import is_in_sample

KINDS = {
    "memory": ("memory", False),
    "another store": ("memory", True),
    **{vendor: (vendor, False) for vendor in ALIASES},
    **{f"another store on {vendor}": (vendor, True) for vendor in ALIASES},
}


VARIANTS = [kind for kind in KINDS if kind.startswith("another store on")]
"""They differ from the others in nothing that a handle sees: a sample of the tests runs on them."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if _is_in_run(config, item)]


def _is_in_run(config: pytest.Config, item: pytest.Item) -> bool:
    kind = item.callspec.params.get("world") if hasattr(item, "callspec") else None
    return kind not in VARIANTS or is_in_sample(config, item.nodeid, 10)


@pytest.fixture(params=KINDS)
def world(
    request: pytest.FixtureRequest, django_db_setup: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[World]:
    place, is_foreign = KINDS[request.param]
    if place == "memory":
        try:
            yield memory_world(is_foreign=is_foreign)
        finally:
            stop_keep_alives()
        return
    with django_db_blocker.unblock():
        try:
            database = CommittedDatabase(alias=ALIASES[place], tenant=fresh_tenant())
            yield database_world(database, is_foreign=is_foreign)
        finally:
            stop_keep_alives()
            close_connections()
