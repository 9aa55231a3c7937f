"""Going back refuses to lose rows, before the first migration is taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.management import call_command
from django.db import transaction
from django.db.migrations.exceptions import IrreversibleError
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.test import override_settings

from helix_store.core.types import StepInfo
from helix_store.items import ItemLog
from helix_store.models import Run
from helix_store.stores import (
    DatabaseBudgetStore,
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
)
from helix_store.testing.usage.base import custom
from tests.migrations.conftest import FreshDatabase

NEWEST = "0019_builds"


@pytest.fixture
def alias(fresh_database: FreshDatabase) -> str:
    """A database with the newest schema and no rows."""
    alias = fresh_database.connection.alias
    # The apps of the frameworks too: a deletion looks for rows in their tables.
    call_command("migrate", database=alias, verbosity=0)
    return alias


def go_back(alias: str, target: str, **options: Any) -> None:
    call_command("migrate", "helix_store", target, database=alias, verbosity=0, **options)


def refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except IrreversibleError:
        return True
    return False


def newest(database: FreshDatabase) -> str:
    loader = MigrationLoader(database.connection)
    known = loader.applied_migrations.keys() & loader.graph.nodes.keys()
    return max(str(name) for app, name in known if app == "helix_store")


def suspend_a_session(alias: str) -> DatabaseStateStore:
    store = DatabaseStateStore(alias)
    store.create_session("s", agent_type="agent")
    store.suspend("s", kind="suspended_client_tool", context={"why": "approval"})
    return store


def add_a_stream(alias: str) -> Callable[[], object]:
    streams = DatabaseStreamManager(alias)
    async_to_sync(streams.create_writer)("stream", "run", "agent")
    return lambda: async_to_sync(streams.delete_stream)("stream")


def add_a_post(alias: str) -> Callable[[], object]:
    store = DatabaseStateStore(alias)
    store.create_session("s", agent_type="agent")
    store.post_message("s", {"role": "user", "content": "hello"})
    return lambda: store.delete_session("s")


def add_an_operation(alias: str) -> Callable[[], object]:
    store = DatabaseStateStore(alias)
    state = store.create_session("s", agent_type="agent")
    store.save_state_and_promote_staging("s", state, [], StepInfo("step", 1), operation_id="operation")
    return lambda: store.delete_session("s")


def add_an_approval(alias: str) -> Callable[[], object]:
    store = DatabaseStateStore(alias)
    store.create_session("s", agent_type="agent")
    store.add_pending_tool_calls("s", {"call": {"tool_name": "pay", "approval_id": "call"}})
    store.submit_tool_result("s", "call", approved=True, approval_id="call")
    return lambda: store.delete_session("s")


def add_a_budget(alias: str) -> Callable[[], object]:
    budgets = DatabaseBudgetStore(alias)
    budgets.set_budget("budget", scope="tenant", limit_usd=1)
    return lambda: budgets.delete_budget("budget")


def add_a_session(alias: str) -> Callable[[], object]:
    store = DatabaseStateStore(alias)
    store.create_session("s", agent_type="agent")
    return lambda: store.delete_session("s")


def add_usage_of_a_deleted_session(alias: str) -> Callable[[], object]:
    add_a_session(alias)
    usage = DatabaseUsageStore(alias)
    usage.record_entry(custom("s"))
    DatabaseStateStore(alias).delete_session("s", keep_usage=True)
    return lambda: usage.delete("s")


def add_an_item(alias: str) -> Callable[[], object]:
    log = ItemLog("s", using=alias)
    log.append(["item"])
    return log.clear


def hold_a_lock(alias: str) -> Callable[[], object]:
    locks = DatabaseLockManager(alias)
    assert locks.acquire("lock")
    return lambda: locks.force_release("lock")


def add_a_build(alias: str) -> Callable[[], object]:
    store = DatabaseStateStore(alias)
    store.create_session("s", agent_type="agent")
    with override_settings(HELIX_STORE={"BUILD": "a1b2c3"}):
        store.start_run("s")
    return lambda: Run.objects.using(alias).update(build=None)


def test_a_refusal_leaves_the_newest_schema_and_a_working_app(
    alias: str, fresh_database: FreshDatabase
) -> None:
    store = suspend_a_session(alias)
    tables = fresh_database.tables()
    with pytest.raises(IrreversibleError):
        go_back(alias, "zero")
    assert newest(fresh_database) == NEWEST
    assert fresh_database.tables() == tables
    store.resume("s")


ROWS: tuple[tuple[str, Callable[[str], Callable[[], object]]], ...] = (
    ("0008_additions", add_a_post),
    ("0007_suspension_context", add_an_item),
    ("0007_suspension_context", add_a_stream),
    ("0007_suspension_context", add_an_operation),
    ("0008_additions", add_an_approval),
    ("0011_budgets", add_an_approval),
    ("0010_approvals", add_a_budget),
    ("0018_answer_permission", add_a_build),
    ("zero", add_a_session),
    ("zero", add_usage_of_a_deleted_session),
    ("zero", hold_a_lock),
)


def test_a_table_with_rows_is_not_dropped(alias: str, fresh_database: FreshDatabase) -> None:
    for target, add_rows in ROWS:
        remove_rows = add_rows(alias)
        assert refuses(lambda: go_back(alias, target)), add_rows.__name__  # noqa: B023
        assert newest(fresh_database) == NEWEST, add_rows.__name__
        remove_rows()
        store = DatabaseStateStore(alias)
        if store.session_exists("s"):
            store.delete_session("s")
    go_back(alias, "zero")
    go_back(alias, NEWEST)


def test_one_refusal_names_everything_that_would_be_lost(alias: str) -> None:
    add_a_stream(alias)
    suspend_a_session(alias)
    with pytest.raises(IrreversibleError) as caught:
        go_back(alias, "zero")
    text = str(caught.value)
    for named in ("0008_additions", "delete_stream()", "0007_suspension_context", "0001_sessions"):
        assert named in text


def test_a_refusal_in_a_transaction_leaves_it_usable(alias: str) -> None:
    add_a_stream(alias)
    with transaction.atomic(using=alias):
        with pytest.raises(IrreversibleError):
            go_back(alias, "zero")
        DatabaseStateStore(alias).create_session("later", agent_type="agent")
    assert DatabaseStateStore(alias).session_exists("later")


def test_a_migration_taken_back_without_the_command_refuses_too(
    alias: str, fresh_database: FreshDatabase
) -> None:
    add_a_stream(alias)
    executor = MigrationExecutor(fresh_database.connection)
    with pytest.raises(IrreversibleError, match="delete_stream"):
        executor.migrate([("helix_store", "0007_suspension_context")])
    assert newest(fresh_database) == "0008_additions"


def test_a_migration_that_is_only_recorded_as_taken_back_loses_nothing(
    alias: str, fresh_database: FreshDatabase
) -> None:
    store = suspend_a_session(alias)
    go_back(alias, "0006_mode_and_completion_reason", fake=True)
    assert newest(fresh_database) == "0006_mode_and_completion_reason"
    go_back(alias, NEWEST, fake=True)
    store.resume("s")
