"""A session whose last turn ended with `end_turn` is at rest until something arrives for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test.utils import CaptureQueriesContext

from helix_store import ConflictError, Store
from helix_store.testing.state_store.approvals import FORGED, approve, ask_approval, forge_answer
from helix_store.testing.state_store.tool_calls import LONG_AGO
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.faults.test_skewed_branches import clock_of
from tests.handles.worlds import World, leave_started

HELLO = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hello"}


@pytest.fixture
def own_world(world: World) -> World:
    if world.is_foreign:
        pytest.skip("a session on a third party's store is never at rest")
    return world


def rested(world: World) -> Any:
    """Return a session whose last turn ended with `end_turn`."""
    session = world.new_session()
    session.say(HELLO)
    with world.turn(session) as turn:
        with turn.step() as step:
            step.say(ANSWER)
        with turn.step() as step:
            step.end_turn()
    return session


def test_a_turn_on_a_session_at_rest_is_not_active(own_world: World) -> None:
    session = rested(own_world)
    before = own_world.contents()
    with session.turn() as turn:
        assert not turn.is_active
        assert (turn.run, turn.recovered, turn.stopped_by, turn.fencing_token) == (None, None, None, None)
        assert turn.state.step_count == 2
        assert [message["content"] for message in turn.messages()] == ["hello", "hello"]
        assert not own_world.locks.is_locked(session.id)
        calls: tuple[Callable[[], object], ...] = (
            turn.step,
            turn.receive,
            lambda: turn.tokens(model="m", prompt=1),
        )
        for call in calls:
            with pytest.raises(ConflictError, match="rest=False"):
                call()
    assert own_world.contents() == before


async def test_a_turn_on_a_session_at_rest_is_not_active_in_an_event_loop(own_world: World) -> None:
    await own_world.store.acreate_session("session", agent_type="agent")
    session = own_world.session()
    async with session.turn() as turn, turn.step() as step:
        await step.aend_turn()
    async with session.turn() as turn:
        assert not turn.is_active
        with pytest.raises(ConflictError, match="rest=False"):
            turn.step()
    async with session.turn(rest=False) as turn, turn.step() as step:
        await step.aend_turn()
    assert (await session.aload()).step_count == 2


def _post_later(world: World, session: Any) -> None:
    session.post(HELLO, not_before=datetime.now(UTC) + timedelta(hours=1))


def _ask_and_answer(world: World, session: Any) -> None:
    world.own.add_pending_tool_calls(session.id, {"call": {"tool_name": "ask"}})
    world.own.submit_tool_result(session.id, "call", result=1)


def _ask(world: World, session: Any) -> None:
    world.own.add_pending_tool_calls(session.id, {"call": {"tool_name": "ask"}})


def _ask_and_approve(world: World, session: Any) -> None:
    ask_approval(world.own, session.id)
    approve(world.own, session.id)


def _ask_and_reject(world: World, session: Any) -> None:
    ask_approval(world.own, session.id)
    approve(world.own, session.id, approved=False)


def _ask_and_forge(world: World, session: Any, answer: Mapping[str, Any] = FORGED) -> None:
    ask_approval(world.own, session.id)
    forge_answer(world.own, session.id, answer=answer)


def _forge_rejection(world: World, session: Any) -> None:
    _ask_and_forge(world, session, {"approved": False, "submitted_at": LONG_AGO})


def _forge_error(world: World, session: Any) -> None:
    _ask_and_forge(world, session, {"error": "no", "submitted_at": LONG_AGO})


def _forge_and_reject(world: World, session: Any) -> None:
    _ask_and_forge(world, session)
    approve(world.own, session.id, approved=False)


def _forge_beside_an_answer(world: World, session: Any) -> None:
    _ask_and_forge(world, session)
    world.own.add_pending_tool_calls(session.id, {"ask": {"tool_name": "ask"}})
    world.own.submit_tool_result(session.id, "ask", result=1)


def _take_a_step(world: World, session: Any) -> None:
    with session.step() as step:
        step.say(ANSWER)


def _take_an_empty_step(_: World, session: Any) -> None:
    with session.step():
        pass


def _interrupt(world: World, session: Any) -> None:
    world.own.request_interrupt(session.id, kind="interrupt")


def _rewind(world: World, session: Any) -> None:
    _, checkpoint = world.own.list_checkpoints(session.id).items
    session.rewind(checkpoint.checkpoint_id)


def _fail(world: World, session: Any) -> None:
    with pytest.raises(ZeroDivisionError), session.turn(rest=False), pytest.raises(ValueError, match="x"):
        raise ZeroDivisionError


def _die(world: World, session: Any) -> None:
    session.turn(rest=False).__enter__()
    world.locks.force_release(session.id)


def _prune(world: World, session: Any) -> None:
    world.own.prune_checkpoints(session.id, keep=0)


def _delete_newest(world: World, session: Any) -> None:
    world.own.delete_checkpoint(session.id, world.own.get_latest_checkpoint(session.id).checkpoint_id)


def _retitle(_: World, session: Any) -> None:
    session.update(lambda state: setattr(state, "title", "hello"))


def _truncate(world: World, session: Any) -> None:
    """Replace the last message, so that there are as many as before."""
    world.own.truncate_messages(session.id, 1)
    session.say(ANSWER)


def _rewind_to_newest(world: World, session: Any) -> None:
    session.rewind(world.own.get_latest_checkpoint(session.id).checkpoint_id)


@pytest.mark.thorough
@for_each(
    ("changes", "is_active"),
    [
        ([_prune], False),
        ([_delete_newest], False),
        ([_delete_newest, _prune], False),
        ([_retitle, _prune], False),
        ([_retitle, _delete_newest, _delete_newest], False),
        ([_prune, _retitle], False),
        ([_rewind_to_newest, _prune], False),
        ([_prune, _truncate], True),
        ([_truncate, _prune], True),
        ([_retitle, _truncate, _prune], True),
        ([_delete_newest, _rewind_to_newest], True),
        ([_rewind, _prune], True),
        ([_rewind, _delete_newest], True),
        ([_take_a_step, _prune], True),
        ([_take_a_step, _delete_newest], True),
        ([_take_an_empty_step, _delete_newest], True),
        ([_take_a_step, _retitle, _delete_newest], True),
        ([_prune, _take_a_step], True),
        ([_prune, lambda world, session: session.say(HELLO)], True),
        ([_prune, lambda world, session: session.post(HELLO)], True),
        ([_prune, _ask_and_answer], True),
        ([_prune, _fail], True),
        ([_prune, _die], True),
    ],
)
def test_deleted_checkpoints_change_nothing_about_rest(
    own_world: World, changes: list[Callable[[World, Any], object]], is_active: bool
) -> None:
    session = rested(own_world)
    for change in changes:
        change(own_world, session)
    with session.turn() as turn:
        assert turn.is_active is is_active


@for_each(
    ("arrives", "is_active"),
    [
        (lambda world, session: session.post(HELLO), True),
        (lambda world, session: session.say(HELLO), True),
        (_ask_and_answer, True),
        (_ask_and_approve, True),
        (_ask_and_reject, True),
        (_ask_and_forge, False),
        (_forge_rejection, False),
        (_forge_error, False),
        (_forge_and_reject, True),
        (_forge_beside_an_answer, True),
        (_take_a_step, True),
        (_rewind, True),
        (_fail, True),
        (_die, True),
        (_post_later, False),
        (_ask, False),
        (_interrupt, False),
        (_truncate, True),
        (_retitle, False),
    ],
)
def test_a_session_is_at_rest_until_something_arrives(
    own_world: World, arrives: Callable[[World, Any], object], is_active: bool
) -> None:
    session = rested(own_world)
    arrives(own_world, session)
    with session.turn() as turn:
        assert turn.is_active is is_active
        if is_active:
            with turn.step() as step:
                step.end_turn()
    with session.turn() as turn:
        assert not turn.is_active


def test_a_new_session_and_its_branches_are_not_at_rest(own_world: World) -> None:
    session = rested(own_world)
    branch = session.branch(new_session_id="branch")
    for handle in (branch, own_world.new_session("other")):
        with handle.turn() as turn:
            assert turn.is_active


def test_rest_may_be_left_out(own_world: World) -> None:
    session = rested(own_world)
    with session.turn(rest=False) as turn, turn.step() as step:
        step.say(ANSWER)
        step.end_turn()
    assert own_world.loaded().step_count == 3


def test_the_turn_names_the_run_of_a_dead_worker(own_world: World) -> None:
    session = own_world.new_session()
    dead = session.turn().__enter__()
    assert dead.recovered is None
    own_world.locks.force_release(session.id)
    with session.turn() as turn:
        assert turn.recovered is not None
        assert dead.run is not None
        assert turn.recovered.run_id == dead.run.run_id
        with turn.step() as step:
            step.finish()
    with session.turn() as turn:
        assert turn.recovered is None


@for_each(("is_forged", "count"), [(False, 1), (True, 2)])
def test_a_turn_at_rest_takes_one_statement_or_two_with_an_answer_of_its_agent(
    committed_db: CommittedDatabase, is_forged: bool, count: int
) -> None:
    store = Store(committed_db.alias, tenant=committed_db.tenant)
    session = store.new_session("session", agent_type="agent")
    with session.turn() as turn, turn.step() as step:
        step.end_turn()
    if is_forged:
        ask_approval(store.sessions, "session")
        forge_answer(store.sessions, "session")
    with CaptureQueriesContext(committed_db.connection) as captured, session.turn() as turn:
        assert not turn.is_active
    statements = [each["sql"] for each in captured if not each["sql"].startswith(("PREPARE", "SET "))]
    assert len(statements) == count


@for_each("seconds", [-60.0, 60.0])
def test_rest_does_not_depend_on_the_clock_of_a_worker(
    committed_db: CommittedDatabase, seconds: float
) -> None:
    store = Store(committed_db.alias, tenant=committed_db.tenant)
    session = store.new_session("session", agent_type="agent")
    with clock_of(seconds), session.turn() as turn:
        with turn.effect("mail") as effect:
            effect.done("sent")
        with suppress(ZeroDivisionError), turn.effect("pay"):
            raise ZeroDivisionError
        with turn.step() as step:
            step.end_turn()
    with session.turn() as turn:
        assert not turn.is_active
    assert store.sessions.settle_effect("session", "pay", done=True)
    with session.turn() as turn:
        assert turn.is_active


def require_one_more_turn(world: World, session: Any) -> None:
    """The session wakes up for one turn, and then it is at rest."""
    with world.turn(session) as turn:
        assert turn.is_active
        with turn.step() as step:
            step.end_turn()
    with world.turn(session) as turn:
        assert not turn.is_active


def test_an_effect_that_is_settled_during_the_last_turn_has_arrived(own_world: World) -> None:
    session = own_world.new_session()
    session.say(HELLO)
    with own_world.turn(session) as turn:
        with suppress(ZeroDivisionError), turn.effect("pay"):
            raise ZeroDivisionError
        with suppress(ZeroDivisionError), turn.effect("refund"):
            raise ZeroDivisionError
        with turn.effect("mail") as effect:
            effect.done()
        with turn.effect("call") as effect:
            effect.not_done("nobody at home")
        with turn.step() as step:
            step.say(ANSWER)
            assert own_world.own.settle_effect("session", "pay", done=True)
            step.end_turn()
    with own_world.turn(session) as turn:
        assert turn.is_active
        assert own_world.own.settle_effect("session", "refund", done=False)
        with turn.step() as step:
            step.end_turn()
    # It was left unknown by an earlier run.
    require_one_more_turn(own_world, session)


def killed(world: World) -> None:
    leave_started(world)


def undecided(world: World) -> None:
    with suppress(ConflictError), world.turn(world.session()) as turn, turn.effect("pay"):
        pass


def undecided_outside_of_a_turn(world: World) -> None:
    with suppress(ConflictError), world.session().effect("pay"):
        pass


@for_each("leave", [killed, undecided, undecided_outside_of_a_turn])
def test_an_effect_that_was_left_without_an_exception_arrives_too(
    own_world: World, leave: Callable[[World], None]
) -> None:
    session = own_world.new_session()
    leave(own_world)
    with own_world.turn(session) as turn, turn.step() as step:
        assert own_world.own.settle_effect("session", "pay", done=True)
        step.end_turn()
    assert own_world.own.list_effects("session")[0].error is None
    require_one_more_turn(own_world, session)


def test_an_effect_that_the_last_turn_has_reconciled_itself_does_not_arrive(own_world: World) -> None:
    session = own_world.new_session()
    leave_started(own_world)
    with own_world.turn(session) as turn:
        with turn.effect("pay", reconcile=lambda effect: effect.done()):
            pass
        with turn.step() as step:
            step.end_turn()
    with own_world.turn(session) as turn:
        assert not turn.is_active
