"""Calls that create something, or find what another caller has just created, made by four callers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import pytest
from django.db import DatabaseError

from helix_store.adapters import SessionAdapter
from helix_store.checkpointers import GraphCheckpointStore, SnapshotCheckpointer
from helix_store.contrib.langgraph import DjangoStore
from helix_store.contrib.openai_agents import RunStateStore
from helix_store.exceptions import HelixStoreError
from helix_store.items import ItemLog
from helix_store.stores import DatabaseBudgetStore, DatabaseStateStore
from helix_store.testing.state_store.samples import message
from helix_store.testing.usage.base import tokens
from tests.databases import CommittedDatabase, fresh_tenant
from tests.faults.writes import Faces
from tests.faults.writes.faces import Write, synchronous
from tests.processes import run_in_threads

_CALLERS: Final = 4
_REPEATS: Final = 3


def _of(kind: type[Any]) -> Callable[[Faces], Any]:
    return lambda faces: kind(faces.alias, tenant=faces.tenant)


_budgets, _graph, _snapshots, _run_states = map(
    _of, (DatabaseBudgetStore, GraphCheckpointStore, SnapshotCheckpointer, RunStateStore)
)


def _adapter(faces: Faces) -> SessionAdapter:
    return SessionAdapter("adapter", using=faces.alias, tenant=faces.tenant)


def _items(faces: Faces, key: str) -> ItemLog:
    return ItemLog(f"{key}-items", using=faces.alias, tenant=faces.tenant)


def _memory(faces: Faces) -> DjangoStore:
    return DjangoStore(using=faces.alias, tenant=faces.tenant)


_CALLS: Final[dict[str, Write]] = {
    "set_budget": lambda faces, key: _budgets(faces).set_budget("cap", scope="tenant", limit_usd=1),
    "set_budget of a known name": lambda faces, key: _budgets(faces).set_budget(
        "known", scope="tree", value=key, limit_usd=1
    ),
    "delete_budget": lambda faces, key: _budgets(faces).delete_budget("known"),
    "create_session": lambda faces, key: faces.store.create_session("new", agent_type="agent"),
    "create_session of a child": lambda faces, key: faces.store.create_session(
        "child", agent_type="agent", parent_session_id=key
    ),
    "branch_session": lambda faces, key: faces.store.branch_session(key, new_session_id="branch"),
    "start_run": lambda faces, key: faces.store.start_run(key, "run", supersede=True),
    "add_sub_session_refs": lambda faces, key: faces.store.add_sub_session_refs(
        key, [{"sub_session_id": "sub", "agent_type": "helper", "status": "active"}]
    ),
    "request_interrupt": lambda faces, key: faces.store.request_interrupt(key),
    "add_pending_tool_calls": lambda faces, key: faces.store.add_pending_tool_calls(
        key, {"call": {"tool_name": "ask"}}
    ),
    "stage_changes": lambda faces, key: faces.store.stage_changes(
        key, "step-1", {"tool_call_id": "call", "merge_changes": {"n": 1}}
    ),
    "post_message with a key": lambda faces, key: faces.store.post_message(key, message("once"), key="once"),
    "acquire": lambda faces, key: faces.locks.acquire("lock"),
    "take_over": lambda faces, key: faces.locks.take_over("lock"),
    "record_entry": lambda faces, key: faces.usage.record_entry(tokens(key, id="entry", total=1)),
    "record_entries": lambda faces, key: faces.usage.record_entries(
        [tokens(key, id="one", total=1), tokens(key, id="two", total=1)]
    ),
    "create_writer": synchronous(lambda faces, key: faces.streams.create_writer("stream", "run", "agent")),
    "ensure": lambda faces, key: _adapter(faces).ensure("adapted"),
    "write": lambda faces, key: _adapter(faces).write("adapted", lambda session: session.key),
    "items: append": lambda faces, key: _items(faces, key).append(["item"], keys=["key"]),
    "items: put": lambda faces, key: _items(faces, key).put("key", 1),
    "graph: create_session": lambda faces, key: _graph(faces).create_session("here", session_id="graph"),
    "snapshots: put": lambda faces, key: _snapshots(faces).put("thread", {"version": 1}),
    "run states: save": lambda faces, key: _run_states(faces).save(key, "{}", state_id="state"),
    "langgraph store: put": lambda faces, key: _memory(faces).put(("memories",), "key", {"n": 1}),
}


def _answered(faces: Faces, call: Write, key: str) -> str:
    try:
        call(faces, key)
    except HelixStoreError as exc:
        return exc.code
    except DatabaseError as exc:
        return f"raw {exc!r}"
    return "done"


@pytest.mark.thorough
def test_a_call_that_creates_something_never_raises_an_error_of_the_database(
    committed_db: CommittedDatabase,
) -> None:
    rounds = [
        (Faces.of_database(committed_db.alias, fresh_tenant()), name)
        for name in _CALLS
        for _ in range(_REPEATS)
    ]
    for faces, _ in rounds:
        faces.store.create_session("key", agent_type="agent")
        _budgets(faces).set_budget("known", scope="tenant", limit_usd=1)
    start = threading.Barrier(_CALLERS)

    def answer_all() -> list[str]:
        answers = []
        for faces, name in rounds:
            start.wait(60)
            answers.append(_answered(faces, _CALLS[name], "key"))
        return answers

    outcomes = run_in_threads(answer_all, [()] * _CALLERS, timeout=300)
    failures = []
    for (_, name), *answers in zip(rounds, *(outcome.unwrap() for outcome in outcomes), strict=True):
        if "done" not in answers or any(answer.startswith("raw") for answer in answers):
            failures.append(f"{name}: {answers}")
    assert not failures, "\n".join(failures)


def test_a_budget_that_four_callers_set_at_once_counts_the_ledger_and_keeps_holds(
    committed_db: CommittedDatabase,
) -> None:
    faces = Faces.of_database(committed_db.alias, committed_db.tenant)
    faces.store.create_session("key", agent_type="agent")
    faces.usage.record_entry(tokens("key", total=7))
    run_in_threads(_answered, [(faces, _CALLS["set_budget"], "key")] * _CALLERS)
    store = DatabaseStateStore(faces.alias, tenant=faces.tenant)
    with store.session("key").turn(estimate_tokens=5) as turn, turn.step():
        set_again = [(faces, _CALLS["set_budget"], "key")] * _CALLERS
        assert {outcome.unwrap() for outcome in run_in_threads(_answered, set_again)} == {"done"}
        status = _budgets(faces).status("cap")
        assert (status.spent_tokens, status.held_tokens) == (7, 5)
