"""Merging changes into the custom state."""

from __future__ import annotations

from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.exceptions import StaleStateError
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import contents, loaded

__all__ = ["CustomStateContract"]

STORED = {"z": 1, "list": [1, 2], "object": {"a": 1, "b": 2}, "nothing": None}


class CustomStateContract(StoreTests):
    @pytest.mark.parametrize(
        ("changes", "merged"),
        [
            ({"z": 2.0}, {**STORED, "z": 2.0}),
            ({"z": None}, {**STORED, "z": None}),
            ({"z": {"now": "an object"}}, {**STORED, "z": {"now": "an object"}}),
            ({"new": 1, "also": [1]}, {**STORED, "new": 1, "also": [1]}),
            ({"object": {"c": 3}}, {**STORED, "object": {"c": 3}}),
            ({"list": [3]}, {**STORED, "list": [1, 2, 3]}),
            ({"list": [[3]]}, {**STORED, "list": [1, 2, [3]]}),
            ({"list": []}, STORED),
            ({"list": "replaced"}, {**STORED, "list": "replaced"}),
        ],
    )
    def test_a_value_replaces_and_an_array_appends_per_top_level_key(
        self, store: StateStore, changes: dict[str, Any], merged: dict[str, Any]
    ) -> None:
        store.create_session("session", agent_type="agent", custom_state=STORED)
        assert store.merge_custom_state("session", changes) == []
        assert repr(loaded(store, "session").custom_state) == repr(merged)
        assert loaded(store, "session").version == 2

    def test_an_array_replaces_where_its_key_is_among_the_replacements(self, store: StateStore) -> None:
        store.create_session("session", agent_type="agent", custom_state={"a": [1], "b": [1]})
        assert store.merge_custom_state("session", {"a": [2], "b": [2]}, array_replacements=["a", "x"]) == []
        assert loaded(store, "session").custom_state == {"a": [2], "b": [1, 2]}

    @pytest.mark.parametrize("key", ["z", "object", "nothing"])
    def test_an_array_for_what_is_no_array_replaces_it_with_a_warning(
        self, store: StateStore, key: str
    ) -> None:
        store.create_session("session", agent_type="agent", custom_state=STORED)
        (warning,) = store.merge_custom_state("session", {key: [3]})
        assert key in warning
        assert loaded(store, "session").custom_state == {**STORED, key: [3]}

    def test_an_array_that_is_to_replace_gives_no_warning(self, store: StateStore) -> None:
        store.create_session("session", agent_type="agent", custom_state=STORED)
        assert store.merge_custom_state("session", {"z": [3]}, array_replacements={"z"}) == []

    def test_no_changes_write_nothing(self, store: StateStore) -> None:
        store.create_session("session", agent_type="agent", custom_state=STORED)
        before = contents(store, "session")
        assert store.merge_custom_state("session", {}) == []
        assert contents(store, "session") == before

    def test_a_merge_on_top_of_another_version_writes_nothing(self, store: StateStore) -> None:
        store.create_session("session", agent_type="agent", custom_state=STORED)
        store.merge_custom_state("session", {"z": 2}, expected_version=1)
        before = contents(store, "session")
        with pytest.raises(StaleStateError):
            store.merge_custom_state("session", {"z": 3}, expected_version=1)
        assert contents(store, "session") == before

    def test_a_merge_changes_nothing_but_the_custom_state(self, store: StateStore) -> None:
        store.create_session("session", agent_type="agent", title="Title", metadata={"k": "v"})
        before = loaded(store, "session")
        store.merge_custom_state("session", {"a": 1})
        after = loaded(store, "session")
        before.custom_state = {"a": 1}
        before.version, before.updated_at = after.version, after.updated_at
        assert repr(after) == repr(before)

    def test_what_was_merged_is_detached_from_the_store(self, store: StateStore, session_id: str) -> None:
        changes = {"list": [{"a": 1}]}
        store.merge_custom_state(session_id, changes)
        changes["list"].append({"b": 2})
        assert loaded(store, session_id).custom_state == {"list": [{"a": 1}]}

    def test_merges_made_at_once_are_all_kept(self, store: StateStore, session_id: str) -> None:
        def merge(number: int) -> list[str]:
            return store.merge_custom_state(session_id, {f"key {number}": number, "list": [number]})

        self.at_once(*(lambda number=number: merge(number) for number in range(8)))
        custom_state = loaded(store, session_id).custom_state
        assert sorted(custom_state.pop("list")) == list(range(8))
        assert custom_state == {f"key {number}": number for number in range(8)}
        assert loaded(store, session_id).version == 9
