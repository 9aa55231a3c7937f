"""Tests for tool calls that a client answers: routed to their owner, answered once, taken once."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import pytest

from helix_store.core.approvals import call_digest
from helix_store.core.contracts import StateStore
from helix_store.core.limits import Limits
from helix_store.core.types import Submission
from helix_store.exceptions import (
    ConflictError,
    InvalidPayload,
    LimitExceeded,
    SessionNotFound,
    StaleStateError,
)
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import Contents, StoreTests
from helix_store.testing.state_store.samples import (
    contents,
    loaded,
)

__all__ = [
    "APPROVE",
    "ASK",
    "IN_A_WHILE",
    "LONG_AGO",
    "ToolCallContract",
    "create_family",
    "outcomes_of",
]

LONG_AGO: Final = 1_600_000_000_000
IN_A_WHILE: Final = 4_000_000_000_000

ASK: Final[dict[str, Any]] = {"tool_name": "ask", "input": {"question": "Go?"}}
APPROVE: Final[dict[str, Any]] = {"tool_name": "pay", "input": {"amount": 7.0}, "approval_id": "approval"}


def create_family(store: StateStore) -> None:
    store.create_session("root", agent_type="agent")
    store.create_session("child", agent_type="agent", parent_session_id="root")
    store.create_session("grandchild", agent_type="agent", parent_session_id="child")
    store.create_session("stranger", agent_type="agent")


def outcomes_of(*submissions: Submission) -> list[str]:
    return [submission.outcome.value for submission in submissions]


def _pending(store: StateStore, session_id: str) -> dict[str, Any]:
    return loaded(store, session_id).pending_client_tool_calls


def _answer(kind: str, length: int) -> dict[str, Any]:
    return {kind: "x" * length}


class ToolCallContract(StoreTests):
    # Asking

    def test_a_call_waits_with_everything_it_was_asked_with(self, store: StateStore, session_id: str) -> None:
        own = {"metadata": {"note": [1]}}
        full = {**APPROVE, "run_id": "run-1", "requested_at": LONG_AGO, "deadline": IN_A_WHILE, **own}
        before = datetime.now(UTC)
        store.add_pending_tool_calls(session_id, {"call-2": full, "call-1": ASK})
        pending = _pending(store, session_id)
        assert list(pending) == ["call-2", "call-1"]
        assert pending["call-2"] == {**full, "digest": call_digest("pay", {"amount": 7.0})}
        asked_at = pending["call-1"].pop("requested_at")
        assert pending["call-1"].pop("digest") == call_digest("ask", ASK["input"])
        assert abs(asked_at - before.timestamp() * 1000) < 60_000
        assert pending["call-1"] == {**ASK, "run_id": None, "deadline": None, "approval_id": None}

    def test_the_root_records_who_owns_a_call_without_a_new_version(self, store: StateStore) -> None:
        create_family(store)
        store.add_pending_tool_calls("grandchild", {"call-1": ASK, "call-2": ASK})
        assert loaded(store, "root").client_tool_call_ownership == {
            "call-1": "grandchild",
            "call-2": "grandchild",
        }
        assert loaded(store, "grandchild").client_tool_call_ownership == {}
        assert [loaded(store, name).version for name in ("root", "child", "grandchild")] == [1, 1, 2]
        store.add_pending_tool_calls("root", {"call-3": ASK})
        assert [loaded(store, name).version for name in ("root", "child", "grandchild")] == [2, 1, 2]

    def test_a_session_may_ask_for_another_one_of_its_tree(self, store: StateStore) -> None:
        create_family(store)
        store.add_pending_tool_calls("root", {"call-1": ASK}, owner_session_id="child")
        assert list(_pending(store, "child")) == ["call-1"]
        assert _pending(store, "root") == {}
        assert loaded(store, "root").client_tool_call_ownership == {"call-1": "child"}
        for owner, error in (("stranger", ConflictError), ("nobody", SessionNotFound)):
            with pytest.raises(error):
                store.add_pending_tool_calls("root", {"call-2": ASK}, owner_session_id=owner)
        assert loaded(store, "root").version == 1

    def test_asking_the_same_again_changes_nothing(self, store: StateStore) -> None:
        create_family(store)
        store.add_pending_tool_calls("child", {"call-1": ASK, "call-2": APPROVE})
        store.submit_tool_result("child", "call-1", result=1)
        before = [contents(store, name) for name in ("root", "child")]
        store.add_pending_tool_calls("child", {"call-1": ASK, "call-2": APPROVE})
        assert [contents(store, name) for name in ("root", "child")] == before

    @table("amount", [True, 1.0, [1], "1"])
    def test_an_equal_input_of_another_type_is_another_call(self, store: StateStore, amount: Any) -> None:
        create_family(store)
        store.add_pending_tool_calls("child", {"call-1": {**ASK, "input": {"amount": 1}}})
        with pytest.raises(ConflictError):
            store.add_pending_tool_calls("child", {"call-1": {**ASK, "input": {"amount": amount}}})

    @table("state", ["pending", "answered", "completed", "of another session"])
    def test_another_call_under_a_taken_id_is_refused(self, store: StateStore, state: str) -> None:
        create_family(store)
        store.add_pending_tool_calls("child", {"call-1": ASK})
        if state in ("answered", "completed"):
            store.submit_tool_result("child", "call-1", result=1)
        if state == "completed":
            store.take_tool_results("child")
        before = [contents(store, name) for name in ("root", "child")]
        asking = "root" if state == "of another session" else "child"
        call = ASK if state in ("completed", "of another session") else APPROVE
        with pytest.raises(ConflictError):
            store.add_pending_tool_calls(asking, {"call-0": ASK, "call-1": call})
        assert [contents(store, name) for name in ("root", "child")] == before

    @table(
        "bad",
        [
            {},
            {"tool_name": ""},
            {"tool_name": 7},
            {"tool_name": "ask", "input": {1, 2}},
            {"tool_name": "ask", "input": float("nan")},
            {"tool_name": "ask", "run_id": ""},
            {"tool_name": "ask", "approval_id": 7},
            {"tool_name": "ask", "deadline": 1_700_000_000},
            {"tool_name": "ask", "deadline": 253_402_300_800_000},
            {"tool_name": "ask", "deadline": "tomorrow"},
            {"tool_name": "ask", "requested_at": -1},
            {"tool_name": "ask", "submitted_at": IN_A_WHILE},
            {"tool_name": "ask", "result": 1},
            {"tool_name": "ask", "approved": True},
            {"tool_name": "ask", "on_expiry": "fail"},
            {"tool_name": "ask", "on_expiry": "reject"},
            {"tool_name": "ask", "on_expiry": {"result": 1}},
            {"tool_name": "pay", "approval_id": "a", "on_expiry": "fail"},
            {"tool_name": "pay", "approval_id": "a", "on_expiry": "approve"},
            {"tool_name": "ask", "deadline": IN_A_WHILE, "on_expiry": "reject"},
            {"tool_name": "ask", "deadline": IN_A_WHILE, "on_expiry": {"answer": 1}},
            {"tool_name": "pay", "approval_id": "a", "deadline": IN_A_WHILE, "on_expiry": {"result": 1}},
            {"tool_name": "pay", "approval_id": "a", "deadline": IN_A_WHILE, "on_expiry": "approve"},
            [],
            None,
        ],
        shared=True,
    )
    def test_a_call_that_makes_no_sense_is_refused_with_all_that_came_with_it(
        self, stored: StateStore, before: Contents, bad: Any
    ) -> None:
        with self.storage_untouched():
            with pytest.raises(InvalidPayload):
                stored.add_pending_tool_calls("session", {"good": ASK, "bad": bad})
            with pytest.raises(InvalidPayload):
                stored.suspend("session", kind="suspended_client_tool", context={}, pending={"bad": bad})
            with pytest.raises(InvalidPayload):
                stored.add_pending_tool_calls("session", {"": ASK})
            with pytest.raises(InvalidPayload):
                stored.add_pending_tool_calls("session", [ASK])  # type: ignore[arg-type]
        assert contents(stored, "session") == before

    # Answering

    @table("through", ["root", "child", "grandchild"])
    def test_an_answer_through_any_session_of_the_tree_reaches_the_owner(
        self, store: StateStore, through: str
    ) -> None:
        create_family(store)
        store.add_pending_tool_calls("child", {"call-1": ASK})
        versions = {name: loaded(store, name).version for name in ("root", "child", "grandchild")}
        submission = store.submit_tool_result(through, "call-1", result={"go": True})
        assert outcomes_of(submission) == ["accepted"]
        assert (submission.session_id, submission.tool_call_id) == ("child", "call-1")
        assert submission.new_version == versions["child"] + 1 == loaded(store, "child").version
        entry = _pending(store, "child")["call-1"]
        assert entry["result"] == {"go": True}
        assert entry["submitted_at"] >= entry["requested_at"]
        assert loaded(store, "root").version == versions["root"]
        assert loaded(store, "grandchild").version == versions["grandchild"]

    def test_an_answer_from_outside_of_the_tree_finds_no_call(self, store: StateStore) -> None:
        create_family(store)
        store.add_pending_tool_calls("child", {"call-1": ASK})
        before = contents(store, "child")
        submission = store.submit_tool_result("stranger", "call-1", result=1)
        assert submission == Submission(outcome=submission.outcome, tool_call_id="call-1")
        assert outcomes_of(submission) == ["unknown_tool_call"]
        assert contents(store, "child") == before

    def test_a_call_that_only_its_own_session_knows_of_can_be_answered_there(
        self, store: StateStore, session_id: str
    ) -> None:
        state = loaded(store, session_id)
        state.pending_client_tool_calls = {"call-1": ASK, "not a call": 7}
        store.save_state(session_id, state)
        assert outcomes_of(store.submit_tool_result(session_id, "call-1", result=1)) == ["accepted"]
        assert outcomes_of(store.submit_tool_result(session_id, "not a call", result=1)) == [
            "unknown_tool_call"
        ]
        assert list(store.take_tool_results(session_id)) == ["call-1"]
        assert _pending(store, session_id) == {"not a call": 7}

    def test_a_call_whose_owner_was_deleted_is_unknown(self, store: StateStore) -> None:
        create_family(store)
        store.add_pending_tool_calls("child", {"call-1": ASK})
        store.delete_session("child")
        assert outcomes_of(store.submit_tool_result("root", "call-1", result=1)) == ["unknown_tool_call"]

    @table("taken", [False, True])
    def test_the_first_answer_stands_for_good(self, store: StateStore, taken: bool) -> None:
        create_family(store)
        store.add_pending_tool_calls("child", {"call-1": ASK, "call-2": APPROVE})
        store.submit_tool_result("root", "call-1", result="first")
        store.submit_tool_result("root", "call-2", approved=False, approval_id="approval", reason="no")
        if taken:
            store.take_tool_results("child")
        before = [contents(store, name) for name in ("root", "child")]
        again = [
            store.submit_tool_result("child", "call-1", result="second"),
            store.submit_tool_result("root", "call-1", error="late"),
            store.submit_tool_result("root", "call-2", approved=True, approval_id="approval"),
            store.submit_tool_result("root", "call-2", approved=True, approval_id="another"),
        ]
        assert outcomes_of(*again) == ["already_completed"] * 4
        assert {submission.session_id for submission in again} == {"child"}
        assert {submission.new_version for submission in again} == {None}
        assert [contents(store, name) for name in ("root", "child")] == before

    @table("value", [None, {}, [], "", 0, False, -0.0, "\x00\ud800", 2**70])
    def test_a_result_comes_back_exactly(self, store: StateStore, session_id: str, value: Any) -> None:
        store.add_pending_tool_calls(session_id, {"call-1": ASK})
        store.submit_tool_result(session_id, "call-1", result=value)
        taken = store.take_tool_results(session_id)["call-1"]
        assert repr(taken["result"]) == repr(value)
        assert loaded(store, session_id).completed_client_tool_calls == {"call-1": taken}

    def test_an_approval_takes_a_decision_or_an_error(self, store: StateStore, session_id: str) -> None:
        store.add_pending_tool_calls(session_id, dict.fromkeys("abcd", APPROVE))
        store.submit_tool_result(session_id, "a", approved=True, approval_id="approval")
        store.submit_tool_result(session_id, "b", approved=False, approval_id="approval", reason="too much")
        store.submit_tool_result(session_id, "c", error={"code": "gone"})
        store.submit_tool_result(session_id, "d", error="gone", approval_id="approval")
        taken = store.take_tool_results(session_id)
        for answer in taken.values():
            assert type(answer.pop("submitted_at")) is int
        assert taken == {
            "a": {"approved": True, "reason": None},
            "b": {"approved": False, "reason": "too much"},
            "c": {"error": {"code": "gone"}},
            "d": {"error": "gone"},
        }

    @table(
        ("call", "answer"),
        [
            (APPROVE, {"result": True}),
            (APPROVE, {}),
            (APPROVE, {"result": True, "approval_id": "approval"}),
            (APPROVE, {"approved": True}),
            (APPROVE, {"approved": True, "approval_id": "another"}),
            (APPROVE, {"error": "gone", "approval_id": "another"}),
            (APPROVE, {"approved": True, "approval_id": "approval", "result": 1}),
            (APPROVE, {"approved": True, "approval_id": "approval", "error": 1}),
            (APPROVE, {"approved": 1, "approval_id": "approval"}),
            (APPROVE, {"approved": "yes", "approval_id": "approval"}),
            (APPROVE, {"approved": True, "approval_id": "approval", "reason": 7}),
            (APPROVE, {"approved": True, "approval_id": "approval", "reason": "\x00"}),
            (APPROVE, {"error": "gone", "reason": "because"}),
            (ASK, {"approved": True}),
            (ASK, {"approved": True, "approval_id": "approval"}),
            (ASK, {"result": 1, "approval_id": "approval"}),
            (ASK, {"result": 1, "error": 1}),
            (ASK, {"result": 1, "reason": "because"}),
            (ASK, {"result": {1}}),
            (ASK, {"error": float("inf")}),
        ],
    )
    def test_an_answer_that_does_not_fit_is_refused_and_stores_nothing(
        self, store: StateStore, session_id: str, call: dict[str, Any], answer: dict[str, Any]
    ) -> None:
        store.add_pending_tool_calls(session_id, {"call-1": call})
        before = contents(store, session_id)
        with pytest.raises(InvalidPayload):
            store.submit_tool_result(session_id, "call-1", **answer)
        assert contents(store, session_id) == before
        assert store.take_tool_results(session_id) == {}

    def test_the_error_of_a_decision_without_an_approval_id_names_the_missing_one(
        self, store: StateStore, session_id: str
    ) -> None:
        store.add_pending_tool_calls(session_id, {"call-1": APPROVE})
        with pytest.raises(InvalidPayload, match="missing; pass approval_id='approval'"):
            store.submit_tool_result(session_id, "call-1", approved=True)
        with pytest.raises(InvalidPayload, match="not the approval id of this call"):
            store.submit_tool_result(session_id, "call-1", approved=True, approval_id="another")

    @table("answer", ["result", "error"])
    def test_an_answer_over_the_limit_is_refused_and_stores_nothing(self, answer: str) -> None:
        store = self.make_store(limits=Limits(max_message_bytes=1_000))
        store.create_session("session", agent_type="agent")
        store.add_pending_tool_calls("session", {"call-1": ASK})
        before = contents(store, "session")
        with self.storage_untouched(), pytest.raises(LimitExceeded) as caught:
            store.submit_tool_result("session", "call-1", **_answer(answer, 1_000))
        assert caught.value.actual > caught.value.limit == 1_000
        with pytest.raises(LimitExceeded):
            store.add_pending_tool_calls("session", {"call-2": {**ASK, "input": "x" * 1_000}})
        assert contents(store, "session") == before
        assert outcomes_of(store.submit_tool_result("session", "call-1", **_answer(answer, 998))) == [
            "accepted"
        ]

    def test_answers_that_outgrow_the_state_are_refused(self) -> None:
        store = self.make_store(limits=Limits(max_state_bytes=1_000))
        store.create_session("session", agent_type="agent")
        store.add_pending_tool_calls("session", {"call-1": ASK, "call-2": ASK})
        store.submit_tool_result("session", "call-1", result="x" * 500)
        before = contents(store, "session")
        with pytest.raises(LimitExceeded):
            store.submit_tool_result("session", "call-2", result="x" * 500)
        assert contents(store, "session") == before

    @table("status", ["completed", "failed"])
    def test_a_session_that_has_ended_waits_for_nobody(
        self, store: StateStore, session_id: str, status: str
    ) -> None:
        calls = {name: {**ASK, "deadline": LONG_AGO} for name in ("open", "answered")}
        store.add_pending_tool_calls(session_id, calls)
        store.submit_tool_result(session_id, "answered", result=1)
        store.update_status(session_id, status)
        before = contents(store, session_id)
        outcomes = outcomes_of(
            *(store.submit_tool_result(session_id, name, result=2) for name in ("open", "answered"))
        )
        assert outcomes == ["unknown_tool_call", "already_completed"]
        assert store.find_expired_pending() == []
        assert contents(store, session_id) == before

    def test_of_two_answers_at_once_one_is_accepted(self, store: StateStore, session_id: str) -> None:
        store.add_pending_tool_calls(session_id, {"call-1": ASK})
        submissions = self.at_once(
            *(lambda n=n: store.submit_tool_result(session_id, "call-1", result=n) for n in range(6))
        )
        assert all(isinstance(submission, Submission) for submission in submissions), submissions
        accepted = [n for n, each in enumerate(submissions) if getattr(each, "outcome", "") == "accepted"]
        assert len(accepted) == 1
        assert store.take_tool_results(session_id)["call-1"]["result"] == accepted[0]

    def test_calls_and_answers_of_a_whole_tree_at_once_all_count(self, store: StateStore) -> None:
        """Ask from a whole tree at once. Asking locks two sessions, each time in a different order."""
        create_family(store)
        names = ["root", "child", "grandchild"]
        asked = self.at_once(
            *(
                lambda name=name, n=n: store.add_pending_tool_calls(name, {f"{name}-{n}": ASK})
                for n in range(3)
                for name in names
            )
        )
        assert asked == [None] * 9
        calls = [f"{name}-{n}" for n in range(3) for name in names]
        answered = self.at_once(
            *(lambda call=call: store.submit_tool_result("child", call, result=call) for call in calls)
        )
        assert outcomes_of(*answered) == ["accepted"] * 9  # type: ignore[arg-type]
        for name in names:
            taken = store.take_tool_results(name)
            assert {call: answer["result"] for call, answer in taken.items()} == {
                f"{name}-{n}": f"{name}-{n}" for n in range(3)
            }

    # Taking

    def test_taking_leaves_what_nobody_has_answered(self, store: StateStore, session_id: str) -> None:
        store.add_pending_tool_calls(session_id, dict.fromkeys("abc", ASK))
        store.submit_tool_result(session_id, "c", result=1)
        store.submit_tool_result(session_id, "a", error="no")
        version = loaded(store, session_id).version
        assert list(store.take_tool_results(session_id, expected_version=version)) == ["a", "c"]
        state = loaded(store, session_id)
        assert state.version == version + 1
        assert list(state.pending_client_tool_calls) == ["b"]
        assert list(state.completed_client_tool_calls) == ["a", "c"]
        assert store.take_tool_results(session_id) == {}
        assert loaded(store, session_id).version == version + 1

    def test_taking_asks_for_the_version_it_expects(self, store: StateStore, session_id: str) -> None:
        store.add_pending_tool_calls(session_id, {"call-1": ASK})
        store.submit_tool_result(session_id, "call-1", result=1)
        before = contents(store, session_id)
        with pytest.raises(StaleStateError):
            store.take_tool_results(session_id, expected_version=1)
        assert contents(store, session_id) == before

    def test_answers_can_be_taken_once(self, store: StateStore, session_id: str) -> None:
        store.add_pending_tool_calls(session_id, {"call-1": ASK})
        store.submit_tool_result(session_id, "call-1", result=1)
        taken = self.at_once(*(lambda: store.take_tool_results(session_id) for _ in range(4)))
        assert sorted(len(each) for each in taken if isinstance(each, dict)) == [0, 0, 0, 1]

    def test_old_answers_make_room_and_stay_answered(self) -> None:
        store = self.make_store(limits=Limits(max_state_bytes=8_000))
        store.create_session("session", agent_type="agent")
        for number in range(10):
            call = f"call-{number}"
            store.add_pending_tool_calls("session", {call: ASK})
            store.submit_tool_result("session", call, result="x" * 900)
            assert store.take_tool_results("session")[call]["result"] == "x" * 900
        completed = loaded(store, "session").completed_client_tool_calls
        assert len(completed) == 10
        assert "result" in completed["call-9"]
        assert completed["call-0"].keys() == {"submitted_at"}
        assert outcomes_of(store.submit_tool_result("session", "call-0", result=1)) == ["already_completed"]
        assert store.save_state("session", loaded(store, "session")) > 0
