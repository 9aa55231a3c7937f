"""AG-UI 1.0: the stored messages and the chunks of a thread as its messages and events. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from helix_store.contrib.chat.stored import Entry, Piece, as_text, reasoning_id

__all__ = ["Events", "Outcome", "messages_of", "posted"]

Event = dict[str, Any]

_PARTS_OF_FILES: Final = {"image": "image", "audio": "audio", "video": "video"}


# --- Messages ----------------------------------------------------------------------------------------


def messages_of(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """Return the messages of a history, in the order in which a client that has seen them live holds them.

    The result of a tool follows its call, and not what the agent said in between.
    """
    found: list[dict[str, Any]] = []
    for entry in entries:
        for message in _messages(entry):
            _insert(found, message)
    return found


def _insert(found: list[dict[str, Any]], message: dict[str, Any]) -> None:
    at = len(found)
    if message["role"] == "tool":
        at = place_of_result(found, message["toolCallId"])
    found.insert(at, message)


def place_of_result(messages: Sequence[Mapping[str, Any]], call_id: str) -> int:
    """Return the index at which the reference client inserts a tool's result."""
    for index, message in enumerate(messages):
        if any(call["id"] == call_id for call in message.get("toolCalls", ())):
            at = index + 1
            while at < len(messages) and messages[at]["role"] == "tool":
                at += 1
            return at
    return len(messages)


def _messages(entry: Entry, agent: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    owner = {} if agent is None else {"subagentRunId": agent["id"]}
    if entry.role == "tool":
        message = {"id": entry.id, "role": "tool", "toolCallId": entry.call_id, "content": entry.content}
        yield {**message, **({} if entry.error is None else {"error": entry.error}), **owner}
        return
    if entry.role != "assistant":
        yield {"id": entry.id, "role": _role(entry.role), "content": _content(entry)}
        return
    said: dict[str, Any] = {"id": entry.id, "role": "assistant", "content": entry.content, **owner}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
        for call in entry.calls
    ]
    if calls:
        said["toolCalls"] = calls
    number, is_said = 0, False
    for piece in entry.pieces:
        if piece.kind == "reasoning":
            yield _reasoning(entry.id, number, piece, owner)
            number += 1
        elif piece.kind == "agent" and piece.entry is not None:
            yield from _messages(piece.entry, piece.agent)
        elif piece.kind in ("text", "call") and not is_said:
            is_said = True
            yield said


def _reasoning(message_id: str, number: int, piece: Piece, owner: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": reasoning_id(message_id, number), "role": "reasoning", "content": piece.text, **owner}


def _role(role: str) -> str:
    return role if role in ("user", "system", "developer") else "developer"


def _content(entry: Entry) -> Any:
    if isinstance(entry.content, str):
        return entry.content
    parts = [part for part in map(_part, entry.content) if part is not None]
    if entry.role == "user":
        return parts
    return "".join(text for part in parts if isinstance(text := part.get("text"), str))


def _part(part: Any) -> dict[str, Any] | None:
    """Return a part of a user's message, from its stored chat-completions form."""
    if not isinstance(part, Mapping):
        return None
    if part.get("type") == "text":
        return {"type": "text", "text": part.get("text", "")}
    url, media_type = file_of(part)
    if isinstance(own := part.get("ag_ui"), Mapping) and isinstance(own.get("source"), Mapping):
        return {**own, "source": _source(own, url)}
    if not url:
        return None
    kind = _PARTS_OF_FILES.get(media_type.partition("/")[0], "document")
    source: dict[str, Any] = {"type": "url", "value": url}
    if media_type:
        source["mimeType"] = media_type
    return {"type": kind, "source": source}


def _source(own: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Return the source of a client's part, whose value is stored once, in the URL."""
    source: dict[str, Any] = {**own["source"]}
    value = url.removeprefix(_inline("", source)) if source.get("type") == "data" else url
    return source if "value" in source else {**source, "value": value}


def _inline(value: str, source: Mapping[str, Any]) -> str:
    return f"data:{_media_type(source)};base64,{value}"


def _media_type(source: Mapping[str, Any]) -> str:
    media_type = source.get("mimeType")
    return media_type if isinstance(media_type, str) else ""


def file_of(part: Mapping[str, Any]) -> tuple[str, str]:
    """Return the URL and the media type of a stored file or image, or empty texts."""
    inner = part.get("image_url", part.get("file"))
    inner = {"url": inner} if isinstance(inner, str) else inner if isinstance(inner, Mapping) else {}
    url = inner.get("url") or inner.get("file_data") or ""
    media_type = part.get("media_type")
    if not isinstance(media_type, str):
        media_type = "image/*" if part.get("type") == "image_url" else ""
    return str(url), media_type


def posted(content: Any) -> Any:
    """Return the content of a user's AG-UI message in the chat-completions form. Raises `ValueError`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError("expected text, or a list of parts that is not empty")
    return [_posted_part(part) for part in content]


def _posted_part(part: Any) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise ValueError("expected parts that are objects")
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    source = part.get("source")
    if not isinstance(source, dict) or not isinstance(source.get("value"), str):
        raise ValueError("expected parts with a text or a source")
    url = source["value"]
    if source.get("type") == "data":
        url = _inline(url, source)
    if part.get("type") == "image":
        stored: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    else:
        stored = {"type": "file", "file": {"file_data": url}}
    kept = {key: value for key, value in source.items() if key != "value"}
    return {**stored, "media_type": _media_type(source), "ag_ui": {**part, "source": kept}}


# --- Events ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a thread stands when nobody drives it.

    ``kind`` is ``success``, ``interrupt``, ``cancelled`` or ``error``. ``interrupts`` are the approvals that
    are open, and ``pending`` the calls that the client must answer.
    """

    kind: str = "success"
    interrupts: Sequence[Mapping[str, Any]] = ()
    pending: Sequence[str] = ()
    message: str = ""
    code: str = ""
    result: Any = None
    usage: Sequence[Mapping[str, Any]] = ()
    cost_usd: str | None = None


@dataclass(slots=True)
class _Open:
    """What a message has open in the response: its text, its reasoning, its calls."""

    text: bool = False
    is_closed: bool = False
    reasoning: str | None = None
    calls: set[str] = field(default_factory=set)
    agent: str | None = None


class Events:
    """The events of one response: one run of the client, which may be several turns of the thread.

    ``held`` are the ids and roles of the messages that the client holds, or ``None`` if that is unknown.
    """

    def __init__(
        self,
        thread_id: str,
        run_id: str,
        *,
        held: Sequence[tuple[str, str]] | None = None,
        shares_state: bool = True,
        now: Callable[[], int],
        digest: Callable[[Any], str],
    ) -> None:
        self.thread_id = thread_id
        self.run_id = run_id
        self._held: list[dict[str, Any]] = [{"id": id, "role": role} for id, role in held or ()]
        self._shares_state = shares_state
        self._now = now
        self._digest = digest
        self._state: str | None = None
        self._known: set[str] = set()
        self._open: dict[str, _Open] = {}
        self._ended: set[str] = set()
        self._step: str | None = None
        self._agents: dict[str, Mapping[str, Any]] = {}
        self._ended_agents: set[str] = set()
        """The client refuses to begin a sub-agent anew that has ended in the same response."""
        self._stored_agents: dict[str, Mapping[str, Any]] = {}
        self._callers: dict[str, str | None] = {}
        """The sub-agent of each call of this response, of which the client accepts no other one."""
        self._must_show = False
        self._is_quiet = False
        self._usage: list[Mapping[str, Any]] = []
        self.steps: list[int] = []
        """The numbers of the steps that this response has shown."""

    def _event(self, type: str, **fields: Any) -> Event:
        return {"type": type, "timestamp": self._now(), **fields}

    # Beginning and end

    def started(self) -> Event:
        return self._event("RUN_STARTED", threadId=self.thread_id, runId=self.run_id)

    def snapshot(
        self, entries: Sequence[Entry], waiting: Sequence[Entry], state: Any, reasoning: Iterable[str] = ()
    ) -> Iterator[Event]:
        """Yield the state and the messages of the thread: before anything else of a run.

        ``reasoning`` are the ids of the reasoning of the running answer, whose content follows.
        """
        yield from self.state_snapshot(state)
        yield from self._messages(entries, waiting, reasoning, is_first=True)

    def expect(self, abandoned: Sequence[str], entries: Sequence[Entry], reasoning: Sequence[str]) -> None:
        """Expect that the client holds reasoning of steps that were not stored.

        A snapshot with any reasoning takes it back. Without, it is taken back before the snapshot.
        """
        shown = [message for message in messages_of(entries) if message["role"] == "reasoning"]
        if not shown and not reasoning:
            self._held += [{"id": own_id, "role": "reasoning"} for own_id in abandoned]

    def state_snapshot(self, state: Any) -> Iterator[Event]:
        """Yield the state, unless the client has it."""
        if not self._shares_state:
            return
        digest = self._digest(state)
        if digest != self._state:
            self._state = digest
            yield self._event("STATE_SNAPSHOT", snapshot=state)

    def _messages(
        self,
        entries: Sequence[Entry],
        waiting: Sequence[Entry],
        reasoning: Iterable[str] = (),
        *,
        is_first: bool = False,
    ) -> Iterator[Event]:
        stored = messages_of(entries)
        known = {message["id"] for message in stored}
        self._known = _ids_of(entries)
        self._stored_agents |= _agents_of(entries)
        shown = [*stored, *({"id": id, "role": "reasoning", "content": ""} for id in reasoning)]
        known = known | {message["id"] for message in shown}
        shown += [message for message in messages_of(waiting) if message["id"] not in known]
        ids = [message["id"] for message in shown]
        held = [message["id"] for message in self._held]
        if held == ids and not is_first and not self._must_show:
            return
        if held != ids[: len(held)]:
            yield from self._emptied()
        yield self._event("MESSAGES_SNAPSHOT", messages=shown)
        for message in shown:
            for call in message.get("toolCalls", ()):
                self._callers[call["id"]] = message.get("subagentRunId")
        self._held = [_kept(message) for message in shown]
        self._must_show = False

    def _emptied(self) -> Iterator[Event]:
        """Yield the snapshots that leave a client without messages.

        A client keeps its reasoning if a snapshot has none, but not what it takes for an answer.
        """
        answers = [
            {"id": message["id"], "role": "assistant", "content": ""}
            for message in self._held
            if message["role"] == "reasoning"
        ]
        # First the empty snapshot: after it, a client that is cut off begins anew.
        yield self._event("MESSAGES_SNAPSHOT", messages=[])
        if not answers:
            return
        yield self._event("MESSAGES_SNAPSHOT", messages=answers)
        yield self._event("MESSAGES_SNAPSHOT", messages=[])

    def finished(self, outcome: Outcome) -> Iterator[Event]:
        """Yield the end of the response."""
        yield from self._closed(outcome.message if outcome.kind == "error" else "")
        usage = [_usage(each) for each in _by_model(outcome.usage)]
        extra: dict[str, Any] = {"usage": usage} if usage else {}
        if outcome.cost_usd is not None:
            extra["metadata"] = {"costUsd": outcome.cost_usd}
        if outcome.kind == "error":
            yield self._event("RUN_ERROR", message=outcome.message, code=outcome.code, **extra)
            return
        told: dict[str, Any] = {"type": outcome.kind}
        if outcome.kind == "interrupt":
            told["interrupts"] = list(outcome.interrupts)
        elif outcome.kind == "success" and outcome.pending:
            told["pendingToolCallIds"] = list(outcome.pending)
        if outcome.kind == "success" and outcome.result is not None:
            extra["result"] = outcome.result
        yield self._event("RUN_FINISHED", threadId=self.thread_id, runId=self.run_id, outcome=told, **extra)

    # Chunks

    def needs_thread(self, chunk: Mapping[str, Any]) -> bool:
        """Return whether `take` needs the thread as it is stored now."""
        kind = chunk["type"]
        if kind == "commit":
            change = chunk.get("state") or {}
            is_patched = not change or change["now"] == self._state or self._applies(change)
            return bool(chunk["snapshot"] or chunk["received"] or self._must_show) or not is_patched
        return kind in ("run", "reset")

    def _applies(self, change: Mapping[str, Any]) -> bool:
        return change["was"] == self._state and "patch" in change

    def resume(self, entries: Sequence[Entry]) -> None:
        """Continue after a chunk that the client has: it also has what is stored."""
        self._held = [_kept(message) for message in messages_of(entries)]
        self._stored_agents |= _agents_of(entries)

    def absorb(self, chunk: Mapping[str, Any]) -> None:
        """Take a chunk that the client has seen in an earlier response."""
        for _ in self.take(chunk):
            pass

    def reopened(self) -> Iterator[Event]:
        """Yield the beginning of everything that is open, for a client that continues after a chunk."""
        if self._step is not None:
            yield self._event("STEP_STARTED", stepName=self._step)
        for agent in self._agents.values():
            yield self._agent_started(agent)
        for message_id, opened in self._open.items():
            owner = {} if opened.agent is None else {"subagentRunId": opened.agent}
            if opened.reasoning is not None:
                yield self._event("REASONING_START", messageId=opened.reasoning, **owner)
                yield self._event(
                    "REASONING_MESSAGE_START", messageId=opened.reasoning, role="reasoning", **owner
                )
            if opened.text:
                yield self._event("TEXT_MESSAGE_START", messageId=message_id, role="assistant", **owner)
            for call_id in opened.calls:
                name = self._names.get(call_id, "")
                yield self._event(
                    "TOOL_CALL_START",
                    toolCallId=call_id,
                    toolCallName=name,
                    parentMessageId=message_id,
                    **owner,
                )

    def take(
        self,
        chunk: Mapping[str, Any],
        entries: Sequence[Entry] = (),
        waiting: Sequence[Entry] = (),
        state: Any = None,
        *,
        has_thread: bool = False,
    ) -> Iterator[Event]:
        """Yield the events of a chunk, with the thread if `needs_thread`."""
        kind = chunk["type"]
        if kind in ("run", "reset"):
            yield from self._closed() if kind == "run" else self._step_ended()
            if has_thread:
                yield from self.state_snapshot(state)
                yield from self._messages(entries, waiting)
        elif kind == "commit":
            yield from self._commit(chunk, entries, waiting, state, has_thread=has_thread)
        elif kind == "step":
            self.steps.append(chunk["n"])
            yield from self._step_started(f"step-{chunk['n']}")
        elif kind in ("agent", "agent_end"):
            yield from self._agent(chunk)
        elif kind == "end":
            self._usage += chunk.get("usage", ())
        elif kind == "data" or chunk.get("m") not in self._known:
            # No snapshot has custom events, also if it has the message with which they were sent.
            yield from self._said(chunk)

    def _step_started(self, name: str) -> Iterator[Event]:
        if self._step is None:
            self._step = name
            yield self._event("STEP_STARTED", stepName=name)

    def _said(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        kind, message_id = chunk["type"], chunk.get("m", "")
        if "a" in chunk:
            yield from self._agent_begun(chunk["a"])
        if kind == "data":
            owner = {"subagentRunId": chunk["a"]} if "a" in chunk else {}
            yield self._event("CUSTOM", name=chunk["name"], value=chunk["value"], **owner)
        elif kind == "result":
            yield from self._result(chunk)
        elif message_id in self._ended:
            # The client refuses to begin a message anew: what a step adds to it follows as a snapshot.
            self._must_show = True
        elif kind in ("text", "reasoning", "input", "call"):
            opened = self._opened(message_id, chunk.get("a"))
            if kind == "reasoning":
                yield from self._reasoning(message_id, opened, chunk)
            else:
                yield from self._reasoning_ended(opened)
            if kind == "text":
                yield from self._text(message_id, opened, chunk["d"])
            elif kind == "input":
                yield from self._input(message_id, opened, chunk)
            elif kind == "call":
                yield from self._call_ended(opened, chunk["c"])

    def _opened(self, message_id: str, agent: str | None) -> _Open:
        if message_id not in self._open:
            self._open[message_id] = _Open(agent=agent)
        return self._open[message_id]

    def _text(self, message_id: str, opened: _Open, delta: str) -> Iterator[Event]:
        owner = _owner(opened)
        if opened.is_closed:
            # A message has one text, which the reference validator does not open again: it follows as a
            # snapshot when the step is stored.
            self._must_show = True
            return
        if not opened.text:
            opened.text = True
            self._hold(message_id, "assistant")
            yield self._event("TEXT_MESSAGE_START", messageId=message_id, role="assistant", **owner)
        yield self._event("TEXT_MESSAGE_CONTENT", messageId=message_id, delta=delta, **owner)

    def _reasoning(self, message_id: str, opened: _Open, chunk: Mapping[str, Any]) -> Iterator[Event]:
        own_id, owner = reasoning_id(message_id, chunk["i"]), _owner(opened)
        if opened.reasoning != own_id:
            yield from self._reasoning_ended(opened)
            opened.reasoning = own_id
            self._hold(own_id, "reasoning")
            yield self._event("REASONING_START", messageId=own_id, **owner)
            yield self._event("REASONING_MESSAGE_START", messageId=own_id, role="reasoning", **owner)
        yield self._event("REASONING_MESSAGE_CONTENT", messageId=own_id, delta=chunk["d"], **owner)

    def _reasoning_ended(self, opened: _Open) -> Iterator[Event]:
        if opened.reasoning is not None:
            own_id, opened.reasoning = opened.reasoning, None
            owner = _owner(opened)
            yield self._event("REASONING_MESSAGE_END", messageId=own_id, **owner)
            yield self._event("REASONING_END", messageId=own_id, **owner)

    @property
    def _names(self) -> dict[str, str]:
        return {call["id"]: call["name"] for message in self._held for call in message.get("toolCalls", ())}

    def _input(self, message_id: str, opened: _Open, chunk: Mapping[str, Any]) -> Iterator[Event]:
        call_id, owner = chunk["c"], _owner(opened)
        if self._is_of_another(call_id, opened.agent):
            # A failed attempt had a call with this id too: it follows as a snapshot, like a second text.
            self._must_show = True
            return
        if call_id not in opened.calls:
            self._callers[call_id] = opened.agent
            if not opened.text:
                # Clients make the message of a call without an id of its own, unless it exists.
                opened.text = True
                self._hold(message_id, "assistant")
                yield self._event("TEXT_MESSAGE_START", messageId=message_id, role="assistant", **owner)
                opened.is_closed = True
                yield self._event("TEXT_MESSAGE_END", messageId=message_id, **owner)
            opened.calls.add(call_id)
            self._hold_call(message_id, call_id, chunk["name"])
            yield self._event(
                "TOOL_CALL_START",
                toolCallId=call_id,
                toolCallName=chunk["name"],
                parentMessageId=message_id,
                **owner,
            )
        if chunk["d"]:
            yield self._event("TOOL_CALL_ARGS", toolCallId=call_id, delta=chunk["d"], **owner)

    def _is_of_another(self, call_id: str, agent: str | None) -> bool:
        return agent is not None and self._callers.get(call_id, agent) != agent

    def _call_ended(self, opened: _Open, call_id: str) -> Iterator[Event]:
        if call_id in opened.calls:
            opened.calls.discard(call_id)
            yield self._event("TOOL_CALL_END", toolCallId=call_id, **_owner(opened))

    def _result(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        call_id = chunk["c"]
        for message_id, opened in list(self._open.items()):
            if opened.agent == chunk.get("a"):
                yield from self._message_ended(message_id)
        if call_id not in self._names or self._is_of_another(call_id, chunk.get("a")):
            # The client does not know this call, as that of a step which is stored without its message.
            self._must_show = True
            return
        owner = {"subagentRunId": chunk["a"]} if "a" in chunk else {}
        message = {"id": chunk["m"], "role": "tool", "toolCallId": call_id}
        self._held.insert(place_of_result(self._held, call_id), message)
        yield self._event(
            "TOOL_CALL_RESULT",
            messageId=chunk["m"],
            toolCallId=call_id,
            content=as_text(chunk["content"]),
            role="tool",
            **owner,
        )

    def _agent(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        if chunk["type"] == "agent":
            yield from self._agent_opened(chunk["agent"])
            return
        for message_id, opened in list(self._open.items()):
            if opened.agent == chunk["a"]:
                yield from self._message_ended(message_id)
        if self._agents.pop(chunk["a"], None) is None:
            return
        self._ended_agents.add(chunk["a"])
        if "error" in chunk:
            yield self._event("SUBAGENT_ERROR", subagentRunId=chunk["a"], message=chunk["error"])
        else:
            yield self._event("SUBAGENT_FINISHED", subagentRunId=chunk["a"], outcome={"type": "success"})

    def _agent_begun(self, agent_id: str) -> Iterator[Event]:
        """Begin a sub-agent that began in an earlier step, before the first chunk of this response."""
        if agent_id not in self._agents and agent_id not in self._ended_agents:
            nameless = {"id": agent_id, "name": "agent"}
            yield from self._agent_opened(self._stored_agents.get(agent_id, nameless))

    def _agent_opened(self, agent: Mapping[str, Any]) -> Iterator[Event]:
        if "parent" in agent:
            yield from self._agent_begun(agent["parent"])
        self._agents[agent["id"]] = agent
        yield self._agent_started(agent)

    def _agent_started(self, agent: Mapping[str, Any]) -> Event:
        parent = {"parentSubagentRunId": agent["parent"]} if "parent" in agent else {}
        return self._event("SUBAGENT_STARTED", subagentRunId=agent["id"], name=agent["name"], **parent)

    def _message_ended(self, message_id: str) -> Iterator[Event]:
        opened = self._open.pop(message_id)
        self._ended.add(message_id)
        yield from self._reasoning_ended(opened)
        for call_id in list(opened.calls):
            yield from self._call_ended(opened, call_id)
        if opened.text and not opened.is_closed:
            yield self._event("TEXT_MESSAGE_END", messageId=message_id, **_owner(opened))

    def _closed(self, error: str = "") -> Iterator[Event]:
        """Close everything that is open."""
        yield from self._messages_ended()
        for agent_id in reversed(list(self._agents)):
            yield self._event("SUBAGENT_ERROR", subagentRunId=agent_id, message=error or "interrupted")
        self._ended_agents |= self._agents.keys()
        self._agents.clear()
        yield from self._step_ended()

    def _messages_ended(self) -> Iterator[Event]:
        for message_id in list(self._open):
            yield from self._message_ended(message_id)

    def _step_ended(self) -> Iterator[Event]:
        """Close the step and its messages. Sub-agents may go on in the next step."""
        yield from self._messages_ended()
        if self._step is not None:
            step, self._step = self._step, None
            yield self._event("STEP_FINISHED", stepName=step)

    def _commit(
        self,
        chunk: Mapping[str, Any],
        entries: Sequence[Entry],
        waiting: Sequence[Entry],
        state: Any,
        *,
        has_thread: bool,
    ) -> Iterator[Event]:
        yield from self._step_ended()
        self._usage += chunk.get("usage", ())
        self._must_show = self._must_show or bool(chunk["snapshot"])
        change = chunk.get("state") or {}
        if self._shares_state and change and change["now"] != self._state:
            if self._applies(change) or (self._state is None and not has_thread and "patch" in change):
                self._state = change["now"]
                yield self._event("STATE_DELTA", delta=change["patch"])
            elif has_thread:
                yield from self.state_snapshot(state)
        if has_thread and (self._must_show or chunk["received"]):
            if all(said["id"] in self._known for said in chunk["said"]):
                # A snapshot that the client has holds this step already, but not what it has taken back.
                self._must_show = False
            yield from self._messages(entries, waiting)

    def usage(self) -> list[Mapping[str, Any]]:
        """Return the tokens of the steps that were stored during this response."""
        return list(self._usage)

    # What the client holds

    def _hold(self, message_id: str, role: str) -> None:
        if all(message["id"] != message_id for message in self._held):
            self._held.append({"id": message_id, "role": role})

    def _hold_call(self, message_id: str, call_id: str, name: str) -> None:
        for message in self._held:
            if message["id"] == message_id:
                message.setdefault("toolCalls", []).append({"id": call_id, "name": name})


def _kept(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [{"id": call["id"], "name": call["function"]["name"]} for call in message.get("toolCalls", ())]
    kept = {"id": message["id"], "role": message["role"]}
    return {**kept, "toolCalls": calls} if calls else kept


def _ids_of(entries: Iterable[Entry]) -> set[str]:
    inner = (piece.entry for entry in entries for piece in entry.pieces if piece.entry is not None)
    return {entry.id for entry in (*entries, *inner)}


def _agents_of(entries: Iterable[Entry]) -> dict[str, Mapping[str, Any]]:
    """Return the sub-agents that have said something, by their ids."""
    said = (piece for entry in entries for piece in entry.pieces if piece.kind == "agent")
    return {piece.agent["id"]: piece.agent for piece in said}


def _owner(opened: _Open) -> dict[str, str]:
    return {} if opened.agent is None else {"subagentRunId": opened.agent}


def _by_model(used: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one sum of tokens for each model."""
    sums: dict[str, dict[str, Any]] = {}
    for tokens in used:
        model = str(tokens.get("model", ""))
        total = sums.setdefault(model, {"model": model} if model else {})
        for name, value in tokens.items():
            if name != "model":
                total[name] = total.get(name, 0) + value
    return list(sums.values())


def _usage(tokens: Mapping[str, Any]) -> dict[str, Any]:
    prompt, completion = tokens.get("prompt", 0), tokens.get("completion", 0)
    told: dict[str, Any] = {"model": tokens["model"]} if "model" in tokens else {}
    told |= {
        "inputTokens": prompt,
        "outputTokens": completion,
        "totalTokens": prompt + completion,
    }
    for name, key in (
        ("reasoning", "reasoningTokens"),
        ("cached", "cachedInputTokens"),
        ("cache_write", "cacheWriteInputTokens"),
    ):
        if tokens.get(name):
            told[key] = tokens[name]
    return told
