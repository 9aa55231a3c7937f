"""Patches: every rule, the limits, and what holds for all patches whatever they say."""

from __future__ import annotations

import math
import pickle
import time
from collections import OrderedDict
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helix_store.core.limits import MAX_DEPTH, Limits
from helix_store.core.patches import (
    MAX_COPIED_BYTES,
    MAX_MOVED_ELEMENTS,
    MAX_OPERATIONS,
    PatchedCopy,
    apply_patches,
    check_staged_patches,
    json_equal,
    merge_changes,
    promote_staged,
)
from helix_store.core.payloads import encode
from helix_store.core.types import StagedChanges
from helix_store.exceptions import (
    InvalidPayload,
    LimitExceeded,
    PatchError,
)
from tests.cells import for_each
from tests.unit.patch_rules import APPLIES, REFUSES, Applies, Refuses, add, check, copy, move, remove, replace
from tests.unit.patch_strategies import (
    HOSTILE_PATCHES,
    OBJECTS,
    PATCHES,
    VALUES,
    container_ids,
    documents_and_changes,
)


def rule(case: Applies | Refuses) -> str:
    return case.rule


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


# --- The rules -------------------------------------------------------------------------------------


@for_each("case", APPLIES, ids=rule)
def test_rule_applies(case: Applies) -> None:
    result = apply_patches(case.document, case.patches)

    assert encode(result) == encode(case.expected)


@for_each("case", REFUSES, ids=rule)
def test_rule_refuses(case: Refuses) -> None:
    before = deepcopy(case.document)

    with pytest.raises(PatchError) as caught:
        apply_patches(case.document, case.patches)

    assert caught.value.index == case.index
    assert caught.value.reason
    assert case.document == before


def test_an_error_names_the_operation_and_its_place() -> None:
    with pytest.raises(PatchError) as caught:
        apply_patches({"a": 1}, [add("/b", 1), replace("/c", 2)])

    assert (caught.value.index, caught.value.op) == (1, "replace")
    assert "'c'" in caught.value.reason
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301  our own bytes


@for_each("patches", [None, {}, "add", 7, (), {"op": "add"}, b"[]"])
def test_a_patch_that_is_no_list_is_refused(patches: Any) -> None:
    with pytest.raises(PatchError) as caught:
        apply_patches({}, patches)

    assert (caught.value.index, caught.value.op) == (0, "unknown")


@for_each(
    "value",
    [{1}, b"", (1,), object(), {1: 2}, {"a": [math.nan]}, -math.inf, OrderedDict(), 1j],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_could_not_be_stored_is_refused(value: Any) -> None:
    for operation in (add("/a", value), replace("/b", value)):
        with pytest.raises(PatchError) as caught:
            apply_patches({"b": 1}, [operation])
        assert caught.value.reason.startswith("/value")


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)

    with pytest.raises(PatchError):
        apply_patches({}, [add("/a", value)])
    with pytest.raises(PatchError):
        apply_patches({"a": [[]]}, [check("/a", value)])


def test_messages_hold_nothing_of_the_values() -> None:
    secret = "sk-canary"
    document = {"a": secret, "list": [secret], "b": {"c": secret}}
    failing = [
        check("/a", secret + "x"),
        add("/a/x", secret),
        add("/list/7", secret),
        replace(["list", "length"], secret),
        add("/x", {"x": {secret}}),
        remove("/b/d"),
        {"op": secret, "path": "/a", "value": secret},
        {"op": "add", "value": secret},
        secret,
    ]
    for operation in failing:
        with pytest.raises(PatchError) as caught:
            apply_patches(document, [operation])
        assert secret not in f"{caught.value} {caught.value.to_dict()!r}"


def test_messages_stay_short_and_printable() -> None:
    for path in ("/" + "x" * 100_000, ["\ud800\x00\n" * 1_000], [10**5_000], ["a", "\x1b[2J" * 100]):
        with pytest.raises(PatchError) as caught:
            apply_patches({"a": []}, [remove(path)])
        assert len(str(caught.value)) < 250
        assert str(caught.value).isprintable()


def test_members_keep_their_order() -> None:
    document = {"a": 1, "b": 2, "c": 3}

    patches = [replace("/a", 4), add("/b", 5), move("/a", "/a"), move(["b"], "/b"), add("/d", 6)]

    assert list(apply_patches(document, patches).items()) == [("a", 4), ("b", 5), ("c", 3), ("d", 6)]


def test_numbers_keep_their_type() -> None:
    numbers = [1e16, -0.0, 1.0, True, 2**70, 1e23]

    result = apply_patches({"a": numbers}, [copy("/a", "/b"), add("/c", numbers)])

    assert [repr(result[key]) for key in "abc"] == [repr(numbers)] * 3


def test_a_document_of_another_type_is_neither_changed_nor_returned() -> None:
    document = OrderedDict(a=1)

    for patches in ([add("/b", 2)], []):
        with pytest.raises(InvalidPayload):
            apply_patches(document, patches)
    assert document == {"a": 1}


# --- The limits ------------------------------------------------------------------------------------


def test_ten_thousand_operations_are_the_most() -> None:
    operations = [add("/-", 1)] * MAX_OPERATIONS
    assert len(apply_patches([], operations)) == 10_000

    with pytest.raises(LimitExceeded) as caught:
        apply_patches([], [*operations, add("/-", 1)])
    assert (caught.value.limit, caught.value.actual) == (10_000, 10_001)


def test_copies_add_up_to_eight_mebibytes_at_most() -> None:
    block = "x" * (2**20 - 2)  # a mebibyte with its quotes
    document = {"a": block, "b": None}
    assert apply_patches(document, [copy("/a", "/b")] * 8) == {"a": block, "b": block}

    with pytest.raises(LimitExceeded) as caught:
        apply_patches(document, [copy("/a", "/b")] * 9)
    assert (caught.value.limit, caught.value.actual) == (MAX_COPIED_BYTES, 9 * 2**20)


@pytest.mark.thorough
def test_a_patch_that_doubles_the_document_is_stopped() -> None:
    with pytest.raises(LimitExceeded):
        apply_patches({"a": "x" * 100, "b": []}, [copy("", "/b/-")] * 40)


def test_the_result_is_limited_in_bytes_of_its_text() -> None:
    limits = Limits(max_state_bytes=20)
    assert apply_patches({}, [add("/a", "x" * 12)], limits=limits) == {"a": "x" * 12}
    assert apply_patches({}, [add("/a", "é" * 6)], limits=limits) == {"a": "é" * 6}

    for value in ("x" * 13, "é" * 7, [1] * 9):
        with pytest.raises(LimitExceeded) as caught:
            apply_patches({}, [add("/a", value)], limits=limits)
        assert (caught.value.name, caught.value.limit) == ("max_state_bytes", 20)


def test_a_document_over_the_limit_may_be_brought_below_it() -> None:
    limits = Limits(max_state_bytes=20)

    assert apply_patches({"a": ["x" * 10] * 3}, [replace(["a", "length"], 1)], limits=limits) == {
        "a": ["x" * 10]
    }


def test_a_value_of_shared_references_is_stopped_before_it_is_written_out() -> None:
    value: list[Any] = ["x" * 90_000]
    for _ in range(100):
        value = [value, value]

    with pytest.raises(LimitExceeded):
        apply_patches({}, [add("/a", value)])


@pytest.mark.thorough
def test_nesting_is_limited_however_it_comes_about() -> None:
    deepest = nested(MAX_DEPTH - 1)
    assert apply_patches([], [add("/-", deepest)]) == [deepest]

    to_the_bottom = "/0" * (MAX_DEPTH - 1)
    too_deep: list[tuple[Any, list[Any]]] = [
        ([], [add("/-", nested(MAX_DEPTH))]),
        ([], [add("/-", nested(50_000))]),
        ([deepest], [add(f"{to_the_bottom}/-", [])]),
        ([[], deepest], [move("/1", "/0/-")]),
        ([deepest], [copy("/0", "/0/-")]),
        ([nested(50_000)], []),
    ]
    for document, patches in too_deep:
        with pytest.raises(LimitExceeded) as caught:
            apply_patches(document, patches)
        assert caught.value.limit == MAX_DEPTH


def test_deep_values_are_compared_without_recursion() -> None:
    assert json_equal(nested(50_000), nested(50_000))
    assert not json_equal(nested(50_000), nested(49_999))


def test_many_inserts_at_the_front_of_a_long_list_end_soon() -> None:
    started = time.perf_counter()

    result = apply_patches(list(range(1_000)), [add("/0", -1)] * 10_000)

    assert (len(result), result[9_999], result[10_000]) == (11_000, -1, 0)
    assert time.perf_counter() - started < 10


@for_each(
    "operations",
    [
        [add("/0", 1)] * 10_000,
        [add("/0", 1), remove("/0")] * 5_000,
        [move("/399999", "/0")] * 10_000,
        [move("/0", "/-")] * 10_000,
        [{"op": "remove", "path": [0]}] * 10_000,
    ],
    ids=["insert", "insert and remove", "move to the front", "move to the end", "remove"],
)
def test_patches_that_move_a_long_list_too_often_are_refused(operations: list[Any]) -> None:
    with pytest.raises(LimitExceeded) as caught:
        apply_patches([0] * 400_000, operations)
    assert caught.value.name == "moved list elements"
    assert caught.value.limit == MAX_MOVED_ELEMENTS


def test_work_at_the_end_of_a_long_list_moves_nothing() -> None:
    operations = [add("/-", 1), {"op": "remove", "path": "/300000"}, replace("/0", 2)] * 3_333
    assert apply_patches([0] * 300_000, operations) == [2] + [0] * 299_999


def test_all_changes_of_a_step_share_the_bound_of_moved_elements() -> None:
    staged = [StagedChanges(tool_call_id=str(n), patches=[add("/list/0", 1)] * 250) for n in range(8)]
    with pytest.raises(LimitExceeded) as caught:
        promote_staged({"list": [0] * 1_000_000}, staged)
    assert caught.value.name == "moved list elements"


LONG = {"op": "add", "path": "/list", "value": [0] * 200_000}


@pytest.mark.parametrize(
    "operations",
    [
        [LONG, *[add("/list/0", 1)] * 400],
        [LONG, *[remove("/list/0")] * 400],
        [add("/other", 1), copy("/list", "/list"), LONG, *[move("/list/0", "/list/-")] * 400],
        [add("", {}), {**LONG, "path": ["list"]}, *[{"op": "add", "path": ["list", 0], "value": 1}] * 400],
    ],
    ids=["insert", "remove", "after others", "array paths"],
)
def test_a_patch_that_moves_a_list_of_its_own_too_often_is_refused_when_staged(operations: list[Any]) -> None:
    with pytest.raises(LimitExceeded) as caught:
        check_staged_patches(operations, limits=Limits())
    assert caught.value.name == "moved list elements"


@pytest.mark.thorough
@for_each(
    "operations",
    [
        [add("/list/0", 1)] * MAX_OPERATIONS,
        [LONG, move("/short", "/list"), *[add("/list/0", 1)] * 400],
        [LONG, copy("/short", "/list"), *[add("/list/0", 1)] * 400],
        [LONG, replace("", {"list": []}), *[add("/list/0", 1)] * 400],
        [LONG, *[add("/list/-", 1)] * 400],
        [LONG, "no operation", {"op": "add"}, *[check("/unknown", 1)] * 400],
    ],
    ids=["of the document", "moved away", "copied over", "replaced", "at the end", "unreadable"],
)
def test_a_patch_that_may_be_applied_can_be_staged(operations: list[Any]) -> None:
    check_staged_patches(operations, limits=Limits())


@pytest.mark.parametrize("key", ["x" * 10_000, "line\nbreak\x1b[31m", "\u202e"])
def test_errors_and_warnings_show_a_key_cut_and_printable(key: str) -> None:
    with pytest.raises(PatchError) as caught:
        apply_patches({}, [{"op": "remove", "path": [key]}])
    _, warnings = merge_changes({key: 1}, {key: [2]})
    for shown in (caught.value.reason, str(caught.value), warnings[0]):
        assert shown.isprintable()
        assert len(shown) < 250
    assert apply_patches({key: 1}, [{"op": "remove", "path": [key]}]) == {}


# --- What holds for all patches --------------------------------------------------------------------


def outcome(document: Any, patches: Any) -> Any:
    """The text of the result, or what the error says."""
    try:
        return encode(apply_patches(document, patches))
    except (PatchError, LimitExceeded) as exc:
        return exc.to_dict()


@given(OBJECTS, PATCHES)
def test_neither_the_document_nor_the_patches_are_changed(document: Any, patches: Any) -> None:
    before = repr((document, patches))

    outcome(document, patches)

    assert repr((document, patches)) == before


@given(OBJECTS, PATCHES)
def test_the_same_patch_always_has_the_same_outcome(document: Any, patches: Any) -> None:
    assert outcome(document, patches) == outcome(deepcopy(document), deepcopy(patches))


@given(documents_and_changes())
@example(({"a": [[]]}, [copy("/a", "/b"), copy("/a/0", "/a/-"), add("/c", [{}]), move("/c", "/d")]))
def test_the_result_shares_no_container(given_case: tuple[Any, list[Any]]) -> None:
    document, patches = given_case

    found = list(container_ids(apply_patches(document, patches)))

    assert len(found) == len(set(found))
    assert set(found).isdisjoint({*container_ids(document), *container_ids(patches)})


@given(OBJECTS, HOSTILE_PATCHES)
def test_no_patch_raises_anything_but_its_own_errors(document: Any, patches: Any) -> None:
    before = repr(document)

    result = outcome(document, patches)

    assert isinstance(result, str) or result["code"] in ("patch_error", "limit_exceeded")
    assert repr(document) == before


@given(OBJECTS, PATCHES, PATCHES)
def test_patches_one_after_the_other_are_one_patch(document: Any, first: Any, second: Any) -> None:
    try:
        stepwise = apply_patches(apply_patches(document, first), second)
    except PatchError:
        with pytest.raises(PatchError):
            apply_patches(document, first + second)
    else:
        assert encode(apply_patches(document, first + second)) == encode(stepwise)


@given(OBJECTS, PATCHES, PATCHES)
@example({"b": []}, [add("/a", [1, 2, 3]), move("/b", "/a")], [add("/a/0", 1), add("/a/0", 1)])
@example(
    {"b": [1]}, [add("/a", [1, 2]), copy("", "/c"), check("/b", [1])], [remove("/a/0"), add("/c/b/0", 1)]
)
def test_nothing_counts_more_when_it_is_staged_than_when_it_is_applied(
    document: Any, first: Any, second: Any
) -> None:
    patches = first + second
    applied = PatchedCopy(document, limits=Limits())
    try:
        applied.apply(patches)
    except (PatchError, LimitExceeded):
        return
    staged = PatchedCopy({}, limits=Limits())
    staged.apply_to_known(patches)
    assert staged._moved_elements <= applied._moved_elements
    assert staged._copied_bytes <= applied._copied_bytes


@given(VALUES, VALUES)
def test_test_holds_exactly_when_the_texts_are_equal(left: Any, right: Any) -> None:
    def canonical(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(sorted(f"{key!r}:{canonical(item)}" for key, item in value.items())) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(canonical, value)) + "]"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return repr(int(value)) if is_number and value == int(value) else repr(value)

    assert json_equal(left, right) is (canonical(left) == canonical(right))
    assert json_equal(left, deepcopy(left))


INDEXES = st.integers(0, 5)
LIST_OPERATIONS = st.one_of(
    st.builds(lambda at, value: add(at, value), INDEXES, st.integers(0, 9)),
    st.builds(lambda at, value: replace(at, value), INDEXES, st.integers(0, 9)),
    st.builds(lambda at, value: check(at, value), INDEXES, st.integers(0, 9)),
    st.builds(remove, INDEXES),
    st.builds(move, INDEXES, INDEXES),
    st.builds(copy, INDEXES, INDEXES),
)


def naive(items: list[int], operation: dict[str, Any]) -> list[int] | None:
    """A list operation on integer positions by slices alone; nothing if it is refused."""
    name: str = operation["op"]
    at: int = operation["path"]
    value: Any = operation.get("value")
    if name in ("move", "copy"):
        source = operation["from"]
        if source >= len(items):
            return None
        value = items[source]
        if name == "move":
            items = items[:source] + items[source + 1 :]
        name = "add"
    if at > len(items) or (name != "add" and at == len(items)):
        return None
    if name == "test":
        return items if items[at : at + 1] == [value] else None
    kept = items[at:] if name == "add" else items[at + 1 :]
    return items[:at] + ([] if name == "remove" else [value]) + kept


@given(st.lists(st.integers(0, 9), max_size=4), st.lists(LIST_OPERATIONS, max_size=10), st.booleans())
def test_lists_change_as_a_naive_reference_changes_them(
    items: list[int], operations: list[Any], with_pointers: bool
) -> None:
    expected = items
    for operation in operations:
        written = {
            name: (f"/{value}" if with_pointers else [value]) if name in ("path", "from") else value
            for name, value in operation.items()
        }
        changed = naive(expected, operation)
        if changed is None:
            with pytest.raises(PatchError):
                apply_patches(expected, [written])
            continue
        assert apply_patches(expected, [written]) == changed
        expected = changed
