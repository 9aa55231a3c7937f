"""The conversation as a chat: each message with its author and step, and the answer of each tool."""

from __future__ import annotations

from typing import Any, Final

from django.utils.translation import gettext_lazy as _

from helix_store.admin.elements import printable
from helix_store.admin.sections.adapter_conversation import adapter_context, adapter_page
from helix_store.admin.sections.blocks import Block, block
from helix_store.admin.sections.section import Section, SessionView
from helix_store.admin.times import stamp
from helix_store.catalogue import ConversationPage, conversations
from helix_store.core.transcript import turns
from helix_store.core.types import UsageKind
from helix_store.core.usage import rounded_cost
from helix_store.exceptions import HelixStoreError
from helix_store.models import Checkpoint, Message, UsageEntry
from helix_store.reports.conversations import conversations_of
from helix_store.reports.previews import payload_start, read_start

__all__ = ["Conversation"]

_PAGE: Final = 40
_SOURCE: Final = 12_000
"""The number of characters of a stored message that are read; the message's own page shows all of it."""

_ENTRIES: Final = 500


class Conversation(Section):
    name = "conversation"
    label = _("Conversation")

    def is_visible(self, view: SessionView) -> bool:
        return view.may_view(Message) or any(view.may_view(*each.needs) for each in conversations())

    def context(self, view: SessionView) -> dict[str, Any]:
        """Return the conversation that the address names, by default the store's own messages."""
        asked = view.text("of")
        pages: dict[str, ConversationPage] = {}
        for conversation in conversations_of(view.db, [view.session.pk], view.may_view):
            page = adapter_page(view, conversation, limit=_PAGE)
            if page is not None:
                pages[conversation.name] = page
        names = list(pages)
        if not pages or (view.session.message_count and view.may_view(Message)):
            names.insert(0, "")
        chosen = asked if asked in names else names[0]
        shown = adapter_context(view, chosen, pages[chosen], limit=_PAGE) if chosen else self._own(view)
        named = [
            {"name": name or _("Messages"), "url": "" if name == chosen else view.url(of=name)}
            for name in names
        ]
        choices = [named if len(names) > 1 else [], shown.get("threads", [])]
        return {**shown, "choices": [each for each in choices if each]}

    def _own(self, view: SessionView) -> dict[str, Any]:
        if not view.may_view(Message):
            return {"blocks": []}
        total = view.session.message_count
        first = self._first(view, total)
        rows = self._rows(view, first)
        last = rows[-1][1] if rows else first - 1
        steps = self._steps(view, first) if rows and view.may_view(Checkpoint) else []
        return {
            "blocks": self._blocks(view, rows, steps),
            "first": first,
            "last": last,
            "total": total,
            "oldest_url": view.url(start=1) if first > 1 else "",
            "older_url": view.url(start=max(1, first - _PAGE)) if first > 1 else "",
            "newer_url": view.url(start=last + 1) if rows and last < total else "",
            "newest_url": view.url() if rows and last < total else "",
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

    def _rows(self, view: SessionView, first: int) -> list[tuple[Any, ...]]:
        messages = view.rows(Message).filter(sequence__gte=first, sequence__lt=first + _PAGE)
        columns = ("pk", "sequence", "role", "created_at", payload_start(_SOURCE))
        return list(messages.order_by("sequence").values_list(*columns))

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

    def _blocks(
        self, view: SessionView, rows: list[tuple[Any, ...]], steps: list[dict[str, Any]]
    ) -> list[Block]:
        read = {
            sequence: (pk, role, at, *read_start(start, _SOURCE)) for pk, sequence, role, at, start in rows
        }
        readable = [(sequence, found[3]) for sequence, found in read.items() if found[3] is not None]
        spoken = {turn.sequence: turn for turn in turns(readable)}
        times = {sequence: found[2] for sequence, found in read.items()}
        blocks, ahead, shown_step = [], iter(steps), None
        step = next(ahead, None)
        for sequence, (pk, role, _at, message, is_cut) in read.items():
            while step is not None and step["message_count"] < sequence:
                step = next(ahead, None)
            if message is not None and sequence not in spoken:
                continue
            turn = spoken.get(sequence)
            blocks.append(
                block(
                    sequence,
                    role,
                    None if turn is None else turn.parts,
                    times,
                    url=view.page.page_url(Message, pk),
                    is_cut=is_cut,
                    step=step if step is not shown_step else None,
                )
            )
            shown_step = step
        return blocks
