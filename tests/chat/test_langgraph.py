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


def _say(site: Chatting, text: str, message_id: str, **more: Any) -> None:
    message = {"id": message_id, "role": "user", "parts": [{"type": "text", "text": text}]}
    async_to_sync(site.request)("POST", "ai/", {"id": "t", "messages": [message], **more})
    site.drive("t")


def _counting(checkpointer: Any, seen: list[list[str]], *, removes: bool = False) -> Any:
    from langchain_core.messages import AIMessage, RemoveMessage
    from langgraph.graph import START, MessagesState, StateGraph

    def think(state: MessagesState) -> dict[str, Any]:
        messages = state["messages"]
        seen.append([str(message.content) for message in messages])
        removed = [RemoveMessage(id=str(message.id)) for message in messages[:-1]] if removes else []
        return {"messages": [*removed, AIMessage(f"Answer {len(seen)}.")]}

    return StateGraph(MessagesState).add_node(think).add_edge(START, "think").compile(checkpointer)


def _counting_site(chatting: Make, seen: list[list[str]], **options: bool) -> tuple[Chatting, DjangoSaver]:
    def answer(turn: Any, out: Any) -> None:
        chat_answer(_counting(saver, seen, **options))(turn, out)

    site = chatting(answer=answer)
    saver = DjangoSaver(using=site.database.alias, tenant=site.database.tenant)
    return site, saver


@pytest.mark.thorough
def test_a_graph_goes_back_with_its_chat(chatting: Make) -> None:
    seen: list[list[str]] = []
    site, _ = _counting_site(chatting, seen)
    for text, message_id, more, known in (
        ("one", "u1", {}, []),
        ("two", "u2", {}, ["one", "Answer 1."]),
        ("two", "u2", {"trigger": "regenerate-message"}, ["one", "Answer 1."]),
        ("three", "u2", {"messageId": "u2"}, ["one", "Answer 1."]),
        ("four", "u3", {}, ["one", "Answer 1.", "three", "Answer 4."]),
        ("five", "u1", {"messageId": "u1"}, []),
        ("five", "u1", {"trigger": "regenerate-message"}, []),
        ("six", "u4", {}, ["five", "Answer 7."]),
    ):
        _say(site, text, message_id, **more)
        assert seen[-1] == [*known, text]
        assert _said(site) == [*known, text, f"Answer {len(seen)}."]
    assert len(seen) == 8


@pytest.mark.thorough
def test_a_graph_whose_earlier_checkpoints_are_deleted_continues_from_its_newest(chatting: Make) -> None:
    seen: list[list[str]] = []
    site, saver = _counting_site(chatting, seen)
    _say(site, "one", "u1")
    _say(site, "two", "u2")
    saver.prune([site.session("t").id])
    _say(site, "three", "u2", messageId="u2")
    assert seen[-1] == ["one", "Answer 1.", "two", "Answer 2.", "three"]
    assert _said(site) == ["one", "Answer 1.", "three", "Answer 3."]


@pytest.mark.thorough
def test_the_answer_of_a_graph_that_removes_messages_is_stored(chatting: Make) -> None:
    seen: list[list[str]] = []
    site, _ = _counting_site(chatting, seen, removes=True)
    for number in range(4):
        _say(site, f"{number}", f"u{number}")
    assert seen[-1] == ["2", "Answer 3.", "3"]
    assert _said(site) == ["0", "Answer 1.", "1", "Answer 2.", "2", "Answer 3.", "3", "Answer 4."]


def _ending_with_a_call(checkpointer: Any, how: str) -> Any:
    from langchain_core.messages import AIMessage
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.types import interrupt

    def think(state: MessagesState) -> dict[str, Any]:
        asked = str(state["messages"][-1].content)
        calls = [{"id": "c1", "name": "look", "args": {}}] if asked == "look" else []
        return {"messages": [AIMessage(f"To {asked}:", tool_calls=calls)]}

    def look(state: MessagesState) -> dict[str, Any]:
        message: Any = state["messages"][-1]
        if how == "after an interrupt" and message.tool_calls:
            interrupt("Look?")
        return {}

    graph = StateGraph(MessagesState).add_node(think).add_node(look)
    for edge in ((START, "think"), ("think", "look"), ("look", END)):
        graph.add_edge(*edge)
    return graph.compile(checkpointer, interrupt_before=["look"] if how == "at a breakpoint" else None)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["at once", "after an interrupt", "at a breakpoint"])
def test_a_graph_that_ends_with_an_open_call_gets_the_next_message(chatting: Make, how: str) -> None:
    turns: list[str] = []

    def answer(turn: Any, out: Any) -> None:
        turns.append(turn.session.id)
        assert len(turns) < 10, "the driver does not come to an end"
        saver = DjangoSaver(using=site.database.alias, tenant=site.database.tenant)
        chat_answer(_ending_with_a_call(saver, how))(turn, out)

    site = chatting(answer=answer)
    _say(site, "look", "u1")
    for call in async_to_sync(site.json)("GET", "threads/t/")["calls"]:
        async_to_sync(site.json)("POST", f"threads/t/calls/{call['id']}/", {"result": "no"})
        site.drive("t")
    _say(site, "wait", "u2")
    _say(site, "talk", "u3")
    said = [content for content in _said(site) if content not in ("", '"no"')]
    assert said == ["look", "To look:", "wait", "To wait:", "talk", "To talk:"]
