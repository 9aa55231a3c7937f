"""Two databases of one vendor: that of the suite, and one more, on a server or in a file of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from django.core.management import call_command
from django.db import connections
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from example_project.settings import SQLITE_OPTIONS
from helix_store.catalogue import MOVED_TENANTS
from helix_store.engine.database import Database
from helix_store.transfer.fences import EXISTS, take_down
from tests.databases import ALIASES, close_connections, fresh_tenant
from tests.postgres import NOT_DURABLE, PostgresCluster
from tests.settings import postgres_database
from tests.shards.routers import PLACES
from tests.streams.background import wait_for_background_threads

SECOND = "second"


@dataclass(frozen=True)
class Pair:
    """Two databases that the app is migrated to, and the name of a tenant that no other test has."""

    first: str
    second: str
    tenant: str

    @property
    def aliases(self) -> tuple[str, str]:
        return self.first, self.second

    @property
    def vendor(self) -> str:
        return connections[self.first].vendor


@pytest.fixture(scope="package", params=list(ALIASES))
def pair_of_aliases(
    request: pytest.FixtureRequest,
    django_db_setup: None,
    django_db_blocker: DjangoDbBlocker,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, str]]:
    if request.param not in ALIASES:
        pytest.skip(f"HELIX_TEST_DATABASES leaves {request.param} out of this run")
    with ExitStack() as stack, django_db_blocker.unblock():
        if request.param == "postgres":
            address = postgres_database(stack.enter_context(PostgresCluster(options=NOT_DURABLE)).url)
        else:
            file = tmp_path_factory.mktemp("second") / "helix.sqlite3"
            address = {"ENGINE": "django.db.backends.sqlite3", "NAME": file, "OPTIONS": SQLITE_OPTIONS}
        first = ALIASES[request.param]
        defaults = connections[first].settings_dict
        connections.settings[SECOND] = {**defaults, "HOST": "", "PORT": "", **address}
        try:
            call_command("migrate", database=SECOND, verbosity=0)
            yield first, SECOND
        finally:
            wait_for_background_threads(SECOND)
            close_connections()
            del connections[SECOND]
            del connections.settings[SECOND]


@pytest.fixture
def pair(pair_of_aliases: tuple[str, str], django_db_blocker: DjangoDbBlocker) -> Iterator[Pair]:
    with django_db_blocker.unblock():
        try:
            yield Pair(*pair_of_aliases, fresh_tenant())
        finally:
            for alias in pair_of_aliases:
                _end_moves(alias)
            close_connections()


def _end_moves(alias: str) -> None:
    """Remove the fences of a test that failed in the middle of a move: they would refuse other tests."""
    if not Database(alias, "").execute(EXISTS, {})[0][0]:
        return
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT tenant FROM {MOVED_TENANTS.quoted}")
        tenants = [tenant for (tenant,) in cursor.fetchall()]
    for tenant in tenants:
        take_down(Database(alias, tenant))


@pytest.fixture
def routed(pair: Pair) -> Iterator[Pair]:
    """`pair`, with four groups of tenants, two in each database."""
    PLACES.update(zip(("north", "south", "east", "west"), pair.aliases * 2, strict=True))
    with override_settings(DATABASE_ROUTERS=["tests.shards.routers.ByName"]):
        yield pair
    PLACES.clear()
