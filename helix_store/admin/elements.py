"""Pieces of pages. Everything stored passes ``format_html``, so that it is text and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, Final

from django.utils import formats, timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.timesince import timesince, timeuntil

from helix_store.admin.readable import json_start, printable
from helix_store.core.payloads import decode
from helix_store.exceptions import IntegrityFault

__all__ = [
    "JSON_LIMIT",
    "NOTHING",
    "badge",
    "counted",
    "distance",
    "identifier",
    "json_block",
    "link",
    "moment",
    "narrow",
    "note",
    "table",
    "text_block",
    "under",
]

NOTHING: Final = "-"

JSON_LIMIT: Final = 20_000
"""Characters of a document that a page shows."""

_OPEN_UP_TO: Final = 600

_TONES: Final = {
    "active": "info",
    "running": "info",
    "paused": "waiting",
    "interrupted": "waiting",
    "suspended_client_tool": "waiting",
    "suspended_awaiting_children": "waiting",
    "suspended_step_partial": "waiting",
    "completed": "good",
    "failed": "bad",
}


def badge(label: str) -> SafeString:
    """A status as a coloured label; one that is not known is grey."""
    return format_html(
        '<span class="helix-badge helix-badge-{}">{}</span>', _TONES.get(label, "plain"), printable(label)
    )


def link(url: str, label: str) -> SafeString:
    return format_html('<a href="{}">{}</a>', url, label)


def identifier(text: str) -> SafeString:
    """An id, which may be long, in a narrow column."""
    return format_html('<span class="helix-id">{}</span>', printable(text))


def narrow(text: str) -> SafeString:
    """A text that may break anywhere rather than push other columns out."""
    return format_html('<span class="helix-narrow">{}</span>', printable(text))


def under(text: str) -> SafeString:
    """A second, quiet line of a cell."""
    return format_html('<span class="helix-under">{}</span>', printable(text))


def counted(count: int, name: str) -> str:
    return f"{count:,} {name}" if count == 1 else f"{count:,} {name}s"


def moment(value: datetime) -> str:
    """A time as the admin shows times, but as text, which a list may break into two lines."""
    return str(formats.localize(timezone.localtime(value) if timezone.is_aware(value) else value))


def distance(value: datetime) -> SafeString:
    """How far a time is from now, which is short; the time itself appears under the pointer."""
    is_past = value <= timezone.now()
    words = f"{timesince(value, depth=1)} ago" if is_past else f"in {timeuntil(value, depth=1)}"
    return format_html('<time datetime="{}" title="{}">{}</time>', value.isoformat(), moment(value), words)


def text_block(text: str) -> SafeString:
    """A text with its lines, cut when it is very long."""
    ending = note(f"Cut after {JSON_LIMIT:,} characters.") if len(text) > JSON_LIMIT else ""
    return format_html('<pre class="helix-text">{}</pre>{}', printable(text[:JSON_LIMIT]), ending)


def note(text: str) -> SafeString:
    return format_html('<span class="helix-note">{}</span>', text)


def json_block(stored: str | None, *, shown: Callable[[Any], Any] | None = None) -> SafeString | str:
    """A stored document to read: folded when it is long, cut when it is very long.

    ``shown`` turns the document into what may be seen of it. A text that cannot be read becomes a note.
    """
    if stored is None:
        return NOTHING
    try:
        document = decode(stored)
        text, is_cut = json_start(document if shown is None else shown(document), JSON_LIMIT)
    except (IntegrityFault, RecursionError):
        return note("What is stored here cannot be read as JSON.")
    line_count = text.count("\n") + 1
    return format_html(
        '<details class="helix-json"{}><summary>{} lines of JSON</summary><pre>{}</pre>{}</details>',
        " open" if len(text) <= _OPEN_UP_TO else "",
        f"more than {line_count:,}" if is_cut else f"{line_count:,}",
        printable(text),
        note(f"Cut after {JSON_LIMIT:,} characters.") if is_cut else "",
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]], *, limit: int) -> SafeString | str:
    """At most ``limit`` rows, with a note when there are more; nothing at all without any row."""
    seen = list(islice(rows, limit + 1))
    if not seen:
        return NOTHING
    return format_html(
        '<table class="helix-table"><thead><tr>{}</tr></thead><tbody>{}</tbody></table>{}',
        format_html_join("", '<th scope="col">{}</th>', ((heading,) for heading in headings)),
        format_html_join("", "<tr>{}</tr>", ((_cells(row),) for row in seen[:limit])),
        note(f"Only the first {limit} are shown.") if len(seen) > limit else "",
    )


def _cells(row: Sequence[Any]) -> SafeString:
    return format_html_join("", "<td>{}</td>", ((_cell(value),) for value in row))


def _cell(value: Any) -> Any:
    if value is None:
        return NOTHING
    if isinstance(value, datetime):
        return moment(value)
    return printable(value) if type(value) is str else value
