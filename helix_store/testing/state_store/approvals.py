"""Tests for approvals: who may answer, what exactly they approve, and how many people must approve."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from helix_store.core.approvals import ApprovedCall, call_digest
from helix_store.core.contracts import StateStore
from helix_store.core.types import Submission
from helix_store.exceptions import InvalidPayload, NotApproved, NotPermitted, NotSupportedOnBackend
from helix_store.stores import SessionHandle, Step
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import contents, loaded
from helix_store.testing.state_store.tool_calls import APPROVE, ASK, LONG_AGO, outcomes_of

__all__ = [
    "DIGEST",
    "FORGED",
    "ApprovalContract",
    "approve",
    "ask_approval",
    "forge_answer",
    "step_of",
    "use_once",
    "used_in",
]

_PAY: Final = "auth.change_user"
"""A permission that exists in each database of a Django project with users."""
_TWO: Final = {**APPROVE, "approvals": 2}
_EDITABLE: Final = {**APPROVE, "editable": True}
_CHEAPER: Final = {"amount": 6.5}
DIGEST: Final = call_digest(APPROVE["tool_name"], APPROVE["input"])
FORGED: Final[Mapping[str, Any]] = {
    "approved": True,
    "reason": None,
    "submitted_at": LONG_AGO,
    "actors": ["user:1"],
}
"""An answer that an agent writes into its own state."""
_CHEAPER_DIGEST: Final = call_digest(APPROVE["tool_name"], _CHEAPER)


@dataclass
class _User:
    pk: int | None = 7
    is_active: bool = True
    permissions: tuple[str, ...] = (_PAY,)

    username: str = "mia"

    def get_username(self) -> str:
        return self.username

    def has_perm(self, perm: str, obj: Any = None) -> bool:
        return perm in self.permissions


def approve(store: StateStore, session_id: str, **given: Any) -> Submission:
    return store.submit_tool_result(
        session_id, "call", **{"approved": True, "approval_id": "approval", **given}
    )


def _pending(store: StateStore, session_id: str) -> dict[str, Any]:
    call: dict[str, Any] = loaded(store, session_id).pending_client_tool_calls["call"]
    return call


def ask_approval(
    store: StateStore, session_id: str, call: dict[str, Any] = APPROVE, tool_call_id: str = "call"
) -> None:
    store.add_pending_tool_calls(session_id, {tool_call_id: call})


def forge_answer(
    store: StateStore,
    session_id: str,
    tool_call_id: str = "call",
    answer: Mapping[str, Any] = FORGED,
    *,
    is_taken: bool = False,
) -> None:
    """Write an answer that nobody has given into the state, as an agent can."""
    state = loaded(store, session_id)
    if is_taken:
        del state.pending_client_tool_calls[tool_call_id]
        state.completed_client_tool_calls[tool_call_id] = dict(answer)
    else:
        state.pending_client_tool_calls[tool_call_id] |= answer
    store.save_state(session_id, state)


def step_of(store: StateStore, session_id: str, step_id: str | None = None) -> Step:
    return SessionHandle(store, session_id).step(step_id)


def used_in(step: Step, tool_call_id: str = "call") -> ApprovedCall:
    try:
        return step.use_approval(tool_call_id)
    except NotSupportedOnBackend:
        pytest.skip("this store does not keep what was approved")


def use_once(store: StateStore, session_id: str, step_id: str | None = None) -> ApprovedCall:
    """Use the approval in a separate step."""
    with step_of(store, session_id, step_id) as step:
        return used_in(step)


class ApprovalContract(StoreTests):
    # The digest

    def test_a_call_shows_the_digest_of_what_it_would_do(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id)
        assert _pending(store, session_id)["digest"] == DIGEST == call_digest("pay", {"amount": 7.0})
        assert len(DIGEST) == 64

    def test_an_answer_to_another_content_is_not_stored(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id)
        before = contents(store, session_id)
        for answer in ({}, {"approved": False}):
            submission = approve(store, session_id, digest=_CHEAPER_DIGEST, **answer)
            assert outcomes_of(submission) == ["changed"]
            assert (submission.session_id, submission.new_version) == (session_id, None)
        assert contents(store, session_id) == before
        assert outcomes_of(approve(store, session_id, digest=DIGEST)) == ["accepted"]

    def test_an_answer_to_a_replaced_input_is_not_stored(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id)
        state = loaded(store, session_id)
        state.pending_client_tool_calls["call"]["input"] = _CHEAPER
        store.save_state(session_id, state)
        assert outcomes_of(approve(store, session_id, digest=DIGEST)) == ["changed"]
        assert _pending(store, session_id)["digest"] == _CHEAPER_DIGEST
        assert outcomes_of(approve(store, session_id, digest=_CHEAPER_DIGEST)) == ["accepted"]

    def test_a_call_without_a_digest_can_be_answered(self, store: StateStore, session_id: str) -> None:
        state = loaded(store, session_id)
        state.pending_client_tool_calls = {"call": APPROVE}
        store.save_state(session_id, state)
        assert outcomes_of(approve(store, session_id, digest=_CHEAPER_DIGEST)) == ["changed"]
        assert outcomes_of(approve(store, session_id, digest=DIGEST)) == ["accepted"]

    # What a call may demand

    @table(
        "demands",
        [
            {"permission": 1},
            {"permission": ""},
            {"permission": "pay"},
            {"permission": "shop pay.now"},
            {"permission": "shop.pay now"},
            {"permission": "auth..change_user"},
            {"permision": _PAY},
            {"approval": 2},
            {"note": "for us"},
            {"metadata": ["for us"]},
            {"deadline": 3600},
            {"deadline": 3_600_000},
            {"deadline": datetime(1999, 12, 31, tzinfo=UTC)},
            {"permission": ".pay"},
            {"permission": "shop."},
            {"requester": 7},
            {"requester": ""},
            {"requester": "x" * 256},
            {"approvals": 0},
            {"approvals": 11},
            {"approvals": True},
            {"approvals": "2"},
            {"approvals": 2.0},
            {"approvals": None},
            {"editable": 1},
            {"editable": None},
            {"approved_by": ["user:1"]},
            {"actors": ["user:1"]},
            {"original_input": 1},
        ],
        shared=True,
    )
    def test_invalid_demands_are_refused_before_storage_is_used(
        self, store: StateStore, session_id: str, demands: dict[str, Any]
    ) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            ask_approval(store, session_id, {**APPROVE, **demands})

    @table(
        ("slip", "words"),
        [
            ({"permision": _PAY}, "permision: did you mean permission?"),
            ({"approval": 2}, "approval: did you mean approvals?"),
            ({"requestor": "mia"}, "requestor: did you mean requester?"),
            ({"deadline": 3600}, "pass a timedelta"),
        ],
    )
    def test_a_slip_in_an_approval_names_what_is_meant(
        self, store: StateStore, session_id: str, slip: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(InvalidPayload, match=re.escape(words)):
            ask_approval(store, session_id, {**APPROVE, **slip})

    def test_own_data_of_an_approval_is_metadata(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id, {**APPROVE, "metadata": {"note": ["for us"]}})
        assert _pending(store, session_id)["metadata"] == {"note": ["for us"]}
        store.add_pending_tool_calls(session_id, {"asks": {**ASK, "note": "for us", "deadline": 3600}})
        assert loaded(store, session_id).pending_client_tool_calls["asks"]["note"] == "for us"

    def test_a_step_asks_for_an_approval(self, store: StateStore, session_id: str) -> None:
        with step_of(store, session_id) as step:
            step.ask_approval("call", "pay", {"amount": 7.0})
            step.ask_approval(
                "whole",
                "pay",
                7,
                permission=_PAY,
                requester=_User(),
                approvals=2,
                editable=True,
                deadline=timedelta(days=7),
                on_expiry="fail",
                metadata={"note": 1},
            )
            with pytest.raises(InvalidPayload):
                step.ask_approval("invalid", "pay", 7, approvals=0)
        calls = loaded(store, session_id).pending_client_tool_calls
        assert calls.keys() == {"call", "whole"}
        assert calls["call"]["digest"] == DIGEST
        assert {name: calls["call"].get(name) for name in ("approval_id", "deadline", "on_expiry")} == {
            "approval_id": "call",
            "deadline": None,
            "on_expiry": "reject",
        }
        expected = {
            "permission": _PAY,
            "requester": "user:7",
            "requester_name": "mia",
            "approvals": 2,
            "editable": True,
            "on_expiry": "fail",
            "metadata": {"note": 1},
        }
        assert {name: calls["whole"][name] for name in expected} == expected
        assert calls["whole"]["deadline"] == calls["whole"]["requested_at"] + 7 * 24 * 3_600_000

    @table("kind", ["wait_for", "ask_approval", "add_pending_tool_calls", "suspend", "save_state"])
    def test_an_approval_without_a_deadline_may_have_the_default_reject(
        self, store: StateStore, session_id: str, kind: str
    ) -> None:
        entry = {"tool_name": "pay", "input": {"amount": 7.0}, "on_expiry": "reject"}
        asked = {"call": {**entry, "approval_id": "call"}}
        for _ in range(1 if kind in ("suspend", "save_state") else 2):
            if kind == "wait_for":
                with step_of(store, session_id) as step:
                    step.wait_for({"call": entry})
            elif kind == "ask_approval":
                with step_of(store, session_id) as step:
                    step.ask_approval("call", "pay", entry["input"])
            elif kind == "add_pending_tool_calls":
                store.add_pending_tool_calls(session_id, asked)
            elif kind == "suspend":
                store.suspend(session_id, kind="suspended_client_tool", context={}, pending=asked)
            else:
                store.add_pending_tool_calls(session_id, {"call": {**APPROVE, "approval_id": "call"}})
                state = loaded(store, session_id)
                state.pending_client_tool_calls["call"]["on_expiry"] = "reject"
                store.save_state(session_id, state)
        call = loaded(store, session_id).pending_client_tool_calls["call"]
        expected = {"approval_id": "call", "deadline": None, "on_expiry": "reject"}
        assert {name: call[name] for name in expected} == expected
        assert store.find_expired_pending() == []
        # Without a deadline, the default makes no difference: this is the same request.
        again = {name: value for name, value in call.items() if name not in ("on_expiry", "digest")}
        store.add_pending_tool_calls(session_id, {"call": again})
        accepted = store.submit_tool_result(session_id, "call", approved=True, approval_id="call")
        assert outcomes_of(accepted) == ["accepted"]

    @table("demand", [{"approvals": 1}, {"editable": False}], shared=True)
    def test_only_an_approval_has_a_number_and_can_be_edited(
        self, store: StateStore, session_id: str, demand: dict[str, Any]
    ) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            ask_approval(store, session_id, {**ASK, **demand})

    # Who answers

    @table("actor", ["", "user:1", "x" * 256, 7])
    def test_an_invalid_actor_is_refused_before_storage_is_used(
        self, store: StateStore, session_id: str, actor: Any
    ) -> None:
        ask_approval(store, session_id)
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            approve(store, session_id, actor=actor)

    def test_a_user_who_is_not_stored_is_no_actor(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id)
        before = contents(store, session_id)
        with pytest.raises(InvalidPayload):
            approve(store, session_id, actor=_User(pk=None))
        assert contents(store, session_id) == before

    def test_an_answer_keeps_who_gave_it(self, store: StateStore, session_id: str) -> None:
        store.add_pending_tool_calls(session_id, {"call": APPROVE, "ask": ASK, "fail": ASK, "plain": ASK})
        approve(store, session_id, actor=_User(), approved=False)
        store.submit_tool_result(session_id, "ask", result=1, actor="the app")
        store.submit_tool_result(session_id, "fail", error=1, actor="the app")
        store.submit_tool_result(session_id, "plain", result=1)
        taken = store.take_tool_results(session_id)
        assert [answer.get("actors") for answer in taken.values()] == [
            ["user:7"],
            ["the app"],
            ["the app"],
            None,
        ]
        assert loaded(store, session_id).completed_client_tool_calls == taken

    @table(
        "actor",
        [
            None,
            "somebody",
            _User(permissions=()),
            _User(is_active=False),
            _User(None, is_active=False, permissions=()),
        ],
    )
    @table("call", [{**APPROVE, "permission": _PAY}, {**ASK, "permission": _PAY}])
    def test_a_call_with_a_permission_needs_an_active_user_who_has_it(
        self, store: StateStore, session_id: str, call: dict[str, Any], actor: Any
    ) -> None:
        ask_approval(store, session_id, call)
        before = contents(store, session_id)
        is_approval = "approval_id" in call
        for answer in ({"approved": True}, {"approved": False}) if is_approval else ({"result": 1},):
            given = {**answer, "approval_id": "approval"} if is_approval else answer
            with pytest.raises(NotPermitted) as refused:
                store.submit_tool_result(session_id, "call", actor=actor, digest="another", **given)
            assert refused.value.tool_call_id == "call"
        assert contents(store, session_id) == before
        given = {"approved": True, "approval_id": "approval"} if is_approval else {"result": 1}
        accepted = store.submit_tool_result(session_id, "call", actor=_User(), **given)
        assert outcomes_of(accepted) == ["accepted"]

    @table(
        ("requester", "actor"),
        [
            ("ann", "ann"),
            ("ann", None),
            ("user:7", _User()),
            ("7", _User()),
            ("mia", _User()),
            (_User(), _User()),
            (_User(), "mia"),
            (_User(), "7"),
            ("user:7", "7"),
        ],
    )
    def test_a_requester_does_not_answer(
        self, store: StateStore, session_id: str, requester: Any, actor: Any
    ) -> None:
        ask_approval(store, session_id, {**APPROVE, "requester": requester})
        before = contents(store, session_id)
        for approved in (True, False):
            with pytest.raises(NotPermitted):
                approve(store, session_id, actor=actor, approved=approved)
        assert contents(store, session_id) == before
        assert outcomes_of(approve(store, session_id, actor="bob")) == ["accepted"]

    @table(
        ("requester", "actor"),
        [
            (_User(), _User(8)),
            (_User(), "mi"),
            (_User(username="user:9"), "9"),
            ({"requester": "mia", "requester_name": "ann"}, "ann"),
            ("user:7", "mia"),
            ("7", "mia"),
        ],
    )
    def test_somebody_else_answers(
        self, store: StateStore, session_id: str, requester: Any, actor: Any
    ) -> None:
        given = requester if isinstance(requester, dict) else {"requester": requester}
        ask_approval(store, session_id, {**APPROVE, **given})
        assert outcomes_of(approve(store, session_id, actor=actor)) == ["accepted"]

    def test_a_completed_or_unknown_call_is_reported_to_everybody(
        self, store: StateStore, session_id: str
    ) -> None:
        call = {**APPROVE, "permission": _PAY}
        store.add_pending_tool_calls(session_id, {"call": call, "open": call})
        approve(store, session_id, actor=_User())
        again = approve(store, session_id, actor="nobody", digest="another", input=1)
        unknown = store.submit_tool_result(session_id, "other", result=1, actor="nobody", digest="another")
        assert outcomes_of(again, unknown) == ["already_completed", "unknown_tool_call"]
        store.update_status(session_id, "completed")
        ended = store.submit_tool_result(session_id, "open", error=1)
        assert outcomes_of(ended) == ["unknown_tool_call"]

    # Editing

    def test_an_edited_input_comes_with_its_own_digest(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id, _EDITABLE)
        assert outcomes_of(approve(store, session_id, digest=DIGEST, input=_CHEAPER, actor="ann")) == [
            "accepted"
        ]
        answer = store.take_tool_results(session_id)["call"]
        assert (answer["input"], answer["digest"]) == (_CHEAPER, _CHEAPER_DIGEST)
        used = use_once(store, session_id)
        assert used == ApprovedCall(tool_name="pay", input=_CHEAPER, actors=["ann"], digest=_CHEAPER_DIGEST)

    def test_an_input_may_become_null(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id, _EDITABLE)
        approve(store, session_id, input=None)
        assert use_once(store, session_id).input is None

    @table(
        ("call", "answer"),
        [
            (APPROVE, {"input": _CHEAPER}),
            ({**APPROVE, "editable": False}, {"input": APPROVE["input"]}),
            (_EDITABLE, {"input": {1, 2}}),
            (_EDITABLE, {"input": _CHEAPER, "approved": False}),
            (_EDITABLE, {"input": _CHEAPER, "approved": None, "error": 1}),
        ],
    )
    def test_only_the_approval_of_an_editable_call_changes_it(
        self, store: StateStore, session_id: str, call: dict[str, Any], answer: dict[str, Any]
    ) -> None:
        ask_approval(store, session_id, call)
        before = contents(store, session_id)
        with pytest.raises(InvalidPayload):
            approve(store, session_id, **answer)
        assert contents(store, session_id) == before

    def test_asking_the_same_again_leaves_what_people_did(self, store: StateStore, session_id: str) -> None:
        call = {**_TWO, "editable": True}
        ask_approval(store, session_id, call)
        approve(store, session_id, actor="ann", input=_CHEAPER)
        before = contents(store, session_id)
        ask_approval(store, session_id, call)
        assert contents(store, session_id) == before

    # Several approvals

    def test_two_people_approve(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id, _TWO)
        version = loaded(store, session_id).version
        first = approve(store, session_id, actor="ann")
        assert (outcomes_of(first), first.new_version) == (["recorded"], version + 1)
        assert _pending(store, session_id)["approved_by"] == ["ann"]
        assert store.take_tool_results(session_id) == {}
        again = approve(store, session_id, actor="ann", digest=DIGEST)
        assert (outcomes_of(again), again.new_version) == (["already_recorded"], None)
        with pytest.raises(NotApproved):
            use_once(store, session_id)
        assert outcomes_of(approve(store, session_id, actor=_User())) == ["accepted"]
        assert outcomes_of(approve(store, session_id, actor="bob")) == ["already_completed"]
        assert store.take_tool_results(session_id)["call"]["actors"] == ["ann", "user:7"]
        assert use_once(store, session_id).actors == ["ann", "user:7"]

    def test_one_rejection_is_final(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id, _TWO)
        approve(store, session_id, actor="ann")
        assert outcomes_of(approve(store, session_id, actor="ann", approved=False)) == ["accepted"]
        assert outcomes_of(approve(store, session_id, actor="bob")) == ["already_completed"]
        assert store.take_tool_results(session_id)["call"]["actors"] == ["ann"]

    @table("answer", [{}, {"approved": False}, {"approved": None, "error": 1}])
    def test_an_answer_to_a_call_for_several_approvals_has_an_actor(
        self, store: StateStore, session_id: str, answer: dict[str, Any]
    ) -> None:
        ask_approval(store, session_id, _TWO)
        with pytest.raises(InvalidPayload):
            approve(store, session_id, **answer)
        assert "approved_by" not in _pending(store, session_id)

    def test_an_edit_discards_the_earlier_approvals(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id, {**_TWO, "approvals": 3, "editable": True})
        approve(store, session_id, actor="ann")
        approve(store, session_id, actor="bob")
        assert outcomes_of(approve(store, session_id, actor="eve", input=_CHEAPER)) == ["recorded"]
        pending = _pending(store, session_id)
        assert (pending["approved_by"], pending["digest"]) == (["eve"], _CHEAPER_DIGEST)
        assert pending["input"] == _CHEAPER
        assert outcomes_of(approve(store, session_id, actor="ann", digest=DIGEST)) == ["changed"]
        rest = [approve(store, session_id, actor=name, digest=_CHEAPER_DIGEST) for name in ("ann", "bob")]
        assert outcomes_of(*rest) == ["recorded", "accepted"]
        answer = store.take_tool_results(session_id)["call"]
        assert (answer["actors"], answer["input"]) == (["eve", "ann", "bob"], _CHEAPER)
        assert answer["digest"] == _CHEAPER_DIGEST

    def test_the_same_input_is_no_edit(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id, {**_TWO, "editable": True})
        approve(store, session_id, actor="ann")
        assert outcomes_of(approve(store, session_id, actor="bob", input=APPROVE["input"])) == ["accepted"]

    def test_approvals_of_a_replaced_input_do_not_count(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id, _TWO)
        approve(store, session_id, actor="ann")
        state = loaded(store, session_id)
        state.pending_client_tool_calls["call"]["input"] = _CHEAPER
        store.save_state(session_id, state)
        assert "approved_by" not in _pending(store, session_id)
        assert outcomes_of(approve(store, session_id, actor="bob")) == ["recorded"]

    def test_many_who_approve_at_once_are_each_counted_once(self, store: StateStore, session_id: str) -> None:
        ask_approval(store, session_id, {**APPROVE, "approvals": 3})
        names = ["ann", "ann", "bob", "bob", "eve", "eve", "joe", "joe"]
        found = self.at_once(*(lambda name=name: approve(store, session_id, actor=name) for name in names))
        outcomes = Counter(outcomes_of(*(each for each in found if isinstance(each, Submission))))
        assert (outcomes["accepted"], outcomes["recorded"]) == (1, 2)
        actors = store.take_tool_results(session_id)["call"]["actors"]
        assert len(set(actors)) == len(actors) == 3
