"""Channels that LangGraph stores as deltas, from its version 1.2 on: copies, and what pruning keeps."""

from __future__ import annotations

import operator
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph

from helix_store.contrib.langgraph import DjangoSaver
from helix_store.contrib.langgraph.catalogue import CONVERSATION
from helix_store.engine.database import Database
from helix_store.models import Session
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.frameworks.langgraph.graphs import config_of, put

DeltaChannel: Any = pytest.importorskip("langgraph.channels.delta").DeltaChannel


@pytest.fixture
def saver(committed_db: CommittedDatabase) -> DjangoSaver:
    return DjangoSaver(committed_db.alias, tenant=committed_db.tenant)


class State(TypedDict):
    log: Annotated[list[str], DeltaChannel(operator.iadd, snapshot_frequency=4)]


def _count(saver: DjangoSaver) -> int:
    return len(list(saver.list(config_of("thread"))))


def _graph(checkpointer: Any) -> Any:
    builder = StateGraph(State)
    builder.add_node("say", lambda state: {"log": [f"step {len(state['log'])}"]})
    builder.add_edge(START, "say")
    return builder.compile(checkpointer=checkpointer)


def _run(checkpointer: Any, turns: int) -> Any:
    graph = _graph(checkpointer)
    for turn in range(turns):
        graph.invoke({"log": [f"turn {turn}"]}, config_of("thread"))
    return graph


@pytest.mark.thorough
@for_each("turns", [1, 2, 3, 5, 8])
def test_keep_latest_keeps_the_ancestors_that_a_delta_channel_needs(saver: DjangoSaver, turns: int) -> None:
    graph = _run(saver, turns)
    before = graph.get_state(config_of("thread")).values
    stored = _count(saver)
    saver.prune(["thread"])
    assert graph.get_state(config_of("thread")).values == before
    assert len(before["log"]) == 2 * turns
    if turns == 8:
        assert _count(saver) < stored
    graph.invoke({"log": ["more"]}, config_of("thread"))
    assert len(graph.get_state(config_of("thread")).values["log"]) == 2 * turns + 2


def test_the_history_of_a_delta_channel_is_that_of_the_memory_saver(saver: DjangoSaver) -> None:
    memory = InMemorySaver()
    _run(memory, 6)
    # The same checkpoints and writes in both.
    for found in reversed(list(memory.list(config_of("thread")))):
        parent = found.parent_config or config_of("thread")
        versions = found.checkpoint["channel_versions"]
        saver.put(parent, found.checkpoint, found.metadata, versions)
        for index, (task_id, channel, value) in enumerate(found.pending_writes or []):
            saver.put_writes(found.config, [(channel, value)], f"{index:03}{task_id}")
    for found in memory.list(config_of("thread")):
        expected = memory.get_delta_channel_history(config=found.config, channels=["log", "absent"])
        history = saver.get_delta_channel_history(config=found.config, channels=["log", "absent"])
        assert history.keys() == expected.keys()
        for channel, entry in expected.items():
            assert history[channel].get("seed") == entry.get("seed")
            assert [write[1:] for write in history[channel]["writes"]] == [w[1:] for w in entry["writes"]]


def test_a_long_history_is_read_in_pages(saver: DjangoSaver) -> None:
    configs = [config_of("thread")]
    for step in range(150):
        configs.append(put(saver, configs[-1], new={"log": f"{step:04}"}, step=step))
        saver.put_writes(configs[-1], [("log", step)], "task")
    history = saver.get_delta_channel_history(config=configs[-1], channels=["log"])
    assert [value for _, _, value in history["log"]["writes"]] == list(range(149))
    assert "seed" not in history["log"]
    assert saver.get_delta_channel_history(config=config_of("none"), channels=["log"]) == {
        "log": {"writes": []}
    }


def test_a_copy_of_a_delta_thread_has_its_value(saver: DjangoSaver) -> None:
    graph = _run(saver, 3)
    expected = graph.get_state(config_of("thread")).values
    saver.copy_thread("thread", "copy")
    assert graph.get_state(config_of("copy")).values == expected


@pytest.mark.thorough
@for_each("text", ["x", "x" * 300, "x" * 70_000])
def test_the_conversation_shows_snapshots_and_says_where_there_are_deltas(
    committed_db: CommittedDatabase, saver: DjangoSaver, text: str
) -> None:
    class Chat(TypedDict):
        messages: Annotated[list[str], DeltaChannel(operator.iadd, snapshot_frequency=4)]

    builder = StateGraph(Chat)
    builder.add_node("say", lambda state: {"messages": [f"answer {len(state['messages'])}"]})
    builder.add_edge(START, "say")
    graph = builder.compile(checkpointer=saver)

    def said() -> list[str]:
        graph.invoke({"messages": [text]}, config_of("thread"))
        db = Database(committed_db.alias, committed_db.tenant)
        key = db.query(lambda: Session.objects.using(db.alias).get(tenant=db.tenant, session_id="thread").pk)
        page = CONVERSATION.page(db, key, first=None, limit=10)
        assert page is not None
        assert page.total == len(page.messages)
        return [part.text for message in page.messages for part in message.parts or ()]

    (note,) = said()
    assert "as deltas" in note
    assert said() == [text, "answer 1", text, "answer 3"]
    (note,) = said()
    assert "as deltas" in note
