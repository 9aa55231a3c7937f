"""The payload gate: what it takes comes back exactly, what it refuses is named without being shown."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helix_store.core import validation
from helix_store.core.limits import MAX_DEPTH, MAX_INT_DIGITS
from helix_store.core.payloads import (
    copy_json,
    decode,
    decode_all,
    encode,
    join_path,
    size_of,
)
from helix_store.exceptions import (
    HelixStoreError,
    IntegrityFault,
    InvalidPayload,
    LimitExceeded,
)
from tests.cells import for_each
from tests.strategies import (
    HIGH,
    HOSTILE_DOCUMENTS,
    LOW,
    REFUSED_DOCUMENTS,
    doubling,
    exact_form,
    json_values,
    nested,
    texts,
)

HIGHS, LOWS = range(0xD800, 0xDC00), range(0xDC00, 0xE000)

# --- Round trips ----------------------------------------------------------------------------------


@given(json_values())
def test_any_value_comes_back_with_its_types_and_key_order(value: Any) -> None:
    assert exact_form(decode(encode(value))) == exact_form(value)


@for_each("document", HOSTILE_DOCUMENTS, ids=range(len(HOSTILE_DOCUMENTS)))
def test_hostile_documents_come_back_exactly(document: dict[str, Any]) -> None:
    assert exact_form(decode(encode(document))) == exact_form(document)


@given(json_values())
def test_a_stored_text_is_utf8_without_nul(value: Any) -> None:
    text = encode(value)
    assert "\x00" not in text
    assert text.encode("utf-8").decode("utf-8") == text


@given(texts())
def test_only_a_pair_that_would_merge_leaves_plain_json(text: str) -> None:
    pair = any(high in HIGHS and low in LOWS for high, low in pairwise(map(ord, text)))
    stored = encode([text])
    assert stored.startswith("~") is pair
    if not pair:
        assert json.loads(stored) == [text]


def test_two_lone_surrogates_stay_two_in_values_and_keys() -> None:
    stored = decode(encode({HIGH + LOW: [HIGH + LOW, "\U0001f600"]}))
    ((key, (pair, astral)),) = stored.items()
    assert [len(key), len(pair), len(astral)] == [2, 2, 1]


def test_text_is_compact_and_keeps_characters_and_order() -> None:
    assert encode({"b": [1, 2.0, None], "a": "Zoë 日本"}) == '{"b":[1,2.0,null],"a":"Zoë 日本"}'


@given(json_values())
def test_a_copy_is_equal_and_shares_no_container(value: Any) -> None:
    copied = copy_json(value)
    assert exact_form(copied) == exact_form(value)
    assert not _container_ids(copied) & _container_ids(value)


def _container_ids(value: Any) -> set[int]:
    if not isinstance(value, dict | list):
        return set()
    inner = value.values() if isinstance(value, dict) else value
    return {id(value)}.union(*map(_container_ids, inner))


def test_a_copy_parts_what_was_shared() -> None:
    shared: list[int] = []
    first, second = copy_json([shared, shared])
    first.append(1)
    assert (shared, second) == ([], [])


def test_shared_references_are_no_cycle() -> None:
    shared = {"a": [1]}
    assert decode(encode([shared, {"again": shared}, shared])) == [shared, {"again": shared}, shared]


# --- Refusals -------------------------------------------------------------------------------------


@pytest.mark.thorough
@for_each(("document", "error"), REFUSED_DOCUMENTS, ids=range(len(REFUSED_DOCUMENTS)))
def test_refused_documents_raise_their_error(document: Any, error: type[HelixStoreError]) -> None:
    with pytest.raises(HelixStoreError) as caught:
        encode(document)
    assert type(caught.value) is error


@for_each(
    ("value", "path"),
    [
        (float("nan"), ""),
        ((1,), ""),
        ([1, [2, {3}]], "/1/1"),
        ({"a": {"b": [0, float("inf")]}}, "/a/b/1"),
        ({"a/b": {"m~n": {"": b""}}}, "/a~1b/m~0n/"),
        ({"a": [{1: 2}]}, "/a/0"),
        ({"first": float("nan"), "second": {2: 3}}, "/first"),
        ({"first": {2: 3}, "second": float("nan")}, "/first"),
        ({"first": {"deeper": {"deepest": {1}}}, "second": {1}}, "/first/deeper/deepest"),
    ],
)
def test_the_path_points_at_the_first_fault_in_document_order(value: Any, path: str) -> None:
    with pytest.raises(InvalidPayload) as caught:
        encode(value)
    assert caught.value.path == path


def test_the_path_begins_with_the_prefix() -> None:
    with pytest.raises(InvalidPayload) as caught:
        encode({"content": [None, ()]}, path="messages/3")
    assert caught.value.path == "/messages/3/content/1"


def test_a_cycle_points_at_the_place_that_closes_it() -> None:
    value: dict[str, Any] = {"a": [1, {}]}
    value["a"][1]["back"] = value["a"]
    with pytest.raises(InvalidPayload) as caught:
        encode(value)
    assert caught.value.path == "/a/1/back"
    assert "contains itself" in caught.value.reason


@pytest.mark.thorough
def test_a_cycle_far_below_the_depth_limit_is_still_a_cycle() -> None:
    innermost: list[Any] = []
    value: list[Any] = innermost
    for _ in range(50_000):
        value = [value]
    innermost.append(value)
    with pytest.raises(InvalidPayload) as caught:
        encode(value)
    assert len(caught.value.path) < 2_000


def test_a_refusal_shows_no_value() -> None:
    secret = "s3cr3t-canary"

    class Custom(str):
        __slots__ = ()

    refused: list[Any] = [
        {"a": Custom(secret)},
        {"a": (secret,)},
        {"a": {secret}},
        {"a": [secret], "b": float("nan")},
        {"a": secret.encode()},
    ]
    for value in refused:
        with pytest.raises(InvalidPayload) as caught:
            encode(value)
        assert secret not in f"{caught.value!s}{caught.value!r}{caught.value.to_dict()}"
        assert caught.value.__context__ is None


def test_keys_in_a_path_are_cut_and_printable() -> None:
    key = "k\x00\n\u202e" + "x" * 10_000
    with pytest.raises(InvalidPayload) as caught:
        encode({key: {1}})
    segment = caught.value.path.removeprefix("/")
    assert segment.isprintable()
    assert len(segment) == 80


@for_each(("key", "path"), [("a/b", "p/a~1b"), ("~", "p/~0"), ("~1", "p/~01"), (7, "p/7"), ("", "p/")])
def test_a_path_segment_is_escaped_as_in_rfc_6901(key: str | int, path: str) -> None:
    assert join_path("p", key) == path


# --- Limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 3, MAX_DEPTH - 1, MAX_DEPTH])
def test_nesting_up_to_the_limit_is_kept(depth: int) -> None:
    assert decode(encode(nested(depth))) == nested(depth)


@pytest.mark.thorough
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, MAX_DEPTH + 2, 5_000, 50_000])
def test_deeper_nesting_is_refused_without_recursion(depth: int) -> None:
    with pytest.raises(LimitExceeded) as caught:
        encode(nested(depth))
    assert (caught.value.name, caught.value.limit, caught.value.actual) == ("depth", MAX_DEPTH, MAX_DEPTH + 1)


def test_each_container_counts_one_and_a_scalar_none() -> None:
    value: Any = "scalar"
    for _ in range(MAX_DEPTH):
        value = {"": value}
    assert decode(encode(value)) == value
    with pytest.raises(LimitExceeded):
        encode([value])


@pytest.mark.parametrize("sign", [1, -1])
def test_integers_up_to_the_digit_limit_are_kept(sign: int) -> None:
    longest = sign * (10**MAX_INT_DIGITS - 1)
    assert len(str(abs(longest))) == MAX_INT_DIGITS
    assert decode(encode(longest)) == longest
    with pytest.raises(LimitExceeded) as caught:
        encode([longest + sign])
    assert (caught.value.name, caught.value.limit) == ("integer digits", MAX_INT_DIGITS)
    assert caught.value.actual == MAX_INT_DIGITS + 1


@given(st.integers(min_value=MAX_INT_DIGITS + 1, max_value=20_000))
def test_the_reported_digits_of_an_integer_are_never_too_many(digits: int) -> None:
    with pytest.raises(LimitExceeded) as caught:
        encode(10 ** (digits - 1))
    assert MAX_INT_DIGITS < caught.value.actual <= digits


@given(json_values())
@example(2**199)
@example([2**199, -(2**199)])
def test_the_limit_is_the_size_of_the_stored_text(value: Any) -> None:
    size = len(encode(value).encode("utf-8"))
    assert size_of(encode(value)) == size
    assert encode(value, limit=size) == encode(value)
    with pytest.raises(LimitExceeded) as caught:
        encode(value, limit=size - 1, name="max_chunk_bytes")
    assert (caught.value.name, caught.value.limit) == ("max_chunk_bytes", size - 1)
    assert size - 1 < caught.value.actual <= size


@for_each("value", [0, 10**300, "", "x", [], {}, [0], [[]], {"": 0}, {"k": []}, [0, [0, 0], ""]])
def test_the_smallest_values_fit_their_own_size(value: Any) -> None:
    assert encode(value, limit=size_of(encode(value))) == encode(value)


def test_size_is_counted_in_bytes() -> None:
    assert size_of(encode("日本")) == 8
    with pytest.raises(LimitExceeded):
        encode("日本", limit=7)


def test_without_a_limit_the_default_of_a_state_holds() -> None:
    assert size_of(encode("x" * (8 * 1024 * 1024 - 2))) == 8 * 1024 * 1024
    with pytest.raises(LimitExceeded) as caught:
        encode("x" * (8 * 1024 * 1024 - 1))
    assert caught.value.name == "max_state_bytes"


@pytest.mark.thorough
@for_each(
    "bomb",
    [
        doubling(40, "lol"),
        doubling(150, "lol"),
        {"texts": ["x" * 1_000_000] * 10_000},
        {"keys": [{"k" * 1_000_000: 1}] * 10_000},
        {"integers": [10**900] * 10_000},
        {"lists": [["x" * 1_000] * 1_000] * 1_000},
    ],
    ids=["doubling", "doubling deep", "texts", "keys", "integers", "lists"],
)
def test_a_small_graph_of_shared_references_stops_early(bomb: dict[str, Any]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceeded) as caught:
            encode(bomb, limit=64 * 1024)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.name == "max_state_bytes"
    assert peak < 4 * 1024 * 1024


# --- Reading --------------------------------------------------------------------------------------


@for_each(
    "text",
    [
        "",
        "{",
        "nope",
        '{"a":1}x',
        "{'a':1}",
        "[1,]",
        "NaN",
        "[Infinity]",
        "-Infinity",
        '"\x00"',
        "1" * 5_000,
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        "~",
        "~{",
        "~日本",
        '~"\xff"',
        None,
        17,
        b"{}",
    ],
)
def test_an_unreadable_text_is_an_integrity_fault(text: Any) -> None:
    with pytest.raises(IntegrityFault):
        decode(text)


def test_an_integrity_fault_shows_nothing_of_the_text() -> None:
    with pytest.raises(IntegrityFault) as caught:
        decode('{"password": "s3cr3t", oops')
    assert "s3cr3t" not in str(caught.value)
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


@given(st.text())
def test_any_text_is_read_or_an_integrity_fault(text: str) -> None:
    try:
        value = decode(text)
    except IntegrityFault:
        return
    assert exact_form(decode(encode(value))) == exact_form(value)


# --- What is queried ------------------------------------------------------------------------------


@for_each("text", ["", "plain", "\n\x01\x7f\x85", "\U0001f600", "\u202e", "x" * 4_000])
def test_text_that_a_column_takes_is_returned(text: str) -> None:
    assert validation.title(text) == text
    assert validation.tags([text]) == [text]
    assert validation.metadata({text: text}) == {text: text}


@for_each("text", ["\x00", "a\x00b", HIGH, LOW, "x" + HIGH + LOW, 1, b"x", True])
def test_text_that_a_column_cannot_hold_is_refused_everywhere(text: Any) -> None:
    attempts: list[tuple[Callable[[], object], str]] = [
        (lambda: validation.title(text), "/title"),
        (lambda: validation.tags(["fine", text]), "/tags/1"),
        (lambda: validation.metadata({"key": text}), "/metadata/key"),
        (lambda: validation.metadata({text: "value"}), "/metadata"),
    ]
    for attempt, path in attempts:
        with pytest.raises(InvalidPayload) as caught:
            attempt()
        assert caught.value.path == path


@for_each("tags", ["text", {"set"}, None, {"a": "b"}, iter(["a"])])
def test_tags_are_a_list_of_texts(tags: Any) -> None:
    with pytest.raises(InvalidPayload):
        validation.tags(tags)


@pytest.mark.parametrize("metadata", [None, [], [("a", "b")], "text"])
def test_metadata_is_a_dict(metadata: Any) -> None:
    with pytest.raises(InvalidPayload):
        validation.metadata(metadata)


def test_accepted_tags_and_metadata_are_detached() -> None:
    tags, metadata = ["b", "a"], {"b": "1", "a": "2"}
    taken_tags, taken_metadata = validation.tags(tags), validation.metadata(metadata)
    tags.append("late")
    metadata["late"] = "x"
    assert taken_tags == ["b", "a"]
    assert list(taken_metadata.items()) == [("b", "1"), ("a", "2")]
    assert validation.tags(("x", "y")) == ["x", "y"]


class TestDecodeAll:
    @pytest.mark.parametrize(
        "values",
        [[], [{}], [{"a": 1}, [1, 2], "x", None, 1.5], [{"text": "\ud800\udc00"}, {"b": 2}]],
        ids=["none", "one", "every kind", "one that only we can read"],
    )
    def test_gives_what_decode_gives_for_each(self, values: list[Any]) -> None:
        texts = [encode(value) for value in values]
        assert decode_all(texts) == [decode(text) for text in texts]

    @for_each("texts", [["{}", "{"], ["", "1"], ["1,2"], ["[1", "2]"], ["{}", "[NaN]"]])
    def test_refuses_what_decode_refuses(self, texts: list[str]) -> None:
        with pytest.raises(IntegrityFault):
            decode_all(texts)
