"""Building blocks of pages. `format_html` or `printable` escapes stored text, so it never becomes markup."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, ngettext

from helix_store.admin.labels import name_of_status
from helix_store.exceptions import IntegrityFault
from helix_store.reports.payloads import document_of, json_start
from helix_store.reports.statuses import TONES

NOTHING: Final = "-"
HIDDEN: Final = "[hidden]"

JSON_LIMIT: Final = 20_000
"""The maximum number of characters of a document that a page shows."""

OPEN_UP_TO: Final = 600
_SHORT_ID: Final = 24

# A page with a lone surrogate cannot be encoded, and bidirectional marks can make two strings look alike.
_NOT_PRINTABLE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

_NO_SECRETS: Final = frozenset(
    {"trace_id", "span_id", "parent_id", "parent_span_id", "trace_flags", "traceparent", "sampled"}
)


def tone(status: str) -> str:
    """Return the tone of a status. CSS classes turn it into a colour."""
    return TONES.get(status, "plain")


def badge(label: str) -> SafeString:
    """Return a status as a coloured label. Unknown statuses are grey."""
    return format_html(
        '<span class="helix-badge helix-badge-{}">{}</span>',
        tone(label),
        printable(name_of_status(label)),
    )


def link(url: str, label: str) -> SafeString:
    """Return a link, or only its label if there is no URL."""
    return format_html('<a href="{}">{}</a>', url, label) if url else format_html("{}", label)


def identifier(text: str) -> SafeString:
    """Return an id, which may be long, in a form for a narrow column."""
    return format_html('<span class="helix-id">{}</span>', printable(text))


def short_id(text: str) -> SafeString:
    """Return both ends of an id, each on its own line, with the whole id as a tooltip."""
    shown = printable(text)
    short = shown if len(shown) <= _SHORT_ID else f"{shown[:8]}…{shown[-8:]}"
    return format_html('<span class="helix-under helix-short-id" title="{}">{}</span>', shown, short)


def narrow(text: str) -> SafeString:
    """Return text that may break at any character, which keeps its column narrow."""
    return format_html('<span class="helix-narrow">{}</span>', printable(text))


def under(text: str) -> SafeString:
    """Return the second line of a cell, in a weaker colour."""
    return format_html('<span class="helix-under">{}</span>', printable(text))


def stacked(text: str, second: str) -> SafeString:
    """Return a cell with text and, unless it is empty, a second line."""
    return format_html("{}{}", text, under(second) if second else "")


def progress(steps: int, messages: int) -> str:
    """Return the numbers of steps and messages of a session."""
    return ", ".join(
        (
            ngettext("%d step", "%d steps", steps) % steps,
            ngettext("%d message", "%d messages", messages) % messages,
        )
    )


def text_block(text: str) -> SafeString:
    """Return text with its line breaks, cut if it is very long."""
    ending = _cut() if len(text) > JSON_LIMIT else ""
    return format_html('<pre class="helix-text">{}</pre>{}', printable(text[:JSON_LIMIT]), ending)


def note(text: str) -> SafeString:
    return format_html('<span class="helix-note">{}</span>', text)


def json_block(stored: str | None, *, shown: Callable[[Any], Any] | None = None) -> SafeString | str:
    """Return a stored document, or a `document_start` of one, as `value_block` does.

    ``shown`` is a function that returns the part of the document that may be shown. If the text cannot be
    read, return a note.
    """
    if stored is None:
        return NOTHING
    try:
        document = document_of(stored)
        return value_block(document if shown is None else shown(document))
    except (IntegrityFault, RecursionError):
        return note(gettext("The stored text cannot be read as JSON."))


def value_block(value: Any, *, open_up_to: int = OPEN_UP_TO) -> SafeString:
    """Return a value as JSON: folded if it is longer than ``open_up_to``, and cut if it is very long.

    A short value that takes one line is shown without a fold. Raise ``RecursionError`` as `json_start` does.
    """
    text, is_cut = json_start(value, JSON_LIMIT)
    line_count = text.count("\n") + 1
    if line_count == 1 and len(text) <= OPEN_UP_TO:
        return format_html('<code class="helix-value">{}</code>', printable(text))
    words = ngettext("%(count)s line of JSON", "%(count)s lines of JSON", line_count)
    if is_cut:
        words = gettext("more than %(count)s lines of JSON")
    return format_html(
        '<details class="helix-json"{}><summary>{}</summary><pre>{}</pre>{}</details>',
        " open" if len(text) <= open_up_to else "",
        words % {"count": f"{line_count:,}"},
        printable(text),
        _cut() if is_cut else "",
    )


def _cut() -> SafeString:
    return note(gettext("Cut after %(count)s characters.") % {"count": f"{JSON_LIMIT:,}"})


def printable(text: str) -> str:
    """Return the text with invisible characters as escapes."""
    return _NOT_PRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def one_line(text: str, limit: int) -> str:
    """Return the start of some text as one line."""
    line = " ".join(printable(text[: 4 * limit]).split())
    return line if len(line) <= limit and len(text) <= 4 * limit else line[:limit].rstrip() + "…"


def hide_secrets(tracing: Any) -> Any:
    """Return a tracing context with only the values that identify a trace.

    Vendors store keys and headers under various names, so a list of secret names could never be complete.
    """
    if isinstance(tracing, dict):
        return {
            key: value if key in _NO_SECRETS and not isinstance(value, dict | list) else hide_secrets(value)
            for key, value in tracing.items()
        }
    if isinstance(tracing, list):
        return [hide_secrets(item) for item in tracing]
    return None if tracing is None else HIDDEN
