"""Tests for decisions: they are stored outside the state, and the newest asking of a call counts."""

from __future__ import annotations

from typing import Any, Final

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.limits import Limits
from helix_store.exceptions import ApprovalUsed, NotApproved
from helix_store.sessions.tool_calls import default_answer
from helix_store.testing.cells import table
from helix_store.testing.state_store.approvals import (
    FORGED,
    approve,
    ask_approval,
    forge_answer,
    step_of,
    use_once,
    used_in,
)
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import contents, loaded
from helix_store.testing.state_store.tool_calls import (
    APPROVE,
    ASK,
    IN_A_WHILE,
    LONG_AGO,
    outcomes_of,
)

__all__ = ["DecisionContract"]

_TWO: Final = {**APPROVE, "approvals": 2}
_OVERDUE: Final = {**APPROVE, "deadline": LONG_AGO, "on_expiry": "reject"}
_FORGED: Final = (FORGED, {"approved": False, "submitted_at": 0}, {"error": "no", "submitted_at": LONG_AGO})


def _refusal(store: StateStore, session_id: str) -> str:
    """Return why the approval cannot be used."""
    with pytest.raises(NotApproved) as refused:
        use_once(store, session_id)
    return str(refused.value.reason)


def _overdue(store: StateStore) -> list[str]:
    return [call.tool_call_id for call in store.find_expired_pending()]


def _apply_default(store: StateStore) -> None:
    (call,) = store.find_expired_pending()
    answer = default_answer(call)
    assert answer is not None
    submission = store.submit_tool_result(call.session_id, call.tool_call_id, **answer)
    assert outcomes_of(submission) == ["accepted"]


def _write_again(store: StateStore, session_id: str, way: str) -> None:
    """Write the calls of a session, without a change of those that it has."""
    if way == "save":
        store.save_state(session_id, loaded(store, session_id))
    elif way == "step":
        _checkpoint(store, session_id)
    elif way == "rewind":
        checkpoint_id = _checkpoint(store, session_id)
        _checkpoint(store, session_id)
        store.restore_checkpoint(session_id, checkpoint_id)
    elif way == "suspend":
        store.suspend(session_id, kind="suspended_client_tool", context={}, pending={"other": ASK})
    else:
        store.add_pending_tool_calls(session_id, {"other": ASK})
        if way == "answer another":
            store.submit_tool_result(session_id, "other", result=1)


def _checkpoint(store: StateStore, session_id: str) -> str:
    with step_of(store, session_id) as step:
        step.say({"role": "assistant", "content": "hm"})
    assert step.commit is not None
    return step.commit.checkpoint_id


class DecisionContract(StoreTests):
    # The newest asking

    @pytest.mark.parametrize("way", ["rewind", "save", "step"])
    def test_a_rejected_call_does_not_become_approved_again(self, way: str) -> None:
        """Not even once the answers are so large that the oldest are reduced to a mark."""
        store = self.make_store(limits=Limits(max_state_bytes=4_000))
        session_id = store.create_session(agent_type="agent").session_id
        before = _checkpoint(store, session_id)
        ask_approval(store, session_id)
        approve(store, session_id, actor="ann")
        self._remove_the_question(store, session_id, way, before)
        assert _refusal(store, session_id) == "unknown"
        ask_approval(store, session_id)
        assert _refusal(store, session_id) == "open"
        approve(store, session_id, actor="bob", approved=False)
        store.add_pending_tool_calls(session_id, {"big": {"tool_name": "ask"}})
        store.submit_tool_result(session_id, "big", result="x" * 900)
        store.take_tool_results(session_id)
        assert loaded(store, session_id).completed_client_tool_calls["call"].keys() == {"submitted_at"}
        assert _refusal(store, session_id) == "rejected"

    @staticmethod
    def _remove_the_question(store: StateStore, session_id: str, way: str, before: str) -> None:
        if way == "rewind":
            store.restore_checkpoint(session_id, before)
        elif way == "save":
            state = loaded(store, session_id)
            state.pending_client_tool_calls = {}
            store.save_state(session_id, state)
        elif way == "step":
            with step_of(store, session_id) as step:
                step.state.pending_client_tool_calls = {}
        else:
            with step_of(store, session_id) as step:
                step.state.pending_client_tool_calls["call"]["submitted_at"] += 1

    @pytest.mark.parametrize("way", ["rewind", "save", "step", "step with another answer"])
    def test_a_question_that_comes_back_has_no_earlier_decision(
        self, store: StateStore, session_id: str, way: str
    ) -> None:
        before = _checkpoint(store, session_id)
        ask_approval(store, session_id)
        approve(store, session_id)
        answered = loaded(store, session_id)
        self._remove_the_question(store, session_id, way, before)
        store.save_state(session_id, answered)
        assert _refusal(store, session_id) == "open"

    def test_a_rewind_to_the_open_question_needs_a_new_answer(
        self, store: StateStore, session_id: str
    ) -> None:
        with step_of(store, session_id) as step:
            step.wait_for({"call": {**APPROVE, "approval_id": "approval"}})
        assert step.commit is not None
        approve(store, session_id, actor="ann")
        answered = loaded(store, session_id)
        store.restore_checkpoint(session_id, step.commit.checkpoint_id)
        assert _refusal(store, session_id) == "open"
        state = loaded(store, session_id)
        state.pending_client_tool_calls = answered.pending_client_tool_calls
        store.save_state(session_id, state)
        assert _refusal(store, session_id) == "open"
        assert outcomes_of(approve(store, session_id, actor="bob")) == ["accepted"]
        assert use_once(store, session_id).actors == ["bob"]

    def test_a_call_that_is_asked_again_in_the_step_that_removes_it_needs_a_new_answer(
        self, store: StateStore, session_id: str
    ) -> None:
        ask_approval(store, session_id)
        approve(store, session_id)
        with step_of(store, session_id) as step:
            step.state.pending_client_tool_calls = {}
            step.wait_for({"call": APPROVE})
        assert _refusal(store, session_id) == "open"
        approve(store, session_id, actor="bob")
        assert use_once(store, session_id).actors == ["bob"]

    def test_a_used_approval_stays_used_when_its_question_is_gone(
        self, store: StateStore, session_id: str
    ) -> None:
        ask_approval(store, session_id)
        approve(store, session_id)
        use_once(store, session_id, "first")
        state = loaded(store, session_id)
        state.pending_client_tool_calls = {}
        store.save_state(session_id, state)
        ask_approval(store, session_id)
        approve(store, session_id)
        with pytest.raises(ApprovalUsed):
            use_once(store, session_id)

    def test_a_save_that_keeps_the_answer_keeps_the_approval(
        self, store: StateStore, session_id: str
    ) -> None:
        """Also once the answer was taken, and reduced to a mark."""
        ask_approval(store, session_id)
        approve(store, session_id, actor="ann")
        for _ in range(2):
            store.save_state(session_id, loaded(store, session_id))
            _checkpoint(store, session_id)
            store.take_tool_results(session_id)
        state = loaded(store, session_id)
        mark = {"submitted_at": state.completed_client_tool_calls["call"]["submitted_at"]}
        state.completed_client_tool_calls["call"] = mark
        store.save_state(session_id, state)
        assert use_once(store, session_id).actors == ["ann"]

    # The state decides nothing

    @pytest.mark.parametrize("call", [APPROVE, _TWO], ids=["one", "two"])
    @pytest.mark.parametrize("is_taken", [False, True], ids=["not taken", "taken"])
    def test_an_answer_in_the_state_is_no_decision(
        self, store: StateStore, session_id: str, call: dict[str, Any], is_taken: bool
    ) -> None:
        ask_approval(store, session_id, call)
        forge_answer(store, session_id, is_taken=is_taken)
        assert _refusal(store, session_id) == "open"

    # The deadline of a call that only the state says is answered

    @table(
        ("way", "answer"),
        [
            *((way, FORGED) for way in ("", "step", "rewind", "suspend", "ask another", "answer another")),
            *(("save", answer) for answer in _FORGED),
        ],
    )
    def test_an_answer_in_the_state_does_not_switch_the_deadline_off(
        self, store: StateStore, session_id: str, way: str, answer: dict[str, Any]
    ) -> None:
        ask_approval(store, session_id, _OVERDUE)
        if way == "step":
            with step_of(store, session_id) as step:
                step.state.pending_client_tool_calls["call"] |= answer
        else:
            forge_answer(store, session_id, answer=answer)
        if way:
            _write_again(store, session_id, way)
        assert _refusal(store, session_id) == "open"
        assert _overdue(store) == ["call"]
        _apply_default(store)
        assert _overdue(store) == []
        assert _refusal(store, session_id) == "expired"

    @table("answer", _FORGED)
    def test_an_answer_in_the_state_is_not_taken(
        self, store: StateStore, session_id: str, answer: dict[str, Any]
    ) -> None:
        ask_approval(store, session_id, _OVERDUE)
        forge_answer(store, session_id, answer=answer)
        before = contents(store, session_id)
        assert store.take_tool_results(session_id) == {}
        assert contents(store, session_id) == before
        store.add_pending_tool_calls(session_id, {"other": ASK})
        store.submit_tool_result(session_id, "other", result=1)
        assert list(store.take_tool_results(session_id)) == ["other"]
        assert _overdue(store) == ["call"]
        approve(store, session_id, actor="ann", approved=False)
        assert store.take_tool_results(session_id)["call"]["actors"] == ["ann"]
        assert _overdue(store) == []

    def test_the_earliest_deadline_may_be_that_of_a_forged_answer(
        self, store: StateStore, session_id: str
    ) -> None:
        ask_approval(store, session_id, {**_OVERDUE, "deadline": LONG_AGO + 5})
        store.add_pending_tool_calls(session_id, {"late": {**ASK, "deadline": LONG_AGO + 9}})
        ask_approval(store, session_id, {**_OVERDUE, "deadline": IN_A_WHILE}, "later")
        forge_answer(store, session_id)
        forge_answer(store, session_id, "later")
        assert _refusal(store, session_id) == "open"
        for now, due in ((LONG_AGO + 4, 0), (LONG_AGO + 5, 1), (LONG_AGO + 9, 2), (IN_A_WHILE, 3)):
            found = [call.tool_call_id for call in store.find_expired_pending(now=now)]
            assert found == ["call", "late", "later"][:due], now
        assert outcomes_of(approve(store, session_id, actor="ann")) == ["accepted"]
        assert _overdue(store) == ["late"]

    @table(
        ("kind", "way"),
        [
            (kind, way)
            for kind in ("approved", "used", "rejected", "error", "expired")
            for way in ("", "save", "step", "rewind", "suspend", "ask another", "answer another")
        ],
    )
    def test_an_answer_switches_the_deadline_off_for_good(
        self, store: StateStore, session_id: str, kind: str, way: str
    ) -> None:
        ask_approval(store, session_id, _OVERDUE)
        if kind == "expired":
            _apply_default(store)
        elif kind == "error":
            approve(store, session_id, approved=None, error="no")
        else:
            approve(store, session_id, approved=kind != "rejected")
        if kind == "used":
            use_once(store, session_id)
        assert "submitted_at" in loaded(store, session_id).pending_client_tool_calls["call"]
        for _ in range(2 if way in ("save", "step") else 1):
            if way:
                _write_again(store, session_id, way)
            assert _overdue(store) == []
        again = approve(store, session_id, actor="eve", approved=False)
        assert outcomes_of(again) == ["already_completed"]
        assert "call" in store.take_tool_results(session_id)
        assert _overdue(store) == []

    def test_a_question_that_comes_back_has_its_deadline_again(
        self, store: StateStore, session_id: str
    ) -> None:
        ask_approval(store, session_id, _OVERDUE)
        approve(store, session_id)
        answered = loaded(store, session_id)
        self._remove_the_question(store, session_id, "save", "")
        assert _overdue(store) == []
        store.save_state(session_id, answered)
        assert _refusal(store, session_id) == "open"
        assert _overdue(store) == ["call"]
        approve(store, session_id, actor="bob")
        assert _overdue(store) == []

    def test_a_result_that_the_agent_writes_into_an_open_call_is_no_answer(
        self, store: StateStore, session_id: str
    ) -> None:
        ask_approval(store, session_id)
        state = loaded(store, session_id)
        state.pending_client_tool_calls["call"] |= {"result": 1}
        store.save_state(session_id, state)
        assert _refusal(store, session_id) == "open"

    @pytest.mark.parametrize("answer", [{"approved": False, "reason": None}, {"error": "no"}], ids=repr)
    def test_a_person_answers_a_call_that_the_state_says_is_answered(
        self, store: StateStore, session_id: str, answer: dict[str, Any]
    ) -> None:
        ask_approval(store, session_id)
        forge_answer(store, session_id, answer={**answer, "submitted_at": LONG_AGO})
        assert _refusal(store, session_id) == "open"
        assert outcomes_of(approve(store, session_id, actor="ann")) == ["accepted"]
        assert use_once(store, session_id).actors == ["ann"]

    def test_people_in_the_state_have_not_approved(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id, _TWO)
        state = loaded(store, session_id)
        state.pending_client_tool_calls["call"]["approved_by"] = ["user:1"]
        store.save_state(session_id, state)
        assert "approved_by" not in loaded(store, session_id).pending_client_tool_calls["call"]
        assert outcomes_of(approve(store, session_id, actor="ann")) == ["recorded"]
        assert outcomes_of(approve(store, session_id, actor="bob")) == ["accepted"]
        assert use_once(store, session_id).actors == ["ann", "bob"]

    def test_people_cannot_be_removed_from_the_state(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id, _TWO)
        approve(store, session_id, actor="ann")
        state = loaded(store, session_id)
        state.pending_client_tool_calls["call"]["approved_by"] = ["eve"]
        store.save_state(session_id, state)
        assert loaded(store, session_id).pending_client_tool_calls["call"]["approved_by"] == ["ann"]
        assert outcomes_of(approve(store, session_id, actor="ann")) == ["already_recorded"]
        assert outcomes_of(approve(store, session_id, actor="bob")) == ["accepted"]
        assert use_once(store, session_id).actors == ["ann", "bob"]

    def test_an_approval_of_two_does_not_come_back_with_the_input(
        self, store: StateStore, session_id: str
    ) -> None:
        ask_approval(store, session_id, _TWO)
        approve(store, session_id, actor="ann")
        for amount in (8.0, 7.0):
            state = loaded(store, session_id)
            state.pending_client_tool_calls["call"]["input"] = {"amount": amount}
            store.save_state(session_id, state)
        assert outcomes_of(approve(store, session_id, actor="bob")) == ["recorded"]

    def test_the_actors_of_an_approval_are_not_those_in_the_state(
        self, store: StateStore, session_id: str
    ) -> None:
        ask_approval(store, session_id)
        approve(store, session_id, actor="ann")
        with step_of(store, session_id) as step:
            step.state.pending_client_tool_calls["call"]["actors"] = ["user:1"]
        with step_of(store, session_id) as step:
            assert used_in(step).actors == ["ann"]
