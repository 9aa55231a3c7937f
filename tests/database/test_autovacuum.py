"""A server that vacuums the ledger delays the calls that lock it, and refuses none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

import pytest
from django.core.management import call_command
from django.db.backends.base.base import BaseDatabaseWrapper
from pytest_django import DjangoDbBlocker

from helix_store.models import UsageEntry
from helix_store.stores import Store
from helix_store.testing.usage.base import custom
from tests.database.separate import execute, fetch, separate_postgres
from tests.databases import ALIASES
from tests.postgres import NOT_DURABLE, PostgresCluster

_PATIENCE_SECONDS: Final = 60.0
_SLOWLY: Final = {
    "autovacuum_naptime": "1s",
    "autovacuum_vacuum_threshold": "10",
    **NOT_DURABLE,
    "autovacuum_vacuum_scale_factor": "0",
    "autovacuum_vacuum_cost_delay": "100ms",
    "autovacuum_vacuum_cost_limit": "1",
}
"""Options with which a vacuum of some pages takes many seconds."""


@pytest.fixture
def connection(django_db_blocker: DjangoDbBlocker) -> Iterator[BaseDatabaseWrapper]:
    if "postgres" not in ALIASES:
        pytest.skip("HELIX_TEST_DATABASES leaves PostgreSQL out of this run")
    with (
        django_db_blocker.unblock(),
        PostgresCluster(options=_SLOWLY) as cluster,
        separate_postgres(cluster) as connection,
    ):
        call_command("migrate", "helix_store", database=connection.alias, verbosity=0)
        yield connection


def _wait_for_a_vacuum_of_the_ledger(connection: BaseDatabaseWrapper) -> None:
    table = UsageEntry._meta.db_table
    deadline = time.monotonic() + _PATIENCE_SECONDS
    running = "SELECT 1 FROM pg_stat_progress_vacuum WHERE relid = %s::regclass"
    while not fetch(connection, running, table):
        assert time.monotonic() < deadline, "the server does not vacuum the ledger"
        time.sleep(0.02)


def test_a_budget_is_set_while_the_server_vacuums_the_ledger(connection: BaseDatabaseWrapper) -> None:
    store = Store(connection.alias)
    store.new_session("session", agent_type="agent")
    store.usage.record_entries([custom("session", cost_usd="1")] * 1_000)
    execute(connection, f"UPDATE {UsageEntry._meta.db_table} SET step_count = 2")
    _wait_for_a_vacuum_of_the_ledger(connection)
    store.budgets.set_budget("cap", scope="tenant", limit_usd=2_000)
    assert store.budgets.status("cap").spent_usd == 1_000
