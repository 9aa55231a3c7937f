"""Tests for refs to the sub-agents that a session has started."""

from __future__ import annotations

from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import SessionStatus, SubSessionRef
from helix_store.exceptions import (
    ConflictError,
    InvalidPayload,
    NotFoundError,
)
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import Contents, StoreTests
from helix_store.testing.state_store.samples import contents

__all__ = ["SubSessionContract"]

LOCAL = SubSessionRef(sub_session_id="local", agent_type="helper", parent_tool_call_id="call-1")
REMOTE = SubSessionRef(
    sub_session_id="remote",
    agent_type="translator",
    status="queued",
    location="remote",
    remote={"url": "https://example.com", "retries": 1.0, "headers": {}},
    output=[1, {"a": None}],
    error={"code": 7},
)


class SubSessionContract(StoreTests):
    def test_refs_come_back_as_they_were_added_and_in_order(self, store: StateStore, session_id: str) -> None:
        store.add_sub_session_refs(session_id, [REMOTE])
        store.add_sub_session_refs(
            session_id, [LOCAL, SubSessionRef(sub_session_id="a", agent_type="helper")]
        )
        assert repr(store.get_sub_session_refs(session_id)) == repr(
            [REMOTE, LOCAL, SubSessionRef(sub_session_id="a", agent_type="helper", status="running")]
        )

    def test_a_ref_may_be_given_as_a_dict(self, store: StateStore, session_id: str) -> None:
        store.add_sub_session_refs(session_id, [LOCAL.to_dict(), {"sub_session_id": "a", "agent_type": "b"}])
        assert store.get_sub_session_refs(session_id) == [
            LOCAL,
            SubSessionRef(sub_session_id="a", agent_type="b"),
        ]

    def test_a_session_without_sub_agents_has_no_refs(self, store: StateStore, session_id: str) -> None:
        store.add_sub_session_refs(session_id, [])
        assert store.get_sub_session_refs(session_id) == []

    def test_refs_belong_to_their_session(self, store: StateStore, session_id: str) -> None:
        store.create_session("other", agent_type="agent")
        store.add_sub_session_refs(session_id, [LOCAL])
        store.add_sub_session_refs("other", [SubSessionRef(sub_session_id="local", agent_type="another")])
        assert store.get_sub_session_refs(session_id) == [LOCAL]

    def test_adding_the_same_ref_again_changes_nothing(self, store: StateStore, session_id: str) -> None:
        store.add_sub_session_refs(session_id, [LOCAL])
        store.update_sub_session_ref(session_id, "local", status="completed", output="done")
        before = contents(store, session_id)
        store.add_sub_session_refs(session_id, [LOCAL, LOCAL])
        assert contents(store, session_id) == before

    @table("other", [{"agent_type": "another"}, {"parent_tool_call_id": None}, {"location": "remote"}])
    def test_adding_a_ref_that_differs_is_refused_and_adds_none(
        self, store: StateStore, session_id: str, other: dict[str, Any]
    ) -> None:
        store.add_sub_session_refs(session_id, [LOCAL])
        differing = {**LOCAL.to_dict(), **other}
        with pytest.raises(ConflictError):
            store.add_sub_session_refs(session_id, [REMOTE, differing])
        assert store.get_sub_session_refs(session_id) == [LOCAL]

    def test_an_update_changes_what_is_given_and_leaves_the_rest(
        self, store: StateStore, session_id: str
    ) -> None:
        store.add_sub_session_refs(session_id, [LOCAL, REMOTE])
        ref = store.update_sub_session_ref(session_id, "remote", status="completed")
        expected = {**REMOTE.to_dict(), "status": "completed"}
        assert repr(ref.to_dict()) == repr(expected)
        ref = store.update_sub_session_ref(session_id, "remote", output={"a": 1.0})
        expected["output"] = {"a": 1.0}
        assert repr(ref.to_dict()) == repr(expected)
        ref = store.update_sub_session_ref(session_id, "remote", error="boom")
        expected["error"] = "boom"
        assert repr(ref.to_dict()) == repr(expected)
        assert repr(store.get_sub_session_refs(session_id)) == repr([LOCAL, ref])

    def test_a_status_may_be_a_member_of_an_enumeration(self, store: StateStore, session_id: str) -> None:
        store.add_sub_session_refs(
            session_id,
            [SubSessionRef(sub_session_id="sub", agent_type="helper", status=SessionStatus.ACTIVE)],
        )
        assert store.get_sub_session_refs(session_id)[0].status == "active"
        updated = store.update_sub_session_ref(session_id, "sub", status=SessionStatus.COMPLETED)
        assert (updated.status, type(updated.status)) == ("completed", str)

    @table("value", [{}, [], "", 0, False, -0.0])
    def test_an_empty_output_or_error_is_a_value(
        self, store: StateStore, session_id: str, value: Any
    ) -> None:
        store.add_sub_session_refs(session_id, [REMOTE])
        ref = store.update_sub_session_ref(session_id, "remote", output=value, error=value)
        assert repr((ref.output, ref.error)) == repr((value, value))
        assert repr(store.get_sub_session_refs(session_id)) == repr([ref])

    def test_a_ref_that_was_never_added_is_not_found(self, store: StateStore, session_id: str) -> None:
        store.create_session("other", agent_type="agent")
        store.add_sub_session_refs("other", [LOCAL])
        with pytest.raises(NotFoundError):
            store.update_sub_session_ref(session_id, "local", status="completed")
        assert store.get_sub_session_refs("other") == [LOCAL]

    @table(
        "bad",
        [
            {"agent_type": "helper"},
            {"sub_session_id": "", "agent_type": "helper"},
            {"sub_session_id": "a", "agent_type": "\x00"},
            {"sub_session_id": "a", "agent_type": "helper", "location": "moon"},
            {"sub_session_id": "a", "agent_type": "helper", "location": None},
            {"sub_session_id": "a", "agent_type": "helper", "remote": [1]},
            {"sub_session_id": "a", "agent_type": "helper", "remote": {"at": float("nan")}},
            {"sub_session_id": "a", "agent_type": "helper", "output": {1}},
            {"sub_session_id": "a", "agent_type": "helper", "unknown": 1},
            "a",
            None,
        ],
        shared=True,
    )
    def test_one_bad_ref_keeps_all_of_them_out(self, store: StateStore, session_id: str, bad: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            store.add_sub_session_refs(session_id, [LOCAL, bad])
        assert store.get_sub_session_refs(session_id) == []

    @table("bad", [LOCAL, LOCAL.to_dict(), "local"], shared=True)
    def test_refs_are_a_list(self, store: StateStore, session_id: str, bad: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            store.add_sub_session_refs(session_id, bad)

    @table("bad", [{"status": ""}, {"status": 7}, {"output": {1}}, {"error": float("inf")}], shared=True)
    def test_a_ref_update_that_cannot_be_stored_is_refused(
        self, stored: StateStore, before: Contents, bad: dict[str, Any]
    ) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            stored.update_sub_session_ref("session", "sub", **bad)
        assert contents(stored, "session") == before

    def test_refs_that_were_read_are_detached_from_the_store(
        self, store: StateStore, session_id: str
    ) -> None:
        store.add_sub_session_refs(session_id, [REMOTE])
        (ref,) = store.get_sub_session_refs(session_id)
        assert ref.remote is not None
        ref.remote["changed"] = True
        ref.output.append("changed")
        assert store.get_sub_session_refs(session_id) == [REMOTE]

    def test_the_same_refs_added_at_once_are_recorded_once(self, store: StateStore, session_id: str) -> None:
        outcomes = self.at_once(*[lambda: store.add_sub_session_refs(session_id, [LOCAL, REMOTE])] * 8)
        assert outcomes == [None] * 8
        assert store.get_sub_session_refs(session_id) == [LOCAL, REMOTE]
