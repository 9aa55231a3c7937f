"""Sessions that cannot go on are found, with the reason, and announced when they can."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final

import pytest
from django.apps import apps
from django.db import connections
from django.test.utils import CaptureQueriesContext, override_settings

from helix_store import (
    ConflictError,
    FencedOutError,
    InMemoryStore,
    InvalidQuery,
    LockLostError,
    SessionHandle,
    Store,
    StuckSession,
    aannounce_ready,
    afind_stuck,
    announce_due_posts,
    announce_ready,
    find_stuck,
    signals,
)
from helix_store.core import moments
from helix_store.engine.database import Database
from helix_store.exceptions import RunNotFound
from helix_store.models import Effect, Lock, Run, Session
from helix_store.stores import conditions as conditions_module
from helix_store.stores.conditions import (
    CONDITIONS,
    Condition,
    conditions_of,
    find_keys,
    find_statement,
)
from helix_store.testing.state_store.approvals import forge_answer
from helix_store.testing.usage.base import tokens
from tests.cells import for_each
from tests.databases import ALIASES, CommittedDatabase

AnyStore = Store | InMemoryStore

MESSAGE: Final = {"role": "user", "content": "hello"}
HOUR: Final = timedelta(hours=1)


class Broken(Exception):
    """An error of the agent."""


# What is portable on PostgreSQL, is all that SQLite has.
@pytest.fixture(params=["memory", *ALIASES, *(f"{name} portable" for name in ALIASES if name == "postgres")])
def store(request: pytest.FixtureRequest) -> Iterator[AnyStore]:
    name, _, form = request.param.partition(" ")
    with override_settings(HELIX_STORE={"FAST_PATHS": not form}):
        if name == "memory":
            yield InMemoryStore(tenant="tenant")
        else:
            database: CommittedDatabase = request.getfixturevalue(f"{name}_db")
            yield Store(database.alias, tenant=database.tenant)


@pytest.fixture
def stored(committed_db: CommittedDatabase) -> Store:
    """A store in a database."""
    return Store(committed_db.alias, tenant=committed_db.tenant)


@pytest.fixture
def ready() -> Iterator[list[tuple[str, str]]]:
    """What `session_ready` said: session and reason."""
    said: list[tuple[str, str]] = []

    def receive(session_id: str, reason: str, **_: Any) -> None:
        said.append((session_id, reason))

    signals.session_ready.connect(receive)
    yield said
    assert signals.session_ready.disconnect(receive)


def crash(store: AnyStore, session_id: str) -> None:
    with pytest.raises(Broken), store.session(session_id).turn() as turn, turn.step():
        raise Broken


def go_on(store: AnyStore, session_id: str) -> None:
    with store.session(session_id).turn() as turn, turn.step() as step:
        step.say(MESSAGE)


def abandon(store: AnyStore, session_id: str) -> str:
    """Start the run of a worker that dies, and whose lock has ended."""
    lock = store.locks.acquire(session_id)
    assert lock is not None
    run = store.sessions.start_run(session_id, fencing_token=lock.fencing_token)
    lock.release()
    return run.run_id


def spend(store: AnyStore, session_id: str) -> None:
    at = int(moments.now().timestamp() * 1_000)
    store.usage.record_entries([tokens(session_id, prompt=20, total=20, timestamp=at)])


def stop_by_budget(store: AnyStore, session_id: str, name: str = "budget") -> None:
    store.budgets.set_budget(name, scope="tree", value=session_id, limit_tokens=10)
    spend(store, session_id)
    with store.session(session_id).turn() as turn, turn.step():
        pytest.fail("The budget allows the step.")


def conditions(store: AnyStore, **options: Any) -> list[tuple[str, str, str | None]]:
    found = store.find_stuck(**{"conditions": CONDITIONS, **options})
    assert all(each.tenant == store.tenant for each in found)
    return [(each.session_id, each.condition, each.detail) for each in found]


# --- The conditions ----------------------------------------------------------------------------------


def test_a_session_whose_newest_run_failed_is_crashed(store: AnyStore) -> None:
    for session_id in ("crashed", "recovered", "ended", "new"):
        store.new_session(session_id, agent_type="agent")
    for session_id in ("crashed", "recovered", "ended"):
        crash(store, session_id)
    go_on(store, "recovered")
    store.sessions.update_status("ended", "failed")
    (found,) = store.find_stuck()
    run = store.sessions.list_runs("crashed")[0]
    assert run.ended_at is not None
    assert found == StuckSession(
        session_id="crashed",
        tenant=store.tenant,
        condition="crashed",
        since=run.ended_at,
        detail="Broken",
        run_id=run.run_id,
    )


def test_an_earlier_run_that_fails_late_does_not_hide_the_newest_one(store: AnyStore) -> None:
    store.new_session("session", agent_type="agent")
    store.sessions.start_run("session", "first")
    store.sessions.start_run("session", "second", supersede=True)
    store.sessions.update_run("session", "first", status="failed")
    assert conditions(store) == []
    store.sessions.update_run("session", "second", status="failed", completion_reason="Late")
    store.sessions.update_run("session", "first", status="completed")
    assert conditions(store) == [("session", "crashed", "Late")]


_STOPS: Final = {
    "error": ("failed", "TimeoutError"),
    "budget": ("interrupted", "budget:other"),
    "effect": ("interrupted", "effect:pay"),
}


@for_each("stop", _STOPS)
def test_an_earlier_run_that_stops_late_hides_no_crash(store: AnyStore, stop: str) -> None:
    status, reason = _STOPS[stop]
    store.new_session("session", agent_type="agent")
    store.sessions.start_run("session", "first")
    store.sessions.start_run("session", "second", supersede=True)
    newest = store.sessions.update_run("session", "second", status="failed", completion_reason="Newest")
    store.sessions.update_run("session", "first", status=status, completion_reason=reason)
    assert conditions(store) == [("session", "crashed", "Newest")]
    assert store.find_stuck()[0].since == newest.ended_at


def test_an_earlier_run_that_fails_late_hides_no_budget(
    store: AnyStore, ready: list[tuple[str, str]]
) -> None:
    store.new_session("session", agent_type="agent")
    store.sessions.start_run("session", "first")
    store.sessions.update_run("session", "first", status="interrupted")
    stop_by_budget(store, "session")
    store.sessions.update_run("session", "first", status="failed", completion_reason="TimeoutError")
    assert conditions(store) == [("session", "over_budget", "budget")]
    if isinstance(store, Store):
        store.budgets.set_budget("budget", scope="tree", value="session", limit_tokens=100)
        assert announce_ready(using=store.alias, tenant=store.tenant) == 1
        assert ready == [("session", "budget")]


def test_a_run_that_does_not_exist_hides_no_crash(store: AnyStore) -> None:
    store.new_session("session", agent_type="agent")
    crash(store, "session")
    for status, reason in _STOPS.values():
        with pytest.raises(RunNotFound):
            store.sessions.update_run("session", "nobody", status=status, completion_reason=reason)
    assert conditions(store) == [("session", "crashed", "Broken")]
    store.new_session("fine", agent_type="agent")
    with pytest.raises(RunNotFound):
        store.sessions.update_run("fine", "nobody", status="failed")
    if isinstance(store, Store):
        rows = Session.objects.using(store.alias).filter(tenant=store.tenant)
        assert rows.get(session_id="fine").stopped_by is None


def test_the_end_of_a_superseded_run_that_is_refused_hides_no_budget(store: AnyStore) -> None:
    store.new_session("session", agent_type="agent")
    store.sessions.start_run("session", "first")
    stop_by_budget(store, "session")
    lock = store.locks.acquire("session")
    assert lock is not None
    with pytest.raises(ConflictError, match="superseded"):
        store.sessions.update_run("session", "first", status="failed", fencing_token=lock.fencing_token)
    lock.release()
    assert conditions(store) == [("session", "over_budget", "budget")]


def test_an_earlier_run_that_runs_again_hides_no_crash(store: AnyStore) -> None:
    store.new_session("session", agent_type="agent")
    store.sessions.start_run("session", "first")
    store.sessions.update_run("session", "first", status="interrupted")
    crash(store, "session")
    store.sessions.update_run("session", "first", status="running")
    assert conditions(store) == [("session", "crashed", "Broken")]
    with pytest.raises(ConflictError):
        store.sessions.start_run("session", "third")
    assert conditions(store) == [("session", "crashed", "Broken")]
    store.sessions.update_run("session", "first", status="completed")
    assert conditions(store) == [("session", "crashed", "Broken")]
    store.sessions.start_run("session", "third")
    assert conditions(store) == []


def test_a_stopped_run_that_runs_again_stops_no_more(store: AnyStore) -> None:
    store.new_session("session", agent_type="agent")
    store.sessions.start_run("session", "run")
    store.sessions.update_run("session", "run", status="interrupted", completion_reason="effect:pay")
    store.sessions.update_run("session", "run", status="running")
    if isinstance(store, Store):
        rows = Session.objects.using(store.alias).filter(tenant=store.tenant)
        assert rows.get().stopped_by is None
    store.sessions.update_run("session", "run", status="failed", completion_reason="Broken")
    assert conditions(store) == [("session", "crashed", "Broken")]


def test_the_first_end_of_a_run_counts(store: AnyStore) -> None:
    store.new_session("session", agent_type="agent")
    store.sessions.start_run("session", "run")
    ended_at = store.sessions.update_run("session", "run", status="interrupted").ended_at
    store.sessions.update_run("session", "run", status="failed", completion_reason="Broken")
    assert [each.since for each in store.find_stuck()] == [ended_at]


def test_a_run_whose_id_is_taken_does_not_hide_a_crash(store: AnyStore) -> None:
    store.new_session("session", agent_type="agent")
    crash(store, "session")
    with pytest.raises(Exception, match="is taken"):
        store.sessions.start_run("session", store.sessions.list_runs("session")[0].run_id)
    assert conditions(store) == [("session", "crashed", "Broken")]


def test_a_session_whose_worker_is_gone_is_abandoned(store: AnyStore) -> None:
    for session_id in ("abandoned", "driven", "without lock", "ended"):
        store.new_session(session_id, agent_type="agent")
    run_id = abandon(store, "abandoned")
    abandon(store, "ended")
    store.sessions.update_status("ended", "failed")
    store.sessions.start_run("without lock")
    with store.session("driven").turn():
        (found,) = store.find_stuck()
    run = store.sessions.get_current_run("abandoned")
    assert run is not None
    assert (found.session_id, found.condition, found.run_id) == ("abandoned", "abandoned", run_id)
    assert found.since == run.started_at
    go_on(store, "abandoned")
    assert conditions(store) == []


def test_a_session_is_not_abandoned_while_a_successor_holds_its_lock(
    store: AnyStore, ready: list[tuple[str, str]]
) -> None:
    store.new_session("session", agent_type="agent")
    abandon(store, "session")
    successor = store.locks.acquire("session")
    assert successor is not None
    # An abandoned session is nobody's, and this one can go on.
    assert conditions(store) == []
    if isinstance(store, Store):
        assert announce_ready(using=store.alias, tenant=store.tenant) == 0
    successor.release()
    assert conditions(store) == [("session", "abandoned", None)]
    if isinstance(store, Store):
        assert announce_ready(using=store.alias, tenant=store.tenant) == 1


def test_an_abandoned_session_counts_from_the_end_of_its_lock(stored: Store) -> None:
    stored.new_session("session", agent_type="agent")
    lock = stored.locks.acquire("session")
    assert lock is not None
    stored.sessions.start_run("session", fencing_token=lock.fencing_token)
    assert stored.find_stuck() == []
    ended_at = moments.now() - timedelta(seconds=1)
    Lock.objects.using(stored.alias).filter(tenant=stored.tenant).update(expires_at=ended_at)
    (found,) = stored.find_stuck()
    assert (found.condition, found.since) == ("abandoned", ended_at)


def test_a_session_is_over_budget_until_its_budget_has_room(store: AnyStore) -> None:
    store.new_session("session", agent_type="agent")
    stop_by_budget(store, "session")
    assert conditions(store) == [("session", "over_budget", "budget")]
    store.budgets.set_budget("budget", scope="tree", value="session", limit_tokens=100)
    assert conditions(store) == []
    store.budgets.set_budget("budget", scope="tree", value="session", limit_tokens=10)
    assert conditions(store) == [("session", "over_budget", "budget")]
    store.budgets.delete_budget("budget")
    assert conditions(store) == []


def test_a_budget_that_caps_somebody_else_by_now_stops_nobody(store: AnyStore) -> None:
    for session_id, user_id in (("session", "ada"), ("other", "bob")):
        store.new_session(session_id, agent_type="agent", user_id=user_id)
        spend(store, session_id)
    store.budgets.set_budget("budget", scope="user", value="ada", limit_tokens=10)
    with store.session("session").turn() as turn:
        assert turn.stopped_by is not None
    assert conditions(store) == [("session", "over_budget", "budget")]
    store.budgets.set_budget("budget", scope="user", value="bob", limit_tokens=10)
    assert conditions(store) == []
    with store.session("session").turn() as turn:
        assert turn.is_active


_SCOPES: Final = {
    "tenant": {},
    "tree": {"value": "session"},
    "user": {"value": "ada"},
    "each user": {"scope": "user"},
    "agent type": {"scope": "agent_type", "value": "agent"},
    "each agent type": {"scope": "agent_type"},
}


@for_each(("name", "period"), [(name, period) for name in _SCOPES for period in ("total", "day", "month")])
def test_budgets_of_every_scope_and_period(stored: Store, name: str, period: str) -> None:
    budget = {"scope": name.replace(" ", "_"), **_SCOPES[name], "period": period}
    stored = Store(stored.alias, tenant=f"{stored.tenant} {name} {period}")
    stored.new_session("session", agent_type="agent", user_id="ada")
    stored.budgets.set_budget("budget", limit_tokens=10, **budget)
    spend(stored, "session")
    with stored.session("session").turn() as turn, turn.step():
        pytest.fail("The budget allows the step.")
    assert [each.detail for each in stored.find_stuck(conditions=["over_budget"])] == ["budget"]


def test_a_step_that_would_not_fit_is_over_budget(stored: Store) -> None:
    stored.new_session("session", agent_type="agent")
    stop_by_budget(stored, "session")
    runs = Run.objects.using(stored.alias).filter(session__tenant=stored.tenant)
    for refused, limit, is_over in ((5, 24, True), (5, 25, False), (0, 20, True), (0, 21, False)):
        stored.budgets.set_budget("budget", scope="tree", value="session", limit_tokens=limit)
        runs.update(refused_tokens=refused)
        assert bool(stored.find_stuck()) is is_over, (refused, limit)


def _effect(store: Store, session_id: str, effect_id: str, sequence: int, **columns: Any) -> None:
    key = Session.objects.using(store.alias).get(tenant=store.tenant, session_id=session_id).pk
    values = {"state": "unknown", "started_at": moments.now(), **columns}
    Effect.objects.using(store.alias).create(
        session_id=key, effect_id=effect_id, sequence=sequence, input="{}", digest="", **values
    )


@for_each("unit", ["tokens", "usd"])
def test_what_other_turns_hold_keeps_a_session_over_budget(
    store: AnyStore, unit: str, ready: list[tuple[str, str]]
) -> None:
    limit: dict[str, Any] = {f"limit_{unit}": 10}
    estimate: dict[str, Any] = {f"estimate_{unit}": 6}
    store.budgets.set_budget("budget", scope="agent_type", value="agent", **limit)
    for session_id in ("session", "other"):
        store.new_session(session_id, agent_type="agent")
    with store.session("other").turn(**estimate) as other:
        with store.session("session").turn(**estimate) as turn:
            assert not turn.is_active
        assert conditions(store) == [("session", "over_budget", "budget")]
        if isinstance(store, Store):
            assert announce_ready(using=store.alias, tenant=store.tenant) == 0
        assert other.is_active
    assert conditions(store) == []
    if isinstance(store, Store):
        assert announce_ready(using=store.alias, tenant=store.tenant) == 1
        assert ready == [("session", "budget")]
    with store.session("session").turn(**estimate) as turn:
        assert turn.is_active


def test_the_hold_of_a_dead_worker_keeps_no_session_over_budget(store: AnyStore) -> None:
    store.budgets.set_budget("budget", scope="agent_type", value="agent", limit_tokens=10)
    for session_id in ("session", "other"):
        store.new_session(session_id, agent_type="agent")
    with suppress(FencedOutError, LockLostError), store.session("other").turn(estimate_tokens=6):
        with store.session("session").turn(estimate_tokens=6) as turn:
            assert not turn.is_active
        store.locks.force_release("other")
        assert [each for each in conditions(store) if each[0] == "session"] == []


def test_unknown_effects_are_found_once_for_each_session(stored: Store) -> None:
    for session_id in ("unknown", "started", "held", "settled"):
        stored.new_session(session_id, agent_type="agent")
    _effect(stored, "unknown", "first", 1, state="done")
    _effect(stored, "unknown", "second", 2, run_id="run")
    _effect(stored, "unknown", "third", 3)
    lock = stored.locks.acquire("held")
    assert lock is not None
    _effect(stored, "held", "held", 1, state="started", fencing_token=lock.fencing_token)
    _effect(stored, "started", "gone", 1, state="started", fencing_token=1)
    _effect(stored, "settled", "settled", 1, state="not_done")
    assert conditions(stored) == [
        ("unknown", "effect_unknown", "second"),
        ("started", "effect_unknown", "gone"),
    ]
    lock.release()
    assert ("held", "effect_unknown", "held") in conditions(stored)


def test_a_session_with_a_due_post_is_unanswered(store: AnyStore) -> None:
    for session_id in ("due", "driven", "asks", "later"):
        store.new_session(session_id, agent_type="agent")
    with store.session("asks").turn() as turn, turn.step() as step:
        step.wait_for({"call": {"tool_name": "ask"}})
    store.sessions.post_message("later", MESSAGE, not_before=moments.now() + HOUR)
    for session_id in ("due", "asks"):
        store.sessions.post_message(session_id, MESSAGE)
    with store.session("driven").turn():
        store.sessions.post_message("driven", MESSAGE)
        found = store.find_stuck()
    assert [(each.session_id, each.condition) for each in found] == [("due", "unanswered")]


def test_a_session_with_open_calls_is_waiting(store: AnyStore) -> None:
    for session_id in ("waiting", "answered"):
        store.new_session(session_id, agent_type="agent")
        with store.session(session_id).turn() as turn, turn.step() as step:
            step.wait_for({"one": {"tool_name": "refund"}, "two": {"tool_name": "ask"}})
    for call_id in ("one", "two"):
        store.sessions.submit_tool_result("answered", call_id, result="yes")
    assert store.find_stuck() == []
    assert conditions(store) == [("waiting", "waiting", "ask, refund")]


@for_each("answer", [{"approved": True}, {"approved": False}, {"error": "no"}], ids=repr)
def test_a_session_whose_agent_has_written_the_answer_is_waiting(
    store: AnyStore, answer: dict[str, Any]
) -> None:
    for session_id in ("forged", "answered"):
        store.new_session(session_id, agent_type="agent")
        with store.session(session_id).turn() as turn, turn.step() as step:
            step.ask_approval("pay", "pay", {"eur": 5})
    store.sessions.submit_tool_result("answered", "pay", approval_id="pay", **answer)
    state = store.session("forged").load()
    state.pending_client_tool_calls["pay"] |= {**answer, "submitted_at": 1_700_000_000_000}
    store.sessions.save_state("forged", state)
    assert conditions(store) == [("forged", "waiting", "pay")]
    store.sessions.submit_tool_result("forged", "pay", approval_id="pay", approved=False)
    assert conditions(store) == []


def test_a_session_that_waits_for_an_approval_is_not_unanswered_whatever_its_state_says(
    store: AnyStore,
) -> None:
    session = store.new_session("forged", agent_type="agent")
    with session.turn() as turn, turn.step() as step:
        step.ask_approval("call", "pay", {"eur": 5})
    session.post({"role": "user", "content": "Now?"})
    forge_answer(store.sessions, "forged")
    assert store.find_stuck() == []
    store.sessions.submit_tool_result("forged", "call", approval_id="call", approved=False)
    assert [each.condition for each in store.find_stuck()] == ["unanswered"]


def test_a_session_with_a_used_approval_is_not_waiting(store: AnyStore) -> None:
    session = store.new_session("used", agent_type="agent")
    with session.turn() as turn, turn.step() as step:
        step.ask_approval("pay", "pay", {"eur": 5})
    store.sessions.submit_tool_result("used", "pay", approval_id="pay", approved=True)
    with session.turn() as turn, turn.effect("pay", approval=True) as effect:
        effect.done(True)
    assert "pay" in session.load().pending_client_tool_calls
    assert conditions(store) == []


def test_a_session_whose_adapter_waits_is_waiting(stored: Store) -> None:
    stored.new_session("session", agent_type="agent")
    Session.objects.using(stored.alias).filter(tenant=stored.tenant).update(waiting_kind="interrupt:1")
    assert conditions(stored) == [("session", "waiting", "interrupt")]


def test_the_migration_marks_what_had_stopped_before_it(stored: Store) -> None:
    for session_id in ("crashed", "recovered", "over", "ended"):
        stored.new_session(session_id, agent_type="agent")
    for session_id in ("crashed", "recovered", "ended"):
        crash(stored, session_id)
    go_on(stored, "recovered")
    stop_by_budget(stored, "over")
    stored.sessions.update_status("ended", "failed")
    before = stored.find_stuck()
    rows = Session.objects.using(stored.alias).filter(tenant=stored.tenant)
    rows.update(stopped_by=None, stopped_at=None)
    assert stored.find_stuck() == []
    migration = import_module("helix_store.migrations.0017_stuck_sessions")
    migration.mark_stopped_sessions(apps, SimpleNamespace(connection=connections[stored.alias]))
    assert stored.find_stuck() == before
    assert {each.session_id for each in before} == {"crashed", "over"}
    assert rows.get(session_id="ended").stopped_by is None


# --- The call ----------------------------------------------------------------------------------------


def test_the_longest_come_first_and_the_limit_counts_all_conditions(stored: Store) -> None:
    ids = ["a", "b", "c", "d"]
    for session_id in ids:
        stored.new_session(session_id, agent_type="agent")
    crash(stored, "c")
    abandon(stored, "a")
    stored.sessions.post_message("d", MESSAGE)
    crash(stored, "b")
    assert [each.session_id for each in stored.find_stuck()] == ["c", "a", "d", "b"]
    assert [each.session_id for each in stored.find_stuck(limit=2)] == ["c", "a"]
    assert [each.session_id for each in stored.find_stuck(conditions={"crashed"})] == ["c", "b"]
    assert stored.find_stuck(conditions=[]) == []


def _ask(store: AnyStore, session_id: str, *call_ids: str) -> None:
    store.new_session(session_id, agent_type="agent")
    with store.session(session_id).turn() as turn, turn.step() as step:
        step.wait_for({f"{session_id} {each}": {"tool_name": "ask"} for each in call_ids})


def _answer(store: AnyStore, session_id: str, call_id: str) -> None:
    store.sessions.submit_tool_result(session_id, f"{session_id} {call_id}", result="yes")


def _found(store: AnyStore, condition: str, limit: int) -> list[str]:
    return [each.session_id for each in store.find_stuck(conditions=[condition], limit=limit)]


def test_sessions_that_nobody_resumes_hide_none_that_wait(store: AnyStore) -> None:
    for session_id in ("a", "b", "waiting", "c", "d", "also waiting"):
        _ask(store, session_id, "call")
        if "waiting" not in session_id:
            _answer(store, session_id, "call")
    assert _found(store, "waiting", 1) == ["waiting"]
    assert _found(store, "waiting", 2) == ["waiting", "also waiting"]
    assert _found(store, "waiting", 3) == ["waiting", "also waiting"]


def test_sessions_with_some_answers_hide_none_that_is_unanswered(store: AnyStore) -> None:
    for session_id in ("a", "b", "due", "c", "also due"):
        if "due" in session_id:
            store.new_session(session_id, agent_type="agent")
        else:
            _ask(store, session_id, "one", "two")
            _answer(store, session_id, "one")
        store.sessions.post_message(session_id, MESSAGE)
    assert _found(store, "unanswered", 1) == ["due"]
    assert _found(store, "unanswered", 2) == ["due", "also due"]
    assert _found(store, "unanswered", 3) == ["due", "also due"]


def _statements(store: Store, **options: Any) -> tuple[list[str], int]:
    """Return the sessions that wait, and the number of statements that found them."""
    with CaptureQueriesContext(connections[store.alias]) as captured:
        found = [each.session_id for each in store.find_stuck(conditions=["waiting"], **options)]
    return found, sum(not each["sql"].startswith(("PREPARE", "SET ")) for each in captured)


def test_more_sessions_are_read_at_once_the_more_of_them_do_not_count(stored: Store) -> None:
    answered = [f"answered-{number}" for number in range(10)]
    for session_id in (*answered, "waiting"):
        _ask(stored, session_id, "call")
    for session_id in answered:
        _answer(stored, session_id, "call")
    rows = Session.objects.using(stored.alias).filter(tenant=stored.tenant)
    # All have changed in the same moment.
    rows.update(updated_at=moments.now() - 2 * HOUR)
    rows.filter(session_id="waiting").update(updated_at=moments.now() - HOUR)
    assert _statements(stored) == (["waiting"], 1)
    assert _statements(stored, limit=1) == (["waiting"], 4)
    assert _statements(stored, limit=1, older_than=HOUR) == (["waiting"], 4)
    key = rows.get(session_id="waiting").pk
    assert list(find_keys(stored.alias, ["waiting"], limit=1, tenants=[stored.tenant])) == [key]


def test_the_search_for_a_condition_is_bounded(
    stored: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answered = [f"answered-{number}" for number in range(8)]
    for session_id in (*answered, "waiting"):
        _ask(stored, session_id, "call")
        if session_id != "waiting":
            _answer(stored, session_id, "call")
    rows = Session.objects.using(stored.alias).filter(tenant=stored.tenant)
    rows.filter(session_id="waiting").update(updated_at=moments.now() + HOUR)
    monkeypatch.setattr(conditions_module, "MOST_READ", 7)
    # Pages of one, two and four sessions.
    assert _statements(stored, limit=1) == ([], 3)
    (record,) = caplog.records
    assert "has read 7 sessions and found only 0" in record.getMessage()
    caplog.clear()
    assert _statements(stored, limit=10) == (["waiting"], 1)
    monkeypatch.undo()
    assert _statements(stored, limit=1) == (["waiting"], 4)
    assert caplog.records == []


def test_sessions_with_due_posts_are_read_in_growing_pages(stored: Store) -> None:
    partly = [f"partly-{number}" for number in range(6)]
    for session_id in (*partly, "due"):
        _ask(stored, session_id, "one", "two")
        _answer(stored, session_id, "one")
        stored.sessions.post_message(session_id, MESSAGE)
    _answer(stored, "due", "two")
    calls: tuple[Callable[[], object], ...] = (
        lambda: [due.session_id for due in stored.sessions.find_due_posts(limit=1)] == ["due"],
        lambda: announce_due_posts(using=stored.alias, tenant=stored.tenant, limit=1) == 1,
    )
    for call in calls:
        with CaptureQueriesContext(connections[stored.alias]) as captured:
            assert call()
        selected = [each for each in captured if "next_post_at <=" in each["sql"]]
        assert len(selected) == 3


@for_each("condition", ["abandoned", "effect_unknown"])
def test_the_next_page_begins_after_the_last_row(stored: Store, condition: Condition) -> None:
    """The rows of these conditions are those of other tables, in another order than the sessions."""
    names = ["a", "b", "c"]
    for session_id in names:
        stored.new_session(session_id, agent_type="agent")
    for session_id in reversed(names):
        if condition == "abandoned":
            abandon(stored, session_id)
        else:
            _effect(stored, session_id, "pay", 1)
    at = moments.now() - HOUR
    Run.objects.using(stored.alias).filter(session__tenant=stored.tenant).update(started_at=at)
    Effect.objects.using(stored.alias).filter(session__tenant=stored.tenant).update(started_at=at)
    found, page = [], {"tenant": stored.tenant, "limit": 1}
    for _ in names:
        statement = find_statement(condition, "one", is_next="place" in page)
        for row in conditions_module._rows(Database(stored.alias, stored.tenant), statement, page):
            found.append(row.session_id)
            page |= {"since": row.since, "place": row.place}
    assert found == ["c", "b", "a"]


def test_a_session_that_changes_during_the_search_is_found_once(stored: Store) -> None:
    for session_id in ("early", "a", "b", "late"):
        _ask(stored, session_id, "call")
    for session_id in ("a", "b"):
        _answer(stored, session_id, "call")
    rows = Session.objects.using(stored.alias).filter(tenant=stored.tenant)
    for minutes, session_id in enumerate(("late", "b", "a", "early"), 1):
        rows.filter(session_id=session_id).update(updated_at=moments.now() - minutes * HOUR)
    pages = 0

    def change(execute: Any, sql: str, *arguments: Any) -> Any:
        nonlocal pages
        found = execute(sql, *arguments)
        pages += 1
        if pages == 1:
            rows.filter(session_id="early").update(updated_at=moments.now())
        return found

    with connections[stored.alias].execute_wrapper(change):
        found = _found(stored, "waiting", 3)
    assert found == ["early", "late"]


def test_a_session_counts_for_a_list_from_its_longest_condition(stored: Store) -> None:
    for session_id in ("crashed", "both"):
        stored.new_session(session_id, agent_type="agent")
        crash(stored, session_id)
    stored.sessions.post_message("both", MESSAGE, not_before=moments.now() - HOUR)
    found = find_keys(stored.alias, ["crashed", "unanswered"], tenants=[stored.tenant]).values()
    assert [(each.session_id, each.condition) for each in found] == [
        ("both", "unanswered"),
        ("crashed", "crashed"),
    ]


def test_abandoned_sessions_are_found_in_the_order_in_which_their_locks_ended(
    stored: Store, ready: list[tuple[str, str]]
) -> None:
    for session_id in ("released", "late", "early"):
        stored.new_session(session_id, agent_type="agent")
    abandon(stored, "released")
    locks = Lock.objects.using(stored.alias).filter(tenant=stored.tenant)
    for session_id, seconds in (("late", 1), ("early", 60)):
        lock = stored.locks.acquire(session_id)
        assert lock is not None
        stored.sessions.start_run(session_id, fencing_token=lock.fencing_token)
        locks.filter(name=session_id).update(expires_at=moments.now() - timedelta(seconds=seconds))
    for limit in (1, 2, 3):
        assert _found(stored, "abandoned", limit) == ["early", "late", "released"][:limit]
    assert announce_ready(using=stored.alias, tenant=stored.tenant, limit=1) == 1
    assert ready == [("early", "abandoned")]


def test_young_conditions_are_left_out(store: AnyStore) -> None:
    store.new_session("session", agent_type="agent")
    crash(store, "session")
    store.sessions.post_message("session", MESSAGE)
    assert len(store.find_stuck(older_than=timedelta(0))) == 2
    assert store.find_stuck(older_than=HOUR) == []


def test_old_conditions_are_found(stored: Store) -> None:
    stored.new_session("session", agent_type="agent")
    crash(stored, "session")
    long_ago = moments.now() - 2 * HOUR
    Session.objects.using(stored.alias).filter(tenant=stored.tenant).update(stopped_at=long_ago)
    assert len(stored.find_stuck(older_than=HOUR)) == 1
    assert stored.find_stuck(older_than=3 * HOUR) == []


def test_all_tenants_are_searched_by_default(stored: Store) -> None:
    other = Store(stored.alias, tenant=f"{stored.tenant} other")
    for each in (stored, other):
        each.new_session("session", agent_type="agent")
        crash(each, "session")
    tenants = {each.tenant for each in find_stuck(using=stored.alias, limit=1_000)}
    assert {stored.tenant, other.tenant} <= tenants
    (found,) = find_stuck(using=stored.alias, tenant=other.tenant)
    assert found.tenant == other.tenant


_WRONG: Final[tuple[dict[str, Any], ...]] = (
    {"conditions": "crashed"},
    {"conditions": ["asleep"]},
    {"conditions": 3},
    {"conditions": [[]]},
    {"older_than": 60},
    {"older_than": timedelta(seconds=-1)},
    {"older_than": timedelta(days=36_526)},
    {"older_than": timedelta.max},
    {"limit": 0},
    {"limit": "many"},
)


@for_each("options", _WRONG)
def test_wrong_arguments_are_refused(store: AnyStore, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidQuery):
        store.find_stuck(**options)


def test_async_twins(store: AnyStore) -> None:
    store.new_session("session", agent_type="agent")
    crash(store, "session")
    assert asyncio.run(store.afind_stuck()) == store.find_stuck()


def test_async_twins_of_a_database(stored: Store, ready: list[tuple[str, str]]) -> None:
    stored.new_session("session", agent_type="agent")
    abandon(stored, "session")
    found = asyncio.run(afind_stuck(using=stored.alias, tenant=stored.tenant))
    assert found == stored.find_stuck()
    assert asyncio.run(aannounce_ready(using=stored.alias, tenant=stored.tenant)) == 1
    assert ready == [("session", "abandoned")]


def test_the_condition_to_show_is_read_for_many_sessions_at_once(stored: Store) -> None:
    for session_id in ("crashed", "both", "fine", "over", "asks"):
        stored.new_session(session_id, agent_type="agent")
    crash(stored, "crashed")
    crash(stored, "both")
    _effect(stored, "both", "effect", 1)
    stop_by_budget(stored, "over")
    with stored.session("asks").turn() as turn, turn.step() as step:
        step.wait_for({"call": {"tool_name": "ask"}})
    keys = dict(
        Session.objects.using(stored.alias).filter(tenant=stored.tenant).values_list("pk", "session_id")
    )
    found = conditions_of(Database(stored.alias, stored.tenant), list(keys))
    assert {keys[key]: stuck.condition for key, stuck in found.items()} == {
        "crashed": "crashed",
        "both": "effect_unknown",
        "over": "over_budget",
        "asks": "waiting",
    }


# --- Wake-ups ----------------------------------------------------------------------------------------


def test_sessions_that_can_go_on_are_announced(stored: Store, ready: list[tuple[str, str]]) -> None:
    for session_id in ("abandoned", "over", "raised", "crashed", "effect", "settled"):
        stored.new_session(session_id, agent_type="agent")
    abandon(stored, "abandoned")
    crash(stored, "crashed")
    for session_id in ("over", "raised"):
        stop_by_budget(stored, session_id, session_id)
    stored.budgets.set_budget("raised", scope="tree", value="raised", limit_tokens=100)
    for session_id, state in (("effect", "unknown"), ("settled", "not_done")):
        stored.sessions.start_run(session_id, "run")
        stored.sessions.update_run(session_id, "run", status="interrupted", completion_reason="effect:charge")
        _effect(stored, session_id, "charge", 1, state=state)
    arguments: dict[str, Any] = {"using": stored.alias, "tenant": stored.tenant}
    assert announce_ready(**arguments) == 3
    assert set(ready) == {("abandoned", "abandoned"), ("raised", "budget"), ("settled", "effect")}
    # Nobody has listened.
    assert announce_ready(**arguments) == 3
    with stored.session("abandoned").turn():
        assert announce_ready(**arguments) == 2
    go_on(stored, "raised")
    go_on(stored, "settled")
    assert announce_ready(**arguments) == 0


@for_each("status", ["completed", "failed"])
def test_the_run_of_a_worker_that_died_after_its_last_step_is_ended(
    stored: Store, ready: list[tuple[str, str]], status: str
) -> None:
    stored.new_session("session", agent_type="agent")
    abandon(stored, "session")
    stored.sessions.update_status("session", status)
    assert conditions(stored) == []
    assert announce_ready(using=stored.alias, tenant=stored.tenant) == 1
    assert ready == [("session", "abandoned")]
    with stored.session("session").turn() as turn:
        assert not turn.is_active
    assert [run.status for run in stored.sessions.list_runs("session")] == [status]
    assert announce_ready(using=stored.alias, tenant=stored.tenant) == 0


def test_all_tenants_are_announced_by_default(stored: Store, ready: list[tuple[str, str]]) -> None:
    session_id = f"session of {stored.tenant}"
    stored.new_session(session_id, agent_type="agent")
    abandon(stored, session_id)
    assert announce_ready(using=stored.alias, limit=1_000) >= 1
    assert (session_id, "abandoned") in ready
    with pytest.raises(InvalidQuery):
        announce_ready(using=stored.alias, limit=0)


def test_ready_sessions_take_turns(stored: Store, ready: list[tuple[str, str]]) -> None:
    ids = [f"session-{number}" for number in range(5)]
    for session_id in ids:
        stored.new_session(session_id, agent_type="agent")
        abandon(stored, session_id)
    for _ in range(10):
        assert announce_ready(using=stored.alias, tenant=stored.tenant, limit=2) == 2
    said = [session_id for session_id, _ in ready]
    assert said[:5] == ids
    assert min(Counter(said).values()) >= 3


def test_sessions_with_due_posts_take_turns(stored: Store) -> None:
    ids = [f"session-{number}" for number in range(5)]
    for session_id in ids:
        stored.new_session(session_id, agent_type="agent")
        stored.sessions.post_message(session_id, MESSAGE)
    said: list[str] = []

    def receive(session_id: str, **_: Any) -> None:
        said.append(session_id)

    signals.session_posted.connect(receive)
    try:
        for _ in range(10):
            assert announce_due_posts(using=stored.alias, tenant=stored.tenant, limit=2) == 2
    finally:
        assert signals.session_posted.disconnect(receive)
    assert said[:5] == ids
    assert min(Counter(said).values()) >= 3


def test_a_session_that_is_being_written_is_not_waited_for(postgres_db: CommittedDatabase) -> None:
    store = Store(postgres_db.alias, tenant=postgres_db.tenant)
    store.new_session("session", agent_type="agent")
    abandon(store, "session")
    with postgres_db.second_connection() as other, other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(
            f"SELECT 1 FROM {Session._meta.db_table} WHERE tenant = %s FOR NO KEY UPDATE", [store.tenant]
        )
        with postgres_db.connection.cursor() as own:
            own.execute("SET lock_timeout = '2s'")
        try:
            assert announce_ready(using=store.alias, tenant=store.tenant, limit=1) == 1
        finally:
            with postgres_db.connection.cursor() as own:
                own.execute("RESET lock_timeout")
        cursor.execute("ROLLBACK")


def test_a_post_that_a_dead_worker_received_is_found(stored: Store, ready: list[tuple[str, str]]) -> None:
    stored.new_session("session", agent_type="agent")
    stored.sessions.post_message("session", MESSAGE)
    lock = stored.locks.acquire("session")
    assert lock is not None
    stored.sessions.receive_posts("session", fencing_token=lock.fencing_token)
    stored.sessions.start_run("session", fencing_token=lock.fencing_token)
    lock.release()
    assert announce_due_posts(using=stored.alias, tenant=stored.tenant) == 0
    assert announce_ready(using=stored.alias, tenant=stored.tenant) == 1
    assert ready == [("session", "abandoned")]


class DyingHandle(SessionHandle):
    """The handle of a worker that ends right after it has received posts."""

    def _receive(self, *arguments: Any) -> Any:
        super()._receive(*arguments)
        raise KeyboardInterrupt


def test_a_worker_that_dies_while_it_receives_leaves_a_run(store: AnyStore) -> None:
    store.new_session("session", agent_type="agent").post(MESSAGE)
    with pytest.raises(KeyboardInterrupt):
        DyingHandle(store, "session").turn().__enter__()
    assert store.session("session").messages() == [MESSAGE]
    assert [stuck.condition for stuck in store.find_stuck()] == ["abandoned"]
    with store.session("session").turn() as turn:
        assert turn.recovered is not None
        assert turn.messages() == [MESSAGE]
