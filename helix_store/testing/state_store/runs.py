"""Tests for runs. A run is the record of one turn of a session."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import (
    SUSPENDED_STATUSES,
    Run,
    RunStatus,
    SessionStatus,
)
from helix_store.exceptions import (
    ConflictError,
    InvalidPayload,
    InvalidQuery,
    RunNotFound,
    StaleStateError,
)
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import Contents, StoreTests
from helix_store.testing.state_store.samples import (
    contents,
    loaded,
    message,
)

__all__ = ["RunContract"]

ENDED = [status for status in RunStatus if status is not RunStatus.RUNNING]


class RunContract(StoreTests):
    # Starting

    def test_a_new_run_is_the_next_turn_and_running(self, store: StateStore, session_id: str) -> None:
        run = store.start_run(session_id, "run-1", start_sequence=17)
        assert run.started_at.utcoffset() is not None
        assert run == Run(
            run_id="run-1",
            session_id=session_id,
            turn=1,
            status=RunStatus.RUNNING,
            step_count=0,
            start_sequence=17,
            started_at=run.started_at,
        )
        assert repr(store.get_current_run(session_id)) == repr(run)

    def test_turns_are_counted_per_session(self, store: StateStore, session_id: str) -> None:
        turns = []
        for number in (1, 2, 3):
            turns.append(store.start_run(session_id, f"run-{number}").turn)
            store.update_run(session_id, f"run-{number}", status="completed")
        store.create_session("other", agent_type="agent")
        assert turns == [1, 2, 3]
        assert store.start_run("other", "run-1").turn == 1

    def test_a_run_gets_a_new_id_unless_one_is_given(self, store: StateStore, session_id: str) -> None:
        assert uuid.UUID(store.start_run(session_id).run_id).version == 7

    def test_a_taken_run_id_is_refused(self, store: StateStore, session_id: str) -> None:
        store.start_run(session_id, "run-1")
        store.update_run(session_id, "run-1", status="completed")
        before = contents(store, session_id)
        with pytest.raises(ConflictError):
            store.start_run(session_id, "run-1")
        assert contents(store, session_id) == before

    def test_a_run_is_refused_while_another_one_is_running(self, store: StateStore, session_id: str) -> None:
        store.start_run(session_id, "run-1")
        before = contents(store, session_id)
        with pytest.raises(ConflictError):
            store.start_run(session_id, "run-2")
        assert contents(store, session_id) == before

    def test_a_run_that_supersedes_interrupts_the_one_that_is_running(
        self, store: StateStore, session_id: str
    ) -> None:
        store.start_run(session_id, "run-1")
        new = store.start_run(session_id, "run-2", supersede=True)
        current, old = store.list_runs(session_id)
        assert repr(current) == repr(new) == repr(store.get_current_run(session_id))
        assert (new.turn, old.run_id, old.status) == (2, "run-1", RunStatus.INTERRUPTED)
        assert old.completion_reason == "superseded"
        assert old.ended_at is not None
        assert old.ended_at.utcoffset() is not None

    def test_superseding_when_nothing_runs_is_a_plain_start(self, store: StateStore, session_id: str) -> None:
        store.start_run(session_id, "run-1", supersede=True)
        store.update_run(session_id, "run-1", status="failed", completion_reason="own reason")
        store.start_run(session_id, "run-2", supersede=True)
        assert store.list_runs(session_id)[1].completion_reason == "own reason"
        assert store.list_runs(session_id)[1].status is RunStatus.FAILED

    def test_a_refused_start_does_not_use_up_a_turn(self, store: StateStore, session_id: str) -> None:
        store.start_run(session_id, "run-1")
        with pytest.raises(ConflictError):
            store.start_run(session_id, "run-2")
        store.update_run(session_id, "run-1", status="completed")
        assert store.start_run(session_id, "run-2").turn == 2

    def test_of_many_that_start_at_once_exactly_one_wins(self, store: StateStore, session_id: str) -> None:
        outcomes = self.at_once(
            *(lambda number=number: store.start_run(session_id, f"run-{number}") for number in range(8))
        )
        (winner,) = [outcome for outcome in outcomes if isinstance(outcome, Run)]
        assert [type(outcome) for outcome in outcomes].count(ConflictError) == 7
        assert repr(store.list_runs(session_id)) == repr([winner])

    @table("status", [status for status in SessionStatus if status != "active"])
    def test_a_start_sets_the_session_active_as_a_new_version(
        self, store: StateStore, session_id: str, status: SessionStatus
    ) -> None:
        store.update_status(session_id, status)
        store.start_run(session_id)
        state = loaded(store, session_id)
        assert (state.status, state.version) == (SessionStatus.ACTIVE, 3)

    def test_a_start_in_an_active_session_is_no_new_version(self, store: StateStore, session_id: str) -> None:
        before = repr(store.load_state(session_id))
        store.start_run(session_id)
        assert repr(store.load_state(session_id)) == before

    def test_a_start_on_top_of_another_version_writes_nothing(
        self, store: StateStore, session_id: str
    ) -> None:
        store.update_status(session_id, "paused")
        before = contents(store, session_id)
        with pytest.raises(StaleStateError):
            store.start_run(session_id, expected_version=1)
        assert contents(store, session_id) == before
        assert store.start_run(session_id, expected_version=2).turn == 1

    def test_a_start_on_top_of_another_version_of_an_active_session_writes_nothing(
        self, store: StateStore, session_id: str
    ) -> None:
        store.append_messages(session_id, [message("hello")])
        before = contents(store, session_id)
        with pytest.raises(StaleStateError):
            store.start_run(session_id, expected_version=1)
        assert contents(store, session_id) == before
        assert store.start_run(session_id, expected_version=2).turn == 1

    # Updating

    @table("status", ENDED)
    def test_any_status_but_running_ends_a_run(
        self, store: StateStore, session_id: str, status: RunStatus
    ) -> None:
        store.start_run(session_id, "run-1")
        run = store.update_run(session_id, "run-1", status=status.value)
        assert run.status is status
        assert run.ended_at is not None
        assert run.ended_at >= run.started_at
        assert repr(store.list_runs(session_id)) == repr([run])
        assert store.get_current_run(session_id) is None
        assert store.start_run(session_id).turn == 2

    def test_what_an_update_does_not_give_stays(self, store: StateStore, session_id: str) -> None:
        store.start_run(session_id, "run-1", start_sequence=3)
        store.update_run(session_id, "run-1", status="running", step_count=4)
        store.update_run(session_id, "run-1", status="failed", completion_reason="boom", error={"code": 1.0})
        run = store.update_run(session_id, "run-1", status="failed")
        assert (run.step_count, run.completion_reason, run.start_sequence, run.turn) == (4, "boom", 3, 1)
        assert repr(run.error) == repr({"code": 1.0})

    def test_updating_a_run_to_running_does_not_end_it(self, store: StateStore, session_id: str) -> None:
        store.start_run(session_id, "run-1")
        run = store.update_run(session_id, "run-1", status="running", step_count=1)
        assert run.ended_at is None
        assert repr(store.get_current_run(session_id)) == repr(run)

    @table("end", ["completed", "failed", "superseded"])
    def test_a_run_that_is_over_does_not_run_again(
        self, store: StateStore, session_id: str, end: str
    ) -> None:
        store.start_run(session_id, "run-1")
        if end == "superseded":
            store.start_run(session_id, "run-2", supersede=True)
            store.update_run(session_id, "run-2", status="completed")
        else:
            store.update_run(session_id, "run-1", status=end)
        before = contents(store, session_id)
        with pytest.raises(ConflictError, match="run-1"):
            store.update_run(session_id, "run-1", status="running", step_count=9)
        assert contents(store, session_id) == before
        assert store.get_current_run(session_id) is None
        store.start_run(session_id)

    @table("status", [*SUSPENDED_STATUSES, RunStatus.INTERRUPTED])
    def test_a_run_that_waits_or_was_interrupted_may_run_again(
        self, store: StateStore, session_id: str, status: RunStatus
    ) -> None:
        store.start_run(session_id, "run-1")
        store.update_run(session_id, "run-1", status=status)
        run = store.update_run(session_id, "run-1", status="running")
        assert run.ended_at is None
        assert repr(store.get_current_run(session_id)) == repr(run)

    def test_a_run_that_waits_does_not_run_again_beside_another_one(
        self, store: StateStore, session_id: str
    ) -> None:
        store.start_run(session_id, "run-1")
        store.update_run(session_id, "run-1", status="interrupted")
        store.start_run(session_id, "run-2")
        before = contents(store, session_id)
        with pytest.raises(ConflictError):
            store.update_run(session_id, "run-1", status="running")
        assert contents(store, session_id) == before

    def test_updating_a_run_is_no_new_version(self, store: StateStore, session_id: str) -> None:
        store.start_run(session_id, "run-1")
        before = repr(store.load_state(session_id))
        store.update_run(session_id, "run-1", status="completed", step_count=3)
        assert repr(store.load_state(session_id)) == before

    def test_updating_a_run_that_the_session_does_not_have_fails(
        self, store: StateStore, session_id: str
    ) -> None:
        store.create_session("other", agent_type="agent")
        store.start_run("other", "run of another session")
        for run_id in ("nobody", "run of another session"):
            with pytest.raises(RunNotFound) as caught:
                store.update_run(session_id, run_id, status="completed")
            assert caught.value.run_id == run_id
        current = store.get_current_run("other")
        assert current is not None
        assert current.run_id == "run of another session"

    @table(
        "bad",
        [
            {"status": "active"},
            {"status": None},
            {"status": "completed", "step_count": -1},
            {"status": "completed", "step_count": 1.0},
            {"status": "completed", "step_count": True},
            {"status": "completed", "completion_reason": 7},
            {"status": "completed", "completion_reason": "\x00"},
            {"status": "completed", "error": {1}},
        ],
        shared=True,
    )
    def test_a_run_update_that_cannot_be_stored_is_refused(
        self, stored: StateStore, before: Contents, bad: dict[str, Any]
    ) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            stored.update_run("session", "run-1", **bad)
        assert contents(stored, "session") == before

    # Reading

    def test_no_run_is_current_before_the_first_one(self, store: StateStore, session_id: str) -> None:
        assert store.get_current_run(session_id) is None
        assert store.list_runs(session_id) == []

    def test_runs_are_listed_newest_first_in_pages(self, store: StateStore, session_id: str) -> None:
        for _ in range(5):
            store.start_run(session_id, supersede=True)
        assert [run.turn for run in store.list_runs(session_id)] == [5, 4, 3, 2, 1]
        assert [run.turn for run in store.list_runs(session_id, limit=2)] == [5, 4]
        assert [run.turn for run in store.list_runs(session_id, limit=2, offset=3)] == [2, 1]
        assert [run.turn for run in store.list_runs(session_id, limit=10**6, offset=4)] == [1]
        assert store.list_runs(session_id, offset=5) == []

    @table(
        "page", [{"limit": 0}, {"limit": -1}, {"limit": "5"}, {"offset": -1}, {"offset": 1.0}], shared=True
    )
    def test_a_page_of_runs_that_makes_no_sense_is_refused(
        self, store: StateStore, session_id: str, page: dict[str, Any]
    ) -> None:
        with self.storage_untouched(), pytest.raises(InvalidQuery):
            store.list_runs(session_id, **page)
