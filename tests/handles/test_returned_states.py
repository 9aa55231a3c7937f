"""The states that a handle returns are those that a load would return, in every type that a write accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

import pytest

from helix_store.core.limits import MAX_REASON_BYTES
from helix_store.core.types import TERMINAL_STATUSES, RunStatus, SessionMode, SessionState, SessionStatus
from tests.cells import for_each
from tests.handles.worlds import World

NEW_YEAR: Final = datetime(2100, 1, 1, tzinfo=UTC)
HELLO: Final = {"role": "user", "content": "hello"}

CHANGES: Final[dict[str, dict[str, Any]]] = {
    "nothing": {},
    "a time": {"expires_at": NEW_YEAR},
    "milliseconds": {"expires_at": 4_102_444_800_000},
    "the key of a Django user": {"user_id": 5},
    "a UUID": {"user_id": UUID(int=7)},
    "a tuple of tags": {"tags": ("a", "b")},
    "words": {"status": "active", "mode": "standard", "suspension_kind": "suspended_client_tool"},
    "members": {
        "status": SessionStatus.RUNNING,
        "mode": SessionMode.STANDARD,
        "suspension_kind": RunStatus.SUSPENDED_CLIENT_TOOL,
    },
    "an end": {"status": "failed", "failure_reason": "no\x00NUL"},
    "a long reason": {"status": "failed", "failure_reason": "€" * MAX_REASON_BYTES},
    "no mode": {"mode": None},
    "what the store owns": {
        "message_count": 77,
        "created_at": NEW_YEAR,
        "updated_at": NEW_YEAR,
        "version": 99,
    },
    "other texts": {"title": "Title", "metadata": {"k": "v"}, "directory": "d", "workspace_id": "w"},
    "payloads": {"output": [1, -0.0, 1e16], "error": {"a": None}, "custom_state": {"k": [True, 1, 1.0]}},
}


def _update(world: World, change: Callable[[SessionState], None]) -> SessionState:
    return world.session().update(change)


def _step(world: World, change: Callable[[SessionState], None]) -> SessionState:
    with world.session().step() as step:
        step.say(HELLO)
        step.stage("call", merge_changes={"staged": 1})
        change(step.state)
    return step.state


def _step_of_a_turn(world: World, change: Callable[[SessionState], None]) -> SessionState:
    with world.turn(world.session()) as turn, turn.step() as step:
        step.say(HELLO)
        change(step.state)
        if step.state.status not in TERMINAL_STATUSES:
            step.end_turn()
    return step.state


@for_each("write", [_update, _step, _step_of_a_turn])
@pytest.mark.parametrize("change", CHANGES)
def test_a_returned_state_is_the_one_that_is_stored(
    world: World, write: Callable[[World, Callable[[SessionState], None]], SessionState], change: str
) -> None:
    def apply(state: SessionState) -> None:
        for name, value in CHANGES[change].items():
            setattr(state, name, value)

    session = world.new_session(mode="standard", user_id="ada", tags=["first"])
    session.say(HELLO)
    before = world.loaded()
    returned, stored = write(world, apply), world.loaded()
    for field in fields(SessionState):
        if field.name == "updated_at":
            continue
        ours, theirs = getattr(returned, field.name), getattr(stored, field.name)
        assert (type(ours), repr(ours)) == (type(theirs), repr(theirs)), field.name
    assert before.updated_at is not None
    assert returned.updated_at is not None
    assert stored.updated_at is not None
    assert before.updated_at <= returned.updated_at <= stored.updated_at
    # It can be saved again without loading.
    assert (
        world.store.save_state("session", returned, expected_version=returned.version) == stored.version + 1
    )


@pytest.mark.parametrize("change", [name for name in CHANGES if name != "what the store owns"])
def test_a_new_state_is_the_one_that_is_stored(world: World, change: str) -> None:
    taken = {"expires_at", "user_id", "tags", "mode", "title", "metadata", "directory", "workspace_id"}
    given = {name: value for name, value in CHANGES[change].items() if name in taken}
    assert repr(world.store.create_session("session", agent_type="agent", **given)) == repr(world.loaded())
