"""The messages of a thread as they are stored, and as both protocols read them. Pure Python.

A stored message has the chat-completions shape, or another one that `core.transcript` reads. Beside it, a
message has an ``id``, ``reasoning`` if the agent streamed any, and ``chat``: the number of the step that said
it (``step``), the order of its parts if it is not the usual one (``parts``), the ids of its calls and of its
results if it has others than the usual ones (``calls``, ``results``), the ids of the calls of its results if
these do not name them (``results_of``), the decision of an approval that a tool's result belongs to
(``approval``, or ``approvals`` by call if it has several results), the tokens (``usage``), the ids of calls
that its step asks about and has not made (``asks``), true if the chat has added it because the step has said
nothing (``added``), and for a user's message what the client sent with it (``client``) and the metadata of
the UI message (``metadata``).

An entry of ``parts`` refers to what the message says itself, so that nothing is stored twice: a ``length`` of
its text or of its reasoning, the ``id`` of a call, the ``number`` of a file. What the message does not say is
in the entry.

Agents, imports and other code can store any JSON object as a message. All functions read all of them: what
does not have the form that it should have is left out.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from helix_store.core.payloads import check_value
from helix_store.core.transcript import ROLES, Part, parts_of
from helix_store.exceptions import InvalidPayload, LimitExceeded

__all__ = [
    "Entry",
    "Piece",
    "answer_id",
    "as_text",
    "entries",
    "entries_of",
    "finite",
    "id_at",
    "id_of_call",
    "id_of_post",
    "is_added",
    "is_data",
    "is_of_agent",
    "is_of_user",
    "is_plain",
    "may_be_given",
    "own_id",
    "own_of",
    "parsed",
    "reasoning_id",
    "role_of",
    "text_id",
    "usual_pieces",
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
    """A stored message, or one of the results in it. ``content`` is what it says: text, or for users also a
    list of parts. ``name`` is the tool of a result that does not name its call.
    """

    id: str
    role: str
    content: Any = ""
    pieces: Sequence[Piece] = ()
    call_id: str = ""
    name: str = ""
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
    """Return the JSON value of a text, or the text itself if it is not JSON, or too deep for clients."""
    try:
        value = json.loads(text, parse_float=finite, parse_constant=finite)
        check_value(value, limit=len(text), path="")
    except (ValueError, RecursionError, InvalidPayload, LimitExceeded):
        return text
    return value


def finite(text: str) -> float:
    """Return a number of JSON. Python would also read NaN and infinity, which cannot be stored or sent."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("expected a finite number")
    return number


def without_own_keys(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored message as a model expects it, without the keys that the chat has added.

    Data parts of a user's message are for clients, and left out too.
    """
    left = {key: value for key, value in message.items() if key not in ("id", OWN)}
    if isinstance(content := left.get("content"), list):
        left["content"] = [_without_own_keys(part) for part in content if not is_data(part)]
    if own_of(message).get("reasoning"):
        left.pop("reasoning", None)
    return left


def _without_own_keys(part: Any) -> Any:
    if not isinstance(part, Mapping) or OWN_OF_PARTS.isdisjoint(part):
        return part
    return {key: value for key, value in part.items() if key not in OWN_OF_PARTS}


def is_added(message: Mapping[str, Any]) -> bool:
    """Return whether the chat has added a message to a step that has said nothing and asks about calls."""
    return ADDED in own_of(message)


def is_data(part: Any) -> bool:
    """Return whether a part of a user's message is data for clients, which models do not see."""
    return isinstance(part, Mapping) and str(part.get("type", "")).startswith("data-")


def own_of(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the chat has stored with a message."""
    own = message.get(OWN)
    if not isinstance(own, Mapping):
        return {}
    return {key: value for key, value in own.items() if _has_form(key, value)}


def _has_form(key: str, value: Any) -> bool:
    """Return whether a value has the form that the chat stores under a key."""
    match key:
        case "answer":
            return isinstance(value, str)
        case "client":
            return isinstance(value, Mapping) and value.keys() <= _OF_CLIENT and _has_lists(value)
        case "calls" | "results" | "results_of" | "asks":
            return isinstance(value, list) and all(isinstance(each, str) for each in value)
        case "parts":
            return isinstance(value, list) and all(map(_is_own_part, value))
        case "usage":
            return isinstance(value, list) and all(map(_are_tokens, value))
        case "approval":
            return _is_decision(value)
        case "approvals":
            return isinstance(value, Mapping) and all(map(_is_decision, value.values()))
    return True


_OF_CLIENT: Final = frozenset({"tools", "context", "forwarded_props", "state"})


def _has_lists(client: Mapping[str, Any]) -> bool:
    return all(isinstance(client.get(key, []), list) for key in ("tools", "context"))


def _is_own_part(part: Any) -> bool:
    match part:
        case {"type": "text" | "reasoning", "text": str()} | {"type": "text" | "reasoning", "length": int()}:
            return True
        case {"type": "call", "id": str()}:
            return all(isinstance(part.get(key, ""), str) for key in ("name", "arguments"))
        case {"type": "file", "media_type": str(), "number": int()}:
            return True
        case {"type": "file", "media_type": str(), "url": str()}:
            return True
        case {"type": "data", "name": str(), "value": _}:
            return True
        case {"type": "agent", "agent": {"id": str(), "name": str()} as agent, "message": Mapping()}:
            return isinstance(agent.get("parent", ""), str)
    return False


def _are_tokens(tokens: Any) -> bool:
    return isinstance(tokens, Mapping) and all(
        isinstance(value, int | float) for key, value in tokens.items() if key != "model"
    )


def _is_decision(value: Any) -> bool:
    match value:
        case {"id": str(), "approved": bool(), "digest": str()}:
            return isinstance(value.get("reason", ""), str)
    return False


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


def role_of(message: Mapping[str, Any]) -> str:
    """Return the role of a message under the name that it has in chat completions."""
    role = str(message.get("role", ""))
    return "tool" if role == "function" else ROLES.get(role, role)


def is_of_user(message: Mapping[str, Any]) -> bool:
    """Return whether a user has said a message.

    Some models get the results of tools as messages of users, and an agent can say such a message in a step.
    """
    if role_of(message) != "user" or "step" in own_of(message):
        return False
    return any(entry.role == "user" for entry in entries_of(message, 0))


def is_of_agent(message: Mapping[str, Any]) -> bool:
    """Return whether a message is an answer, or results of tools."""
    return all(entry.role in ("assistant", "tool") for entry in entries_of(message, 0))


def entries(messages: Iterable[Mapping[str, Any]], first: int = 0) -> list[Entry]:
    """Read stored messages. ``first`` is the index of the first one."""
    found = [entry for number, message in enumerate(messages, first) for entry in entries_of(message, number)]
    if any(entry.role == "tool" and not entry.call_id for entry in found):
        return list(_with_calls(found))
    return found


def _with_calls(found: Iterable[Entry]) -> Iterator[Entry]:
    """Yield entries. A result without the id of its call is that of the oldest open call of its tool."""
    names: dict[str, str] = {}
    for entry in found:
        names |= {call.id: call.name for call in entry.calls}
        if entry.role != "tool":
            yield entry
            continue
        call_id = entry.call_id or next((key for key, name in names.items() if name == entry.name), "")
        names.pop(call_id, None)
        yield replace(entry, call_id=call_id)


def entries_of(message: Mapping[str, Any], number: int) -> list[Entry]:
    """Read a stored message; ``number`` is its index, which names a message that has no id of its own.

    A message can hold the results of several tools, each of which is an entry. If it says something else too,
    this comes first for an answer and last for other roles, and has the id of the message.
    """
    own = own_of(message)
    message_id = own_id(message) or id_at(number)
    role = role_of(message)
    if role == "tool":
        return _results(message, _parts_of_tool(message), own, message_id, has_id=True)
    if is_plain(message) or (role != "assistant" and _is_posted(message.get("content"))):
        return [_said(message, role, own, message_id)]
    parts = _parts({**message, "role": role})
    results = [part for part in parts if part.kind == "result"]
    if role == "assistant":
        said = _said(message, role, own, message_id)
        return [said, *_results(message, results, own, message_id, has_id=False)]
    if results and len(results) == len(parts):
        return _results(message, results, own, message_id, has_id=True)
    return [
        *_results(message, results, own, message_id, has_id=False),
        _said(message, role, own, message_id),
    ]


def _said(message: Mapping[str, Any], role: str, own: Mapping[str, Any], message_id: str) -> Entry:
    if role != "assistant":
        return Entry(
            id=message_id,
            role=role,
            content=_content(message),
            answer=own.get("answer"),
            metadata=own.get("metadata"),
        )
    pieces = usual_pieces(message, message_id)
    if "parts" in own:
        pieces = _in_order(pieces, own["parts"])
    return Entry(
        id=message_id,
        role=role,
        content="".join(piece.text for piece in pieces if piece.kind == "text"),
        pieces=pieces,
        step=own.get("step"),
        usage=own.get("usage", ()),
        asks=own.get("asks", ()),
    )


# --- Results of tools, and what users say ----------------------------------------------------------------


def _results(
    message: Mapping[str, Any],
    results: Sequence[Part],
    own: Mapping[str, Any],
    message_id: str,
    *,
    has_id: bool,
) -> list[Entry]:
    """Return the results in a message. If they are all of it (``has_id``), the first one has its id."""
    ids, calls = (dict(enumerate(own.get(key, ()))) for key in ("results", "results_of"))
    approvals, error = own.get("approvals", {}), message.get("error")
    found = []
    for index, part in enumerate(results):
        usual = message_id if has_id and index == 0 else f"{message_id}-result-{index}"
        call_id = part.call_id or calls.get(index, "")
        failure = error if isinstance(error, str) else part.text if part.is_error else None
        found.append(
            Entry(
                id=ids.get(index, usual),
                role="tool",
                content=part.text,
                call_id=call_id,
                name=part.name,
                error=failure,
                step=own.get("step"),
                approval=approvals.get(call_id, own.get("approval")),
            )
        )
    return found


def _parts_of_tool(message: Mapping[str, Any]) -> list[Part]:
    call_id, content = message.get("tool_call_id"), message.get("content")
    if isinstance(call_id, str) and isinstance(content, str) and message.keys() <= _SIMPLE_RESULT:
        return [Part(kind="result", text=content, call_id=call_id)]
    parts = _parts({**message, "role": "tool"})
    return [part for part in parts if part.kind == "result"]


_SIMPLE_RESULT: Final = frozenset({"role", "tool_call_id", "content", "id", "name", "error", OWN})


def _parts(message: Mapping[str, Any]) -> list[Part]:
    """Return the parts of a message of any shape, in which the chat's keys have no meaning."""
    return parts_of({key: value for key, value in message.items() if key not in ("id", OWN)})


def _is_posted(content: Any) -> bool:
    """Return whether content has the parts that clients post, which have the form of chat completions."""
    return isinstance(content, list) and all(map(_is_posted_part, content))


def _is_posted_part(part: Any) -> bool:
    match part:
        case {"type": "text", "text": str()} | {"type": "image_url" | "file"}:
            return True
    return is_data(part)


def _content(message: Mapping[str, Any]) -> Any:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return [
            part
            for each in content
            for part in ([each] if _is_posted_part(each) else _as_posted(_parts({"content": [each]})))
        ]
    parts = list(_as_posted(_parts(message)))
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _as_posted(parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
    """Yield texts and files in the form of chat completions."""
    for part in parts:
        if part.kind == "text":
            yield {"type": "text", "text": part.text}
        elif (url := _url(part)) is not None:
            stored: dict[str, Any] = {"type": "file", "file": {"file_data": url}}
            if part.name.partition("/")[0] == "image":
                stored = {"type": "image_url", "image_url": {"url": url}}
            media_type = _media_type(part)
            yield {**stored, "media_type": media_type} if media_type else stored


def _url(part: Part) -> str | None:
    """Return the URL of a file that clients can load."""
    if part.kind != "file":
        return None
    if part.text.startswith(("http:", "https:", "data:", "/")):
        return part.text
    return None if part.data is None else f"data:{_media_type(part)};base64,{part.data}"


def _media_type(part: Part) -> str:
    return part.name if "/" in part.name else ""


# --- What an answer says ---------------------------------------------------------------------------------


def is_plain(message: Mapping[str, Any]) -> bool:
    """Return whether a message says no more than chat completions have: text, calls and reasoning as text."""
    others = message.keys() - _SIMPLE
    if others and any(message[key] not in _EMPTY for key in others):
        return False
    content, reasoning = message.get("content"), message.get("reasoning")
    has_texts = isinstance(content, str | None) and isinstance(reasoning, str | None)
    return has_texts and isinstance(message.get("tool_calls"), list | None)


_EMPTY: Final[tuple[Any, ...]] = (None, "", [], {})
_SIMPLE: Final = frozenset({"role", "content", "tool_calls", "id", "reasoning", "name", OWN})


def usual_pieces(message: Mapping[str, Any], message_id: str) -> list[Piece]:
    """Return what an assistant's message says itself, in the order in which it says it."""
    pieces: list[Piece] = []
    number = 0
    for piece in _plain(message) if is_plain(message) else _of_any_shape(message):
        if piece.kind == "call":
            number += 1
            if not piece.id:
                given = dict(enumerate(own_of(message).get("calls", ()), 1))
                piece = replace(piece, id=given.get(number) or id_of_call(message_id, number))
        pieces.append(piece)
    return pieces


def id_of_call(message_id: str, number: int) -> str:
    """Return the usual id of a message's call that has none of its own."""
    return f"{message_id}-call-{number}"


def _plain(message: Mapping[str, Any]) -> Iterator[Piece]:
    if reasoning := message.get("reasoning"):
        yield Piece(kind="reasoning", text=reasoning)
    if content := message.get("content"):
        yield Piece(kind="text", text=content)
    for call in message.get("tool_calls") or ():
        if isinstance(call, Mapping):
            yield _call(call)


def _call(call: Mapping[str, Any]) -> Piece:
    """Return the piece of an entry of ``tool_calls``."""
    function = call.get("function")
    inner = function if isinstance(function, Mapping) else call
    arguments: Any = next((inner[key] for key in ("arguments", "input", "args") if key in inner), {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    own = str(call.get("id") or "")
    return Piece(kind="call", id=own, name=str(inner.get("name", "")), text=text or "{}")


def _of_any_shape(message: Mapping[str, Any]) -> Iterator[Piece]:
    for part in _parts({**message, "role": "assistant"}):
        if part.kind == "text" and part.text:
            yield Piece(kind="text", text=part.text)
        elif part.kind == "thinking":
            yield Piece(kind="reasoning", text=part.text)
        elif part.kind == "call":
            yield Piece(kind="call", id=part.call_id or "", name=part.name, text=part.text or "{}")
        elif (url := _url(part)) is not None:
            yield Piece(kind="file", text=url, name=part.name)


def _in_order(usual: Sequence[Piece], parts: Iterable[Mapping[str, Any]]) -> list[Piece]:
    """Return what a message says and what the chat has added to it, in the order of its parts.

    What the parts do not refer to comes last: nothing that a message says is left out.
    """
    texts = {
        kind: "".join(piece.text for piece in usual if piece.kind == kind) for kind in ("reasoning", "text")
    }
    calls = [piece for piece in usual if piece.kind == "call"]
    files = dict(enumerate(piece for piece in usual if piece.kind == "file"))
    pieces = []
    for part in parts:
        kind = part["type"]
        if kind in texts and "text" in part:
            pieces.append(Piece(kind=kind, text=part["text"]))
        elif kind in texts:
            length = part["length"]
            pieces.append(Piece(kind=kind, text=texts[kind][:length]))
            texts[kind] = texts[kind][length:]
        elif kind == "call":
            call = next((each for each in calls if each.id == part["id"]), None)
            if call is None:
                call = Piece(kind="call", id=part["id"], name=part.get("name", ""), text="{}")
            else:
                calls.remove(call)
            pieces.append(replace(call, text=part.get("arguments", call.text)))
        elif kind == "file":
            file = files.pop(part.get("number", -1), None)
            url = part.get("url") if file is None else file.text
            if url is not None:
                pieces.append(Piece(kind="file", text=url, name=part["media_type"]))
        elif kind == "data":
            pieces.append(Piece(kind="data", name=part["name"], value=part["value"]))
        elif kind == "agent":
            for inner in entries_of(part["message"], 0)[:1]:
                pieces.append(Piece(kind="agent", id=inner.id, agent=part["agent"], entry=inner))
    left: Iterable[tuple[Any, str]] = texts.items()
    pieces += [Piece(kind=kind, text=text) for kind, text in left if text]
    return [*pieces, *calls, *files.values()]
