"""What a turn spends is recorded with the step that commits, and without it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from helix_store.core.usage import TokenCounts
from helix_store.exceptions import InvalidPayload, StaleStateError
from tests.cells import for_each
from tests.handles.worlds import World

HELLO = {"role": "user", "content": "hello"}


class Interruption(Exception):
    """An error of the caller's own."""


def entries(world: World) -> list[Any]:
    return world.usage.get_entries("session")


def test_usage_is_recorded_with_the_step_session_run_and_step_filled_in(world: World) -> None:
    with world.turn(world.new_session()) as turn:
        turn.tokens(
            model="m",
            prompt=3,
            completion=2,
            duration=timedelta(seconds=2.5),
            reasoning=1,
            cached=1,
            cache_write=2,
            audio_completion=1,
            cost_usd="0.25",
        )
        with turn.step() as step:
            turn.tool("search", True, timedelta(seconds=1.5))
            turn.tool("book", success=False, duration=20)
            assert entries(world) == []
            step.say(HELLO)
        assert len(entries(world)) == 3
        turn.tokens(model="m", prompt=1, total=9)
        with turn.step() as step:
            step.say(HELLO)
    assert turn.run is not None
    tokens, search, book, more = entries(world)
    assert {entry.run_id for entry in entries(world)} == {turn.run.run_id}
    assert [entry.step_count for entry in entries(world)] == [1, 1, 1, 2]
    assert (tokens.source.type, tokens.source.name) == ("agent", "agent")
    assert tokens.tokens == TokenCounts(
        prompt=3, completion=2, reasoning=1, cached=1, cache_write=2, audio_completion=1, total=5
    )
    assert str(tokens.cost_usd) == "0.250000000000"
    assert (tokens.duration_ms, more.duration_ms) == (2_500, None)
    assert (search.tool_name, search.success, search.duration_ms) == ("search", True, 1_500)
    assert (book.tool_name, book.success, book.duration_ms) == ("book", False, 20)
    assert more.tokens.total == 9


def test_what_was_spent_is_recorded_although_the_step_fails(world: World) -> None:
    with world.turn(world.new_session()) as turn:
        with pytest.raises(Interruption), turn.step() as step:
            step.say(HELLO)
            turn.tokens(model="m", prompt=1)
            raise Interruption
        assert len(entries(world)) == 1
        with turn.step() as step:
            step.say(HELLO)
            turn.tokens(model="m", prompt=1)
    assert [entry.step_count for entry in entries(world)] == [1, 1]
    assert len({entry.id for entry in entries(world)}) == 2


def test_what_was_spent_is_recorded_although_the_commit_fails(world: World) -> None:
    with pytest.raises(StaleStateError), world.turn(world.new_session()) as turn, turn.step() as step:
        turn.tokens(model="m", prompt=1)
        turn.tool("search", True, 1)
        step.say(HELLO)
        world.store.append_messages("session", [HELLO])
    assert [entry.kind for entry in entries(world)] == ["tokens", "tool"]
    assert world.loaded().message_count == 1


def test_what_was_spent_is_recorded_although_the_transaction_of_the_caller_is_rolled_back(
    world: World,
) -> None:
    if world.is_foreign:
        pytest.skip("a third party's store takes no part in transactions")
    with world.turn(world.new_session()) as turn:
        with pytest.raises(Interruption), world.transaction(), turn.step() as step:
            step.say(HELLO)
            turn.tokens(model="m", prompt=1)
            raise Interruption
        with world.transaction(), turn.step() as step:
            step.say(HELLO)
    assert [entry.tokens.prompt for entry in entries(world)] == [1]
    assert world.loaded().step_count == 1


def test_what_was_spent_outside_of_a_step_is_recorded_at_the_end(world: World) -> None:
    with pytest.raises(Interruption), world.turn(world.new_session()) as turn:
        turn.tokens(model="m", prompt=1)
        raise Interruption
    assert [entry.step_count for entry in entries(world)] == [1]


@for_each(
    "bad",
    [
        *({"model": ""}, {"prompt": -1}, {"prompt": 1.5}, {"cost_usd": "much"}, {"total": -1}),
        *({"duration": -1}, {"duration": 1.5}, {"duration": timedelta(-1)}),
    ],
    ids=repr,
)
def test_usage_that_makes_no_sense_is_refused_where_it_is_said(world: World, bad: dict[str, Any]) -> None:
    with world.turn(world.new_session()) as turn:
        with pytest.raises(InvalidPayload):
            turn.tokens(**{"model": "m", **bad})
        with pytest.raises(InvalidPayload):
            turn.tool("search", True, timedelta(-1))
        with pytest.raises(InvalidPayload):
            turn.tool("search", "yes", 1)  # type: ignore[arg-type]
        with turn.step() as step:
            step.say(HELLO)
    assert entries(world) == []
