"""Changes that the caller's own savepoint rolls back, and handles that are copied."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, Final

import pytest

from helix_store.exceptions import ConflictError
from helix_store.stores import SessionHandle
from tests.handles.worlds import World

CHANGES: Final[dict[str, Any]] = {"merge_changes": {"n": 1}}


class _RolledBack(Exception):
    """The caller's own error."""


def _stage_and_roll_back(world: World, step: Any) -> None:
    with pytest.raises(_RolledBack), world.transaction():
        step.stage("call", **CHANGES)
        raise _RolledBack


@pytest.mark.parametrize("is_outermost", [True, False])
def test_a_change_that_the_caller_rolled_back_is_not_blamed_on_another_worker(
    world: World, is_outermost: bool
) -> None:
    if world.is_foreign:
        pytest.skip("a third party's store takes no part in transactions")
    session = world.new_session()
    with pytest.raises(ConflictError, match=r"Your transaction or savepoint .* 'call'"):
        if is_outermost:
            with session.step() as step:
                _stage_and_roll_back(world, step)
        else:
            with world.transaction(), session.step() as step:
                _stage_and_roll_back(world, step)
    with world.transaction(), session.step() as step:
        _stage_and_roll_back(world, step)
        step.stage("call", **CHANGES)
    state = world.loaded()
    assert (state.step_count, state.custom_state) == (1, {"n": 1})


def test_what_cannot_be_copied_says_what_to_pass_instead(world: World) -> None:
    session = world.new_session()
    copies: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy, pickle.dumps]
    for copied in copies:
        for handle in (session.step(), world.turn(session)):
            with pytest.raises(TypeError, match="pass the session id"):
                copied(handle)
    with pytest.raises(TypeError, match="pass the session id"):
        pickle.dumps(session)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copied_handle_is_another_one_on_the_same_session(
    world: World, copied: Callable[[SessionHandle], SessionHandle]
) -> None:
    assert copied(world.session(fencing_token=7)).fencing_token == 7
    session = world.new_session()
    with session.step() as step:
        other = copied(session)
        assert (other.id, other.store) == (session.id, session.store)
        step.say({"role": "user", "content": "first"})
    other.say({"role": "user", "content": "second"})
    assert [message["content"] for message in session.messages()] == ["first", "second"]
