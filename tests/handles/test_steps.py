"""A step commits all of what happened in its block, or nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connections

from helix_store.core.limits import MAX_BIGINT
from helix_store.core.types import RunStatus, SessionStatus
from helix_store.exceptions import (
    ConflictError,
    HelixStoreError,
    IdempotencyConflict,
    InvalidPayload,
    LimitExceeded,
    PatchError,
    StaleStateError,
)
from tests.cells import for_each
from tests.handles.worlds import World

ASK: dict[str, Any] = {"tool_name": "ask"}
HELLO = {"role": "user", "content": "hello"}


class Interruption(Exception):
    """An error of the caller's own."""


# What a commit has


def test_there_is_no_step_after_the_largest_number(world: World) -> None:
    session = world.new_session()
    session.update(lambda state: setattr(state, "step_count", MAX_BIGINT))
    with pytest.raises(LimitExceeded, match="step_count"), session.step():
        raise AssertionError
    assert session.load().message_count == 0


def test_a_step_also_promotes_what_somebody_else_staged_for_it(world: World) -> None:
    session = world.new_session(custom_state={"pages": [1]})
    with session.step() as step:
        step.stage("call-1", merge_changes={"pages": [2]})
        world.store.stage_changes(
            "session", step.id, {"tool_call_id": "call-2", "merge_changes": {"pages": [3]}}
        )
        step.stage("call-1", merge_changes={"pages": [4]})
    assert step.state.custom_state == world.loaded().custom_state == {"pages": [1, 4, 3]}
    assert world.store.get_staged_changes("session", "step-1") == []


def test_leaving_commits_state_messages_and_staged_changes_as_one_version(world: World) -> None:
    session = world.new_session(custom_state={"pages": [1]})
    with session.step() as step:
        step.say(HELLO)
        step.say({"role": "assistant", "content": "hi"}, HELLO)
        step.stage("call-1", merge_changes={"pages": [2]})
        step.stage("call-2", patches=[{"op": "add", "path": "/order", "value": "A-17"}])
        step.state.custom_state["asked"] = True
        assert world.loaded().custom_state == {"pages": [1]}
    stored = world.loaded()
    assert stored.custom_state == {"pages": [1, 2], "order": "A-17", "asked": True}
    assert (stored.version, stored.step_count, stored.message_count) == (2, 1, 3)
    assert world.store.get_staged_changes("session", "step-1") == []
    (head,) = session.checkpoints().items
    assert step.commit is not None
    assert (head.checkpoint_id, head.step_id, head.step_count) == (step.commit.checkpoint_id, "step-1", 1)


def test_the_state_after_the_step_is_the_one_that_is_stored(world: World) -> None:
    session = world.new_session()
    for number in (1, 2, 3):
        with session.step() as step:
            step.say(HELLO)
            step.stage("call", merge_changes={"numbers": [number]})
        stored = world.loaded()
        step.state.updated_at = stored.updated_at
        assert step.state == stored
    saved = world.store.save_state("session", step.state, expected_version=step.state.version)
    assert saved == step.state.version + 1


def test_steps_are_numbered_and_named_after_their_numbers(world: World) -> None:
    session = world.new_session()
    with session.step() as first:
        assert (first.id, first.number) == ("step-1", 1)
    with session.step("mine", operation_id="op") as second:
        assert (second.id, second.number) == ("mine", 2)
    assert [head.step_id for head in session.checkpoints().items] == ["mine", "step-1"]
    assert world.loaded().step_count == 2
    with session.step("mine", operation_id="op") as again:
        pass
    assert again.commit == second.commit
    assert world.loaded().step_count == 2
    with pytest.raises(IdempotencyConflict), session.step("mine", operation_id="op") as other:
        other.say(HELLO)


def test_changes_staged_past_the_handle_are_promoted_too(world: World) -> None:
    session = world.new_session()
    with session.step() as step:
        world.store.stage_changes("session", step.id, {"tool_call_id": "call", "merge_changes": {"n": 1}})
    assert world.loaded().custom_state == step.state.custom_state == {"n": 1}


def test_any_thread_may_stage(world: World) -> None:
    session = world.new_session()
    with session.step() as step:

        def work(number: int) -> None:
            try:
                step.stage(f"call-{number}", merge_changes={f"key-{number}": number})
            finally:
                connections.close_all()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert world.loaded().custom_state == {f"key-{number}": number for number in range(6)}


def test_what_a_dead_attempt_staged_is_dropped(world: World) -> None:
    session = world.new_session()
    world.store.stage_changes("session", "step-1", {"tool_call_id": "dead", "merge_changes": {"dead": True}})
    with session.step() as step:
        step.stage("call", merge_changes={"alive": True})
    assert world.loaded().custom_state == {"alive": True}


# How a step ends


def test_a_step_finishes_the_session(world: World) -> None:
    session = world.new_session()
    with session.step() as step:
        step.finish({"answer": 42})
    state = world.loaded()
    assert (state.status, state.output) == (SessionStatus.COMPLETED, {"answer": 42})


def test_a_step_fails_the_session_and_its_work_is_stored(world: World) -> None:
    session = world.new_session()
    with session.step() as step:
        step.say(HELLO)
        step.fail("no seats")
    state = world.loaded()
    assert (state.status, state.failure_reason, state.message_count) == (SessionStatus.FAILED, "no seats", 1)


def test_a_step_ends_in_one_way(world: World) -> None:
    session = world.new_session()
    before = world.contents()
    with pytest.raises(ConflictError), session.step() as step:
        step.finish()
        step.wait_for({"call": ASK})
    with pytest.raises(ConflictError), session.step() as step:
        step.wait_for({"call": ASK})
        step.fail("no")
    with pytest.raises(ConflictError), session.step() as step:
        step.fail("no")
        step.finish()
    assert world.contents() == before


# Waiting


def test_a_question_is_stored_with_its_step_as_one_version(world: World) -> None:
    session = world.new_session()
    world.store.start_run("session", "run")
    with session.step(run_id="run") as step:
        step.say(HELLO)
        step.wait_for({"call-1": {"tool_name": "book", "input": {"to": "Łódź"}}})
        step.wait_for({"call-2": {**ASK, "deadline": timedelta(days=7), "on_expiry": "reject"}})
    state = world.loaded()
    assert (state.version, state.status) == (2, SessionStatus.PAUSED)
    assert (state.suspension_kind, state.suspended_step_id) == (RunStatus.SUSPENDED_CLIENT_TOOL, "step-1")
    assert state.client_tool_call_ownership == {"call-1": "session", "call-2": "session"}
    first, second = state.pending_client_tool_calls.values()
    assert (first["tool_name"], first["input"], first["run_id"]) == ("book", {"to": "Łódź"}, "run")
    assert (first["deadline"], first["approval_id"]) == (None, None)
    assert second["approval_id"] == "call-2"
    assert second["deadline"] == second["requested_at"] + 7 * 24 * 3_600_000
    assert step.state.pending_client_tool_calls == state.pending_client_tool_calls
    assert world.store.get_current_run("session") is None
    assert world.store.list_runs("session")[0].status is RunStatus.SUSPENDED_CLIENT_TOOL
    (head,) = session.checkpoints().items
    checkpoint = world.store.get_checkpoint("session", head.checkpoint_id)
    assert checkpoint is not None
    assert list(checkpoint.state.pending_client_tool_calls) == ["call-1", "call-2"]


def test_a_waiting_session_is_answered_and_resumed_like_any_other(world: World) -> None:
    session = world.new_session()
    with session.step() as step:
        step.wait_for({"call": ASK})
    assert world.store.submit_tool_result("session", "call", result=7).outcome == "accepted"
    assert world.store.resume("session").suspended_step_id == "step-1"
    assert world.store.take_tool_results("session")["call"]["result"] == 7


def test_a_deadline_is_a_duration_a_time_or_milliseconds(world: World) -> None:
    session = world.new_session()
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    with session.step() as step:
        step.wait_for({"time": {**ASK, "deadline": noon}, "number": {**ASK, "deadline": 1_900_000_000_000}})
    pending = world.loaded().pending_client_tool_calls
    assert pending["time"]["deadline"] == int(noon.timestamp()) * 1000
    assert pending["number"]["deadline"] == 1_900_000_000_000
    found = world.store.find_expired_pending(now=noon)
    assert [call.tool_call_id for call in found if call.session_id == "session"] == ["time"]


def test_the_root_of_a_tree_records_the_question_of_a_child(world: World) -> None:
    world.new_session("root")
    child = world.new_session("child", parent_session_id="root")
    with child.step() as step:
        step.wait_for({"call": ASK})
    assert (world.loaded("child").version, world.loaded("root").version) == (2, 1)
    assert world.loaded("root").client_tool_call_ownership == {"call": "child"}
    assert world.store.submit_tool_result("root", "call", result=1).session_id == "child"


@pytest.mark.thorough
@for_each(
    "calls",
    [
        "call",
        {"call": "ask"},
        {"call": {}},
        {"": ASK},
        {"call": {**ASK, "on_expiry": "fail"}},
        {"call": {**ASK, "deadline": timedelta(-1_000_000)}},
        {"call": {**ASK, "deadline": datetime(2030, 1, 1)}},  # noqa: DTZ001
        {"call": {**ASK, "deadline": "tomorrow"}},
        {"call": {**ASK, "result": 1}},
    ],
    ids=repr,
)
def test_a_question_that_makes_no_sense_is_refused_where_it_is_asked(world: World, calls: Any) -> None:
    session = world.new_session()
    before = world.contents()
    with pytest.raises(InvalidPayload), session.step() as step:
        try:
            step.wait_for(calls)
        except InvalidPayload:
            assert step.commit is None
            raise
        pytest.fail("the call was accepted")
    assert world.contents() == before


def test_a_call_that_the_session_had_before_is_refused(world: World) -> None:
    session = world.new_session()
    world.store.add_pending_tool_calls("session", {"answered": ASK, "open": ASK})
    world.store.submit_tool_result("session", "answered", result=1)
    world.store.take_tool_results("session")
    before = world.contents()
    for call in ({"answered": ASK}, {"open": {"tool_name": "another"}}):
        with pytest.raises(ConflictError, match="give the call another id"), session.step() as step:
            step.wait_for(call)
    assert world.contents() == before


def test_a_call_of_another_session_of_the_tree_is_refused(world: World) -> None:
    world.new_session("root")
    world.store.add_pending_tool_calls("root", {"call": ASK})
    child = world.new_session("child", parent_session_id="root")
    before = world.contents("child"), world.contents("root")
    with pytest.raises(ConflictError), child.step() as step:
        step.say(HELLO)
        step.wait_for({"call": ASK})
    assert (world.contents("child"), world.contents("root")) == before


# When a step does not commit


def test_an_exception_commits_nothing_and_discards_what_was_staged(world: World) -> None:
    session = world.new_session()
    before = world.contents()
    interruption = Interruption("stop")
    with pytest.raises(Interruption) as caught, session.step() as step:
        step.say(HELLO)
        step.stage("call", merge_changes={"n": 1})
        step.state.title = "half"
        step.wait_for({"call": ASK})
        raise interruption
    assert caught.value is interruption
    assert step.commit is None
    assert world.contents() == before


def test_a_session_that_changed_meanwhile_is_stale_and_the_step_is_not_repeated(world: World) -> None:
    session = world.new_session()
    entered = 0
    with pytest.raises(StaleStateError), session.step() as step:
        entered += 1
        step.stage("call", merge_changes={"n": 1})
        world.store.append_messages("session", [HELLO])
    assert entered == 1
    assert session.messages() == [HELLO]
    assert world.store.get_staged_changes("session", "step-1") == []
    assert world.loaded().custom_state == {}


def test_a_patch_that_cannot_be_applied_commits_nothing(world: World) -> None:
    session = world.new_session()
    before = world.contents()
    with pytest.raises(PatchError), session.step() as step:
        step.say(HELLO)
        step.stage("call", patches=[{"op": "remove", "path": "/nothing"}])
    assert world.contents() == before


def test_a_step_does_not_commit_without_what_its_tools_did(world: World) -> None:
    session, rival = world.new_session(), world.session()
    step = session.step().__enter__()
    step.say(HELLO)
    step.stage("call", merge_changes={"mine": True})
    # The rival begins the same step, drops what is staged there, and stages under the same id.
    with rival.step() as other:
        other.stage("call", merge_changes={"theirs": True})
        with pytest.raises(ConflictError, match="let only one worker drive"):
            step.__exit__(None, None, None)
    assert (step.commit, session.messages()) == (None, [])
    assert world.loaded().custom_state == {"theirs": True}


def test_a_rival_that_has_staged_nothing_is_noticed_too(world: World) -> None:
    session, rival = world.new_session(), world.session()
    step = session.step().__enter__()
    step.stage("call", merge_changes={"mine": True})
    with rival.step():
        with pytest.raises(ConflictError, match="let only one worker drive"):
            step.__exit__(None, None, None)
        assert world.loaded().version == 1


def test_a_stale_step_leaves_alone_what_a_rival_has_staged(world: World) -> None:
    session, rival = world.new_session(), world.session()
    step = session.step().__enter__()
    step.stage("call", merge_changes={"mine": True})
    with pytest.raises(StaleStateError), rival.step() as other:
        other.stage("call", merge_changes={"theirs": True})
        world.store.append_messages("session", [HELLO])
        with pytest.raises(ConflictError, match="let only one worker drive"):
            step.__exit__(None, None, None)
        (staged,) = world.store.get_staged_changes("session", "step-1")
        assert staged.merge_changes == {"theirs": True}


def test_the_next_step_works_after_a_failed_one(world: World) -> None:
    session = world.new_session()
    with pytest.raises(Interruption), session.step():
        raise Interruption
    with session.step() as step:
        step.say(HELLO)
    assert (step.id, session.messages()) == ("step-1", [HELLO])


# Misuse


def test_a_step_is_used_once(world: World) -> None:
    session = world.new_session()
    with session.step() as step:
        step.say(HELLO)
    before = world.contents()
    with pytest.raises(ConflictError, match="used once"), step:
        pytest.fail("entered again")
    calls: list[Callable[[], None]] = [
        lambda: step.say(HELLO),
        lambda: step.stage("call", merge_changes={"n": 1}),
        lambda: step.wait_for({"call": ASK}),
        step.finish,
        lambda: step.fail("late"),
    ]
    for call in calls:
        with pytest.raises(ConflictError, match="inside of its `with` block"):
            call()
    assert world.contents() == before


def test_a_step_that_has_not_begun_has_nothing(world: World) -> None:
    step = world.new_session().step()
    for call in (lambda: step.state, lambda: step.say(HELLO)):
        with pytest.raises(ConflictError):
            call()
    assert (step.id, step.number, step.commit) == ("", 0, None)


def test_steps_of_one_session_are_not_nested(world: World) -> None:
    session = world.new_session()
    with session.step() as step:
        with pytest.raises(ConflictError, match="'step-1'"), session.step():
            pytest.fail("entered inside")
        step.say(HELLO)
    assert session.messages() == [HELLO]


def test_a_message_without_a_role_is_refused_where_it_is_said(world: World) -> None:
    session = world.new_session()
    before = world.contents()
    with pytest.raises(InvalidPayload), session.step() as step:
        step.say({"content": "who?"})
        pytest.fail("the message was accepted")
    with pytest.raises(HelixStoreError), session.step() as step:
        step.stage("call", patches="text")  # type: ignore[arg-type]
        pytest.fail("the patches were accepted")
    assert world.contents() == before
