"""The content of messages: texts, thinking, tool calls and their results, from any framework.

The known forms are those of OpenAI (chat and responses), Anthropic, Gemini, Bedrock's Converse API, Cohere,
LangChain and Pydantic AI. Nothing is lost from messages of any form: a rule removes the fields that it shows
from the message, and the fields that no rule has removed are shown as their JSON.

The characters that people cannot see, for all pages, terminals and Markdown: stored text with escapes.

A person compares and approves what is shown, so two texts that differ must not look alike.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, Literal

__all__ = [
    "KEPT_IN_PROSE",
    "SPACES",
    "ConversationMessage",
    "Part",
    "is_invisible",
    "is_unread",
    "parts_of",
    "visible",
    "visible_json",
]


_INVISIBLE_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"})
"""Control and format characters (also tags and bidirectional controls), unassigned and private characters,
lone surrogates, and all separators except the space."""

_BLANK: Final = frozenset(
    # Letters and symbols without a glyph: grapheme joiner, Hangul fillers, Khmer inherent vowels, Braille.
    "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"
    # Mongolian selectors; the vowel separator was a space in older versions of Unicode.
    "\u180b\u180c\u180d\u180e\u180f"
)
_SELECTORS: Final = (range(0xFE00, 0xFE10), range(0xE0100, 0xE01F0))
"""Variation selectors, which change the look of the character before them, or do not."""

SPACES: Final = "".join(char for char in map(chr, range(0x3001)) if unicodedata.category(char) == "Zs")

KEPT_IN_PROSE: Final = f"\u200c\u200d\ufe0f{SPACES}"
"""The characters that the scripts and emoji of messages need: joiners, the selector of emoji, and spaces."""

_ASCII: Final = re.compile(r"[ -\[\]-~]*")
_HEX: Final = "[0-9a-fA-F]"
_LIKE_AN_ESCAPE: Final = re.compile(rf"u{_HEX}{{4}}|U{_HEX}{{8}}|x{_HEX}{{2}}")
_LIKE_A_SHORT_ESCAPE: Final = re.compile(rf"[tnr]|{_LIKE_AN_ESCAPE.pattern}")
_RUNS: Final = re.compile(r"\\+|[^\\]")


@lru_cache(4_096)
def is_invisible(char: str) -> bool:
    """Return whether people cannot see a character, or cannot tell it from another one."""
    if char == " ":
        return False
    return (
        unicodedata.category(char) in _INVISIBLE_CATEGORIES
        or char in _BLANK
        or any(ord(char) in selectors for selectors in _SELECTORS)
    )


def visible(text: str, *, keep: str = "", is_short: bool = False) -> str:
    """Return plain text in which each invisible character is an escape, except those in ``keep``.

    Backslashes before an escape, and before text that looks like one, are doubled, so the result tells an
    escape from text. If ``is_short``, escapes are as short as in Python, such as ``\\n`` and ``\\x1b``.
    """
    if _ASCII.fullmatch(text):
        return text
    pieces: list[str] = []
    backslashes = ""
    exact = _exactly_shown(text)
    escape = _short_escape if is_short else _escape
    like_an_escape = _LIKE_A_SHORT_ESCAPE if is_short else _LIKE_AN_ESCAPE
    for match in _RUNS.finditer(text):
        piece = match[0]
        if piece[0] == "\\":
            backslashes = piece
            pieces.append(piece)
            if like_an_escape.match(text, match.end()):
                pieces.append(piece)
                backslashes = ""
            continue
        if piece in keep or not (is_invisible(piece) or (piece in exact)):
            pieces.append(piece)
        else:
            pieces += (backslashes, escape(piece))
        backslashes = ""
    return "".join(pieces)


def visible_json(text: str) -> str:
    """Return JSON text in which each invisible character except a newline is an escape.

    JSON text doubles each backslash of a string, so the result tells an escape from text. The text may be a
    part of a document.
    """
    if text.isascii():
        return _CONTROLS.sub(lambda match: _escape(match[0]), text)
    exact = _exactly_shown(text)
    return "".join(
        _escape(char) if char != "\n" and (is_invisible(char) or char in exact) else char for char in text
    )


_CONTROLS: Final = re.compile("[\x00-\x09\x0b-\x1f\x7f]")


def _exactly_shown(text: str) -> frozenset[str]:
    """Return the characters of a text that look like others: those that the normal form NFC would replace."""
    if unicodedata.is_normalized("NFC", text):
        return frozenset()
    return frozenset(
        char
        for char in set(text)
        if unicodedata.combining(char) or not unicodedata.is_normalized("NFC", char)
    )


def _escape(char: str) -> str:
    # A character beyond the first plane is not two escapes: a text can hold two lone surrogates.
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def _short_escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


PartKind = Literal["text", "thinking", "call", "result", "file", "other"]

_TEXTS: Final = frozenset(
    {"text", "input_text", "output_text", "summary_text", "refusal", "user-prompt", "system-prompt"}
)
_THINKING: Final = frozenset(
    {
        *("thinking", "reasoning", "reasoning_text", "redacted_thinking"),
        *("reasoning.text", "reasoning.summary", "reasoning.encrypted"),
    }
)
_CALLS: Final = frozenset(
    {
        *("tool_use", "function_call", "tool-call", "tool_call", "server_tool_use", "mcp_tool_use"),
        *("builtin-tool-call", "server_tool_call", "custom_tool_call", "mcp_call", "invalid_tool_call"),
    }
)
_RESULTS: Final = frozenset(
    {
        *("tool_result", "function_call_output", "tool-return", "builtin-tool-return", "retry-prompt"),
        "server_tool_result",
    }
)
_FILES: Final = frozenset(
    {
        *("image", "input_image", "image_url", "output_image", "file", "input_file", "document"),
        *("audio", "input_audio", "video", "media", "computer_screenshot", "image_generation_call"),
        *("image-url", "audio-url", "video-url", "document-url", "binary", "uploaded-file"),
    }
)
_NAMES_OF_FILES: Final = {
    "image-url": "image",
    "audio-url": "audio",
    "video-url": "video",
    "document-url": "document",
    "binary": "file",
    "uploaded-file": "file",
    "media": "file",
}
_MESSAGES: Final = frozenset(
    {
        *("message", "human", "ai", "system", "tool", "function", "chat", "user", "assistant", "developer"),
        *("HumanMessageChunk", "AIMessageChunk", "SystemMessageChunk", "ToolMessageChunk"),
    }
)
ROLES: Final = {
    "human": "user",
    "HumanMessageChunk": "user",
    "ai": "assistant",
    "AIMessageChunk": "assistant",
    "model": "assistant",
    "SystemMessageChunk": "system",
    "ToolMessageChunk": "tool",
}
"""The roles of LangChain and Gemini, and what chat completions call them."""
_WRAPPERS: Final = {
    **dict.fromkeys(("toolUse", "functionCall", "function_call"), "tool_call"),
    **dict.fromkeys(("toolResult", "functionResponse", "function_response"), "tool_result"),
    **dict.fromkeys(("inlineData", "inline_data", "fileData", "file_data"), "file"),
    **dict.fromkeys(("reasoningContent", "reasoningText"), "reasoning"),
    **dict.fromkeys(("executableCode", "executable_code"), "tool_call"),
    **dict.fromkeys(("codeExecutionResult", "code_execution_result"), "tool_result"),
    **{kind: kind for kind in ("image", "document", "audio", "video")},
    "citationsContent": "text",
}
"""The fields of blocks without a type whose value is the block, and the type of the block."""

_TYPE_KEYS: Final = ("type", "part_kind")
_TEXT_KEYS: Final = ("text", "thinking", "content", "refusal")
_THINKING_KEYS: Final = ("text", "thinking", "reasoning", "content", "summary")
_THINKING_OF_MESSAGE: Final = ("thinking", "reasoning_content", "reasoning", "reasoning_details", "tool_plan")
_FILE_NAME_KEYS: Final = (
    *("filename", "file_name", "name", "title", "display_name", "displayName"),
    *("media_type", "mime_type", "mimeType", "format"),
)
_ADDRESS_KEYS: Final = ("url", "image_url", "file_url", "file_id", "uri", "file_uri", "fileUri")
_DATA_KEYS: Final = ("data", "file_data", "base64", "bytes", "result")
_CALL_ID_KEYS: Final = ("tool_call_id", "call_id", "tool_use_id", "toolUseId", "id")
_CALL_NAME_KEYS: Final = ("name", "tool_name", "toolName")
_ARGUMENT_KEYS: Final = ("arguments", "args", "input", "action", "code", "operation")
_OUTPUT_KEYS: Final = ("content", "output", "result", "response")

_LEAST_BINARY: Final = 256
_BASE64: Final = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*[0-9])[A-Za-z0-9+/_-]+={0,2}")


class CutText(str):
    """The start of text that was cut off."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a message. ``name`` and ``call_id`` belong to a tool call, or to the call of a result.

    The ``text`` of a call holds its arguments. The ``text`` of a file is its URL or its length, and its
    ``name`` is the name of the file or its media type, and its ``data`` its content in base64, if the message
    holds all of it. ``rest`` holds the fields of the part, and for the last part those of the message, that
    nothing else shows: JSON objects, one on each line.
    """

    kind: PartKind
    text: str
    name: str = ""
    call_id: str | None = None
    is_error: bool = False
    rest: str = ""
    data: str | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationMessage:
    """A message of a conversation that an adapter stores, for people to read.

    ``number`` is 1 for the oldest message of the conversation. ``parts`` is ``None`` if the message cannot be
    read. ``step`` is the step that created it, if the framework counts steps. If only the start of a long
    message was read, ``is_cut`` is true. ``row`` names the row that holds the message by model and key.
    ``stored`` is the stored message, for exports; it is ``None`` on pages.
    """

    number: int
    role: str
    parts: Sequence[Part] | None
    at: datetime | None = None
    step: int | None = None
    is_cut: bool = False
    row: tuple[type[Any], int] | None = None
    stored: Any = None


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


def paired(messages: Iterable[tuple[int, str, Sequence[Part]]], cut: Collection[int] = ()) -> list[Turn]:
    """Return a conversation in order, with each result next to its call.

    A message is left out if it contains nothing but results of calls among these messages. Messages whose
    numbers are in ``cut`` were not read to their end, so they are never left out.
    """
    read = list(messages)
    results = _results_of_calls(read)
    shown_at_calls = {id(part) for part, _ in results.values()}
    conversation = []
    for sequence, role, parts in read:
        own = [TurnPart(part, *results.get(id(part), ())) for part in parts if id(part) not in shown_at_calls]
        if own or not parts or sequence in cut:
            conversation.append(Turn(sequence, role, own))
    return conversation


def _results_of_calls(read: list[tuple[int, str, Sequence[Part]]]) -> dict[int, tuple[Part, int]]:
    """Return the result of each call and the result's sequence number, by the identity of the call's part.

    Some servers use an id again, or the same id for all calls. A run of results with the same id therefore
    belongs to the newest of the open calls before it with that id, in the order of the calls.
    """
    open_calls: dict[tuple[str, str], list[tuple[int, Part]]] = {}
    runs: dict[tuple[str, str], list[tuple[Part, int]]] = {}
    answered: dict[int, tuple[Part, int]] = {}

    def end_run(key: tuple[str, str]) -> None:
        results, calls = runs.pop(key, []), open_calls.get(key, [])
        first = max(0, len(calls) - len(results))
        # The calls of one message are answered from the first to the last.
        while 0 < first < len(calls) and calls[first - 1][0] == calls[first][0]:
            first -= 1
        for (_, call), result in zip(calls[first:], results, strict=False):
            answered[id(call)] = result
        del calls[first : first + len(results)]

    for sequence, _, parts in read:
        if parts and not any(part.kind == "result" for part in parts):
            for key in list(runs):
                end_run(key)
        for part in parts:
            of = _key_of_call(part)
            if of is not None and part.kind == "call":
                end_run(of)
                open_calls.setdefault(of, []).append((sequence, part))
            elif of is not None and part.kind == "result":
                runs.setdefault(of, []).append((part, sequence))
    for key in list(runs):
        end_run(key)
    return answered


def _key_of_call(part: Part) -> tuple[str, str] | None:
    """Return the id of a call and of its result. Calls without an id are identified by their name."""
    if part.call_id is not None:
        return part.call_id, ""
    return ("", part.name) if part.name else None


def role_of(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    return role if isinstance(role, str) else "?"


class Fields:
    """The fields of an object. A rule takes the fields that it shows; the others are the ``rest``."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        self._fields = dict(item)

    def take(self, names: Iterable[str], wanted: Callable[[Any], bool]) -> Any:
        """Return and remove the first of these fields with a wanted value, or return ``None``."""
        for name in names:
            if name in self._fields and wanted(self._fields[name]):
                return self._fields.pop(name)
        return None

    def text(self, *names: str) -> str | None:
        """Take the first of these fields that holds text."""
        found: str | None = self.take(names, _is_text)
        return found

    def drop(self, name: str, known: Collection[Any]) -> None:
        """Remove a field if its value is one of the known ones, which the form of the part expresses."""
        value = self._fields.get(name)
        if isinstance(value, str | bool) and value in known:
            del self._fields[name]

    def merge(self, *names: str) -> None:
        """Replace each of these fields that holds an object by the object's own fields."""
        for name in names:
            inner = self._fields.get(name)
            if isinstance(inner, Mapping):
                del self._fields[name]
                clashes = {key: value for key, value in inner.items() if key in self._fields}
                self._fields.update({key: value for key, value in inner.items() if key not in clashes})
                if clashes:
                    self._fields[name] = clashes

    @property
    def rest(self) -> str:
        """The fields that no rule has taken, as JSON; fields without a content are left out."""
        left = {name: value for name, value in self._fields.items() if value not in (None, "", [], {})}
        return _json(left) if left else ""


def parts_of(message: Mapping[str, Any]) -> list[Part]:
    """Return a message's parts in order: thinking, texts and calls, or the result that it contains."""
    fields = Fields(message)
    role = fields.take(("role",), lambda role: isinstance(role, str))
    kind = _type_of(message)
    if role in ("tool", "function") or _is_result(kind):
        return _parts_of_tool(fields, message)
    if _is_call(kind, message) or kind in _THINKING or kind in _FILES:
        return _part({name: value for name, value in message.items() if name != "role"})
    fields.drop("type", _MESSAGES)
    parts = _thinking_of(fields)
    for key in ("content", "parts"):
        parts.extend(_parts(fields.take((key,), bool)))
    if (refusal := fields.text("refusal")) is not None:
        parts.append(Part(kind="text", text=refusal))
    if (audio := fields.take(("audio",), _is_object)) is not None:
        parts.extend(_typed(audio, "audio"))
    if (call := fields.take(("function_call",), _is_object)) is not None:
        parts.append(_call(call))
    for key in ("tool_calls", "invalid_tool_calls"):
        parts = _with_calls(parts, fields.take((key,), lambda calls: isinstance(calls, list)) or [])
    return with_rest(parts, fields.rest, name=kind or "message", whole=message)


def is_unread(message: Mapping[str, Any], parts: Sequence[Part]) -> bool:
    """Return whether no rule has read anything, so that the only part is the JSON of the whole message."""
    names = [part.name for part in parts if part.kind == "other"]
    return len(parts) == 1 and names == [_type_of(message) or "message"]


def with_rest(
    parts: list[Part], rest: str, *, name: str, whole: Mapping[str, Any] | None = None
) -> list[Part]:
    """Return the parts of a message, the last of which also has the rest of the message's fields.

    If there are no parts, the only part is the rest, or ``whole`` without its role.
    """
    if not rest:
        return parts
    if parts:
        *before, last = parts
        return [*before, replace(last, rest="\n".join(filter(None, (last.rest, rest))))]
    text = rest if whole is None else _json({key: value for key, value in whole.items() if key != "role"})
    return [Part(kind="other", text=text, name=name)]


def _type_of(item: Mapping[str, Any]) -> str:
    for key in _TYPE_KEYS:
        if isinstance(kind := item.get(key), str):
            return kind
    kind = item.get("kind")
    return kind if isinstance(kind, str) and kind in _FILES else ""


def _is_call(kind: str, item: Mapping[str, Any]) -> bool:
    return kind in _CALLS or (kind.endswith("_call") and isinstance(item.get("call_id"), str))


def _is_result(kind: str) -> bool:
    return kind in _RESULTS or kind.endswith(("_call_output", "_tool_result"))


def _thinking_of(fields: Fields) -> list[Part]:
    """Return the thinking that a message holds beside its content. Providers may give it in two forms."""
    parts: list[Part] = []
    for key in _THINKING_OF_MESSAGE:
        value = fields.take((key,), lambda value: isinstance(value, str | list) and bool(value))
        if isinstance(value, str):
            value = [{"type": "thinking", "thinking": value}]
        for part in _parts(value):
            known = any(part.text == other.text for other in parts)
            if not known or part.rest or part.kind != "thinking":
                parts.append(replace(part, kind="thinking") if part.kind == "text" else part)
    return parts


def _with_calls(parts: list[Part], calls: Iterable[Any]) -> list[Part]:
    """Return the parts with the calls. Some frameworks repeat the calls that are in the content."""
    repeated = [index for index, part in enumerate(parts) if part.kind == "call"]
    found = list(parts)
    for call in map(_call, calls):
        index = next((at for at in repeated if _is_same_call(found[at], call)), None)
        if index is None:
            found.append(call)
            continue
        repeated.remove(index)
        rest = (
            call.rest if call.rest == found[index].rest else "\n".join((found[index].rest, call.rest)).strip()
        )
        found[index] = replace(call, rest=rest)
    return found


def _is_same_call(known: Part, call: Part) -> bool:
    has_same_name = (known.call_id, known.name) == (call.call_id, call.name)
    # Content that was streamed has no arguments.
    return has_same_name and known.text in (call.text, "", "{}", '""')


def _parts_of_tool(fields: Fields, message: Mapping[str, Any]) -> list[Part]:
    """Return the results that a message contains, or the result that it is."""
    listed = [key for key in ("content", "parts") if isinstance(message.get(key), list)]
    nested = [part for key in listed for part in _parts(message[key])]
    if any(part.kind == "result" for part in nested):
        for key in listed:
            fields.take((key,), bool)
        fields.drop("type", _MESSAGES)
        return with_rest(nested, fields.rest, name="message")
    fields.drop("type", _MESSAGES)
    return [_result(fields, message)]


def _parts(content: Any) -> list[Part]:
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [Part(kind="text", text=content)]
    items: Iterable[Any] = content if isinstance(content, list) else [content]
    return [part for item in items for part in _part(item)]


def _part(item: Any) -> list[Part]:
    if not isinstance(item, Mapping):
        return [Part(kind="text", text=_text(item))]
    kind = _type_of(item)
    if not kind and (wrapper := next((key for key in _WRAPPERS if _is_object(item.get(key))), None)):
        return _wrapped(item, wrapper)
    if _is_call(kind, item):
        return [_call(item)]
    if _is_result(kind):
        return [_result(Fields(item), item)]
    fields = Fields(item)
    for key in (*_TYPE_KEYS, "kind"):
        fields.drop(key, (kind,))
    if kind in _FILES:
        return _file(fields, item, kind)
    if kind in _THINKING or (not kind and item.get("thought") is True):
        return [_thinking(fields, kind or "thought")]
    if kind == "user-prompt" and isinstance(item.get("content"), list):
        return with_rest(_parts(fields.take(("content",), bool)), fields.rest, name=kind)
    text = fields.text(*_TEXT_KEYS) if kind in _TEXTS or not kind else None
    if text is None and any(item.get(key) == "" for key in _TEXT_KEYS):
        text = ""
    if text is not None and (kind in _TEXTS or not kind):
        return [Part(kind="text", text=text, rest=fields.rest)]
    return [Part(kind="other", text=_json(item), name=kind or "part")]


def _wrapped(item: Mapping[str, Any], wrapper: str) -> list[Part]:
    """Return the part of a block like ``{"toolUse": {…}}``, the form of Gemini and of Bedrock."""
    outer = Fields(item)
    inner = outer.take((wrapper,), bool) or {}
    kind = _WRAPPERS[wrapper]
    if wrapper == "reasoningContent" and _is_object(inner.get("reasoningText")):
        inner = {
            **{key: value for key, value in inner.items() if key != "reasoningText"},
            **inner["reasoningText"],
        }
    if wrapper == "citationsContent":
        fields = Fields(inner)
        parts = with_rest(_parts(fields.take(("content",), bool)), fields.rest, name=wrapper)
    else:
        is_code = "ode" in wrapper and kind != "file"
        parts = _typed({**({"name": wrapper} if is_code else {}), **inner}, kind)
    response = inner.get("response")
    if kind == "tool_result" and isinstance(response, Mapping) and "error" in response:
        parts = [replace(part, is_error=True) if part.kind == "result" else part for part in parts]
    return with_rest(parts, outer.rest, name=wrapper)


def _typed(item: Mapping[str, Any], kind: str) -> list[Part]:
    """Return the parts of an object whose kind is known from where it stands."""
    own = item.get("type")
    return with_rest(
        _part({**item, "type": kind}), "" if own in (None, kind) else _json({"type": own}), name=kind
    )


def _thinking(fields: Fields, kind: str) -> Part:
    fields.drop("thought", (True,))
    said: list[str] = []
    for key in _THINKING_KEYS:
        value = fields.take((key,), lambda value: isinstance(value, str | list) and bool(value))
        inner = [Part(kind="text", text=value)] if isinstance(value, str) else _parts(value)
        said.extend(text for part in inner if (text := _nested_text(part)) and text not in said)
    return Part(kind="thinking", text="\n".join(said) or f"[{kind}]", rest=fields.rest)


def _call(call: Any) -> Part:
    if not isinstance(call, Mapping):
        return Part(kind="other", text=_text(call), name="call")
    fields = Fields(call)
    kind = _type_of(call)
    is_invalid = kind == "invalid_tool_call"
    for key in _TYPE_KEYS:
        fields.drop(key, (*_CALLS, "function", "custom", kind))
    call_id = fields.take(_CALL_ID_KEYS, lambda value: isinstance(value, str))
    fields.merge("function", "custom")
    name = fields.text(*_CALL_NAME_KEYS) or (kind if kind.endswith("_call") and kind not in _CALLS else "?")
    arguments = fields.take(_ARGUMENT_KEYS, lambda value: value is not None)
    return Part(
        kind="call",
        text="" if arguments is None else _compact(arguments),
        name=name,
        call_id=call_id,
        is_error=is_invalid,
        rest=fields.rest,
    )


def _result(fields: Fields, item: Mapping[str, Any]) -> Part:
    kind = _type_of(item)
    for key in _TYPE_KEYS:
        fields.drop(key, (kind,) if _is_result(kind) else _MESSAGES)
    call_id = fields.take(_CALL_ID_KEYS, lambda value: isinstance(value, str))
    name = fields.take(_CALL_NAME_KEYS, lambda value: value is not None)
    content = fields.take(_OUTPUT_KEYS, lambda value: value is not None)
    is_error = item.get("is_error") is True or item.get("status") == "error" or kind == "retry-prompt"
    is_error = is_error or item.get("outcome") in ("failed", "denied")
    fields.drop("is_error", (True, False))
    fields.drop("status", ("error", "success"))
    fields.drop("outcome", ("failed", "success"))
    return Part(
        kind="result",
        text=_text_of_result(content),
        name="" if name is None else _text(name),
        call_id=call_id,
        is_error=is_error,
        rest=fields.rest,
    )


def _text_of_result(content: Any) -> str:
    """Return the text of a result: its parts, if it has some that people can read, or its JSON."""
    if isinstance(content, list):
        return "\n".join(map(_nested_text, _parts(content)))
    if isinstance(content, Mapping) and _type_of(content) in _FILES | _TEXTS:
        return "\n".join(map(_nested_text, _part(content)))
    return _text(content)


def _nested_text(part: Part) -> str:
    """Return a part inside another one as text."""
    named = f"[{part.name}] " if part.kind == "file" else f"→ {part.name} " if part.kind == "call" else ""
    return "\n".join(filter(None, (f"{named}{part.text}", part.rest)))


def _file(fields: Fields, item: Mapping[str, Any], kind: str) -> list[Part]:
    """Return a file, with its URL or the length of its data. If it has neither, return its text or JSON."""
    source = item.get("source")
    is_text = isinstance(source, Mapping) and source.get("type") in ("text", "content")
    if kind == "document" and not is_text:
        document = item.get("document")
        is_text = isinstance(document, Mapping) and "source" not in document
    if is_text:
        return [Part(kind="other", text=_json(item), name=kind)]
    fields.merge(kind, "source", "content", "location", "output", "bytes")
    fields.drop("type", ("base64", "url", "file", "s3"))
    fields.drop("kind", _FILES)
    fields.drop("__bytes_encoded__", (True,))
    name = fields.text(*_FILE_NAME_KEYS) or _NAMES_OF_FILES.get(kind, kind)
    address = fields.text(*_ADDRESS_KEYS) or ""
    data = fields.text(*_DATA_KEYS) or ""
    transcript = fields.text("transcript")
    is_cut = isinstance(address, CutText) or isinstance(data, CutText)
    inlined = next((text for text in (address, data) if text.startswith("data:")), "")
    if inlined:
        described, _, inline = inlined.partition(",")
        media_type = described.removeprefix("data:").partition(";")[0]
        name = media_type if media_type and name in (kind, _NAMES_OF_FILES.get(kind)) else name
        address, data = "" if inlined is address else address, inline
    said = [] if transcript is None else [Part(kind="text", text=transcript)]
    if not address and not data:
        return [*said, *([] if said and not fields.rest else [_whole(item, kind)])]
    # Three bytes of data become four characters of base64.
    size = f"{len(data.rstrip('=')) * 3 // 4:,} bytes"
    size = f"more than {size}" if is_cut else size
    text = address if address and not data else f"{address} ({size})" if address else size
    content = data if data and not is_cut else None
    return [Part(kind="file", text=text, name=name, rest=fields.rest, data=content), *said]


def _whole(item: Mapping[str, Any], kind: str) -> Part:
    return Part(kind="other", text=_json(item), name=kind)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    """Return a value as JSON, in which long base64 is replaced by its length."""
    return json.dumps(_without_binary(value), ensure_ascii=False)


def _without_binary(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_binary(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_binary(each) for each in value]
    if isinstance(value, str) and len(value) >= _LEAST_BINARY:
        is_cut = isinstance(value, CutText)
        prefix, comma, data = value.partition(",") if value.startswith("data:") else ("", "", value)
        if _BASE64.fullmatch(data):
            size = f"{len(data.rstrip('=')) * 3 // 4:,} bytes of base64"
            return f"{prefix}{comma}[{'more than ' if is_cut else ''}{size}]"
    return value


def _compact(arguments: Any) -> str:
    """Return arguments on one line; JSON text is rewritten without its newlines.

    Text whose values JSON cannot represent exactly, such as an object with a repeated key, is not rewritten.
    """
    if not isinstance(arguments, str):
        return json.dumps(arguments, ensure_ascii=False)
    try:
        if arguments.lstrip()[:1] not in ("{", "["):
            return arguments
        value = json.loads(
            arguments, object_pairs_hook=_unrepeated, parse_float=_exact, parse_constant=_exact
        )
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is repeated")
    return found


def _exact(text: str) -> float:
    number = float(text)
    if repr(number) != text:
        raise ValueError("the number is not exact")
    return number
