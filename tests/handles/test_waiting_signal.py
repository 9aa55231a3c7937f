"""The signal that tells people that calls are waiting for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from django.db import transaction

from helix_store import Store, session_waiting
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.handles.worlds import World

CALL = {"tool_name": "ask"}


@pytest.fixture
def own_world(world: World) -> World:
    if world.is_foreign:
        pytest.skip("a third party's store sends no signals")
    return world


@pytest.fixture
def told() -> Iterator[list[tuple[str, list[str], str]]]:
    told: list[tuple[str, list[str], str]] = []

    def receive(
        session_id: str, tool_call_ids: list[str], root_session_id: str, using: str | None, **_: Any
    ) -> None:
        told.append((session_id, tool_call_ids, root_session_id))

    session_waiting.connect(receive)
    yield told
    session_waiting.disconnect(receive)


def test_it_names_the_calls_that_a_commit_has_opened(
    own_world: World, told: list[tuple[str, list[str], str]]
) -> None:
    session, store = own_world.new_session(), own_world.own
    with session.turn() as turn, turn.step() as step:
        step.wait_for({"one": CALL})
        step.ask_approval("two", "pay", 1)
        assert told == []
    assert told == [("session", ["one", "two"], "session")]
    told.clear()
    store.add_pending_tool_calls("session", {"three": CALL})
    assert told == [("session", ["three"], "session")]
    told.clear()
    store.add_pending_tool_calls("session", {"three": CALL})
    assert told == []
    store.suspend("session", kind="suspended_client_tool", context={}, pending={"three": CALL, "four": CALL})
    assert told == [("session", ["four"], "session")]


def test_a_sub_agent_names_the_root_of_its_tree_once(
    own_world: World, told: list[tuple[str, list[str], str]]
) -> None:
    own_world.new_session()
    child = own_world.new_session("child", parent_session_id="session")
    with child.turn() as turn, turn.step() as step:
        step.wait_for({"one": CALL})
    assert told == [("child", ["one"], "session")]


@for_each("asks", [["one", "two"], ["one"]], ids=["one more", "none"])
def test_a_step_names_no_call_that_was_open_before(
    own_world: World, told: list[tuple[str, list[str], str]], asks: list[str]
) -> None:
    session = own_world.new_session()
    own_world.own.add_pending_tool_calls("session", {"one": {"tool_name": "ask", "input": None}})
    told.clear()
    with session.step() as step:
        step.wait_for({key: {"tool_name": "ask", "input": None} for key in asks})
    assert told == ([("session", ["two"], "session")] if "two" in asks else [])
    assert session.load().status == "paused"


def test_a_step_that_fails_tells_nobody(own_world: World, told: list[tuple[str, list[str], str]]) -> None:
    session = own_world.new_session()
    with suppress(ZeroDivisionError), session.step() as step:
        step.wait_for({"one": CALL})
        raise ZeroDivisionError
    assert told == []


def test_it_waits_for_the_commit_of_the_caller(
    committed_db: CommittedDatabase, told: list[tuple[str, list[str], str]]
) -> None:
    session = Store(committed_db.alias, tenant=committed_db.tenant).new_session("session", agent_type="a")
    with suppress(ZeroDivisionError), transaction.atomic(using=committed_db.alias):
        with session.step() as step:
            step.wait_for({"one": CALL})
        raise ZeroDivisionError
    assert told == []
    with transaction.atomic(using=committed_db.alias):
        with session.step() as step:
            step.wait_for({"one": CALL})
        assert told == []
    assert told == [("session", ["one"], "session")]


@for_each("ended", [False, True], ids=["answered", "ended"])
def test_a_rewind_to_a_question_tells_who_has_to_answer_it_again(
    own_world: World, told: list[tuple[str, list[str], str]], ended: bool
) -> None:
    own_world.new_session("root")
    session = own_world.new_session(parent_session_id="root")
    with session.turn() as turn, turn.step() as step:
        step.say({"role": "user", "content": "Pay."})
    with session.turn() as turn, turn.step() as step:
        step.wait_for({"one": CALL})
        step.ask_approval("two", "pay", 1)
    question = session.checkpoints().items[0].checkpoint_id
    told.clear()
    session.rewind(question)
    assert told == []  # they are open anyway
    own_world.own.submit_tool_result("session", "two", approved=True, approval_id="two")
    if ended:
        own_world.own.update_status("session", "failed")
    session.rewind(question)
    assert told == [("session", ["one", "two"] if ended else ["two"], "root")]
    told.clear()
    session.rewind(session.checkpoints().items[-1].checkpoint_id)
    assert told == []


def test_a_rewind_to_an_answer_that_does_not_count_tells_who_has_to_give_it_again(
    own_world: World, told: list[tuple[str, list[str], str]]
) -> None:
    session, store = own_world.new_session(), own_world.own
    for call_id in ("approved", "rejected"):
        with session.step() as step:
            step.ask_approval(call_id, "pay", 1)
        answer = {"approved": call_id == "approved", "approval_id": call_id}
        store.submit_tool_result("session", call_id, **answer)
    with session.step() as step:
        step.say({"role": "assistant", "content": "Both are answered."})
    answered = session.checkpoints().items[0].checkpoint_id
    told.clear()
    session.rewind(answered)
    assert told == []
    # Without its question, the approval ends. The rejection stays what a person has said.
    state = session.load()
    state.pending_client_tool_calls = {}
    store.save_state("session", state)
    session.rewind(answered)
    assert told == [("session", ["approved"], "session")]
    session.rewind(answered)
    assert len(told) == 1
