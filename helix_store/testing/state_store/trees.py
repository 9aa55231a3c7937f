"""Tests that tool calls stay in their tree, whatever the root's record says."""

from __future__ import annotations

import pytest

from helix_store.core.contracts import StateStore
from helix_store.exceptions import ConflictError
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import contents, loaded
from helix_store.testing.state_store.tool_calls import APPROVE, ASK, create_family, outcomes_of

__all__ = ["TreeContract"]


def _record_owner(store: StateStore, session_id: str, tool_call_id: str, owner_id: str) -> None:
    state = loaded(store, session_id)
    state.client_tool_call_ownership = {tool_call_id: owner_id}
    store.save_state(session_id, state)


class TreeContract(StoreTests):
    @table("through", ["root", "child", "grandchild"])
    def test_an_answer_never_reaches_a_session_of_another_tree(self, store: StateStore, through: str) -> None:
        create_family(store)
        store.add_pending_tool_calls("stranger", {"call-1": ASK, "call-2": APPROVE})
        for tool_call_id in ("call-1", "call-2"):
            _record_owner(store, "root", tool_call_id, "stranger")
            before = {name: contents(store, name) for name in ("root", "child", "grandchild", "stranger")}
            given = {"result": 1} if tool_call_id == "call-1" else {"error": "no"}
            submission = store.submit_tool_result(through, tool_call_id, **given)
            assert outcomes_of(submission) == ["unknown_tool_call"]
            assert (submission.session_id, submission.new_version) == (None, None)
            assert {name: contents(store, name) for name in before} == before
        assert outcomes_of(store.submit_tool_result("stranger", "call-1", result=1)) == ["accepted"]

    def test_an_id_that_was_used_again_outside_of_the_tree_is_not_the_owner(self, store: StateStore) -> None:
        create_family(store)
        store.add_pending_tool_calls("child", {"call-1": ASK})
        store.delete_session("child")
        store.create_session("child", agent_type="agent")
        store.add_pending_tool_calls("child", {"call-1": ASK})
        assert outcomes_of(store.submit_tool_result("root", "call-1", result=1)) == ["unknown_tool_call"]
        assert "submitted_at" not in loaded(store, "child").pending_client_tool_calls["call-1"]

    def test_an_answer_never_reaches_a_session_of_another_tenant(self, store: StateStore) -> None:
        create_family(store)
        theirs = self.make_store(tenant="theirs")
        theirs.create_session("child", agent_type="agent")
        theirs.add_pending_tool_calls("child", {"call-1": ASK})
        _record_owner(store, "root", "call-1", "child")
        before = contents(theirs, "child")
        assert outcomes_of(store.submit_tool_result("root", "call-1", result=1)) == ["unknown_tool_call"]
        assert contents(theirs, "child") == before

    def test_sessions_without_a_recorded_root_are_trees_of_their_own(self, store: StateStore) -> None:
        for name in ("one", "another"):
            store.create_session(name, agent_type="agent")
            state = loaded(store, name)
            state.root_session_id = None
            store.save_state(name, state)
        before = contents(store, "another")
        with pytest.raises(ConflictError):
            store.add_pending_tool_calls("one", {"call-1": ASK}, owner_session_id="another")
        store.add_pending_tool_calls("one", {"call-2": ASK})
        _record_owner(store, "one", "call-1", "another")
        assert outcomes_of(store.submit_tool_result("one", "call-1", result=1)) == ["unknown_tool_call"]
        assert contents(store, "another") == before
        assert outcomes_of(store.submit_tool_result("one", "call-2", result=1)) == ["accepted"]
