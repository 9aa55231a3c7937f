"""Tests for checkpoints: reading, listing, deleting and pruning."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import CheckpointHead, StepCommit
from helix_store.exceptions import (
    InvalidCursor,
    InvalidPayload,
    InvalidQuery,
)
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import (
    commit_step,
    contents,
    loaded,
    messages,
)

__all__ = ["CheckpointContract"]


def _steps(store: StateStore, session_id: str, count: int) -> list[StepCommit]:
    """Commit steps 1 to ``count`` with one message each. Every other step changes the state."""
    return [
        commit_step(
            store,
            session_id,
            number,
            append=messages(1, first=number),
            custom_state={"step": number // 2 * 2},
        )
        for number in range(1, count + 1)
    ]


def _ids(store: StateStore, session_id: str, **query: Any) -> list[str]:
    return [head.checkpoint_id for head in store.list_checkpoints(session_id, **query).items]


def _newest_first(commits: list[StepCommit]) -> list[str]:
    return [commit.checkpoint_id for commit in reversed(commits)]


class CheckpointContract(StoreTests):
    # Reading

    def test_a_checkpoint_keeps_the_state_of_its_step_whatever_comes_after(
        self, store: StateStore, session_id: str
    ) -> None:
        commits = _steps(store, session_id, 5)
        before = [repr(store.get_checkpoint(session_id, commit.checkpoint_id)) for commit in commits]
        store.merge_custom_state(session_id, {"step": "changed"})
        store.append_messages(session_id, messages(3))
        store.update_status(session_id, "failed", failure_reason="boom")
        assert [repr(store.get_checkpoint(session_id, commit.checkpoint_id)) for commit in commits] == before
        for number, commit in enumerate(commits, start=1):
            checkpoint = store.get_checkpoint(session_id, commit.checkpoint_id)
            assert checkpoint is not None
            assert checkpoint.state.custom_state == {"step": number // 2 * 2}
            assert checkpoint.message_count == checkpoint.state.message_count == number
            assert checkpoint.state.version == commit.new_version

    def test_the_latest_checkpoint_is_that_of_the_last_step(self, store: StateStore, session_id: str) -> None:
        assert store.get_latest_checkpoint(session_id) is None
        for commit in _steps(store, session_id, 3):
            assert store.get_checkpoint(session_id, commit.checkpoint_id) is not None
        store.update_status(session_id, "paused")
        latest = store.get_latest_checkpoint(session_id)
        assert repr(latest) == repr(store.get_checkpoint(session_id, commit.checkpoint_id))

    def test_an_unknown_checkpoint_is_none(self, store: StateStore, session_id: str) -> None:
        (commit,) = _steps(store, session_id, 1)
        for checkpoint_id in ("nothing", commit.checkpoint_id[:-1], commit.checkpoint_id.upper()):
            assert store.get_checkpoint(session_id, checkpoint_id) is None
        assert store.get_checkpoint("nobody", commit.checkpoint_id) is None
        assert store.get_latest_checkpoint("nobody") is None

    def test_the_checkpoint_of_another_session_is_none(self, store: StateStore, session_id: str) -> None:
        (commit,) = _steps(store, session_id, 1)
        store.create_session("other", agent_type="agent")
        assert store.get_checkpoint("other", commit.checkpoint_id) is None
        assert store.get_latest_checkpoint("other") is None
        assert store.delete_checkpoint("other", commit.checkpoint_id) is False
        assert store.get_checkpoint(session_id, commit.checkpoint_id) is not None

    def test_a_checkpoint_that_was_read_is_detached_from_the_store(
        self, store: StateStore, session_id: str
    ) -> None:
        (commit,) = _steps(store, session_id, 1)
        before = contents(store, session_id)
        checkpoint = store.get_checkpoint(session_id, commit.checkpoint_id)
        assert checkpoint is not None
        checkpoint.state.custom_state["changed"] = True
        assert contents(store, session_id) == before

    @table("checkpoint_id", ["", None, 7, "a\x00", "\ud800"])
    def test_what_is_no_checkpoint_id_is_refused(
        self, store: StateStore, session_id: str, checkpoint_id: Any
    ) -> None:
        _steps(store, session_id, 1)
        before = contents(store, session_id)
        for method in (store.get_checkpoint, store.restore_checkpoint, store.delete_checkpoint):
            with self.storage_untouched(), pytest.raises(InvalidPayload):
                method(session_id, checkpoint_id)
        assert contents(store, session_id) == before

    # Listing

    def test_a_list_of_checkpoints_is_newest_first_and_without_states(
        self, store: StateStore, session_id: str
    ) -> None:
        commits = _steps(store, session_id, 3)
        page = store.list_checkpoints(session_id)
        assert _ids(store, session_id) == _newest_first(commits)
        assert (page.total, page.next_cursor) == (3, None)
        for head in page.items:
            assert type(head) is CheckpointHead
            checkpoint = store.get_checkpoint(session_id, head.checkpoint_id)
            assert [getattr(head, field.name) for field in fields(head)] == [
                getattr(checkpoint, field.name) for field in fields(head)
            ]

    def test_order_is_that_of_creation_and_not_that_of_step_counts(
        self, store: StateStore, session_id: str
    ) -> None:
        commits = [commit_step(store, session_id, number) for number in (10, 9, 2, 2)]
        assert _ids(store, session_id) == _newest_first(commits)
        latest = store.get_latest_checkpoint(session_id)
        assert latest is not None
        assert latest.checkpoint_id == commits[-1].checkpoint_id

    def test_a_session_without_checkpoints_lists_none(self, store: StateStore, session_id: str) -> None:
        store.append_messages(session_id, messages(1))
        page = store.list_checkpoints(session_id)
        assert (page.items, page.total, page.next_cursor) == ([], 0, None)

    def test_a_page_has_twenty_checkpoints_unless_told(self, store: StateStore, session_id: str) -> None:
        commits = _steps(store, session_id, 21)
        page = store.list_checkpoints(session_id)
        assert (len(page.items), page.total) == (20, 21)
        rest = store.list_checkpoints(session_id, cursor=page.next_cursor)
        assert [head.checkpoint_id for head in rest.items] == [commits[0].checkpoint_id]
        assert (rest.total, rest.next_cursor) == (21, None)
        assert len(store.list_checkpoints(session_id, limit=10**6).items) == 21

    @table("limit", [1, 2, 5])
    def test_pages_stay_the_same_while_new_checkpoints_are_written(
        self, store: StateStore, session_id: str, limit: int
    ) -> None:
        commits = _steps(store, session_id, 5)
        page = store.list_checkpoints(session_id, limit=limit)
        walked = [head.checkpoint_id for head in page.items]
        while page.next_cursor is not None:
            commit_step(store, session_id, 6)
            page = store.list_checkpoints(session_id, limit=limit, cursor=page.next_cursor)
            walked += [head.checkpoint_id for head in page.items]
        assert walked == _newest_first(commits)

    @table("limit", [0, -1, 1.5, "2", None, True], shared=True)
    def test_a_limit_that_makes_no_sense_is_refused(
        self, store: StateStore, session_id: str, limit: Any
    ) -> None:
        with self.storage_untouched(), pytest.raises(InvalidQuery):
            store.list_checkpoints(session_id, limit=limit)

    def test_a_cursor_that_is_made_up_or_belongs_elsewhere_is_refused(
        self, store: StateStore, session_id: str
    ) -> None:
        store.create_session("other", agent_type="agent")
        _steps(store, session_id, 2)
        _steps(store, "other", 2)
        cursor = store.list_checkpoints(session_id, limit=1).next_cursor
        assert cursor is not None
        foreign = store.list_checkpoints("other", limit=1).next_cursor
        sessions = store.list_sessions(limit=1).next_cursor
        for wrong in ("", "2", "x", cursor[:-1], cursor + "A", cursor.swapcase(), foreign, sessions):
            with pytest.raises(InvalidCursor):
                store.list_checkpoints(session_id, cursor=wrong)

    # Deleting and pruning

    def test_deleting_a_checkpoint_deletes_that_one_and_nothing_else(
        self, store: StateStore, session_id: str
    ) -> None:
        commits = _steps(store, session_id, 5)
        before = contents(store, session_id)
        for commit in (commits[2], commits[4], commits[0]):
            assert store.delete_checkpoint(session_id, commit.checkpoint_id) is True
            assert store.delete_checkpoint(session_id, commit.checkpoint_id) is False
            assert store.get_checkpoint(session_id, commit.checkpoint_id) is None
        assert _ids(store, session_id) == [commits[3].checkpoint_id, commits[1].checkpoint_id]
        after = contents(store, session_id)
        assert (after["state"], after["messages"]) == (before["state"], before["messages"])
        for number in (2, 4):
            checkpoint = store.get_checkpoint(session_id, commits[number - 1].checkpoint_id)
            assert checkpoint is not None
            assert checkpoint.state.custom_state == {"step": number}

    def test_the_state_can_be_written_after_its_checkpoint_is_deleted(
        self, store: StateStore, session_id: str
    ) -> None:
        (commit,) = _steps(store, session_id, 1)
        store.delete_checkpoint(session_id, commit.checkpoint_id)
        store.merge_custom_state(session_id, {"more": 1})
        assert loaded(store, session_id).custom_state == {"step": 0, "more": 1}
        commits = _steps(store, session_id, 2)
        assert _ids(store, session_id) == _newest_first(commits)

    @table("keep", [0, 1, 3, 5, 6, 10**9])
    def test_pruning_keeps_exactly_the_newest(self, store: StateStore, session_id: str, keep: int) -> None:
        commits = _steps(store, session_id, 5)
        before = contents(store, session_id)
        exact = {
            commit.checkpoint_id: repr(store.get_checkpoint(session_id, commit.checkpoint_id))
            for commit in commits
        }
        assert store.prune_checkpoints(session_id, keep=keep) == max(5 - keep, 0)
        assert store.prune_checkpoints(session_id, keep=keep) == 0
        kept = _newest_first(commits)[:keep]
        assert _ids(store, session_id) == kept
        assert store.list_checkpoints(session_id).total == len(kept)
        for checkpoint_id in kept:
            assert repr(store.get_checkpoint(session_id, checkpoint_id)) == exact[checkpoint_id]
        after = contents(store, session_id)
        assert (after["state"], after["messages"]) == (before["state"], before["messages"])

    @table("keep", [-1, 1.0, "1", None, True])
    def test_pruning_keeps_a_whole_number(self, store: StateStore, session_id: str, keep: Any) -> None:
        _steps(store, session_id, 2)
        with self.storage_untouched(), pytest.raises(InvalidQuery):
            store.prune_checkpoints(session_id, keep=keep)
        assert store.list_checkpoints(session_id).total == 2
