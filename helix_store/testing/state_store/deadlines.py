"""Tests for overdue calls: they are found in order, and get their default unless they have an answer."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import PendingToolCall
from helix_store.exceptions import InvalidQuery
from helix_store.sessions.tool_calls import default_answer
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.tool_calls import (
    APPROVE,
    ASK,
    IN_A_WHILE,
    LONG_AGO,
    create_family,
    outcomes_of,
)

__all__ = ["DeadlineContract"]


class DeadlineContract(StoreTests):
    def test_overdue_calls_are_found_by_deadline(self, store: StateStore) -> None:
        create_family(store)
        deadlines = {"a": LONG_AGO + 5, "b": LONG_AGO + 1, "later": IN_A_WHILE, "never": None}
        for name, calls in (("root", deadlines), ("stranger", {"c": LONG_AGO + 3, "d": LONG_AGO})):
            store.add_pending_tool_calls(
                name, {call: {**ASK, "deadline": deadline} for call, deadline in calls.items()}
            )
        reject = {**APPROVE, "deadline": LONG_AGO + 4, "on_expiry": "reject"}
        store.add_pending_tool_calls("child", {"e": reject})
        found = store.find_expired_pending()
        assert [(call.session_id, call.tool_call_id) for call in found] == [
            ("stranger", "d"),
            ("root", "b"),
            ("stranger", "c"),
            ("child", "e"),
            ("root", "a"),
        ]
        assert found[3] == PendingToolCall(
            session_id="child",
            tool_call_id="e",
            tool_name="pay",
            deadline=LONG_AGO + 4,
            approval_id="approval",
            on_expiry="reject",
        )
        assert store.find_expired_pending(limit=2) == found[:2]

    def test_an_answered_call_is_overdue_no_more(self, store: StateStore, session_id: str) -> None:
        store.add_pending_tool_calls(
            session_id, {"a": {**ASK, "deadline": LONG_AGO}, "b": {**ASK, "deadline": LONG_AGO + 1}}
        )
        store.submit_tool_result(session_id, "a", result=1)
        assert [call.tool_call_id for call in store.find_expired_pending()] == ["b"]
        store.submit_tool_result(session_id, "b", result=1)
        assert store.find_expired_pending() == []
        store.take_tool_results(session_id)
        assert store.find_expired_pending() == []

    def test_the_moment_may_be_given(self, store: StateStore, session_id: str) -> None:
        store.add_pending_tool_calls(session_id, {"call-1": {**ASK, "deadline": IN_A_WHILE}})
        due = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=IN_A_WHILE)
        for now, expected in ((IN_A_WHILE - 1, 0), (IN_A_WHILE, 1), (due, 1), (None, 0)):
            assert len(store.find_expired_pending(now=now)) == expected
        for bad in (datetime(2030, 1, 1), 1_700_000_000, "now"):  # noqa: DTZ001  without a time zone
            with self.storage_untouched(), pytest.raises(InvalidQuery):
                store.find_expired_pending(now=bad)  # type: ignore[arg-type]
        for bad_limit in (0, -1, True, None):
            with self.storage_untouched(), pytest.raises(InvalidQuery):
                store.find_expired_pending(limit=bad_limit)  # type: ignore[arg-type]

    def test_overdue_calls_belong_to_their_tenant(self) -> None:
        ours, theirs = self.make_store(tenant="ours"), self.make_store(tenant="theirs")
        theirs.create_session("session", agent_type="agent")
        theirs.add_pending_tool_calls("session", {"call-1": {**ASK, "deadline": LONG_AGO}})
        assert ours.find_expired_pending() == []
        assert len(theirs.find_expired_pending()) == 1

    @table(
        ("call", "answer"),
        [
            ({**ASK, "on_expiry": {"result": None}}, {"result": None}),
            ({**APPROVE, "on_expiry": "reject"}, {"approved": False, "reason": "deadline_passed"}),
        ],
    )
    def test_a_default_is_an_answer_like_any_other(
        self, store: StateStore, session_id: str, call: dict[str, Any], answer: dict[str, Any]
    ) -> None:
        store.add_pending_tool_calls(session_id, {"call-1": {**call, "deadline": LONG_AGO}})
        (overdue,) = store.find_expired_pending()
        default = default_answer(overdue)
        assert default is not None
        assert outcomes_of(store.submit_tool_result(session_id, "call-1", **default)) == ["accepted"]
        late = store.submit_tool_result(session_id, "call-1", error="late")
        assert outcomes_of(late) == ["already_completed"]
        taken = store.take_tool_results(session_id)["call-1"]
        del taken["submitted_at"]
        assert taken == answer
