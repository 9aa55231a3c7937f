"""The AI SDK: stored messages and chunks of a thread as UI messages and their stream. Pure Python.

An answer is one UI message, which begins after the newest user message and contains all steps up to the next
one. Each step of the session is one step of the message. Sub-agents are left out: the SDK has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from helix_store.contrib.chat.agui import Outcome, file_of
from helix_store.contrib.chat.stored import (
    Entry,
    Piece,
    answer_id,
    is_data,
    parsed,
    reasoning_id,
    text_id,
)

__all__ = ["Call", "Held", "Parts", "groups_of", "held_answer", "messages_of", "posted"]

Part = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of the session that waits, or that is answered and not used yet.

    ``approval`` is the id of its approval, if it is one, and ``approved`` the decision, if there is one.
    """

    id: str
    name: str
    input: Any
    digest: str
    approval: str | None = None
    approved: bool | None = None
    reason: str | None = None


@dataclass(slots=True)
class Group:
    """A UI message: a user's message, or all that the agent says until the next one."""

    id: str
    role: str
    entries: list[Entry] = field(default_factory=list)
    after: str = ""
    """For an answer, the id of the user's message before it."""


# --- Messages ----------------------------------------------------------------------------------------


def groups_of(entries: Iterable[Entry]) -> list[Group]:
    """Return the UI messages of a history. The result of a tool belongs to the answer with its call."""
    groups: list[Group] = []
    callers: dict[str, Group] = {}
    user: Entry | None = None
    for entry in entries:
        if entry.role == "tool" and entry.call_id in callers:
            callers[entry.call_id].entries.append(entry)
        elif entry.role in ("assistant", "tool"):
            if not groups or groups[-1].role != "assistant":
                own_id = f"answer-{entry.id}" if user is None else user.answer or answer_id(user.id)
                groups.append(Group(own_id, "assistant", after="" if user is None else user.id))
            groups[-1].entries.append(entry)
            callers |= dict.fromkeys((call.id for call in entry.calls), groups[-1])
        else:
            user = entry
            role = entry.role if entry.role in ("user", "system") else "system"
            groups.append(Group(entry.id, role, [entry]))
    return groups


def _newest_answer(groups: Sequence[Group]) -> Group:
    """Return the answer at the end of a history, an empty one if it has not begun."""
    if not groups:
        return Group("", "assistant")
    last = groups[-1]
    if last.role == "assistant":
        return last
    (user,) = last.entries
    return Group(user.answer or answer_id(user.id), "assistant")


def messages_of(entries: Iterable[Entry], calls: Mapping[str, Call]) -> list[dict[str, Any]]:
    """Return the UI messages of a history. ``calls`` are those that the session waits for."""
    groups = groups_of(entries)
    answers = [group for group in groups if group.role == "assistant"]
    newest = answers[-1] if answers else None
    return [
        _user_message(group)
        if group.role != "assistant"
        else _answer(group, calls if group is newest else {})
        for group in groups
    ]


def _user_message(group: Group) -> dict[str, Any]:
    (entry,) = group.entries
    content = entry.content
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(_parts(content))
    message = {"id": group.id, "role": group.role, "parts": parts}
    return message if entry.metadata is None else {**message, "metadata": entry.metadata}


def _parts(content: Iterable[Any]) -> Iterator[Part]:
    for part in content:
        if not isinstance(part, Mapping):
            continue
        if isinstance(own := part.get("ui"), Mapping) and isinstance(own.get("type"), str):
            # The URL of a file is stored once.
            yield {"url": file_of(part)[0], **own} if own.get("type") == "file" else dict(own)
        elif part.get("type") == "text":
            yield {"type": "text", "text": part.get("text", "")}
        elif (found := file_of(part))[0]:
            yield {"type": "file", "url": found[0], "mediaType": found[1] or "application/octet-stream"}


def _answer(group: Group, calls: Mapping[str, Call]) -> dict[str, Any]:
    """Return the message that a client holds when it has followed the stream of the answer."""
    parts: list[Part] = []
    steps = 0
    for number, entry, shown in _numbered(group.entries):
        if entry.role == "tool":
            _set_output(parts, entry)
            continue
        if number > steps:
            steps = number
            parts.append({"type": "step-start"})
        parts += shown
    for call in calls.values():
        _set_asked(parts, call)
    message: dict[str, Any] = {"id": group.id, "role": "assistant", "parts": parts}
    if metadata := metadata_of(group.entries):
        message["metadata"] = metadata
    return message


def _numbered(stored: Iterable[Entry]) -> Iterator[tuple[int, Entry, list[Part]]]:
    """Yield the messages of an answer with the number of their step in the UI message, and their parts.

    Messages without parts are left out, except results of tools, which belong to the parts of their calls.
    """
    number, step = 0, None
    for entry in stored:
        shown = [] if entry.role == "tool" else list(_shown(entry))
        if shown and (step is None or _step_of(entry) != step):
            number, step = number + 1, _step_of(entry)
        if shown or entry.role == "tool":
            yield number, entry, shown


def _step_of(entry: Entry) -> Any:
    return entry.id if entry.step is None else entry.step


def metadata_of(entries: Iterable[Entry]) -> dict[str, Any]:
    """Return the metadata of an answer: the tokens of its steps."""
    used = [tokens for entry in entries for tokens in entry.usage]
    if not used:
        return {}
    prompt = sum(tokens.get("prompt", 0) for tokens in used)
    completion = sum(tokens.get("completion", 0) for tokens in used)
    usage = {"inputTokens": prompt, "outputTokens": completion, "totalTokens": prompt + completion}
    return {"usage": usage}


def _shown(entry: Entry) -> Iterator[Part]:
    numbers = {"text": 0, "reasoning": 0}
    for piece in entry.pieces:
        if piece.kind == "text":
            yield {"type": "text", "text": piece.text, "state": "done"}
        elif piece.kind == "reasoning":
            own_id = reasoning_id(entry.id, numbers["reasoning"])
            numbers["reasoning"] += 1
            yield {"type": "reasoning", "id": own_id, "text": piece.text, "state": "done"}
        elif piece.kind == "call":
            yield _tool_part(piece)
        elif piece.kind == "file":
            yield {"type": "file", "mediaType": piece.name, "url": piece.text}
        elif piece.kind == "data":
            yield {"type": f"data-{piece.name}", "data": piece.value}


def _tool_part(piece: Piece) -> Part:
    return {
        "type": f"tool-{piece.name}",
        "toolCallId": piece.id,
        "state": "input-available",
        "input": parsed(piece.text),
    }


def _find(parts: Sequence[Part], call_id: str) -> Part | None:
    return next((part for part in reversed(parts) if part.get("toolCallId") == call_id), None)


def _set_output(parts: Sequence[Part], entry: Entry) -> None:
    part = _find(parts, entry.call_id)
    if part is None:
        return
    if entry.approval is not None:
        part["approval"] = _approval(entry.approval)
        if not entry.approval["approved"]:
            part["state"] = "output-denied"
            return
    if entry.error is not None:
        part |= {"state": "output-error", "errorText": entry.error}
    else:
        part |= {"state": "output-available", "output": parsed(entry.content)}


def _approval(decision: Mapping[str, Any]) -> dict[str, Any]:
    approval = {
        "id": decision["id"],
        "descriptor": {"digest": decision["digest"]},
        "approved": decision["approved"],
    }
    return {**approval, "reason": decision["reason"]} if "reason" in decision else approval


def _set_asked(parts: Sequence[Part], call: Call) -> None:
    part = _find(parts, call.id)
    if part is None or call.approval is None or part["state"] != "input-available":
        return
    approval: dict[str, Any] = {"id": call.approval, "descriptor": {"digest": call.digest}}
    part["state"] = "approval-requested"
    if call.approved is not None:
        part["state"] = "approval-responded"
        approval["approved"] = call.approved
        if call.reason:
            approval["reason"] = call.reason
    part["approval"] = approval


def posted(parts: Any) -> Any:
    """Return the content of a user's UI message in the chat-completions form. Raises `ValueError`."""
    if not isinstance(parts, list) or not parts:
        raise ValueError("expected a list of parts that is not empty")
    stored = [_posted_part(part) for part in parts]
    if all(map(is_data, stored)):
        raise ValueError("expected a part of the type text or file, because models do not see data parts")
    if len(stored) == 1 and stored[0].get("type") == "text" and set(parts[0]) <= {"type", "text"}:
        return stored[0]["text"]
    return stored


def _posted_part(part: Any) -> Part:
    if not isinstance(part, dict):
        raise ValueError("expected parts that are objects")
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if part.get("type") == "file" and isinstance(part.get("url"), str):
        media_type = part.get("mediaType")
        media_type = media_type if isinstance(media_type, str) else ""
        if media_type.startswith("image/"):
            stored: Part = {"type": "image_url", "image_url": {"url": part["url"]}}
        else:
            stored = {"type": "file", "file": {"file_data": part["url"]}}
        own = {key: value for key, value in part.items() if key != "url"}
        return {**stored, "media_type": media_type, "ui": own}
    if isinstance(part.get("type"), str) and part["type"].startswith("data-"):
        return {"type": part["type"], "ui": part}
    raise ValueError("expected parts of the types text, file and data")


# --- What a client holds -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An answer as the client that sends it holds it. It is not believed: it shows what the client lacks.

    ``steps`` are the parts of its steps, without steps that have none. If it ``is_in_step``, the last step
    has begun and has no parts: `reset-step` leaves this of a step.
    """

    id: Any
    steps: Sequence[Sequence[Part]] = ()
    is_in_step: bool = False

    @property
    def calls(self) -> dict[str, Part]:
        """The parts of its calls, by their ids."""
        return {call_id: part for step in self.steps for call_id, part in _calls_in(step)}

    @property
    def answered(self) -> set[str]:
        """The ids of its calls that have an answer or a result."""
        return {call_id for call_id, part in self.calls.items() if part.get("state") in _ANSWERED}


_ANSWERED: Final = ("approval-responded", "output-available", "output-error", "output-denied")


def held_answer(message: Mapping[str, Any]) -> Held:
    """Read an assistant's UI message, which has a list of parts."""
    steps: list[list[Part]] = [[]]
    for part in message["parts"]:
        if isinstance(part, dict):
            if part.get("type") == "step-start":
                steps.append([])
            else:
                steps[-1].append(part)
    return Held(
        id=message.get("id"),
        steps=[step for step in steps if step],
        is_in_step=len(steps) > 1 and not steps[-1],
    )


def _calls_in(step: Iterable[Part]) -> Iterator[tuple[str, Part]]:
    for part in step:
        if isinstance(call_id := part.get("toolCallId"), str):
            yield call_id, part


def _shown_in(step: int, numbered: Iterable[tuple[int, Entry, list[Part]]]) -> list[Part]:
    return [part for number, _, shown in numbered if number == step for part in shown]


def _has_whole(held: Iterable[Part], stored: Iterable[Part]) -> bool:
    """Return whether a client holds a stored step to its end.

    A client that was cut off holds its beginning, or a step that failed. Some do not send all that they hold.
    """
    left = iter(stored)
    return all(any(_is_same(part, each) for each in left) for part in held) and next(left, None) is None


def _is_same(held: Part, stored: Part) -> bool:
    if "toolCallId" in stored:
        # The client may have answered the call already, and JavaScript rounds large numbers of its input.
        is_whole = held.get("state") != "input-streaming"
        return is_whole and all(held.get(key) == stored[key] for key in ("type", "toolCallId"))
    return all(held.get(key, value) == value for key, value in stored.items())


# --- The stream --------------------------------------------------------------------------------------


class Parts:
    """The parts of one response: one UI message, or what follows of it.

    ``after`` is the user's message that the answer follows, ``None`` for the newest. A client that continues
    an answer has sent what it has ``held`` of it, and gets what follows.
    """

    def __init__(self, *, after: str | None = None, held: Held | None = None) -> None:
        self._after = after
        self._sent = held
        self._calls_sent = {} if held is None else held.calls
        self._decisions = {
            call_id: approval["approved"]
            for call_id, part in self._calls_sent.items()
            if isinstance(approval := part.get("approval"), dict) and "approved" in approval
        }
        """The decisions that the client has sent, by the ids of the calls."""
        self.message_id: str | None = None
        self.is_over = False
        self._has_ended = False
        """True if another message follows, and results of calls are the only parts that may still come."""
        self._has_started = False
        self._step: Any = None
        self._is_empty_step = False
        self._is_stored_step = False
        self._known: set[str] = set()
        self._held: set[str] = set()
        """The stored messages that a client holds which goes on after a chunk."""
        self._texts: dict[str, str] = {}
        self._inputs: set[str] = set()
        self._names: dict[str, str] = {}
        self._texts_of_calls: dict[str, str] = {}
        self._calls_of_step: set[str] = set()
        self._held_back: list[Mapping[str, Any]] = []
        self._asked: dict[str, Call] = {}
        self._next_step: Any = None
        self._metadata: dict[str, Any] = {}

    # Beginning and end

    def begin(self, entries: Sequence[Entry], calls: Mapping[str, Call]) -> Iterator[Part]:
        """Yield what is stored of the message, except what the client holds."""
        self._known = {entry.id for entry in entries}
        group = self._group(entries)
        if group is None:
            return
        self.message_id, stored = group.id, group.entries
        self._look_at(entries, calls)
        if self._sent is not None:
            yield from self._continued(stored, self._sent)
        else:
            for entry in stored:
                yield from self._entry(entry)
        if not self._has_ended:
            self._asked |= {id: call for id, call in calls.items() if id not in self._decisions}

    def _continued(self, stored: Sequence[Entry], held: Held) -> Iterator[Part]:
        """Yield what follows the part of the message that the client holds.

        `reset-step` takes back the parts of its last step, and leaves the beginning, which goes on.
        """
        yield self._started()
        numbered, sent = list(_numbered(stored)), len(held.steps)
        # A client that has answered a call has seen the step that asks about it, also if it does not send it.
        known = max((n for n, entry, _ in numbered if not held.answered.isdisjoint(entry.asks)), default=0)
        is_whole = known > sent or not held.steps or _has_whole(held.steps[-1], _shown_in(sent, numbered))
        known = max(known, sent)
        if not is_whole:
            known -= 1
            for call_id, _ in _calls_in(held.steps[-1]):
                self._calls_sent.pop(call_id, None)
                self._decisions.pop(call_id, None)
            yield {"type": "reset-step"}
        if held.is_in_step or not is_whole:
            self._step, self._is_empty_step = "", True
        for number, entry, _ in numbered:
            if entry.role != "tool" and number <= known:
                self._names |= {call.id: call.name for call in entry.calls}
            elif entry.role != "tool" or not self._has_output(entry):
                yield from self._entry(entry)

    def _has_output(self, entry: Entry) -> bool:
        """Return whether the client holds the result of a tool as it is stored."""
        held = self._calls_sent.get(entry.call_id)
        if held is None:
            return False
        part = dict(held)
        _set_output([part], entry)
        return part == held

    def _group(self, entries: Sequence[Entry]) -> Group | None:
        """Return the answer, an empty one if it has not begun, or ``None`` if its user's message waits."""
        groups = groups_of(entries)
        for is_continued in (self._has_id, self._has_call):
            # The answer that a client continues is not always the newest one.
            if (group := next(filter(is_continued, reversed(groups)), None)) is not None:
                return group
        if self._after is not None:
            found = [
                index
                for index, group in enumerate(groups)
                if group.role != "assistant" and group.id == self._after
            ]
            if not found:
                return None
            for group in groups[found[-1] :]:
                if group.role == "assistant":
                    return group
        return _newest_answer(groups)

    def _has_id(self, group: Group) -> bool:
        return self._sent is not None and group.role == "assistant" and group.id == self._sent.id

    def _has_call(self, group: Group) -> bool:
        return any(call.id in self._calls_sent for entry in group.entries for call in entry.calls)

    @property
    def is_waiting(self) -> bool:
        """True until the user's message has been received."""
        return self.message_id is None

    def _started(self) -> Part:
        self._has_started = True
        return {"type": "start", "messageId": self.message_id}

    def _stored(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return what is stored of the message."""
        return next((group.entries for group in groups_of(entries) if group.id == self.message_id), [])

    def _look_at(self, entries: Sequence[Entry], calls: Mapping[str, Call]) -> None:
        """Look whether the history goes on with another message, and how many tokens this one has taken.

        The next turn may have received a message before it says the results of calls that were answered.
        """
        stored = self._stored(entries)
        self._metadata = metadata_of(stored)
        self._has_ended = _newest_answer(groups_of(entries)).id not in ("", self.message_id)
        self.is_over = self._has_ended and not any(
            call.id in calls for entry in stored for call in entry.calls
        )

    def _ensure_started(self) -> Iterator[Part]:
        # A user's message that was not received has no answer, and its response has no message.
        if not self._has_started and not self.is_waiting:
            yield self._started()

    def _entry(self, entry: Entry) -> Iterator[Part]:
        """Yield a stored message."""
        if entry.role == "tool":
            yield from self._output(entry.call_id, entry.content, entry.error, entry.approval)
            return
        if not any(True for _ in _shown(entry)):
            return
        yield from self._ensure_started()
        yield from self._step_started(_step_of(entry), is_stored=True)
        for part in _shown(entry):
            yield from self._whole(entry, part)

    def _whole(self, entry: Entry, part: Part) -> Iterator[Part]:
        kind = part["type"]
        if kind in ("text", "reasoning"):
            own_id = part.get("id") or f"{entry.id}-{len(self._texts)}"
            if kind == "text":
                own_id = text_id(entry.id, sum(key.startswith(f"{entry.id}-text") for key in self._texts))
            self._texts[own_id] = "done"
            yield {"type": f"{kind}-start", "id": own_id}
            yield {"type": f"{kind}-delta", "id": own_id, "delta": part["text"]}
            yield {"type": f"{kind}-end", "id": own_id}
        elif "toolCallId" in part:
            name = kind.removeprefix("tool-")
            self._names[part["toolCallId"]] = name
            yield {
                "type": "tool-input-available",
                "toolCallId": part["toolCallId"],
                "toolName": name,
                "input": part["input"],
            }
        else:
            yield part

    def finished(self, outcome: Outcome) -> Iterator[Part]:
        """Yield the end of the response."""
        yield from self._closed()
        if outcome.kind in ("error", "cancelled"):
            if self._metadata:
                # Only `finish` has room for them.
                yield from self._ensure_started()
                yield {"type": "message-metadata", "messageMetadata": self._metadata}
            if outcome.kind == "error":
                yield {"type": "error", "errorText": outcome.message}
            else:
                yield {"type": "abort", "reason": "stopped"}
            return
        yield from self._ensure_started()
        for call in self._asked.values():
            if call.approval is not None and call.id in self._names:
                yield _request(call)
                if call.approved is not None:
                    yield _response(call.approval, call.approved, call.reason)
        yield from self._step_finished()
        reason = "tool-calls" if outcome.interrupts or outcome.pending else "stop"
        finish: Part = {"type": "finish", "finishReason": reason}
        if self._metadata:
            finish["messageMetadata"] = self._metadata
        yield finish

    # Chunks

    def needs_thread(self, chunk: Mapping[str, Any]) -> bool:
        kind = chunk["type"]
        if kind == "commit":
            return bool(chunk["snapshot"] or self.is_waiting or chunk["received"])
        return kind == "run" or (kind == "reset" and self.is_waiting)

    def resume(self, entries: Sequence[Entry]) -> None:
        """Continue after a chunk that the client has: it also has what is stored, and the start."""
        group = self._group(entries)
        if group is not None:
            self.message_id, self._has_started = group.id, True
            for entry in group.entries:
                self._held.add(entry.id)
                for call in entry.calls:
                    self._names[call.id] = call.name

    def take(
        self,
        chunk: Mapping[str, Any],
        entries: Sequence[Entry] = (),
        calls: Mapping[str, Call] | None = None,
        *,
        has_thread: bool = False,
    ) -> Iterator[Part]:
        """Yield the parts of a chunk, with the thread if `needs_thread`."""
        if self.is_over:
            return
        kind = chunk["type"]
        if self.is_waiting:
            if has_thread:
                yield from self.begin(entries, calls or {})
            return
        if kind == "reset":
            yield from self._reset()
        elif kind == "run":
            yield from self._reset()
            yield from self._caught_up(entries, calls or {})
        elif kind == "commit":
            yield from self._commit(chunk, entries, calls or {}, has_thread=has_thread)
        elif self._has_ended and kind != "result":
            return
        elif kind == "step":
            self._next_step = chunk["n"]
        elif "a" in chunk:
            return
        elif kind == "data" and chunk.get("transient"):
            # No stored message has it, also if the thread that was loaded is ahead of this chunk.
            yield {"type": f"data-{chunk['name']}", "data": chunk["value"], "transient": True}
        elif chunk.get("m") not in self._known:
            # A thread that was loaded may be ahead of what the client has seen.
            self._held.discard(chunk.get("m", ""))
            yield from self._said(chunk)

    def _step_started(self, step: Any, *, is_stored: bool = False) -> Iterator[Part]:
        if self._step == step and step is not None and self._is_stored_step == is_stored:
            return
        self._is_stored_step = is_stored
        if self._step is not None and self._is_empty_step:
            # A step that was taken back goes on: the client has kept its beginning.
            self._step, self._is_empty_step = step, False
            return
        yield from self._step_finished()
        self._step = step
        yield {"type": "start-step"}

    def _step_finished(self) -> Iterator[Part]:
        self._calls_of_step = set()
        if self._step is not None:
            self._step, self._is_empty_step = None, False
            yield {"type": "finish-step"}

    def _said(self, chunk: Mapping[str, Any]) -> Iterator[Part]:
        kind, message_id = chunk["type"], chunk.get("m", "")
        if kind == "result":
            if chunk["c"] in self._calls_of_step:
                yield from self._closed()
                yield from self._output(chunk["c"], chunk["content"], None, None)
            else:
                # `reset-step` cannot take back the output of an earlier step.
                self._held_back.append(chunk)
            return
        if kind not in ("text", "reasoning", "input", "call", "file", "data"):
            return
        yield from self._ensure_started()
        yield from self._step_started(message_id if self._next_step is None else self._next_step)
        self._is_empty_step = False
        if kind in ("text", "reasoning"):
            yield from self._text(kind, message_id, chunk)
            return
        if kind != "call":
            yield from self._texts_ended()
        if kind == "input":
            yield from self._input(chunk)
        elif kind == "call":
            yield from self._call(chunk["c"])
        elif kind == "file":
            yield {"type": "file", "mediaType": chunk["media_type"], "url": chunk["url"]}
        else:
            yield {"type": f"data-{chunk['name']}", "data": chunk["value"]}

    def _text(self, kind: str, message_id: str, chunk: Mapping[str, Any]) -> Iterator[Part]:
        name = text_id if kind == "text" else reasoning_id
        own_id = name(message_id, chunk["i"])
        if self._texts.get(own_id) is None:
            yield from self._texts_ended()
            self._texts[own_id] = kind
            yield {"type": f"{kind}-start", "id": own_id}
        yield {"type": f"{kind}-delta", "id": own_id, "delta": chunk["d"]}

    def _texts_ended(self) -> Iterator[Part]:
        for own_id, kind in list(self._texts.items()):
            if kind != "done":
                self._texts[own_id] = "done"
                yield {"type": f"{kind}-end", "id": own_id}

    def _input(self, chunk: Mapping[str, Any]) -> Iterator[Part]:
        call_id = chunk["c"]
        if call_id not in self._inputs:
            self._inputs.add(call_id)
            self._names[call_id] = chunk["name"]
            self._calls_of_step.add(call_id)
            self._texts_of_calls[call_id] = ""
            yield {"type": "tool-input-start", "toolCallId": call_id, "toolName": chunk["name"]}
        self._texts_of_calls[call_id] += chunk["d"]
        yield {"type": "tool-input-delta", "toolCallId": call_id, "inputTextDelta": chunk["d"]}

    def _call(self, call_id: str) -> Iterator[Part]:
        if call_id in self._inputs:
            self._inputs.discard(call_id)
            yield {
                "type": "tool-input-available",
                "toolCallId": call_id,
                "toolName": self._names[call_id],
                "input": parsed(self._texts_of_calls.pop(call_id) or "{}"),
            }

    def _closed(self) -> Iterator[Part]:
        """End the texts and the inputs that are open."""
        yield from self._texts_ended()
        for call_id in sorted(self._inputs):
            yield from self._call(call_id)

    def _output(
        self, call_id: str, content: str, error: str | None, approval: Mapping[str, Any] | None
    ) -> Iterator[Part]:
        if call_id not in self._names:
            return
        yield from self._ensure_started()
        if approval is not None:
            if call_id in self._asked:
                yield _request(self._asked.pop(call_id))
            elif call_id not in self._decisions:
                yield _request(
                    Call(id=call_id, name="", input=None, digest=approval["digest"], approval=approval["id"])
                )
            yield _response(approval["id"], approval["approved"], approval.get("reason"))
            if not approval["approved"]:
                yield {"type": "tool-output-denied", "toolCallId": call_id}
                return
        if error is not None:
            yield {"type": "tool-output-error", "toolCallId": call_id, "errorText": error}
        else:
            yield {"type": "tool-output-available", "toolCallId": call_id, "output": parsed(content)}

    def _reset(self) -> Iterator[Part]:
        """Take back the parts of the step, unless they are stored."""
        self._held_back.clear()
        if self._step is None or self._is_empty_step or self._is_stored_step:
            return
        self._texts = dict.fromkeys(self._texts, "done")
        self._inputs.clear()
        for call_id in self._calls_of_step:
            # The client refuses the output of a call that it does not know.
            self._names.pop(call_id, None)
        self._calls_of_step = set()
        self._is_empty_step = True
        yield {"type": "reset-step"}

    def _commit(
        self,
        chunk: Mapping[str, Any],
        entries: Sequence[Entry],
        calls: Mapping[str, Call],
        *,
        has_thread: bool,
    ) -> Iterator[Part]:
        said = {each["id"]: each for each in chunk["said"]}
        if chunk["snapshot"] and has_thread:
            yield from self._reset()
            for entry in self._stored(entries):
                if entry.id in said and entry.id not in self._known:
                    yield from self._entry(entry)
        else:
            yield from self._closed()
            for result in self._held_back:
                approval = said.get(result["m"], {}).get("approval")
                yield from self._output(result["c"], result["content"], None, approval)
        self._held_back.clear()
        self._known |= said.keys()
        for question in chunk["asked"]:
            self._asked[question["id"]] = Call(
                id=question["id"],
                name=question["name"],
                input=None,
                digest=question["digest"],
                approval=question.get("approval"),
            )
        if not self._is_empty_step:
            # The step that follows one without parts goes on with its beginning, which the client has kept.
            yield from self._step_finished()
        self._next_step = None
        if chunk["received"] and has_thread:
            # Another person's or tab's message ends the answer.
            self._look_at(entries, {})
        self.is_over = self._has_ended

    def _caught_up(self, entries: Sequence[Entry], calls: Mapping[str, Call]) -> Iterator[Part]:
        """At the beginning of a turn, and at the end, yield the parts that are stored but not in the stream.

        The thread may be ahead, and have received the next message: these parts are then the last ones.
        """
        group = self._group(entries)
        if group is not None and not self._has_started:
            self.message_id = group.id
        for entry in self._stored(entries):
            if entry.id not in self._known | self._held:
                yield from self._entry(entry)
        self._known |= {entry.id for entry in entries}
        self._look_at(entries, calls)
        if not self._has_ended:
            # A call that the client has approved is still open if it needs another person's approval.
            self._asked = {
                call_id: call
                for call_id, call in calls.items()
                if call.approved is None or self._decisions.get(call_id) is not call.approved
            }


def _request(call: Call) -> Part:
    return {
        "type": "tool-approval-request",
        "approvalId": call.approval,
        "toolCallId": call.id,
        "approvalDescriptor": {"digest": call.digest},
    }


def _response(approval_id: str, approved: bool, reason: str | None) -> Part:
    response = {"type": "tool-approval-response", "approvalId": approval_id, "approved": approved}
    return {**response, "reason": reason} if reason else response
