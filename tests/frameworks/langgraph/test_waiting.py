"""A thread whose graph waits in an interrupt is a session that waits; it is not, once the graph goes on."""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import Annotated, Any, TypedDict

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext, override_settings
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Interrupt, interrupt

from helix_store import Store
from helix_store.contrib.langgraph import DjangoSaver
from helix_store.models import Session
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.frameworks.langgraph.graphs import config_of
from tests.frameworks.waiting import asked, waiting


class State(TypedDict, total=False):
    first: str
    second: str


@pytest.fixture(params=["fast", "portable"])
def saver(request: pytest.FixtureRequest, committed_db: CommittedDatabase) -> Any:
    with override_settings(HELIX_STORE={"FAST_PATHS": request.param == "fast"}):
        yield DjangoSaver(committed_db.alias, tenant=committed_db.tenant)


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
    assert waiting(committed_db) == waits
    graph.invoke(Command(resume="yes"), config, durability=durability)
    assert waiting(committed_db) == waits
    result = graph.invoke(Command(resume="no"), config, durability=durability)
    assert (result["first"], result["second"]) == ("yes", "no")
    assert waiting(committed_db) == []


def _put(saver: DjangoSaver, thread: str, checkpoint_id: str, namespace: str = "") -> None:
    checkpoint: Any = {**empty_checkpoint(), "id": checkpoint_id}
    saver.put(config_of(thread, namespace=namespace), checkpoint, {"source": "loop", "step": 1}, {})


def test_a_checkpoint_that_is_stored_after_its_interrupt_keeps_it(
    committed_db: CommittedDatabase, saver: DjangoSaver
) -> None:
    saver.put_writes(config_of("thread", "1"), [("__interrupt__", "first?")], "task")
    assert waiting(committed_db) == [("thread", "interrupt")]
    _put(saver, "thread", "1")
    _put(saver, "thread", "9", namespace="subgraph:1")
    saver.put_writes(config_of("thread", "1"), [("channel", 1)], "another task")
    assert waiting(committed_db) == [("thread", "interrupt")]
    _put(saver, "thread", "2")
    assert waiting(committed_db) == []


def test_a_late_resume_does_not_hide_the_next_interrupt(
    committed_db: CommittedDatabase, saver: DjangoSaver
) -> None:
    saver.put_writes(config_of("thread", "1"), [("__interrupt__", "first?")], "task")
    saver.put_writes(config_of("thread", "2"), [("__interrupt__", "second?")], "task")
    saver.put_writes(config_of("thread", "1"), [("__resume__", "yes")], "resume")
    _put(saver, "thread", "2")
    assert waiting(committed_db) == [("thread", "interrupt")]


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
    assert waiting(committed_db) == [("thread", "interrupt")]
    saver.delete_thread("thread")
    assert waiting(committed_db) == []


# --- The signal ----------------------------------------------------------------------------------------


class Answers(TypedDict, total=False):
    answers: Annotated[list[str], operator.add]


def _compiled(saver: DjangoSaver, *nodes: Any, checkpointer: Any = None) -> Any:
    """Return a graph whose nodes all run at the same time."""
    builder = StateGraph(Answers)
    for number, node in enumerate(nodes):
        builder.add_node(f"node {number}", node)
        builder.add_edge(START, f"node {number}")
        builder.add_edge(f"node {number}", END)
    return builder.compile(checkpointer=saver if checkpointer is None else checkpointer)


def _asking(*questions: str) -> Any:
    return lambda state: {"answers": [interrupt(question) for question in questions]}


def _ids(result: Any) -> list[str]:
    return [each.id for each in result["__interrupt__"]]


@for_each("is_subgraph", [False, True])
def test_each_question_of_a_node_is_told_once(
    committed_db: CommittedDatabase, saver: DjangoSaver, is_subgraph: bool
) -> None:
    node = _asking("name?", "age?")
    graph = _compiled(saver, _compiled(saver, node, checkpointer=True) if is_subgraph else node)
    config = config_of("thread")
    with asked(committed_db.tenant) as told:
        (first,) = _ids(graph.invoke({}, config))
        assert told == [("thread", [first], "thread")]
        (second,) = _ids(graph.invoke(Command(resume="Ada"), config))
        assert told[1:] == [("thread", [second], "thread")]
        assert graph.invoke(Command(resume="36"), config)["answers"] == ["Ada", "36"]
        assert len(told) == 2
        assert waiting(committed_db) == []


def test_a_question_that_is_asked_again_is_told_again(
    committed_db: CommittedDatabase, saver: DjangoSaver
) -> None:
    graph, config = _compiled(saver, _asking("age?", "age?")), config_of("thread")
    with asked(committed_db.tenant) as told:
        graph.invoke({}, config)
        graph.invoke(Command(resume="many"), config)
        assert [session_id for session_id, _, _ in told] == ["thread", "thread"]


def test_an_answer_does_not_tell_again_what_else_is_open(
    committed_db: CommittedDatabase, saver: DjangoSaver
) -> None:
    graph, config = _compiled(saver, _asking("name?"), _asking("age?")), config_of("thread")
    with asked(committed_db.tenant) as told:
        names = _ids(graph.invoke({}, config))
        assert sorted(name for _, opened, _ in told for name in opened) == sorted(names)
        count = len(told)
        assert _ids(graph.invoke(Command(resume={names[0]: "Ada"}), config)) == names[1:]
        assert len(told) == count
        assert waiting(committed_db) == [("thread", "interrupt")]
        graph.invoke(Command(resume={names[1]: "36"}), config)
        assert len(told) == count


def test_a_question_whose_commit_is_rolled_back_is_not_told(
    committed_db: CommittedDatabase, saver: DjangoSaver
) -> None:
    _put(saver, "thread", "1")

    def ask() -> None:
        writes = [("__interrupt__", (Interrupt("name?", id="one"),))]
        saver.put_writes(config_of("thread", "1"), writes, "task")

    with asked(committed_db.tenant) as told:
        with suppress(ZeroDivisionError), transaction.atomic(using=committed_db.alias):
            ask()
            raise ZeroDivisionError
        assert told == []
        with transaction.atomic(using=committed_db.alias):
            ask()
            assert told == []
        assert told == [("thread", ["one"], "thread")]
