"""Finding the fault in a refused payload, and describing it without showing the value.

Only refused values are searched, so the code is written to be exact and bounded rather than fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any, Final

from helix_store.core.limits import MAX_BIGINT, MAX_INT_DIGITS
from helix_store.exceptions import InvalidPayload, LimitExceeded

TOO_LONG_INTEGER: Final = 10**MAX_INT_DIGITS

_CONTAINERS: Final = frozenset({dict, list})
_ACCEPTED: Final = _CONTAINERS | {str, int, float, bool, type(None)}
_LONGEST_SHOWN_KEY: Final = 80
_LONGEST_SHOWN_PATH: Final = 1_000


def refuse_faults(value: Any, path: str) -> None:
    """Raise for the first fault in document order; return if the value has none.

    Each container is read once, so cycles and shared references do not take extra time.
    """
    pending: list[Iterator[tuple[str | int, Any]]] = [enumerate([value])]
    keys: list[str | int] = []
    around: dict[int, None] = {}
    seen: set[int] = set()
    while pending:
        for key, item in pending[-1]:
            reason = _reason_against(item)
            if id(item) in around:
                reason = "it contains itself"
            if reason is not None:
                raise InvalidPayload(path=_pointer(path, [*keys, key]), reason=reason)
            if type(item) not in _CONTAINERS or id(item) in seen:
                continue
            seen.add(id(item))
            around[id(item)] = None
            keys.append(key)
            pending.append(iter(item.items()) if type(item) is dict else enumerate(item))
            break
        else:
            pending.pop()
            if keys:
                keys.pop()
                around.popitem()


def join_path(path: str, key: object) -> str:
    """Return `path` with one more JSON pointer segment (RFC 6901), cut and made printable."""
    return f"{path}/{shown_key(key).replace('~', '~0').replace('/', '~1')}"


def shown_key(key: object) -> str:
    """Return a key or an index as short, printable text, or the name of the type of any other object."""
    if type(key) is int and abs(key) <= MAX_BIGINT:
        return str(key)
    if type(key) is not str:
        return type(key).__name__
    shown = key if len(key) <= _LONGEST_SHOWN_KEY else key[: _LONGEST_SHOWN_KEY - 1] + "…"
    if not shown.isprintable():
        shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in shown)
    return shown


def least_digits(integer: int) -> int:
    """Return a lower bound of the number of decimal digits, because counting them takes quadratic time."""
    return integer.bit_length() * 30102 // 100_000


def _reason_against(item: Any) -> str | None:
    """Return the reason why a value cannot be stored. Only the keys of a container are checked."""
    kind = type(item)
    if kind is dict:
        odd_kinds = (type(key) for key in item if type(key) is not str)
        return next((f"keys must be str, not {odd.__name__}" for odd in odd_kinds), None)
    if kind is float and not isfinite(item):
        return "NaN and infinity are not JSON"
    if kind is int and abs(item) >= TOO_LONG_INTEGER:
        actual = max(MAX_INT_DIGITS + 1, least_digits(item))
        raise LimitExceeded(name="integer digits", limit=MAX_INT_DIGITS, actual=actual)
    return None if kind in _ACCEPTED else f"{kind.__name__} is not a plain JSON type"


def _pointer(path: str, keys: Sequence[str | int]) -> str:
    # The first key is the index in the list that wraps the value.
    for key in keys[1:]:
        if len(path) > _LONGEST_SHOWN_PATH:
            return path + "/…"
        path = join_path(path, key)
    return path
