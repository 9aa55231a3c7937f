"""Where a value is wrong, and how to say so without showing it.

Only a refused value comes here, so this is written to be exact and bounded, not fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import Any, Final

from helix_store.core.limits import MAX_INT_DIGITS
from helix_store.exceptions import InvalidPayload, LimitExceeded

__all__ = ["TOO_LONG_INTEGER", "join_path", "least_digits", "refuse_faults"]

TOO_LONG_INTEGER: Final = 10**MAX_INT_DIGITS

_CONTAINERS: Final = frozenset({dict, list})
_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_LONGEST_SHOWN_KEY: Final = 80
_LONGEST_SHOWN_PATH: Final = 1_000


def refuse_faults(value: Any, path: str) -> None:
    """Raise for the first thing, in document order, that no limit would allow; return if there is none.

    Each distinct container is read once, so cycles and shared references cost no more than their memory.
    """
    pending: list[Iterator[tuple[str | int, Any]]] = [enumerate([value])]
    keys: list[str | int] = []
    around: dict[int, None] = {}
    seen: set[int] = set()
    while pending:
        for key, item in pending[-1]:
            # The first key belongs to the list that was put around the value.
            where = [*keys, key][1:]
            if type(item) not in _CONTAINERS:
                _refuse_scalar(item, path, where)
                continue
            if id(item) in around:
                raise InvalidPayload(path=_pointer(path, where), reason="it contains itself")
            if id(item) in seen:
                continue
            if type(item) is dict:
                _refuse_keys(item, path, where)
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


def join_path(path: str, key: str | int) -> str:
    """`path` with one more JSON pointer segment (RFC 6901), cut and made printable."""
    shown = str(key)
    if len(shown) > _LONGEST_SHOWN_KEY:
        shown = shown[: _LONGEST_SHOWN_KEY - 1] + "…"
    if not shown.isprintable():
        shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in shown)
    return f"{path}/{shown.replace('~', '~0').replace('/', '~1')}"


def least_digits(integer: int) -> int:
    """A lower bound of the number of decimal digits; counting them takes quadratic time."""
    return integer.bit_length() * 30102 // 100_000


def _refuse_keys(keys: Iterable[Any], path: str, where: Sequence[str | int]) -> None:
    for key in keys:
        if type(key) is not str:
            reason = f"keys must be str, not {type(key).__name__}"
            raise InvalidPayload(path=_pointer(path, where), reason=reason)


def _refuse_scalar(item: Any, path: str, where: Sequence[str | int]) -> None:
    kind = type(item)
    if kind not in _SCALARS:
        raise InvalidPayload(path=_pointer(path, where), reason=f"{kind.__name__} is not a plain JSON type")
    if kind is float and not isfinite(item):
        raise InvalidPayload(path=_pointer(path, where), reason="NaN and infinity are not JSON")
    if kind is int and abs(item) >= TOO_LONG_INTEGER:
        actual = max(MAX_INT_DIGITS + 1, least_digits(item))
        raise LimitExceeded(name="integer digits", limit=MAX_INT_DIGITS, actual=actual)


def _pointer(path: str, where: Sequence[str | int]) -> str:
    for key in where:
        if len(path) > _LONGEST_SHOWN_PATH:
            return path + "/…"
        path = join_path(path, key)
    return path
