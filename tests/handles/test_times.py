"""Every call of a handle that takes epoch milliseconds also takes an aware datetime, and stores the same."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Final

import pytest

from helix_store.core.types import Timestamp
from helix_store.core.validation import datetime_to_milliseconds
from helix_store.exceptions import InvalidPayload
from tests.cells import for_each
from tests.handles.worlds import World

MOMENT: Final = datetime(2031, 5, 6, 7, 8, 9, 123_456, tzinfo=timezone(timedelta(hours=-5)))
MILLISECONDS: Final = datetime_to_milliseconds(MOMENT)
FORMS: Final[tuple[Timestamp, ...]] = (MILLISECONDS, MOMENT, MOMENT.astimezone(UTC))


def _created(world: World, at: Any) -> Any:
    return world.new_session(expires_at=at).load().expires_at


def _updated(world: World, at: Any) -> Any:
    world.new_session().update(lambda state: setattr(state, "expires_at", at))
    return world.loaded().expires_at


def _expires_with_a_step(world: World, at: Any) -> Any:
    with world.new_session().step() as step:
        step.state.expires_at = at
    return world.loaded().expires_at


def _staged(world: World, at: Any) -> Any:
    with world.new_session().step() as step:
        step.stage("call", merge_changes={"order": "A-17"}, timestamp=at)
        (staged,) = world.store.get_staged_changes("session", step.id)
    assert world.loaded().custom_state == {"order": "A-17"}
    return staged.timestamp


def _staged_in_a_turn(world: World, at: Any) -> Any:
    with world.turn(world.new_session()) as turn, turn.step() as step:
        step.stage("call", merge_changes={"order": "A-17"}, timestamp=at)
        (staged,) = world.store.get_staged_changes("session", step.id)
        step.finish()
    assert world.loaded().custom_state == {"order": "A-17"}
    return staged.timestamp


def _asked(world: World, at: Any) -> Any:
    with world.new_session().step() as step:
        step.wait_for({"call": {"tool_name": "ask", "requested_at": at, "deadline": at}})
    call = world.loaded().pending_client_tool_calls["call"]
    assert call["requested_at"] == call["deadline"]
    return call["deadline"]


def _asked_for_approval(world: World, at: Any) -> Any:
    with world.new_session().step() as step:
        step.ask_approval("call", "pay", {}, deadline=at)
    return world.loaded().pending_client_tool_calls["call"]["deadline"]


def _posted(world: World, at: Any) -> Any:
    if world.is_foreign:
        pytest.skip("a third party's store has no posts")
    post = world.new_session().post({"role": "user", "content": "later"}, not_before=at)
    assert post.not_before is not None
    return datetime_to_milliseconds(post.not_before)


CALLS: Final = (
    _created,
    _updated,
    _expires_with_a_step,
    _staged,
    _staged_in_a_turn,
    _asked,
    _asked_for_approval,
    _posted,
)


@pytest.mark.thorough
@for_each("call", CALLS)
def test_a_time_is_stored_as_its_milliseconds_in_every_form(
    world: World, call: Callable[[World, Any], Any]
) -> None:
    for at in FORMS:
        stored = call(world, at)
        assert (type(stored), stored) == (int, MILLISECONDS), at
        world.store.delete_session("session")


@for_each("call", CALLS)
@pytest.mark.parametrize("at", [datetime(2031, 5, 6), "2031-05-06"])  # noqa: DTZ001
def test_a_time_without_a_zone_is_refused(world: World, call: Callable[[World, Any], Any], at: Any) -> None:
    with pytest.raises(InvalidPayload):
        call(world, at)
