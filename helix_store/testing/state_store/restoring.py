"""Tests for restoring a checkpoint: state and messages are restored, and the version increases."""

from __future__ import annotations

from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import SessionMode, SessionState
from helix_store.exceptions import CheckpointNotFound, StaleStateError
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
    stage,
)

__all__ = ["RestoringContract"]


class RestoringContract(StoreTests):
    def test_state_and_messages_go_back_to_the_checkpoint(self, store: StateStore, session_id: str) -> None:
        first = commit_step(store, session_id, 1, append=messages(2), custom_state={"step": 1})
        commit_step(store, session_id, 2, append=messages(2, first=3), custom_state={"step": 2})
        store.append_messages(session_id, messages(1, first=5))
        store.update_status(session_id, "failed", failure_reason="boom")
        version = loaded(store, session_id).version
        assert store.restore_checkpoint(session_id, first.checkpoint_id) == version + 1
        after = loaded(store, session_id)
        checkpoint = store.get_checkpoint(session_id, first.checkpoint_id)
        assert checkpoint is not None
        assert (after.version, after.message_count) == (version + 1, 2)
        assert store.get_messages(session_id).messages == messages(2)
        checkpoint.state.version, checkpoint.state.updated_at = after.version, after.updated_at
        assert repr(after) == repr(checkpoint.state)

    @table("given", FIELD_ROUNDS)
    def test_every_field_comes_back_exactly(self, store: StateStore, given: dict[str, Any]) -> None:
        store.create_session("parent", agent_type="agent")
        store.create_session("session", agent_type="agent")
        commit = commit_step(store, "session", 1, **given)
        store.save_state(
            "session", SessionState(session_id="session", agent_type="blank", title="blank", user_id="blank")
        )
        store.restore_checkpoint("session", commit.checkpoint_id)
        expected = {field: repr(value) for field, value in {**given, "step_count": 1}.items()}
        assert shown(loaded(store, "session"), expected) == expected

    def test_later_checkpoints_and_all_staging_are_dropped(self, store: StateStore, session_id: str) -> None:
        commits = [commit_step(store, session_id, number) for number in (1, 2, 3, 4)]
        stage(store, session_id, "call", step_id="step-5", merge_changes={"a": 1})
        stage(store, session_id, "call", step_id="step-6", merge_changes={"a": 1})
        store.restore_checkpoint(session_id, commits[1].checkpoint_id)
        listed = [head.checkpoint_id for head in store.list_checkpoints(session_id).items]
        assert listed == [commits[1].checkpoint_id, commits[0].checkpoint_id]
        assert store.get_checkpoint(session_id, commits[2].checkpoint_id) is None
        assert store.get_staged_changes(session_id, "step-5") == []
        assert store.get_staged_changes(session_id, "step-6") == []
        with pytest.raises(CheckpointNotFound):
            store.restore_checkpoint(session_id, commits[3].checkpoint_id)

    def test_the_version_goes_up_even_when_nothing_else_changes(
        self, store: StateStore, session_id: str
    ) -> None:
        commit = commit_step(store, session_id, 1, append=messages(1), custom_state={"a": 1})
        assert [store.restore_checkpoint(session_id, commit.checkpoint_id) for _ in range(2)] == [3, 4]
        assert loaded(store, session_id).custom_state == {"a": 1}
        assert store.get_messages(session_id).messages == messages(1)

    def test_steps_go_on_after_a_restore(self, store: StateStore, session_id: str) -> None:
        first = commit_step(store, session_id, 1, append=messages(2), custom_state={"step": 1})
        commit_step(store, session_id, 2, append=messages(2), custom_state={"step": 2})
        store.restore_checkpoint(session_id, first.checkpoint_id)
        again = commit_step(store, session_id, 2, append=messages(2, first=3), custom_state={"step": "again"})
        assert again.new_version == 5
        assert store.get_messages(session_id).messages == messages(4)
        listed = [head.checkpoint_id for head in store.list_checkpoints(session_id).items]
        assert listed == [again.checkpoint_id, first.checkpoint_id]
        assert store.restore_checkpoint(session_id, first.checkpoint_id) == 6
        assert loaded(store, session_id).custom_state == {"step": 1}
        assert store.get_message_count(session_id) == 2

    def test_a_kept_checkpoint_can_be_restored_after_pruning(
        self, store: StateStore, session_id: str
    ) -> None:
        commits = [
            commit_step(
                store, session_id, number, append=messages(1, first=number), custom_state={"n": number}
            )
            for number in range(1, 8)
        ]
        store.prune_checkpoints(session_id, keep=3)
        store.restore_checkpoint(session_id, commits[4].checkpoint_id)
        assert loaded(store, session_id).custom_state == {"n": 5}
        assert store.get_messages(session_id).messages == messages(5)

    def test_a_mode_that_was_given_since_stays(self, store: StateStore, session_id: str) -> None:
        commit = commit_step(store, session_id, 1)
        commit_step(store, session_id, 2, mode=SessionMode.PERSISTENT)
        store.restore_checkpoint(session_id, commit.checkpoint_id)
        assert loaded(store, session_id).mode is SessionMode.PERSISTENT

    def test_runs_and_sub_sessions_stay(self, store: StateStore) -> None:
        full_session(store, "session")
        before = contents(store, "session")
        oldest = store.list_checkpoints("session").items[-1]
        store.restore_checkpoint("session", oldest.checkpoint_id)
        after = contents(store, "session")
        assert (after["runs"], after["sub_sessions"]) == (before["runs"], before["sub_sessions"])

    # Refused

    def test_a_restore_on_top_of_another_version_writes_nothing(self, store: StateStore) -> None:
        full_session(store, "session")
        before = contents(store, "session")
        oldest = store.list_checkpoints("session").items[-1]
        version = loaded(store, "session").version
        with pytest.raises(StaleStateError):
            store.restore_checkpoint("session", oldest.checkpoint_id, expected_version=version - 1)
        assert contents(store, "session") == before
        restored = store.restore_checkpoint("session", oldest.checkpoint_id, expected_version=version)
        assert restored == version + 1

    def test_only_a_checkpoint_of_the_session_can_be_restored(self, store: StateStore) -> None:
        full_session(store, "session")
        store.create_session("other", agent_type="agent")
        foreign = commit_step(store, "other", 1).checkpoint_id
        before = contents(store, "session")
        for checkpoint_id in ("nothing", foreign):
            with pytest.raises(CheckpointNotFound) as caught:
                store.restore_checkpoint("session", checkpoint_id)
            assert caught.value.checkpoint_id == checkpoint_id
        assert contents(store, "session") == before
