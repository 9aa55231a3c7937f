"""Deltas: a full payload and what follows it stand for exactly the payload that was encoded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helix_store.core.limits import MAX_DEPTH, MAX_INT_DIGITS
from helix_store.core.payloads import decode_object, encode, is_plain_json
from helix_store.exceptions import IntegrityFault, LimitExceeded
from helix_store.sessions.deltas import apply_delta, decode_with_delta
from helix_store.sessions.state import MAX_DELTAS, Entry, delta_between, encode_changed, encode_reusing, split
from tests.cells import for_each
from tests.strategies import (
    HIGH,
    HOSTILE_DOCUMENTS,
    LOW,
    exact_form,
    json_objects,
    json_values,
    nested,
    texts,
)

BALLAST = {"ballast": "x" * 20_000}
"""Makes a full payload so long that any delta of the documents here is worth storing."""

NOTHING = '{"removed":[],"set":{}}'


def entries(document: dict[str, Any]) -> dict[str, Entry]:
    found = split(encode(document))
    assert found is not None
    return found


def delta(base: dict[str, Any], new: dict[str, Any]) -> str:
    made = delta_between(entries(base), entries(new))
    assert made is not None
    return made


def apply_deltas(full: str, deltas: Sequence[str]) -> str:
    """Apply each delta to what the ones before it stand for."""
    return reduce(apply_delta, deltas, full)


def decode_with_deltas(full: str, deltas: Sequence[str]) -> Any:
    if not deltas:
        return decode_object(full)
    return decode_with_delta(apply_deltas(full, deltas[:-1]), deltas[-1])


# --- One delta ------------------------------------------------------------------------------------


@for_each(
    ("base", "new", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 1, "b": 2}, NOTHING),
        ({"a": 1, "b": 2}, {"a": 3, "b": 2}, '{"removed":[],"set":{"a":3}}'),
        ({"a": 1, "b": 2}, {"b": 2}, '{"removed":["a"],"set":{}}'),
        ({"a": 1, "b": 2}, {"a": 1, "b": 2, "c": {}}, '{"removed":[],"set":{"c":{}}}'),
        ({"a": 1, "b": 2}, {"a": 0, "c": "d", "e": []}, '{"removed":["b"],"set":{"a":0,"c":"d","e":[]}}'),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, '{"removed":["a"],"set":{"a":1}}'),
        ({"a": 1, "b": 2}, {"a": 1, "c": 3, "b": 2}, '{"removed":["b"],"set":{"c":3,"b":2}}'),
        ({"a": 1, "b": 2}, {"c": 3, "b": 2}, '{"removed":["a","b"],"set":{"c":3,"b":2}}'),
        ({"a": 1, 'q"': 2}, {"a": 1}, '{"removed":["q\\""],"set":{}}'),
    ],
)
def test_a_delta_says_what_was_removed_and_what_is_set(
    base: dict[str, Any], new: dict[str, Any], expected: str
) -> None:
    made = delta({**BALLAST, **base}, {**BALLAST, **new})
    assert made == expected
    assert apply_deltas(encode({**BALLAST, **base}), [made]) == encode({**BALLAST, **new})


@for_each(
    ("before", "after"),
    [
        (1, 1.0),
        (1, True),
        (1.0, True),
        (0, False),
        (0.0, -0.0),
        (0, 0.0),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}),
        ([{"x": 1, "y": [0]}], [{"y": [0], "x": 1}]),
        ([1, [0]], [1, [False]]),
        ("\u00e9", "e\u0301"),
        (HIGH, "\\ud83d"),
        ("\U0001f600", HIGH),
        ("\x00", "\\u0000"),
        (2**63, float(2**63)),
        (None, "null"),
        ({}, []),
    ],
)
def test_what_only_looks_alike_is_a_change(before: Any, after: Any) -> None:
    for old, new in ((before, after), (after, before)):
        made = delta({**BALLAST, "a": old}, {**BALLAST, "a": new})
        assert made != NOTHING
        found = decode_with_deltas(encode({**BALLAST, "a": old}), [made])
        assert exact_form(found["a"]) == exact_form(new)


@for_each("document", HOSTILE_DOCUMENTS, ids=range(len(HOSTILE_DOCUMENTS)))
def test_hostile_documents_come_and_go(document: dict[str, Any]) -> None:
    stored = encode({**BALLAST, **document})
    if not is_plain_json(stored):
        assert split(stored) is None
        return
    come = delta(BALLAST, {**BALLAST, **document})
    gone = delta({**BALLAST, **document}, BALLAST)
    assert apply_deltas(encode(BALLAST), [come]) == stored
    assert apply_deltas(stored, [gone]) == encode(BALLAST)
    assert apply_deltas(encode(BALLAST), [come, gone, come]) == stored


def test_a_delta_is_worth_it_up_to_half_of_the_members() -> None:
    change = '{"removed":[],"set":{"a":2}}'
    size = 2 * len(change) - len('"b":"","a":1,')
    assert delta({"b": "x" * size, "a": 1}, {"b": "x" * size, "a": 2}) == change
    shorter = "x" * (size - 1)
    assert delta_between(entries({"b": shorter, "a": 1}), entries({"b": shorter, "a": 2})) is None


def test_small_and_empty_objects_are_better_stored_in_full() -> None:
    assert delta_between(entries({}), entries({})) is None
    assert delta_between(entries(BALLAST), entries({})) is None
    assert delta_between(entries({}), entries(BALLAST)) is None


def test_a_member_put_before_all_others_is_better_stored_in_full() -> None:
    assert delta_between(entries(BALLAST), entries({"first": 1, **BALLAST})) is None


# --- Chains ---------------------------------------------------------------------------------------

Edit = Callable[[dict[str, Any]], dict[str, Any]]


def _key_of(document: dict[str, Any], index: int) -> str:
    """Any key but the first: that is the ballast's, which would be a long change."""
    keys = list(document)[1:] or list(document)
    return keys[index % len(keys)]


def _other_spelling(value: Any) -> Any:
    """An equal value whose text differs, where there is one."""
    if type(value) is int and abs(value) < 2**53:
        return float(value) or -0.0
    if type(value) is float:
        return -value if value == 0 else value
    if type(value) is bool:
        return int(value)
    if type(value) is dict:
        return dict(reversed(value.items()))
    return value


def edits() -> st.SearchStrategy[Edit]:
    keys, values, indexes = texts(4), json_values(8), st.integers(0, 20)

    def setting(key: str, value: Any) -> Edit:
        return lambda document: {**document, key: value}

    def inserting(index: int, key: str, value: Any) -> Edit:
        def edit(document: dict[str, Any]) -> dict[str, Any]:
            items = [item for item in document.items() if item[0] != key]
            place = 1 + index % len(items)
            return dict([*items[:place], (key, value), *items[place:]])

        return edit

    def removing(index: int) -> Edit:
        def edit(document: dict[str, Any]) -> dict[str, Any]:
            gone = _key_of(document, index)
            return {key: value for key, value in document.items() if key != gone} or document

        return edit

    def replacing(index: int, value: Any) -> Edit:
        return lambda document: {**document, _key_of(document, index): value}

    def moving(index: int) -> Edit:
        def edit(document: dict[str, Any]) -> dict[str, Any]:
            moved = _key_of(document, index)
            return {**{key: value for key, value in document.items() if key != moved}, moved: document[moved]}

        return edit

    def respelling(index: int) -> Edit:
        def edit(document: dict[str, Any]) -> dict[str, Any]:
            key = _key_of(document, index)
            return {**document, key: _other_spelling(document[key])}

        return edit

    return st.one_of(
        st.builds(setting, keys, values),
        st.builds(inserting, indexes, keys, values),
        st.builds(removing, indexes),
        st.builds(replacing, indexes, values),
        st.builds(moving, indexes),
        st.builds(respelling, indexes),
    )


@pytest.mark.thorough
@given(json_objects(), st.lists(st.lists(edits(), max_size=3), min_size=8, max_size=MAX_DELTAS))
def test_any_chain_of_deltas_stands_for_exactly_the_last_payload(
    document: dict[str, Any], steps: list[list[Edit]]
) -> None:
    document = {**BALLAST, **document}
    full = encode(document)
    base = split(full)
    deltas: list[str] = []
    for step in steps:
        for edit in step:
            document = edit(document)
        stored = encode(document)
        _, new = encode_reusing(base or {}, document, limit=len(stored.encode()), path="")
        made = None if base is None or new is None else delta_between(base, new)
        if made is None:
            full, deltas = stored, []
        else:
            assert json.loads(made).keys() == {"removed", "set"}
            assert "\x00" not in made
            assert made.encode("utf-8").decode("utf-8") == made
            deltas.append(made)
        assert apply_deltas(full, deltas) == stored
        assert exact_form(decode_with_deltas(full, deltas)) == exact_form(document)
        base = new


def test_as_many_deltas_as_may_follow_apply_in_their_order() -> None:
    documents = [
        {**BALLAST, "n": number, f"key {number}": [number], "steady": {"a": 1}}
        for number in range(MAX_DELTAS + 1)
    ]
    deltas = [delta(base, new) for base, new in pairwise(documents)]
    assert len(deltas) == 20
    for count, document in enumerate(documents):
        assert apply_deltas(encode(documents[0]), deltas[:count]) == encode(document)
        assert exact_form(decode_with_deltas(encode(documents[0]), deltas[:count])) == exact_form(document)


def test_the_deepest_payload_has_deltas() -> None:
    deepest = {**BALLAST, **nested(MAX_DEPTH)}
    assert apply_deltas(encode(BALLAST), [delta(BALLAST, deepest)]) == encode(deepest)


# --- Damage ---------------------------------------------------------------------------------------

READERS = pytest.mark.parametrize("read", [apply_deltas, decode_with_deltas])


@READERS
@for_each(
    "damaged",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"removed":[]}',
        '{"set":{}}',
        '{"removed":[],"set":{},"more":1}',
        '{"removed":{},"set":{}}',
        '{"removed":"a","set":{}}',
        '{"removed":null,"set":{}}',
        '{"removed":[],"set":[]}',
        '{"removed":[],"set":null}',
        '{"removed":["missing"],"set":{}}',
        '{"removed":["missing"],"set":{"missing":1}}',
        '{"removed":["a","a"],"set":{}}',
        '{"removed":[1],"set":{}}',
        '{"removed":[["a"]],"set":{}}',
        '{"removed":[],"set":{"a":NaN}}',
        '{"removed":[],"set":{"a":' + "9" * 5_000 + "}}",
        '{"removed":[],"set":{"a":' + "[" * 100_000 + "}}",
        NOTHING[:-1],
        NOTHING[1:],
        NOTHING + "}",
        NOTHING + "," + NOTHING,
        "~" + NOTHING,
    ],
    ids=lambda text: text[:40],
)
def test_a_damaged_delta_is_an_integrity_fault(read: Callable[..., Any], damaged: str) -> None:
    full = encode({"a": 1, "b": 2})
    for deltas in ([damaged], [NOTHING, damaged], [damaged, NOTHING], [NOTHING, damaged, NOTHING]):
        with pytest.raises(IntegrityFault):
            read(full, deltas)


@READERS
@for_each(
    "damaged", ["", "null", "[]", '"{}"', "1", "{", '{"a":1', '{"a":NaN}', '{"a":1},{"b":2}', "~[]", "~{"]
)
def test_a_damaged_full_payload_is_an_integrity_fault(read: Callable[..., Any], damaged: str) -> None:
    for deltas in ([NOTHING], [NOTHING, NOTHING]):
        with pytest.raises(IntegrityFault):
            read(damaged, deltas)


@READERS
def test_nothing_follows_a_payload_in_the_form_for_adjacent_surrogates(read: Callable[..., Any]) -> None:
    with pytest.raises(IntegrityFault):
        read(encode({"pair": HIGH + LOW}), [NOTHING])


@READERS
def test_a_missing_delta_is_noticed_when_a_later_one_removes_what_it_set(read: Callable[..., Any]) -> None:
    come, gone = delta(BALLAST, {**BALLAST, "a": 1}), delta({**BALLAST, "a": 1}, BALLAST)
    with pytest.raises(IntegrityFault):
        read(encode(BALLAST), [gone, come])


@pytest.mark.parametrize(
    "value",
    ["1e999", "9" * (MAX_INT_DIGITS + 1), "[" * MAX_DEPTH + "]" * MAX_DEPTH],
    ids=["infinity", "integer", "depth"],
)
def test_deltas_to_what_no_payload_holds_give_no_text(value: str) -> None:
    with pytest.raises(IntegrityFault):
        apply_deltas(encode(BALLAST), ['{"removed":[],"set":{"a":' + value + "}}"])


@READERS
@for_each("damaged", ['{"removed":["s3cr3t"],"set":{}}', '{"removed":[],"set":{"s3cr3t":', '{"s3cr3t":1}'])
def test_a_fault_shows_no_stored_text(read: Callable[..., Any], damaged: str) -> None:
    with pytest.raises(IntegrityFault) as caught:
        read('{"a":"s3cr3t"}', [damaged])
    assert "s3cr3t" not in f"{caught.value!s}{caught.value!r}{caught.value.to_dict()}"
    assert caught.value.__context__ is None


def test_a_fault_of_the_text_shows_no_stored_key() -> None:
    with pytest.raises(IntegrityFault) as caught:
        apply_deltas("{}", ['{"removed":[],"set":{"s3cr3t":1e999}}'])
    assert "s3cr3t" not in f"{caught.value!s}{caught.value!r}{caught.value.to_dict()}"
    assert caught.value.__context__ is None


@for_each("stored", ["[]", '{"a":1', "{1:2}", '{"a" :1}', '{"a":1 }', '{"a":1]}', '{"a":tru}'])
def test_a_stored_text_that_is_no_compact_object_has_no_entries(stored: str) -> None:
    assert split(stored) is None


def test_a_change_that_makes_a_state_too_large_is_refused() -> None:
    before = {"a": 1}
    known = split(encode(before))
    assert known is not None
    with pytest.raises(LimitExceeded):
        encode_changed(known, before, {**before, "b": "much"}, limit=8, path="custom_state")


def test_a_change_to_a_text_that_has_no_entries_is_encoded_whole() -> None:
    before, after = {"a": 1}, {"a": 1, "b": "\ud800\udc00"}
    known = split(encode(before))
    assert known is not None
    assert encode_changed(known, before, after, limit=500, path="custom_state") == (encode(after), None)
