"""The conversation as one reads a chat: who said what, in which step, and what each tool answered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.db.models.functions import Substr
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from helix_store.admin.elements import printable
from helix_store.admin.messages import message_start
from helix_store.admin.payloads import PayloadText
from helix_store.admin.sections.section import Section, SessionView
from helix_store.admin.times import clock, duration, stamp
from helix_store.core.payloads import decode
from helix_store.core.types import UsageKind
from helix_store.core.usage import rounded_cost
from helix_store.exceptions import HelixStoreError, IntegrityFault
from helix_store.models import Checkpoint, CheckpointKind, Message, UsageEntry
from helix_store.sessions.transcript import Part, turns

__all__ = ["Conversation"]

_PAGE: Final = 40
_SOURCE: Final = 12_000
"""Characters of a stored message that are read; the page of the message has all of it."""

_OPEN_TEXT: Final = 2_400
_OPEN_RESULT: Final = 280
_ENTRIES: Final = 500
_KNOWN_ROLES: Final = ("user", "assistant", "system", "developer", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A part of a message. The ``rest`` of a long text is folded."""

    kind: str
    text: str
    rest: str = ""
    name: str = ""
    is_error: bool = False
    result: Said | None = None
    result_after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A message, and the step that begins with it. ``said`` is ``None`` for a message that is unreadable."""

    sequence: int
    role: str
    tone: str
    at: SafeString
    url: str
    said: list[Said] | None
    is_cut: bool
    step: dict[str, Any] | None


class Conversation(Section):
    name = "conversation"
    label = _("Conversation")
    needs = (Message,)

    def context(self, view: SessionView) -> dict[str, Any]:
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
        """The sequence number that the page begins with: as asked, at a step, or at the end."""
        newest = max(1, total - _PAGE + 1)
        if (step := view.number("step")) is not None and view.may_view(Checkpoint):
            return self._first_of_step(view, step) or newest
        asked = view.number("start")
        return newest if asked is None else max(1, min(asked, max(1, total)))

    def _first_of_step(self, view: SessionView, step: int) -> int | None:
        found = _steps_of(view).filter(step_count=step).order_by("-version")
        version = found.values_list("version", flat=True).first()
        if version is None:
            return None
        before = _steps_of(view).filter(version__lt=version).order_by("-version")
        return (before.values_list("message_count", flat=True).first() or 0) + 1

    def _rows(self, view: SessionView, first: int) -> list[tuple[Any, ...]]:
        start = PayloadText(Substr("payload", 1, _SOURCE + 1))
        messages = Message.objects.using(view.alias).filter(
            session=view.session.pk, sequence__gte=first, sequence__lt=first + _PAGE
        )
        return list(messages.order_by("sequence").values_list("pk", "sequence", "role", "created_at", start))

    def _steps(self, view: SessionView, first: int) -> list[dict[str, Any]]:
        """The steps with a message of the page, each with its last message and its tokens, in order."""
        found = _steps_of(view).filter(message_count__gte=first).order_by("version")
        columns = ("step_count", "step_id", "message_count", "created_at", "run_id")
        steps = list(found.values(*columns)[: _PAGE + 1])
        spent = self._spent(view, [step["step_count"] for step in steps])
        for step in steps:
            step["spent"] = spent.get((step["run_id"], step["step_count"]), "")
            step["step_id"] = printable(step["step_id"] or "")
            step["at"] = stamp(step["created_at"])
        return steps

    def _spent(self, view: SessionView, counts: list[int]) -> dict[tuple[str | None, int], str]:
        """Tokens and cost by run and step, in words."""
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
        read = {sequence: (pk, role, at, *_message(start)) for pk, sequence, role, at, start in rows}
        readable = [(sequence, found[3]) for sequence, found in read.items() if found[3] is not None]
        spoken = {turn.sequence: turn for turn in turns(readable)}
        times = {sequence: found[2] for sequence, found in read.items()}
        blocks, ahead, shown_step = [], iter(steps), None
        step = next(ahead, None)
        for sequence, (pk, role, at, message, is_cut) in read.items():
            while step is not None and step["message_count"] < sequence:
                step = next(ahead, None)
            if message is not None and sequence not in spoken:
                continue
            turn = spoken.get(sequence)
            blocks.append(
                Block(
                    sequence=sequence,
                    role=printable(role),
                    tone=role if role in _KNOWN_ROLES else "other",
                    at=clock(at),
                    url=view.page.page_url(Message, pk),
                    said=None if turn is None else list(_said(turn.parts, sequence, times)),
                    is_cut=is_cut,
                    step=step if step is not shown_step else None,
                )
            )
            shown_step = step
        return blocks


def _steps_of(view: SessionView) -> Any:
    checkpoints = Checkpoint.objects.using(view.alias)
    return checkpoints.filter(session=view.session.pk, kind=CheckpointKind.STEP, namespace="")


def _message(start: str) -> tuple[dict[str, Any] | None, bool]:
    """A message, or its start; ``None`` if it cannot be read."""
    is_cut = len(start) > _SOURCE
    try:
        message = message_start(start) if is_cut else decode(start)
    except (IntegrityFault, RecursionError):
        return None, is_cut
    return (message if isinstance(message, dict) else None), is_cut


def _said(parts: Iterable[Any], sequence: int, times: dict[int, datetime]) -> Iterable[Said]:
    for own in parts:
        result, after = None, ""
        if own.result is not None:
            result = _one(own.result, _OPEN_RESULT)
            took = times[own.result_sequence] - times[sequence]
            after = duration(took) if took.total_seconds() > 0 else ""
        limit = _OPEN_RESULT if own.part.kind in ("result", "other") else _OPEN_TEXT
        yield _one(own.part, limit, result, after)


def _one(part: Part, limit: int, result: Said | None = None, after: str = "") -> Said:
    text = printable(part.text)
    # A text that is hardly longer is shown as a whole.
    cut = len(text) if len(text) <= limit * 1.2 else limit
    return Said(
        kind=part.kind,
        text=text[:cut],
        rest=text[cut:],
        name=printable(part.name)[:limit],
        is_error=part.is_error,
        result=result,
        result_after=after,
    )
