"""Checks of arguments, before any SQL. Each function returns the accepted value or raises an error:
`InvalidPayload`, or `InvalidQuery` if the argument only selects rows. The error's ``path`` begins with the
argument's name. A message never shows a value. A `Guard` holds the conditions of a write.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from itertools import islice
from typing import Any, Final, TypeVar, cast
from uuid import UUID

from helix_store.core.limits import (
    MAX_BIGINT,
    MAX_CALL_ITEMS,
    MAX_CHECKPOINT_ID_CHARACTERS,
    MAX_DIRECTORY_BYTES,
    MAX_ID_BYTES,
    MAX_ID_CHARACTERS,
    MAX_METADATA_BYTES,
    MAX_REASON_BYTES,
    MAX_TAGS_BYTES,
    MAX_TITLE_BYTES,
)
from helix_store.core.payloads import Serializable, join_path, size_of, write_json
from helix_store.core.types import BRANCHED_FROM, SessionStatus
from helix_store.exceptions import (
    FencedOutError,
    InvalidPayload,
    InvalidQuery,
    LimitExceeded,
    StaleStateError,
)

E = TypeVar("E", bound=Enum)
T = TypeVar("T")

MAX_EPOCH_MILLISECONDS: Final = 253_402_300_799_999
"""The end of the year 9999, the largest time of a Python datetime."""

_LONGEST_AGE: Final = timedelta(days=36_525)
_MOST_USER_BITS: Final = 128
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_CUT: Final = "… (cut)"
_NOT_QUERYABLE: Final = re.compile("[\x00\ud800-\udfff]")
_NOT_IDENTIFIER: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


# --- Texts ----------------------------------------------------------------------------------------


def identifier(value: Any, name: str) -> str:
    """Check for 1 to 255 code points of at most 765 bytes, without control characters or lone surrogates."""
    # `isprintable` is stricter than this rule, and ten times faster than the expression.
    if type(value) is str and 0 < len(value) <= MAX_ID_CHARACTERS and value.isascii() and value.isprintable():
        return value
    return _checked_identifier(value, name, MAX_ID_CHARACTERS, MAX_ID_BYTES)


def checkpoint_id(value: Any, name: str = "checkpoint_id") -> str:
    """Check an identifier that may be long enough for a step checkpoint, whose id contains a session's id."""
    spare = MAX_CHECKPOINT_ID_CHARACTERS - MAX_ID_CHARACTERS
    return _checked_identifier(value, name, MAX_CHECKPOINT_ID_CHARACTERS, MAX_ID_BYTES + spare)


def _checked_identifier(value: Any, name: str, characters: int, size: int) -> str:
    if type(value) is not str:
        raise InvalidPayload(path=name, reason=f"expected str, got {type(value).__name__}")
    if not 0 < len(value) <= characters:
        reason = f"expected 1 to {characters} characters, got {len(value)}"
        raise InvalidPayload(path=name, reason=reason)
    if _NOT_IDENTIFIER.search(value):
        raise InvalidPayload(path=name, reason="control characters and lone surrogates are not allowed")
    if size_of(value) > size:
        reason = f"expected at most {size} bytes of UTF-8, got {size_of(value)}"
        raise InvalidPayload(path=name, reason=reason)
    return value


def optional_identifier(value: Any, name: str, *, empty: bool = False) -> str | None:
    """Return an identifier, ``None`` or, if `empty` is true, an empty string."""
    if value is None or (empty and type(value) is str and not value):
        return value
    return identifier(value, name)


def user_id(value: Any, name: str = "user_id") -> str | None:
    """Return an identifier or ``None``; the primary key of a Django user may be an int or a `UUID`."""
    return optional_identifier(user_id_text(value), name)


def user_id_text(value: Any) -> Any:
    """Return an int or a `UUID` as text, and any other value unchanged."""
    is_number = type(value) is int and value.bit_length() <= _MOST_USER_BITS
    return str(value) if is_number or isinstance(value, UUID) else value


def tenant(value: Any, name: str = "tenant") -> str:
    """Return an identifier, or the empty tenant."""
    return value if type(value) is str and not value else identifier(value, name)


def text(value: Any, name: str, *, limit: int) -> str:
    """Check a string for a text column, which may be empty: at most ``limit`` bytes, without NUL or lone
    surrogates.

    Raises `InvalidPayload` and `LimitExceeded`.
    """
    if type(value) is not str:
        raise InvalidPayload(path=name, reason=f"expected str, got {type(value).__name__}")
    if len(value) > limit:
        raise LimitExceeded(name=f"{name} bytes", limit=limit, actual=len(value))
    if not (value.isascii() and "\x00" not in value):
        if _NOT_QUERYABLE.search(value):
            raise InvalidPayload(path=name, reason="text that is queried cannot hold NUL or lone surrogates")
        _check_size(size_of(value), limit, name)
    return value


def title(value: Any, name: str = "title") -> str | None:
    """Return a title or ``None``."""
    return None if value is None else text(value, name, limit=MAX_TITLE_BYTES)


def directory(value: Any, name: str = "directory") -> str:
    """Return a path, which may be empty."""
    return text(value, name, limit=MAX_DIRECTORY_BYTES)


def reason(value: Any, name: str = "reason") -> str | None:
    """Return the reason for the end of a run, an interrupt or a decision, or ``None``."""
    return None if value is None else text(value, name, limit=MAX_REASON_BYTES)


def failure_reason(value: Any, name: str = "failure_reason") -> str | None:
    """Return a failure reason in the form in which it is stored, or ``None``.

    A failure must always be recorded, so a long reason is cut, and characters that a text column cannot hold
    are replaced.
    """
    if value is None:
        return None
    if type(value) is not str:
        raise InvalidPayload(path=name, reason=f"expected str, got {type(value).__name__}")
    kept = _NOT_QUERYABLE.sub("\N{REPLACEMENT CHARACTER}", value[: MAX_REASON_BYTES + 1])
    return shortened(kept, limit=MAX_REASON_BYTES)


def shortened(value: str, *, limit: int) -> str:
    """Return a string of at most ``limit`` bytes: the start of a longer one, with a mark at its end."""
    if size_of(value) <= limit:
        return value
    return value.encode()[: limit - len(_CUT.encode())].decode(errors="ignore") + _CUT


def tags(value: Any, name: str = "tags") -> list[str]:
    """Return the tags as a new list."""
    if type(value) not in (list, tuple):
        raise InvalidPayload(path=name, reason=f"expected a list of str, got {type(value).__name__}")
    checked = [text(tag, join_path(name, index), limit=MAX_TAGS_BYTES) for index, tag in enumerate(value)]
    if checked:
        _check_size(size_of(write_json(checked)), MAX_TAGS_BYTES, name)
    return checked


def metadata(value: Any, name: str = "metadata") -> dict[str, str]:
    """Return the metadata as a new dict. The key that a branch adds does not count towards the limit."""
    if type(value) is not dict:
        raise InvalidPayload(path=name, reason=f"expected a dict of str to str, got {type(value).__name__}")
    checked = {
        text(key, name, limit=MAX_METADATA_BYTES): text(item, join_path(name, key), limit=MAX_METADATA_BYTES)
        for key, item in value.items()
    }
    if checked:
        counted = {key: item for key, item in checked.items() if key != BRANCHED_FROM}
        _check_size(size_of(write_json(counted)), MAX_METADATA_BYTES, name)
    return checked


def instance(value: T, cls: type, name: str) -> T:
    """Return a value that must be an instance of a class. Raises `InvalidPayload`."""
    if not isinstance(value, cls):
        raise InvalidPayload(path=name, reason=f"expected {cls.__name__}, got {type(value).__name__}")
    return value


def flag(value: Any, name: str) -> bool:
    """Return ``True`` or ``False``; no other value is asked whether it is true. Raises `InvalidPayload`."""
    checked: bool = instance(value, bool, name)
    return checked


def items(values: Iterable[T], name: str) -> list[T]:
    """Return the values of a collection as a list, with at most as many values as one call may have.

    Raises `InvalidPayload` for a string or a dict, and `LimitExceeded`.
    """
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise InvalidPayload(path=name, reason=f"expected a collection, got {type(values).__name__}")
    taken = list(islice(values, MAX_CALL_ITEMS + 1))
    if len(taken) > MAX_CALL_ITEMS:
        raise LimitExceeded(name=f"items in {name}", limit=MAX_CALL_ITEMS, actual=len(taken))
    return taken


def _check_size(actual: int, limit: int, name: str) -> None:
    if actual > limit:
        raise LimitExceeded(name=f"{name} bytes", limit=limit, actual=actual)


# --- Numbers and times ----------------------------------------------------------------------------


def whole_number(value: Any, name: str, *, minimum: int = 0, maximum: int = MAX_BIGINT) -> int:
    """Return an ``int`` within bounds; ``bool`` and ``float`` are refused."""
    if type(value) is not int:
        raise InvalidPayload(path=name, reason=f"expected a whole number, got {type(value).__name__}")
    if not minimum <= value <= maximum:
        raise InvalidPayload(path=name, reason=f"expected a whole number from {minimum} to {maximum}")
    return value


def next_number(value: int, name: str) -> int:
    """Return a stored counter plus one. Raises `LimitExceeded` if no column could hold it."""
    if value >= MAX_BIGINT:
        raise LimitExceeded(name=name, limit=MAX_BIGINT, actual=value + 1)
    return value + 1


def epoch_milliseconds(value: Any, name: str) -> int:
    """Return epoch milliseconds up to the year 9999, from a number or an aware datetime. A number that looks
    like seconds is refused.
    """
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise InvalidPayload(path=name, reason="a time needs a time zone")
        return whole_number(datetime_to_milliseconds(value), name, maximum=MAX_EPOCH_MILLISECONDS)
    whole_number(value, name, maximum=MAX_EPOCH_MILLISECONDS)
    if 10**8 <= value < 10**11:
        raise InvalidPayload(path=name, reason="it looks like epoch seconds; expected milliseconds")
    return int(value)


def milliseconds(value: Any, name: str, *, minimum: int = 0, maximum: int = MAX_BIGINT) -> int:
    """Return a duration in milliseconds, from a number or a timedelta, whose microseconds are dropped."""
    if isinstance(value, timedelta):
        value //= _MILLISECOND
    return whole_number(value, name, minimum=minimum, maximum=maximum)


def milliseconds_to_datetime(milliseconds: int) -> datetime:
    """Return the aware UTC datetime of epoch milliseconds, exactly."""
    return _EPOCH + timedelta(milliseconds=milliseconds)


def datetime_to_milliseconds(time: datetime) -> int:
    """Return the epoch milliseconds of an aware datetime; fractions of a millisecond are dropped."""
    return (time - _EPOCH) // _MILLISECOND


def aware_datetime(value: Any, name: str) -> datetime:
    """Return the time in a filter: an aware datetime or epoch milliseconds."""
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise InvalidQuery(f"{name} needs a time zone.", path=name)
        try:
            return value.astimezone(UTC)
        except OverflowError as exc:
            raise InvalidQuery(f"{name} is outside the years 1 to 9999 in UTC.", path=name) from exc
    try:
        return milliseconds_to_datetime(epoch_milliseconds(value, name))
    except InvalidPayload as exc:
        raise InvalidQuery(
            f"{name} is neither an aware datetime nor epoch milliseconds: {exc.reason}.", path=name
        ) from exc


def is_age(value: timedelta) -> bool:
    """Return whether a duration is an age: from 0 to a hundred years."""
    return timedelta() <= value <= _LONGEST_AGE


# --- Enumerations ---------------------------------------------------------------------------------


@functools.cache
def _members(cls: type[Enum]) -> dict[Any, Enum]:
    """Return the members by value; comparing each member's value takes ten times as long."""
    return {member.value: member for member in cls}


def enum(cls: type[E], value: Any, name: str) -> E:
    """Return a member of `cls`, from itself or its value."""
    if type(value) is cls:
        return value
    if type(value) is str and value in _members(cls):
        return cast(E, _members(cls)[value])
    allowed = ", ".join(map(str, _members(cls)))
    raise InvalidPayload(path=name, reason=f"expected one of {allowed}")


def statuses(expected: Any, name: str) -> frozenset[SessionStatus]:
    """Return a collection of session statuses; a single status outside a collection is refused."""
    if not isinstance(expected, Collection) or isinstance(expected, str | bytes | Mapping):
        reason = f"expected a collection of statuses, got {type(expected).__name__}"
        raise InvalidPayload(path=name, reason=reason)
    return frozenset(enum(SessionStatus, status, name) for status in items(expected, name))


# --- Records --------------------------------------------------------------------------------------

Rule = Callable[[Any, str], Any]
"""A function of a value and its name that returns the accepted value."""


def fields(record: object, rules: Mapping[str, Rule], path: str = "") -> dict[str, Any]:
    """Return the attributes of a record, by name, each checked by its rule.

    ``path`` is the prefix of their names.
    """
    return {name: rule(getattr(record, name), path + name) for name, rule in rules.items()}


def arguments(rules: Mapping[str, Rule], **values: Any) -> None:
    """Check each argument by the rule for its name."""
    for name, value in values.items():
        rules[name](value, name)


def optional(rule: Rule, default: Any = None) -> Rule:
    """Return a rule that also accepts ``None``, for which it returns the ``default``."""
    return lambda value, name: default if value is None else rule(value, name)


def record(cls: type[Serializable], rules: Mapping[str, Rule]) -> Rule:
    """Return a rule for an object of a class, or its dict; ``rules`` has a rule for each of its fields."""

    def checked(value: Any, name: str) -> Any:
        try:
            part = value if isinstance(value, cls) else cls.from_dict(value)
        except InvalidPayload as exc:
            raise InvalidPayload(path=name + exc.path, reason=exc.reason) from exc
        return cls(**fields(part, rules, f"{name}/"))

    return checked


def enum_text(cls: type[Enum]) -> Rule:
    """Return a member of `cls`, from itself or its value, as a string."""
    return lambda value, name: enum(cls, value, name).value


# --- Pages ----------------------------------------------------------------------------------------


def some_of(given: Any, known: tuple[T, ...], name: str) -> tuple[T, ...]:
    """Check for a collection of known words, and return them in the order of ``known``."""
    try:
        chosen = set(given)
    except TypeError:
        chosen = {None}
    if isinstance(given, str) or not chosen <= set(known):
        raise InvalidQuery(f"{name} must be one or more of {', '.join(map(str, known))}.", path=name)
    return tuple(each for each in known if each in chosen)


def query_number(value: Any, name: str, *, minimum: int = 0, maximum: int = MAX_BIGINT) -> int:
    """Return a whole number that selects rows; ``bool`` and ``float`` are refused. Raises `InvalidQuery`."""
    if type(value) is not int or not minimum <= value <= maximum:
        raise InvalidQuery(f"{name} must be a whole number from {minimum} to {maximum}.", path=name)
    return value


def query_enum(cls: type[E], value: Any, name: str) -> E:
    """Return a member of `cls` that selects rows. Raises `InvalidQuery`."""
    try:
        return enum(cls, value, name)
    except InvalidPayload as exc:
        raise InvalidQuery(f"{name}: {exc.reason}.", path=name) from exc


def query_flag(value: Any, name: str) -> bool:
    """Return ``True`` or ``False``; no other value is asked whether it is true. Raises `InvalidQuery`."""
    if type(value) is not bool:
        raise InvalidQuery(f"{name} must be True or False.", path=name)
    return value


def progress_function(value: Any, name: str = "progress") -> None:
    """Check for a function or ``None``, before any work is done. Raises `InvalidQuery`."""
    if value is not None and not callable(value):
        raise InvalidQuery(f"{name} must be None or a function.", path=name)


def page_limit(limit: Any, *, maximum: int = 200, name: str = "limit") -> int:
    """Return the number of rows of a page, at most `maximum`."""
    return min(query_number(limit, name, minimum=1), maximum)


def page_offset(offset: Any) -> int:
    """Return the number of rows to skip."""
    return query_number(offset, "offset")


# --- Messages -------------------------------------------------------------------------------------


def messages(values: Any) -> list[str]:
    """Return the roles of messages, which are dicts with a ``role``; the payload gate checks the rest."""
    if type(values) not in (list, tuple):
        raise InvalidPayload(path="/messages", reason="expected a list of messages")
    return [_role(value, f"messages/{index}") for index, value in enumerate(items(values, "messages"))]


def _role(value: Any, path: str) -> str:
    if type(value) is not dict:
        raise InvalidPayload(path=path, reason=f"expected a dict, got {type(value).__name__}")
    if "role" not in value:
        raise InvalidPayload(path=path, reason="a message needs a role")
    return identifier(value["role"], f"{path}/role")


@dataclass(frozen=True, slots=True)
class Guard:
    """The conditions of a write; a condition that is ``None`` is not checked."""

    expected_version: int | None = None
    fencing_token: int | None = None

    def check_version(self, current_version: int) -> None:
        """Raise `StaleStateError` if the version differs. The session must be locked."""
        if self.expected_version is not None and self.expected_version != current_version:
            raise StaleStateError(self.expected_version, current_version)

    def check_fence(self, newest_token: int | None) -> None:
        """Raise `FencedOutError` if the lock has a newer token; ``None`` means that no such lock exists."""
        if self.fencing_token is not None and newest_token is not None and self.fencing_token < newest_token:
            raise FencedOutError(self.fencing_token, newest_token)


def guard(expected_version: int | None = None, fencing_token: int | None = None) -> Guard:
    """Return the `Guard` for a caller's arguments. Raises `InvalidPayload`."""
    if expected_version is not None:
        whole_number(expected_version, "expected_version")
    if fencing_token is not None:
        whole_number(fencing_token, "fencing_token")
    return Guard(expected_version, fencing_token)
