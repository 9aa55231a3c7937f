"""A tenant that came after the statistics: the planner takes it for one without rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
from django.db import transaction
from django.db.models import Model
from django.test import override_settings

from helix_store.core.types import StepInfo
from helix_store.engine.database import Database
from helix_store.models import Session, SubSessionRef, UsageEntry
from helix_store.testing.usage.base import tool
from helix_store.transfer.moves import rows_of_tenant
from tests.cells import for_each
from tests.databases import fresh_tenant
from tests.plans.calls import PAGE, POSTGRES
from tests.plans.explained import plans_of
from tests.plans.rows import TEMPLATE, World, write_templates

_COPIES: Final = 2_000
_STEP: Final = StepInfo("next", 2)


def _step(world: World) -> None:
    state = world.store.load_state(TEMPLATE)
    assert state is not None
    world.store.save_state_and_promote_staging(TEMPLATE, state, [{"role": "user"}], _STEP)


CALLS: Final[dict[str, Callable[[World], Any]]] = {
    "session_exists": lambda world: world.store.session_exists(TEMPLATE),
    "load_state": lambda world: world.store.load_state(TEMPLATE),
    "a step": _step,
    "append_messages": lambda world: world.store.append_messages(TEMPLATE, [{"role": "user"}]),
    "get_messages": lambda world: world.store.get_messages(TEMPLATE),
    "get_message_count": lambda world: world.store.get_message_count(TEMPLATE),
    "stage_changes": lambda world: world.store.stage_changes(TEMPLATE, "step", {"tool_call_id": "call"}),
    "compare_and_set_status": lambda world: world.store.compare_and_set_status(
        TEMPLATE, ["active"], "active"
    ),
    "list_checkpoints": lambda world: world.store.list_checkpoints(TEMPLATE),
    "get_latest_checkpoint": lambda world: world.store.get_latest_checkpoint(TEMPLATE),
    "create_session of a child": lambda world: world.store.create_session(
        "child", agent_type="a", parent_session_id=TEMPLATE
    ),
    "branch_session": lambda world: world.store.branch_session(TEMPLATE),
    "delete_session": lambda world: world.store.delete_session(TEMPLATE),
    "record_entry": lambda world: world.usage.record_entry(tool(TEMPLATE)),
    "record_entries": lambda world: world.usage.record_entries([tool(TEMPLATE), tool(TEMPLATE)]),
    "get_rollup": lambda world: world.usage.get_rollup(TEMPLATE),
    "get_rollup of a tree": lambda world: world.usage.get_rollup(TEMPLATE, include_sub_agents=True),
    "get_entries": lambda world: world.usage.get_entries(TEMPLATE),
    "list_sessions": lambda world: world.store.list_sessions(count=False),
    "list_sessions by status": lambda world: world.store.list_sessions(status="active", count=False),
    "list_sessions by agent type": lambda world: world.store.list_sessions(
        agent_type="template", count=False
    ),
    "list_sessions far inside": lambda world: world.store.list_sessions(offset=100, count=False),
    "query_usage": lambda world: world.usage.query_usage(count=False),
    "graph get_session": lambda world: world.graph.get_session(TEMPLATE),
    "graph get_messages": lambda world: world.graph.get_messages(TEMPLATE),
    "graph add_messages": lambda world: world.graph.add_messages(TEMPLATE, [{"role": "user"}]),
    "graph fork": lambda world: world.graph.fork(_graph_checkpoint(world), with_history=True),
    "snapshot put": lambda world: world.snapshots.put(TEMPLATE, {"version": 2}),
    "snapshot get": lambda world: world.snapshots.get(TEMPLATE),
    "snapshot list": lambda world: world.snapshots.list(TEMPLATE),
    "snapshot delete_threads": lambda world: world.snapshots.delete_threads([TEMPLATE]),
    "what helix_move deletes next": lambda world: [
        list(rows[:PAGE]) for rows in rows_of_tenant(Database(world.database.alias, world.database.tenant))
    ],
}


def _graph_checkpoint(world: World) -> str:
    latest = world.graph.get_latest_checkpoint(TEMPLATE)
    assert latest is not None
    return latest.checkpoint_id


@pytest.fixture(scope="module", autouse=True)
def compacted(world: World) -> Iterator[None]:
    """Rows that were rolled back leave large tables, which have other plans in the modules that follow."""
    yield
    if world.name == POSTGRES:
        for model in (Session, UsageEntry):
            with world.database.connection.cursor() as cursor:
                # The second one is for the map of what is visible, which the first one leaves empty.
                cursor.execute(f"VACUUM FULL {model._meta.db_table}")
                cursor.execute(f"VACUUM ANALYZE {model._meta.db_table}")


@pytest.fixture(scope="module")
def newcomer(world: World, compacted: None) -> Iterator[World]:
    """The same database as a tenant sees it who has one session with everything, and many others."""
    newcomer = World(world.name, replace(world.database, tenant=fresh_tenant()))
    with transaction.atomic(using=world.database.alias):
        write_templates(newcomer)
        _copy(newcomer, Session, ["session_id", "root_session_id", "stream_id"], current_id="NULL")
        _copy(newcomer, UsageEntry, ["entry_id", "recorded_for"], session_id="NULL")
        assert newcomer.store.list_sessions(limit=1).total == _COPIES + 1
        yield newcomer
        transaction.set_rollback(True, using=world.database.alias)


def _copy(newcomer: World, model: type[Model], named: Sequence[str], **others: str) -> None:
    """Copy the rows of the tenant many times, each copy with names of its own."""
    names = [str(field.column) for field in model._meta.concrete_fields if not field.primary_key]
    changed = {**{name: f"{name} || '-' || number" for name in named}, **others}
    table = model._meta.db_table
    with newcomer.database.connection.cursor() as cursor:
        cursor.execute(
            f"""
            WITH RECURSIVE copy(number) AS (
                SELECT 1 UNION ALL SELECT number + 1 FROM copy WHERE number < {_COPIES})
            INSERT INTO {table} ({", ".join(names)})
            SELECT {", ".join(changed.get(name, name) for name in names)} FROM {table} CROSS JOIN copy
            WHERE tenant = %s""",
            [newcomer.database.tenant],
        )


@for_each("fast_paths", [True, False], ids=["fast paths", "portable"])
@for_each("name", CALLS)
def test_few_rows_are_read(newcomer: World, name: str, fast_paths: bool) -> None:
    with override_settings(HELIX_STORE={"FAST_PATHS": fast_paths}):
        plans = plans_of(newcomer.database, lambda: CALLS[name](newcomer))
    assert plans
    for plan in plans:
        assert plan.rows_read <= 10 * PAGE, plan.text


def test_a_wide_tree_is_walked_by_its_indexes_although_one_session_has_most_of_the_refs(
    newcomer: World,
) -> None:
    """Statistics of such refs make an index on their session look useless."""
    database, session, ref = newcomer.database, Session._meta.db_table, SubSessionRef._meta.db_table
    with transaction.atomic(using=database.alias):
        with database.connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {session} SET parent_session_id = %s WHERE tenant = %s AND session_id <> %s",
                [TEMPLATE, database.tenant, TEMPLATE],
            )
        SubSessionRef.objects.using(database.alias).all().delete()
        newcomer.store.create_session("other", agent_type="a")
        newcomer.store.add_sub_session_refs(
            "other", [{"sub_session_id": str(number), "agent_type": "a"} for number in range(10_000)]
        )
        with database.connection.cursor() as cursor:
            for table in (session, ref):
                cursor.execute(f"ANALYZE {table}")
        plans = plans_of(database, lambda: newcomer.usage.get_rollup(TEMPLATE, include_sub_agents=True))
        transaction.set_rollback(True, using=database.alias)
    if database.connection.vendor == "sqlite":
        with database.connection.cursor() as cursor:
            # The rollback undoes the statistics in their table, but not in the connection's memory.
            cursor.execute("ANALYZE sqlite_master")
    assert sum(plan.rows_read for plan in plans) <= 10 * _COPIES, "\n".join(plan.text for plan in plans)
