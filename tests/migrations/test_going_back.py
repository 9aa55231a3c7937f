"""Every version above the first can be reversed as long as no data is lost."""

from __future__ import annotations

import pytest
from django.core.management import call_command
from django.db.migrations.exceptions import IrreversibleError

from helix_store.models import Checkpoint, CheckpointKind, Session
from helix_store.stores import DatabaseStateStore
from tests.factories import CheckpointFactory, SessionFactory
from tests.migrations.conftest import FreshDatabase
from tests.migrations.test_migrate import MIGRATIONS


def test_going_back_is_refused_while_a_session_would_lose_something(fresh_database: FreshDatabase) -> None:
    alias = fresh_database.connection.alias
    call_command("migrate", "helix_store", database=alias, verbosity=0)
    DatabaseStateStore(alias).create_session("s", agent_type="t")
    session = Session.objects.using(alias).filter(session_id="s")
    for target, column, value in (
        ("0006_mode_and_completion_reason", "suspension_context", "{}"),
        ("0006_mode_and_completion_reason", "suspended_awaiting_children", "[]"),
        ("0006_mode_and_completion_reason", "suspended_step_id", "step-1"),
        ("0005_completed_client_tool_calls", "mode", "persistent"),
        ("0004_root_session_and_call_ownership", "completed_client_tool_calls", '{"c": 1}'),
        ("0003_pending_client_tool_calls", "client_tool_call_ownership", '{"c": "s"}'),
        ("0002_remote_sub_sessions", "pending_client_tool_calls", '{"c": {}}'),
    ):
        session.update(**{column: value})
        with pytest.raises(IrreversibleError, match=column):
            call_command("migrate", "helix_store", target, database=alias, verbosity=0)
        session.update(**{column: None})
    call_command("migrate", "helix_store", "0002_remote_sub_sessions", database=alias, verbosity=0)
    call_command("migrate", "helix_store", database=alias, verbosity=0)
    assert DatabaseStateStore(alias).session_exists("s")


def test_going_back_and_forth_gives_old_sessions_their_roots(fresh_database: FreshDatabase) -> None:
    alias = fresh_database.connection.alias
    call_command("migrate", "helix_store", database=alias, verbosity=0)
    store = DatabaseStateStore(alias)
    store.create_session("top", agent_type="t")
    store.create_session("middle", agent_type="t", parent_session_id="top")
    store.create_session("leaf", agent_type="t", parent_session_id="middle")
    store.create_session("alone", agent_type="t")
    call_command("migrate", "helix_store", MIGRATIONS[3], database=alias, verbosity=0)
    call_command("migrate", "helix_store", database=alias, verbosity=0)
    roots = {head.session_id: head.root_session_id for head in store.list_sessions().sessions}
    assert roots == {"top": "top", "middle": "top", "leaf": "top", "alone": "alone"}


def test_going_back_writes_out_in_full_what_was_stored_as_a_delta(fresh_database: FreshDatabase) -> None:
    alias = fresh_database.connection.alias
    call_command("migrate", "helix_store", database=alias, verbosity=0)
    session = SessionFactory.create(using=alias)
    full = {"kept": "x" * 500, "n": 1.0}
    bases, expected = [], {}
    for kind in (CheckpointKind.STEP, CheckpointKind.BASE):
        bases.append(CheckpointFactory.create(session=session, state={"custom_state": full}, kind=kind))
    for number in range(3):
        delta = f'{{"removed":["n"],"set":{{"m":{number}}}}}'
        row = CheckpointFactory.create(session=session, base=bases[number % 2], payload=delta)
        expected[row.checkpoint_id] = f'{{"kept":"{"x" * 500}","m":{number}}}'
    Checkpoint.objects.using(alias).filter(pk=bases[1].pk).update(checkpoint_id=None)

    call_command("migrate", "helix_store", MIGRATIONS[7], database=alias, verbosity=0)
    with fresh_database.connection.cursor() as cursor:
        cursor.execute(
            "SELECT checkpoint_id, payload, size_bytes - length(envelope) FROM helix_store_checkpoint "
            "WHERE kind <> 'state'"
        )
        stored = cursor.fetchall()
    expected[bases[0].checkpoint_id] = bases[0].payload
    assert {checkpoint_id: payload for checkpoint_id, payload, _ in stored} == expected
    assert all(size == len(payload) for _, payload, size in stored)

    call_command("migrate", "helix_store", database=alias, verbosity=0)
    read = DatabaseStateStore(alias).get_latest_checkpoint(session.session_id)
    assert read is not None
    assert read.state.custom_state == {"kept": "x" * 500, "m": 2}
