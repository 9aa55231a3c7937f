"""Tests for interrupt requests: they are durable, and each applies to only one run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import InterruptKind, InterruptRequest, RunStatus
from helix_store.exceptions import ConflictError, InvalidPayload, RunNotFound
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import Contents, StoreTests
from helix_store.testing.state_store.samples import contents

__all__ = ["InterruptContract"]


def _updated_to(status: RunStatus) -> Callable[[StateStore, str], Any]:
    return lambda store, session_id: store.update_run(session_id, "run-1", status=status)


ENDS: dict[str, Callable[[StateStore, str], Any]] = {
    **{status.value: _updated_to(status) for status in RunStatus if status is not RunStatus.RUNNING},
    "a suspension": lambda store, session_id: store.suspend(
        session_id, kind=RunStatus.SUSPENDED_CLIENT_TOOL, context={}
    ),
    "another run": lambda store, session_id: store.start_run(session_id, "run-2", supersede=True),
}
"""The ways in which run-1 ends."""


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
        assert store.request_interrupt(session_id, run_id="run-2").run_id == "run-2"
        assert store.check_interrupt(session_id, run_id="run-2") is not None
        assert store.check_interrupt(session_id, run_id="run-1") is None

    @table("end", ENDS)
    @table("kind", InterruptKind)
    @table("next_run", [False, True])
    def test_a_request_for_a_run_that_has_ended_is_refused(
        self, store: StateStore, session_id: str, end: str, kind: InterruptKind, next_run: bool
    ) -> None:
        store.start_run(session_id, "run-1")
        ENDS[end](store, session_id)
        if next_run and end != "another run":
            store.start_run(session_id, "run-2")
        before = contents(store, session_id)
        with pytest.raises(ConflictError, match="run-1"):
            store.request_interrupt(session_id, kind=kind, run_id="run-1")
        assert contents(store, session_id) == before
        assert store.check_interrupt(session_id) is None
        assert store.clear_interrupt(session_id) is False

    @table("end", ENDS)
    def test_a_request_is_stale_from_the_end_of_its_run_on(
        self, store: StateStore, session_id: str, end: str
    ) -> None:
        store.start_run(session_id, "run-1")
        store.request_interrupt(session_id, kind="abort")
        ENDS[end](store, session_id)
        for run_id in (None, "run-1", "run-2"):
            assert store.check_interrupt(session_id, run_id=run_id) is None
        assert store.clear_interrupt(session_id) is False

    @table("end", ENDS)
    def test_a_stale_abort_does_not_stand_in_the_way_of_a_new_request(
        self, store: StateStore, session_id: str, end: str
    ) -> None:
        store.start_run(session_id, "run-1")
        store.request_interrupt(session_id, kind="abort", reason="fire")
        ENDS[end](store, session_id)
        wanted = store.request_interrupt(session_id, kind="interrupt", reason="lunch")
        assert (wanted.kind, wanted.reason) == (InterruptKind.INTERRUPT, "lunch")
        assert repr(store.check_interrupt(session_id)) == repr(wanted)
        assert store.clear_interrupt(session_id) is True

    def test_a_run_that_goes_on_after_a_suspension_is_not_stopped_by_an_earlier_request(
        self, store: StateStore, session_id: str
    ) -> None:
        for request_before_the_end in (True, False):
            store.start_run(session_id, f"run {request_before_the_end}", supersede=True)
            run = store.get_current_run(session_id)
            assert run is not None
            if request_before_the_end:
                store.request_interrupt(session_id, kind="abort")
            store.suspend(session_id, kind="suspended_client_tool", context={})
            if not request_before_the_end:
                store.request_interrupt(session_id, kind="abort")
            store.resume(session_id)
            store.update_run(session_id, run.run_id, status="running")
            assert store.check_interrupt(session_id) is None
            assert store.check_interrupt(session_id, run_id=run.run_id) is None
            assert store.clear_interrupt(session_id) is False

    def test_the_heartbeat_of_a_running_run_keeps_the_request(
        self, store: StateStore, session_id: str
    ) -> None:
        store.start_run(session_id, "run-1")
        store.request_interrupt(session_id)
        store.update_run(session_id, "run-1", status="running", step_count=1)
        assert store.check_interrupt(session_id, run_id="run-1") is not None

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

    @table(
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
        shared=True,
    )
    def test_a_request_that_cannot_be_stored_is_refused(
        self, stored: StateStore, before: Contents, bad: dict[str, Any]
    ) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            stored.request_interrupt("session", **bad)
        assert contents(stored, "session") == before

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
