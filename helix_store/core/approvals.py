"""The digest of the call that a person approves, and the approved call for the worker."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Protocol, TypeAlias, TypeGuard

from helix_store.core import validation
from helix_store.core.limits import UNLIMITED
from helix_store.core.payloads import Serializable, encode
from helix_store.exceptions import InvalidPayload

__all__ = [
    "USER",
    "ActingUser",
    "Actor",
    "ApprovedCall",
    "actor_text",
    "call_digest",
    "canonical_json",
    "digest_of",
    "digest_of_canonical",
    "is_user",
    "user_text",
]

USER: Final = "user:"
"""The beginning of the stored form of a Django user."""

_write_canonical: Final = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")
).encode


class ActingUser(Protocol):
    """The attribute of a Django user that an answer needs."""

    @property
    def pk(self) -> Any: ...

    @property
    def is_active(self) -> bool: ...

    def has_perm(self, perm: str, obj: Any = None) -> bool: ...


Actor: TypeAlias = str | ActingUser
"""The actor who answers a call: a string that does not begin with ``user:``, or a Django user."""


def is_user(value: Any) -> TypeGuard[ActingUser]:
    """Return whether a value is a Django user."""
    return callable(getattr(value, "has_perm", None))


def user_text(user: ActingUser, path: str) -> str:
    """Return the stored form of a Django user. Raises `InvalidPayload` if the user is not stored."""
    if user.pk is None:
        raise InvalidPayload(path=path, reason="the user is not stored")
    return validation.identifier(f"{USER}{user.pk}", path)


def actor_text(text: Any, path: str) -> str:
    """Check the text that names an actor who is not a Django user.

    Raises `InvalidPayload`, also for text in the stored form of a user: it would impersonate that user.
    """
    if isinstance(text, str) and text.startswith(USER):
        reason = f'a string cannot begin with "{USER}"; pass the Django user itself'
        raise InvalidPayload(path=path, reason=reason)
    return validation.identifier(text, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovedCall(Serializable):
    """A call exactly as it was approved. ``actors`` lists the people who approved it, in order.

    Example::

        sessions = store.sessions
        sessions.submit_tool_result("booking", "call-1", approved=True, approval_id="call-1", actor="ada")
        with sessions.session("booking").turn() as turn, turn.step() as step:
            call = step.use_approval("call-1")
        print(call.tool_name, call.input, call.actors)
    """

    tool_name: str
    input: Any
    actors: list[str]
    digest: str


def call_digest(tool_name: str, input: Any) -> str:
    """Return the hex SHA-256 of a tool's name and its input. The order of keys makes no difference.

    Values of different types have different digests, as 1, 1.0 and True do. Raises `InvalidPayload`.
    """
    validation.identifier(tool_name, "tool_name")
    encode(input, limit=UNLIMITED, path="/input")
    return digest_of(tool_name, input)


def canonical_json(value: Any) -> str:
    """Return a value that is already stored as JSON in the form that a digest covers, with sorted keys."""
    return _write_canonical(value)


def digest_of(tool_name: Any, value: Any) -> str:
    """Return the digest of values that are already stored as JSON."""
    return digest_of_canonical(tool_name, _write_canonical(value))


def digest_of_canonical(tool_name: Any, text: str) -> str:
    """Return the digest of a tool's name and the canonical text of its input."""
    # In this form, a pair of lone surrogates differs from the character that it would encode.
    return sha256(f"[{_write_canonical(tool_name)},{text}]".encode("utf-8", "surrogatepass")).hexdigest()
