"""The messages of a thread as they are stored, and as both protocols read them. Pure Python.

A stored message has the chat-completions shape. Beside it, a message has an ``id``, ``reasoning`` if the
agent streamed any, and ``chat``: the number of the step that said it (``step``), the order of its parts if it
is not the usual one (``parts``), the decision of an approval that a tool's result belongs to (``approval``),
the tokens (``usage``), the ids of calls that its step asks about and has not made (``asks``), true if the
chat has added it because the step has said nothing (``added``), and for a user's message what the client sent
with it (``client``) and the metadata of the UI message (``metadata``).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from helix_store.core.transcript import parts_of

__all__ = [
    "Entry",
    "Piece",
    "answer_id",
    "as_text",
    "called",
    "entries",
    "entry",
    "id_at",
    "id_of_post",
    "is_added",
    "is_data",
    "may_be_given",
    "own_id",
    "parsed",
    "reasoning_id",
    "text_id",
    "without_own_keys",
]

PieceKind = Literal["text", "reasoning", "call", "file", "data", "agent"]

OWN: Final = "chat"
OWN_OF_PARTS: Final = frozenset({"media_type", "ag_ui", "ui"})
"""The keys that the parts of a user's message have for clients: models refuse keys that they do not know."""
ADDED: Final = "added"
_GIVEN: Final = re.compile(r"message-[0-9]+|post-.+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of an assistant's message, in the order of the stream.

    ``text`` is the text, or the JSON text of a call's input; ``id`` is the id of a call, or of a message of a
    sub-agent, whose name and run are ``agent``; ``entry`` is that message.
    """

    kind: PieceKind
    text: str = ""
    id: str = ""
    name: str = ""
    value: Any = None
    agent: Mapping[str, Any] = field(default_factory=dict)
    entry: Entry | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One stored message. ``content`` is what it says: text, or for users also a list of parts."""

    id: str
    role: str
    content: Any = ""
    pieces: Sequence[Piece] = ()
    call_id: str = ""
    error: str | None = None
    step: int | None = None
    approval: Mapping[str, Any] | None = None
    usage: Sequence[Mapping[str, Any]] = ()
    asks: Sequence[str] = ()
    answer: str | None = None
    metadata: Any = None

    @property
    def calls(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.kind == "call"]


def reasoning_id(message_id: str, number: int) -> str:
    """Return the id of a message's reasoning; a message can have several."""
    return f"{message_id}-reasoning-{number}" if number else f"{message_id}-reasoning"


def text_id(message_id: str, number: int) -> str:
    return f"{message_id}-text-{number}" if number else f"{message_id}-text"


def answer_id(user_message_id: str) -> str:
    """Return the id of the answer to a user's message, in a protocol in which an answer is one message."""
    return f"answer-{hashlib.sha256(user_message_id.encode()).hexdigest()[:24]}"


def as_text(value: Any) -> str:
    """Return a tool's result as the text of its message."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def parsed(text: str) -> Any:
    """Return the JSON value of a text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def called(call: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the id, the name and the JSON text of the input of an entry of ``tool_calls``."""
    function = call.get("function")
    inner = function if isinstance(function, Mapping) else call
    arguments: Any = next((inner[key] for key in ("arguments", "input", "args") if key in inner), {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return str(call.get("id", "")), str(inner.get("name", "")), text or "{}"


def without_own_keys(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored message as a model expects it, without the keys that the chat has added.

    Data parts of a user's message are for clients, and left out too.
    """
    own = message.get(OWN)
    left = {key: value for key, value in message.items() if key not in ("id", OWN)}
    if isinstance(content := left.get("content"), list):
        left["content"] = [_without_own_keys(part) for part in content if not is_data(part)]
    if isinstance(own, Mapping) and own.get("reasoning"):
        left.pop("reasoning", None)
    return left


def _without_own_keys(part: Any) -> Any:
    if not isinstance(part, Mapping) or OWN_OF_PARTS.isdisjoint(part):
        return part
    return {key: value for key, value in part.items() if key not in OWN_OF_PARTS}


def is_added(message: Mapping[str, Any]) -> bool:
    """Return whether the chat has added a message to a step that has said nothing and asks about calls."""
    own = message.get(OWN)
    return isinstance(own, Mapping) and ADDED in own


def is_data(part: Any) -> bool:
    """Return whether a part of a user's message is data for clients, which models do not see."""
    return isinstance(part, Mapping) and str(part.get("type", "")).startswith("data-")


def own_id(message: Mapping[str, Any]) -> str | None:
    """Return the id that a message was stored with, or ``None``."""
    given = message.get("id")
    return given if isinstance(given, str) and given else None


def id_at(index: int) -> str:
    """Return the id of a message of the history that has none of its own."""
    return f"message-{index + 1}"


def id_of_post(post_id: str) -> str:
    """Return the id of a message that was posted without one: clients see it before it has an index."""
    return f"post-{post_id}"


def may_be_given(message_id: str) -> bool:
    """Return whether `id_at` or `id_of_post` may have given this id."""
    return _GIVEN.fullmatch(message_id) is not None


def entries(messages: Iterable[Mapping[str, Any]], first: int = 0) -> list[Entry]:
    return [entry(message, number) for number, message in enumerate(messages, first)]


def entry(message: Mapping[str, Any], number: int) -> Entry:
    """Read a stored message; ``number`` is its index, which names a message that has no id of its own."""
    own = message.get(OWN)
    own = own if isinstance(own, Mapping) else {}
    message_id = own_id(message) or id_at(number)
    role = str(message.get("role", ""))
    if role in ("tool", "function"):
        return _tool(message, message_id, own)
    if role != "assistant":
        return Entry(
            id=message_id,
            role=role,
            content=_content(message),
            answer=own.get("answer"),
            metadata=own.get("metadata"),
        )
    pieces = _pieces(message, message_id, own)
    return Entry(
        id=message_id,
        role=role,
        content="".join(piece.text for piece in pieces if piece.kind == "text"),
        pieces=pieces,
        step=own.get("step"),
        usage=own.get("usage", ()),
        asks=own.get("asks", ()),
    )


def _content(message: Mapping[str, Any]) -> Any:
    content = message.get("content")
    if isinstance(content, str | list):
        return content
    return "\n".join(part.text for part in parts_of(message) if part.kind == "text")


def _tool(message: Mapping[str, Any], message_id: str, own: Mapping[str, Any]) -> Entry:
    call_id, content = message.get("tool_call_id"), message.get("content")
    if not isinstance(call_id, str) or not isinstance(content, str):
        results = [part for part in parts_of(message) if part.kind == "result"]
        call_id = call_id or next((part.call_id for part in results if part.call_id), "")
        content = content if isinstance(content, str) else "\n".join(part.text for part in results)
    error = message.get("error")
    return Entry(
        id=message_id,
        role="tool",
        content=content,
        call_id=str(call_id),
        error=error if isinstance(error, str) else None,
        step=own.get("step"),
        approval=own.get("approval"),
    )


def _pieces(message: Mapping[str, Any], message_id: str, own: Mapping[str, Any]) -> list[Piece]:
    if "parts" in own:
        return _in_order(message, own["parts"])
    content, calls, reasoning = message.get("content"), message.get("tool_calls"), message.get("reasoning")
    if not (content is None or isinstance(content, str)) or not set(message) <= _SIMPLE:
        return _of_any_shape(message)
    pieces = []
    if isinstance(reasoning, str) and reasoning:
        pieces.append(Piece(kind="reasoning", text=reasoning))
    if content:
        pieces.append(Piece(kind="text", text=content))
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, Mapping):
            call_id, name, text = called(call)
            pieces.append(Piece(kind="call", id=call_id, name=name, text=text))
    return pieces


_SIMPLE: Final = frozenset({"role", "content", "tool_calls", "id", "reasoning", "name", "refusal", OWN})


def _of_any_shape(message: Mapping[str, Any]) -> list[Piece]:
    pieces = []
    for part in parts_of(message):
        if part.kind == "text":
            pieces.append(Piece(kind="text", text=part.text))
        elif part.kind == "thinking":
            pieces.append(Piece(kind="reasoning", text=part.text))
        elif part.kind == "call":
            pieces.append(Piece(kind="call", id=part.call_id or "", name=part.name, text=part.text or "{}"))
        elif part.kind == "file" and part.text.startswith(("http:", "https:", "data:", "/")):
            pieces.append(Piece(kind="file", text=part.text, name=part.name))
    return pieces


def _in_order(message: Mapping[str, Any], parts: Iterable[Mapping[str, Any]]) -> list[Piece]:
    texts = {"text": message.get("content") or "", "reasoning": message.get("reasoning") or ""}
    calls = {called(call)[0]: called(call) for call in message.get("tool_calls") or ()}
    pieces = []
    for part in parts:
        kind = part["type"]
        if kind in texts:
            length = part["length"]
            pieces.append(Piece(kind=kind, text=texts[kind][:length]))
            texts[kind] = texts[kind][length:]
        elif kind == "call":
            call_id, name, text = calls.get(part["id"], (part["id"], part.get("name", ""), "{}"))
            pieces.append(Piece(kind="call", id=call_id, name=name, text=part.get("arguments", text)))
        elif kind == "file":
            pieces.append(Piece(kind="file", text=part["url"], name=part["media_type"]))
        elif kind == "data":
            pieces.append(Piece(kind="data", name=part["name"], value=part["value"]))
        elif kind == "agent":
            inner = entry(part["message"], 0)
            pieces.append(Piece(kind="agent", id=inner.id, agent=part["agent"], entry=inner))
    return pieces
