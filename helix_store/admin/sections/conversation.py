"""The conversation and the items of a session."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from functools import partial
from itertools import islice
from typing import Any, Final
from urllib.parse import urlencode

from django.core.exceptions import PermissionDenied
from django.db.models import Count, IntegerField, Model, Value
from django.db.models.functions import Length
from django.http import FileResponse, Http404, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.http import content_disposition_header
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext, pgettext
from django.utils.translation import gettext_lazy as _

from helix_store.admin import markdown
from helix_store.admin.base import SessionChildAdmin
from helix_store.admin.elements import clock, duration, grouped, identifier, link, money, printable, stamp
from helix_store.admin.records import item_preview
from helix_store.admin.sections.section import NOT_IN_A_NAME, Section, SessionView
from helix_store.admin.sections.waits import mark_approvals
from helix_store.catalogue import ConversationPage, ConversationStep, Table, conversations, tables
from helix_store.catalogue.table import WholeConversation
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.transcript import ConversationMessage, Part, TurnPart, paired
from helix_store.core.types import UsageKind
from helix_store.exceptions import HelixStoreError, IntegrityFault, InvalidPayload, LimitExceeded
from helix_store.items import lane_name
from helix_store.models import Checkpoint, Item, Message, Run, Session, UsageEntry
from helix_store.reports.conversations import (
    MESSAGE_COLUMNS,
    SHOWN_RECORDS,
    conversation_as_markdown,
    conversations_of,
    messages_of,
    own_messages,
    stored_message,
    unread_rows,
)
from helix_store.reports.payloads import DOCUMENT_LIMIT, json_start, payload_start, read_start, whole_payloads
from helix_store.reports.session import conversations_as_json
from helix_store.transfer.records import spool

_PAGE: Final = 40
_THREADS: Final = 50
_SOURCE: Final = 12_000
"""The number of characters of a message above which the page reads the message with another statement."""

_SHOWN: Final = 12_000
"""The maximum number of characters of a part that the page shows; downloads contain all of them."""

_PARTS: Final = 200
_SHOWN_OF_MESSAGE: Final = 48_000
_LEAST_SHOWN: Final = 600
"""The number of characters of each part that are shown even if the message is longer than the page allows."""

_ENTRIES: Final = 500
_OPEN_TEXT: Final = 2_400
_OPEN_RESULT: Final = 280
_LONGEST_FILE: Final = 8_000_000
"""The maximum number of characters of base64 that the page shows as an image, or offers as a file."""

_SNIFFED: Final = 64
"""The number of characters of base64 that tell the type of an image."""

_IMAGES: Final = {
    re.compile(rb"\x89PNG\r\n\x1a\n"): "image/png",
    re.compile(rb"\xff\xd8\xff"): "image/jpeg",
    re.compile(rb"GIF8[79]a"): "image/gif",
    re.compile(rb"RIFF....WEBP", re.DOTALL): "image/webp",
}
"""Images that browsers show and that hold no scripts, by the beginning of their content."""

_KNOWN_ROLES: Final = ("user", "assistant", "system", "developer", "tool")


class Conversation(Section):
    name = "conversation"
    label = _("Conversation")

    def is_visible(self, view: SessionView) -> bool:
        return view.may_view(Message) or any(view.may_view(*each.needs) for each in conversations())

    def context(self, view: SessionView) -> dict[str, Any]:
        """Return the conversation that the URL names, by default the store's own messages."""
        asked, thread = view.text("of"), view.request.GET.get("thread")
        first = None if (start := view.number("start")) is None else max(1, start)
        pages: dict[str, ConversationPage] = {}
        for conversation in conversations_of(view.db, [view.session.pk], view.may_view):
            page = conversation.page(view.db, view.session.pk, first=first, limit=_PAGE, thread=thread)
            if page is not None:
                pages[conversation.name] = page
        names = list(pages)
        if not pages or (view.session.message_count and view.may_view(Message)):
            names.insert(0, "")
        chosen = asked if asked in names else names[0]
        shown = _of_adapter(view, chosen, pages[chosen]) if chosen else self._own(view)
        calls = (said for block in shown["blocks"] for said in block["said"] or ())
        mark_approvals(view, {said["key"]: said for said in calls if said["kind"] == "call" and said["key"]})
        is_empty = not shown["blocks"] and not any(page.total for page in pages.values())
        named = [
            {
                "name": name or pgettext("of a conversation", "Messages"),
                "url": "" if name == chosen else view.url(of=name),
            }
            for name in names
        ]
        choices = [named if len(names) > 1 else [], shown.get("threads", [])]
        return {
            **shown,
            "choices": [each for each in choices if each],
            "unread_rows": _unread(view) if is_empty else [],
            "downloads": [] if is_empty else _downloads(view),
            "markdown": _markdown_choice(view) if markdown.is_available() and not is_empty else None,
        }

    def _own(self, view: SessionView) -> dict[str, Any]:
        """Return the page of the store's own messages that the URL names, by default the newest one."""
        if not view.may_view(Message):
            return {"blocks": []}
        total = view.session.message_count
        first = self._first(view, total)
        messages = own_page(view, first, first + _PAGE - 1)
        steps = self._steps(view, first) if messages and view.may_view(Checkpoint) else []
        shown = blocks(view, messages, partial(_step_with, steps), partial(_whole_url, view, "", ""))
        _mark_failed_calls(shown, steps)
        return {
            "blocks": shown,
            **_pages(view.url, first, messages[-1].number if messages else None, total),
            "may_jump": view.may_view(Checkpoint) and view.session.step_count > 0,
            "list_url": view.list_url(Message),
        }

    def _first(self, view: SessionView, total: int) -> int:
        """Return the sequence number that the page begins with: the requested one, a step's or the end's."""
        newest = max(1, total - _PAGE + 1)
        if (step := view.number("step")) is not None and view.may_view(Checkpoint):
            return self._first_of_step(view, step) or newest
        asked = view.number("start")
        return newest if asked is None else max(1, min(asked, max(1, total)))

    def _first_of_step(self, view: SessionView, step: int) -> int | None:
        found = view.steps.filter(step_count=step).order_by("-version")
        version = found.values_list("version", flat=True).first()
        if version is None:
            return None
        before = view.steps.filter(version__lt=version).order_by("-version")
        return (before.values_list("message_count", flat=True).first() or 0) + 1

    def _steps(self, view: SessionView, first: int) -> list[dict[str, Any]]:
        """Return the steps with a message on the page, each with its last message and tokens, in order."""
        found = view.steps.filter(message_count__gte=first).order_by("version")
        columns = ("step_count", "step_id", "message_count", "created_at", "run_id")
        steps = list(found.values(*columns)[: _PAGE + 1])
        spent = _spent(view, [step["step_count"] for step in steps])
        may_view_timeline = view.may_view(Run)
        for step in steps:
            number = step["step_count"]
            own = spent.get((step["run_id"], number), StepSpent())
            step["spent"], step["outcomes"] = own.words, own.outcomes
            step["url"] = f"{view.url('timeline', step=number)}#step-{number}" if may_view_timeline else ""
            step["step_id"] = printable(step["step_id"] or "")
            step["at"] = stamp(step["created_at"])
        return steps


@dataclass(slots=True)
class StepSpent:
    """What a step has spent, and the outcomes of its tool calls in order, by the name of the tool."""

    tokens: int = 0
    cost: Decimal = Decimal(0)
    outcomes: dict[str, list[bool]] = field(default_factory=dict)

    @property
    def words(self) -> str:
        if not self.tokens:
            return ""
        words = gettext("%(count)s tokens") % {"count": grouped(self.tokens)}
        return f"{words} · {money(self.cost)}" if self.cost else words


def _spent(view: SessionView, counts: list[int]) -> dict[tuple[str | None, int], StepSpent]:
    """Return what the steps have spent, by run and step."""
    if not counts or not view.may_view(UsageEntry):
        return {}
    try:
        entries = view.usage.get_entries(
            view.session.session_id,
            kinds=[UsageKind.TOKENS, UsageKind.TOOL],
            step_range=(min(counts), max(counts)),
            limit=_ENTRIES,
        )
    except HelixStoreError:
        return {}
    spent: dict[tuple[str | None, int], StepSpent] = {}
    for entry in entries:
        own = spent.setdefault((entry.run_id, entry.step_count), StepSpent())
        own.tokens += 0 if entry.tokens is None else entry.tokens.total
        own.cost += entry.cost_usd or 0
        if entry.kind is UsageKind.TOOL and entry.success is not None:
            own.outcomes.setdefault(entry.tool_name or "", []).append(entry.success)
    return spent


def _mark_failed_calls(shown: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> None:
    """Mark the calls that have failed according to the usage of their step.

    The results of a tool are told apart by their order. If there are not as many results as outcomes, they
    are marked if all of the tool's calls have failed.
    """
    results: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for block in shown:
        for said in block["said"] or ():
            number = said.get("result_number") or (block["sequence"] if said["kind"] == "result" else None)
            place = next(
                (i for i, each in enumerate(steps) if number and each["message_count"] >= number), None
            )
            if place is not None:
                name = said["name"] or said.get("result", {}).get("name", "")
                results.setdefault((place, name), []).append(said)
    for (place, name), calls in results.items():
        outcomes = steps[place]["outcomes"].get(name, [])
        if len(outcomes) != len(calls):
            outcomes = [any(outcomes) or not outcomes] * len(calls)
        for said, is_success in zip(calls, outcomes, strict=True):
            said["has_failed"] = said.get("has_failed", False) or not is_success


def own_page(view: SessionView, first: int, last: int) -> list[ConversationMessage]:
    """Return the store's own messages from ``first`` to ``last``, by their sequence numbers."""
    rows = view.rows(Message).filter(sequence__gte=first, sequence__lte=last)
    columns = ("pk", *MESSAGE_COLUMNS, payload_start(_SOURCE))
    found = rows.order_by("sequence").values_list(*columns)
    starts = [(key, start) for key, _, _, _, start in found]
    whole = whole_payloads(Message, view.alias, starts, _SOURCE)
    return [
        stored_message(
            sequence,
            role,
            at,
            whole.get(key, start),
            limit=None if key in whole else _SOURCE,
            row=(Message, key),
        )
        for key, sequence, role, at, start in found
    ]


def messages_as_blocks(view: SessionView, first: int, last: int) -> list[dict[str, Any]]:
    """Return some of the store's own messages as `blocks`, at most a page of them."""
    messages = own_page(view, first, min(last, first + _PAGE - 1))
    return blocks(view, messages, _without_step, partial(_whole_url, view, "", ""))


def _without_step(message: ConversationMessage) -> None:
    return None


def _step_with(
    steps: list[dict[str, Any]], message: ConversationMessage
) -> tuple[Any, dict[str, Any]] | None:
    """Return the step that stored a message: the first step after which the session contained the message."""
    step = next((each for each in steps if each["message_count"] >= message.number), None)
    return None if step is None else (step["message_count"], step)


def _pages(
    url: Callable[..., str], first: int, last: int | None, total: int, *, is_partial: bool = False
) -> dict[str, Any]:
    """Return the numbers of the page's messages, and links to the other pages. Without messages, there is no
    total.
    """
    has_newer = last is not None and last < total
    return {
        "total": f"{grouped(total)}{'+' if is_partial else ''}" if total else "",
        "first": grouped(first),
        "last": grouped(first - 1 if last is None else last),
        "oldest_url": url(start=1) if first > 1 else "",
        "older_url": url(start=max(1, first - _PAGE)) if first > 1 else "",
        "newer_url": url(start=(last or 0) + 1) if has_newer else "",
        "newest_url": url() if has_newer else "",
    }


def _whole_url(view: SessionView, name: str, thread: str, message: ConversationMessage) -> str:
    """Return the URL of a message as it is stored, which is downloaded."""
    shown = next((each for each in conversations() if each.name == name), None)
    if shown is not None and not isinstance(shown, WholeConversation):
        return "" if message.row is None else view.page.page_url(*message.row)
    address = view.page.view_url(Session, "conversation", view.session.pk)
    named = {"of": name, "thread": thread} if name else {}
    try:
        return f"{address}?{urlencode({'number': message.number, **named})}"
    except UnicodeEncodeError:
        return ""


# --- Conversations that adapters keep -------------------------------------------------------------


def _of_adapter(view: SessionView, name: str, page: ConversationPage) -> dict[str, Any]:
    messages = page.messages
    url = partial(view.url, of=name, thread=page.thread or None)
    first = messages[0].number if messages else 1
    return {
        "blocks": blocks(view, messages, _step_of, partial(_whole_url, view, name, page.thread)),
        **_pages(
            url, first, messages[-1].number if messages else None, page.total, is_partial=page.is_partial
        ),
        "threads": _threads(view, name, page),
        "path": [_path_step(view, step) for step in page.path],
    }


def _threads(view: SessionView, name: str, page: ConversationPage) -> list[dict[str, Any]]:
    """Return links to the threads. If there are many, these are some, with a link to the next ones."""
    conversation = next(each for each in conversations() if each.name == name)
    named, after = page.threads, view.request.GET.get("threads")
    last = named[-1] if named else ""
    if after is not None and isinstance(conversation, WholeConversation):
        following = islice(conversation.threads(view.db, view.session.pk, after=after), _THREADS)
        named = tuple(dict.fromkeys((page.thread, *following)))
        last = named[-1]
    elif (page.thread_count or 0) > len(named):
        # The main and the shown thread may follow the others in order.
        last = named[:_THREADS][-1] if named else ""
    links = [
        {"name": printable(each) or "-", "url": "" if each == page.thread else view.url(of=name, thread=each)}
        for each in named
    ]
    if (page.thread_count or 0) > len(page.threads):
        words = gettext("More of %(count)s threads") % {"count": grouped(page.thread_count or 0)}
        url = view.url(of=name, thread=page.thread, threads=last) if len(named) > 1 else ""
        links.append({"name": words, "url": url or view.url(of=name, thread=page.thread)})
    return links


def _unread(view: SessionView) -> list[str]:
    """Return the names and numbers of the session's rows that no conversation shows."""
    rows = unread_rows(view.db, view.session.pk, view.may_view)
    return [f"{printable(name)}: {grouped(count)}" for name, count in rows.items()]


def _markdown_choice(view: SessionView) -> dict[str, Any]:
    """Return the URL of this page with the text of its messages as it is stored, or with it as Markdown."""
    is_raw = bool(view.text("raw"))
    given = {
        name: view.request.GET[name] for name in ("of", "thread", "start", "step") if name in view.request.GET
    }
    return {"is_raw": is_raw, "url": view.url(**given, raw=None if is_raw else 1)}


def _downloads(view: SessionView) -> list[dict[str, str]]:
    address = view.page.view_url(Session, "conversation", view.session.pk)
    return [{"name": name, "url": f"{address}?format={kind}"} for name, kind in _FORMATS.items()]


_FORMATS: Final = {"Markdown": "markdown", "JSON": "json"}


def conversation_file(view: SessionView) -> HttpResponseBase:
    """Return all conversations of the session as a file to download, each message as a whole.

    ``?number=`` and ``?of=`` name one message. It is written to a temporary file first, so that an error does
    not end a response that has begun.
    """
    if not Conversation().is_visible(view):
        raise PermissionDenied
    store, session_id = view.store, view.session.session_id
    number, place = view.number("number"), view.number("file")
    if number is not None and place is not None:
        return file_of_message(view, number, place)
    if number is not None:
        chunks = _one_as_json(view, number)
    elif view.text("format") == "markdown":
        found = conversation_as_markdown(store, session_id, may_view=view.may_view)
        chunks = (f"{block}\n\n" for block in found)
    else:
        chunks = conversations_as_json(store, session_id, may_view=view.may_view)
    file = spool()
    try:
        for chunk in chunks:
            file.write(chunk.encode(errors="backslashreplace"))
    except IntegrityFault as fault:
        # The rest has been written. Only Markdown raises this: JSON has no parts for an unreadable message.
        file.write(f"*{fault}*\n".encode())
    file.seek(0)
    is_markdown = number is None and view.text("format") == "markdown"
    name = f"conversation-{NOT_IN_A_NAME.sub('_', session_id)[:80]}"
    response = FileResponse(
        file,
        as_attachment=True,
        filename=f"{name}.md" if is_markdown else f"{name}.json",
        content_type=f"{'text/markdown' if is_markdown else 'application/json'}; charset=utf-8",
    )
    response["X-Content-Type-Options"] = "nosniff"
    return response


def _one_as_json(view: SessionView, number: int) -> Iterator[str]:
    """Yield one message as it is stored. Raise ``Http404`` if the user may not view it or it is gone."""
    message = _message(view, number)
    if message is None or message.stored is None:
        raise Http404
    text, is_long = json_start(message.stored, DOCUMENT_LIMIT)
    # Indented, a long message could be two hundred times as long: it may be nested that deeply.
    yield json.dumps(message.stored, ensure_ascii=False) if is_long else text


def _message(view: SessionView, number: int) -> ConversationMessage | None:
    """Return a message of the conversation that the URL names, or ``None`` if the user may not view it."""
    name, thread = view.text("of"), view.request.GET.get("thread")
    found: Iterable[ConversationMessage] = ()
    if not name and view.may_view(Message):
        found = own_messages(view.db, view.session.pk, first=number)
    for conversation in conversations_of(view.db, [view.session.pk], view.may_view) if name else ():
        if conversation.name == name:
            found = messages_of(view.db, view.session.pk, conversation, thread, first=number)
    message = next(iter(found), None)
    return message if message is not None and message.number == number else None


def _step_of(message: ConversationMessage) -> tuple[Any, dict[str, Any]] | None:
    if message.step is None:
        return None
    return message.step, {"step_count": message.step, "at": stamp(message.at)}


def _path_step(view: SessionView, step: ConversationStep) -> dict[str, Any]:
    url = "" if step.row is None else view.page.page_url(*step.row)
    return {
        "id": link(url, identifier(step.step_id)),
        "name": printable(step.name),
        "number": step.step,
        "count": step.count,
        "at": stamp(step.at),
    }


# --- Messages as blocks of a chat, for the templates ``conversation.html`` and ``said.html``


def blocks(
    view: SessionView,
    messages: Sequence[ConversationMessage],
    step_of: Callable[[ConversationMessage], tuple[Any, dict[str, Any]] | None],
    whole_url: Callable[[ConversationMessage], str],
) -> list[dict[str, Any]]:
    """Return a block for each message that is not shown as the result of a call.

    ``whole_url`` returns the URL of a message as it is stored, for messages that are too long for the page.
    ``step_of`` returns the key and the context of a message's step. The first message of each step shows the
    step. ``said`` is ``None`` if the message cannot be read.
    """
    readable = [(each.number, each.role, each.parts) for each in messages if each.parts is not None]
    cut = {each.number for each in messages if each.is_cut}
    spoken = {turn.sequence: turn.parts for turn in paired(readable, cut)}
    times = {each.number: each.at for each in messages}
    urls = {each.number: whole_url(each) for each in messages}
    reads_markdown = markdown.is_available() and not view.text("raw")
    found = []
    shown_key = None
    for message in messages:
        if message.parts is not None and message.number not in spoken:
            continue
        parts = spoken.get(message.number)
        key, step = step_of(message) or (None, None)
        said: list[dict[str, Any]] | None = None
        if parts is not None:
            said = list(_said(parts[:_PARTS], message.number, times, urls))
        for each in said or () if reads_markdown else ():
            if each["kind"] == "text":
                head, tail = markdown.divided(each["text"] + each["rest"], _OPEN_TEXT)
                each |= {"html": markdown.as_html(head), "rest_html": markdown.as_html(tail) if tail else ""}
        _add_file_urls(said or (), message, urls[message.number])
        found.append(
            {
                "sequence": message.number,
                "role": printable(message.role),
                "tone": message.role if message.role in _KNOWN_ROLES else "other",
                "at": "" if message.at is None else clock(message.at),
                "url": "" if message.row is None else view.page.page_url(*message.row),
                "said": said,
                "more_parts": max(0, len(parts or ()) - _PARTS),
                "is_cut": message.is_cut or any(each["is_cut"] for each in said or ()),
                "whole_url": urls[message.number],
                "step": step if key != shown_key else None,
            }
        )
        shown_key = key
    return found


def _add_file_urls(said: Iterable[dict[str, Any]], message: ConversationMessage, whole_url: str) -> None:
    """Add the URLs of the files whose data the message holds, and whether they are images."""
    if f"?number={message.number}" not in whole_url:
        return
    shown = [each for each in said if each["kind"] == "file"]
    files = [part for part in message.parts or () if part.kind == "file"]
    for place, (each, part) in enumerate(zip(shown, files, strict=False)):
        if part.data is not None and len(part.data) <= _LONGEST_FILE:
            each["file_url"] = f"{whole_url}&file={place}"
            each["is_image"] = _image_type(_decoded(part.data[:_SNIFFED]) or b"") is not None


def _image_type(content: bytes) -> str | None:
    """Return the media type of content that begins as an image of a known type does."""
    return next((kind for mark, kind in _IMAGES.items() if mark.match(content)), None)


def _decoded(data: str) -> bytes | None:
    """Return the content of base64, of either alphabet and with or without padding."""
    text = "".join(data.split()).rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True) or None
    except ValueError:
        return None


def file_of_message(view: SessionView, number: int, place: int) -> HttpResponse:
    """Return a file whose data a message holds: an image of a known type to show, any other to download.

    Raise ``Http404`` if the user may not view the message or it has no such file.
    """
    message = _message(view, number)
    files = [part for part in (message and message.parts) or () if part.kind == "file"]
    data = files[place].data if place < len(files) else None
    content = _decoded(data) if data is not None and len(data) <= _LONGEST_FILE else None
    if content is None:
        raise Http404
    kind = _image_type(content)
    response = HttpResponse(content, content_type=kind or "application/octet-stream")
    name = NOT_IN_A_NAME.sub("_", files[place].name)[:80] or "file"
    response["Content-Disposition"] = content_disposition_header(kind is None, name) or "inline"
    response["X-Content-Type-Options"] = "nosniff"
    response["Content-Security-Policy"] = "default-src 'none'; sandbox"
    return response


def _said(
    parts: Iterable[TurnPart], number: int, times: Mapping[int, datetime | None], urls: Mapping[int, str]
) -> Iterable[dict[str, Any]]:
    room = _SHOWN_OF_MESSAGE
    for own in parts:
        limit = _OPEN_RESULT if own.part.kind in ("result", "file", "other") else _OPEN_TEXT
        said = _one(own.part, limit, room)
        room -= said["length"]
        if own.result is not None and own.result_sequence is not None:
            said["result"] = _one(own.result, _OPEN_RESULT, room)
            room -= said["result"]["length"]
            said["result"]["whole_url"] = urls[own.result_sequence]
            said["result_number"] = own.result_sequence
            said["has_failed"] = own.result.is_error
            said["result_after"] = _after(times[number], times[own.result_sequence])
        yield said


def _after(called: datetime | None, answered: datetime | None) -> str:
    if called is None or answered is None or answered <= called:
        return ""
    return duration(answered - called)


def _one(part: Part, limit: int, room: int) -> dict[str, Any]:
    """Return a part of a message. If the text is long, its ``rest`` is folded; if it is very long, it is cut.

    ``room`` is the number of characters that the page may still show of the message.
    """
    most = max(_LEAST_SHOWN, min(_SHOWN, room))
    text, fields = printable(part.text[:most]), printable(part.rest[:most])
    # Text that is only slightly longer is shown in full.
    cut = len(text) if len(text) <= limit * 1.2 else limit
    return {
        "kind": part.kind,
        "text": text[:cut],
        "rest": text[cut:],
        "name": printable(part.name[:most]),
        "call_id": printable((part.call_id or "")[:most]),
        "key": part.call_id or "",
        "given": part.text,
        "fields": fields,
        "is_error": part.is_error,
        "is_cut": max(map(len, (part.text, part.rest, part.name, part.call_id or ""))) > most,
        "length": len(text) + len(fields),
    }


_ITEMS_PER_PAGE: Final = 25
_LANES: Final = 50
_LONGEST_NAME: Final = 60


class Items(Section):
    name = "items"
    label = _("Items")

    def is_visible(self, view: SessionView) -> bool:
        return bool(_counted_tables(view))

    def context(self, view: SessionView) -> dict[str, Any]:
        found: dict[str, Any] = {"tables": _app_rows(view)}
        return found | self._lanes(view) if view.may_view(Item) else found

    def _lanes(self, view: SessionView) -> dict[str, Any]:
        """Return the lanes, and a page of the newest items of the chosen lane, by default the first."""
        rows = view.rows(Item)
        lanes = list(rows.values_list("lane").annotate(number=Count("pk")).order_by("lane")[: _LANES + 1])
        if not lanes:
            return {}
        lane = _chosen(view, lanes[0][0])
        items = self._page(rows.filter(lane=lane), view.number("before"))
        return {
            "lanes": [
                {"name": _shown(name), "number": number, "url": "" if name == lane else view.url(lane=name)}
                for name, number in lanes[:_LANES]
            ],
            "has_more_lanes": len(lanes) > _LANES,
            "items": [
                {**item, "url": view.page.page_url(Item, item["id"])} for item in items[:_ITEMS_PER_PAGE]
            ],
            "list_url": view.list_url(Item),
            "newest_url": view.url(lane=lane) if view.number("before") is not None else "",
            "older_url": view.url(lane=lane, before=items[_ITEMS_PER_PAGE - 1]["id"])
            if len(items) > _ITEMS_PER_PAGE
            else "",
        }

    def _page(self, rows: Any, before: int | None) -> list[dict[str, Any]]:
        newest = rows.filter(pk__lt=MAX_BIGINT if before is None else before).order_by("-pk")
        columns = ("pk", "key", "created_at", Length("payload"), payload_start())
        found = newest.values_list(*columns)[: _ITEMS_PER_PAGE + 1]
        return [
            {
                "id": key,
                "key": identifier(_shown(name)) if name else "",
                "at": stamp(at),
                "size": size,
                "kind": _kind(text),
                "preview": item_preview(text),
            }
            for key, name, at, size, text in found
        ]


def _chosen(view: SessionView, first: str) -> str:
    """Return the lane that the URL names, or the first one. The default lane has an empty name."""
    try:
        return lane_name(view.request.GET.get("lane", first))
    except (InvalidPayload, LimitExceeded):
        return first


def _shown(name: str) -> str:
    text = printable(name)
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}…"


def _kind(start: str) -> str:
    """Return the type or role that an item specifies."""
    item, _is_cut = read_start(start)
    said = [] if item is None else [item.get(name) for name in ("type", "role")]
    return next((printable(word)[:_LONGEST_NAME] for word in said if isinstance(word, str) and word), "")


# --- Rows in the tables without a section


def _app_rows(view: SessionView) -> list[tuple[str, str | SafeString]]:
    """Return the name and number of rows of each table that the user may view, with a link to the list."""
    counting = _counted_tables(view)
    if not counting:
        return []
    first, *others = (_counted(view, number, table) for number, table in enumerate(counting))
    counted = sorted(first.union(*others, all=True))
    found = [(counting[number].model, rows) for number, rows in counted if rows]
    return [
        (capfirst(str(model._meta.verbose_name_plural)), _linked(view, model, rows)) for model, rows in found
    ]


def _counted_tables(view: SessionView) -> list[Table]:
    """Return the tables that the user may view and that have no section of their own. Usage has one."""
    return [
        table
        for table in tables("session")
        if not (table.names_tenant or table.record in SHOWN_RECORDS) and view.may_view(table.model)
    ]


def _counted(view: SessionView, number: int, table: Table) -> Any:
    """Return the number of rows, and the index of the table."""
    rows = table.model._base_manager.using(view.alias).filter(**{table.parent: view.session.pk}).order_by()
    numbered = rows.annotate(app_table=Value(number, output_field=IntegerField())).values("app_table")
    return numbered.annotate(app_rows=Count("pk")).values_list("app_table", "app_rows")


def _linked(view: SessionView, model: type[Model], rows: int) -> str | SafeString:
    site = view.page.admin_site
    if site.is_registered(model) and isinstance(site.get_model_admin(model), SessionChildAdmin):
        return link(view.list_url(model), grouped(rows))
    return grouped(rows)
