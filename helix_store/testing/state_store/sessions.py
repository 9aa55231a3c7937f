"""Tests for creating, loading and deleting sessions."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import (
    SessionMode,
    SessionState,
    SessionStatus,
    SubSessionRef,
)
from helix_store.exceptions import SessionExists, SessionNotFound
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import (
    commit_step,
    full_session,
    loaded,
    messages,
    stage,
)

__all__ = ["SessionContract"]

DISTINCT_IDS = [
    "a",
    "A",
    "a ",
    " a",
    "é",
    "e\u0301",
    "\uff41",
    "%",
    "_",
    "a%",
    "a\\",
    "a'",
    'a"',
    "..",
    "a/b",
    "🙂",
]


class SessionContract(StoreTests):
    # Creating

    def test_a_session_created_without_an_id_gets_a_new_time_ordered_one(self, store: StateStore) -> None:
        ids = [store.create_session(agent_type="agent").session_id for _ in range(5)]
        assert {uuid.UUID(session_id).version for session_id in ids} == {7}
        assert ids == sorted(set(ids))

    def test_a_new_session_is_active_at_version_one_and_holds_nothing(self, store: StateStore) -> None:
        state = store.create_session("session", agent_type="agent")
        assert state.created_at is not None
        assert state.created_at.utcoffset() is not None
        assert state.updated_at is not None
        assert state.updated_at.utcoffset() is not None
        assert state == SessionState(
            session_id="session",
            agent_type="agent",
            status=SessionStatus.ACTIVE,
            version=1,
            root_session_id="session",
            stream_id="session",
            created_at=state.created_at,
            updated_at=state.updated_at,
        )

    def test_a_new_session_keeps_everything_it_was_given(self, store: StateStore) -> None:
        store.create_session("parent", agent_type="agent")
        given: dict[str, Any] = {
            "agent_type": "agent",
            "user_id": "user",
            "parent_session_id": "parent",
            "tags": ["b", "a"],
            "metadata": {"plan": "pro"},
            "custom_state": {"z": 1.0, "a": [None]},
            "title": "Title",
            "workspace_id": "workspace",
            "directory": "/srv",
            "stream_id": "stream",
            "mode": SessionMode.PERSISTENT,
            "expires_at": 1_900_000_000_123,
        }
        state = store.create_session("session", **given)
        assert repr({name: getattr(state, name) for name in given}) == repr(given)

    def test_what_create_returns_is_what_load_returns(self, store: StateStore) -> None:
        created = store.create_session(agent_type="agent", custom_state={"a": [1]}, mode="standard")
        assert repr(store.load_state(created.session_id)) == repr(created)

    def test_a_taken_id_is_refused_and_the_session_stays_as_it_is(self, store: StateStore) -> None:
        before = store.create_session("session", agent_type="agent", custom_state={"a": 1})
        with pytest.raises(SessionExists) as caught:
            store.create_session("session", agent_type="another")
        assert caught.value.session_id == "session"
        assert repr(store.load_state("session")) == repr(before)

    def test_of_two_that_create_the_same_id_at_once_exactly_one_wins(self, store: StateStore) -> None:
        outcomes = self.at_once(
            *(lambda name=name: store.create_session("session", agent_type=name) for name in "abcdefgh")
        )
        (winner,) = [outcome for outcome in outcomes if isinstance(outcome, SessionState)]
        assert [type(outcome) for outcome in outcomes].count(SessionExists) == 7
        assert repr(store.load_state("session")) == repr(winner)

    def test_an_unknown_parent_is_refused_and_nothing_is_created(self, store: StateStore) -> None:
        with pytest.raises(SessionNotFound) as caught:
            store.create_session("session", agent_type="agent", parent_session_id="nobody")
        assert caught.value.session_id == "nobody"
        assert not store.session_exists("session")

    def test_the_root_of_a_session_is_the_root_of_its_parent_or_itself(self, store: StateStore) -> None:
        store.create_session("root", agent_type="agent")
        store.create_session("child", agent_type="agent", parent_session_id="root")
        store.create_session("grandchild", agent_type="agent", parent_session_id="child")
        assert [loaded(store, name).root_session_id for name in ("root", "child", "grandchild")] == [
            "root"
        ] * 3

    def test_creating_a_child_leaves_the_parent_as_it_is(self, store: StateStore) -> None:
        parent = store.create_session("parent", agent_type="agent")
        store.create_session("child", agent_type="agent", parent_session_id="parent")
        assert repr(store.load_state("parent")) == repr(parent)

    def test_session_ids_are_compared_by_code_point(self, store: StateStore) -> None:
        for name in DISTINCT_IDS:
            store.create_session(name, agent_type="agent", custom_state={"id": name})
        assert [loaded(store, name).custom_state["id"] for name in DISTINCT_IDS] == DISTINCT_IDS

    @table("name", ["x" * 255, "€" * 255, "\u2028", "a-s1-t2-abcdef"], shared=True)
    def test_an_unusual_id_within_the_rules_works_throughout(self, store: StateStore, name: str) -> None:
        store.create_session(name, agent_type="agent")
        commit = commit_step(store, name, 1, append=messages(1))
        assert store.get_checkpoint(name, commit.checkpoint_id) is not None
        assert store.get_message_count(name) == 1

    # Loading

    def test_a_session_exists_from_its_creation_to_its_deletion(self, store: StateStore) -> None:
        assert store.session_exists("session") is False
        store.create_session("session", agent_type="agent")
        assert store.session_exists("session") is True
        store.delete_session("session")
        assert store.session_exists("session") is False

    def test_loading_an_unknown_session_returns_none(self, store: StateStore) -> None:
        assert store.load_state("nobody") is None

    def test_what_a_load_returns_is_detached_from_the_store(self, store: StateStore) -> None:
        store.create_session("session", agent_type="agent", custom_state={"list": [1]}, tags=["t"])
        before = repr(store.load_state("session"))
        state = loaded(store, "session")
        state.custom_state["list"].append(2)
        state.tags.append("u")
        state.metadata["k"] = "v"
        assert repr(store.load_state("session")) == before

    def test_what_was_given_to_create_or_came_from_it_is_detached_too(self, store: StateStore) -> None:
        given = {"list": [1]}
        created = store.create_session("session", agent_type="agent", custom_state=given)
        given["list"].append(2)
        created.custom_state["list"].append(3)
        assert loaded(store, "session").custom_state == {"list": [1]}

    # Deleting

    def test_deleting_a_session_removes_all_its_data(self, store: StateStore) -> None:
        full_session(store, "session")
        assert store.delete_session("session") == 1
        assert store.load_state("session") is None
        assert store.get_latest_checkpoint("session") is None
        assert store.list_sessions().total == 0

    def test_a_deleted_id_can_be_used_again_and_starts_empty(self, store: StateStore) -> None:
        full_session(store, "session")
        store.delete_session("session")
        store.create_session("session", agent_type="agent")
        assert loaded(store, "session").version == 1
        assert store.get_messages("session").messages == []
        assert store.get_staged_changes("session", "step-3") == []
        assert store.list_checkpoints("session").items == []
        assert store.get_sub_session_refs("session") == []
        assert store.check_interrupt("session") is None
        assert store.start_run("session", "run-1").turn == 1

    def test_deleting_an_unknown_session_deletes_none(self, store: StateStore) -> None:
        store.create_session("session", agent_type="agent")
        assert store.delete_session("nobody") == 0
        assert store.delete_session("session") == 1
        assert store.delete_session("session") == 0

    def test_a_deletion_may_keep_the_usage(self, store: StateStore) -> None:
        full_session(store, "session")
        assert store.delete_session("session", keep_usage=True) == 1
        assert store.load_state("session") is None

    def test_deleting_a_session_deletes_its_descendants_and_nobody_else(self, store: StateStore) -> None:
        store.create_session("root", agent_type="agent")
        store.create_session("child", agent_type="agent", parent_session_id="root")
        store.create_session("grandchild", agent_type="agent", parent_session_id="child")
        store.create_session("sibling", agent_type="agent", parent_session_id="root")
        full_session(store, "other")
        commit_step(store, "grandchild", 1, append=messages(2))
        stage(store, "sibling", "call", merge_changes={"a": 1})
        assert store.delete_session("child") == 2
        assert [store.session_exists(name) for name in ("root", "sibling", "other")] == [True] * 3
        assert store.delete_session("root") == 2
        assert [session.session_id for session in store.list_sessions().sessions] == ["other"]
        assert store.get_message_count("other") == 4

    def test_a_local_sub_session_goes_with_the_session_that_refers_to_it(self, store: StateStore) -> None:
        store.create_session("session", agent_type="agent")
        store.create_session("sub", agent_type="agent")
        store.add_sub_session_refs("session", [SubSessionRef(sub_session_id="sub", agent_type="agent")])
        assert store.delete_session("session") == 2
        assert not store.session_exists("sub")

    def test_a_session_that_has_the_id_of_a_remote_sub_session_stays(self, store: StateStore) -> None:
        store.create_session("session", agent_type="agent")
        store.create_session("remote", agent_type="agent")
        store.add_sub_session_refs(
            "session", [SubSessionRef(sub_session_id="remote", agent_type="agent", location="remote")]
        )
        assert store.delete_session("session") == 1
        assert store.session_exists("remote")

    def test_sessions_that_refer_to_each_other_are_deleted_once_each(self, store: StateStore) -> None:
        store.create_session("first", agent_type="agent")
        store.create_session("second", agent_type="agent", parent_session_id="first")
        store.add_sub_session_refs("second", [SubSessionRef(sub_session_id="first", agent_type="agent")])
        assert store.delete_session("second") == 2
        assert store.list_sessions().total == 0
