"""A stored row of the wrong shape is an `IntegrityFault` of that row, and of no other."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F, JSONField, Model, Value

from helix_store.core.limits import AS_STORED
from helix_store.core.types import Checkpoint as CheckpointValue
from helix_store.core.types import MessagePage, SessionState
from helix_store.exceptions import ConflictError, IntegrityFault
from helix_store.models import BudgetCounter, Checkpoint, Effect, Message, Session, StagedChange
from helix_store.sessions.state import encode_state
from helix_store.stores import Store
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.security.damaged_world import COLUMNS, LISTS, READS, WRITES, World, damages

READ_BY_WRITES = {Session, Checkpoint, Message, StagedChange}


@pytest.fixture
def world(committed_db: CommittedDatabase) -> World:
    world = World(committed_db)
    for name in ("good", "bad"):
        world.populate(name)
        world.add_decision_and_effects(name)
    world.overdue_first("bad")
    return world


def damage(world: World, column: str, text: str) -> None:
    """Write the text into the column of every row of the bad session."""
    model, field = COLUMNS[column]
    rows = world.rows(model, "bad")
    with world.database.connection.cursor() as cursor:
        for key in rows.values_list("pk", flat=True):
            cursor.execute(
                f'UPDATE {model._meta.db_table} SET "{field.column}" = %s WHERE id = %s',
                [text[:16] if column == "Checkpoint.status" else text, key],
            )


def assert_sound(value: Any) -> None:
    """What was returned has the shape that its type promises."""
    if isinstance(value, list):
        for each in value:
            assert_sound(each)
    elif isinstance(value, SessionState):
        encode_state(value, AS_STORED)
    elif isinstance(value, CheckpointValue):
        assert_sound(value.state)
    elif isinstance(value, MessagePage):
        assert all(type(message) is dict for message in value.messages)


def unexpected(world: World, calls: dict[str, Any], *allowed: type[Exception]) -> list[str]:
    """The calls that raise something else than a fault of the row."""
    found = []
    for name, call in calls.items():
        try:
            assert_sound(call())
        except allowed:
            pass
        except Exception as exc:  # noqa: BLE001  that is what is looked for
            found.append(f"{name}: {type(exc).__name__}: {exc}")
    return found


@for_each("column", COLUMNS)
def test_a_damaged_column_raises_a_fault_of_its_row_alone(world: World, column: str) -> None:
    model, field = COLUMNS[column]
    before = {name: repr(read(world, "good")) for name, read in READS.items()}
    lists = {name: read(world) for name, read in LISTS.items()}
    kept = list(world.rows(model, "bad").values())
    assert kept, f"the world has no row of {model.__name__}"
    faults: list[str] = []
    for text in damages(field):
        damage(world, column, text)
        reads = {name: lambda read=read: read(world, "bad") for name, read in READS.items()}
        found = unexpected(world, reads, IntegrityFault)
        writes = {
            name: lambda write=write: world.rolled_back(lambda: write(world, "bad"))
            for name, write in WRITES.items()
        }
        if model in READ_BY_WRITES:
            found += unexpected(world, writes, IntegrityFault, ConflictError)
        for name, read_all in LISTS.items():
            try:
                seen = read_all(world)
            except Exception as exc:  # noqa: BLE001  that is what is looked for
                found.append(f"{name}: {type(exc).__name__}: {exc}")
                continue
            if isinstance(seen, list) and "good" in str(lists[name]) and "good" not in str(seen):
                found.append(f"{name} leaves out the good session")
        faults += [f"{text[:60]!r}: {fault}" for fault in found]
    assert {name: repr(read(world, "good")) for name, read in READS.items()} == before
    assert "\n".join(faults) == ""


def test_damaged_holds_of_a_budget_are_a_fault_or_none(committed_db: CommittedDatabase) -> None:
    store = Store(committed_db.alias, tenant=committed_db.tenant)
    store.budgets.set_budget("budget", scope="tenant", limit_tokens=10)
    store.new_session("session", agent_type="agent")
    key = Session.objects.using(committed_db.alias).get(tenant=committed_db.tenant).pk
    counter = BudgetCounter.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    with store.session("session").turn(estimate_tokens=3) as turn, turn.step():
        token = turn.fencing_token
        assert token is not None
        assert store.budgets.status("budget").held_tokens == 3
        others: list[Any] = [[], 7, None, {}, {"x": 1}, {str(key): 7}, {str(key): [token - 1, 0, 5]}]
        for holds in others:
            counter.update(holds=Value(holds, JSONField()))
            assert store.budgets.status("budget").held_tokens == 0, holds
        for hold in ([token], [token, 0, "5"], [token, 0, 5, 0]):
            counter.update(holds={str(key): hold})
            with pytest.raises(IntegrityFault):
                store.budgets.status("budget")
        counter.update(holds={})


def test_calls_of_a_session_that_cannot_be_read_are_left_out_with_a_warning(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    damage(world, "Session.pending_client_tool_calls", "[]")
    with caplog.at_level(logging.WARNING, "helix_store"):
        calls = world.store.find_expired_pending(limit=1)
    assert [(call.session_id, call.tool_call_id) for call in calls] == [("good", "call-due")]
    assert "'bad'" in caplog.text


def test_many_unreadable_sessions_do_not_hide_the_calls_of_the_next(world: World) -> None:
    row = world.rows(Session, "bad").get(session_id="bad")
    deadline = row.pending_deadline
    for number in range(7):
        world.store.create_session(f"bad-{number}", agent_type="t")
        rows = Session.objects.using(world.database.alias).filter(tenant=world.database.tenant)
        rows.filter(session_id=f"bad-{number}").update(
            pending_deadline=deadline, pending_client_tool_calls="[]"
        )
    for limit in (1, 2, 5):
        calls = world.store.find_expired_pending(limit=limit)
        assert {call.session_id for call in calls} <= {"bad", "good"}
        assert len(calls) == min(limit, 2)


def test_every_payload_of_the_models_is_among_the_columns() -> None:
    assert len(COLUMNS) > 20
    assert all(issubclass(model, Model) for model, _ in COLUMNS.values())


def test_unknown_effects_that_cannot_be_read_are_left_out_with_a_warning(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the page had no room for the readable one behind it."""
    Effect.objects.using(world.database.alias).filter(session__session_id="bad").update(
        started_at=F("started_at") - timedelta(days=1)
    )
    damage(world, "Effect.input", "nonsense")
    with caplog.at_level(logging.WARNING, "helix_store"):
        effects = world.store.find_unknown_effects(limit=1)
    assert [(effect.session_id, effect.id) for effect in effects] == [("good", "unknown")]
    assert [record.getMessage().split(" cannot")[0] for record in caplog.records] == [
        "The effect 'unknown' of session 'bad'"
    ]
