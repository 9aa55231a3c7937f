"""A LangGraph graph as the agent of a chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync

from helix_store.contrib.langgraph import DjangoSaver, chat_answer
from tests.chat.conftest import Chatting

pytest.importorskip("langgraph")

Make = Callable[..., Chatting]


def _graph(checkpointer: Any, calls: list[str]) -> Any:
    from langchain_core.messages import AIMessage, ToolMessage
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.types import interrupt

    def think(state: MessagesState) -> dict[str, Any]:
        text = str(state["messages"][-1].content)
        calls.append(text)
        if text == "fail" and calls.count("fail") == 1:
            raise ConnectionError("no network")
        call = {"id": f"look-{len(calls)}", "name": "look", "args": {"q": text}}
        return {"messages": [AIMessage(f"I look up {text}.", tool_calls=[call])]}

    def look(state: MessagesState) -> dict[str, Any]:
        message: Any = state["messages"][-1]
        (call,) = message.tool_calls
        return {"messages": [ToolMessage("found", tool_call_id=call["id"])]}

    def decide(state: MessagesState) -> dict[str, Any]:
        asked = state["messages"][-3].content == "book"
        decision = interrupt({"question": "Book it?"}) if asked else "nothing"
        return {"messages": [AIMessage(f"Decided: {decision}.")]}

    graph = StateGraph(MessagesState)
    for name, node in (("think", think), ("look", look), ("decide", decide)):
        graph.add_node(name, node)
    for edge in ((START, "think"), ("think", "look"), ("look", "decide"), ("decide", END)):
        graph.add_edge(*edge)
    return graph.compile(checkpointer=checkpointer)


def _site(chatting: Make, calls: list[str]) -> Chatting:
    def answer(turn: Any, out: Any) -> None:
        saver = DjangoSaver(using=site.database.alias, tenant=site.database.tenant)
        chat_answer(_graph(saver, calls))(turn, out)

    site = chatting(answer=answer)
    return site


def _said(site: Chatting) -> list[str]:
    return [each["content"] for each in site.session("t").messages()]


def test_a_graph_answers_and_remembers(chatting: Make) -> None:
    calls: list[str] = []
    site = _site(chatting, calls)
    for number, wish in enumerate(("trains", "planes")):
        async_to_sync(site.post)("t", f"u{number}", wish)
        assert site.drive("t") is True
    assert _said(site) == [
        *("trains", "I look up trains.", "found", "Decided: nothing."),
        *("planes", "I look up planes.", "found", "Decided: nothing."),
    ]
    thread = async_to_sync(site.json)("GET", "threads/t/")
    assert thread["messages"][1]["toolCalls"][0]["function"]["name"] == "look"


def test_an_interrupt_waits_for_the_client(chatting: Make) -> None:
    calls: list[str] = []
    site = _site(chatting, calls)
    async_to_sync(site.post)("t", "u1", "book")
    site.drive("t")
    thread = async_to_sync(site.json)("GET", "threads/t/")
    (call,) = thread["calls"]
    assert (call["name"], call["input"]) == ("interrupt", {"question": "Book it?"})
    async_to_sync(site.json)("POST", f"threads/t/calls/{call['id']}/", {"result": "yes"})
    site.drive("t")
    assert _said(site)[-2:] == ['"yes"', "Decided: yes."]
    assert calls == ["book"]


def test_a_run_that_failed_goes_on_with_the_next_message(chatting: Make) -> None:
    calls: list[str] = []
    site = _site(chatting, calls)
    async_to_sync(site.post)("t", "u1", "fail")
    site.drive("t")
    async_to_sync(site.post)("t", "u2", "trains")
    site.drive("t")
    assert _said(site) == ["fail", "trains", "I look up trains.", "found", "Decided: nothing."]
