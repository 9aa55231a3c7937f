"""Tests for unknown sessions: ids that do not exist, and ids of another tenant."""

from __future__ import annotations

import pytest

from helix_store.core.contracts import StateStore
from helix_store.exceptions import (
    CheckpointNotFound,
    InvalidCursor,
    InvalidPayload,
    RunNotFound,
    SessionNotFound,
)
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import Contents, StoreTests
from helix_store.testing.state_store.calls import (
    ANSWERING_READS,
    CALLS,
    DELETE,
    RAISING_READS,
    WRITES,
    Call,
    outcome,
)
from helix_store.testing.state_store.samples import (
    commit_step,
    contents,
    full_session,
    loaded,
    step,
)

__all__ = ["TenantContract", "UnknownSessionContract"]


class TenantContract(StoreTests):
    @pytest.fixture
    def ours(self) -> StateStore:
        return self.make_store(tenant="ours")

    @pytest.fixture
    def theirs(self) -> StateStore:
        return self.make_store(tenant="theirs")

    def test_stores_of_one_tenant_see_each_others_sessions(self, ours: StateStore) -> None:
        full_session(ours, "session")
        assert contents(self.make_store(tenant="ours"), "session") == contents(ours, "session")

    @pytest.fixture
    def theirs_before(self, theirs: StateStore) -> Contents:
        full_session(theirs, "session")
        return contents(theirs, "session")

    @table("call", CALLS, shared=True)
    def test_a_session_of_another_tenant_is_as_unknown_as_one_that_does_not_exist(
        self, ours: StateStore, theirs: StateStore, theirs_before: Contents, call: Call
    ) -> None:
        assert outcome(call, ours, "session") == outcome(call, ours, "nobody")
        assert contents(theirs, "session") == theirs_before
        assert ours.list_sessions().total == 0

    def test_the_empty_tenant_is_one_like_any_other(self, store: StateStore, ours: StateStore) -> None:
        full_session(store, "session")
        assert ours.load_state("session") is None
        ours.create_session("session", agent_type="agent")
        assert store.delete_session("session") == 1
        assert ours.session_exists("session")

    def test_the_same_ids_may_be_used_by_several_tenants(self, ours: StateStore, theirs: StateStore) -> None:
        full_session(ours, "session")
        before = contents(ours, "session")
        full_session(theirs, "session")
        theirs.merge_custom_state("session", {"n": "theirs"})
        theirs.truncate_messages("session", 1)
        assert contents(ours, "session") == before
        assert ours.list_sessions().total == theirs.list_sessions().total == 1
        assert theirs.delete_session("session") == 1
        assert contents(ours, "session") == before

    def test_a_parent_of_another_tenant_is_not_found(self, ours: StateStore, theirs: StateStore) -> None:
        theirs.create_session("parent", agent_type="agent")
        with pytest.raises(SessionNotFound):
            ours.create_session("child", agent_type="agent", parent_session_id="parent")
        assert not ours.session_exists("child")

    def test_a_deletion_stops_at_the_tenant(self, ours: StateStore, theirs: StateStore) -> None:
        for store in (ours, theirs):
            store.create_session("parent", agent_type="agent")
            store.create_session("child", agent_type="agent", parent_session_id="parent")
            store.add_sub_session_refs("parent", [{"sub_session_id": "sub", "agent_type": "agent"}])
        theirs.create_session("sub", agent_type="agent")
        assert ours.delete_session("parent") == 2
        assert theirs.list_sessions().total == 3

    def test_checkpoints_and_runs_of_another_tenant_are_not_found(
        self, ours: StateStore, theirs: StateStore
    ) -> None:
        for store in (ours, theirs):
            store.create_session("session", agent_type="agent")
        foreign = commit_step(theirs, "session", 1).checkpoint_id
        theirs.start_run("session", "their run")
        before = contents(ours, "session")
        assert ours.get_checkpoint("session", foreign) is None
        assert ours.delete_checkpoint("session", foreign) is False
        with pytest.raises(CheckpointNotFound):
            ours.restore_checkpoint("session", foreign)
        with pytest.raises(CheckpointNotFound):
            ours.branch_session("session", foreign)
        with pytest.raises(RunNotFound):
            ours.update_run("session", "their run", status="completed")
        with pytest.raises(RunNotFound):
            ours.request_interrupt("session", run_id="their run")
        state = loaded(ours, "session")
        with pytest.raises(RunNotFound):
            ours.save_state_and_promote_staging("session", state, [], step(1), run_id="their run")
        assert contents(ours, "session") == before

    def test_a_list_holds_the_tenants_own_sessions(self, ours: StateStore, theirs: StateStore) -> None:
        for number in range(3):
            ours.create_session(f"ours {number}", agent_type="agent", tags=["t"], metadata={"k": "v"})
            theirs.create_session(f"theirs {number}", agent_type="agent", tags=["t"], metadata={"k": "v"})
        page = ours.list_sessions(tags=["t"], metadata={"k": "v"}, agent_type="agent")
        assert {session.session_id for session in page.sessions} == {f"ours {number}" for number in range(3)}
        assert page.total == 3

    def test_a_cursor_of_another_tenant_is_refused(self, ours: StateStore, theirs: StateStore) -> None:
        for store in (ours, theirs):
            store.create_session("session", agent_type="agent")
            store.create_session("other", agent_type="agent")
            for number in (1, 2):
                commit_step(store, "session", number)
        sessions = theirs.list_sessions(limit=1).next_cursor
        checkpoints = theirs.list_checkpoints("session", limit=1).next_cursor
        with pytest.raises(InvalidCursor):
            ours.list_sessions(limit=1, cursor=sessions)
        with pytest.raises(InvalidCursor):
            ours.list_checkpoints("session", limit=1, cursor=checkpoints)

    def test_a_branch_stays_with_its_tenant(self, ours: StateStore, theirs: StateStore) -> None:
        full_session(ours, "session")
        theirs.create_session("branch", agent_type="agent")
        ours.branch_session("session", new_session_id="branch")
        assert theirs.get_message_count("branch") == 0
        assert ours.get_message_count("branch") == 4


class UnknownSessionContract(StoreTests):
    @table("call", ANSWERING_READS, shared=True)
    def test_these_reads_answer_that_there_is_nothing(self, store: StateStore, call: Call) -> None:
        assert not call.invoke(store, "nobody")

    @table("call", RAISING_READS, shared=True)
    def test_every_other_read_says_that_the_session_is_not_found(self, store: StateStore, call: Call) -> None:
        with pytest.raises(SessionNotFound) as caught:
            call.invoke(store, "nobody")
        assert caught.value.session_id == "nobody"

    @table("call", WRITES, shared=True)
    def test_every_write_says_that_the_session_is_not_found(self, store: StateStore, call: Call) -> None:
        with pytest.raises(SessionNotFound) as caught:
            call.invoke(store, "nobody")
        assert caught.value.session_id == "nobody"
        assert store.list_sessions().total == 0

    def test_a_state_of_another_session_is_refused_only_if_the_session_exists(
        self, store: StateStore, session_id: str
    ) -> None:
        state = loaded(store, session_id)
        store.create_session("other", agent_type="agent")
        for write in (
            lambda name: store.save_state(name, state),
            lambda name: store.save_state_and_promote_staging(name, state, [], step(1)),
        ):
            with pytest.raises(SessionNotFound) as caught:
                write("nobody")
            assert caught.value.session_id == "nobody"
            with pytest.raises(InvalidPayload, match="another session"):
                write("other")
        assert store.list_sessions().total == 2

    def test_deleting_it_deletes_none(self, store: StateStore) -> None:
        assert DELETE.invoke(store, "nobody") == 0
