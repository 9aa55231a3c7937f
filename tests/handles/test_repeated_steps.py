"""A step with an operation id that is repeated returns the result of the first one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from helix_store.core.types import SessionStatus, StepCommit
from helix_store.exceptions import ConflictError, IdempotencyConflict
from helix_store.stores import Step
from tests.cells import for_each
from tests.handles.worlds import World


def make_step(world: World, text: str, *, order: str = "A-17", waits: bool = False) -> StepCommit:
    with world.session().step(operation_id="operation") as step:
        step.state.custom_state["count"] = step.state.custom_state.get("count", 0) + 1
        step.stage("call", merge_changes={"order": order})
        step.say({"role": "assistant", "content": text})
        if waits:
            step.wait_for({"question": {"tool_name": "ask", "input": {}}})
    assert step.commit is not None
    return step.commit


def test_a_repeated_step_returns_the_first_result(world: World) -> None:
    if world.is_foreign:
        pytest.skip("the digest of a third party's store is its own")
    world.new_session()
    first = make_step(world, "hello")
    with world.session().step() as other:
        other.say({"role": "user", "content": "in between"})
    before = world.contents()
    assert make_step(world, "hello") == first
    assert world.contents() == before
    assert world.loaded().custom_state == {"count": 1, "order": "A-17"}


def test_a_step_that_waits_is_asked_once_when_it_is_repeated(world: World) -> None:
    if world.is_foreign:
        pytest.skip("the digest of a third party's store is its own")
    world.new_session()
    first = make_step(world, "hello", waits=True)
    before = world.contents()
    assert make_step(world, "hello", waits=True) == first
    assert world.contents() == before


def test_the_state_of_a_repeated_step_is_what_is_stored(world: World) -> None:
    if world.is_foreign:
        pytest.skip("the digest of a third party's store is its own")
    world.new_session()
    for _ in range(2):
        with world.session().step(operation_id="operation") as step:
            step.say({"role": "assistant", "content": "hello"})
        state = world.loaded()
        assert (step.state.version, step.state.step_count) == (state.version, 1)


@for_each("other", [{"text": "else"}, {"text": "hello", "order": "B-1"}], ids=repr)
def test_another_step_with_the_same_operation_id_is_refused(world: World, other: dict[str, Any]) -> None:
    world.new_session()
    make_step(world, "hello")
    before = world.contents()
    with pytest.raises(IdempotencyConflict):
        make_step(world, **other)
    assert world.contents() == before


ASK: Final[dict[str, Any]] = {"tool_name": "ask", "input": {"amount": 5}}
WEEK: Final = timedelta(days=7)

ENDS: Final[dict[str, Callable[[Step], object]]] = {
    "finishes": lambda step: step.finish(),
    "finishes with an output": lambda step: step.finish({"answer": 42}),
    "fails": lambda step: step.fail("out of seats"),
}
QUESTIONS: Final[dict[str, Callable[[Step], object]]] = {
    "asks": lambda step: step.wait_for({"call": ASK}),
    "asks until a time": lambda step: step.wait_for(
        {"call": {**ASK, "deadline": datetime(2100, 1, 1, tzinfo=UTC)}}
    ),
    "asks for a week": lambda step: step.wait_for({"call": {**ASK, "deadline": WEEK}}),
    "asks in a run of its own": lambda step: step.wait_for({"call": {**ASK, "run_id": f"run-{step.number}"}}),
    "asks for approval": lambda step: step.ask_approval("call", "pay", {}, deadline=WEEK),
}
BODIES: Final[dict[str, Callable[[Step], object]]] = {
    "says": lambda step: step.say({"role": "assistant", "content": "hello"}),
    "stages": lambda step: step.stage("call", merge_changes={"list": [1]}),
    "changes the state": lambda step: step.state.custom_state.update(changed=True),
    **ENDS,
    **QUESTIONS,
}


def do_step(world: World, body: Callable[[Step], object], operation_id: str = "operation") -> StepCommit:
    with world.session().step(operation_id=operation_id) as step:
        body(step)
    assert step.commit is not None
    stored = world.loaded()
    assert replace(step.state, updated_at=stored.updated_at) == stored
    return step.commit


def _answer(world: World) -> None:
    for call in world.loaded().pending_client_tool_calls.values():
        approval_id = call["approval_id"]
        approval = {"approved": True, "approval_id": approval_id}
        world.store.submit_tool_result(
            "session", "call", **({"result": 1} if approval_id is None else approval)
        )


def _take(world: World) -> None:
    _answer(world)
    if world.loaded().status is SessionStatus.PAUSED:
        world.store.resume("session")
    world.store.take_tool_results("session")


def _finish(world: World) -> None:
    _take(world)
    if world.loaded().status is SessionStatus.ACTIVE:
        with world.session().step() as step:
            step.finish("by another step")


MEANWHILE: Final[dict[str, Callable[[World], object]]] = {
    "nothing": lambda world: None,
    "a message": lambda world: world.session().say({"role": "user", "content": "meanwhile"}),
    "an answer": _answer,
    "a taken answer": _take,
    "another step that finishes": _finish,
}


@pytest.mark.thorough
@for_each("body", BODIES)
@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_whatever_a_step_did_its_repeat_returns_the_first_result(
    world: World, body: str, meanwhile: str
) -> None:
    if world.is_foreign:
        pytest.skip("the digest of a third party's store is its own")
    world.new_session()
    first = do_step(world, BODIES[body])
    MEANWHILE[meanwhile](world)
    before = world.contents()
    assert do_step(world, BODIES[body]) == first
    assert world.contents() == before


OTHERS: Final[dict[str, tuple[Callable[[Step], object], Callable[[Step], object]]]] = {
    "output": (lambda step: step.finish(1), lambda step: step.finish(2)),
    "reason": (lambda step: step.fail("one"), lambda step: step.fail("two")),
    "ending": (ENDS["finishes"], ENDS["fails"]),
    "no ending": (ENDS["finishes"], BODIES["says"]),
    "an ending": (BODIES["says"], ENDS["finishes"]),
    "input": (QUESTIONS["asks"], lambda step: step.wait_for({"call": {**ASK, "input": 6}})),
    "call": (QUESTIONS["asks"], lambda step: step.wait_for({"other": ASK})),
    "approval": (QUESTIONS["asks for a week"], QUESTIONS["asks for approval"]),
    "no question": (QUESTIONS["asks"], BODIES["says"]),
}


@pytest.mark.thorough
@for_each("first, other", OTHERS.values(), ids=OTHERS)
def test_a_repeat_that_ends_or_asks_differently_is_refused(
    world: World, first: Callable[[Step], object], other: Callable[[Step], object]
) -> None:
    if world.is_foreign:
        pytest.skip("a third party's store does not know that the step is repeated")
    world.new_session()
    do_step(world, first)
    before = world.contents()
    with pytest.raises(IdempotencyConflict):
        do_step(world, other)
    assert world.contents() == before


@pytest.mark.thorough
@for_each("body", [*ENDS, *QUESTIONS])
def test_a_session_that_has_ended_is_not_ended_again_by_another_operation(world: World, body: str) -> None:
    world.new_session()
    do_step(world, BODIES["finishes"], "first")
    before = world.contents()
    for operation_id in ("another", None):
        step = world.session().step(operation_id=operation_id)
        with pytest.raises(ConflictError, match="only one of these"), step:
            BODIES[body](step)
        assert world.contents() == before


@for_each("body", [name for name in QUESTIONS if name != "asks"])
def test_a_call_of_another_operation_is_not_asked_again(world: World, body: str) -> None:
    world.new_session()
    do_step(world, lambda step: step.wait_for({"call": {**ASK, "input": "another question"}}), "first")
    before = world.contents()
    with pytest.raises(ConflictError, match="another pending tool call") as refused:
        do_step(world, QUESTIONS[body], "another")
    assert not isinstance(refused.value, IdempotencyConflict)
    assert world.contents() == before


def test_a_repeat_still_ends_in_one_way(world: World) -> None:
    if world.is_foreign:
        pytest.skip("a third party's store does not know that the step is repeated")
    world.new_session()
    do_step(world, ENDS["finishes"])
    with world.session().step(operation_id="operation") as step:
        step.finish()
        for ending in (step.finish, step.fail, step.end_turn, lambda: step.wait_for({"call": ASK})):
            with pytest.raises(ConflictError, match="only one of these"):
                ending()


def test_a_repeat_in_a_turn_asks_nothing_and_the_turn_goes_on(world: World) -> None:
    if world.is_foreign:
        pytest.skip("the digest of a third party's store is its own")
    session = world.new_session()
    with world.turn(session) as turn, turn.step(operation_id="operation") as step:
        QUESTIONS["asks for a week"](step)
    first = step.commit
    world.store.submit_tool_result("session", "call", result=7)
    with world.turn(session) as turn:
        with turn.step(operation_id="operation") as step:
            QUESTIONS["asks for a week"](step)
        assert step.commit == first
        assert turn.is_active
        with turn.step() as step:
            step.finish(turn.results["call"]["result"])
    assert world.store.list_runs("session")[0].status == "completed"
    assert world.loaded().output == 7
