"""A record of how much of a call's input a person has read. An unread input cannot be approved.

The page shows an input of up to `WHOLE` characters beside its form. It splits a longer one into parts: each
part has a signed mark that the next part requires, and an approval requires the mark of the last part. A mark
belongs to one user, one call and one input.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from django.core import signing

WHOLE: Final = 20_000
"""The longest input, in characters of indented JSON, that is shown beside its form."""

_PART: Final = 100_000
_SALT: Final = "helix_store.admin.shown_input"
_LONGEST_READING: Final = 24 * 60 * 60
"""How long a mark is valid, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPart:
    """A part of an input. ``mark`` proves that all parts up to this one were shown; otherwise it is empty."""

    text: str
    number: int
    count: int
    mark: str

    @property
    def is_last(self) -> bool:
        return self.number == self.count


@dataclass(frozen=True, slots=True)
class CallInput:
    """The input of one pending call of a session, as a user reads it."""

    user: Any
    session: Any
    call_id: str
    call: dict[str, Any]

    def part(self, number: int, mark: str) -> InputPart:
        """Return a part by its number, counted from 1. ``mark`` is the mark of the part before it."""
        text = self._text()
        count = _count(text)
        number = min(max(number, 1), count)
        was_before = number == 1 or self._is_mark(mark, text, number - 1)
        return InputPart(
            text=text[(number - 1) * _PART : number * _PART],
            number=number,
            count=count,
            mark=signing.dumps(self._content(text, number), salt=_SALT) if was_before else "",
        )

    def was_read(self, mark: str) -> bool:
        """Return whether the mark proves that all parts were shown."""
        text = self._text()
        return self._is_mark(mark, text, _count(text))

    def _text(self) -> str:
        return json.dumps(self.call.get("input"), indent=2, ensure_ascii=False)

    def _is_mark(self, mark: str, text: str, number: int) -> bool:
        try:
            content = signing.loads(mark, salt=_SALT, max_age=_LONGEST_READING)
        except signing.BadSignature:
            return False
        return bool(content == self._content(text, number))

    def _content(self, text: str, number: int) -> list[Any]:
        """Return the payload of a mark. It holds a digest of the call, because the call may be long."""
        session = self.session
        subject = [session.tenant, session.session_id, self.call_id, self.call.get("tool_name"), text]
        return [str(self.user.pk), sha256(json.dumps(subject).encode()).hexdigest(), number]


def _count(text: str) -> int:
    return -(-len(text) // _PART)
