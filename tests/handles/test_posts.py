"""Turns receive the posts of their session."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from helix_store.core import moments
from helix_store.core.types import RunStatus, SessionStatus
from helix_store.exceptions import ConflictError, NotSupportedOnBackend, SessionEnded, TurnInterrupted
from helix_store.handles import SessionHandle
from tests.cells import for_each
from tests.handles.worlds import World

HELLO = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}
CALLS = {"role": "assistant", "tool_calls": [{"id": "a"}, {"id": "b"}]}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "done"}


@pytest.fixture
def session(world: World) -> SessionHandle:
    if world.is_foreign:
        pytest.skip("this store has no posts")
    return world.new_session()


def test_a_store_without_posts_drives_turns(world: World) -> None:
    if not world.is_foreign:
        pytest.skip("this store has posts")
    session = world.new_session()
    with pytest.raises(NotSupportedOnBackend):
        session.post(HELLO)
    with world.turn(session) as turn:
        with turn.step() as step:
            step.end_turn()
        assert not turn.is_active
        assert step.received == []
    assert last_run(world).completion_reason == "end_turn"
    with world.turn(session) as turn, turn.step() as step:
        step.finish("done")
    assert session.load().output == "done"


def last_run(world: World) -> Any:
    return world.store.list_runs("session")[0]


def test_a_handle_posts_and_lists(session: SessionHandle) -> None:
    post = session.post(HELLO, key="k", author="ada")
    assert session.posts().items == [post]
    assert session.post(HELLO, key="k", author="ada") == post


def test_entering_receives_what_is_due(world: World, session: SessionHandle) -> None:
    session.post(HELLO)
    session.post(ANSWER, not_before=moments.now() + timedelta(hours=1))
    with world.turn(session) as turn:
        assert turn.messages() == [HELLO]
        assert turn.state.message_count == 1


def test_a_commit_receives_after_the_messages_of_its_step(world: World, session: SessionHandle) -> None:
    with world.turn(session) as turn:
        with turn.step() as step:
            session.post(HELLO)
            assert step.received == []
            step.say(ANSWER)
        assert step.commit is not None
        assert step.received == step.commit.received == [HELLO]
        assert turn.messages() == [ANSWER, HELLO]
        loaded = session.load()
        assert step.state.message_count == loaded.message_count == 2
        assert step.state.version == loaded.version
        (checkpoint,) = session.checkpoints().items
        assert checkpoint.message_count == 2
        with turn.step() as following:
            following.say(ANSWER)
        assert following.received == []


def test_nothing_is_received_while_tool_calls_are_open(world: World, session: SessionHandle) -> None:
    with world.turn(session) as turn:
        received = []
        for said in ([CALLS], [result("a")], [result("b")]):
            with turn.step() as step:
                session.post(HELLO)
                step.say(*said)
            received.append(len(step.received))
        assert received == [0, 0, 3]
        assert turn.messages() == [CALLS, result("a"), result("b"), HELLO, HELLO, HELLO]


def test_entering_receives_nothing_while_tool_calls_are_open(world: World, session: SessionHandle) -> None:
    session.say(CALLS, result("a"))
    session.post(HELLO)
    with world.turn(session) as turn:
        assert turn.messages() == [CALLS, result("a")]
        with turn.step() as step:
            step.say(result("b"))
        assert step.received == [HELLO]


def test_a_commit_that_asks_receives_nothing(world: World, session: SessionHandle) -> None:
    with world.turn(session) as turn, turn.step() as step:
        session.post(HELLO)
        step.wait_for({"ask": {"tool_name": "ask"}})
    assert step.received == []
    with world.turn(session) as turn:
        assert not turn.is_active
    assert session.messages() == []
    session.store.submit_tool_result("session", "ask", result="yes")
    with world.turn(session) as turn:
        assert turn.messages() == [HELLO]
        assert turn.results["ask"]["result"] == "yes"


def test_a_finish_with_a_due_post_goes_on(world: World, session: SessionHandle) -> None:
    with world.turn(session) as turn:
        with turn.step() as step:
            session.post(HELLO)
            step.state.custom_state["seen"] = 1
            step.say(ANSWER)
            step.finish("output")
        assert step.received == [HELLO]
        assert turn.is_active
        for state in (step.state, turn.state, session.load()):
            assert (state.status, state.output) == (SessionStatus.ACTIVE, None)
            assert state.custom_state == {"seen": 1}
        with turn.step() as last:
            last.state.custom_state["seen"] = 2
            last.finish("output")
        assert (session.load().output, session.load().custom_state) == ("output", {"seen": 2})
    assert last_run(world).status is RunStatus.COMPLETED
    with pytest.raises(SessionEnded):
        session.post(HELLO)


def test_a_finish_with_open_calls_and_a_due_post_stays_active(world: World, session: SessionHandle) -> None:
    with world.turn(session) as turn:
        with turn.step() as step:
            session.post(HELLO)
            step.say(CALLS)
            step.finish()
        assert step.received == []
        assert turn.is_active


def test_a_post_that_is_not_due_stops_nothing(world: World, session: SessionHandle) -> None:
    session.post(HELLO, not_before=moments.now() + timedelta(hours=1))
    with world.turn(session) as turn:
        with turn.step() as step:
            step.finish()
        assert not turn.is_active
    assert len(session.posts().items) == 1


def test_a_failure_receives_nothing(world: World, session: SessionHandle) -> None:
    with world.turn(session) as turn:
        with turn.step() as step:
            session.post(HELLO)
            step.fail("enough")
        assert not turn.is_active
    assert session.load().status is SessionStatus.FAILED
    assert len(session.posts().items) == 1


def test_a_step_that_raises_receives_nothing(world: World, session: SessionHandle) -> None:
    with pytest.raises(ValueError, match="boom"), world.turn(session) as turn, turn.step() as step:
        session.post(HELLO)
        raise ValueError("boom")
    assert step.received == []
    assert len(session.posts().items) == 1


def test_a_step_outside_a_turn_receives_nothing(session: SessionHandle) -> None:
    session.post(HELLO)
    with session.step() as step:
        step.finish("done")
    assert session.load().status is SessionStatus.COMPLETED
    assert step.received == []


def test_a_turn_can_receive_by_hand(world: World, session: SessionHandle) -> None:
    session.post(HELLO)
    with world.turn(session, receive=False) as turn:
        with turn.step() as step:
            step.say(ANSWER)
            with pytest.raises(ConflictError):
                turn.receive()
        assert step.received == []
        assert turn.receive() == [HELLO]
        assert turn.receive() == []
        assert turn.state.message_count == 2
        with turn.step() as step:
            session.post(HELLO)
            step.finish()
        assert not turn.is_active
        with pytest.raises(ConflictError):
            turn.receive()
    assert session.load().status is SessionStatus.COMPLETED


@for_each("stop", ["interrupt", "effect"])
def test_a_turn_that_was_stopped_neither_receives_nor_begins_a_step(
    world: World, session: SessionHandle, stop: str
) -> None:
    turn = world.turn(session, receive=False)
    with pytest.raises(ConflictError):
        turn.receive()
    with turn:
        late = turn.step()
        if stop == "interrupt":
            world.store.request_interrupt("session", kind="abort")
            with pytest.raises(TurnInterrupted):
                turn.step().__enter__()
            world.store.clear_interrupt("session")
        else:
            with suppress(ZeroDivisionError), session.effect("pay"):
                raise ZeroDivisionError
            with pytest.raises(TurnInterrupted):
                turn.effect("pay").__enter__()
        session.post(HELLO)
        with pytest.raises(ConflictError):
            turn.receive()
        with pytest.raises(TurnInterrupted) as again:
            late.__enter__()
        assert again.value is turn.stopped_by
    with pytest.raises(ConflictError):
        turn.receive()
    assert [post.message for post in session.posts().items] == [HELLO]
    assert session.load().step_count == 0


def test_the_end_of_a_turn_leaves_the_session_active(world: World, session: SessionHandle) -> None:
    with world.turn(session) as turn:
        with turn.step() as step:
            step.say(ANSWER)
            step.end_turn()
            with pytest.raises(ConflictError):
                step.finish()
        assert not turn.is_active
        with pytest.raises(ConflictError):
            turn.step()
    run = last_run(world)
    assert (run.status, run.completion_reason, run.step_count) == (RunStatus.COMPLETED, "end_turn", 1)
    assert session.load().status is SessionStatus.ACTIVE


def test_a_turn_goes_on_with_a_post_that_came_before_its_end(world: World, session: SessionHandle) -> None:
    session.post(HELLO)
    answers = 0
    with world.turn(session) as turn:
        while turn.is_active:
            with turn.step() as step:
                answers += 1
                if answers < 3:
                    session.post(HELLO)
                step.say(ANSWER)
                step.end_turn()
    assert answers == 3
    assert session.messages() == [HELLO, ANSWER] * 3
    assert session.posts().items == []


def test_a_repeated_step_returns_what_it_received(world: World, session: SessionHandle) -> None:
    with world.turn(session) as turn:
        with turn.step("s", operation_id="o") as step:
            session.post(HELLO)
            step.say(ANSWER)
            step.finish("done")
        first = step.commit
        with turn.step("s", operation_id="o") as step:
            session.post(HELLO)
            step.say(ANSWER)
            step.finish("done")
        assert step.commit == first
        assert step.received == [HELLO]
        assert turn.is_active
    assert session.messages() == [ANSWER, HELLO]


def test_a_rolled_back_step_gives_its_posts_back(world: World, session: SessionHandle) -> None:
    session.post(HELLO)
    with world.turn(session) as turn:
        assert turn.messages() == [HELLO]
        session.post(HELLO)
        with suppress(ZeroDivisionError), world.transaction():
            with turn.step() as step:
                step.say(ANSWER)
                step.end_turn()
            assert step.received == [HELLO]
            raise ZeroDivisionError
        assert turn.is_active
        assert len(session.posts().items) == 1
