"""Turns whose steps are in transactions of the caller that fail, are cut off or rolled back."""

from __future__ import annotations

from contextlib import suppress

import pytest
from django.db import DatabaseError, connections, transaction

from helix_store.core import moments
from helix_store.handles import Step, Turn
from helix_store.models import InterruptRequest
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from tests.faults.campaign import Trial, campaign
from tests.faults.proxy import Cut
from tests.faults.wires import Wire


def act(trial: Trial, step: Step) -> None:
    kind = trial.chance.choice(["say", "say", "finish", "wait"])
    if kind == "finish":
        step.finish("done")
    elif kind == "wait":
        step.wait_for({f"call-{step.number}": {"tool_name": "ask", "input": {}}})
    else:
        step.say({"role": "assistant", "content": step.number})


def step_in_a_block(wire: Wire, trial: Trial, turn: Turn, fault: str) -> None:
    with transaction.atomic(using=wire.alias):
        with transaction.atomic(using=wire.alias), turn.step() as step:
            act(trial, step)
        if fault == "rolled back":
            transaction.set_rollback(True, using=wire.alias)
        elif fault == "fails":
            InterruptRequest.objects.using(wire.alias).create(
                session_id=-1, kind="abort", requested_at=moments.now()
            )
        elif fault != "none":
            wire.proxy.arm(Cut[fault])


def drive(wire: Wire, trial: Trial) -> None:
    store, session_id = DatabaseStateStore(wire.alias, tenant=wire.tenant), f"session-{trial.seed}"
    store.create_session(session_id, agent_type="agent")
    spent = 0
    with store.session(session_id).turn() as turn:
        for _ in range(trial.chance.randint(1, 3)):
            if not turn.is_active:
                break
            fault = trial.chance.choice(["none", "rolled back", "fails", "BEFORE", "AFTER"])
            turn.tokens(model="m", prompt=1)
            spent += 1
            with suppress(DatabaseError):
                step_in_a_block(wire, trial, turn, fault)
            if fault in Cut.__members__:
                wire.proxy.wait_for_cut()
                connections[wire.alias].close()
            stored = store.load_state(session_id)
            assert stored is not None
            assert (turn.state.step_count, turn.state.status) == (stored.step_count, stored.status), fault
            assert turn.is_active is (stored.status == "active"), fault
            trial.count(fault)
    stored = store.load_state(session_id)
    assert stored is not None
    run = store.list_runs(session_id)[0]
    assert run.step_count == stored.step_count
    assert run.status == ("suspended_client_tool" if stored.status == "paused" else "completed")
    assert len(DatabaseUsageStore(wire.alias, tenant=wire.tenant).get_entries(session_id)) == spent


@pytest.mark.campaign
def test_a_turn_believes_what_is_stored_whatever_becomes_of_the_callers_transaction(wire: Wire) -> None:
    with campaign("lost_steps_of_turns", "postgres", sizes=(12, 400, 10_000)) as made:
        made.run(lambda trial: drive(wire, trial))
