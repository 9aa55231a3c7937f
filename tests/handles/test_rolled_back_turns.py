"""A step in a transaction of the caller counts unless that transaction is rolled back, on every store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import pytest

from helix_store.core.types import SessionStatus
from helix_store.handles import Step, Turn
from tests.cells import for_each
from tests.handles.worlds import World


class _RolledBack(Exception):
    """The caller's own error."""


@pytest.fixture
def own_world(world: World) -> World:
    if world.is_foreign:
        pytest.skip("a third party's store takes no part in transactions")
    return world


@contextmanager
def rolled_back(world: World) -> Iterator[None]:
    with suppress(_RolledBack), world.transaction():
        yield
        raise _RolledBack


def finish(step: Step) -> None:
    step.finish("done")


def fail(step: Step) -> None:
    step.fail("broken")


def end_turn(step: Step) -> None:
    step.end_turn()


def wait(step: Step) -> None:
    step.wait_for({"call": {"tool_name": "ask"}})


def say(step: Step) -> None:
    step.say({"role": "assistant", "content": "hello"})


STEPS: Final[tuple[Callable[[Step], None], ...]] = (finish, fail, end_turn, wait, say)


def stands(turn: Turn) -> tuple[bool, int, SessionStatus]:
    return turn.is_active, turn.state.step_count, turn.state.status


@for_each("act", STEPS)
def test_a_turn_forgets_a_step_that_the_caller_rolled_back(
    own_world: World, act: Callable[[Step], None]
) -> None:
    with own_world.turn(own_world.new_session()) as turn:
        with rolled_back(own_world):
            with turn.step() as step:
                act(step)
            assert turn.is_active is (act is say)
        assert stands(turn) == (True, 0, SessionStatus.ACTIVE)
        with turn.step() as again:
            assert again.number == 1
            say(again)
    assert own_world.loaded().message_count == 1
    run = own_world.store.list_runs("session")[0]
    assert (run.status, run.step_count, run.completion_reason) == ("completed", 1, None)


@for_each("act", STEPS)
def test_the_run_ends_as_what_is_stored_after_the_last_step_was_rolled_back(
    own_world: World, act: Callable[[Step], None]
) -> None:
    with own_world.turn(own_world.new_session()) as turn, rolled_back(own_world), turn.step() as step:
        act(step)
    run = own_world.store.list_runs("session")[0]
    assert (run.status, run.step_count, run.completion_reason) == ("completed", 0, None)


def test_a_savepoint_is_rolled_back_alone(own_world: World) -> None:
    with own_world.turn(own_world.new_session()) as turn:
        with own_world.transaction():
            with turn.step() as step:
                say(step)
            with rolled_back(own_world), turn.step() as step:
                finish(step)
            assert stands(turn) == (True, 1, SessionStatus.ACTIVE)
            with turn.step() as step:
                say(step)
        assert stands(turn) == (True, 2, SessionStatus.ACTIVE)


def test_a_transaction_takes_its_savepoints_back(own_world: World) -> None:
    with own_world.turn(own_world.new_session()) as turn:
        with turn.step() as step:
            say(step)
        with rolled_back(own_world):
            with own_world.transaction(), turn.step() as step:
                say(step)
            with own_world.transaction(), turn.step() as step:
                finish(step)
            assert not turn.is_active
        assert stands(turn) == (True, 1, SessionStatus.ACTIVE)


def test_usage_of_rolled_back_steps_is_recorded_once(own_world: World) -> None:
    with own_world.turn(own_world.new_session()) as turn:
        with rolled_back(own_world):
            turn.tokens(model="m", prompt=1)
            with turn.step() as step:
                say(step)
            turn.tokens(model="m", prompt=2)
            with suppress(ZeroDivisionError), turn.step():
                turn.tokens(model="m", prompt=4)
                raise ZeroDivisionError
        with own_world.transaction(), turn.step() as step:
            turn.tokens(model="m", prompt=8)
            say(step)
    entries = own_world.usage.get_entries("session")
    assert [entry.tokens.prompt for entry in entries if entry.tokens] == [1, 2, 4, 8]
