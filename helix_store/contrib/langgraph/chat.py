"""A graph as the agent of a chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage
from langgraph.types import Command

__all__ = ["chat_answer"]

_STORED: Final = "langgraph_messages"
"""The key of the custom state with the number of the graph's messages that the chat has stored."""


def chat_answer(graph: Any, *, config: Mapping[str, Any] | None = None) -> Callable[[Any, Any], None]:
    """Return the ``answer`` of a `helix_store.contrib.chat.Chat` that drives a compiled graph.

    The graph's state has ``messages``, and its checkpointer is a `DjangoSaver` of the chat's database and
    tenant that claims no threads. The thread of the graph is the session of the chat. Texts and tool calls
    are streamed; an ``interrupt`` waits for a result from the client, which the graph gets as its value. A
    run that was cut off goes on from its last checkpoint. ``config`` is added to the config of each run.
    """

    def answer(turn: Any, out: Any) -> None:
        given = {**(config or {})}
        given["configurable"] = {**given.get("configurable", {}), "thread_id": turn.session.id}
        while turn.is_active:
            _take_step(graph, given, turn, out)

    return answer


def _take_step(graph: Any, config: Any, turn: Any, out: Any) -> None:
    results = dict(turn.results)
    for part in _run(graph, config, turn, results):
        _stream(part, out)
    state = graph.get_state(config)
    messages: Sequence[BaseMessage] = state.values.get("messages", ())
    with turn.step() as step:
        for call_id, result in results.items():
            content = json.dumps(_value(result), ensure_ascii=False)
            step.say({"role": "tool", "tool_call_id": call_id, "content": content})
        new = messages[step.state.custom_state.get(_STORED, 0) :]
        said = [stored for message in new if (stored := _stored(message)) is not None]
        step.state.custom_state[_STORED] = len(messages)
        asked = {each.id: {"tool_name": "interrupt", "input": each.value} for each in state.interrupts}
        if asked and not any(message["role"] == "assistant" for message in said):
            # A call belongs to a message, so that a client can show it.
            said.append({"role": "assistant", "content": ""})
        step.say(*said)
        if asked:
            step.wait_for(asked)
        else:
            step.end_turn()


def _run(graph: Any, config: Any, turn: Any, results: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what the graph says about what is new: messages, answers, or a run that was cut off."""
    before = graph.get_state(config)
    known = {message.id for message in before.values.get("messages", ())}
    open_ids = {each.id for each in before.interrupts}
    answers = {call_id: _value(result) for call_id, result in results.items() if call_id in open_ids}
    new = [message for message in _unanswered(turn.session.messages()) if message["id"] not in known]
    given: Any = None
    if answers:
        given = Command(resume=answers)
    elif new:
        given = {
            "messages": [
                {"role": "user", "content": message["content"], "id": message["id"]} for message in new
            ]
        }
    elif not before.next:
        # A worker has died between the end of the run and its step.
        return
    for part, _ in graph.stream(given, config, stream_mode="messages"):
        yield part


def _unanswered(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of users since the last answer, oldest first."""
    found: list[dict[str, Any]] = []
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if message.get("role") == "assistant":
            break
        if message.get("role") == "user":
            found.append({**message, "id": message.get("id") or f"message-{index + 1}"})
    return found[::-1]


def _value(result: Mapping[str, Any]) -> Any:
    if "approved" in result:
        return {key: result[key] for key in ("approved", "reason", "input") if key in result}
    return result.get("result", result.get("error"))


def _stream(part: Any, out: Any) -> None:
    if isinstance(part, AIMessageChunk | AIMessage):
        if text := _text(part):
            out.text(text)
        for chunk in getattr(part, "tool_call_chunks", ()):
            if chunk.get("id") and chunk.get("name"):
                out.tool_input(chunk["id"], chunk["name"], chunk.get("args") or "")
    elif isinstance(part, ToolMessage):
        out.tool_result(part.tool_call_id, _text(part))


def _stored(message: BaseMessage) -> dict[str, Any] | None:
    """Return a message of the graph in the chat-completions form; ``None`` for those that are not said."""
    if isinstance(message, ToolMessage):
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": _text(message)}
    if not isinstance(message, AIMessage):
        return None
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["args"], ensure_ascii=False)},
        }
        for call in message.tool_calls
    ]
    stored: dict[str, Any] = {"role": "assistant", "content": _text(message)}
    return {**stored, "tool_calls": calls} if calls else stored


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = [part if isinstance(part, str) else part.get("text", "") for part in message.content]
    return "".join(part for part in parts if isinstance(part, str))
