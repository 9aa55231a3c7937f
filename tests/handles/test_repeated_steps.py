"""A step with an operation id that is repeated returns the result of the first one."""

from __future__ import annotations

from typing import Any

import pytest

from helix_store.core.types import StepCommit
from helix_store.exceptions import IdempotencyConflict
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
