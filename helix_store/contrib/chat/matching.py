"""What a step says, matched with what it has streamed, and what is stored of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from helix_store import call_digest, new_id
from helix_store.contrib.chat.stored import (
    ADDED,
    OWN,
    Entry,
    Piece,
    entries,
    entries_of,
    id_of_call,
    is_plain,
    own_id,
    parsed,
    role_of,
    usual_pieces,
)

__all__ = ["Matching", "Said"]

_LONGEST_KEPT_INPUT: Final = 20_000
"""The longest JSON text of a call's input that is stored again because it was streamed with other spaces."""


@dataclass(slots=True)
class Said:
    """A message that is in the stream, and not stored yet. ``parts`` are in the order of the stream."""

    id: str
    role: str = "assistant"
    agent: Mapping[str, Any] | None = None
    parts: list[dict[str, Any]] = field(default_factory=list)
    call_id: str = ""
    content: str = ""
    is_matched: bool = False

    def add(self, kind: str, text: str, **key: Any) -> int:
        """Add text to the last part of this kind, and return its number among the parts of the kind."""
        last = self.parts[-1] if self.parts else None
        if last is None or last["type"] != kind or any(last.get(name) != key[name] for name in key):
            self.parts.append({"type": kind, "text": text, **key})
        else:
            last["text"] += text
        return sum(1 for part in self.parts if part["type"] == kind) - 1

    def text(self, kind: str) -> str:
        return "".join(part["text"] for part in self.parts if part["type"] == kind)

    def call(self, call_id: str) -> dict[str, Any] | None:
        return next((part for part in self.parts if part["type"] == "call" and part["id"] == call_id), None)


class Matching:
    """The messages that a step is about to store, matched with the messages that are in the stream.

    ``said`` is what the step has streamed. ``stream`` puts a chunk in the stream, and ``earlier`` returns the
    messages of the earlier steps of the answer, oldest first. ``results`` are the answers to calls that the
    turn began with.
    """

    def __init__(
        self,
        said: Sequence[Said],
        *,
        step_number: int,
        stream: Callable[[dict[str, Any]], object],
        earlier: Callable[[], Sequence[Mapping[str, Any]]],
        results: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._said = said
        self._step_number = step_number
        self._stream = stream
        self._earlier = earlier
        self._results = results
        self._answers = [each for each in said if each.role == "assistant"]
        self._next_answer = 0
        self._surplus = 0

    def matched(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        asked: Mapping[str, Mapping[str, Any]],
        usage: Sequence[Mapping[str, Any]],
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return a step's messages with their ids and parts, and whether the stream shows them as they are.

        What was not streamed is put in the stream. A call that the step asks about and that no message of the
        answer makes is added to the step's last message, or to a message of its own: a client must be able to
        show what it is asked. A message's call without an id makes it if it has the same name and input.
        """
        self._surplus = len(self._answers) - sum(role_of(message) == "assistant" for message in messages)
        others = _without_calls_of(asked, messages)
        new = _without_calls_of(others, self._earlier()) if others else others
        stored: list[dict[str, Any]] = []
        is_shown = True
        for message in messages:
            kept, is_same = self._match(message, stored, asked=_without_calls_of(new, stored))
            stored.append(kept)
            is_shown = is_shown and is_same
        is_shown = self._add_questions(stored, others, new) and is_shown
        own = [message for message in stored if role_of(message) == "assistant"]
        if own:
            self._add_parts_left(own[-1])
        if own and usage:
            own[-1][OWN]["usage"] = list(usage)
        return stored, is_shown and self._is_stored(stored)

    def _add_questions(
        self,
        stored: list[dict[str, Any]],
        asked: Mapping[str, Mapping[str, Any]],
        new: Mapping[str, Mapping[str, Any]],
    ) -> bool:
        """Add the calls that the step asks about; those that are ``new`` were not made before the step."""
        asked, new = (_without_calls_of(calls, stored) for calls in (asked, new))
        asking = next((each for each in reversed(stored) if role_of(each) == "assistant"), None)
        is_shown = True
        if asking is None and new:
            said_nothing = {"role": "assistant", "content": ""}
            asking, is_shown = self._match_answer(
                said_nothing, {"step": self._step_number, ADDED: True}, asked={}
            )
            stored.append(asking)
        if asking is not None and asked:
            asking[OWN]["asks"] = list(asked)
            for call_id, call in new.items():
                self._add_call(asking, call_id, call)
        return is_shown

    def _is_stored(self, stored: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether all that was streamed is stored, and the results are in the order of the stream."""
        streamed = [said.id for said in self._said if said.role == "tool"]
        ids = [entry.id for entry in _results_in(entries(stored))]
        return all(said.is_matched for said in self._said) and ids[: len(streamed)] == streamed

    def _match(
        self,
        message: Mapping[str, Any],
        before: Sequence[Mapping[str, Any]],
        *,
        asked: Mapping[str, Mapping[str, Any]],
    ) -> tuple[dict[str, Any], bool]:
        """Match a message of the step, which comes after those ``before`` it."""
        own: dict[str, Any] = {"step": self._step_number}
        if role_of(message) == "assistant":
            kept, is_shown = self._match_answer(message, own, asked=asked)
        else:
            kept = {**message, "id": own_id(message) or new_id(), OWN: own}
            # A step rarely says messages of other roles, so their readers load them.
            is_shown = all(entry.role == "tool" for entry in entries_of(kept, 0))
        return kept, self._match_results(kept, before) and is_shown

    def _match_results(self, kept: dict[str, Any], before: Sequence[Mapping[str, Any]]) -> bool:
        """Match the results in a message, and return whether the stream shows them as they are."""
        own = kept[OWN]
        found = _results_in(entries_of(kept, 0))
        if any(not entry.call_id for entry in found):
            read = _results_in(entries([*self._earlier(), *before, kept]))
            if any(results_of := [entry.call_id for entry in read[-len(found) :]]):
                own["results_of"] = results_of
                found = _results_in(entries_of(kept, 0))
        streamed = [self._streamed_result(entry.call_id) for entry in found]
        if found and found[0].id == kept["id"] and streamed[0] is not None:
            kept["id"] = streamed[0].id
        usual = [entry.id for entry in _results_in(entries_of(kept, 0))]
        ids = [each if said is None else said.id for each, said in zip(usual, streamed, strict=True)]
        if ids != usual:
            own["results"] = ids
        is_shown = True
        for entry, entry_id, said in zip(found, ids, streamed, strict=True):
            if said is not None:
                is_shown = is_shown and entry.error is None and entry.content == said.content
            elif entry.error is None and entry.call_id:
                self._stream({"type": "result", "m": entry_id, "c": entry.call_id, "content": entry.content})
            else:
                is_shown = False
        decisions = {
            entry.call_id: _decision_of(self._results[entry.call_id])
            for entry in found
            if self._results.get(entry.call_id, {}).get("approval_id") is not None
        }
        if decisions and len(found) == 1:
            (own["approval"],) = decisions.values()
        elif decisions:
            own["approvals"] = decisions
        return is_shown

    def _streamed_result(self, call_id: str) -> Said | None:
        """Return the result of a call that is in the stream, once."""
        for said in self._said:
            if said.role == "tool" and said.call_id == call_id and not said.is_matched:
                said.is_matched = True
                return said
        return None

    def _match_answer(
        self, message: Mapping[str, Any], own: dict[str, Any], *, asked: Mapping[str, Mapping[str, Any]]
    ) -> tuple[dict[str, Any], bool]:
        said = self._streamed_answer(message) or Said(own_id(message) or new_id())
        said.is_matched = True
        kept = {**message, "id": said.id, OWN: own}
        if ids := _ids_of_calls(usual_pieces(kept, said.id), said, asked):
            own["calls"] = ids
        usual = usual_pieces(kept, said.id)
        is_silent = all(part["type"] not in _ANSWER for part in said.parts)
        files = {part["url"] for part in said.parts if part["type"] == "file"}
        for piece in usual:
            if piece.kind == "call" and said.call(piece.id) is None and not self._has_streamed(piece.id):
                self._stream_call(said.id, piece.id, piece.name, piece.text)
                said.parts.append({"type": "call", "id": piece.id, "name": piece.name, "text": piece.text})
            elif is_silent and piece.kind in _WORDS:
                number = sum(part["type"] == piece.kind for part in said.parts)
                self._stream({"type": piece.kind, "m": said.id, "i": number, "d": piece.text})
                said.parts.append({"type": piece.kind, "text": piece.text})
            elif is_silent and piece.kind == "file" and piece.text not in files:
                part = {"type": "file", "url": piece.text, "media_type": piece.name}
                self._stream({**part, "m": said.id})
                said.parts.append(part)
        streamed = [_key_of_part(part) for part in said.parts]
        _keep_parts(kept, said, usual)
        answer, *_ = entries_of(kept, 0)
        return kept, streamed == [_key_of_piece(piece) for piece in answer.pieces]

    def _streamed_answer(self, message: Mapping[str, Any]) -> Said | None:
        """Return the next message in the stream.

        An agent may stream more messages than it says, as with a tool's result between two texts. Then the
        next one with the message's text is meant.
        """
        candidates = self._answers[self._next_answer :][: max(self._surplus, 0) + 1]
        text = "".join(piece.text for piece in usual_pieces(message, "") if piece.kind == "text")
        skipped = next((n for n, said in enumerate(candidates) if text and said.text("text") == text), 0)
        self._surplus -= skipped
        self._next_answer += skipped + 1
        return candidates[skipped] if candidates else None

    def _add_parts_left(self, message: dict[str, Any]) -> None:
        """Add the reasoning, files, data and sub-agents of streamed messages that the step does not say."""
        before: list[dict[str, Any]] = []
        after: list[dict[str, Any]] = []
        found = before
        for said in self._answers:
            if said.id == message["id"]:
                found = after
            elif not said.is_matched:
                parts = _stored_parts(said, [], keeps_reasoning=True)
                found += [part for part in parts if part["type"] != "text"]
        if before or after:
            message[OWN]["parts"] = [*before, *_parts_of(message), *after]

    def _has_streamed(self, call_id: str) -> bool:
        return any(said.call(call_id) is not None for said in self._said)

    def _stream_call(self, message_id: str, call_id: str, name: str, arguments: str) -> None:
        self._stream({"type": "input", "m": message_id, "c": call_id, "name": name, "d": arguments})
        self._stream({"type": "call", "m": message_id, "c": call_id})

    def _add_call(self, message: dict[str, Any], call_id: str, call: Mapping[str, Any]) -> None:
        """Add a call to a message's parts. The model does not see it."""
        arguments = json.dumps(call.get("input"), ensure_ascii=False)
        added = {"type": "call", "id": call_id, "name": call["tool_name"], "arguments": arguments}
        message[OWN]["parts"] = [*_parts_of(message), added]
        if not self._has_streamed(call_id):
            self._stream_call(message["id"], call_id, call["tool_name"], arguments)


def _decision_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decision of an approval as it is stored with the result of its call."""
    decision = {
        "id": answer["approval_id"],
        "approved": answer.get("approved") is True,
        "digest": answer.get("digest") or call_digest(answer.get("tool_name", ""), answer.get("input")),
    }
    if isinstance(reason := answer.get("reason"), str) and reason:
        decision["reason"] = reason
    return decision


def _without_calls_of(
    asked: Mapping[str, Mapping[str, Any]], messages: Iterable[Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    if not asked:
        return {}
    made = {call.id for each in entries(messages) for call in each.calls}
    return {call_id: call for call_id, call in asked.items() if call_id not in made}


def _results_in(found: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in found if entry.role == "tool"]


def _ids_of_calls(usual: Iterable[Piece], said: Said, asked: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the ids of a message's calls; none if they are the usual ones.

    A call without an id of its own has that of the first call with its name and input that the message has
    streamed, or else that its step asks about.
    """
    calls = [piece for piece in usual if piece.kind == "call"]
    known = {part["id"]: (part["name"], part["text"]) for part in said.parts if part["type"] == "call"}
    for call_id, question in asked.items():
        known.setdefault(call_id, (question["tool_name"], json.dumps(question.get("input"))))
    ids = [call.id for call in calls]
    for number, call in enumerate(calls, 1):
        if call.id == id_of_call(said.id, number):
            ids[number - 1] = next(
                (
                    call_id
                    for call_id, (name, text) in known.items()
                    if call_id not in ids and name == call.name and _is_same_json(text, call.text)
                ),
                call.id,
            )
    return [] if ids == [call.id for call in calls] else ids


# --- What is stored of what was streamed -----------------------------------------------------------------


def _key_of_part(part: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what distinguishes a streamed part for clients, as `_key_of_piece` does for what is stored."""
    kind = part["type"]
    if kind == "call":
        return kind, part["id"], part["name"], part["text"]
    if kind == "file":
        return kind, part["url"], part["media_type"]
    if kind == "data":
        return kind, part["name"]
    return (kind, part["said"].id) if kind == "agent" else (kind, part["text"])


def _key_of_piece(piece: Piece) -> tuple[str, ...]:
    if piece.kind == "call":
        return piece.kind, piece.id, piece.name, piece.text
    if piece.kind == "file":
        return piece.kind, piece.text, piece.name
    # Data and messages of sub-agents are stored as they were streamed.
    return piece.kind, {"data": piece.name, "agent": piece.id}.get(piece.kind, piece.text)


def _keep_parts(kept: dict[str, Any], said: Said, usual: Sequence[Piece]) -> None:
    """Add to a message what it does not say itself, and the order of its parts if it is not the usual one.

    ``usual`` is what it says itself.
    """
    reasoning = said.text("reasoning")
    is_unsaid = bool(reasoning) and not any(piece.kind == "reasoning" for piece in usual)
    if is_unsaid and is_plain(kept):
        kept["reasoning"] = reasoning
        kept[OWN]["reasoning"] = True
        usual = usual_pieces(kept, said.id)
        is_unsaid = False
    parts = _stored_parts(said, usual, keeps_reasoning=is_unsaid)
    if not (_is_said(usual, said, "text") and (is_unsaid or _is_said(usual, said, "reasoning"))):
        # The text is not what was streamed: it comes first, and everything else in the streamed order.
        words = [part for part in parts if "text" in part]
        words += [part for part in _usual_parts(usual) if part["type"] in _WORDS]
        parts = [*words, *(part for part in parts if part["type"] not in _WORDS)]
    if parts != _usual_parts(usual):
        kept[OWN]["parts"] = parts


_WORDS: Final = ("text", "reasoning")
_ANSWER: Final = (*_WORDS, "call")


def _is_said(usual: Iterable[Piece], said: Said, kind: str) -> bool:
    return said.text(kind) == "".join(piece.text for piece in usual if piece.kind == kind)


def _parts_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a message that is going to be stored."""
    own = message[OWN]
    return own["parts"] if "parts" in own else _usual_parts(usual_pieces(message, message["id"]))


def _usual_parts(usual: Iterable[Piece]) -> list[dict[str, Any]]:
    """Return the parts that refer to all that a message says itself, in its order."""
    parts: list[dict[str, Any]] = []
    files = 0
    for piece in usual:
        if piece.kind == "call":
            parts.append({"type": "call", "id": piece.id})
        elif piece.kind == "file":
            parts.append({"type": "file", "number": files, "media_type": piece.name})
            files += 1
        else:
            parts.append({"type": piece.kind, "length": len(piece.text)})
    return parts


def _stored_parts(
    said: Said, usual: Sequence[Piece], *, keeps_reasoning: bool = False
) -> list[dict[str, Any]]:
    """Return the parts of a message in the streamed order, without calls that the message does not make."""
    calls = {piece.id: piece.text for piece in usual if piece.kind == "call"}
    files: list[str | None] = [piece.text for piece in usual if piece.kind == "file"]
    stored: list[dict[str, Any]] = []
    for part in said.parts:
        kind = part["type"]
        if kind == "reasoning" and keeps_reasoning:
            stored.append({"type": kind, "text": part["text"]})
        elif kind in _WORDS:
            stored.append({"type": kind, "length": len(part["text"])})
        elif kind == "agent":
            message = _message_of_agent(part["said"])
            stored.append({"type": kind, "agent": dict(part["agent"]), "message": message})
        elif kind == "file" and part["url"] in files:
            number = files.index(part["url"])
            stored.append({"type": kind, "number": number, "media_type": part["media_type"]})
            files[number] = None
        elif kind != "call":
            stored.append(dict(part))
        elif part["id"] in calls:
            stored.append(_stored_call(part, calls[part["id"]]))
    return stored


def _stored_call(part: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    stored = {"type": "call", "id": part["id"]}
    text = part["text"]
    if text != arguments and len(text) <= _LONGEST_KEPT_INPUT and _is_same_json(text, arguments):
        stored["arguments"] = text
    return stored


def _is_same_json(text: str, other: str) -> bool:
    # In Python, true and 1 are equal.
    return json.dumps(parsed(text), sort_keys=True) == json.dumps(parsed(other), sort_keys=True)


def _message_of_agent(said: Said) -> dict[str, Any]:
    if said.role == "tool":
        return {"role": "tool", "id": said.id, "tool_call_id": said.call_id, "content": said.content}
    calls = [part for part in said.parts if part["type"] == "call"]
    message: dict[str, Any] = {"role": "assistant", "id": said.id, "content": said.text("text")}
    if calls:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["text"]},
            }
            for call in calls
        ]
    if reasoning := said.text("reasoning"):
        message["reasoning"] = reasoning
    usual = usual_pieces(message, said.id)
    parts = _stored_parts(said, usual)
    if parts != _usual_parts(usual):
        message[OWN] = {"parts": parts}
    return message
