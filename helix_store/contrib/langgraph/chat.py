"""A graph as the agent of a chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage
from langgraph.types import Command

from helix_store.contrib.chat.stored import OWN, without_own_keys
from helix_store.sessions.messages import has_open_calls

__all__ = ["chat_answer"]

_STORED: Final = "langgraph_messages"
"""The key of the custom state with the number of the graph's messages that the chat has stored."""
_CHECKPOINT: Final = "langgraph_checkpoint"
"""The key of the custom state with the graph's checkpoint whose messages the chat has stored."""


def chat_answer(graph: Any, *, config: Mapping[str, Any] | None = None) -> Callable[[Any, Any], None]:
    """Return the ``answer`` of a `helix_store.contrib.chat.Chat` that drives a compiled graph.

    The graph's state has ``messages``, and its checkpointer is a `DjangoSaver` of the chat's database and
    tenant that claims no threads. The thread of the graph is the session of the chat. Texts and tool calls
    are streamed; an ``interrupt`` waits for a result from the client, which the graph gets as its value. A
    run that was cut off goes on from its last checkpoint. If the chat is rewound, because a message is edited
    or an answer is made anew, the graph goes on from its checkpoint before that message. ``config`` is added
    to the config of each run.
    """

    def answer(turn: Any, out: Any) -> None:
        given = {**(config or {})}
        given["configurable"] = {**given.get("configurable", {}), "thread_id": turn.session.id}
        while turn.is_active:
            _take_step(graph, given, turn, out)

    return answer


def _take_step(graph: Any, config: Any, turn: Any, out: Any) -> None:
    results = dict(turn.results)
    begin = _begin(graph, config, turn)
    for part in _run(graph, begin, results):
        _stream(part, out)
    state = graph.get_state(config)
    messages: Sequence[BaseMessage] = state.values.get("messages", ())
    with turn.step() as step:
        for call_id, result in results.items():
            content = json.dumps(_value(result), ensure_ascii=False)
            step.say({"role": "tool", "tool_call_id": call_id, "content": content})
        new = [message for index, message in enumerate(messages) if not begin.has_stored(message, index)]
        said = [stored for message in new if (stored := _stored(message)) is not None]
        step.state.custom_state[_STORED] = len(messages)
        step.state.custom_state[_CHECKPOINT] = _checkpoint_id(state.config)
        asked = {each.id: {"tool_name": "interrupt", "input": each.value} for each in state.interrupts}
        if asked and not any(message["role"] == "assistant" for message in said):
            # A call belongs to a message, so that a client can show it.
            said.append({"role": "assistant", "content": ""})
        step.say(*said)
        if asked:
            step.wait_for(asked)
        else:
            if not state.next and _has_open_calls(messages):
                # The graph has ended. The chat would wait for results, and receive no message until then.
                step.say({"role": "assistant", "content": ""})
            step.end_turn()


# --- Where a run begins ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Begin:
    """The checkpoint from which the graph continues, and what the chat has stored of its messages."""

    config: Any
    state: Any
    new: Sequence[Mapping[str, Any]]
    """The messages of users that the graph has not seen."""
    stored_ids: Set[str | None] | None
    """``None`` if the checkpoint at which the chat has stored all messages does not exist."""
    stored_count: int

    def has_stored(self, message: BaseMessage, index: int) -> bool:
        # A graph may remove messages, for example those that it has summarized, so numbers are not enough.
        if self.stored_ids is None or message.id is None:
            return index < self.stored_count
        return message.id in self.stored_ids


def _begin(graph: Any, config: Any, turn: Any) -> _Begin:
    custom_state = turn.state.custom_state
    stored_at = custom_state.get(_CHECKPOINT)
    newest = graph.get_state(config)
    stored = newest
    if stored_at != _checkpoint_id(newest.config):
        stored = None if stored_at is None else _state_at(graph, config, stored_at)
    asked = _unanswered(turn.session.messages())
    known = _ids_of(newest)
    state, its_config = newest, config
    if stored is not newest and any(each["is_anew"] and each["id"] not in known for each in asked):
        # The chat has been rewound, and the newest checkpoint contains what was taken back.
        before = stored if stored_at is not None else _first_state(graph, config)
        if before is None:
            stored = newest
        else:
            state, its_config = before, _config_at(config, _checkpoint_id(before.config))
            known = _ids_of(before)
    new = [each for each in asked if each["id"] not in known]
    stored_ids = None if stored is None else _ids_of(stored)
    return _Begin(its_config, state, new, stored_ids, custom_state.get(_STORED, 0))


def _ids_of(state: Any) -> Set[str | None]:
    return {message.id for message in state.values.get("messages", ())}


def _checkpoint_id(config: Any) -> str | None:
    found: str | None = config["configurable"].get("checkpoint_id")
    return found


def _config_at(config: Any, checkpoint_id: str | None) -> Any:
    return {**config, "configurable": {**config["configurable"], "checkpoint_id": checkpoint_id}}


def _state_at(graph: Any, config: Any, checkpoint_id: str) -> Any:
    """Return the state at a checkpoint, or ``None`` if it is no longer stored."""
    state = graph.get_state(_config_at(config, checkpoint_id))
    return None if state.metadata is None else state


def _first_state(graph: Any, config: Any) -> Any:
    """Return the state before the first message, or ``None`` if its checkpoint is not stored."""
    return next(iter(graph.get_state_history(config, filter={"step": -1}, limit=1)), None)


def _run(graph: Any, begin: _Begin, results: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what the graph says about what is new: messages, answers, or a run that was cut off."""
    open_ids = {each.id for each in begin.state.interrupts}
    answers = {call_id: _value(result) for call_id, result in results.items() if call_id in open_ids}
    given: Any = None
    if answers:
        given = Command(resume=answers)
    elif begin.new:
        given = {
            "messages": [
                {"role": "user", "content": message["content"], "id": message["id"]} for message in begin.new
            ]
        }
    elif not begin.state.next:
        # A worker has died between the end of the run and its step.
        return
    for part, _ in graph.stream(given, begin.config, stream_mode="messages"):
        yield part


def _unanswered(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of users since the last answer, oldest first, with their ids in the graph.

    A message that was edited, or whose answer is made anew, keeps its id in the chat.
    """
    found: list[dict[str, Any]] = []
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if message.get("role") == "assistant":
            break
        if message.get("role") == "user":
            anew = message.get(OWN, {}).get("answer")
            message_id = anew or message.get("id") or f"message-{index + 1}"
            found.append({**without_own_keys(message), "id": message_id, "is_anew": anew is not None})
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


def _has_open_calls(messages: Sequence[BaseMessage]) -> bool:
    return has_open_calls(_stored(message) or {"role": message.type} for message in reversed(messages))


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = [part if isinstance(part, str) else part.get("text", "") for part in message.content]
    return "".join(part for part in parts if isinstance(part, str))
