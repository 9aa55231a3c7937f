"""Messages as blocks of a chat, for the templates ``conversation.html`` and ``said.html``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.utils.safestring import SafeString

from helix_store.admin.elements import printable
from helix_store.admin.times import clock, duration
from helix_store.core.transcript import Part, TurnPart

__all__ = ["Block", "block"]

_OPEN_TEXT: Final = 2_400
_OPEN_RESULT: Final = 280
_KNOWN_ROLES: Final = ("user", "assistant", "system", "developer", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A part of a message. If the text is long, its ``rest`` is folded."""

    kind: str
    text: str
    rest: str = ""
    name: str = ""
    is_error: bool = False
    result: Said | None = None
    result_after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A message, and the step that begins with it. ``said`` is ``None`` if the message cannot be read."""

    sequence: int
    role: str
    tone: str
    at: SafeString | str
    url: str
    said: list[Said] | None
    is_cut: bool
    step: dict[str, Any] | None


def block(
    sequence: int,
    role: str,
    parts: Iterable[TurnPart] | None,
    times: Mapping[int, datetime | None],
    *,
    url: str,
    is_cut: bool,
    step: dict[str, Any] | None,
) -> Block:
    """Return a message as a block. ``times`` has the time of each message on the page."""
    at = times[sequence]
    return Block(
        sequence=sequence,
        role=printable(role),
        tone=role if role in _KNOWN_ROLES else "other",
        at="" if at is None else clock(at),
        url=url,
        said=None if parts is None else list(_said(parts, sequence, times)),
        is_cut=is_cut,
        step=step,
    )


def _said(parts: Iterable[TurnPart], sequence: int, times: Mapping[int, datetime | None]) -> Iterable[Said]:
    for own in parts:
        result, after = None, ""
        if own.result is not None and own.result_sequence is not None:
            result = _one(own.result, _OPEN_RESULT)
            after = _after(times[sequence], times[own.result_sequence])
        limit = _OPEN_RESULT if own.part.kind in ("result", "file", "other") else _OPEN_TEXT
        yield _one(own.part, limit, result, after)


def _after(called: datetime | None, answered: datetime | None) -> str:
    if called is None or answered is None or answered <= called:
        return ""
    return duration(answered - called)


def _one(part: Part, limit: int, result: Said | None = None, after: str = "") -> Said:
    text = printable(part.text)
    # A text that is only slightly longer is shown in full.
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
