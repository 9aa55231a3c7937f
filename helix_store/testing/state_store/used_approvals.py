"""Tests for using an approval: exactly what was approved, once, and in one step."""

from __future__ import annotations

from typing import Any

import pytest

from helix_store.core.approvals import ApprovedCall
from helix_store.core.contracts import StateStore
from helix_store.exceptions import ApprovalUsed, NotApproved, StaleStateError
from helix_store.sessions.tool_calls import default_answer
from helix_store.testing.cells import table
from helix_store.testing.state_store.approvals import (
    DIGEST,
    approve,
    ask_approval,
    forge_answer,
    step_of,
    use_once,
    used_in,
)
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.tool_calls import APPROVE, ASK, LONG_AGO, create_family

__all__ = ["UsedApprovalContract"]


def _reason(store: StateStore, session_id: str, tool_call_id: str) -> str:
    """Return why an approval cannot be used."""
    with pytest.raises(NotApproved) as refused, step_of(store, session_id) as step:
        used_in(step, tool_call_id)
    return str(refused.value.reason)


class UsedApprovalContract(StoreTests):
    def test_a_worker_gets_exactly_what_was_approved(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id)
        approve(store, session_id)
        assert use_once(store, session_id) == ApprovedCall(
            tool_name="pay", input={"amount": 7.0}, actors=[], digest=DIGEST
        )

    def test_the_state_of_a_step_does_not_change_what_was_approved(
        self, store: StateStore, session_id: str
    ) -> None:
        ask_approval(store, session_id)
        approve(store, session_id)
        with step_of(store, session_id) as step:
            step.state.pending_client_tool_calls["call"]["input"] = {"amount": 7_000_000}
        with step_of(store, session_id, "second") as step:
            step.state.pending_client_tool_calls = {}
            step.state.completed_client_tool_calls = {"call": {"approved": True, "input": 1}}
            first = used_in(step)
            assert first.input == {"amount": 7.0}
            first.input["amount"] = 8
            assert used_in(step).input == {"amount": 7.0}
        with pytest.raises(ApprovalUsed):
            use_once(store, session_id)

    @table("is_taken", [False, True])
    def test_an_approval_is_used_once(self, store: StateStore, session_id: str, is_taken: bool) -> None:
        ask_approval(store, session_id)
        approve(store, session_id)
        if is_taken:
            store.take_tool_results(session_id)
        use_once(store, session_id, "first")
        with pytest.raises(ApprovalUsed) as used:
            use_once(store, session_id)
        assert (used.value.tool_call_id, used.value.step_id) == ("call", "first")

    def test_a_step_that_raises_uses_nothing(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id)
        approve(store, session_id)
        with pytest.raises(ZeroDivisionError), step_of(store, session_id) as step:
            used_in(step)
            raise ZeroDivisionError
        assert use_once(store, session_id).tool_name == "pay"

    def test_a_step_that_fails_its_session_uses_it(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id)
        approve(store, session_id)
        with step_of(store, session_id, "failed") as step:
            used_in(step)
            step.fail("the bank said no")
        store.update_status(session_id, "active")
        with pytest.raises(ApprovalUsed):
            use_once(store, session_id)

    @table(
        ("answer", "reason"),
        [
            ({"approved": False}, "rejected"),
            ({"approved": None, "error": "gone"}, "rejected"),
            (None, "open"),
        ],
    )
    def test_what_is_not_approved_cannot_be_used(
        self, store: StateStore, session_id: str, answer: dict[str, Any] | None, reason: str
    ) -> None:
        ask_approval(store, session_id, {**APPROVE, "deadline": LONG_AGO, "on_expiry": "reject"})
        if answer is not None:
            approve(store, session_id, **answer)
        for take in (False, True):
            if take:
                store.take_tool_results(session_id)
            with pytest.raises(NotApproved) as refused:
                use_once(store, session_id)
            assert (refused.value.tool_call_id, refused.value.reason) == ("call", reason)

    @table("default", ["reject", "fail"])
    def test_an_expired_call_is_not_approved(self, store: StateStore, session_id: str, default: str) -> None:
        ask_approval(store, session_id, {**APPROVE, "deadline": LONG_AGO, "on_expiry": default})
        (overdue,) = store.find_expired_pending()
        answer = default_answer(overdue)
        assert answer is not None
        store.submit_tool_result(session_id, "call", **answer)
        with pytest.raises(NotApproved) as refused:
            use_once(store, session_id)
        assert refused.value.reason == "expired"

    def test_an_unknown_call_is_not_approved(self, store: StateStore, session_id: str) -> None:
        store.add_pending_tool_calls(session_id, {"asks": ASK})
        store.submit_tool_result(session_id, "asks", result=1)
        for tool_call_id in ("call", "asks"):
            with pytest.raises(NotApproved) as refused, step_of(store, session_id) as step:
                used_in(step, tool_call_id)
            assert refused.value.reason == "unknown"

    def test_a_use_survives_a_rewind(self, store: StateStore, session_id: str) -> None:
        with step_of(store, session_id) as step:
            step.wait_for({"call": {**APPROVE, "approval_id": "approval"}})
        assert step.commit is not None
        approve(store, session_id)
        use_once(store, session_id, "first")
        store.restore_checkpoint(session_id, step.commit.checkpoint_id)
        for _ in range(2):
            with pytest.raises(ApprovalUsed):
                use_once(store, session_id)
            approve(store, session_id)

    def test_an_approval_before_the_checkpoint_can_be_used_after_a_rewind(
        self, store: StateStore, session_id: str
    ) -> None:
        ask_approval(store, session_id)
        approve(store, session_id)
        with step_of(store, session_id) as step:
            step.say({"role": "assistant", "content": "hm"})
        assert step.commit is not None
        store.restore_checkpoint(session_id, step.commit.checkpoint_id)
        assert use_once(store, session_id).tool_name == "pay"

    @table("is_taken", [False, True])
    def test_a_branch_has_no_approvals(self, store: StateStore, session_id: str, is_taken: bool) -> None:
        ask_approval(store, session_id)
        approve(store, session_id)
        if is_taken:
            store.take_tool_results(session_id)
        branch = store.branch_session(session_id)
        with pytest.raises(NotApproved) as refused:
            use_once(store, branch.session_id)
        assert refused.value.reason == "unknown"
        assert use_once(store, session_id).tool_name == "pay"

    @table("is_taken", [False, True])
    def test_the_calls_of_a_child_are_its_own(self, store: StateStore, is_taken: bool) -> None:
        """Their owners are recorded on the root. A branch of the child has not asked for them."""
        create_family(store)
        for owner in ("root", "child", "grandchild"):
            ask_approval(store, owner, tool_call_id=f"call of {owner}")
            forge_answer(store, owner, f"call of {owner}", is_taken=is_taken)
            assert _reason(store, owner, f"call of {owner}") == "open"
            assert _reason(store, owner, "call of nobody") == "unknown"
        branch = store.branch_session("child").session_id
        assert _reason(store, branch, "call of child") == "unknown"

    def test_two_steps_cannot_both_use_an_approval(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id)
        approve(store, session_id)
        with pytest.raises((StaleStateError, ApprovalUsed)), step_of(store, session_id) as step:
            use_once(store, session_id, "other")
            used_in(step)
        with pytest.raises(StaleStateError), step_of(store, session_id) as step:
            with step_of(store, session_id, "other") as other:
                other.say({"role": "assistant", "content": "hm"})
            with pytest.raises(ApprovalUsed):
                used_in(step)

    def test_a_step_on_an_outdated_state_gets_no_approval(self, store: StateStore, session_id: str) -> None:
        """Otherwise its tool would run, its commit would fail, and a later step would run the tool again."""
        ask_approval(store, session_id)
        approve(store, session_id)
        got = None
        with pytest.raises(StaleStateError), step_of(store, session_id) as step:
            with step_of(store, session_id, "other") as other:
                other.say({"role": "assistant", "content": "hm"})
            got = used_in(step)
        assert got is None
        assert use_once(store, session_id).tool_name == "pay"
