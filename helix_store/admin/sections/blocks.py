"""Messages as blocks of a chat, for the templates ``conversation.html`` and ``said.html``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from helix_store.admin.elements import printable
from helix_store.admin.sections.section import SessionView
from helix_store.admin.times import clock, duration
from helix_store.core.transcript import ConversationMessage, Part, TurnPart, paired

_OPEN_TEXT: Final = 2_400
_OPEN_RESULT: Final = 280
_KNOWN_ROLES: Final = ("user", "assistant", "system", "developer", "tool")


def blocks(
    view: SessionView,
    messages: Sequence[ConversationMessage],
    step_of: Callable[[ConversationMessage], tuple[Any, dict[str, Any]] | None],
) -> list[dict[str, Any]]:
    """Return a block for each message that is not shown as the result of a call.

    ``step_of`` returns the key and the context of a message's step. The first message of a step shows the
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
    # A text that is only slightly longer is shown in full.
    cut = len(text) if len(text) <= limit * 1.2 else limit
    return {
        "kind": part.kind,
        "text": text[:cut],
        "rest": text[cut:],
        "name": printable(part.name)[:limit],
        "is_error": part.is_error,
    }
