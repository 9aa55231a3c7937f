"""Tests for the atomic step: state, messages, staged changes and checkpoint in one write."""

from __future__ import annotations

from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.ids import parse_checkpoint_id
from helix_store.core.types import (
    RunStatus,
    SessionState,
    SessionStatus,
    StepCommit,
    StepInfo,
)
from helix_store.exceptions import (
    HelixStoreError,
    InvalidPayload,
    PatchError,
    RunNotFound,
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
    message,
    messages,
    shown,
    stage,
    step,
)

__all__ = ["StepContract"]


class StepContract(StoreTests):
    def test_a_step_commits_state_messages_staging_and_checkpoint_as_one_version(
        self, store: StateStore
    ) -> None:
        store.create_session("session", agent_type="agent", custom_state={"old": True})
        store.append_messages("session", messages(1))
        stage(store, "session", "call", merge_changes={"staged": True})
        state = loaded(store, "session")
        state.custom_state, state.status = {"n": 1}, SessionStatus.RUNNING
        commit = store.save_state_and_promote_staging("session", state, messages(2, first=2), step(1))
        assert type(commit) is StepCommit
        assert commit.new_version == 3
        after = loaded(store, "session")
        assert (after.version, after.status, after.message_count) == (3, SessionStatus.RUNNING, 3)
        assert repr(after.custom_state) == repr({"n": 1, "staged": True})
        assert store.get_messages("session").messages == messages(3)
        assert store.get_staged_changes("session", "step-1") == []
        latest = store.get_latest_checkpoint("session")
        assert latest is not None
        assert latest.checkpoint_id == commit.checkpoint_id

    def test_the_checkpoint_records_the_step_and_the_state_as_it_was_committed(
        self, store: StateStore
    ) -> None:
        store.create_session("session", agent_type="agent")
        store.start_run("session", "run-1")
        stage(store, "session", "call", step_id="step 4", merge_changes={"staged": 1})
        state = loaded(store, "session")
        state.status = SessionStatus.PAUSED
        commit = store.save_state_and_promote_staging(
            "session", state, messages(2), StepInfo("step 4", 4, 17), run_id="run-1"
        )
        checkpoint = store.get_checkpoint("session", commit.checkpoint_id)
        assert checkpoint is not None
        assert (checkpoint.session_id, checkpoint.run_id, checkpoint.step_id) == (
            "session",
            "run-1",
            "step 4",
        )
        assert (checkpoint.step_count, checkpoint.stream_sequence, checkpoint.message_count) == (4, 17, 2)
        assert checkpoint.status is SessionStatus.PAUSED
        assert checkpoint.created_at.utcoffset() is not None
        assert checkpoint.state.version == commit.new_version
        current = loaded(store, "session")
        assert checkpoint.state.updated_at is not None
        checkpoint.state.updated_at, checkpoint.state.created_at = current.updated_at, current.created_at
        assert repr(checkpoint.state) == repr(current)

    def test_the_id_of_a_checkpoint_names_session_step_and_time(self, store: StateStore) -> None:
        store.create_session("my-session-s9-t9", agent_type="agent")
        commit = commit_step(store, "my-session-s9-t9", 4)
        parsed = parse_checkpoint_id(commit.checkpoint_id)
        assert (parsed.session_id, parsed.step_count) == ("my-session-s9-t9", 4)
        created = loaded(store, "my-session-s9-t9").created_at
        assert created is not None
        assert abs(parsed.epoch_ms - created.timestamp() * 1000) < 3_600_000

    @table("said", [0, 3, 9])
    @table("staged", [False, True])
    def test_the_number_of_the_step_becomes_that_of_the_state(
        self, store: StateStore, session_id: str, said: int, staged: bool
    ) -> None:
        if staged:
            stage(store, session_id, "call", step_id="step-4", merge_changes={"n": 1})
        state = loaded(store, session_id)
        state.step_count = said
        commit = store.save_state_and_promote_staging(session_id, state, [], step(4))
        checkpoint = store.get_checkpoint(session_id, commit.checkpoint_id)
        assert checkpoint is not None
        assert (checkpoint.step_count, checkpoint.state.step_count) == (4, 4)
        assert loaded(store, session_id).step_count == 4
        assert [head.step_count for head in store.list_sessions().sessions] == [4]
        assert store.increment_step_count(session_id) == 5
        store.restore_checkpoint(session_id, commit.checkpoint_id)
        assert loaded(store, session_id).step_count == 4
        assert store.branch_session(session_id, commit.checkpoint_id).step_count == 4

    @table("given", FIELD_ROUNDS)
    def test_every_field_comes_back_from_the_session_and_from_the_checkpoint(
        self, store: StateStore, given: dict[str, Any]
    ) -> None:
        store.create_session("parent", agent_type="agent")
        store.create_session("session", agent_type="agent")
        commit = commit_step(store, "session", 1, **given)
        # The number of the step replaces that of the state.
        expected = {field: repr(value) for field, value in {**given, "step_count": 1}.items()}
        assert shown(loaded(store, "session"), expected) == expected
        checkpoint = store.get_checkpoint("session", commit.checkpoint_id)
        assert checkpoint is not None
        assert shown(checkpoint.state, expected) == expected

    def test_staged_changes_go_on_top_of_the_state_that_is_given(self, store: StateStore) -> None:
        store.create_session("session", agent_type="agent", custom_state={"list": ["stored"]})
        stage(store, "session", "call-1", merge_changes={"list": ["staged"]})
        stage(store, "session", "call-2", patches=[{"op": "add", "path": "/list/0", "value": "first"}])
        commit_step(store, "session", 1, custom_state={"list": ["given"]})
        assert loaded(store, "session").custom_state == {"list": ["first", "given", "staged"]}

    def test_a_step_promotes_its_own_staging_only(self, store: StateStore, session_id: str) -> None:
        stage(store, session_id, "call", step_id="step-2", merge_changes={"a": 2})
        commit_step(store, session_id, 1)
        assert loaded(store, session_id).custom_state == {}
        assert len(store.get_staged_changes(session_id, "step-2")) == 1
        commit_step(store, session_id, 2)
        assert loaded(store, session_id).custom_state == {"a": 2}

    def test_a_step_without_messages_and_staging_is_a_version_and_a_checkpoint(
        self, store: StateStore, session_id: str
    ) -> None:
        commits = [commit_step(store, session_id, number) for number in (1, 1, 2)]
        assert [commit.new_version for commit in commits] == [2, 3, 4]
        assert len({commit.checkpoint_id for commit in commits}) == 3
        assert store.list_checkpoints(session_id).total == 3

    def test_the_given_state_is_not_changed_and_detached_from_the_store(
        self, store: StateStore, session_id: str
    ) -> None:
        stage(store, session_id, "call", merge_changes={"list": [2]})
        state = loaded(store, session_id)
        state.custom_state = {"list": [1]}
        before = repr(state)
        appended = [message("hello")]
        commit = store.save_state_and_promote_staging(session_id, state, appended, step(1))
        assert repr(state) == before
        state.custom_state["list"].append(3)
        appended[0]["content"] = "changed"
        checkpoint = store.get_checkpoint(session_id, commit.checkpoint_id)
        assert checkpoint is not None
        assert checkpoint.state.custom_state == loaded(store, session_id).custom_state == {"list": [1, 2]}
        assert store.get_messages(session_id).messages == [message("hello")]

    # All or nothing

    def _refused(self, store: StateStore, error: type[HelixStoreError], **arguments: Any) -> None:
        """Run a full step that is refused, and check that no part of it is stored."""
        state = loaded(store, "session")
        state.custom_state = {"lost": True}
        given: dict[str, Any] = {"append_messages": messages(2), "step": step(3), **arguments}
        before = contents(store, "session")
        with pytest.raises(error):
            store.save_state_and_promote_staging("session", given.pop("state", state), **given)
        assert contents(store, "session") == before

    def test_a_step_on_top_of_another_version_writes_nothing(self, store: StateStore) -> None:
        full_session(store, "session")
        version = loaded(store, "session").version
        self._refused(store, StaleStateError, expected_version=version - 1)
        self._refused(store, StaleStateError, expected_version=version + 1)

    def test_a_step_with_a_bad_staged_patch_writes_nothing(self, store: StateStore) -> None:
        full_session(store, "session")
        stage(store, "session", "bad", step_id="step-3", patches=[{"op": "remove", "path": "/missing"}])
        self._refused(store, PatchError)

    def test_a_step_with_a_bad_message_writes_nothing(self, store: StateStore) -> None:
        full_session(store, "session")
        self._refused(store, InvalidPayload, append_messages=[message("good"), {"content": "no role"}])

    def test_a_step_with_the_state_of_another_session_writes_nothing(self, store: StateStore) -> None:
        full_session(store, "session")
        other = SessionState(session_id="other", agent_type="agent")
        self._refused(store, InvalidPayload, state=other)

    def test_a_step_of_an_unknown_run_writes_nothing(self, store: StateStore) -> None:
        full_session(store, "session")
        store.create_session("other", agent_type="agent")
        store.start_run("other", "run of another session")
        for run_id in ("nobody", "run of another session"):
            self._refused(store, RunNotFound, run_id=run_id)

    def test_a_step_may_belong_to_a_run_that_has_ended(self, store: StateStore) -> None:
        full_session(store, "session")
        store.update_run("session", "run-1", status=RunStatus.COMPLETED)
        state = loaded(store, "session")
        commit = store.save_state_and_promote_staging("session", state, [], step(3), run_id="run-1")
        checkpoint = store.get_checkpoint("session", commit.checkpoint_id)
        assert checkpoint is not None
        assert checkpoint.run_id == "run-1"

    # Concurrency

    def test_of_many_steps_on_the_same_version_exactly_one_is_committed(
        self, store: StateStore, session_id: str
    ) -> None:
        state = loaded(store, session_id)

        def commit(number: int) -> StepCommit:
            return store.save_state_and_promote_staging(
                session_id, state, messages(1, first=number), step(number), expected_version=1
            )

        outcomes = self.at_once(*(lambda number=number: commit(number) for number in range(8)))
        (winner,) = [outcome for outcome in outcomes if isinstance(outcome, StepCommit)]
        assert [type(outcome) for outcome in outcomes].count(StaleStateError) == 7
        assert store.get_messages(session_id).messages == messages(1, first=outcomes.index(winner))
        assert store.list_checkpoints(session_id).total == 1

    def test_a_change_staged_while_the_step_commits_is_promoted_or_stays_staged(
        self, store: StateStore, session_id: str
    ) -> None:
        def stage_some(name: str) -> None:
            for number in range(5):
                stage(store, session_id, f"{name}{number}", merge_changes={f"{name}{number}": True})

        def commit_some() -> None:
            for _ in range(5):
                commit_step(store, session_id, 1)

        self.at_once(commit_some, *(lambda name=name: stage_some(name) for name in "abc"))
        promoted = set(loaded(store, session_id).custom_state)
        staged = {changes.tool_call_id for changes in store.get_staged_changes(session_id, "step-1")}
        assert promoted | staged == {f"{name}{number}" for name in "abc" for number in range(5)}
        assert not promoted & staged
