"""A turn is one worker driving a session: its lock, its run, its answers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from helix_store.core.types import RunStatus, SessionStatus
from helix_store.exceptions import (
    ConflictError,
    FencedOutError,
    InvalidPayload,
    LockLostError,
    SessionBusy,
    SessionNotFound,
    StoreBusy,
    TurnInterrupted,
)
from helix_store.locks import Lock
from helix_store.stores import InMemoryStateStore, NoOpLockManager
from tests.cells import for_each
from tests.handles.worlds import World

ASK: dict[str, Any] = {"tool_name": "ask"}
APPROVE = {"tool_name": "book", "deadline": timedelta(days=7), "on_expiry": "reject"}
HELLO = {"role": "user", "content": "hello"}


class Interruption(Exception):
    """An error of the caller's own."""


def last_run(world: World, session_id: str = "session") -> Any:
    return world.store.list_runs(session_id)[0]


def waiting(world: World, **calls: Any) -> None:
    with world.turn(world.new_session()) as turn, turn.step() as step:
        step.wait_for(calls or {"call": ASK})


# A whole turn


def test_a_change_of_the_turns_state_in_a_step_is_stored_with_the_step(world: World) -> None:
    with world.turn(world.new_session()) as turn:
        with turn.step() as step:
            assert turn.state is step.state
            turn.state.custom_state["order"] = "A-17"
        assert turn.state.custom_state == {"order": "A-17"}
        with turn.step():
            assert turn.state.custom_state == {"order": "A-17"}
            turn.state.custom_state["items"] = [1]
    assert turn.session.load().custom_state == {"order": "A-17", "items": [1]}


def test_a_step_that_fails_leaves_the_turns_state_as_it_was(world: World) -> None:
    with world.turn(world.new_session()) as turn:
        with pytest.raises(Interruption), turn.step():
            turn.state.custom_state["order"] = "A-17"
            raise Interruption
        assert turn.state.custom_state == {}
        with turn.step():
            pass
    assert turn.session.load().custom_state == {}


def test_a_turn_drives_a_session_to_its_end(world: World) -> None:
    session = world.new_session()
    session.say(HELLO)
    with world.turn(session) as turn:
        assert turn.run is not None
        assert world.locks.is_locked("session")
        while turn.is_active:
            count = len(turn.messages())
            with turn.step() as step:
                assert step.run_id == turn.run.run_id
                step.say({"role": "assistant", "content": f"answer {count}"})
                if count == 3:
                    step.finish("done")
        assert turn.state.status is SessionStatus.COMPLETED
    run = last_run(world)
    assert (run.status, run.turn, run.step_count) == ("completed", 1, 3)
    assert run.ended_at is not None
    assert [head.run_id for head in session.checkpoints().items] == [run.run_id] * 3
    assert [message["content"] for message in session.messages(last=3)] == [
        "answer 1",
        "answer 2",
        "answer 3",
    ]
    assert world.locks.get_active_locks() == []


def test_a_turn_that_is_left_early_can_be_followed_by_another(world: World) -> None:
    session = world.new_session()
    for number in (1, 2):
        with world.turn(session) as turn, turn.step() as step:
            step.say(HELLO)
        run = last_run(world)
        assert (run.turn, run.status, run.step_count) == (number, RunStatus.COMPLETED, number)
    assert world.loaded().status is SessionStatus.ACTIVE


def test_the_fence_of_the_turn_is_on_every_write(world: World) -> None:
    session = world.new_session()
    with pytest.raises(FencedOutError), world.turn(session) as turn:
        with turn.step() as step:
            step.say(HELLO)
        before = world.contents()
        world.locks.force_release("session")
        with turn.step() as step:
            step.say(HELLO)
    assert world.contents() == before, "the turn that lost its lock has written"


# The lock


def test_a_session_that_another_worker_drives_is_busy(world: World) -> None:
    session = world.new_session()
    with world.turn(session, owner="first"):
        before = world.contents()
        with pytest.raises(SessionBusy) as caught, world.turn(world.session(), owner="second"):
            pytest.fail("entered")
        assert isinstance(caught.value, StoreBusy)
        assert (caught.value.session_id, caught.value.retryable) == ("session", True)
        assert world.contents() == before
        assert [lock.owner for lock in world.locks.get_active_locks()] == ["first"]
    with world.turn(session, owner="second") as turn:
        assert turn.is_active


def test_owner_and_term_are_those_that_were_given(world: World) -> None:
    session = world.new_session()
    for ttl in (timedelta(hours=1), 3_600_000):
        with world.turn(session, owner="me", ttl=ttl) as turn:
            (held,) = world.locks.get_active_locks()
            assert (held.owner, held.fencing_token) == ("me", turn.fencing_token)
            assert isinstance(turn._lock, Lock)
            assert turn._lock.ttl_ms == 3_600_000
    with world.turn(session) as turn:
        (held,) = world.locks.get_active_locks()
        assert len(held.owner.split(":")) == 3
        assert isinstance(turn._lock, Lock)
        assert turn._lock.ttl_ms == world.locks.default_ttl_ms


@for_each("bad", [{"ttl": 0}, {"ttl": timedelta(-1)}, {"ttl": "1"}, {"owner": ""}], ids=repr)
def test_a_lock_that_makes_no_sense_is_refused(world: World, bad: dict[str, Any]) -> None:
    session = world.new_session()
    before = world.contents()
    with pytest.raises(InvalidPayload), world.turn(session, **bad):
        pytest.fail("entered")
    assert world.contents() == before
    assert world.locks.get_active_locks() == []


def test_the_lock_is_kept_alive_until_the_turn_ends(world: World) -> None:
    with world.turn(world.new_session()) as turn:
        assert isinstance(turn._lock, Lock)
        assert turn._lock._keep_alive is not None
        lock, kept = turn._lock, turn._lock._keep_alive
        assert kept.is_running()
    assert not kept.is_running()
    assert not lock.is_trusted()


def test_the_lock_is_released_when_the_turn_cannot_begin(world: World) -> None:
    session = world.new_session()
    world.store.start_run("session", "mine", fencing_token=2**62)
    with pytest.raises(ConflictError), world.turn(session):
        pytest.fail("entered")
    assert world.locks.get_active_locks() == []
    assert last_run(world).run_id == "mine"


def test_a_turn_whose_lock_is_lost_stores_nothing_more(world: World) -> None:
    session = world.new_session()
    with pytest.raises(LockLostError), world.turn(session) as turn:
        with turn.step() as step:
            step.say(HELLO)
        assert turn._lock is not None
        # As after a pause: the term is over, and nobody else has the session.
        turn._lock.release()
        before = world.contents()
        with turn.step() as step:
            pytest.fail("entered")
    assert world.contents() == before


def test_a_step_whose_lock_is_lost_in_the_block_stores_nothing(world: World) -> None:
    session = world.new_session()
    with pytest.raises(LockLostError), world.turn(session) as turn, turn.step() as step:
        step.say(HELLO)
        assert turn._lock is not None
        turn._lock.release()
        with pytest.raises(LockLostError):
            step.stage("call", merge_changes={"n": 1})
    assert session.messages() == []
    assert world.store.get_staged_changes("session", "step-1") == []


def test_any_lock_manager_will_do(world: World) -> None:
    session = world.new_session()
    for number in (1, 2):
        with world.turn(session, locks=NoOpLockManager()) as turn, turn.step() as step:
            step.say(HELLO)
        assert last_run(world).turn == number


def test_a_third_partys_store_has_to_be_given_its_managers(world: World) -> None:
    session = world.new_session()
    if not world.is_foreign:
        with session.turn() as turn:
            turn.tokens(model="m", prompt=1)
        assert world.usage.exists("session")
        return
    with pytest.raises(InvalidPayload, match="give the call a lock manager"):
        session.turn()
    with pytest.raises(InvalidPayload, match="give the call a usage store"):
        session.usage()
    with session.turn(locks=world.locks) as turn:
        with pytest.raises(InvalidPayload, match="give the call a usage store"):
            turn.tokens(model="m", prompt=1)
        with turn.step() as step:
            step.say(HELLO)
    assert last_run(world).status is RunStatus.COMPLETED


# Waiting and answers


def test_a_step_that_waits_ends_the_turn(world: World) -> None:
    session = world.new_session()
    with world.turn(session) as turn:
        with turn.step() as step:
            step.wait_for({"call": APPROVE})
        assert not turn.is_active
        with pytest.raises(ConflictError, match="not active"):
            turn.step()
    run = last_run(world)
    assert (run.status, run.step_count) == (RunStatus.SUSPENDED_CLIENT_TOOL, 1)
    assert world.loaded().pending_client_tool_calls["call"]["run_id"] == run.run_id


def test_a_session_that_still_waits_starts_no_run(world: World) -> None:
    waiting(world, first=ASK, second=ASK)
    world.store.submit_tool_result("session", "first", result=1)
    before = world.contents()
    with world.turn(world.session()) as turn:
        assert not turn.is_active
        assert (turn.run, turn.results) == (None, {})
        assert turn.state == world.loaded()
        with pytest.raises(ConflictError):
            turn.tokens(model="m", prompt=1)
    assert world.contents() == before
    assert world.locks.get_active_locks() == []


@for_each("status", ["completed", "failed"])
def test_a_session_that_has_ended_starts_no_run(world: World, status: str) -> None:
    world.new_session()
    world.store.update_status("session", status)
    before = world.contents()
    with world.turn(world.session()) as turn:
        assert not turn.is_active
    assert world.contents() == before


def test_a_session_that_waits_for_sub_agents_alone_is_resumed(world: World) -> None:
    session = world.new_session()
    world.store.suspend(
        "session", kind="suspended_awaiting_children", context={}, awaiting_children=["sub-agent"]
    )
    with world.turn(session) as turn:
        assert turn.is_active
        assert turn.state.suspended_awaiting_children == ["sub-agent"]
    assert world.loaded().suspended_awaiting_children is None


def test_an_answered_session_is_resumed_and_its_answers_are_offered(world: World) -> None:
    waiting(world, call=APPROVE, other=ASK)
    world.store.submit_tool_result("session", "call", approved=True, approval_id="call", reason="fine")
    world.store.submit_tool_result("session", "other", result={"n": 1})
    with world.turn(world.session()) as turn:
        assert turn.is_active
        state = world.loaded()
        assert (state.status, state.resume_count, state.suspension_kind) == (SessionStatus.ACTIVE, 1, None)
        assert list(turn.results) == ["call", "other"]
        assert turn.results["call"]["approved"] is True
        assert turn.results["call"]["reason"] == "fine"
        assert turn.results["other"]["result"] == {"n": 1}
        offered = turn.results
        with turn.step() as step:
            step.finish()
    state = world.loaded()
    assert state.pending_client_tool_calls == {}
    assert state.completed_client_tool_calls == offered
    assert world.store.take_tool_results("session") == {}


@for_each("status", ["active", "completed"])
def test_a_session_that_another_worker_took_up_before_the_lock_is_read_again(
    world: World, status: str
) -> None:
    class LateLocks(NoOpLockManager):
        def acquire(self, *args: Any, **options: Any) -> Lock | None:
            world.store.resume("session")
            world.store.update_status("session", status)
            return super().acquire(*args, **options)

    waiting(world)
    world.store.submit_tool_result("session", "call", result=7)
    with world.turn(world.session(), locks=LateLocks()) as turn:
        assert turn.is_active == (status == "active")


def test_answers_are_offered_again_until_a_step_commits(world: World) -> None:
    waiting(world)
    world.store.submit_tool_result("session", "call", result=7)
    for _ in range(2):
        with pytest.raises(Interruption), world.turn(world.session()) as turn:
            assert turn.results["call"]["result"] == 7
            with turn.step():
                raise Interruption
    with world.turn(world.session()) as turn:
        assert turn.results["call"]["result"] == 7
        with turn.step() as step:
            step.say(HELLO)
        with turn.step() as step:
            step.say(HELLO)
    with world.turn(world.session()) as turn:
        assert turn.results == {}
    assert world.loaded().resume_count == 1


def test_an_answer_during_the_turn_is_offered_by_the_next_one(world: World) -> None:
    session = world.new_session()
    world.store.add_pending_tool_calls("session", {"call": ASK})
    with world.turn(session) as turn:
        world.store.submit_tool_result("session", "call", result=7)
        with turn.step() as step:
            step.say(HELLO)
        assert turn.results == {}
    with world.turn(session) as turn:
        assert turn.results["call"]["result"] == 7


def test_a_call_whose_answer_is_offered_is_not_asked_again(world: World) -> None:
    waiting(world)
    world.store.submit_tool_result("session", "call", result=7)
    with world.turn(world.session()) as turn:
        with pytest.raises(ConflictError, match="answered before"), turn.step() as step:
            step.wait_for({"call": ASK})
        with turn.step() as step:
            step.wait_for({"another": ASK})
    state = world.loaded()
    assert (list(state.pending_client_tool_calls), list(state.completed_client_tool_calls)) == (
        ["another"],
        ["call"],
    )


def test_what_others_write_between_two_steps_does_not_make_the_turn_stale(world: World) -> None:
    session = world.new_session()
    with world.turn(session) as turn:
        with turn.step() as step:
            step.say(HELLO)
        world.store.append_messages("session", [{"role": "user", "content": "and hurry"}])
        with turn.step() as step:
            step.say(HELLO)
    assert [message["content"] for message in session.messages()] == ["hello", "and hurry", "hello"]


# Workers that died


def test_the_run_of_a_dead_worker_is_superseded(world: World) -> None:
    session = world.new_session()
    dead = world.locks.acquire("session")
    assert dead is not None
    world.store.start_run("session", "dead", fencing_token=dead.fencing_token)
    dead.release()
    with world.turn(session) as turn, turn.step() as step:
        step.say(HELLO)
    new, old = world.store.list_runs("session")
    assert (old.run_id, old.status, old.completion_reason) == ("dead", "interrupted", "superseded")
    assert new.status is RunStatus.COMPLETED


def test_a_superseded_run_is_not_updated_by_its_old_turn(world: World) -> None:
    session = world.new_session()
    with world.turn(session):
        world.store.start_run("session", "rival", supersede=True)
    rival, old = world.store.list_runs("session")
    assert (rival.run_id, rival.status) == ("rival", RunStatus.RUNNING)
    assert (old.status, old.completion_reason) == (RunStatus.INTERRUPTED, "superseded")


@for_each(
    ("ending", "status"),
    [("finish", "completed"), ("fail", "failed"), ("wait_for", "suspended_client_tool")],
)
def test_a_run_that_a_dead_worker_left_open_is_ended_by_what_is_stored(
    world: World, ending: str, status: str
) -> None:
    session = world.new_session()
    with session.step() as step:
        getattr(step, ending)(*([{"call": ASK}] if ending == "wait_for" else []))
    state = world.loaded()
    world.store.start_run("session", "dead")
    world.store.save_state("session", state)
    with world.turn(session) as turn:
        assert not turn.is_active
    assert (last_run(world).run_id, last_run(world).status) == ("dead", status)


def test_a_question_that_the_root_does_not_know_yet_is_recorded_by_the_next_turn(world: World) -> None:
    """A third party's store has no common transaction: a worker may die between the step and the record."""
    world.new_session("root")
    child = world.new_session("child", parent_session_id="root")
    state = child.load()
    with child.step() as step:
        step.wait_for({"call": ASK})
    root = world.loaded("root")
    root.client_tool_call_ownership = {}
    world.store.save_state("root", root)
    assert state.version == 1
    with world.turn(child) as turn:
        assert not turn.is_active
    if world.is_foreign:
        assert world.store.submit_tool_result("root", "call", result=1).session_id == "child"


# Interrupts


@for_each("kind", ["interrupt", "abort"])
def test_an_interrupt_ends_the_turn_quietly(world: World, kind: str) -> None:
    session = world.new_session()
    reached = []
    with world.turn(session) as turn:
        with turn.step() as step:
            step.say(HELLO)
        world.store.request_interrupt("session", kind=kind, reason="lunch")
        reached.append("before")
        with turn.step() as step:
            step.say(HELLO)
        reached.append("after")
    assert reached == ["before"]
    assert not turn.is_active
    run = last_run(world)
    assert (run.status, run.completion_reason, run.step_count) == (RunStatus.INTERRUPTED, "lunch", 1)
    assert session.messages() == [HELLO]
    assert world.store.check_interrupt("session") is None
    with world.turn(session) as turn:
        assert turn.is_active


def test_an_interrupt_can_be_caught_and_is_raised_again(world: World) -> None:
    session = world.new_session()
    with world.turn(session) as turn:
        world.store.request_interrupt("session")
        with pytest.raises(TurnInterrupted) as caught, turn.step():
            pytest.fail("entered")
        assert (caught.value.kind, caught.value.reason) == ("interrupt", None)
        assert not turn.is_active
        with pytest.raises(TurnInterrupted):
            turn.step()
    run = last_run(world)
    assert (run.status, run.completion_reason) == (RunStatus.INTERRUPTED, "interrupt")


def test_a_request_from_before_the_turn_does_not_stop_it(world: World) -> None:
    session = world.new_session()
    world.store.request_interrupt("session")
    with world.turn(session) as turn, turn.step() as step:
        step.say(HELLO)
    assert last_run(world).status is RunStatus.COMPLETED


# Failures


def test_an_exception_fails_the_run_and_propagates(world: World) -> None:
    session = world.new_session()
    interruption = Interruption("payload text")
    with pytest.raises(Interruption) as caught, world.turn(session) as turn:
        with turn.step() as step:
            step.say(HELLO)
        with turn.step() as step:
            step.say(HELLO)
            raise interruption
    assert caught.value is interruption
    run = last_run(world)
    assert (run.status, run.completion_reason) == (RunStatus.FAILED, "Interruption")
    assert (run.error["type"], run.error["message"]) == ("Interruption", "payload text")
    assert "raise interruption" in run.error["traceback"]
    assert (world.loaded().status, session.messages()) == (SessionStatus.ACTIVE, [HELLO])
    assert world.locks.get_active_locks() == []


def test_a_failed_step_fails_the_run_with_its_reason(world: World) -> None:
    session = world.new_session()
    with world.turn(session) as turn, turn.step() as step:
        step.fail("no seats" + "!" * 20_000)
    run = last_run(world)
    assert run.status is RunStatus.FAILED
    assert run.completion_reason.startswith("no seats!!!")
    assert world.loaded().status is SessionStatus.FAILED


def test_a_session_that_is_deleted_meanwhile_ends_the_turn(world: World) -> None:
    session = world.new_session()
    with pytest.raises(SessionNotFound), world.turn(session) as turn:
        session.delete()
        with turn.step():
            pytest.fail("entered")
    assert world.locks.get_active_locks() == []


# Misuse


def test_a_turn_is_used_once(world: World) -> None:
    session = world.new_session()
    turn = world.turn(session)
    with pytest.raises(ConflictError, match="not begun"):
        assert turn.state
    with turn:
        pass
    before = world.contents()
    with pytest.raises(ConflictError, match="used once"), turn:
        pytest.fail("entered again")
    for call in (turn.step, lambda: turn.tokens(model="m"), lambda: turn.tool("t", True, 1)):
        with pytest.raises(ConflictError):
            call()
    assert world.contents() == before


def test_a_step_of_the_handle_is_not_nested_in_one_of_the_turn(world: World) -> None:
    session = world.new_session()
    with world.turn(session) as turn, turn.step() as step:
        with pytest.raises(ConflictError, match="leave it"), session.step():
            pytest.fail("entered")
        with pytest.raises(ConflictError, match="leave it"), turn.step():
            pytest.fail("entered")
        step.say(HELLO)
    assert session.messages() == [HELLO]


def test_turns_of_the_store_in_memory_share_its_world() -> None:
    store = InMemoryStateStore()
    session = store.new_session("session", agent_type="agent")
    with session.turn(), pytest.raises(SessionBusy), store.session("session").turn():
        pytest.fail("entered")
