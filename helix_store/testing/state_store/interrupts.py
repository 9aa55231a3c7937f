"""Interrupt requests: durable, and for one run only."""

from __future__ import annotations

from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import InterruptKind, InterruptRequest
from helix_store.exceptions import InvalidPayload, RunNotFound
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import contents, full_session

__all__ = ["InterruptContract"]


class InterruptContract(StoreTests):
    def test_a_request_is_seen_by_every_store_on_the_same_storage(
        self, store: StateStore, session_id: str
    ) -> None:
        request = store.request_interrupt(session_id, reason="lunch")
        assert request.requested_at.utcoffset() is not None
        assert request == InterruptRequest(
            session_id=session_id,
            kind=InterruptKind.INTERRUPT,
            reason="lunch",
            run_id=None,
            requested_at=request.requested_at,
        )
        assert repr(self.make_store().check_interrupt(session_id)) == repr(request)

    def test_no_request_is_pending_before_the_first_one(self, store: StateStore, session_id: str) -> None:
        assert store.check_interrupt(session_id) is None
        assert store.clear_interrupt(session_id) is False

    def test_a_request_is_bound_to_the_run_that_is_running(self, store: StateStore, session_id: str) -> None:
        store.start_run(session_id, "run-1")
        assert store.request_interrupt(session_id).run_id == "run-1"
        assert store.check_interrupt(session_id, run_id="run-1") is not None
        assert store.check_interrupt(session_id) is not None

    def test_a_request_may_name_its_run(self, store: StateStore, session_id: str) -> None:
        store.start_run(session_id, "run-1")
        store.start_run(session_id, "run-2", supersede=True)
        assert store.request_interrupt(session_id, run_id="run-1").run_id == "run-1"
        assert store.check_interrupt(session_id, run_id="run-1") is not None
        assert store.check_interrupt(session_id, run_id="run-2") is None

    def test_a_check_for_a_run_sees_only_what_is_bound_to_it(
        self, store: StateStore, session_id: str
    ) -> None:
        store.request_interrupt(session_id)
        assert store.check_interrupt(session_id, run_id="run-1") is None
        assert store.check_interrupt(session_id) is not None

    def test_interrupting_a_run_that_the_session_does_not_have_fails(
        self, store: StateStore, session_id: str
    ) -> None:
        store.create_session("other", agent_type="agent")
        store.start_run("other", "run of another session")
        for run_id in ("nobody", "run of another session"):
            with pytest.raises(RunNotFound):
                store.request_interrupt(session_id, run_id=run_id)
        assert store.check_interrupt(session_id) is None

    def test_starting_a_run_clears_what_is_left_of_the_last_one(
        self, store: StateStore, session_id: str
    ) -> None:
        store.request_interrupt(session_id)
        store.start_run(session_id, "run-1")
        assert store.check_interrupt(session_id) is None
        store.request_interrupt(session_id, kind="abort")
        store.update_run(session_id, "run-1", status="completed")
        store.start_run(session_id, "run-2")
        assert store.check_interrupt(session_id) is None
        assert store.check_interrupt(session_id, run_id="run-1") is None
        assert store.clear_interrupt(session_id) is False

    def test_an_abort_replaces_an_interrupt(self, store: StateStore, session_id: str) -> None:
        store.request_interrupt(session_id, kind="interrupt", reason="lunch")
        store.request_interrupt(session_id, kind=InterruptKind.ABORT, reason="fire")
        pending = store.check_interrupt(session_id)
        assert pending is not None
        assert (pending.kind, pending.reason) == (InterruptKind.ABORT, "fire")

    def test_an_interrupt_never_replaces_an_abort(self, store: StateStore, session_id: str) -> None:
        store.request_interrupt(session_id, kind="abort", reason="fire")
        before = contents(store, session_id)
        store.request_interrupt(session_id, kind="interrupt", reason="lunch")
        assert contents(store, session_id) == before

    def test_a_request_may_be_repeated(self, store: StateStore, session_id: str) -> None:
        store.start_run(session_id, "run-1")
        for _ in range(3):
            store.request_interrupt(session_id)
        assert store.clear_interrupt(session_id) is True
        assert store.check_interrupt(session_id) is None

    def test_clearing_tells_whether_a_request_was_pending(self, store: StateStore, session_id: str) -> None:
        store.request_interrupt(session_id)
        assert [store.clear_interrupt(session_id) for _ in range(2)] == [True, False]

    def test_requests_belong_to_their_session(self, store: StateStore, session_id: str) -> None:
        store.create_session("other", agent_type="agent")
        store.request_interrupt(session_id)
        assert store.check_interrupt("other") is None
        assert store.clear_interrupt("other") is False
        assert store.check_interrupt(session_id) is not None

    def test_requesting_checking_and_clearing_are_no_new_version(
        self, store: StateStore, session_id: str
    ) -> None:
        before = repr(store.load_state(session_id))
        store.request_interrupt(session_id)
        store.check_interrupt(session_id)
        store.clear_interrupt(session_id)
        assert repr(store.load_state(session_id)) == before

    @pytest.mark.parametrize(
        "bad",
        [
            {"kind": "pause"},
            {"kind": None},
            {"reason": 7},
            {"reason": "\x00"},
            {"reason": "\ud800"},
            {"run_id": ""},
            {"run_id": 7},
        ],
    )
    def test_a_request_that_cannot_be_stored_is_refused(self, store: StateStore, bad: dict[str, Any]) -> None:
        full_session(store, "session")
        before = contents(store, "session")
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            store.request_interrupt("session", **bad)
        assert contents(store, "session") == before

    def test_requests_made_at_once_leave_one_and_an_abort_among_them_wins(
        self, store: StateStore, session_id: str
    ) -> None:
        kinds = ["interrupt"] * 4 + ["abort"] + ["interrupt"] * 3
        outcomes = self.at_once(
            *(lambda kind=kind: store.request_interrupt(session_id, kind=kind) for kind in kinds)
        )
        assert all(isinstance(outcome, InterruptRequest) for outcome in outcomes)
        pending = store.check_interrupt(session_id)
        assert pending is not None
        assert pending.kind is InterruptKind.ABORT
