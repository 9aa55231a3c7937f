"""Workers that are forked after their parent has used the stores share no connection with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections

from helix_store.stores import DatabaseStateStore
from tests.databases import ALIASES, CommittedDatabase, close_connections
from tests.deployments import prefork
from tests.deployments.deployments import changed_alias
from tests.invariants import broken_invariants
from tests.processes import WorkerProcess

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform cannot fork")

_PATIENCE_SECONDS = 120.0


def run(function: Callable[..., None], *arguments: Any) -> None:
    """In a process that starts without connections."""
    close_connections()
    WorkerProcess(function, *arguments).outcome(_PATIENCE_SECONDS).unwrap()


def contents(database: CommittedDatabase, name: str) -> list[str]:
    store = DatabaseStateStore(database.alias, tenant=database.tenant)
    return [message["content"] for message in store.get_messages(name, limit=10_000).messages]


def require_all_steps(database: CommittedDatabase) -> None:
    expected = [str(number) for number in range(1, prefork.STEPS + 1)]
    for name in (prefork.PARENT, *prefork.CHILDREN):
        assert contents(database, name) == expected, name
    assert broken_invariants(database) == []


@pytest.mark.parametrize(
    "options",
    [None, {"ASYNC_THREADS": 0}, {"ASYNC_THREADS": 2}],
    ids=["calls", "async calls", "async calls on threads"],
)
def test_parent_and_children_make_steps_side_by_side(
    committed_db: CommittedDatabase, options: dict[str, Any] | None
) -> None:
    run(prefork.step_side_by_side, committed_db.alias, committed_db.tenant, options)
    require_all_steps(committed_db)


def test_children_have_a_pool_of_their_own(postgres_db: CommittedDatabase) -> None:
    options = {**connections.settings[postgres_db.alias]["OPTIONS"], "pool": {"min_size": 1, "max_size": 2}}
    with changed_alias(postgres_db.alias, OPTIONS=options, CONN_MAX_AGE=0):
        run(prefork.step_side_by_side, postgres_db.alias, postgres_db.tenant, None)
        require_all_steps(postgres_db)


def test_children_listen_for_themselves(postgres_db: CommittedDatabase) -> None:
    run(prefork.fork_while_listening, postgres_db.alias, postgres_db.tenant)


def test_a_child_takes_no_part_in_the_open_transaction_of_its_parent(committed_db: CommittedDatabase) -> None:
    run(prefork.fork_in_a_block, committed_db.alias, committed_db.tenant)
    assert contents(committed_db, prefork.PARENT) == ["1", "2"]


def test_a_child_does_not_wait_for_a_statement_of_another_thread(sqlite_db: CommittedDatabase) -> None:
    run(prefork.fork_beside_a_statement, sqlite_db.alias, sqlite_db.tenant)


@pytest.mark.skipif(len(ALIASES) < 2, reason="HELIX_TEST_DATABASES leaves one database only")
def test_a_connection_that_no_store_has_used_stays(committed_db: CommittedDatabase) -> None:
    (other,) = set(ALIASES.values()) - {committed_db.alias}
    run(prefork.fork_beside_another_alias, committed_db.alias, other)


def test_a_database_in_memory_is_copied_by_the_fork(sqlite_db: CommittedDatabase) -> None:
    run(prefork.fork_with_a_database_in_memory)
