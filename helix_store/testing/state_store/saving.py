"""Tests for saving a state, and for merging changes into custom_state."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import SessionMode, SessionState
from helix_store.exceptions import (
    ConflictError,
    InvalidPayload,
    StaleStateError,
)
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import (
    FIELD_ROUNDS,
    commit_step,
    contents,
    full_session,
    loaded,
    messages,
    shown,
)

__all__ = ["CustomStateContract", "SavingContract"]


class SavingContract(StoreTests):
    @table("given", FIELD_ROUNDS)
    def test_every_field_comes_back_exactly_and_no_other_changes(
        self, store: StateStore, given: dict[str, Any]
    ) -> None:
        store.create_session("parent", agent_type="agent")
        state = replace(store.create_session("session", agent_type="agent"), **given)
        store.save_state("session", state)
        after = loaded(store, "session")
        assert shown(after, given) == {field: repr(value) for field, value in given.items()}
        state.version, state.updated_at = after.version, after.updated_at
        assert repr(after) == repr(state)

    def test_metadata_keeps_every_key_in_whatever_order(self, store: StateStore, session_id: str) -> None:
        state = loaded(store, session_id)
        state.metadata = {"region": "eu", "": "", "a": "b", "A": "B", "łódź": "🚂"}
        store.save_state(session_id, state)
        assert loaded(store, session_id).metadata == state.metadata

    def test_a_save_overwrites_the_whole_state(self, store: StateStore) -> None:
        store.create_session(
            "session",
            agent_type="agent",
            tags=["t"],
            metadata={"k": "v"},
            custom_state={"old": 1},
            title="Title",
            expires_at=1_900_000_000_000,
        )
        store.save_state("session", SessionState(session_id="session", agent_type="another"))
        after = loaded(store, "session")
        assert after == SessionState(
            session_id="session",
            agent_type="another",
            version=2,
            created_at=after.created_at,
            updated_at=after.updated_at,
        )

    def test_a_save_returns_the_new_version(self, store: StateStore) -> None:
        state = store.create_session("session", agent_type="agent")
        assert store.save_state("session", state) == 2
        assert store.save_state("session", state, expected_version=2) == 3
        assert loaded(store, "session").version == 3

    def test_a_save_on_top_of_another_version_writes_nothing(self, store: StateStore) -> None:
        state = store.create_session("session", agent_type="agent")
        store.save_state("session", state)
        before = contents(store, "session")
        state.custom_state = {"lost": True}
        with pytest.raises(StaleStateError) as caught:
            store.save_state("session", state, expected_version=1)
        assert (caught.value.expected_version, caught.value.current_version) == (1, 2)
        assert contents(store, "session") == before

    def test_a_version_from_the_future_is_refused_too(self, store: StateStore) -> None:
        state = store.create_session("session", agent_type="agent")
        with pytest.raises(StaleStateError):
            store.save_state("session", state, expected_version=2)
        assert loaded(store, "session").version == 1

    def test_of_many_that_save_the_same_version_exactly_one_wins(self, store: StateStore) -> None:
        store.create_session("session", agent_type="agent")

        def save(number: int) -> int:
            state = SessionState(session_id="session", agent_type="agent", custom_state={"by": number})
            store.save_state("session", state, expected_version=1)
            return number

        outcomes = self.at_once(*(lambda number=number: save(number) for number in range(8)))
        (winner,) = [outcome for outcome in outcomes if isinstance(outcome, int)]
        assert [type(outcome) for outcome in outcomes].count(StaleStateError) == 7
        assert loaded(store, "session").custom_state == {"by": winner}
        assert loaded(store, "session").version == 2

    def test_values_for_what_the_store_owns_are_ignored(self, store: StateStore, session_id: str) -> None:
        store.append_messages(session_id, messages(2))
        before = loaded(store, session_id)
        state = loaded(store, session_id)
        state.version = 99
        state.message_count = 42
        state.created_at = state.updated_at = datetime(1999, 1, 1, tzinfo=UTC)
        assert store.save_state(session_id, state) == before.version + 1
        after = loaded(store, session_id)
        assert after.message_count == 2
        assert after.created_at == before.created_at
        assert before.updated_at is not None
        assert after.updated_at is not None
        assert after.updated_at >= before.updated_at

    def test_what_was_saved_is_detached_from_the_store(self, store: StateStore, session_id: str) -> None:
        state = loaded(store, session_id)
        state.custom_state = {"list": [1]}
        store.save_state(session_id, state)
        state.custom_state["list"].append(2)
        assert loaded(store, session_id).custom_state == {"list": [1]}

    def test_a_save_leaves_messages_checkpoints_staging_and_runs_alone(self, store: StateStore) -> None:
        full_session(store, "session")
        before = contents(store, "session")
        state = loaded(store, "session")
        state.custom_state = {"n": 99}
        store.save_state("session", state)
        after = contents(store, "session")
        assert after.pop("state") != before.pop("state")
        assert after == before

    def test_the_state_of_another_session_is_refused(self, store: StateStore) -> None:
        other = store.create_session("other", agent_type="agent")
        store.create_session("session", agent_type="agent")
        before = contents(store, "session")
        with pytest.raises(InvalidPayload):
            store.save_state("session", other)
        assert contents(store, "session") == before

    # The mode can only be written once

    def test_a_mode_can_be_given_later_but_never_changed(self, store: StateStore) -> None:
        state = store.create_session("session", agent_type="agent")
        state.mode = SessionMode.STANDARD
        store.save_state("session", state)
        store.save_state("session", state)
        before = contents(store, "session")
        state.mode = SessionMode.PERSISTENT
        state.custom_state = {"lost": True}
        with pytest.raises(ConflictError):
            store.save_state("session", state)
        assert contents(store, "session") == before

    def test_a_step_cannot_change_the_mode_either(self, store: StateStore) -> None:
        store.create_session("session", agent_type="agent", mode="standard")
        before = contents(store, "session")
        with pytest.raises(ConflictError):
            commit_step(store, "session", 1, append=messages(1), mode=SessionMode.PERSISTENT)
        assert contents(store, "session") == before

    def test_saving_without_a_mode_never_erases_it(self, store: StateStore) -> None:
        state = store.create_session("session", agent_type="agent", mode="persistent")
        state.mode = None
        store.save_state("session", state)
        commit_step(store, "session", 1, mode=None)
        assert loaded(store, "session").mode is SessionMode.PERSISTENT


STORED = {"z": 1, "list": [1, 2], "object": {"a": 1, "b": 2}, "nothing": None}


class CustomStateContract(StoreTests):
    @table(
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

    @table("key", ["z", "object", "nothing"])
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
