"""Checks of arguments, before any SQL.

Each function returns the value that it accepts. It raises `InvalidPayload`, or `InvalidQuery` where the
argument only selects rows. ``path`` of the error is the argument's name. A message never shows a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Final, TypeVar

from helix_store.core.limits import MAX_BIGINT
from helix_store.core.payload_faults import join_path
from helix_store.core.types import SessionStatus
from helix_store.exceptions import InvalidPayload, InvalidQuery

__all__ = [
    "MAX_EPOCH_MILLISECONDS",
    "arguments",
    "aware_datetime",
    "datetime_to_milliseconds",
    "enum",
    "enum_text",
    "epoch_milliseconds",
    "fields",
    "identifier",
    "messages",
    "metadata",
    "milliseconds_to_datetime",
    "optional",
    "optional_identifier",
    "optional_text",
    "page_limit",
    "page_offset",
    "query_number",
    "statuses",
    "tags",
    "tenant",
    "text",
    "whole_number",
]

E = TypeVar("E", bound=Enum)

_LONGEST_IDENTIFIER: Final = 255
MAX_EPOCH_MILLISECONDS: Final = 253_402_300_799_999
"""The end of the year 9999, the largest time of a Python datetime."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_NOT_QUERYABLE: Final = re.compile("[\x00\ud800-\udfff]")
_NOT_IDENTIFIER: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


# --- Texts ----------------------------------------------------------------------------------------


def identifier(value: Any, name: str) -> str:
    """1 to 255 code points without control characters and lone surrogates; otherwise opaque."""
    # `isprintable` is stricter than the rule and ten times faster than the expression.
    if type(value) is str and 0 < len(value) <= _LONGEST_IDENTIFIER and value.isprintable():
        return value
    if type(value) is not str:
        raise InvalidPayload(path=name, reason=f"expected str, got {type(value).__name__}")
    if not 0 < len(value) <= _LONGEST_IDENTIFIER:
        reason = f"expected 1 to {_LONGEST_IDENTIFIER} characters, got {len(value)}"
        raise InvalidPayload(path=name, reason=reason)
    if _NOT_IDENTIFIER.search(value):
        raise InvalidPayload(path=name, reason="control characters and lone surrogates are not allowed")
    return value


def optional_identifier(value: Any, name: str, *, empty: bool = False) -> str | None:
    """An identifier or ``None``; with `empty` also the empty text."""
    if value is None or (empty and type(value) is str and not value):
        return value
    return identifier(value, name)


def tenant(value: Any, name: str = "tenant") -> str:
    """An identifier, or the empty tenant."""
    return value if type(value) is str and not value else identifier(value, name)


def text(value: Any, name: str) -> str:
    """Text of any length, also empty, without NUL and lone surrogates: a text column takes it."""
    if type(value) is not str:
        raise InvalidPayload(path=name, reason=f"expected str, got {type(value).__name__}")
    if not (value.isascii() and "\x00" not in value) and _NOT_QUERYABLE.search(value):
        raise InvalidPayload(path=name, reason="text that is queried cannot hold NUL or lone surrogates")
    return value


def optional_text(value: Any, name: str) -> str | None:
    """Text or ``None``."""
    return None if value is None else text(value, name)


def tags(value: Any, name: str = "tags") -> list[str]:
    """The tags as a new list."""
    if type(value) not in (list, tuple):
        raise InvalidPayload(path=name, reason=f"expected a list of str, got {type(value).__name__}")
    return [text(tag, join_path(name, index)) for index, tag in enumerate(value)]


def metadata(value: Any, name: str = "metadata") -> dict[str, str]:
    """The metadata as a new dict."""
    if type(value) is not dict:
        raise InvalidPayload(path=name, reason=f"expected a dict of str to str, got {type(value).__name__}")
    return {text(key, name): text(item, join_path(name, key)) for key, item in value.items()}


# --- Numbers and times ----------------------------------------------------------------------------


def whole_number(value: Any, name: str, *, minimum: int = 0, maximum: int = MAX_BIGINT) -> int:
    """An ``int`` within bounds; ``bool`` and ``float`` are rejected."""
    if type(value) is not int:
        raise InvalidPayload(path=name, reason=f"expected a whole number, got {type(value).__name__}")
    if not minimum <= value <= maximum:
        raise InvalidPayload(path=name, reason=f"expected a whole number from {minimum} to {maximum}")
    return value


def epoch_milliseconds(value: Any, name: str) -> int:
    """Epoch milliseconds up to the year 9999. A value that looks like seconds is refused."""
    whole_number(value, name, maximum=MAX_EPOCH_MILLISECONDS)
    if 10**8 <= value < 10**11:
        raise InvalidPayload(path=name, reason="it looks like epoch seconds; expected milliseconds")
    return int(value)


def milliseconds_to_datetime(milliseconds: int) -> datetime:
    """The aware UTC datetime of epoch milliseconds, exactly."""
    return _EPOCH + timedelta(milliseconds=milliseconds)


def datetime_to_milliseconds(time: datetime) -> int:
    """Epoch milliseconds of an aware datetime; fractions of a millisecond are cut."""
    return (time - _EPOCH) // _MILLISECOND


def aware_datetime(value: Any, name: str) -> datetime:
    """The time in a filter: an aware datetime or epoch milliseconds."""
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise InvalidQuery(f"{name} needs a time zone.", path=name)
        return value
    try:
        return milliseconds_to_datetime(epoch_milliseconds(value, name))
    except InvalidPayload as exc:
        raise InvalidQuery(
            f"{name} is neither an aware datetime nor epoch milliseconds: {exc.reason}.", path=name
        ) from exc


# --- Enumerations ---------------------------------------------------------------------------------


def enum(cls: type[E], value: Any, name: str) -> E:
    """A member of `cls`, from itself or its text."""
    if type(value) is cls:
        return value
    if type(value) is str:
        for member in cls:
            if member.value == value:
                return member
    allowed = ", ".join(str(member.value) for member in cls)
    raise InvalidPayload(path=name, reason=f"expected one of {allowed}")


def statuses(expected: Any, name: str) -> frozenset[SessionStatus]:
    """A collection of session statuses; a single one outside of a collection is refused."""
    if not isinstance(expected, Collection) or isinstance(expected, str | bytes | Mapping):
        reason = f"expected a collection of statuses, got {type(expected).__name__}"
        raise InvalidPayload(path=name, reason=reason)
    return frozenset(enum(SessionStatus, status, name) for status in expected)


# --- Records --------------------------------------------------------------------------------------

Rule = Callable[[Any, str], Any]
"""Takes a value and its name, and returns the value that it accepts."""


def fields(record: object, rules: Mapping[str, Rule]) -> dict[str, Any]:
    """The attributes of a record, by name, each checked by its rule."""
    return {name: rule(getattr(record, name), name) for name, rule in rules.items()}


def arguments(rules: Mapping[str, Rule], **values: Any) -> None:
    """Check arguments, each by the rule of its name."""
    for name, value in values.items():
        rules[name](value, name)


def optional(rule: Rule) -> Rule:
    """The rule, or ``None``."""
    return lambda value, name: None if value is None else rule(value, name)


def enum_text(cls: type[Enum]) -> Rule:
    """A member of `cls`, from itself or its text, as text."""
    return lambda value, name: enum(cls, value, name).value


# --- Pages ----------------------------------------------------------------------------------------


def query_number(value: Any, name: str, *, minimum: int = 0, maximum: int | None = None) -> int:
    """A whole number that selects rows; ``bool`` and ``float`` are rejected. Raises `InvalidQuery`."""
    if type(value) is not int or value < minimum or (maximum is not None and value > maximum):
        raise InvalidQuery(f"{name} must be a whole number from {minimum}.", path=name)
    return value


def page_limit(limit: Any, *, maximum: int = 200) -> int:
    """The number of rows of a page; more than `maximum` is `maximum`."""
    return min(query_number(limit, "limit", minimum=1), maximum)


def page_offset(offset: Any) -> int:
    """The number of rows to skip."""
    return query_number(offset, "offset", maximum=MAX_BIGINT)


# --- Messages -------------------------------------------------------------------------------------


def messages(values: Any) -> list[str]:
    """The roles of messages: each is a dict with a ``role``. Their other contents pass the payload gate."""
    if type(values) not in (list, tuple):
        raise InvalidPayload(path="/messages", reason="expected a list of messages")
    return [_role(value, f"messages/{index}") for index, value in enumerate(values)]


def _role(value: Any, path: str) -> str:
    if type(value) is not dict:
        raise InvalidPayload(path=path, reason=f"expected a dict, got {type(value).__name__}")
    if "role" not in value:
        raise InvalidPayload(path=path, reason="a message needs a role")
    return identifier(value["role"], f"{path}/role")
