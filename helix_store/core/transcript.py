"""The content of messages: texts, thinking, tool calls and their results, from any framework.

The known forms are those of OpenAI (chat and responses), Anthropic, LangChain and Pydantic AI. Nothing is
lost from messages of any other form: an unknown part is shown as its JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

__all__ = ["ConversationMessage", "Part", "parts_of"]

PartKind = Literal["text", "thinking", "call", "result", "file", "other"]

_TEXTS: Final = frozenset(
    {"text", "input_text", "output_text", "summary_text", "refusal", "user-prompt", "system-prompt"}
)
_THINKING: Final = frozenset({"thinking", "reasoning", "reasoning_text", "redacted_thinking"})
_CALLS: Final = frozenset({"tool_use", "function_call", "tool-call", "tool_call", "server_tool_use"})
_RESULTS: Final = frozenset({"tool_result", "function_call_output", "tool-return", "retry-prompt"})
_FILES: Final = frozenset(
    {"image", "input_image", "image_url", "file", "input_file", "document", "audio", "input_audio", "video"}
)
_TEXT_KEYS: Final = ("text", "thinking", "content", "refusal")
_FILE_NAME_KEYS: Final = ("filename", "file_name", "name", "title", "media_type", "mime_type", "format")
_ADDRESS_KEYS: Final = ("url", "image_url", "file_url", "file_id", "uri")
_DATA_KEYS: Final = ("data", "file_data", "base64", "bytes")
_CALL_ID_KEYS: Final = ("tool_call_id", "call_id", "tool_use_id", "id")


class CutText(str):
    """The start of text that was cut off."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a message. ``name`` and ``call_id`` belong to a tool call, or to the call of a result.

    The ``text`` of a call holds its arguments. The ``text`` of a file is its URL or its length, and its
    ``name`` is the name of the file or its media type.
    """

    kind: PartKind
    text: str
    name: str = ""
    call_id: str | None = None
    is_error: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationMessage:
    """A message of a conversation that an adapter stores, for people to read.

    ``number`` is 1 for the oldest message of the conversation. ``parts`` is ``None`` if the message cannot be
    read. ``step`` is the step that created it, if the framework counts steps. If only the start of a long
    message was read, ``is_cut`` is true. ``row`` names the row that holds the message by model and key.
    """

    number: int
    role: str
    parts: Sequence[Part] | None
    at: datetime | None = None
    step: int | None = None
    is_cut: bool = False
    row: tuple[type[Any], int] | None = None


@dataclass(frozen=True, slots=True)
class TurnPart:
    """A part of a message; for a call, also its result and the number of the message with the result."""

    part: Part
    result: Part | None = None
    result_sequence: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """The content of one message in a conversation, by its sequence number."""

    sequence: int
    role: str
    parts: list[TurnPart]


def turns(messages: Iterable[tuple[int, Mapping[str, Any]]]) -> list[Turn]:
    """Call `paired` for messages in a known form."""
    return paired((sequence, role_of(message), parts_of(message)) for sequence, message in messages)


def paired(messages: Iterable[tuple[int, str, Sequence[Part]]]) -> list[Turn]:
    """Return a conversation in order, with each result next to its call.

    A message is left out if it contains nothing but results of calls among these messages.
    """
    read = list(messages)
    results = _results_of_calls(read)
    shown_at_calls = {id(part) for part, _ in results.values()}
    conversation = []
    for sequence, role, parts in read:
        own = [TurnPart(part, *results.get(id(part), ())) for part in parts if id(part) not in shown_at_calls]
        if own or not parts:
            conversation.append(Turn(sequence, role, own))
    return conversation


def _results_of_calls(read: list[tuple[int, str, Sequence[Part]]]) -> dict[int, tuple[Part, int]]:
    """Return the result of each call and the result's sequence number, by the identity of the call's part.

    If an id is used again, its results are assigned in the order of its calls.
    """
    waiting: dict[str, list[Part]] = {}
    answered: dict[int, tuple[Part, int]] = {}
    for sequence, _, parts in read:
        for part in parts:
            if part.call_id is None:
                continue
            if part.kind == "call":
                waiting.setdefault(part.call_id, []).append(part)
            elif part.kind == "result" and waiting.get(part.call_id):
                answered[id(waiting[part.call_id].pop(0))] = part, sequence
    return answered


def role_of(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    return role if isinstance(role, str) else "?"


def parts_of(message: Mapping[str, Any]) -> list[Part]:
    """Return a message's parts in order: thinking, texts and calls, or the result that it contains."""
    if role_of(message) in ("tool", "function") or _type_of(message) in _RESULTS:
        return _parts_of_tool(message)
    if _type_of(message) in _CALLS | _THINKING and not message.get("content"):
        return [_part(message)]
    thinking = message.get("thinking")
    parts = [] if thinking in (None, "", []) else [Part(kind="thinking", text=_text(thinking))]
    for key in ("content", "parts"):
        parts.extend(_parts(message.get(key)))
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        # Some frameworks repeat the calls that are in the content.
        known = {part.call_id for part in parts if part.kind == "call"} - {None}
        parts.extend(part for part in map(_call, calls) if part.call_id not in known)
    return parts


def _type_of(item: Mapping[str, Any]) -> str:
    kind = item.get("type", item.get("part_kind"))
    return kind if isinstance(kind, str) else ""


def _parts_of_tool(message: Mapping[str, Any]) -> list[Part]:
    listed = (message.get(key) for key in ("content", "parts"))
    nested = [part for items in listed if isinstance(items, list) for part in _parts(items)]
    if any(part.kind == "result" for part in nested):
        return nested
    return [_result(message)]


def _parts(content: Any) -> list[Part]:
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [Part(kind="text", text=content)]
    items: Iterable[Any] = content if isinstance(content, list) else [content]
    return [_part(item) for item in items]


def _part(item: Any) -> Part:
    if not isinstance(item, Mapping):
        return Part(kind="text", text=_text(item))
    kind = _type_of(item)
    if kind in _CALLS:
        return _call(item)
    if kind in _RESULTS:
        return _result(item)
    if kind in _FILES:
        return _file(item, kind)
    text = next((item[key] for key in _TEXT_KEYS if isinstance(item.get(key), str)), None)
    if kind in _THINKING:
        summary = item.get("summary")
        said = text if text is not None else " ".join(part.text for part in _parts(summary))
        return Part(kind="thinking", text=said or f"[{kind}]")
    if text is not None and (kind in _TEXTS or not kind):
        return Part(kind="text", text=text)
    return Part(kind="other", text=_text(item), name=kind or "part")


def _call(call: Any) -> Part:
    if not isinstance(call, Mapping):
        return Part(kind="other", text=_text(call), name="call")
    function = call.get("function")
    named = function if isinstance(function, Mapping) else call
    name = named.get("name", named.get("tool_name", "?"))
    arguments = next((named[key] for key in ("arguments", "args", "input") if key in named), "")
    return Part(kind="call", text=_compact(arguments), name=_text(name), call_id=_call_id(call))


def _result(item: Mapping[str, Any]) -> Part:
    content = next((item[key] for key in ("content", "output", "result") if key in item), None)
    text = "\n".join(part.text for part in _parts(content)) if isinstance(content, list) else _text(content)
    name = item.get("name", item.get("tool_name"))
    return Part(
        kind="result",
        text=text,
        name="" if name is None else _text(name),
        call_id=_call_id(item),
        is_error=item.get("is_error") is True,
    )


def _file(item: Mapping[str, Any], kind: str) -> Part:
    """Return a file, with its URL or the length of its data. If it has neither, return ``other``."""
    nested = (item.get(key) for key in (kind, "source", "content"))
    facts: dict[str, Any] = dict(item)
    for each in nested:
        facts.update(each if isinstance(each, Mapping) else {})
    name = next((facts[key] for key in _FILE_NAME_KEYS if _is_text(facts.get(key))), kind)
    address = next((facts[key] for key in _ADDRESS_KEYS if _is_text(facts.get(key))), "")
    data = next((facts[key] for key in _DATA_KEYS if _is_text(facts.get(key))), "")
    if address.startswith("data:"):
        described, _, data = address.partition(",")
        name = described.removeprefix("data:").partition(";")[0] if name == kind else name
        address = ""
    if not address and not data:
        return Part(kind="other", text=_text(item), name=kind)
    # Three bytes of data become four characters of base64.
    size = f"{len(data.rstrip('=')) * 3 // 4:,} bytes"
    is_cut = any(isinstance(facts.get(key), CutText) for key in (*_ADDRESS_KEYS, *_DATA_KEYS))
    return Part(kind="file", text=address or (f"more than {size}" if is_cut else size), name=name)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _call_id(item: Mapping[str, Any]) -> str | None:
    return next((item[key] for key in _CALL_ID_KEYS if isinstance(item.get(key), str)), None)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _compact(arguments: Any) -> str:
    """Return arguments on one line; JSON text is rewritten without its newlines."""
    if not isinstance(arguments, str):
        return _text(arguments)
    try:
        return _text(json.loads(arguments)) if arguments.lstrip()[:1] in ("{", "[") else arguments
    except (ValueError, RecursionError):
        return arguments
