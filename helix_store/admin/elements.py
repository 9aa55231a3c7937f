"""The elements of the admin's pages: labels, columns, times, charts, documents and names of users.

The labels of columns, and the names of statuses and other choices, in the reader's language.

The labels are not the ``verbose_name`` of the fields, because each change to those would need a migration.

SVG charts drawn by the server. Sizes are attributes, because pages have no styles of their own.

Charts are hidden from screen readers; the table next to each chart contains its figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.auth import get_user_model
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.utils import formats, timezone
from django.utils.html import format_html, format_html_join
from django.utils.module_loading import import_string
from django.utils.safestring import SafeString
from django.utils.translation import gettext, ngettext, ngettext_lazy, pgettext_lazy
from django.utils.translation import gettext_lazy as _

from helix_store import conf
from helix_store.core import moments
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.payloads import exact_cost, join_path
from helix_store.core.transcript import KEPT_IN_PROSE, visible, visible_json
from helix_store.core.usage import rounded_cost
from helix_store.exceptions import IntegrityFault
from helix_store.reports.payloads import TONES, Change, difference_pages, document_of, json_start, payload_of
from helix_store.sessions.runs import BUDGET_REASON, EFFECT_REASON
from helix_store.sessions.state import SUPERSEDED

LABELS: Final[dict[str, Any]] = {
    "agent_name": _("agent name"),
    "agent_type": _("agent type"),
    "cached_tokens": _("cached tokens"),
    "cache_write_tokens": _("tokens written to the cache"),
    "audio_prompt_tokens": _("audio tokens of the prompt"),
    "audio_completion_tokens": _("audio tokens of the completion"),
    "checkpoint_id": _("checkpoint id"),
    "claim_token": _("token of the claim"),
    "completion_tokens": _("completion tokens"),
    "custom_name": _("custom name"),
    "custom_type": _("custom type"),
    "duration_ms": _("duration in ms"),
    "entry_id": _("entry id"),
    "fencing_token": _("fencing token"),
    "floor": _("removed up to sequence"),
    "kind": _("kind"),
    "last_sequence": _("last sequence"),
    "message_count": _("number of messages"),
    "model": _("model"),
    "name": _("name"),
    "namespace": _("namespace"),
    "owner": _("owner"),
    "parent_checkpoint_id": _("parent checkpoint id"),
    "prompt_tokens": _("prompt tokens"),
    "reasoning_tokens": _("reasoning tokens"),
    "role": _("role"),
    "run_id": _("run id"),
    "sequence": _("sequence"),
    "session_agent_type": _("agent type of the session"),
    "size_bytes": _("size in bytes"),
    "snapshot_version": _("version of the snapshot"),
    "source": _("source"),
    "source_name": _("name of the source"),
    "source_type": _("type of the source"),
    "start_sequence": _("first message after sequence"),
    "status": _("status"),
    "step_count": _("number of steps"),
    "step_id": _("step id"),
    "stream_id": _("stream id"),
    "stream_sequence": _("sequence of the stream"),
    "sub_session_id": _("sub-session id"),
    "success": _("succeeded"),
    "tenant": _("tenant"),
    "token": _("fencing token"),
    "tool_name": _("tool name"),
    "total_tokens": _("total tokens"),
    "turn": _("turn"),
    "user_id": _("user id"),
    "version": _("version"),
    "writer_id": _("writer id"),
}

_STATUS_NAMES: Final = {
    "active": pgettext_lazy("of a session", "active"),
    "running": _("running"),
    "paused": _("paused"),
    "interrupted": _("interrupted"),
    "suspended_client_tool": _("paused for a person"),
    "suspended_awaiting_children": _("waits for sub-agents"),
    "suspended_step_partial": _("step half done"),
    "completed": _("completed"),
    "ended": _("ended"),
    "failed": _("failed"),
    "held": _("held"),
    "free": _("free"),
    "reached": _("limit reached"),
    "resumed": _("resumed"),
    "expired": _("expired"),
    "tokens": _("tokens"),
    "tool": _("tool"),
    "subagent": _("sub-agent"),
    "custom": _("custom"),
    "step": _("step"),
    "graph": _("graph"),
    "snapshot": _("snapshot"),
    "crashed": _("crashed"),
    "abandoned": _("abandoned"),
    "over_budget": _("over budget"),
    "effect_unknown": _("effect unknown"),
    "unanswered": _("post not received"),
    "waiting": pgettext_lazy("of a session", "waiting"),
}


def lazy_name_of_status(value: str) -> Any:
    """Return the name of a known status, which is translated when it is shown."""
    return _STATUS_NAMES[value]


def name_of_status(value: str) -> str:
    """Return the name of a status. An unknown status is returned as it is stored."""
    return str(_STATUS_NAMES.get(value, value))


NOTHING: Final = "-"
HIDDEN: Final = "[hidden]"

JSON_LIMIT: Final = 20_000
"""The maximum number of characters of a document that a page shows."""

OPEN_UP_TO: Final = 600
_SHORT_ID: Final = 24

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
            ngettext("%(count)s step", "%(count)s steps", steps) % {"count": grouped(steps)},
            ngettext("%(count)s message", "%(count)s messages", messages) % {"count": grouped(messages)},
        )
    )


def text_block(text: str) -> SafeString:
    """Return text with its line breaks, cut if it is very long."""
    ending = _cut() if len(text) > JSON_LIMIT else ""
    return format_html('<pre class="helix-text">{}</pre>{}', prose(text[:JSON_LIMIT]), ending)


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
        return format_html('<code class="helix-value">{}</code>', visible_json(text))
    words = ngettext("%(count)s line of JSON", "%(count)s lines of JSON", line_count)
    if is_cut:
        words = gettext("more than %(count)s lines of JSON")
    return format_html(
        '<details class="helix-json"{}><summary>{}</summary><pre>{}</pre>{}</details>',
        " open" if len(text) <= open_up_to else "",
        words % {"count": grouped(line_count)},
        visible_json(text),
        _cut() if is_cut else "",
    )


def _cut() -> SafeString:
    return note(gettext("Cut after %(count)s characters.") % {"count": grouped(JSON_LIMIT)})


def printable(text: str) -> str:
    """Return plain text with invisible characters as escapes, except line breaks and tabs."""
    return visible(text, keep="\n\t")


def prose(text: str) -> str:
    """Return text that people have written, such as a message, with the joiners and spaces of its script."""
    return visible(text, keep="\n\t" + KEPT_IN_PROSE)


def one_line(text: str, limit: int) -> str:
    """Return the start of some text as one line."""
    line = " ".join(prose(text[: 4 * limit]).split())
    return line if len(line) <= limit and len(text) <= 4 * limit else line[:limit].rstrip() + "…"


_LONGEST_SHOWN: Final = 40
_LONGEST_REASON: Final = 80


def _short(name: str) -> str:
    """Return a name or the start of an id, which must not make its row much higher than the others."""
    shown = printable(name)
    return shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}…"


def reason_words(reason: str | None) -> str:
    """Return why a run has ended. The reasons of the store become words; others are shown as they are."""
    shown = one_line(reason or "", _LONGEST_REASON)
    if reason == SUPERSEDED:
        return gettext("taken over by another worker")
    if shown.startswith(BUDGET_REASON):
        return gettext("budget “%(name)s”") % {"name": shown.removeprefix(BUDGET_REASON)}
    if shown.startswith(EFFECT_REASON):
        return gettext("effect “%(name)s” is undecided") % {"name": shown.removeprefix(EFFECT_REASON)}
    return shown


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


_UNITS: Final[tuple[tuple[int, Any, Any], ...]] = (
    (
        365 * 86_400,
        ngettext_lazy("%(count)d year ago", "%(count)d years ago", "count"),
        ngettext_lazy("in %(count)d year", "in %(count)d years", "count"),
    ),
    (
        30 * 86_400,
        ngettext_lazy("%(count)d month ago", "%(count)d months ago", "count"),
        ngettext_lazy("in %(count)d month", "in %(count)d months", "count"),
    ),
    (
        86_400,
        ngettext_lazy("%(count)d day ago", "%(count)d days ago", "count"),
        ngettext_lazy("in %(count)d day", "in %(count)d days", "count"),
    ),
    (
        3_600,
        ngettext_lazy("%(count)d hour ago", "%(count)d hours ago", "count"),
        ngettext_lazy("in %(count)d hour", "in %(count)d hours", "count"),
    ),
    (
        60,
        ngettext_lazy("%(count)d minute ago", "%(count)d minutes ago", "count"),
        ngettext_lazy("in %(count)d minute", "in %(count)d minutes", "count"),
    ),
    (
        1,
        ngettext_lazy("%(count)d second ago", "%(count)d seconds ago", "count"),
        ngettext_lazy("in %(count)d second", "in %(count)d seconds", "count"),
    ),
)
"""A unit in seconds, and the phrases for a number of such units in the past and in the future."""


def format_time(value: datetime) -> str:
    """Return a local time to the second with the name of its time zone."""
    with suppress(OverflowError):  # Some times at the end of the year 9999 have no local time east of UTC.
        value = timezone.localtime(value)
    # Translators: a time with its zone, in the format of Django's filter "date".
    return str(formats.date_format(value, gettext("j M Y, H:i:s T")))


def distance(value: datetime | None) -> SafeString | str:
    """Return a time relative to now, with the exact time as a tooltip, or an empty string for no time."""
    return "" if value is None else _time(value, _distance(value), format_time(value))


def stamp(value: datetime | None) -> SafeString | str:
    """Return the exact time, with its distance from now as a tooltip, or an empty string for no time."""
    return "" if value is None else _time(value, format_time(value), _distance(value))


def clock(value: datetime) -> SafeString:
    """Return the time of day to the second, with the exact time as a tooltip, for rows of a single day."""
    local = value
    with suppress(OverflowError):
        local = timezone.localtime(value)
    return _time(value, f"{local:%H:%M:%S}", f"{format_time(value)}, {_distance(value)}")


def _time(value: datetime, text: str, title: str) -> SafeString:
    return format_html('<time datetime="{}" title="{}">{}</time>', value.isoformat(), title, text)


def _distance(value: datetime) -> str:
    seconds = int((value - moments.now()).total_seconds())
    size, past, future = next(
        (unit for unit in _UNITS if abs(seconds) >= unit[0]),
        _UNITS[-1],
    )
    words: str = (future if seconds > 0 else past) % {"count": abs(seconds) // size}
    return words


def moment_of_epoch(milliseconds: Any) -> datetime | None:
    """Return the time of epoch milliseconds, or ``None`` for any other value."""
    if type(milliseconds) is not int:
        return None
    try:
        return datetime.fromtimestamp(milliseconds / 1_000, UTC)
    except (OverflowError, OSError, ValueError):
        return None


def duration(length: timedelta) -> str:
    """Return a duration in at most two units, such as ``420 ms``, ``3.2 s`` or ``2 d 4 h``."""
    seconds = max(length.total_seconds(), 0.0)
    if seconds < 1:
        return gettext("%(count)d ms") % {"count": round(seconds * 1_000)}
    if seconds < 60:
        return gettext("%(count)s s") % {"count": formats.number_format(round(seconds, 1))}
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return gettext("%(minutes)d min %(seconds)d s") % {"minutes": minutes, "seconds": rest}
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return gettext("%(hours)d h %(minutes)d min") % {"hours": hours, "minutes": minutes}
    days, hours = divmod(hours, 24)
    return gettext("%(days)d d %(hours)d h") % {"days": days, "hours": hours}


def duration_of(milliseconds: float | Decimal) -> str:
    """Return a stored duration as `duration` does; a longer one than Python can hold is in milliseconds."""
    try:
        return duration(timedelta(milliseconds=float(milliseconds)))
    except OverflowError:
        return f"{grouped(int(milliseconds))} ms"


def column(name: str, label: Any, show: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a method of a page that shows the attribute ``name`` of a row, or a dash if it is ``None``."""

    @admin.display(description=label)
    def shown(_page: Any, row: Any) -> Any:
        value = getattr(row, name)
        return NOTHING if value is None else show(value)

    return shown


def json_column(name: str, label: Any) -> Callable[[Any, Any], Any]:
    """Return a method of a page that shows the JSON column ``name`` of a row."""

    @admin.display(description=label)
    def shown(_page: Any, row: Any) -> Any:
        return json_block(payload_of(row, name))

    return shown


def own_column(name: str) -> Callable[[Any], Any]:
    """Return a list column that shows a column of the model under its label. A long text is cut."""

    @admin.display(description=LABELS[name])
    def value(row: Any) -> Any:
        shown = getattr(row, name)
        return _short(shown) if isinstance(shown, str) else shown

    value.__name__ = name
    return value


def grouped(value: Decimal | int) -> str:
    """Return a number with the separators of the reader's language."""
    return formats.number_format(value, force_grouping=True)


def money(cost: Decimal) -> str:
    """Return a rounded cost as the reader's language writes it."""
    amount = formats.number_format(rounded_cost(cost).replace(",", ""), force_grouping=True)
    return gettext("$%(amount)s") % {"amount": amount}


def number(count: int, *, is_partial: bool = False) -> SafeString:
    return format_html('<span class="helix-number">{}{}</span>', "> " if is_partial else "", grouped(count))


def dollars(cost: Decimal | None, *, is_partial: bool = False) -> SafeString:
    """Return a cost with two decimals, or two significant digits below 0.1. Return a dash for no cost."""
    if cost is None:
        return format_html('<span class="helix-number">{}</span>', NOTHING)
    return format_html(
        '<span class="helix-number" title="{} USD">{}{}</span>',
        exact_cost(cost),
        "> " if is_partial else "",
        money(cost),
    )


_BAR_WIDTH: Final = 200
_COLUMN_WIDTH: Final = 20
_CHART_HEIGHT: Final = 120


def bar(value: float, *, maximum: float) -> SafeString:
    """Return a horizontal bar for a row of a table."""
    length = _BAR_WIDTH * value / maximum if maximum > 0 else 0
    return format_html(
        '<svg class="helix-bar" viewBox="0 0 {} 10" preserveAspectRatio="none" aria-hidden="true" '
        'focusable="false"><rect width="{}" height="10"/></svg>',
        _BAR_WIDTH,
        _number(max(length, 1) if value > 0 else 0),
    )


def meter(spent: float, held: float, *, limit: float) -> SafeString:
    """Return a bar for a limit: the amount spent, followed by the amount held in reserve."""
    full = min(spent, limit) / limit if limit > 0 else 1
    kept = min(held, limit - min(spent, limit)) / limit if limit > 0 else 0
    return format_html(
        '<svg class="helix-bar helix-meter{}" viewBox="0 0 {} 10" preserveAspectRatio="none" '
        'aria-hidden="true" focusable="false"><rect class="helix-meter-whole" width="{}" height="10"/>'
        '<rect class="helix-meter-spent" width="{}" height="10"/>'
        '<rect class="helix-meter-held" x="{}" width="{}" height="10"/></svg>',
        " helix-meter-full" if spent + held >= limit else "",
        *(_BAR_WIDTH, _BAR_WIDTH),
        _number(_BAR_WIDTH * full),
        *(_number(_BAR_WIDTH * full), _number(_BAR_WIDTH * kept)),
    )


MOST_SERIES: Final = 6
"""The number of series that a chart of stacked columns tells apart by colour."""


def stacked_columns(values: Sequence[Sequence[tuple[float, str]]]) -> SafeString:
    """Return a chart that fills its card.

    ``values`` are the parts of each column from the bottom to the top, at most `MOST_SERIES`, with a tooltip.
    """
    highest = max((sum(value for value, _text in parts) for parts in values), default=0)
    drawn = []
    for place, parts in enumerate(values):
        top = float(_CHART_HEIGHT)
        for series, (value, text) in enumerate(parts):
            if value <= 0:
                continue
            height = max((_CHART_HEIGHT - 4) * value / highest, 1)
            top -= height
            drawn.append(
                (
                    series,
                    _number(place * _COLUMN_WIDTH + 2),
                    _number(top),
                    _COLUMN_WIDTH - 4,
                    _number(height),
                    text,
                )
            )
    return format_html(
        '<svg class="helix-columns" viewBox="0 0 {} {}" preserveAspectRatio="none" '
        'aria-hidden="true" focusable="false">{}<line x1="0" x2="{}" y1="{}" y2="{}"/></svg>',
        *(len(values) * _COLUMN_WIDTH, _CHART_HEIGHT),
        format_html_join(
            "",
            '<rect class="helix-series-{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>',
            drawn,
        ),
        *(len(values) * _COLUMN_WIDTH, _CHART_HEIGHT, _CHART_HEIGHT),
    )


def short_date(day: date) -> str:
    return formats.date_format(day, "SHORT_DATE_FORMAT")


def scale_of_days(first: date, last: date, highest: str) -> SafeString:
    """Return the line below a chart of days: its ends, and how much its highest column stands for."""
    words = gettext("highest day: %(amount)s") % {"amount": highest} if highest else ""
    return format_html(
        '<p class="helix-ends"><span>{}</span><span>{}</span><span>{}</span></p>',
        *(short_date(first), words, short_date(last)),
    )


def spark_line(values: Sequence[float]) -> SafeString:
    """Return a chart of a few small columns without labels."""
    highest = max(values, default=0)
    bars = (
        (place * 14, _number(30 - height), _number(height))
        for place, height in enumerate(
            (max(30 * value / highest, 1) if highest > 0 and value > 0 else 0) for value in values
        )
    )
    return format_html(
        '<svg class="helix-spark" viewBox="0 0 {} 31" aria-hidden="true" focusable="false">{}'
        '<line x1="0" x2="{}" y1="30.5" y2="30.5"/></svg>',
        len(values) * 14,
        format_html_join("", '<rect x="{}" y="{}" width="10" height="{}"/>', bars),
        len(values) * 14,
    )


def _number(value: float) -> str:
    """Return a number with a decimal point, regardless of the language."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


MISSING: Final = object()

_TEXT: Final = 500


def short(value: Any, limit: int = _TEXT) -> str:
    text, is_cut = json_start(value, limit)
    return visible_json(text) + ("…" if is_cut else "")


def difference(changes: Iterable[Change]) -> dict[str, Any]:
    """Return the first page of a difference for the template that shows it."""
    pages = difference_pages(changes)
    first = next(pages, [])
    return {"has_more": next(pages, None) is not None, "lines": first}


def matches(value: Any, term: str) -> Iterator[tuple[str, str]]:
    """Yield the places whose key or plain value contains a string, as JSON pointers, and the values there."""
    wanted = term.casefold()
    waiting: list[tuple[str, Any, Any]] = [("", None, value)]
    while waiting:
        path, key, node = waiting.pop()
        if any(wanted in text.casefold() for text in _searched(key, node)):
            yield path, short(node)
        if isinstance(node, dict):
            waiting.extend((join_path(path, name), name, child) for name, child in reversed(node.items()))
        elif isinstance(node, list):
            last = len(node) - 1
            waiting.extend((join_path(path, last - i), None, child) for i, child in enumerate(reversed(node)))


def _searched(key: Any, node: Any) -> Iterator[str]:
    """Yield the strings at a place that a search examines."""
    if isinstance(key, str):
        yield key
    if isinstance(node, str):
        yield node
    elif not isinstance(node, dict | list):
        yield json_start(node, _TEXT)[0]


def at(value: Any, path: str) -> Any:
    """Return the value that a JSON pointer refers to, or `MISSING`."""
    if not path:
        return value
    if not path.startswith("/"):
        return MISSING
    for segment in path[1:].split("/"):
        name = segment.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isascii() and name.isdigit() and len(name) < 10:
            if int(name) >= len(value):
                return MISSING
            value = value[int(name)]
        else:
            return MISSING
    return value


_LONGEST_NAME = 80


def names_of_users(user_ids: Iterable[str | None]) -> dict[str, str]:
    """Return the names of users by their ids. Ids without a name are left out.

    The function of ``HELIX_STORE["ADMIN_USERS"]`` is called once with all ids. By default, an id that is the
    primary key of a user has the name ``str(user)``, which takes one statement.
    """
    wanted = list(dict.fromkeys(each for each in user_ids if each))
    if not wanted:
        return {}
    path = conf.admin_users()
    found: Mapping[str, Any] = _users(wanted) if path is None else import_string(path)(wanted)
    if not isinstance(found, Mapping):
        raise ImproperlyConfigured('The function of HELIX_STORE["ADMIN_USERS"] must return a mapping.')
    return {each: one_line(str(found[each]), _LONGEST_NAME) for each in wanted if each in found}


def _users(user_ids: list[str]) -> dict[str, Any]:
    model = get_user_model()
    keys = {}
    for user_id in user_ids:
        try:
            key = model._meta.pk.to_python(user_id)
        except ValidationError:
            continue
        # A number may be written in several ways, only one of which is the key.
        if str(key) == user_id and (not isinstance(key, int) or 0 < key <= MAX_BIGINT):
            keys[key] = user_id
    found = model._default_manager.in_bulk(keys) if keys else {}
    return {keys[key]: user for key, user in found.items()}


def user_link(address: str, user_id: str, names: Mapping[str, str]) -> SafeString:
    """Return the name of a user as a link to the list of their sessions; the id is a tooltip.

    ``address`` is that of the list.
    """
    name, title = names.get(user_id), printable(user_id)
    try:
        url = f"{address}?{urlencode({'user': user_id})}"
    except UnicodeEncodeError:
        return format_html('<span class="helix-narrow" title="{}">{}</span>', title, _short(user_id))
    return format_html(
        '<a class="helix-narrow" href="{}" title="{}">{}</a>', url, title, name if name else _short(user_id)
    )
