"""The digest of the call that a person approves, and the approved call for the worker."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Protocol, TypeAlias

from helix_store.core import validation
from helix_store.core.limits import UNLIMITED
from helix_store.core.payloads import encode
from helix_store.core.serialization import Serializable

__all__ = ["ActingUser", "Actor", "ApprovedCall", "call_digest", "digest_of"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovedCall(Serializable):
    """A call exactly as it was approved. ``actors`` lists the people who approved it, in order."""

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


def digest_of(tool_name: Any, value: Any) -> str:
    """Return the digest of values that are already stored as JSON."""
    # In this form, a pair of lone surrogates differs from the character that it would encode.
    return sha256(_write_canonical([tool_name, value]).encode("utf-8", "surrogatepass")).hexdigest()
