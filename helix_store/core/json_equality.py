"""Equality of JSON values, which is not Python's: there ``True == 1``."""

from __future__ import annotations

from typing import Any

__all__ = ["json_equal"]


def json_equal(left: Any, right: Any) -> bool:
    """Compare two JSON values: a bool is not a number, 1 equals 1.0, the order of members does not count.

    Takes no longer than reading ``left``, and nesting does not matter. Values of other types are unequal.
    """
    pending = [(left, right)]
    while pending:
        one, other = pending.pop()
        kind = type(one)
        if kind is dict:
            if type(other) is not dict or one.keys() != other.keys():
                return False
            pending.extend((item, other[key]) for key, item in one.items())
        elif kind is list:
            if type(other) is not list or len(one) != len(other):
                return False
            pending.extend(zip(one, other, strict=True))
        elif kind is int or kind is float:
            if type(other) not in (int, float) or one != other:
                return False
        elif type(other) is not kind or one != other:
            return False
    return True
