"""Tests for versions and fencing tokens: which writes make a new version, and which are fenced out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import RunStatus
from helix_store.exceptions import ConflictError, FencedOutError
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import LockManager, StoreTests
from helix_store.testing.state_store.calls import (
    ANSWERING_READS,
    RAISING_READS,
    Call,
)
from helix_store.testing.state_store.samples import (
    commit_step,
    contents,
    full_session,
    loaded,
    message,
    stage,
    step,
)

__all__ = ["FencingContract", "VersionContract"]


def _oldest(store: StateStore) -> str:
    return store.list_checkpoints("session").items[-1].checkpoint_id


def _ask(store: StateStore) -> None:
    store.add_pending_tool_calls("session", {"call": {"tool_name": "ask"}})


def _suspend(store: StateStore) -> None:
    store.suspend("session", kind="suspended_client_tool", context={}, pending={"call": {"tool_name": "ask"}})


Write = Callable[[StateStore], Any]

NEW_VERSION: dict[str, Write] = {
    "save_state": lambda store: store.save_state("session", loaded(store, "session")),
    "update_status": lambda store: store.update_status("session", "active"),
    "compare_and_set_status": lambda store: store.compare_and_set_status("session", ["active"], "active"),
    "increment_step_count": lambda store: store.increment_step_count("session"),
    "increment_resume_count": lambda store: store.increment_resume_count("session"),
    "merge_custom_state": lambda store: store.merge_custom_state("session", {"a": 1}),
    "append_messages": lambda store: store.append_messages("session", [message("a"), message("b")]),
    "truncate_messages": lambda store: store.truncate_messages("session", 1),
    "promote_staging": lambda store: store.promote_staging("session", "step-3"),
    "save_state_and_promote_staging": lambda store: commit_step(store, "session", 3, append=[message("a")]),
    "restore_checkpoint": lambda store: store.restore_checkpoint("session", _oldest(store)),
    "add_pending_tool_calls": lambda store: _ask(store),
    "suspend": lambda store: _suspend(store),
}

NO_NEW_VERSION: dict[str, Write] = {
    "stage_changes": lambda store: stage(store, "session", "call-2", merge_changes={"a": 1}),
    "discard_staging": lambda store: store.discard_staging("session", "step-3"),
    "start_run": lambda store: store.start_run("session", supersede=True),
    "update_run": lambda store: store.update_run("session", "run-1", status="completed"),
    "add_sub_session_refs": lambda store: store.add_sub_session_refs(
        "session", [{"sub_session_id": "new", "agent_type": "a"}]
    ),
    "update_sub_session_ref": lambda store: store.update_sub_session_ref(
        "session", "sub", status="completed"
    ),
    "request_interrupt": lambda store: store.request_interrupt("session", kind="abort"),
    "clear_interrupt": lambda store: store.clear_interrupt("session"),
    "branch_session": lambda store: store.branch_session("session"),
    "delete_checkpoint": lambda store: store.delete_checkpoint("session", _oldest(store)),
    "prune_checkpoints": lambda store: store.prune_checkpoints("session", keep=0),
    "create_session as a child": lambda store: store.create_session(
        agent_type="a", parent_session_id="session"
    ),
    "append no messages": lambda store: store.append_messages("session", []),
    "ask no tool calls": lambda store: store.add_pending_tool_calls("session", {}),
    "answer an unknown tool call": lambda store: store.submit_tool_result("session", "nobody", result=1),
    "take no tool results": lambda store: store.take_tool_results("session"),
    "truncate beyond the end": lambda store: store.truncate_messages("session", 4),
    "promote nothing": lambda store: store.promote_staging("session", "step-1"),
    "merge nothing": lambda store: store.merge_custom_state("session", {}),
    "a compare-and-set that conflicts": lambda store: store.compare_and_set_status(
        "session", ["failed"], "active"
    ),
}


class VersionContract(StoreTests):
    @table("write", NEW_VERSION)
    def test_a_write_that_changes_the_state_or_the_messages_is_one_new_version(
        self, store: StateStore, write: str
    ) -> None:
        full_session(store, "session")
        before = loaded(store, "session")
        NEW_VERSION[write](store)
        after = loaded(store, "session")
        assert after.version == before.version + 1
        assert before.updated_at is not None
        assert after.updated_at is not None
        assert after.updated_at >= before.updated_at
        assert after.created_at == before.created_at

    @table("write", NO_NEW_VERSION)
    def test_any_other_write_leaves_state_and_version_alone(self, store: StateStore, write: str) -> None:
        full_session(store, "session")
        before = repr(store.load_state("session"))
        NO_NEW_VERSION[write](store)
        assert repr(store.load_state("session")) == before

    @table("call", [*ANSWERING_READS, *RAISING_READS], shared=True)
    def test_a_read_changes_nothing(self, stored: StateStore, call: Call) -> None:
        before = repr(stored.load_state("session"))
        call.invoke(stored, "session")
        assert repr(stored.load_state("session")) == before

    def test_two_workers_take_turns_by_version(self, store: StateStore, session_id: str) -> None:
        version = 1
        for number in range(1, 4):
            version = store.save_state(session_id, loaded(store, session_id), expected_version=version)
            store.append_messages(session_id, [message("hello")], expected_version=version)
            version += 1
            assert loaded(store, session_id).version == version == 2 * number + 1


GUARDED: dict[str, Callable[[StateStore, int], Any]] = {
    "save_state": lambda store, token: store.save_state(
        "session", loaded(store, "session"), fencing_token=token
    ),
    "compare_and_set_status": lambda store, token: store.compare_and_set_status(
        "session", ["active"], "paused", fencing_token=token
    ),
    "append_messages": lambda store, token: store.append_messages(
        "session", [message("hello")], fencing_token=token
    ),
    "promote_staging": lambda store, token: store.promote_staging("session", "step-3", fencing_token=token),
    "save_state_and_promote_staging": lambda store, token: store.save_state_and_promote_staging(
        "session", loaded(store, "session"), [message("hello")], step(3), fencing_token=token
    ),
    "restore_checkpoint": lambda store, token: store.restore_checkpoint(
        "session", _oldest(store), fencing_token=token
    ),
    "start_run": lambda store, token: store.start_run(
        "session", "run-2", fencing_token=token, supersede=True
    ),
    "update_run": lambda store, token: store.update_run(
        "session", "run-1", status="completed", fencing_token=token
    ),
    "add_pending_tool_calls": lambda store, token: store.add_pending_tool_calls(
        "session", {"call": {"tool_name": "ask"}}, fencing_token=token
    ),
    "take_tool_results": lambda store, token: store.take_tool_results("session", fencing_token=token),
    "suspend": lambda store, token: store.suspend(
        "session", kind="suspended_client_tool", context={}, fencing_token=token
    ),
    "resume": lambda store, token: store.resume("session", fencing_token=token),
}


def _answered(store: StateStore) -> None:
    _ask(store)
    store.submit_tool_result("session", "call", result=1)


PREPARED: dict[str, Callable[[StateStore], Any]] = {"take_tool_results": _answered, "resume": _suspend}
"""The calls that prepare a full session for some of the guarded writes."""


def session_for(store: StateStore, write: str) -> None:
    """Create a session on which a guarded write changes something."""
    full_session(store, "session")
    if write in PREPARED:
        PREPARED[write](store)


class FencingContract(StoreTests):
    @pytest.fixture
    def locks(self) -> LockManager:
        locks = self.make_lock_manager()
        if locks is None:
            pytest.skip("make_lock_manager() returns None: fencing tokens are not tested")
        return locks

    @staticmethod
    def _next_token(locks: LockManager, name: str = "session") -> int:
        """Acquire and release a lock, and return its token."""
        lock = locks.acquire(name)
        assert lock is not None, f"the lock {name!r} is held"
        lock.release()
        return lock.fencing_token

    @table("write", GUARDED)
    def test_a_token_older_than_the_newest_is_fenced_out_and_writes_nothing(
        self, store: StateStore, locks: LockManager, write: str
    ) -> None:
        session_for(store, write)
        old, new = self._next_token(locks), self._next_token(locks)
        before = contents(store, "session")
        with pytest.raises(FencedOutError) as caught:
            GUARDED[write](store, old)
        assert (caught.value.token, caught.value.current_token) == (old, new)
        assert contents(store, "session") == before

    def test_who_lost_the_session_is_fenced_out_of_resuming_it_although_another_has_resumed_it(
        self, store: StateStore, locks: LockManager
    ) -> None:
        store.create_session("session", agent_type="agent")
        old, new = self._next_token(locks), self._next_token(locks)
        _suspend(store)
        store.resume("session", fencing_token=new)
        with pytest.raises(FencedOutError):
            store.resume("session", fencing_token=old)
        with pytest.raises(ConflictError) as caught:
            store.resume("session", fencing_token=new)
        assert not isinstance(caught.value, FencedOutError)

    @table("write", GUARDED)
    def test_the_newest_token_may_write(self, store: StateStore, locks: LockManager, write: str) -> None:
        session_for(store, write)
        token = [self._next_token(locks) for _ in range(2)][-1]
        before = contents(store, "session")
        GUARDED[write](store, token)
        assert contents(store, "session") != before

    @table("write", GUARDED)
    def test_only_the_lock_named_after_the_session_counts(
        self, store: StateStore, locks: LockManager, write: str
    ) -> None:
        session_for(store, write)
        token = self._next_token(locks)
        for _ in range(3):
            self._next_token(locks, "another session")
        before = contents(store, "session")
        GUARDED[write](store, token)
        assert contents(store, "session") != before

    def test_the_locks_of_another_tenant_do_not_count(self, store: StateStore, locks: LockManager) -> None:
        full_session(store, "session")
        token = self._next_token(locks)
        theirs = self.make_lock_manager(tenant="theirs")
        assert theirs is not None
        for _ in range(3):
            self._next_token(theirs)
        assert store.append_messages("session", [message("hello")], fencing_token=token) == 5

    def test_taking_and_giving_back_the_lock_is_no_new_version(
        self, store: StateStore, locks: LockManager
    ) -> None:
        full_session(store, "session")
        before = contents(store, "session")
        self._next_token(locks)
        assert contents(store, "session") == before

    def test_a_write_without_a_token_is_not_fenced(self, store: StateStore, locks: LockManager) -> None:
        full_session(store, "session")
        self._next_token(locks)
        assert store.append_messages("session", [message("hello")]) == 5

    def test_a_session_whose_lock_was_never_taken_fences_nobody(
        self, store: StateStore, locks: LockManager
    ) -> None:
        full_session(store, "session")
        assert store.append_messages("session", [message("hello")], fencing_token=1) == 5

    def test_a_run_started_with_a_newer_token_supersedes_a_crashed_workers_run(
        self, store: StateStore, locks: LockManager, session_id: str
    ) -> None:
        first, second = self._next_token(locks, session_id), 0
        store.start_run(session_id, "run-1", fencing_token=first)
        with pytest.raises(ConflictError):
            store.start_run(session_id, "run-2", fencing_token=first)
        second = self._next_token(locks, session_id)
        assert store.start_run(session_id, "run-2", fencing_token=second).turn == 2
        old = store.list_runs(session_id)[1]
        assert (old.run_id, old.status, old.completion_reason) == (
            "run-1",
            RunStatus.INTERRUPTED,
            "superseded",
        )

    def test_the_holder_of_a_lock_does_not_update_a_run_that_was_superseded(
        self, store: StateStore, locks: LockManager, session_id: str
    ) -> None:
        token = self._next_token(locks, session_id)
        store.start_run(session_id, "run-1", fencing_token=token)
        store.start_run(session_id, "run-2", supersede=True)
        before = store.list_runs(session_id)
        with pytest.raises(ConflictError):
            store.update_run(session_id, "run-1", status="completed", fencing_token=token)
        assert store.list_runs(session_id) == before
        assert store.update_run(session_id, "run-1", status="completed").status is RunStatus.COMPLETED
