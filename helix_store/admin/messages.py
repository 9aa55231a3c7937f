"""Messages: the list with a preview of each, and the page of one."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from django.contrib import admin
from django.db.models import QuerySet
from django.db.models.functions import Substr
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from helix_store.admin.base import OF_SESSION, SessionChildAdmin
from helix_store.admin.elements import (
    json_block,
    note,
    one_line,
    text_block,
)
from helix_store.admin.labels import column
from helix_store.admin.payloads import PayloadText, payload_of
from helix_store.admin.times import stamp
from helix_store.core.payloads import decode
from helix_store.exceptions import IntegrityFault
from helix_store.models import Message

__all__ = ["PREVIEW_SOURCE", "MessageAdmin", "message_preview", "message_start", "message_text"]

PREVIEW_SOURCE: Final = 1_500
"""Characters of the stored text that are read for a preview."""

_PREVIEW_LENGTH: Final = 180

_BETWEEN: Final = re.compile(r"[\s,:]*")
_CUT_ESCAPE: Final = re.compile(r"(?<!\\)(?:\\\\)*(\\(?:u[0-9a-fA-F]{0,3})?)$")
_read_value = json.JSONDecoder().raw_decode

_UNREADABLE: Final = _("This message cannot be read.")


@admin.register(Message)
class MessageAdmin(SessionChildAdmin):
    list_display = (column("sequence"), column("role"), "preview", "of_session", "written_at")
    list_display_links = (list_display[0], "preview")
    ordering = ("-session_id", "-sequence")
    fields = ("of_session", "sequence", "role", "written_at", "said", "document")
    readonly_fields = ("of_session", "written_at", "said", "document")

    def get_ordering(self, request: HttpRequest) -> tuple[Any, ...]:
        """The newest first; the messages of one session as they were said."""
        return ("session_id", "sequence") if OF_SESSION in request.GET else self.ordering

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        start = PayloadText(Substr("payload", 1, PREVIEW_SOURCE + 1))
        messages: QuerySet[Any] = super().get_queryset(request).annotate(payload_start=start)
        return messages

    @admin.display(description=_("created"))
    def written_at(self, message: Message) -> SafeString:
        return stamp(message.created_at)

    @admin.display(description=_("message"))
    def preview(self, message: Any) -> SafeString | str:
        text = message_preview(message.payload_start)
        return note(str(_UNREADABLE)) if text is None else text

    @admin.display(description=_("says"))
    def said(self, message: Message) -> SafeString:
        text = message_text(payload_of(message, "payload") or "")
        return note(str(_UNREADABLE)) if text is None else text_block(text)

    @admin.display(description=_("as stored"))
    def document(self, message: Message) -> SafeString | str:
        return json_block(payload_of(message, "payload"))


def message_preview(start: str) -> str | None:
    """The preview of a message whose stored text begins with ``start``, or ``None`` if it cannot be read.

    A text of more than `PREVIEW_SOURCE` characters is taken as cut.
    """
    try:
        message = message_start(start) if len(start) > PREVIEW_SOURCE else decode(start)
    except IntegrityFault:
        return None
    if not isinstance(message, dict):
        return None
    line = one_line(" ".join(_parts(message)), _PREVIEW_LENGTH)
    return f"{line}…" if len(start) > PREVIEW_SOURCE and not line.endswith("…") else line


def message_text(stored: str) -> str | None:
    """The whole text of a message, a paragraph per part, or ``None`` if it cannot be read."""
    try:
        message = decode(stored)
    except IntegrityFault:
        return None
    return "\n\n".join(_parts(message)) if isinstance(message, dict) else None


def _parts(message: dict[str, Any]) -> list[str]:
    """The texts, then the tool calls."""
    return _texts(message.get("content")) + [f"→ {name}({arguments})" for name, arguments in _calls(message)]


def _texts(content: Any) -> list[str]:
    """Plain text, or the text of each content part; a part without text is named by its type."""
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return [_text_of_part(part) for part in content]
    return [] if content is None else [json.dumps(content, ensure_ascii=False)]


def _text_of_part(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    for key in ("text", "thinking", "content"):
        if isinstance(part.get(key), str):
            return str(part[key])
    return f"[{part.get('type', 'part')}]"


def _calls(message: dict[str, Any]) -> list[tuple[str, str]]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    return [
        (str(function.get("name", "?")), str(function.get("arguments", "")))
        for function in functions
        if isinstance(function, dict)
    ]


def message_start(start: str) -> dict[str, Any] | None:
    """A message that is cut: its keys and values before the cut, and the start of a text at the cut.

    ``None`` if nothing can be read.
    """
    if start[:1] == "~":
        start = start[1:].encode("latin-1", "replace").decode("utf-8", "replace")
    if start[:1] != "{":
        return None
    members: dict[str, Any] = {}
    position = 1
    try:
        while True:
            position = _after_separator(start, position)
            key, position = _read_value(start, position)
            position = _after_separator(start, position)
            try:
                members[key], position = _read_value(start, position)
            except ValueError:
                members[key] = _cut_value(start[position:])
                return members
    except (ValueError, RecursionError):
        return members or None


def _after_separator(text: str, position: int) -> int:
    match = _BETWEEN.match(text, position)
    return position if match is None else match.end()


def _cut_value(rest: str) -> str:
    """The start of a text; any other value as it is written."""
    if rest[:1] != '"':
        return rest
    if dangling := _CUT_ESCAPE.search(rest):
        rest = rest[: dangling.start(1)]
    return str(json.loads(rest + '"'))
