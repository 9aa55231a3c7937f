"""The conversation as a chat: each message with its author and step, and the answer of each tool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

from django.utils.translation import gettext_lazy as _

from helix_store.admin.elements import identifier, link, printable
from helix_store.admin.sections.section import Section, SessionView
from helix_store.admin.times import clock, duration, stamp
from helix_store.catalogue import ConversationPage, ConversationStep, conversations
from helix_store.core.transcript import ConversationMessage, Part, TurnPart, paired
from helix_store.core.types import UsageKind
from helix_store.core.usage import rounded_cost
from helix_store.exceptions import HelixStoreError
from helix_store.models import Checkpoint, Message, UsageEntry
from helix_store.reports.conversations import MESSAGE_COLUMNS, conversations_of, stored_message
from helix_store.reports.payloads import payload_start

_PAGE: Final = 40
_SOURCE: Final = 12_000
"""The maximum number of characters of a stored message to read; the message's own page shows all of it."""

_ENTRIES: Final = 500
_OPEN_TEXT: Final = 2_400
_OPEN_RESULT: Final = 280
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
        named = [
            {"name": name or _("Messages"), "url": "" if name == chosen else view.url(of=name)}
            for name in names
        ]
        choices = [named if len(names) > 1 else [], shown.get("threads", [])]
        return {**shown, "choices": [each for each in choices if each]}

    def _own(self, view: SessionView) -> dict[str, Any]:
        """Return the page of the store's own messages that the URL names, by default the newest one."""
        if not view.may_view(Message):
            return {"blocks": []}
        total = view.session.message_count
        first = self._first(view, total)
        messages = self._messages(view, first)
        steps = self._steps(view, first) if messages and view.may_view(Checkpoint) else []
        return {
            "blocks": blocks(view, messages, partial(_step_with, steps)),
            "total": total,
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

    def _messages(self, view: SessionView, first: int) -> list[ConversationMessage]:
        rows = view.rows(Message).filter(sequence__gte=first, sequence__lt=first + _PAGE)
        columns = ("pk", *MESSAGE_COLUMNS, payload_start(_SOURCE))
        found = rows.order_by("sequence").values_list(*columns)
        return [stored_message(*row, limit=_SOURCE, row=(Message, key)) for key, *row in found]

    def _steps(self, view: SessionView, first: int) -> list[dict[str, Any]]:
        """Return the steps with a message on the page, each with its last message and tokens, in order."""
        found = view.steps.filter(message_count__gte=first).order_by("version")
        columns = ("step_count", "step_id", "message_count", "created_at", "run_id")
        steps = list(found.values(*columns)[: _PAGE + 1])
        spent = self._spent(view, [step["step_count"] for step in steps])
        for step in steps:
            step["spent"] = spent.get((step["run_id"], step["step_count"]), "")
            step["step_id"] = printable(step["step_id"] or "")
            step["at"] = stamp(step["created_at"])
        return steps

    def _spent(self, view: SessionView, counts: list[int]) -> dict[tuple[str | None, int], str]:
        """Return tokens and cost as text, by run and step."""
        if not counts or not view.may_view(UsageEntry):
            return {}
        try:
            entries = view.usage.get_entries(
                view.session.session_id,
                kinds=UsageKind.TOKENS,
                step_range=(min(counts), max(counts)),
                limit=_ENTRIES,
            )
        except HelixStoreError:
            return {}
        sums: dict[tuple[str | None, int], list[Any]] = {}
        for entry in entries:
            tokens = sums.setdefault((entry.run_id, entry.step_count), [0, 0])
            tokens[0] += 0 if entry.tokens is None else entry.tokens.total
            tokens[1] += entry.cost_usd or 0
        return {
            key: f"{tokens:,} tokens · ${rounded_cost(cost)}" if cost else f"{tokens:,} tokens"
            for key, (tokens, cost) in sums.items()
        }


def _step_with(
    steps: list[dict[str, Any]], message: ConversationMessage
) -> tuple[Any, dict[str, Any]] | None:
    """Return the step that stored a message: the first step after which the session contained the message."""
    step = next((each for each in steps if each["message_count"] >= message.number), None)
    return None if step is None else (step["message_count"], step)


def _pages(url: Callable[..., str], first: int, last: int | None, total: int) -> dict[str, Any]:
    """Return the numbers of the page's messages, and links to the other pages."""
    has_newer = last is not None and last < total
    return {
        "first": first,
        "last": first - 1 if last is None else last,
        "oldest_url": url(start=1) if first > 1 else "",
        "older_url": url(start=max(1, first - _PAGE)) if first > 1 else "",
        "newer_url": url(start=(last or 0) + 1) if has_newer else "",
        "newest_url": url() if has_newer else "",
    }


# --- Conversations that adapters keep -------------------------------------------------------------


def _of_adapter(view: SessionView, name: str, page: ConversationPage) -> dict[str, Any]:
    messages = page.messages
    url = partial(view.url, of=name, thread=page.thread or None)
    first = messages[0].number if messages else 1
    return {
        "blocks": blocks(view, messages, _step_of),
        "total": f"{page.total}+" if page.is_partial else page.total,
        **_pages(url, first, messages[-1].number if messages else None, page.total),
        "threads": [
            {
                "name": printable(each) or "-",
                "url": "" if each == page.thread else view.url(of=name, thread=each),
            }
            for each in page.threads
        ],
        "path": [_path_step(view, step) for step in page.path],
    }


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
) -> list[dict[str, Any]]:
    """Return a block for each message that is not shown as the result of a call.

    ``step_of`` returns the key and the context of a message's step. The first message of each step shows the
    step. ``said`` is ``None`` if the message cannot be read.
    """
    readable = [(each.number, each.role, each.parts) for each in messages if each.parts is not None]
    spoken = {turn.sequence: turn.parts for turn in paired(readable)}
    times = {each.number: each.at for each in messages}
    found = []
    shown_key = None
    for message in messages:
        if message.parts is not None and message.number not in spoken:
            continue
        parts = spoken.get(message.number)
        key, step = step_of(message) or (None, None)
        found.append(
            {
                "sequence": message.number,
                "role": printable(message.role),
                "tone": message.role if message.role in _KNOWN_ROLES else "other",
                "at": "" if message.at is None else clock(message.at),
                "url": "" if message.row is None else view.page.page_url(*message.row),
                "said": None if parts is None else list(_said(parts, message.number, times)),
                "is_cut": message.is_cut,
                "step": step if key != shown_key else None,
            }
        )
        shown_key = key
    return found


def _said(
    parts: Iterable[TurnPart], number: int, times: Mapping[int, datetime | None]
) -> Iterable[dict[str, Any]]:
    for own in parts:
        limit = _OPEN_RESULT if own.part.kind in ("result", "file", "other") else _OPEN_TEXT
        said = _one(own.part, limit)
        if own.result is not None and own.result_sequence is not None:
            said["result"] = _one(own.result, _OPEN_RESULT)
            said["result_after"] = _after(times[number], times[own.result_sequence])
        yield said


def _after(called: datetime | None, answered: datetime | None) -> str:
    if called is None or answered is None or answered <= called:
        return ""
    return duration(answered - called)


def _one(part: Part, limit: int) -> dict[str, Any]:
    """Return a part of a message. If the text is long, its ``rest`` is folded."""
    text = printable(part.text)
    # Text that is only slightly longer is shown in full.
    cut = len(text) if len(text) <= limit * 1.2 else limit
    return {
        "kind": part.kind,
        "text": text[:cut],
        "rest": text[cut:],
        "name": printable(part.name)[:limit],
        "is_error": part.is_error,
    }
