"""Values that every back end must keep exactly or refuse, for tests by example and by property."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

from hypothesis import strategies as st

from helix_store.core.limits import MAX_DEPTH, MAX_INT_DIGITS
from helix_store.exceptions import (
    HelixStoreError,
    InvalidPayload,
    LimitExceeded,
)

HIGH, LOW = "\ud83d", "\ude00"
"""Two surrogates: lone they stand for nothing, merged they would be one astral character."""


def exact_form(value: Any) -> str:
    """A text that is equal only for the same values, types and key order.

    ``repr`` tells apart ``1``, ``1.0`` and ``True``, ``0.0`` and ``-0.0``, and a pair of surrogates from the
    character they would merge into; ``==`` does none of it.
    """
    return repr(value)


def nested(depth: int) -> dict[str, Any]:
    """A dict of exactly this depth: lists inside one dict."""
    value: list[Any] = []
    for _ in range(depth - 2):
        value = [value]
    return {"nested": value}


def doubling(levels: int, text: str = "lol" * 30_000) -> dict[str, Any]:
    """A small graph of shared lists that stands for ``2 ** levels`` texts; long ones reach a limit soon."""
    value: Any = text
    for _ in range(levels):
        value = [value, value]
    return {"laughs": value}


def _cyclic_dict() -> dict[str, Any]:
    value: dict[str, Any] = {"inner": {}}
    value["inner"]["outer"] = value
    return value


def _cyclic_list() -> dict[str, Any]:
    value: list[Any] = []
    value += [value, value]
    return {"list": value}


# --- By example -----------------------------------------------------------------------------------

_SHARED = ["shared", {"by": "two"}]

HOSTILE_DOCUMENTS: list[dict[str, Any]] = [
    {},
    {"": "", " ": " ", "empty": [{}, [], "", None]},
    {"nul\x00key": "nul\x00value", "\x00": "\x00"},
    {"control": "\x01\x1f\x7f\x80\x9f", "newlines": "\n\r\u2028\u2029"},
    {"lone": HIGH, "reversed": LOW + HIGH, HIGH: "key", "cut off": "caf\u00e9 " + HIGH},
    {"adjacent": HIGH + LOW, "astral": "\U0001f600", "both": HIGH + LOW + "\U0001f600"},
    {HIGH + LOW: 1, "\U0001f600": 2, "~": "\u00ff\u0100" + LOW},
    {
        "escape": "\\u0000",
        "twice": "\\\\u0000",
        "pair": "\\ud83d\\ude00",
        HIGH: "\\" + HIGH,
        "\\": LOW + "\\",
    },
    {"~": "~", "marked": '~{"a":1}', "~\ud800\udc00": "~"},
    {"zero": 0, "minus zero": -0.0, "plus zero": 0.0, "one": 1, "one point": 1.0, "true": True},
    {"floats": [1e16, 1e22, 1e23, 1.797e308, -1.797e308, 5e-324, 0.1, 1e-7, 123456789012345680.0]},
    {"integers": [2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**40, -(10**40)]},
    {"longest": 10**MAX_INT_DIGITS - 1, "negative": -(10**MAX_INT_DIGITS) + 1},
    {"__proto__": {"polluted": True}, "constructor": {"prototype": 1}, "__class__": "x", "prototype": None},
    {"lc": 1, "type": "constructor", "id": ["os", "system"], "kwargs": {"command": "true"}},
    {"__type": "datetime", "__type__": "set", "value": "2026-01-01", "$ref": "#/a", "py/object": "os.system"},
    {"z": 1, "a": 2, "m": {"2": 1, "10": 2, "1": 3}},
    {"rtl": "\u202egnp.exe", "bidi": "\u2066x\u2069", "bom": "\ufeffx", "nonchar": "\uffff\U0010ffff"},
    {"combining": "e\u0301", "composed": "\u00e9"},
    {
        "sql": "'; DROP TABLE session; --",
        "percent": "%s %(a)s %%",
        "brace": "{} {0} ${x}",
        "html": "<script>",
    },
    {"csv": "=cmd()", "path": "../../etc/passwd", "null text": "null", "NaN text": "NaN"},
    {"k" * 3000: "v" * 3000},
    {"first": _SHARED, "second": _SHARED},
    nested(MAX_DEPTH),
]
"""Objects that come back with value, type and key order. Fit for ``custom_state``; a message needs a role."""


class Colour(StrEnum):
    RED = "red"


class SafeText(str):
    __slots__ = ()


class Number(int):
    pass


@dataclass
class Point:
    x: int = 1


REFUSED_DOCUMENTS: list[tuple[dict[Any, Any], type[HelixStoreError]]] = [
    ({"value": float("nan")}, InvalidPayload),
    ({"value": [1.5, float("inf")]}, InvalidPayload),
    ({"value": {"deep": float("-inf")}}, InvalidPayload),
    ({"value": (1, 2)}, InvalidPayload),
    ({"value": {1, 2}}, InvalidPayload),
    ({"value": frozenset()}, InvalidPayload),
    ({"value": b"bytes"}, InvalidPayload),
    ({"value": bytearray()}, InvalidPayload),
    ({"value": datetime(2026, 1, 1, tzinfo=UTC)}, InvalidPayload),
    ({"value": Decimal("1.5")}, InvalidPayload),
    ({"value": 1 + 2j}, InvalidPayload),
    ({"value": Point()}, InvalidPayload),
    ({"value": Point}, InvalidPayload),
    ({"value": object()}, InvalidPayload),
    ({"value": Colour.RED}, InvalidPayload),
    ({"value": SafeText("x")}, InvalidPayload),
    ({"value": Number(1)}, InvalidPayload),
    ({"value": OrderedDict(a=1)}, InvalidPayload),
    ({"value": iter(())}, InvalidPayload),
    ({1: "one", "1": "text"}, InvalidPayload),
    ({"value": {None: 1}}, InvalidPayload),
    ({"value": {True: 1}}, InvalidPayload),
    ({"value": {("a",): 1}}, InvalidPayload),
    ({"value": {Colour.RED: 1}}, InvalidPayload),
    ({"value": {SafeText("x"): 1}}, InvalidPayload),
    (_cyclic_dict(), InvalidPayload),
    (_cyclic_list(), InvalidPayload),
    ({"value": 10**MAX_INT_DIGITS}, LimitExceeded),
    ({"value": [-(10**MAX_INT_DIGITS)]}, LimitExceeded),
    ({"value": 10**5000}, LimitExceeded),
    (nested(MAX_DEPTH + 1), LimitExceeded),
    (nested(20_000), LimitExceeded),
    (doubling(100), LimitExceeded),
]
"""Objects that are refused before anything is written, each with the error that says so."""


# --- By property ----------------------------------------------------------------------------------


def texts(max_size: int = 20) -> st.SearchStrategy[str]:
    """Any code points, with those that storage trips over made likely."""
    awkward = st.sampled_from(
        ["\x00", HIGH, LOW, "\\", '"', "~", "/", "\\u0000", "\x7f", "\x85", "\u2028", "%s"]
    )
    any_character = st.characters(exclude_categories=())
    return st.lists(any_character | awkward, max_size=max_size).map("".join)


def _scalars() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(min_value=-(10**60), max_value=10**60),
        st.floats(allow_nan=False, allow_infinity=False),
        texts(),
    )


def json_values(max_leaves: int = 20) -> st.SearchStrategy[Any]:
    """Anything that the payload gate accepts."""
    return st.recursive(
        _scalars(),
        lambda inner: st.lists(inner, max_size=6) | st.dictionaries(texts(10), inner, max_size=6),
        max_leaves=max_leaves,
    )


def json_objects(max_leaves: int = 20) -> st.SearchStrategy[dict[str, Any]]:
    """JSON objects, as for ``custom_state``."""
    return st.dictionaries(texts(10), json_values(max_leaves), max_size=6)


def messages(max_leaves: int = 10) -> st.SearchStrategy[dict[str, Any]]:
    """Messages: JSON objects with a role."""
    roles = st.sampled_from(["user", "assistant", "system", "tool"])
    return st.builds(lambda rest, role: {**rest, "role": role}, json_objects(max_leaves), roles)
