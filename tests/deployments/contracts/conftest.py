"""Fixtures of the contract suites, each on PostgreSQL as every deployment reaches it.

A run takes a sample of one test in a hundred of each deployment. ``python -m tests.deployments`` takes all of
them: it sets ``HELIX_DEPLOYMENTS`` to ``all`` or to the name of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import pytest
from django.db import connections
from django.test.utils import override_settings
from pytest_django import DjangoDbBlocker

from helix_store.checkpointers import SnapshotCheckpointer
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from tests.checkpointers.conftest import Stores, graph, make_snapshots, snapshots, statements
from tests.database.citus_rules import refusals
from tests.databases import ALIASES, CommittedDatabase, close_connections, fresh_tenant
from tests.deployments.contracts.table import PROPERTY, table_of
from tests.deployments.deployments import (
    CITUS_FORM,
    DEPLOYMENTS,
    REPEATABLE_READ,
    Deployment,
    deployed,
    socket_of,
)
from tests.deployments.sent import sent_through
from tests.invariants import broken_invariants
from tests.selection import is_in_sample

__all__ = ["graph", "make_snapshots", "snapshots", "statements"]

_IN_BLOCKS_OF_THE_CALLER: Final = {
    "test_a_put_is_the_newest_at_the_moment_of_its_commit",
    "test_puts_and_deletions_at_once_leave_what_they_leave_one_after_another",
}

_COUNTS_STATEMENTS: Final = "test_costs_a_fixed_number_of_statements"


_CHOSEN: Final = os.environ.get("HELIX_DEPLOYMENTS")
_RUNNABLE: Final = [
    each for each in DEPLOYMENTS if not each.missing and (_CHOSEN in (None, "all", each.name))
]
_ONE_IN: Final = 100


def _deployments_of(config: pytest.Config, nodeid: str) -> list[Deployment]:
    """The deployments in which this run tries a test."""
    if _CHOSEN:
        return _RUNNABLE
    return [each for each in _RUNNABLE if is_in_sample(config, f"{nodeid} {each.name}", _ONE_IN)]


def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[pytest.Item] | None:
    """Return an empty list for a test that no deployment tries."""
    if name.startswith("test_") and callable(obj):
        return None if _deployments_of(collector.config, f"{collector.nodeid}::{name}") else []
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "deployment" in metafunc.fixturenames:
        collector = metafunc.definition.parent
        assert collector is not None
        chosen = _deployments_of(metafunc.config, f"{collector.nodeid}::{metafunc.definition.name}")
        metafunc.parametrize(
            "deployment", chosen, ids=lambda deployment: deployment.name, indirect=True, scope="module"
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _CHOSEN:
        for line in table_of(terminalreporter.stats):
            terminalreporter.write_line(line)
    for each in DEPLOYMENTS:
        if each.missing:
            terminalreporter.write_line(f"Not run in the deployment {each.name!r}: {each.missing}.")


@pytest.fixture(scope="module")
def deployment(
    request: pytest.FixtureRequest, django_db_setup: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[Deployment]:
    made: Deployment = request.param
    if "postgres" not in ALIASES:
        pytest.skip("HELIX_TEST_DATABASES leaves postgres out of this run")
    alias = ALIASES["postgres"]
    if made.pooler and socket_of(alias) is None:
        pytest.skip("the server of DATABASE_URL is not reached through a socket that trusts")
    with django_db_blocker.unblock(), deployed(made, alias):
        if made.name == CITUS_FORM:
            with sent_through(alias) as sent:
                yield made
            refused = {
                text: found
                for text in sent.values()
                if (found := refusals(connections[alias], text, is_bound=True))
            }
            assert refused == {}
        else:
            yield made


@pytest.fixture
def committed_db(
    request: pytest.FixtureRequest, deployment: Deployment, django_db_blocker: DjangoDbBlocker
) -> Iterator[CommittedDatabase]:
    request.node.user_properties.append((PROPERTY, deployment.name))
    if deployment.name == REPEATABLE_READ and request.node.originalname in _IN_BLOCKS_OF_THE_CALLER:
        pytest.skip("a block of the caller has the caller's isolation: its conflicts are StoreBusy")
    if "HELIX_STORE_CITUS" in deployment.settings and request.node.originalname == _COUNTS_STATEMENTS:
        pytest.skip("the form for Citus has other statements")
    if deployment.loses_prepared and request.node.originalname == _COUNTS_STATEMENTS:
        pytest.skip("a statement that a session does not know is sent once more")
    with django_db_blocker.unblock():
        try:
            yield CommittedDatabase(alias=ALIASES["postgres"], tenant=fresh_tenant())
        finally:
            close_connections()


@pytest.fixture
def sound_db(committed_db: CommittedDatabase) -> Iterator[CommittedDatabase]:
    yield committed_db
    assert broken_invariants(committed_db) == []


@pytest.fixture
def postgres_db(committed_db: CommittedDatabase) -> CommittedDatabase:
    return committed_db


@pytest.fixture(params=[True, False], ids=["fast paths", "portable"])
def stores(request: pytest.FixtureRequest, committed_db: CommittedDatabase) -> Iterator[Stores]:
    where: dict[str, Any] = {"using": committed_db.alias, "tenant": committed_db.tenant}
    with override_settings(HELIX_STORE={"FAST_PATHS": request.param}):
        yield Stores(
            snapshots=partial(SnapshotCheckpointer, **where),
            states=partial(DatabaseStateStore, **where),
            locks=partial(DatabaseLockManager, **where),
        )
