"""Fencing tokens: a worker whose lock was taken over by another one cannot write any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import RunStatus
from helix_store.exceptions import ConflictError, FencedOutError
from helix_store.testing.state_store.base import LockManager, StoreTests
from helix_store.testing.state_store.samples import (
    contents,
    full_session,
    loaded,
    message,
    step,
)

__all__ = ["FencingContract"]


def _oldest(store: StateStore) -> str:
    return store.list_checkpoints("session").items[-1].checkpoint_id


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
}


class FencingContract(StoreTests):
    @pytest.fixture
    def locks(self) -> LockManager:
        locks = self.make_lock_manager()
        if locks is None:
            pytest.skip("make_lock_manager() gives no lock manager: fencing tokens are not tested")
        return locks

    @staticmethod
    def _next_token(locks: LockManager, name: str = "session") -> int:
        """The token of a lock that is taken and given back."""
        lock = locks.acquire(name)
        assert lock is not None, f"the lock {name!r} is held"
        lock.release()
        return lock.fencing_token

    @pytest.mark.parametrize("write", GUARDED)
    def test_a_token_older_than_the_newest_is_fenced_out_and_writes_nothing(
        self, store: StateStore, locks: LockManager, write: str
    ) -> None:
        full_session(store, "session")
        old, new = self._next_token(locks), self._next_token(locks)
        before = contents(store, "session")
        with pytest.raises(FencedOutError) as caught:
            GUARDED[write](store, old)
        assert (caught.value.token, caught.value.current_token) == (old, new)
        assert contents(store, "session") == before

    @pytest.mark.parametrize("write", GUARDED)
    def test_the_newest_token_may_write(self, store: StateStore, locks: LockManager, write: str) -> None:
        full_session(store, "session")
        token = [self._next_token(locks) for _ in range(2)][-1]
        before = contents(store, "session")
        GUARDED[write](store, token)
        assert contents(store, "session") != before

    @pytest.mark.parametrize("write", GUARDED)
    def test_only_the_lock_named_after_the_session_counts(
        self, store: StateStore, locks: LockManager, write: str
    ) -> None:
        full_session(store, "session")
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
