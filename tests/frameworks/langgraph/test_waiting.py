"""A thread whose graph waits in an interrupt is a session that waits; it is not, once the graph goes on."""

from __future__ import annotations

from typing import Any, TypedDict

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext, override_settings
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from helix_store import Store
from helix_store.contrib.langgraph import DjangoSaver
from helix_store.models import Session
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.frameworks.langgraph.graphs import config_of


class State(TypedDict, total=False):
    first: str
    second: str


@pytest.fixture(params=["fast", "portable"])
def saver(request: pytest.FixtureRequest, committed_db: CommittedDatabase) -> Any:
    with override_settings(HELIX_STORE={"FAST_PATHS": request.param == "fast"}):
        yield DjangoSaver(committed_db.alias, tenant=committed_db.tenant)


def _waiting(database: CommittedDatabase) -> list[tuple[str, str | None]]:
    store = Store(database.alias, tenant=database.tenant)
    return [(each.session_id, each.detail) for each in store.find_stuck(conditions=["waiting"])]


def _graph(saver: DjangoSaver) -> Any:
    builder = StateGraph(State)
    builder.add_node("first", lambda state: {"first": interrupt("first?")})
    builder.add_node("second", lambda state: {"second": interrupt("second?")})
    builder.add_edge(START, "first")
    builder.add_edge("first", "second")
    builder.add_edge("second", END)
    return builder.compile(checkpointer=saver)


@for_each("durability", ["sync", "async", "exit"])
def test_an_interrupt_waits_until_the_graph_goes_on(
    committed_db: CommittedDatabase, saver: DjangoSaver, durability: Any
) -> None:
    graph, config = _graph(saver), config_of(f"thread {durability}")
    waits = [(config["configurable"]["thread_id"], "interrupt")]
    graph.invoke({}, config, durability=durability)
    assert _waiting(committed_db) == waits
    graph.invoke(Command(resume="yes"), config, durability=durability)
    assert _waiting(committed_db) == waits
    result = graph.invoke(Command(resume="no"), config, durability=durability)
    assert (result["first"], result["second"]) == ("yes", "no")
    assert _waiting(committed_db) == []


def _put(saver: DjangoSaver, thread: str, checkpoint_id: str, namespace: str = "") -> None:
    checkpoint: Any = {**empty_checkpoint(), "id": checkpoint_id}
    saver.put(config_of(thread, namespace=namespace), checkpoint, {"source": "loop", "step": 1}, {})


def test_a_checkpoint_that_is_stored_after_its_interrupt_keeps_it(
    committed_db: CommittedDatabase, saver: DjangoSaver
) -> None:
    saver.put_writes(config_of("thread", "1"), [("__interrupt__", "first?")], "task")
    assert _waiting(committed_db) == [("thread", "interrupt")]
    _put(saver, "thread", "1")
    _put(saver, "thread", "9", namespace="subgraph:1")
    saver.put_writes(config_of("thread", "1"), [("channel", 1)], "another task")
    assert _waiting(committed_db) == [("thread", "interrupt")]
    _put(saver, "thread", "2")
    assert _waiting(committed_db) == []


def test_a_late_resume_does_not_hide_the_next_interrupt(
    committed_db: CommittedDatabase, saver: DjangoSaver
) -> None:
    saver.put_writes(config_of("thread", "1"), [("__interrupt__", "first?")], "task")
    saver.put_writes(config_of("thread", "2"), [("__interrupt__", "second?")], "task")
    saver.put_writes(config_of("thread", "1"), [("__resume__", "yes")], "resume")
    _put(saver, "thread", "2")
    assert _waiting(committed_db) == [("thread", "interrupt")]


def test_a_waiting_thread_costs_no_statement(committed_db: CommittedDatabase, saver: DjangoSaver) -> None:
    _put(saver, "other", "1")
    _put(saver, "thread", "1")
    counts = []
    for thread, channel in (("other", "__error__"), ("thread", "__interrupt__")):
        with CaptureQueriesContext(connections[committed_db.alias]) as queries:
            saver.put_writes(config_of(thread, "1"), [(channel, "text")], "task")
        counts.append(len(queries))
    assert counts[0] == counts[1]
    assert (
        Session.objects.using(committed_db.alias)
        .get(tenant=committed_db.tenant, session_id="thread")
        .waiting_kind
    )


def test_deleting_a_thread_ends_its_wait(committed_db: CommittedDatabase, saver: DjangoSaver) -> None:
    Store(committed_db.alias, tenant=committed_db.tenant).new_session("thread", agent_type="own")
    saver.put_writes(config_of("thread", "1"), [("__interrupt__", "first?")], "task")
    assert _waiting(committed_db) == [("thread", "interrupt")]
    saver.delete_thread("thread")
    assert _waiting(committed_db) == []
