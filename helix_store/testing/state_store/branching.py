"""Tests for branching: a new session starts from a checkpoint of another one."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import (
    SessionMode,
    SessionState,
    SessionStatus,
)
from helix_store.exceptions import (
    CheckpointNotFound,
    InvalidPayload,
    InvalidQuery,
    SessionExists,
)
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import (
    FIELD_VALUES,
    commit_step,
    contents,
    full_session,
    loaded,
    messages,
)

__all__ = ["BranchingContract"]

RICHEST = {field: value for field, value in FIELD_VALUES if value}
"""A state with a value in every field."""


class BranchingContract(StoreTests):
    @pytest.fixture
    def source(self, store: StateStore) -> list[str]:
        """Return the checkpoints of session ``source``: three steps of two messages, then another message."""
        store.create_session("source", agent_type="agent")
        commits = [
            commit_step(
                store,
                "source",
                number,
                append=messages(2, first=2 * number - 1),
                custom_state={"step": number},
                title=f"Step {number}",
            )
            for number in (1, 2, 3)
        ]
        store.append_messages("source", messages(1, first=7))
        store.merge_custom_state("source", {"step": "now"})
        return [commit.checkpoint_id for commit in commits]

    # The starting point

    def test_a_branch_from_a_checkpoint_has_its_state_and_messages(
        self, store: StateStore, source: list[str]
    ) -> None:
        branch = store.branch_session("source", source[1])
        assert (branch.custom_state, branch.title, branch.message_count) == ({"step": 2}, "Step 2", 4)
        assert store.get_messages(branch.session_id).messages == messages(4)

    def test_a_branch_without_a_point_starts_at_the_latest_checkpoint(
        self, store: StateStore, source: list[str]
    ) -> None:
        branch = store.branch_session("source")
        assert (branch.custom_state, branch.message_count) == ({"step": 3}, 6)
        assert store.get_messages(branch.session_id).messages == messages(6)

    def test_a_branch_of_a_session_without_checkpoints_starts_as_it_is_now(self, store: StateStore) -> None:
        store.create_session("plain", agent_type="agent", custom_state={"a": 1})
        store.append_messages("plain", messages(3))
        branch = store.branch_session("plain")
        assert (branch.custom_state, branch.message_count) == ({"a": 1}, 3)
        assert store.get_messages(branch.session_id).messages == messages(3)

    @table(("index", "step"), [(0, "now"), (1, "now"), (2, 1), (3, 1), (4, 2), (6, 3), (7, 3)], shared=True)
    def test_a_branch_from_a_message_has_the_newest_state_within_it(
        self, store: StateStore, source: list[str], index: int, step: int | str
    ) -> None:
        branch = store.branch_session("source", message_index=index)
        assert (branch.custom_state, branch.message_count) == ({"step": step}, index)
        assert store.get_messages(branch.session_id).messages == messages(index)

    def test_a_checkpoint_and_a_message_together_are_refused(
        self, store: StateStore, source: list[str]
    ) -> None:
        with self.storage_untouched(), pytest.raises(InvalidQuery):
            store.branch_session("source", source[0], message_index=1, new_session_id="branch")
        assert not store.session_exists("branch")

    @table("index", [8, 10**9, -1, 1.0, "1", True], shared=True)
    def test_a_message_that_is_not_there_is_refused(
        self, store: StateStore, source: list[str], index: Any
    ) -> None:
        with pytest.raises(InvalidQuery):
            store.branch_session("source", message_index=index, new_session_id="branch")
        assert not store.session_exists("branch")

    def test_only_a_checkpoint_of_the_session_can_be_branched_from(
        self, store: StateStore, source: list[str]
    ) -> None:
        store.create_session("other", agent_type="agent")
        foreign = commit_step(store, "other", 1).checkpoint_id
        for checkpoint_id in ("nothing", foreign):
            with pytest.raises(CheckpointNotFound):
                store.branch_session("source", checkpoint_id, new_session_id="branch")
        assert not store.session_exists("branch")

    # The identity of the branch

    def test_a_branch_gets_a_new_id_unless_one_is_given(self, store: StateStore, source: list[str]) -> None:
        assert uuid.UUID(store.branch_session("source").session_id).version == 7
        assert store.branch_session("source", new_session_id="branch").session_id == "branch"
        assert store.session_exists("branch")

    def test_a_taken_id_is_refused_and_that_session_stays_as_it_is(
        self, store: StateStore, source: list[str]
    ) -> None:
        full_session(store, "taken")
        before = contents(store, "taken")
        for taken in ("taken", "source"):
            with pytest.raises(SessionExists):
                store.branch_session("source", new_session_id=taken)
        assert contents(store, "taken") == before

    @table("name", ["", "\x00", "x" * 256, 7], shared=True)
    def test_what_is_no_id_is_refused(self, store: StateStore, source: list[str], name: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            store.branch_session("source", new_session_id=name)

    def test_a_title_can_be_given(self, store: StateStore, source: list[str]) -> None:
        assert store.branch_session("source", title="Another way").title == "Another way"
        assert store.branch_session("source", title="").title == ""
        assert store.branch_session("source").title == "Step 3"

    # The copied data

    def test_a_branch_keeps_who_it_is_and_drops_what_was_under_way(self, store: StateStore) -> None:
        store.create_session("parent", agent_type="agent")
        store.create_session("source", agent_type="agent", mode="persistent")
        commit_step(store, "source", 7, append=messages(1), **RICHEST)
        branch = store.branch_session("source", new_session_id="branch")
        kept = (
            "agent_type",
            "step_count",
            "mode",
            "custom_state",
            "user_id",
            "tags",
            "title",
            "workspace_id",
            "directory",
            "completed_client_tool_calls",
        )
        expected = SessionState(
            session_id="branch",
            metadata={**RICHEST["metadata"], "branched_from": "source"},
            root_session_id="branch",
            stream_id="branch",
            version=1,
            message_count=1,
            created_at=branch.created_at,
            updated_at=branch.updated_at,
            **{name: RICHEST[name] for name in kept},
        )
        assert branch == expected
        assert (branch.status, branch.mode) == (SessionStatus.ACTIVE, SessionMode.PERSISTENT)

    def test_a_branch_names_the_session_that_it_was_made_from_and_no_older_one(
        self, store: StateStore, source: list[str]
    ) -> None:
        store.branch_session("source", new_session_id="first")
        second = store.branch_session("first", new_session_id="second")
        assert second.metadata == {"branched_from": "first"}

    def test_what_branching_returns_is_what_load_returns(self, store: StateStore, source: list[str]) -> None:
        branch = store.branch_session("source", source[0])
        assert repr(store.load_state(branch.session_id)) == repr(branch)

    def test_staging_runs_sub_sessions_and_interrupts_stay_behind(self, store: StateStore) -> None:
        full_session(store, "session")
        store.branch_session("session", new_session_id="branch")
        assert store.get_staged_changes("branch", "step-3") == []
        assert store.list_runs("branch") == []
        assert store.get_sub_session_refs("branch") == []
        assert store.check_interrupt("branch") is None

    # Independence from the source

    def test_branching_leaves_the_source_as_it_is(self, store: StateStore) -> None:
        full_session(store, "session")
        before = contents(store, "session")
        for number in range(3):
            store.branch_session("session", new_session_id=f"branch {number}")
        assert contents(store, "session") == before

    def test_a_branch_and_its_source_go_on_independently(self, store: StateStore, source: list[str]) -> None:
        store.branch_session("source", source[0], new_session_id="branch")
        commit = commit_step(store, "branch", 2, append=messages(1, first=3), custom_state={"step": "other"})
        commit_step(store, "source", 4, append=messages(1, first=8), custom_state={"step": 4})
        assert commit.new_version == 2
        assert store.get_messages("branch").messages == messages(3)
        assert store.get_messages("source").messages == messages(8)
        assert loaded(store, "branch").custom_state == {"step": "other"}
        assert loaded(store, "source").custom_state == {"step": 4}
        assert store.restore_checkpoint("branch", commit.checkpoint_id) == 3

    def test_a_branch_outlives_its_source(self, store: StateStore, source: list[str]) -> None:
        branch = store.branch_session("source", source[1], new_session_id="branch")
        assert store.delete_session("source") == 1
        assert repr(store.load_state("branch")) == repr(branch)
        assert store.get_messages("branch").messages == messages(4)
