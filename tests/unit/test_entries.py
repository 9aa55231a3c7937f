"""Entries of payloads, and writing a payload when those of an earlier one are known."""

from __future__ import annotations

import json
import marshal
import math
from collections import OrderedDict
from enum import IntEnum, StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helix_store.core.limits import MAX_DEPTH, Limits
from helix_store.core.payloads import (
    decode,
    encode,
    is_plain_json,
)
from helix_store.exceptions import InvalidPayload, LimitExceeded
from helix_store.sessions.state import Entries, Entry, encode_changed, encode_reusing, split
from tests.cells import for_each
from tests.strategies import HIGH, HOSTILE_DOCUMENTS, LOW, doubling, json_objects, nested

LIMIT = Limits().max_state_bytes


def entries(document: dict[str, Any]) -> dict[str, Entry]:
    found = split(encode(document))
    assert found is not None
    return found


def encoded_reusing(earlier: Entries, document: dict[str, Any], *, limit: int = LIMIT) -> str:
    """The text; what is said to be its entries is checked."""
    text, found = encode_reusing(earlier, document, limit=limit, path="/custom_state")
    if found is None:
        assert "~" in text[0] or "\\ud" in text, "only surrogates are stored otherwise than they are written"
    else:
        assert found == split(text)
        assert list(found) == list(document)
    return text


# --- Entries of a text ----------------------------------------------------------------------------


def test_entries_are_in_order_under_their_keys() -> None:
    found = split('{"b":1,"a\\"":[2,{"b":3}],"":"\\\\"}')
    assert found is not None
    assert [(key, entry.key, entry.text) for key, entry in found.items()] == [
        ("b", '"b"', '"b":1,'),
        ('a"', '"a\\""', '"a\\"":[2,{"b":3}],'),
        ("", '""', '"":"\\\\",'),
    ]


def test_an_empty_object_has_no_entries() -> None:
    assert split("{}") == {}


@given(json_objects())
def test_the_entries_make_up_the_whole_text(document: dict[str, Any]) -> None:
    stored = encode(document)
    found = split(stored)
    assert (found is None) is not is_plain_json(stored)
    if found is not None:
        assert "{" + "".join(entry.text for entry in found.values())[:-1] + "}" == stored
        assert list(found) == [json.loads(entry.key) for entry in found.values()] == list(decode(stored))


@for_each(
    "text",
    [
        "",
        "null",
        "[]",
        '"{}"',
        "{",
        "}",
        "{ }",
        "{,}",
        '{"a":1',
        '"a":1}',
        '{"a"}',
        '{"a":}',
        '{"a":1,}',
        '{,"a":1}',
        '{"a":1,,"b":2}',
        '{"a":1}}',
        '{"a":1}{"b":2}',
        '{"a": 1}',
        '{"a" :1}',
        '{"a":1 }',
        '{"a":1, "b":2}',
        '{"a":1]',
        '["a":1}',
        '{"a"=1}',
        '{"a":1;"b":2}',
        "{1:2}",
        "{a:2}",
        '{"a":tru}',
        '{"a":"}',
        '{"a',
        '{"a}',
        '~{"a":1}',
        '{"a":' + "[" * 100_000 + "}",
        '{"a":' + "[" * 5_000 + "]" * 5_000 + "}",
        '{"a":' + "9" * 5_000 + "}",
    ],
    ids=lambda text: text[:20],
)
def test_any_other_text_has_no_entries(text: str) -> None:
    assert split(text) is None


def test_a_text_with_adjacent_surrogates_has_no_entries() -> None:
    assert split(encode({"pair": HIGH + LOW})) is None
    assert split(encode({"key" + HIGH + LOW: 1})) is None
    assert split(encode({"apart": [HIGH, LOW], HIGH: LOW})) is not None


# --- Writing like an earlier payload --------------------------------------------------------------


@given(json_objects(), json_objects())
def test_the_text_is_the_same_whatever_is_known(earlier: dict[str, Any], document: dict[str, Any]) -> None:
    document = {**earlier, **document}
    stored = encode(document)
    assert encoded_reusing(split(encode(earlier)) or {}, document) == stored
    assert encoded_reusing(split(stored) or {}, document) == stored
    assert encoded_reusing({}, document) == stored


@for_each("document", HOSTILE_DOCUMENTS, ids=range(len(HOSTILE_DOCUMENTS)))
def test_hostile_documents_are_written_as_ever(document: dict[str, Any]) -> None:
    stored = encode(document)
    assert encoded_reusing({}, document) == stored
    assert encoded_reusing(split(stored) or {}, document) == stored


def test_unchanged_entries_are_shared_wherever_they_are() -> None:
    earlier = entries({"a": [1], "b": [2], "c": [3], "d": {"x": "y"}})
    _, found = encode_reusing(earlier, {"b": [2], "a": [0], "d": {"x": "y"}}, limit=LIMIT, path="")
    assert found is not None
    assert list(found) == ["b", "a", "d"]
    assert found["b"] is earlier["b"]
    assert found["d"] is earlier["d"]
    assert found["a"] == Entry('"a"', '"a":[0],', entries({"a": [0]})["a"].content)


@for_each(
    ("before", "after"),
    [
        (1, 1.0),
        (1, True),
        (0, False),
        (0.0, -0.0),
        (1e16, 10**16),
        (2**63, float(2**63)),
        ("1", 1),
        ("", None),
        ([], {}),
        ([0.0], [-0.0]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, {"a": True}),
        ({"a": "b,c"}, {"a": "b", "c": ""}),
        (["a", "b"], ["a,b"]),
        ("é", "e\u0301"),
        (HIGH, LOW),
    ],
    ids=repr,
)
def test_values_that_only_look_alike_are_told_apart(before: Any, after: Any) -> None:
    for old, new in ((before, after), (after, before)):
        document = {"kept": "x", "a": new}
        assert encoded_reusing(entries({"kept": "x", "a": old}), document) == encode(document)


class Number(IntEnum):
    ONE = 1


class Word(StrEnum):
    ONE = "one"


class Text(str):
    __slots__ = ()


@for_each(
    ("known", "given"),
    [
        (1, Number.ONE),
        ("one", Word.ONE),
        ("one", Text("one")),
        ([1, 2], (1, 2)),
        ({"a": 1}, OrderedDict(a=1)),
        (None, b""),
        ([], set()),
        ({"1": 2}, {1: 2}),
        (1.5, math.nan),
        (1.5, math.inf),
    ],
    ids=repr,
)
def test_what_cannot_be_stored_is_refused_also_where_something_like_it_is_known(
    known: Any, given: Any
) -> None:
    document = {"kept": "x", "a": [given]}
    with pytest.raises(InvalidPayload) as expected:
        encode(document, path="/custom_state")
    with pytest.raises(InvalidPayload) as raised:
        encoded_reusing(entries({"kept": "x", "a": [known]}), document)
    assert (raised.value.path, raised.value.reason) == (expected.value.path, expected.value.reason)
    assert raised.value.__context__ is None


@for_each(
    "document",
    [{Text("kept"): "x"}, {"kept": Text("x")}, {"list": marshal.dumps([1], 2)}],
    ids=["a key like a known one", "a text like a known one", "the bytes that stand for a known list"],
)
def test_only_a_plain_value_of_the_same_type_is_taken_as_known(document: dict[str, Any]) -> None:
    with pytest.raises(InvalidPayload):
        encoded_reusing(entries({"kept": "x", "list": [1]}), document)


def test_the_limit_counts_entries_that_are_known_too() -> None:
    document = {"kept": "x" * 100, "a": 1}
    earlier, size = entries(document), len(encode(document))
    assert encoded_reusing(earlier, document, limit=size) == encode(document)
    with pytest.raises(LimitExceeded) as raised:
        encoded_reusing(earlier, document, limit=size - 1)
    assert (raised.value.limit, raised.value.actual) == (size - 1, size)


def test_a_small_graph_that_would_be_a_huge_text_is_refused_before_it_is_made() -> None:
    huge = doubling(60)
    with pytest.raises(LimitExceeded):
        encoded_reusing(entries({key: [] for key in huge}), huge)


# --- Writing what has just been written, with changes ---------------------------------------------


def encoded_again(before: dict[str, Any], after: dict[str, Any], *, limit: int = LIMIT) -> str:
    """The text; what is said to be its entries is checked."""
    _, written = encode_reusing({}, before, limit=LIMIT, path="/custom_state")
    text, found = encode_changed(written or {}, before, after, limit=limit, path="/custom_state")
    assert found is None or found == split(text)
    assert found is None or list(found) == list(after)
    return text


@given(json_objects(), json_objects(), st.sets(st.integers(0, 5)), st.booleans())
def test_the_text_is_the_same_however_much_is_shared(
    before: dict[str, Any], changes: dict[str, Any], gone: set[int], is_reversed: bool
) -> None:
    if encode_reusing({}, before, limit=LIMIT, path="")[1] is None:
        before = {}
    kept = [key for index, key in enumerate(before) if index not in gone]
    after = {key: before[key] for key in (reversed(kept) if is_reversed else kept)} | changes
    assert encoded_again(before, after) == encode(after)
    assert encoded_again(before, before) == encode(before)


def test_shared_values_are_not_written_again_and_equal_ones_are_found() -> None:
    before = {"a": [1], "b": {"x": 1}, "c": 1}
    _, written = encode_reusing({}, before, limit=LIMIT, path="")
    assert written is not None
    after = {"b": before["b"], "a": [1], "c": True}
    _, found = encode_changed(written, before, after, limit=LIMIT, path="")
    assert found is not None
    assert found["b"] is written["b"]
    assert found["a"] is written["a"]
    assert found["c"].text == '"c":true,'


@pytest.mark.parametrize(
    "value", [(1,), {1: 2}, math.nan, object()], ids=["a tuple", "a number as a key", "nan", "an object"]
)
def test_a_change_that_cannot_be_stored_is_refused_with_its_path(value: Any) -> None:
    before = {"kept": ["x"]}
    after = {**before, "a": [value]}
    with pytest.raises(InvalidPayload) as expected:
        encode(after, path="/custom_state")
    with pytest.raises(InvalidPayload) as raised:
        encoded_again(before, after)
    assert (raised.value.path, raised.value.reason) == (expected.value.path, expected.value.reason)


def test_the_limit_counts_what_is_shared() -> None:
    before = {"kept": "ü" * 100}
    after = {**before, "a": 1}
    size = len(encode(after).encode())
    assert encoded_again(before, after, limit=size) == encode(after)
    with pytest.raises(LimitExceeded) as raised:
        encoded_again(before, after, limit=size - 1)
    assert (raised.value.limit, raised.value.actual) == (size - 1, size)


def test_a_change_may_be_as_deep_as_a_member_may_be() -> None:
    before: dict[str, Any] = {"kept": 1}
    assert encoded_again(before, {**before, **nested(MAX_DEPTH)})
    with pytest.raises(LimitExceeded):
        encoded_again(before, {**before, **nested(MAX_DEPTH + 1)})
