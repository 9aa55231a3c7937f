"""Conditions of a search: namespaces as text, and filters.

A dot follows each label of a namespace, so that no label is a prefix of another one. The database checks a
part of the filter, and this module checks all of it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from django.db.models import Q

from helix_store.core import validation
from helix_store.core.limits import MAX_NAMESPACE_BYTES
from helix_store.core.payloads import encode, is_plain_json
from helix_store.exceptions import HelixStoreError, InvalidQuery

_ANY_LABEL: Final = "*"
_MOST_BYTES: Final = 64 * 1024
# SQLite refuses a LIKE pattern that is longer than 50,000 bytes.
_LONGEST_PATTERN: Final = 1_000
# SQLite refuses an expression of more than 1,000 levels, and each field adds one.
_NARROWING_FIELDS: Final = 50

_ORDERS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
_EQUAL: Final = "$eq"
_OPERATORS: Final = frozenset({*_ORDERS, _EQUAL, "$ne"})
_NUMBERS: Final = (int, float)


def namespace_text(labels: Sequence[str], name: str = "namespace") -> str:
    """Return a namespace as text. Raises `InvalidPayload` or `LimitExceeded` if it cannot be stored."""
    return validation.text("".join(f"{label}." for label in labels), name, limit=MAX_NAMESPACE_BYTES)


def labels_of(text: str) -> tuple[str, ...]:
    return tuple(text[:-1].split("."))


def end_of(text: str) -> str:
    """Return the first text after all namespaces under this one; the character after the dot is a slash."""
    return f"{text[:-1]}/"


def is_under(text: str) -> Q:
    """Return the condition for a namespace and all namespaces under it: one range of the index."""
    return Q(namespace__gte=text, namespace__lt=end_of(text)) if text else Q()


def matches(match_type: str, path: Sequence[str]) -> Q:
    """Return the condition for namespaces that begin or end with a path, in which ``*`` is any one label."""
    labels = namespace_text(path, "path")
    if not labels:
        return Q()
    pattern = "".join(r"[^.]+\." if label == _ANY_LABEL else re.escape(f"{label}.") for label in path)
    if match_type == "suffix":
        return Q(namespace__regex=rf"(^|\.){pattern}$")
    if _ANY_LABEL not in path:
        return is_under(labels)
    first = path[: path.index(_ANY_LABEL)]
    return is_under(namespace_text(first)) & Q(namespace__regex=f"^{pattern}")


# --- Filters ---------------------------------------------------------------------------------------


def checked_filter(given: Any) -> dict[str, Any]:
    """Return a filter as a dict. Raises `InvalidQuery` for values other than JSON and unknown operators."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidQuery(f"filter must be a dict, not {type(given).__name__}.", path="filter")
    checked = dict(given)
    try:
        encode(checked, limit=_MOST_BYTES, name="bytes of filter", path="filter")
    except HelixStoreError as exc:
        raise InvalidQuery(str(exc), path="filter") from exc
    for value in checked.values():
        _check_operators(value)
    return checked


def narrowed(conditions: Mapping[str, Any]) -> Q:
    """Return conditions on the text of a value, which select a superset of the rows that `is_match` accepts.
    A field that equals a string can be written in only one way, unless the whole value has the other form of
    `core.payloads`, which begins with a tilde.
    """
    found = Q()
    for name, condition in islice(conditions.items(), _NARROWING_FIELDS):
        value = condition.get(_EQUAL) if isinstance(condition, dict) else condition
        if type(value) is not str:
            continue
        field = encode({name: value}, path="filter")
        if is_plain_json(field) and len(field) <= _LONGEST_PATTERN:
            found &= Q(value__contains=field[1:-1]) | Q(value__startswith="~")
    return found


def is_match(value: Mapping[str, Any], conditions: Mapping[str, Any]) -> bool:
    """Return whether each field meets its condition. A missing field counts as null."""
    return all(_meets(value.get(name), condition) for name, condition in conditions.items())


def _is_operators(condition: Any) -> bool:
    return isinstance(condition, dict) and any(name.startswith("$") for name in condition)


def _check_operators(condition: Any) -> None:
    if isinstance(condition, list):
        for inner in condition:
            _check_operators(inner)
    elif _is_operators(condition):
        for name in condition.keys() - _OPERATORS:
            known = ", ".join(sorted(_OPERATORS))
            raise InvalidQuery(f"filter has an unknown operator; use one of {known}.", path=f"filter/{name}")
    elif isinstance(condition, dict):
        for inner in condition.values():
            _check_operators(inner)


def _meets(value: Any, condition: Any) -> bool:
    if _is_operators(condition):
        return all(_compares(value, name, operand) for name, operand in condition.items())
    if isinstance(condition, dict):
        return isinstance(value, dict) and is_match(value, condition)
    if isinstance(condition, list):
        return isinstance(value, list) and len(value) == len(condition) and all(map(_meets, value, condition))
    return _is_equal(value, condition)


def _compares(value: Any, name: str, operand: Any) -> bool:
    if name == _EQUAL:
        return _is_equal(value, operand)
    if name == "$ne":
        return not _is_equal(value, operand)
    are_texts = isinstance(value, str) and isinstance(operand, str)
    return (are_texts or (_is_number(value) and _is_number(operand))) and _ORDERS[name](value, operand)


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS) and not isinstance(value, bool)


def _is_equal(value: Any, other: Any) -> bool:
    """Compare JSON values: ``1`` equals ``1.0``, but not ``true`` as in Python."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_is_equal(value[name], other[name]) for name in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_equal, value, other))
    return bool(value == other)
