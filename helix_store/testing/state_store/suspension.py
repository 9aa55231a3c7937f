"""Tests for suspending a session, and for resuming it exactly once."""

from __future__ import annotations

from typing import Any, Final

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.limits import Limits
from helix_store.core.types import (
    SUSPENDED_STATUSES,
    RunStatus,
    SessionState,
    SessionStatus,
)
from helix_store.exceptions import (
    ConflictError,
    InvalidPayload,
    LimitExceeded,
    StaleStateError,
)
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import Contents, StoreTests
from helix_store.testing.state_store.samples import (
    contents,
    full_session,
    loaded,
)

__all__ = ["SuspensionContract"]

KIND: Final = RunStatus.SUSPENDED_CLIENT_TOOL
IN_A_WHILE: Final = 4_000_000_000_000


class SuspensionContract(StoreTests):
    @table("kind", SUSPENDED_STATUSES)
    def test_a_suspended_session_is_paused_with_everything_it_was_given(
        self, store: StateStore, session_id: str, kind: RunStatus
    ) -> None:
        version = store.suspend(
            session_id,
            kind=kind,
            context={"at": 3, "text": "\x00\ud800"},
            pending={"call-1": {"tool_name": "ask", "deadline": IN_A_WHILE}},
            awaiting_children=[{"sub_session_id": "child"}],
            step_id="step-7",
            tracing={"traceparent": "00-1-2-01"},
            expires_at=IN_A_WHILE,
        )
        state = loaded(self.make_store(), session_id)
        assert version == state.version == 2
        assert state.status is SessionStatus.PAUSED
        assert state.suspension_kind is kind
        assert state.suspension_context == {"at": 3, "text": "\x00\ud800"}
        assert state.suspended_awaiting_children == [{"sub_session_id": "child"}]
        assert state.suspended_step_id == "step-7"
        assert state.tracing_context == {"traceparent": "00-1-2-01"}
        assert state.expires_at == IN_A_WHILE
        assert list(state.pending_client_tool_calls) == ["call-1"]
        assert state.client_tool_call_ownership == {"call-1": session_id}

    def test_resuming_returns_the_continuation_that_it_clears(
        self, store: StateStore, session_id: str
    ) -> None:
        store.suspend(
            session_id,
            kind=KIND,
            context={"at": 3},
            pending={"call-1": {"tool_name": "ask"}},
            awaiting_children=[],
            step_id="step-7",
            tracing={"trace": "1"},
            expires_at=IN_A_WHILE,
        )
        store.submit_tool_result(session_id, "call-1", result=1)
        resumed = self.make_store().resume(session_id)
        state = loaded(store, session_id)
        assert (state.status, state.resume_count, state.version) == (SessionStatus.ACTIVE, 1, 4)
        assert state.suspension_kind is None
        assert state.suspension_context is None
        assert state.suspended_awaiting_children is None
        assert state.suspended_step_id is None
        assert state.tracing_context is None
        assert state.expires_at is None
        assert resumed.suspension_kind is KIND
        assert resumed.suspension_context == {"at": 3}
        assert resumed.suspended_awaiting_children == []
        assert resumed.suspended_step_id == "step-7"
        assert resumed.tracing_context == {"trace": "1"}
        for name in ("suspension_kind", "suspension_context", "suspended_awaiting_children"):
            setattr(resumed, name, None)
        resumed.suspended_step_id = resumed.tracing_context = None
        assert repr(resumed) == repr(state)
        assert store.take_tool_results(session_id)["call-1"]["result"] == 1

    def test_what_a_suspension_leaves_out_stays_or_is_empty(self, store: StateStore) -> None:
        full_session(store, "session")
        state = loaded(store, "session")
        state.expires_at, state.tracing_context = IN_A_WHILE, {"trace": "1"}
        state.suspended_step_id = "an old one"
        store.save_state("session", state)
        store.suspend("session", kind=KIND, context={})
        suspended = loaded(store, "session")
        assert (suspended.expires_at, suspended.tracing_context) == (IN_A_WHILE, {"trace": "1"})
        assert (suspended.suspended_step_id, suspended.suspended_awaiting_children) == (None, None)
        assert suspended.custom_state == state.custom_state
        assert store.resume("session").suspension_context == {}

    def test_a_suspension_ends_the_run_that_is_running(self, store: StateStore, session_id: str) -> None:
        store.start_run(session_id, "run-1")
        store.suspend(session_id, kind=KIND, context={})
        (run,) = store.list_runs(session_id)
        assert run.status is KIND
        assert run.ended_at is not None
        assert store.get_current_run(session_id) is None
        store.resume(session_id)
        assert store.start_run(session_id, "run-2").turn == 2

    def test_the_root_records_the_calls_of_a_suspended_child(self, store: StateStore) -> None:
        store.create_session("root", agent_type="agent")
        store.create_session("child", agent_type="agent", parent_session_id="root")
        store.suspend("child", kind=KIND, context={}, pending={"call-1": {"tool_name": "ask"}})
        assert [loaded(store, name).version for name in ("root", "child")] == [1, 2]
        assert loaded(store, "root").client_tool_call_ownership == {"call-1": "child"}
        assert store.submit_tool_result("root", "call-1", result=1).session_id == "child"

    def test_a_session_that_is_not_suspended_cannot_be_resumed(
        self, store: StateStore, session_id: str
    ) -> None:
        store.update_status(session_id, "paused")
        store.create_session("other", agent_type="agent")
        for name in (session_id, "other"):
            before = contents(store, name)
            with pytest.raises(ConflictError):
                store.resume(name)
            assert contents(store, name) == before

    def test_a_session_is_resumed_once(self, store: StateStore, session_id: str) -> None:
        version = store.suspend(session_id, kind=KIND, context={})
        store.resume(session_id, expected_version=version)
        before = contents(store, session_id)
        for expected_version in (None, version, version + 1):
            with pytest.raises(ConflictError):
                store.resume(session_id, expected_version=expected_version)
        assert contents(store, session_id) == before

    def test_an_interrupted_suspension_can_be_resumed_and_an_ended_one_cannot(
        self, store: StateStore, session_id: str
    ) -> None:
        store.suspend(session_id, kind=KIND, context={"at": 1})
        for status in ("failed", "completed"):
            store.update_status(session_id, status)
            with pytest.raises(ConflictError):
                store.resume(session_id)
        store.update_status(session_id, "interrupted")
        assert store.resume(session_id).suspension_context == {"at": 1}

    @table("status", ["failed", "completed"])
    def test_a_session_that_has_ended_cannot_be_suspended(
        self, store: StateStore, session_id: str, status: str
    ) -> None:
        store.update_status(session_id, status)
        before = contents(store, session_id)
        with pytest.raises(ConflictError):
            store.suspend(session_id, kind=KIND, context={}, pending={"call-1": {"tool_name": "ask"}})
        assert contents(store, session_id) == before

    def test_suspending_and_resuming_ask_for_the_version_they_expect(self, store: StateStore) -> None:
        full_session(store, "session")
        before = contents(store, "session")
        with pytest.raises(StaleStateError):
            store.suspend("session", kind=KIND, context={}, expected_version=1)
        assert contents(store, "session") == before
        version = store.suspend(
            "session", kind=KIND, context={}, expected_version=loaded(store, "session").version
        )
        before = contents(store, "session")
        with pytest.raises(StaleStateError) as caught:
            store.resume("session", expected_version=1)
        assert caught.value.current_version == version
        assert contents(store, "session") == before

    def test_a_call_that_conflicts_leaves_the_session_as_it_is(
        self, store: StateStore, session_id: str
    ) -> None:
        store.start_run(session_id, "run-1")
        store.add_pending_tool_calls(session_id, {"call-1": {"tool_name": "ask"}})
        before = contents(store, session_id)
        with pytest.raises(ConflictError):
            store.suspend(session_id, kind=KIND, context={}, pending={"call-1": {"tool_name": "pay"}})
        assert contents(store, session_id) == before

    @table(
        "bad",
        [
            {"kind": "running"},
            {"kind": "completed"},
            {"kind": "asleep"},
            {"kind": None},
            {"context": None},
            {"context": []},
            {"context": {"a": {1}}},
            {"pending": []},
            {"awaiting_children": {}},
            {"awaiting_children": "child"},
            {"step_id": ""},
            {"step_id": 7},
            {"tracing": "trace"},
            {"expires_at": 1_900_000_000},
            {"expires_at": 253_402_300_800_000},
            {"expires_at": -1},
            {"expires_at": "tomorrow"},
            {"expected_version": "1"},
        ],
        shared=True,
    )
    def test_a_suspension_that_makes_no_sense_is_refused(
        self, stored: StateStore, before: Contents, bad: dict[str, Any]
    ) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            stored.suspend("session", **{"kind": KIND, "context": {}, **bad})
        assert contents(stored, "session") == before

    def test_a_context_over_the_limit_is_refused(self) -> None:
        store = self.make_store(limits=Limits(max_state_bytes=1_000))
        store.create_session("session", agent_type="agent")
        before = contents(store, "session")
        with self.storage_untouched(), pytest.raises(LimitExceeded):
            store.suspend("session", kind=KIND, context={"text": "x" * 1_000})
        assert contents(store, "session") == before

    @table("guarded", [False, True])
    def test_of_resumes_at_once_one_wins_and_the_others_conflict(
        self, store: StateStore, session_id: str, guarded: bool
    ) -> None:
        version = store.suspend(session_id, kind=KIND, context={"at": 3})
        expected = version if guarded else None
        outcomes = self.at_once(
            *(lambda: store.resume(session_id, expected_version=expected) for _ in range(6))
        )
        winners = [outcome for outcome in outcomes if isinstance(outcome, SessionState)]
        losers = [outcome for outcome in outcomes if not isinstance(outcome, SessionState)]
        assert [winner.suspension_context for winner in winners] == [{"at": 3}]
        assert [type(loser) for loser in losers] == [ConflictError] * 5
        assert loaded(store, session_id).resume_count == 1

    def test_a_branch_leaves_the_suspension_behind(self, store: StateStore, session_id: str) -> None:
        store.suspend(session_id, kind=KIND, context={}, pending={"call-1": {"tool_name": "ask"}})
        branch = store.branch_session(session_id)
        assert (branch.suspension_kind, branch.suspension_context) == (None, None)
        assert branch.pending_client_tool_calls == {}
        assert branch.status is SessionStatus.ACTIVE
