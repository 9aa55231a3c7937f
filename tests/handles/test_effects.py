"""Effects in turns: the lock, the run, the caller's transaction, signals, and workers that are gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connections, transaction
from django.dispatch import Signal

from helix_store import (
    ConflictError,
    EffectUnknown,
    InMemoryStore,
    NoOpLockManager,
    NotSupportedOnBackend,
    SessionHandle,
    Store,
    TurnInterrupted,
)
from helix_store.core.types import SessionStatus
from helix_store.signals import effect_unknown, session_answered
from helix_store.testing.state_store.approvals import forge_answer
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.handles.worlds import World, database_world, leave_started

APPROVED: dict[str, Any] = {"approved": True, "approval_id": "call", "actor": "ann"}


@pytest.fixture
def own_world(world: World) -> World:
    if world.is_foreign:
        pytest.skip("a third party's store has no effects")
    return world


@pytest.fixture
def database(committed_db: CommittedDatabase) -> World:
    return database_world(committed_db, is_foreign=False)


@contextlib.contextmanager
def heard(signal: Signal) -> Iterator[list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []

    def receive(**kwargs: Any) -> None:
        calls.append(kwargs)

    signal.connect(receive)
    try:
        yield calls
    finally:
        signal.disconnect(receive)


def test_an_effect_knows_the_run_and_the_step(own_world: World) -> None:
    session = own_world.new_session()
    with own_world.turn(session) as turn:
        with turn.effect("pay", tool_name="pay", input=[7]) as effect:
            effect.done("A-1")
        with turn.step() as step:
            step.say({"role": "tool", "tool_call_id": "pay", "content": effect.result})
        with turn.effect("mail") as later:
            later.done()
    assert turn.run is not None
    assert (effect.run_id, effect.step_count) == (turn.run.run_id, 1)
    assert later.step_count == 2
    assert own_world.own.list_runs("session")[0].status == "completed"


def test_the_next_turn_stops_at_an_effect_of_a_dead_worker(own_world: World) -> None:
    own_world.new_session()
    leave_started(own_world, tool_name="pay")
    with heard(effect_unknown) as told:
        with own_world.turn(own_world.session()) as turn:
            with turn.effect("pay", tool_name="pay"):
                pytest.fail("the block ran")
            pytest.fail("the turn went on")
        assert [(each["session_id"], each["effect_id"]) for each in told] == [("session", "pay")]
    run = own_world.own.list_runs("session")[0]
    assert (run.status, run.completion_reason) == ("interrupted", "effect:pay")
    assert own_world.loaded().status == "active"
    assert own_world.own.settle_effect("session", "pay", done=True, result="by hand")
    with own_world.turn(own_world.session()) as turn, turn.effect("pay", tool_name="pay") as effect:
        assert (effect.is_done, effect.result) == (True, "by hand")


def test_a_caller_may_catch_it_but_the_turn_is_over(own_world: World) -> None:
    own_world.new_session()
    leave_started(own_world)
    with own_world.turn(own_world.session()) as turn:
        with pytest.raises(EffectUnknown) as unknown, turn.effect("pay"):
            pytest.fail("the block ran")
        assert not turn.is_active
        for call in (turn.step, lambda: turn.effect("other")):
            with pytest.raises(TurnInterrupted) as again:
                call()
            assert again.value is unknown.value


def test_a_stopped_turn_that_was_left_is_over_like_any_other(own_world: World) -> None:
    own_world.new_session()
    leave_started(own_world)
    with own_world.turn(own_world.session()) as turn:
        late = turn.effect("late")
        with turn.effect("pay"):
            pytest.fail("the block ran")
    assert turn.stopped_by is not None
    for call in (lambda: turn.effect("other"), late.__enter__, turn.step):
        with pytest.raises(ConflictError, match="not active"):
            call()
    assert [each.id for each in own_world.own.list_effects("session").items] == ["pay"]


def test_an_unknown_effect_of_the_handle_ends_the_sessions_own_turn_quietly(own_world: World) -> None:
    session = own_world.new_session()
    leave_started(own_world)
    with heard(effect_unknown) as told, own_world.turn(session), session.effect("pay"):
        pytest.fail("the block ran")
    run = own_world.own.list_runs("session")[0]
    assert (run.status, run.completion_reason) == ("interrupted", "effect:pay")
    assert [each["effect_id"] for each in told] == ["pay"]
    own_world.own.create_session("other", agent_type="agent")
    others = SessionHandle(own_world.store, "other")
    with pytest.raises(EffectUnknown), own_world.turn(others), session.effect("pay"):
        pytest.fail("the block ran")
    assert own_world.own.list_runs("other")[0].status == "failed"


@for_each("opens", ["turn", "handle"])
@for_each("ending", ["raised", "caught", "caught, and an error"])
def test_an_unknown_effect_is_announced_after_the_run_has_ended(
    own_world: World, opens: str, ending: str
) -> None:
    session = own_world.new_session()
    leave_started(own_world)
    seen: list[tuple[str, str, str | None, bool]] = []

    def look(session_id: str, effect_id: str, **_: Any) -> None:
        run = own_world.store.list_runs(session_id)[0]
        is_locked = own_world.locks.is_locked(session_id)
        seen.append((effect_id, run.status.value, run.completion_reason, is_locked))

    def drive() -> None:
        with own_world.turn(session) as turn:
            opener: Any = turn if opens == "turn" else session
            caught: list[type[Exception]] = [EffectUnknown] if ending != "raised" else []
            for _ in range(2):
                with contextlib.suppress(*caught), opener.effect("pay"):
                    pytest.fail("the block ran")
            if ending.endswith("error"):
                raise ZeroDivisionError

    effect_unknown.connect(look)
    try:
        with contextlib.suppress(ZeroDivisionError):
            drive()
    finally:
        effect_unknown.disconnect(look)
    run = own_world.store.list_runs("session")[0]
    assert run.status != "running"
    assert seen == [("pay", run.status.value, run.completion_reason, False)]


def test_after_its_turn_a_handle_announces_an_unknown_effect_at_once(own_world: World) -> None:
    session = own_world.new_session()
    leave_started(own_world)
    with own_world.turn(session):
        pass
    with heard(effect_unknown) as told, pytest.raises(EffectUnknown):
        session.effect("pay").__enter__()
    assert [each["effect_id"] for each in told] == ["pay"]
    with own_world.turn(session) as turn, turn.step() as step:
        step.end_turn()
    with own_world.turn(session) as resting, pytest.raises(EffectUnknown):
        with heard(effect_unknown) as told:
            session.effect("pay").__enter__()
        assert resting.run is None
    assert [each["effect_id"] for each in told] == ["pay"]


def test_an_unknown_effect_of_another_tenants_session_with_the_same_id_is_raised(
    committed_db: CommittedDatabase,
) -> None:
    own, other = (
        Store(committed_db.alias, tenant=f"{committed_db.tenant}-{name}").new_session("s", agent_type="agent")
        for name in ("own", "other")
    )
    with contextlib.suppress(ZeroDivisionError), other.effect("pay"):
        raise ZeroDivisionError
    with pytest.raises(EffectUnknown), own.turn(), other.effect("pay"):
        pytest.fail("the block ran")
    # Another object for the same stores is the same session.
    own = Store(committed_db.alias, tenant=f"{committed_db.tenant}-other").session("s")
    with own.turn(), other.effect("pay"):
        pytest.fail("the block ran")


@for_each("options", [{"retry": True}, {"reconcile": lambda effect: effect.not_done()}])
def test_a_dead_workers_effect_can_be_attempted_again(own_world: World, options: dict[str, Any]) -> None:
    own_world.new_session()
    leave_started(own_world)
    with own_world.turn(own_world.session()) as turn, turn.effect("pay", **options) as effect:
        assert effect.attempt == 2
        effect.done()


def test_an_approval_survives_the_death_of_its_worker(own_world: World) -> None:
    session = own_world.new_session()
    with own_world.turn(session) as turn, turn.step() as step:
        step.ask_approval("call", "pay", {"amount": 7})
    own_world.store.submit_tool_result("session", "call", **APPROVED)
    leave_started(own_world, "call", approval=True)
    with own_world.turn(own_world.session()) as turn, turn.effect("call", approval=True):
        pytest.fail("the block ran")
    own_world.own.settle_effect("session", "call", done=False)
    with own_world.turn(own_world.session()) as turn:
        assert turn.results["call"]["approved"] is True
        with turn.effect("call", approval=True) as effect:
            assert (effect.input, effect.actors, effect.attempt) == ({"amount": 7}, ["ann"], 2)
            effect.done()
        with turn.step() as step:
            step.finish()


def test_an_effect_needs_an_active_turn(own_world: World) -> None:
    session = own_world.new_session()
    turn = own_world.turn(session)
    with pytest.raises(ConflictError):
        turn.effect("early")
    with turn:
        late, left = turn.effect("late"), turn.effect("left")
        with turn.step() as step:
            step.finish()
        with pytest.raises(ConflictError):
            turn.effect("ended")
        with pytest.raises(ConflictError), late:
            pytest.fail("the block ran")
    with pytest.raises(ConflictError):
        turn.effect("over")
    with pytest.raises(ConflictError), left:
        pytest.fail("the block ran")
    assert own_world.own.list_effects("session").items == []


def test_one_thread_of_a_turn_attempts_an_effect(own_world: World) -> None:
    # The store cannot tell whether a lock of another kind is held.
    with own_world.new_session().turn(locks=NoOpLockManager()) as turn, turn.effect("pay") as effect:
        for _ in range(2):
            with pytest.raises(ConflictError, match="Another thread"), turn.effect("pay", retry=True):
                pytest.fail("the block ran")
        effect.done()
    assert own_world.own.list_effects("session").items[0].attempt == 1


def test_an_effect_may_begin_in_an_open_step(own_world: World) -> None:
    with own_world.turn(own_world.new_session()) as turn, turn.step() as step:
        with turn.effect("pay") as effect:
            effect.done(7)
        step.say({"role": "assistant", "content": str(effect.result)})
    assert step.commit is not None


def test_a_third_partys_store_has_no_effects(world: World) -> None:
    if not world.is_foreign:
        pytest.skip("this store has effects")
    with world.turn(world.new_session()) as turn, pytest.raises(NotSupportedOnBackend):
        turn.effect("pay").__enter__()


# Settling wakes


def test_settling_announces_a_session_that_can_go_on(own_world: World) -> None:
    session = own_world.new_session()
    for effect_id in ("first", "second"):
        with pytest.raises(ZeroDivisionError), session.effect(effect_id):
            raise ZeroDivisionError
    with heard(session_answered) as told:
        own_world.own.settle_effect("session", "first", done=True)
        assert told == []
        own_world.own.settle_effect("session", "second", done=False)
        assert [each["session_id"] for each in told] == ["session"]
        own_world.own.settle_effect("session", "second", done=True)
        assert len(told) == 1


@for_each("status", ["completed", "failed", "waiting", "answered by its agent"])
def test_settling_announces_no_session_that_cannot_go_on(own_world: World, status: str) -> None:
    session = own_world.new_session()
    with pytest.raises(ZeroDivisionError), session.effect("pay"):
        raise ZeroDivisionError
    if status == "waiting":
        with session.step() as step:
            step.wait_for({"call": {"tool_name": "ask"}})
    elif status == "answered by its agent":
        with session.step() as step:
            step.ask_approval("call", "pay", 1)
        forge_answer(own_world.own, "session")
    else:
        own_world.store.update_status("session", status)
    with heard(session_answered) as told:
        assert own_world.own.settle_effect("session", "pay", done=True)
    assert told == []


@for_each("approved", [True, False])
def test_settling_announces_a_session_with_an_answer_that_is_not_taken(
    own_world: World, approved: bool
) -> None:
    session = own_world.new_session()
    with pytest.raises(ZeroDivisionError), session.effect("pay"):
        raise ZeroDivisionError
    with session.step() as step:
        step.ask_approval("call", "pay", 1)
    own_world.own.submit_tool_result("session", "call", approved=approved, approval_id="call")
    with heard(session_answered) as told:
        assert own_world.own.settle_effect("session", "pay", done=True)
    assert [each["session_id"] for each in told] == ["session"]


def test_a_settled_effect_ends_the_rest_of_a_session(own_world: World) -> None:
    session = own_world.new_session()
    with own_world.turn(session) as turn:
        with pytest.raises(ZeroDivisionError), turn.effect("pay"):
            raise ZeroDivisionError
        with turn.step() as step:
            step.end_turn()
    with own_world.turn(own_world.session()) as turn:
        assert turn.run is None
        with pytest.raises(ConflictError, match="rest=False"):
            turn.effect("pay")
    own_world.own.settle_effect("session", "pay", done=True)
    with own_world.turn(own_world.session()) as turn:
        assert turn.is_active


# The caller's transaction


def test_no_effect_begins_in_a_transaction(database: World) -> None:
    session = database.new_session()
    with transaction.atomic(using=database.own.alias), pytest.raises(ConflictError, match="transaction"):
        session.effect("pay").__enter__()
    with (
        database.turn(session) as turn,
        transaction.atomic(using=database.own.alias),
        turn.step(),
        pytest.raises(ConflictError, match="transaction"),
    ):
        turn.effect("pay").__enter__()
    assert database.own.list_effects("session").items == []


def test_no_effect_begins_in_a_transaction_in_memory() -> None:
    store = InMemoryStore()
    session = store.new_session("session", agent_type="agent")
    with store.transaction(), pytest.raises(ConflictError, match="transaction"):
        session.effect("pay").__enter__()


def test_a_result_commits_with_the_callers_rows(own_world: World) -> None:
    session = own_world.new_session()
    with session.effect("pay") as effect:
        with own_world.transaction():
            effect.done("A-1")
            assert effect.result == "A-1"
        assert effect.is_done
    assert own_world.own.list_effects("session").items[0].result == "A-1"


def test_a_result_that_was_rolled_back_was_never_stored(own_world: World) -> None:
    def pay() -> None:
        with own_world.new_session().effect("pay") as effect:
            _done_and_rolled_back(own_world, effect)
            assert (effect.is_done, effect.result) == (False, None)

    with pytest.raises(ConflictError, match="neither"):
        pay()
    assert own_world.own.list_effects("session").items[0].state == "unknown"


def _done_and_rolled_back(world: World, effect: Any) -> None:
    with contextlib.suppress(ZeroDivisionError), world.transaction():
        effect.done("A-1")
        assert effect.is_done
        raise ZeroDivisionError


def test_a_rolled_back_savepoint_counts_even_if_its_transaction_commits(own_world: World) -> None:
    with own_world.new_session().effect("pay") as effect:
        with own_world.transaction():
            _done_and_rolled_back(own_world, effect)
            assert not effect.is_done
        with contextlib.suppress(ZeroDivisionError), own_world.transaction():
            with own_world.transaction():
                effect.done("A-2")
            assert effect.result == "A-2"
            raise ZeroDivisionError
        assert not effect.is_done
        effect.done("A-3")
    assert own_world.own.list_effects("session").items[0].result == "A-3"


@for_each("told", ["done", "not_done"])
def test_an_answer_of_reconcile_that_was_rolled_back_is_none(own_world: World, told: str) -> None:
    session = own_world.new_session()
    with contextlib.suppress(ZeroDivisionError), session.effect("pay"):
        raise ZeroDivisionError

    def ask(effect: Any) -> None:
        with contextlib.suppress(ZeroDivisionError), own_world.transaction():
            getattr(effect, told)("A-1")
            raise ZeroDivisionError

    with pytest.raises(EffectUnknown), session.effect("pay", reconcile=ask):
        pytest.fail("the block ran")
    assert own_world.own.list_effects("session").items[0].state == "unknown"
    with session.effect("pay", reconcile=ask, retry=True) as effect:
        assert (effect.attempt, effect.is_done, effect.result) == (2, False, None)
        effect.done("A-2")
    assert own_world.own.list_effects("session").items[0].result == "A-2"


def test_entering_an_effect_that_is_done_writes_nothing(database: World) -> None:
    """Which row versions exist is the same as before: a loop that repeats its effects costs reads alone."""
    session = database.new_session()
    with session.effect("pay", tool_name="pay", input=[7]) as effect:
        effect.done("A-1")
    connection = connections[database.own.alias]

    def written() -> object:
        if connection.vendor == "sqlite":
            return connection.connection.total_changes
        with connection.cursor() as cursor:
            cursor.execute("SELECT max(xmin::text::bigint) FROM helix_store_session")
            return cursor.fetchone()

    before = written()
    with session.effect("pay", tool_name="pay", input=[7]) as again:
        assert (again.is_done, again.result) == (True, "A-1")
    assert written() == before


def test_the_async_form(own_world: World) -> None:
    session = own_world.new_session()

    async def work() -> None:
        async with own_world.turn(session) as turn:
            async with turn.effect("pay") as effect:
                await effect.adone(7)
            async with turn.step() as step:
                await step.asay({"role": "assistant", "content": str(effect.result)})

    async_to_sync(work)()
    assert own_world.own.list_effects("session").items[0].result == 7


@pytest.mark.thorough
@for_each("effect_id", ["free", "approved", "again"])
@for_each("stop", ["abort", "interrupt", "failed", "completed", "paused"])
def test_a_turn_that_was_stopped_elsewhere_attempts_nothing_more(
    own_world: World, stop: str, effect_id: str
) -> None:
    session, store = own_world.new_session(), own_world.own
    with own_world.turn(session) as turn, turn.step() as step:
        step.ask_approval("approved", "pay", {"amount": 7})
    store.submit_tool_result("session", "approved", approved=True, approval_id="approved", actor="ann")
    expected = TurnInterrupted if stop in ("abort", "interrupt") else ConflictError
    with contextlib.suppress(ConflictError), own_world.turn(session) as turn:
        with contextlib.suppress(ZeroDivisionError), turn.effect("again"):
            raise ZeroDivisionError
        with turn.effect("earlier") as effect:
            effect.done("kept")
        if expected is TurnInterrupted:
            store.request_interrupt("session", kind=stop, reason="stop it")
        else:
            state = session.load()
            state.status = SessionStatus(stop)
            store.save_state("session", state, expected_version=state.version)
        with turn.effect("earlier") as effect:
            assert effect.result == "kept"
        options: dict[str, Any] = {"free": {}, "approved": {"approval": True}, "again": {"retry": True}}
        with pytest.raises(expected) as refused, turn.effect(effect_id, **options[effect_id]):
            pytest.fail("the block ran")
        if expected is TurnInterrupted:
            assert (turn.is_active, turn.stopped_by) == (False, refused.value)
        raise ConflictError
    assert {each.id: each.state for each in store.list_effects("session").items} == {
        "again": "unknown",
        "earlier": "done",
    }
    with session.effect("of nobody's turn") as effect:
        effect.done()


def test_the_documented_loop_pays_nothing_after_an_abort(own_world: World) -> None:
    session, store, paid = own_world.new_session(), own_world.own, []
    session.say({"role": "user", "content": "twice, please"})
    with own_world.turn(session) as turn:
        while turn.is_active:
            calls = turn.messages(last=1)[0].get("tool_calls", [])
            for call in calls:
                with turn.effect(call["id"], tool_name="pay") as effect:
                    paid.append(call["id"])
                    effect.done()
                store.request_interrupt("session", kind="abort", reason="operator")
            with turn.step() as step:
                step.say({"role": "assistant", "tool_calls": [{"id": "one"}, {"id": "two"}]})
    assert paid == ["one"]
    run = store.list_runs("session")[0]
    assert (run.status, run.completion_reason) == ("interrupted", "operator")
