"""PostgreSQL behind a proxy that can cut a connection, and databases that a test does anything with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest
from django.db import connections
from pytest_django import DjangoDbBlocker

from tests.databases import ALIASES, CommittedDatabase, close_connections, delete_all_rows
from tests.faults.restores import Restorable, restorable_postgres, restorable_sqlite
from tests.faults.wires import Wire, opened_wire
from tests.streams.background import wait_for_background_threads


@pytest.fixture
def wire(postgres_db: CommittedDatabase) -> Iterator[Wire]:
    with opened_wire(postgres_db.alias, postgres_db.tenant) as opened:
        yield opened


@pytest.fixture(scope="session")
def restorables(
    django_db_setup: None, django_db_blocker: DjangoDbBlocker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Restorable]]:
    """A database of each vendor beside that of the suite, made when it is first asked for."""
    with ExitStack() as stack:

        @cache
        def of(vendor: str) -> Restorable:
            if vendor == "sqlite":
                file = tmp_path_factory.mktemp("restorable") / "helix.sqlite3"
                return stack.enter_context(restorable_sqlite(file))
            return stack.enter_context(restorable_postgres(ALIASES["postgres"]))

        yield of
        with django_db_blocker.unblock():
            stack.close()


@pytest.fixture
def restorable(
    committed_db: CommittedDatabase, restorables: Callable[[str], Restorable]
) -> Iterator[Restorable]:
    database = restorables(committed_db.vendor)
    aliases = (database.worker, database.successor)
    for alias in aliases:
        # So that every thread finds it.
        connections.settings[alias] = connections[alias].settings_dict
    # Going back refuses to lose the rows of an earlier test.
    delete_all_rows(database.worker)
    yield database
    for alias in aliases:
        wait_for_background_threads(alias)
    # Those of other threads too.
    close_connections()
    for alias in aliases:
        del connections.settings[alias]
