"""The merge form of changes, and the promotion of staged changes."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helix_store.core.limits import Limits
from helix_store.core.patches import (
    apply_patches,
    merge_changes,
    promote_staged,
    with_staged,
)
from helix_store.core.payloads import copy_json, encode
from helix_store.core.types import StagedChanges, SubSessionRef
from helix_store.exceptions import (
    HelixStoreError,
    InvalidPayload,
    LimitExceeded,
    PatchError,
)
from tests.cells import for_each
from tests.strategies import json_values
from tests.unit.patch_rules import add, check, copy, remove, replace
from tests.unit.patch_strategies import KEYS, OBJECTS, PATCHES, container_ids, documents_and_changes


def patched(*patches: Any, merge: dict[str, Any] | None = None) -> StagedChanges:
    return StagedChanges(tool_call_id="call", patches=list(patches), merge_changes=merge)


def merged(**changes: Any) -> StagedChanges:
    return StagedChanges(tool_call_id="call", merge_changes=changes)


# --- merge_changes ---------------------------------------------------------------------------------


@for_each(
    ("document", "changes", "expected"),
    [
        pytest.param({"a": 1}, {}, {"a": 1}, id="nothing"),
        pytest.param({"a": 1}, {"a": None}, {"a": None}, id="null is a value"),
        pytest.param({"a": 1}, {"b": 2}, {"a": 1, "b": 2}, id="a new key"),
        pytest.param(
            {"a": {"x": 1}}, {"a": {"y": 2}}, {"a": {"y": 2}}, id="an object replaces, it is not merged"
        ),
        pytest.param({"a": [1]}, {"a": "text"}, {"a": "text"}, id="a scalar replaces an array"),
        pytest.param({"a": [1]}, {"a": [2, [3]]}, {"a": [1, 2, [3]]}, id="an array is appended"),
        pytest.param({"a": [1]}, {"a": []}, {"a": [1]}, id="an empty array appends nothing"),
        pytest.param({"a": [1]}, {"a": [1]}, {"a": [1, 1]}, id="equal items are appended too"),
        pytest.param({}, {"a": [1]}, {"a": [1]}, id="an array under a new key"),
        pytest.param(
            {"a": {"b": [1]}}, {"a": {"b": [2]}}, {"a": {"b": [2]}}, id="inner arrays are not appended"
        ),
    ],
)
def test_a_key_is_replaced_or_appended_to(document: Any, changes: Any, expected: Any) -> None:
    result, warnings = merge_changes(document, changes)

    assert encode(result) == encode(expected)
    assert warnings == []


def test_an_array_named_in_array_replacements_replaces() -> None:
    document = {"a": [1], "b": [2]}

    result, warnings = merge_changes(document, {"a": [3], "b": [4]}, array_replacements=["a", "unknown"])

    assert result == {"a": [3], "b": [2, 4]}
    assert warnings == []


@pytest.mark.parametrize("stored", [None, "text", 1, {"x": 1}], ids=repr)
def test_an_array_for_a_value_that_is_none_replaces_it_with_a_warning(stored: Any) -> None:
    result, warnings = merge_changes({"a": stored, "b": [1]}, {"a": [2], "b": [3]})

    assert result == {"a": [2], "b": [1, 3]}
    assert len(warnings) == 1
    assert "'a'" in warnings[0]


def test_a_replacement_that_was_asked_for_gives_no_warning() -> None:
    assert merge_changes({"a": "text"}, {"a": [2]}, {"a"}) == ({"a": [2]}, [])


def test_stored_keys_keep_their_order() -> None:
    result, _ = merge_changes({"a": 1, "b": [1], "c": 3}, {"d": 4, "b": [2], "a": 5})

    assert list(result) == ["a", "b", "c", "d"]


@for_each("wrong", [None, [], "text", 1, OrderedDict()], ids=repr)
def test_anything_but_a_dict_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidPayload):
        merge_changes(wrong, {})
    with pytest.raises(InvalidPayload):
        merge_changes({}, wrong)


def test_one_text_is_no_collection_of_keys() -> None:
    with pytest.raises(InvalidPayload):
        merge_changes({"a": [1]}, {"a": [2]}, "a")


@given(OBJECTS, OBJECTS, st.sets(KEYS))
def test_merging_changes_no_input_and_shares_nothing(document: Any, changes: Any, replaced: set[str]) -> None:
    before = repr((document, changes))

    result, warnings = merge_changes(document, changes, replaced)

    found = list(container_ids(result))
    assert len(found) == len(set(found))
    assert set(found).isdisjoint({*container_ids(document), *container_ids(changes)})
    assert repr((document, changes)) == before
    for key in {**document, **changes}:
        stored, new = document.get(key), changes.get(key)
        appends = isinstance(stored, list) and isinstance(new, list) and key not in replaced
        expected = stored + new if appends else changes.get(key, stored)
        assert encode(result[key]) == encode(expected)
    lost = [
        key
        for key, new in changes.items()
        if isinstance(new, list)
        and key in document
        and key not in replaced
        and not isinstance(document[key], list)
    ]
    assert len(warnings) == len(lost)


# --- promote_staged --------------------------------------------------------------------------------


def test_staged_changes_apply_in_their_order() -> None:
    staged = [
        patched(add("/notes/-", "one")),
        merged(notes=["two"], done=False),
        patched(replace("/done", True)),
    ]

    assert promote_staged({"notes": []}, staged) == {"notes": ["one", "two"], "done": True}
    assert promote_staged({"notes": [], "done": 0}, staged[1:] + staged[:1]) == {
        "notes": ["two", "one"],
        "done": True,
    }


def test_where_both_forms_are_given_patches_win() -> None:
    staged = [patched(add("/notes/-", "patch"), merge={"notes": ["merge"], "other": 1})]

    assert promote_staged({"notes": []}, staged) == {"notes": ["patch"]}


def test_a_change_without_content_changes_nothing() -> None:
    assert promote_staged({"a": [1]}, [patched(), merged(), patched(merge={})]) == {"a": [1]}


def test_nothing_staged_gives_a_copy() -> None:
    document: dict[str, Any] = {"a": [1]}

    result = promote_staged(document, [])

    assert result == document
    assert result["a"] is not document["a"]


def test_one_bad_operation_leaves_everything_unapplied() -> None:
    document = {"notes": ["old"]}
    staged = [patched(add("/notes/-", "new")), merged(notes=["more"]), patched(add("/a", 1), remove("/b"))]

    with pytest.raises(PatchError) as caught:
        promote_staged(document, staged)

    assert (caught.value.index, caught.value.op) == (1, "remove")
    assert document == {"notes": ["old"]}


def test_custom_state_stays_an_object() -> None:
    with pytest.raises(PatchError) as caught:
        promote_staged(
            {}, [merged(a=1), patched(check("", {"a": 1}), replace([], [1]), add("/-", 2)), merged(b=[1])]
        )

    assert (caught.value.index, caught.value.op) == (1, "replace")
    assert promote_staged({}, [patched(replace("", 1), add("", {"a": 1}))]) == {"a": 1}


def test_a_promotion_is_limited_as_one_patch() -> None:
    with pytest.raises(LimitExceeded) as caught:
        promote_staged({}, [merged(a="x" * 10), merged(b="x" * 10)], limits=Limits(max_state_bytes=30))
    assert (caught.value.name, caught.value.limit, caught.value.actual) == ("max_state_bytes", 30, 35)

    document = {"a": "x" * 2**20, "b": None}
    with pytest.raises(LimitExceeded) as caught:
        promote_staged(document, [patched(copy("/a", "/b"))] * 9)
    assert caught.value.name == "copied bytes"


def test_what_is_not_a_dict_is_refused() -> None:
    wrong: Any = [1]

    with pytest.raises(InvalidPayload):
        promote_staged(wrong, [])
    with pytest.raises(InvalidPayload):
        promote_staged({}, [patched(merge=wrong)])
    with pytest.raises(PatchError):
        promote_staged({}, [StagedChanges(tool_call_id="call", patches=wrong)])


CHANGES = st.builds(
    StagedChanges,
    tool_call_id=st.just("call"),
    patches=PATCHES | st.just([]),
    merge_changes=OBJECTS | st.none(),
)


@given(OBJECTS, st.lists(CHANGES, max_size=4))
def test_a_promotion_is_its_changes_one_after_the_other(document: Any, staged: list[StagedChanges]) -> None:
    before = repr((document, staged))
    stepwise: Any = deepcopy(document)
    try:
        for change in staged:
            if change.patches:
                stepwise = apply_patches(stepwise, change.patches)
                if not isinstance(stepwise, dict):
                    raise PatchError(index=0, op="", reason="not an object")
            elif change.merge_changes is not None:
                stepwise = merge_changes(stepwise, change.merge_changes)[0]
    except HelixStoreError as expected:
        with pytest.raises(type(expected)):
            promote_staged(document, staged)
    else:
        assert encode(promote_staged(document, staged)) == encode(stepwise)
    assert repr((document, staged)) == before


@given(documents_and_changes(), OBJECTS)
def test_a_promotion_shares_nothing(patch_case: tuple[Any, list[Any]], changes: Any) -> None:
    document, patches = patch_case

    result = promote_staged(document, [patched(*patches), patched(merge=changes)])

    found = list(container_ids(result))
    assert len(found) == len(set(found))
    assert set(found).isdisjoint({*container_ids(document), *container_ids(patches), *container_ids(changes)})


@pytest.mark.thorough
@given(
    document=st.dictionaries(st.sampled_from("abc"), json_values(), max_size=3),
    changes=st.lists(st.dictionaries(st.sampled_from("abcd"), json_values(), max_size=3), max_size=4),
)
def test_with_staged_is_promote_staged_without_the_copies(
    document: dict[str, Any], changes: list[dict[str, Any]]
) -> None:
    def staged() -> list[StagedChanges]:
        return [
            StagedChanges(tool_call_id=f"c-{index}", merge_changes=copy_json(each))
            for index, each in enumerate(changes)
        ]

    before = copy_json(document)
    assert with_staged(document, staged(), limits=Limits()) == promote_staged(document, staged())
    assert document == before


def test_a_cycle_is_refused() -> None:
    cyclic: dict[str, Any] = {}
    cyclic["again"] = [cyclic]
    with pytest.raises(InvalidPayload):
        apply_patches(cyclic, [])
    for document, changes in ((cyclic, {}), ({}, cyclic)):
        with pytest.raises(InvalidPayload):
            merge_changes(document, changes)


def test_changes_and_refs_may_be_written_by_position() -> None:
    assert StagedChanges("call", [add("/a", 1)]).patches == [add("/a", 1)]
    assert SubSessionRef("child", "agent", "call").parent_tool_call_id == "call"
