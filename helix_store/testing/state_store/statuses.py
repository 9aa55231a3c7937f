"""Tests for statuses, compare-and-set and counters."""

from __future__ import annotations

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.limits import MAX_BIGINT
from helix_store.core.types import (
    SessionStatus,
    StatusChange,
    StatusConflict,
)
from helix_store.exceptions import LimitExceeded
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import contents, loaded

__all__ = ["StatusContract"]


class StatusContract(StoreTests):
    @table("status", list(SessionStatus))
    def test_every_status_can_be_set_from_every_other(
        self, store: StateStore, session_id: str, status: SessionStatus
    ) -> None:
        for number, earlier in enumerate(SessionStatus):
            store.update_status(session_id, earlier)
            assert store.update_status(session_id, status) == 3 + 2 * number
            assert loaded(store, session_id).status is status

    def test_a_status_may_be_given_as_text(self, store: StateStore, session_id: str) -> None:
        store.update_status(session_id, "paused")
        assert loaded(store, session_id).status is SessionStatus.PAUSED

    def test_setting_a_status_sets_the_failure_reason_to_what_is_given(
        self, store: StateStore, session_id: str
    ) -> None:
        store.update_status(session_id, "failed", failure_reason="boom")
        assert loaded(store, session_id).failure_reason == "boom"
        store.update_status(session_id, "failed")
        assert loaded(store, session_id).failure_reason is None
        store.compare_and_set_status(session_id, ["failed"], "failed", failure_reason="again")
        assert loaded(store, session_id).failure_reason == "again"
        store.compare_and_set_status(session_id, ["failed"], "active")
        assert loaded(store, session_id).failure_reason is None

    def test_setting_a_status_changes_nothing_else(self, store: StateStore) -> None:
        store.create_session(
            "session", agent_type="agent", custom_state={"a": 1}, expires_at=1_900_000_000_000
        )
        before = loaded(store, "session")
        store.update_status("session", "running")
        after = loaded(store, "session")
        before.status, before.version, before.updated_at = after.status, after.version, after.updated_at
        assert repr(after) == repr(before)

    # Compare and set

    def test_a_compare_and_set_that_matches_is_a_truthy_change(
        self, store: StateStore, session_id: str
    ) -> None:
        change = store.compare_and_set_status(session_id, {SessionStatus.ACTIVE}, SessionStatus.RUNNING)
        assert change
        assert change == StatusChange(new_version=2)
        assert change.ok is True
        assert loaded(store, session_id).status is SessionStatus.RUNNING
        assert loaded(store, session_id).version == 2

    def test_a_compare_and_set_that_does_not_match_is_a_falsy_conflict_and_writes_nothing(
        self, store: StateStore, session_id: str
    ) -> None:
        store.update_status(session_id, "failed", failure_reason="boom")
        before = contents(store, session_id)
        conflict = store.compare_and_set_status(
            session_id, ["active", "paused"], "running", failure_reason="x"
        )
        assert not conflict
        assert conflict == StatusConflict(current_status=SessionStatus.FAILED, current_version=2)
        assert conflict.ok is False
        assert contents(store, session_id) == before

    @table("expected", [["paused", "active"], ("active",), {"active"}, frozenset(["active"])])
    def test_one_match_among_the_expected_statuses_is_enough(
        self, store: StateStore, session_id: str, expected: list[str]
    ) -> None:
        assert store.compare_and_set_status(session_id, expected, "completed").ok

    def test_expecting_no_status_at_all_always_conflicts(self, store: StateStore, session_id: str) -> None:
        assert not store.compare_and_set_status(session_id, [], "completed")

    def test_setting_the_status_that_is_there_is_a_change_too(
        self, store: StateStore, session_id: str
    ) -> None:
        assert store.compare_and_set_status(session_id, ["active"], "active") == StatusChange(new_version=2)

    def test_of_many_that_compare_and_set_at_once_one_wins_and_the_others_see_its_write(
        self, store: StateStore, session_id: str
    ) -> None:
        outcomes = self.at_once(
            *[lambda: store.compare_and_set_status(session_id, ["active"], "running")] * 8
        )
        assert sorted(outcomes, key=bool) == [
            *[StatusConflict(current_status=SessionStatus.RUNNING, current_version=2)] * 7,
            StatusChange(new_version=2),
        ]

    # Counters

    def test_a_counter_goes_up_by_one_and_returns_its_new_value(
        self, store: StateStore, session_id: str
    ) -> None:
        assert [store.increment_step_count(session_id) for _ in range(3)] == [1, 2, 3]
        assert [store.increment_resume_count(session_id) for _ in range(2)] == [1, 2]
        state = loaded(store, session_id)
        assert (state.step_count, state.resume_count, state.version) == (3, 2, 6)

    def test_counters_incremented_at_once_lose_nothing(self, store: StateStore, session_id: str) -> None:
        steps = self.at_once(*[lambda: store.increment_step_count(session_id)] * 8)
        resumes = self.at_once(*[lambda: store.increment_resume_count(session_id)] * 8)
        assert set(steps) == set(resumes) == set(range(1, 9))
        state = loaded(store, session_id)
        assert (state.step_count, state.resume_count, state.version) == (8, 8, 17)

    def test_a_counter_at_the_largest_number_does_not_go_up(self, store: StateStore, session_id: str) -> None:
        state = loaded(store, session_id)
        state.step_count = state.resume_count = MAX_BIGINT
        store.save_state(session_id, state)
        store.suspend(session_id, kind="suspended_step_partial", context={}, step_id="step")
        before = contents(store, session_id)
        for call, name in (
            (store.increment_step_count, "step_count"),
            (store.increment_resume_count, "resume_count"),
            (store.resume, "resume_count"),
        ):
            with pytest.raises(LimitExceeded) as refused:
                call(session_id)
            assert (refused.value.name, refused.value.limit) == (name, MAX_BIGINT)
        assert contents(store, session_id) == before
