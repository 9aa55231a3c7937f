"""`UsageRecorder` records each call of a model or a tool once, in the session of the thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.tools import ToolException, tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import interrupt

from helix_store.contrib.langgraph import DjangoSaver, UsageRecorder
from helix_store.core.usage import TokenCounts, UsageEntry
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from tests.cells import for_each
from tests.databases import CommittedDatabase

USAGE: Any = {
    "input_tokens": 120,
    "output_tokens": 30,
    "total_tokens": 150,
    "input_token_details": {"cache_read": 100, "cache_creation": 10, "audio": 1},
    "output_token_details": {"reasoning": 20},
}
MEASURED = TokenCounts(
    prompt=120, completion=30, reasoning=20, cached=100, cache_write=10, audio_prompt=1, total=150
)
Ask = Callable[[Any, dict[str, Any]], Any]


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    if city == "Atlantis":
        raise LookupError(city)
    if city == "Avalon":
        raise ToolException("The answer of the tool, as its message says.")
    return "Sunny."


weather.handle_tool_error = True


@tool
def approval() -> str:
    """Ask a person."""
    return str(interrupt("May I?"))


def said(text: str, *calls: tuple[str, dict[str, Any]], **more: Any) -> AIMessage:
    fields: Any = {"usage_metadata": USAGE, "response_metadata": {"model_name": "fast-2026"}, **more}
    wanted = [
        {"name": name, "args": arguments, "id": f"call-{number}"}
        for number, (name, arguments) in enumerate(calls)
    ]
    return AIMessage(content=text, tool_calls=wanted, **fields)


def agent(database: CommittedDatabase, *messages: AIMessage, **model: Any) -> Any:
    """A graph whose model says the messages, and whose tools answer to the first one."""
    chat = GenericFakeChatModel(messages=iter(messages), **model)

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [chat.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_edge(START, "think")
    if messages[0].tool_calls:
        graph.add_node("act", ToolNode([weather, approval], handle_tool_errors=True))
        graph.add_edge("think", "act")
    return graph.compile(checkpointer=DjangoSaver(database.alias, tenant=database.tenant))


def config(database: CommittedDatabase, **metadata: Any) -> Any:
    recorder = UsageRecorder(database.alias, tenant=database.tenant)
    return {"callbacks": [recorder], "configurable": {"thread_id": "trip"}, "metadata": metadata}


def ask(graph: Any, how: dict[str, Any]) -> Any:
    return graph.invoke({"messages": [("user", "Hello")]}, how)


def aask(graph: Any, how: dict[str, Any]) -> Any:
    return asyncio.run(graph.ainvoke({"messages": [("user", "Hello")]}, how))


def entries(database: CommittedDatabase, kinds: str | None = None) -> list[UsageEntry]:
    return DatabaseUsageStore(database.alias, tenant=database.tenant).get_entries("trip", kinds=kinds)


@pytest.mark.parametrize("call", [ask, aask])
def test_a_response_is_recorded_with_the_counts_of_its_message(
    committed_db: CommittedDatabase, call: Ask
) -> None:
    call(agent(committed_db, said("Hello.")), config(committed_db, user_id="ada"))
    (entry,) = entries(committed_db)
    assert entry.tokens == MEASURED
    assert (entry.model, entry.source.name, entry.step_count) == ("fast-2026", "think", 1)
    assert entry.duration_ms is not None
    page = DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant).query_usage(user_id="ada")
    assert [found.id for found in page.entries] == [entry.id]


@pytest.mark.thorough
@for_each("call", [ask, aask])
@for_each(("city", "succeeds"), [("Lisbon", True), ("Atlantis", False), ("Avalon", False)])
def test_a_tool_is_recorded_with_its_success(
    committed_db: CommittedDatabase, call: Ask, city: str, succeeds: bool
) -> None:
    call(agent(committed_db, said("", ("weather", {"city": city}))), config(committed_db))
    (entry,) = entries(committed_db, "tool")
    assert (entry.tool_name, entry.success, entry.source.name) == ("weather", succeeds, "act")
    assert entry.duration_ms is not None


def test_a_tool_that_waits_for_a_person_is_not_recorded(committed_db: CommittedDatabase) -> None:
    waiting = ask(agent(committed_db, said("", ("approval", {}))), config(committed_db))
    assert waiting["__interrupt__"]
    assert [entry.kind for entry in entries(committed_db)] == ["tokens"]


def test_each_call_of_a_thread_is_recorded(committed_db: CommittedDatabase) -> None:
    graph, how = agent(committed_db, said("One."), said("Two.")), config(committed_db)
    for _ in range(2):
        ask(graph, how)
    rollup = DatabaseUsageStore(committed_db.alias, tenant=committed_db.tenant).get_rollup("trip")
    assert rollup is not None
    assert (rollup.entry_count, rollup.tokens_by_model) == (2, {"fast-2026": MEASURED + MEASURED})


def test_a_call_that_is_told_twice_is_recorded_once(committed_db: CommittedDatabase) -> None:
    recorder = UsageRecorder(committed_db.alias, tenant=committed_db.tenant)
    run_id = uuid4()
    response = LLMResult(generations=[[ChatGeneration(message=said("Hello."))]])
    for _ in range(2):
        recorder.on_chat_model_start({}, [], run_id=run_id, metadata={"thread_id": "trip"})
        recorder.on_llm_end(response, run_id=run_id)
    assert len(entries(committed_db)) == 1


def test_the_first_response_creates_the_session_as_the_saver_does(committed_db: CommittedDatabase) -> None:
    model = GenericFakeChatModel(messages=iter([said("Hello.")]))
    metadata = {"thread_id": "trip", "user_id": "ada", "title": "To Kyoto"}
    model.invoke("Hello", config(committed_db) | {"metadata": metadata})
    state = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant).load_state("trip")
    assert state is not None
    assert (state.agent_type, state.user_id, state.title) == ("langgraph", "ada", "To Kyoto")
    assert len(entries(committed_db)) == 1


def test_a_response_from_the_cache_is_not_recorded_again(committed_db: CommittedDatabase) -> None:
    cache = InMemoryCache()
    model = GenericFakeChatModel(messages=iter([said("Hello.")]), cache=cache)
    how: Any = {**config(committed_db), "metadata": {"thread_id": "trip"}}
    assert [model.invoke("Hello", how).content for _ in range(2)] == ["Hello.", "Hello."]
    assert len(entries(committed_db)) == 1


@for_each(
    ("response", "model"),
    [({"model": "claude"}, "claude"), ({}, "genericfakechat"), ({"model_name": ""}, None)],
)
def test_the_model_is_that_of_the_response_or_of_the_request(
    committed_db: CommittedDatabase, response: dict[str, Any], model: str | None
) -> None:
    recorder = UsageRecorder(committed_db.alias, tenant=committed_db.tenant)
    run_id = uuid4()
    about = {"thread_id": "trip", **({"ls_model_name": model} if model else {})}
    recorder.on_chat_model_start({}, [], run_id=run_id, metadata=about)
    message = said("Hello.", response_metadata=response)
    recorder.on_llm_end(LLMResult(generations=[[ChatGeneration(message=message)]]), run_id=run_id)
    assert [entry.model for entry in entries(committed_db)] == [model or "unknown"]


@pytest.mark.parametrize("call", [ask, aask])
def test_an_error_of_the_ledger_does_not_stop_the_agent(
    committed_db: CommittedDatabase, call: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    impossible = {**USAGE, "input_tokens": -1}
    graph = agent(committed_db, said("Hello.", usage_metadata=impossible))
    assert call(graph, config(committed_db))["messages"][-1].content == "Hello."
    assert entries(committed_db) == []
    assert "UsageRecorder.on_llm_end" in caplog.text
    assert "tokens/prompt" in caplog.text


@pytest.mark.parametrize("usage", [None, USAGE])
def test_a_call_without_usage_or_without_a_thread_is_not_recorded(
    committed_db: CommittedDatabase, usage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = GenericFakeChatModel(messages=iter([said("Hello.", usage_metadata=usage)]))
    metadata = {"thread_id": "trip"} if usage is None else {}
    how: Any = {**config(committed_db), "configurable": {}, "metadata": metadata}
    assert model.invoke("Hello", how).content == "Hello."
    sessions = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    assert not sessions.exists()
    assert caplog.text == ""


def test_a_call_that_fails_leaves_nothing_behind(committed_db: CommittedDatabase) -> None:
    graph, how = agent(committed_db, said("Hello.")), config(committed_db)
    ask(graph, how)
    with pytest.raises(RuntimeError):
        ask(graph, how)
    (recorder,) = how["callbacks"]
    assert recorder._calls == {}
    assert len(entries(committed_db)) == 1
