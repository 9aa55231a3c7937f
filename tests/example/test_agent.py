"""The demo's agent: what it stores, and that it ends the same however its workers end."""

from __future__ import annotations

import itertools
import json
import threading

import pytest

from example_project.agent import Agent, AgentKind, Reply, ToolCall, answer_approval
from example_project.card_service import charges
from example_project.demo import Emphasis, demonstrate_agent
from example_project.events import Event
from example_project.travel import PLANNER, start_trip
from example_project.worker import run_in_process
from helix_store.cleanup import expired_session_cleanup
from helix_store.core.types import (
    Message,
    RunStatus,
    SessionState,
    SessionStatus,
)
from helix_store.exceptions import SessionNotFound
from helix_store.models import StagedChange
from helix_store.stores import Store
from tests.databases import CommittedDatabase

CONVERSATION = [
    ("user", None),
    ("assistant", ["ask_visa_adviser"]),
    ("tool", None),
    ("assistant", ["search_flights", "search_hotels"]),
    ("tool", None),
    ("tool", None),
    ("assistant", ["book_trip"]),
    ("tool", None),
    ("assistant", None),
]


def _ignore(event: Event) -> None:
    pass


def _store_of(database: CommittedDatabase) -> Store:
    return Store(database.alias, tenant=database.tenant)


def _state(store: Store, session_id: str) -> SessionState:
    state = store.sessions.load_state(session_id)
    assert state is not None
    return state


def _shape(messages: list[Message]) -> list[tuple[str, list[str] | None]]:
    """Roles, and the tools that are called."""
    return [
        (
            message["role"],
            [call["function"]["name"] for call in message["tool_calls"]] if "tool_calls" in message else None,
        )
        for message in messages
    ]


def _charge_counts(store: Store, session_id: str) -> dict[str, int]:
    """How often the card service has charged for each effect of a session."""
    return {effect.id: len(charges(effect.key)) for effect in store.sessions.list_effects(session_id).items}


def _plan_trip(store: Store, session_id: str) -> None:
    """Run a trip to its end with nothing going wrong."""
    start_trip(store, session_id, title="Lisbon")
    agent = Agent(store, PLANNER, report=_ignore)
    agent.run(session_id)
    answer_approval(store, session_id, approved=True)
    agent.run(session_id)


def test_a_trip_is_planned_approved_and_booked(committed_db: CommittedDatabase) -> None:
    store = _store_of(committed_db)
    _plan_trip(store, "trip")
    state = _state(store, "trip")
    assert state.status is SessionStatus.COMPLETED
    assert _shape(store.sessions.get_messages("trip").messages) == CONVERSATION
    assert state.custom_state["flights"] == [{"flight": "TP 1357", "price_eur": 184}]
    assert state.custom_state["hotels"] == [{"hotel": "Casa do Rio", "price_eur": 210}]
    assert state.custom_state["booking"]["reference"] == "LX-4711"
    assert state.custom_state["booking"]["charged_eur"] == 394
    assert _charge_counts(store, "trip") == {"call-book": 1}
    assert [checkpoint.message_count for checkpoint in store.sessions.list_checkpoints("trip").items] == [
        9,
        8,
        7,
        6,
        3,
    ]
    statuses = [(run.turn, run.status) for run in store.sessions.list_runs("trip")]
    assert statuses == [(2, RunStatus.COMPLETED), (1, RunStatus.SUSPENDED_CLIENT_TOOL)]


def test_the_sub_agent_is_a_session_below_the_one_that_asked(
    committed_db: CommittedDatabase,
) -> None:
    store = _store_of(committed_db)
    _plan_trip(store, "trip")
    (ref,) = store.sessions.get_sub_session_refs("trip")
    child = _state(store, ref.sub_session_id)
    assert (ref.status, ref.output, ref.parent_tool_call_id) == ("completed", child.output, "call-visa")
    assert (child.parent_session_id, child.root_session_id) == ("trip", "trip")
    assert _shape(store.sessions.get_messages(child.session_id).messages) == [
        ("user", None),
        ("assistant", None),
    ]


def test_a_session_waits_for_its_approval_however_often_it_is_run(committed_db: CommittedDatabase) -> None:
    store = _store_of(committed_db)
    start_trip(store, "trip", title="Lisbon")
    for _ in range(2):
        Agent(store, PLANNER, report=_ignore).run("trip")
        state = _state(store, "trip")
        assert state.status is SessionStatus.PAUSED
        assert state.pending_client_tool_calls["call-book"]["tool_name"] == "book_trip"
        assert "booking" not in state.custom_state
        assert state.message_count == 7


def test_what_a_person_refuses_is_not_done(committed_db: CommittedDatabase) -> None:
    store = _store_of(committed_db)
    start_trip(store, "trip", title="Lisbon")
    agent = Agent(store, PLANNER, report=_ignore)
    agent.run("trip")
    assert answer_approval(store, "trip", approved=False) == ["call-book"]
    agent.run("trip")
    state = _state(store, "trip")
    assert state.status is SessionStatus.COMPLETED
    assert "booking" not in state.custom_state
    assert "refused" in json.loads(store.sessions.get_messages("trip").messages[7]["content"])
    assert _charge_counts(store, "trip") == {}


def test_an_approval_is_given_in_another_process_and_the_session_resumes_there(
    committed_db: CommittedDatabase,
) -> None:
    store = _store_of(committed_db)
    start_trip(store, "trip", title="Lisbon")
    Agent(store, PLANNER, report=_ignore).run("trip")
    events = list(run_in_process(committed_db.alias, committed_db.tenant, "trip", approves=True))
    assert events[-1].kind == "finished"
    state = _state(store, "trip")
    assert (state.status, state.resume_count) == (SessionStatus.COMPLETED, 1)
    assert state.completed_client_tool_calls["call-book"]["approved"] is True
    assert _shape(store.sessions.get_messages("trip").messages) == CONVERSATION


def test_a_worker_that_dies_right_after_resuming_loses_no_answer(committed_db: CommittedDatabase) -> None:
    store = _store_of(committed_db)
    start_trip(store, "trip", title="Lisbon")
    agent = Agent(store, PLANNER, report=_ignore)
    agent.run("trip")
    answer_approval(store, "trip", approved=True)
    store.sessions.resume("trip")
    agent.run("trip")
    state = _state(store, "trip")
    assert state.status is SessionStatus.COMPLETED
    assert state.custom_state["booking"]["reference"] == "LX-4711"


def test_nobody_deciding_in_time_is_a_refusal(committed_db: CommittedDatabase) -> None:
    store = _store_of(committed_db)
    start_trip(store, "trip", title="Lisbon")
    agent = Agent(store, PLANNER, report=_ignore)
    agent.run("trip")
    deadline = _state(store, "trip").pending_client_tool_calls["call-book"]["deadline"]
    summary = expired_session_cleanup(state_store=store.sessions, workspace_providers={}, now=deadline)
    assert summary.defaults_applied == 1
    agent.run("trip")
    state = _state(store, "trip")
    assert state.status is SessionStatus.COMPLETED
    assert "booking" not in state.custom_state


def test_tools_of_one_step_run_side_by_side(committed_db: CommittedDatabase) -> None:
    store = _store_of(committed_db)
    together = threading.Barrier(2)

    def meet(call: ToolCall) -> str:
        together.wait(timeout=30)
        call.stage(merge_changes={call.tool_call_id: "met"})
        return call.tool_call_id

    names = ("first", "second")
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in names]
    model = _Lines({"role": "assistant", "tool_calls": calls}, {"role": "assistant", "content": "done"})
    kind = AgentKind("meeting", model, dict.fromkeys(names, meet))
    store.sessions.create_session("meeting", agent_type="meeting")
    Agent(store, kind, report=_ignore).run("meeting")
    state = _state(store, "meeting")
    assert state.custom_state == {"first": "met", "second": "met"}
    assert [message["content"] for message in store.sessions.get_messages("meeting").messages[1:3]] == [
        '"first"',
        '"second"',
    ]


class _Lines:
    def __init__(self, *lines: Message) -> None:
        self.lines = list(lines)

    def reply(self, history: object) -> Reply:
        return Reply(self.lines.pop(0), {})


# --- Workers that end in the middle ----------------------------------------------------------------


def test_killed_workers_leave_a_session_that_others_end_like_an_undisturbed_one(
    committed_db: CommittedDatabase,
) -> None:
    store = _store_of(committed_db)
    lines: list[str] = []

    def report(line: str, emphasis: Emphasis = "none") -> None:
        lines.append(line)

    killed, undisturbed, waiting = demonstrate_agent(store, committed_db.alias, report=report)
    assert killed.same_outcome(undisturbed)
    assert _shape(killed.messages) == CONVERSATION
    assert killed.state.status is SessionStatus.COMPLETED
    assert waiting.state.status is SessionStatus.PAUSED
    runs = store.sessions.list_runs(killed.state.session_id)
    assert [(run.turn, run.status) for run in runs] == [
        (5, RunStatus.COMPLETED),
        (4, RunStatus.INTERRUPTED),
        (3, RunStatus.INTERRUPTED),
        (2, RunStatus.SUSPENDED_CLIENT_TOOL),
        (1, RunStatus.INTERRUPTED),
    ]
    assert runs[1].completion_reason == "effect:call-book"
    gone = lines.index("  SIGKILL: the worker is dead in the middle of step-2, which is not committed.")
    assert "travel-planner step-1: committed as version 3" in "\n".join(lines[:gone])
    assert "travel-planner step-2: committed" not in "\n".join(lines[:gone])
    assert "staged its changes" in lines[gone - 1]
    paid = lines.index("  SIGKILL: the worker is dead after the payment, whose result is not committed.")
    assert lines[paid - 1].endswith("call-book: the service answers {'charged_eur': 394}")
    assert "Nobody knows whether the effect 'call-book' (book_trip) happened" in "\n".join(lines[paid:])
    assert (killed.charge_count, undisturbed.charge_count, waiting.charge_count) == (1, 1, 0)
    (effect,) = store.sessions.list_effects(killed.state.session_id).items
    assert (effect.state, effect.result, effect.attempt) == ("done", {"charged_eur": 394}, 1)
    assert effect.actors == ["the demo"]


def test_what_a_dead_worker_staged_for_a_call_that_is_not_repeated_is_dropped(
    committed_db: CommittedDatabase,
) -> None:
    store = _store_of(committed_db)
    start_trip(store, "trip", title="Lisbon")
    store.sessions.stage_changes(
        "trip", "step-1", {"tool_call_id": "other", "merge_changes": {"left": "behind"}}
    )
    Agent(store, PLANNER, report=_ignore).run("trip")
    assert "left" not in _state(store, "trip").custom_state


class _WorkerGone(Exception):
    pass


class _EndsAfter:
    """Ends a worker after so many reports, in whichever thread that is."""

    def __init__(self, reports: int) -> None:
        self._allowed = reports
        # Two tools report at once, and this counts without a lock.
        self._seen = itertools.count()

    def __call__(self, event: Event) -> None:
        if next(self._seen) >= self._allowed:
            raise _WorkerGone


def _run_with_a_break(store: Store, session_id: str, *, after_reports: int) -> bool:
    """Run a session by a worker that ends early, and then by one that does not; whether the first one did."""
    try:
        Agent(store, PLANNER, report=_EndsAfter(after_reports)).run(session_id)
    except _WorkerGone:
        agent = Agent(store, PLANNER, report=_ignore)
        agent.run(session_id)
        if _settle_unknown_effects(store, session_id):
            agent.run(session_id)
        return True
    return False


def _settle_unknown_effects(store: Store, session_id: str) -> bool:
    """Settle effects by what the card service says; whether there were any."""
    unknown = store.sessions.list_effects(session_id, states=["unknown"]).items
    for effect in unknown:
        receipts = charges(effect.key)
        result = receipts[0] if receipts else None
        store.sessions.settle_effect(session_id, effect.id, done=bool(receipts), result=result)
    return bool(unknown)


def test_wherever_a_worker_ends_the_session_ends_the_same(committed_db: CommittedDatabase) -> None:
    store = _store_of(committed_db)
    _plan_trip(store, "undisturbed")
    expected = _state(store, "undisturbed")
    messages = store.sessions.get_messages("undisturbed").messages
    breaks = 0
    for after_reports in range(20):
        session_id = f"trip-{after_reports}"
        start_trip(store, session_id, title="Lisbon")
        breaks += _run_with_a_break(store, session_id, after_reports=after_reports)
        answer_approval(store, session_id, approved=True)
        breaks += _run_with_a_break(store, session_id, after_reports=after_reports)
        state = _state(store, session_id)
        assert store.sessions.get_messages(session_id).messages == messages
        assert (state.custom_state, state.output) == (expected.custom_state, expected.output)
        assert state.status is expected.status
        assert len(store.sessions.get_sub_session_refs(session_id)) == 1
        assert _charge_counts(store, session_id) == {"call-book": 1}
        assert store.sessions.get_current_run(session_id) is None
        staged = StagedChange.objects.using(committed_db.alias).filter(session__tenant=committed_db.tenant)
        assert not staged.exists()
    assert breaks == 13 + 6


def test_an_unknown_session_is_named(committed_db: CommittedDatabase) -> None:
    store = _store_of(committed_db)
    with pytest.raises(SessionNotFound):
        answer_approval(store, "unknown", approved=True)
    with pytest.raises(SessionNotFound):
        Agent(store, PLANNER, report=_ignore).run("unknown")
