"""The rules of posts: their stored form, and the conditions under which a history may receive them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from helix_store.core import validation
from helix_store.core.dicts import AnyMessage
from helix_store.core.ids import new_id
from helix_store.core.limits import Limits
from helix_store.core.payloads import decode
from helix_store.core.posts import Post, PostState
from helix_store.core.types import TERMINAL_STATUSES, Message, SessionStatus, UserId
from helix_store.exceptions import IntegrityFault, InvalidQuery, SessionEnded
from helix_store.sessions.requests import EncodedMessage, encode_messages
from helix_store.sessions.tool_calls import ToolCalls

MOST_DUE_POSTS: Final = 1_000
"""The maximum size of a page of sessions with due posts."""

_STATES: Final[tuple[PostState, ...]] = ("waiting", "received", "withdrawn")


@dataclass(frozen=True, slots=True)
class NewPost:
    """A checked post. A repeat under the same key must have the same digest."""

    post_id: str
    text: str
    author: str | None
    key: str | None
    not_before: datetime | None
    digest: str

    def waiting(
        self, session_id: str, sequence: int, posted_at: datetime, message: Message | None = None
    ) -> Post:
        """Return the post in the form in which it waits to be received."""
        return Post(
            post_id=self.post_id,
            session_id=session_id,
            sequence=sequence,
            message=message,
            author=self.author,
            key=self.key,
            not_before=self.not_before,
            posted_at=posted_at,
            state="waiting",
            received_at=None,
            position=None,
        )


def checked_post(
    message: AnyMessage, *, key: Any, author: UserId | None, not_before: Any, limits: Limits
) -> NewPost:
    """Check the arguments of a post. Raises `InvalidPayload` and `LimitExceeded`."""
    validation.optional_identifier(key, "key")
    author_id = validation.user_id(author, "author")
    at = None if not_before is None else _moment(not_before)
    ((_, text),) = encode_messages([message], limits)
    parts = [decode(text), author_id, None if at is None else at.isoformat()]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return NewPost(new_id(), text, author_id, key, at, digest)


def _moment(value: Any) -> datetime:
    milliseconds = validation.epoch_milliseconds(value, "not_before")
    if isinstance(value, datetime):
        return value.astimezone(UTC)
    return validation.milliseconds_to_datetime(milliseconds)


def checked_states(states: Any) -> tuple[PostState, ...]:
    """The states to list, in a fixed order. Raises `InvalidQuery`."""
    try:
        given = set(states)
    except TypeError:
        given = {None}
    if isinstance(states, str) or not given <= set(_STATES):
        raise InvalidQuery(f"states must be one or more of {', '.join(_STATES)}.", path="states")
    return tuple(state for state in _STATES if state in given)


def require_not_ended(session_id: str, status: str) -> None:
    """Raise `SessionEnded` for a status in which a session accepts no posts."""
    if status in TERMINAL_STATUSES:
        raise SessionEnded(session_id, SessionStatus(status).value)


def received_message(text: str) -> EncodedMessage:
    """The stored text that a post has as a message in the history. Raises `IntegrityFault`."""
    message = decode(text)
    if type(message) is not dict or type(message.get("role")) is not str:
        raise IntegrityFault("A stored post is not a message; other rows are not affected.")
    return EncodedMessage(message["role"], text)


def has_open_calls(newest_first: Iterable[Message]) -> bool:
    """Return whether tool calls of the newest assistant message, or of several in a row, have no result."""
    answered: set[Any] = set()
    is_calling = False
    for message in newest_first:
        calls = message.get("tool_calls") if message["role"] == "assistant" else None
        if isinstance(calls, list) and calls:
            is_calling = True
            ids = [call.get("id") for call in calls if isinstance(call, dict)]
            if any(isinstance(call_id, str) and call_id not in answered for call_id in ids):
                return True
        elif is_calling or message["role"] == "assistant":
            return False
        elif message["role"] == "tool" and isinstance(message.get("tool_call_id"), str):
            answered.add(message["tool_call_id"])
    return False


def waits_for_answer(status: str, suspension_kind: str | None, pending: str | None) -> bool:
    """Return whether a session waits for an answer or was paused, so that no turn can continue it."""
    if status not in (SessionStatus.PAUSED, SessionStatus.INTERRUPTED):
        return False
    if suspension_kind is None:
        return status == SessionStatus.PAUSED
    try:
        return bool(ToolCalls.stored(pending, None).unanswered)
    except IntegrityFault:
        return True
