"""Tests for the message history: appending, reading and truncating."""

from __future__ import annotations

from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.exceptions import (
    InvalidPayload,
    InvalidQuery,
    StaleStateError,
)
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import (
    commit_step,
    contents,
    loaded,
    message,
    messages,
)

__all__ = ["MessageContract"]

THINKING = {
    "role": "assistant",
    "thinking": "let me see",
    "content": [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "Hello", "thinking": "kept: no part of this type"},
        {"type": "reasoning", "text": "so"},
        "plain",
        {"type": ["thinking"]},
    ],
}
WITHOUT_THINKING = {"role": "assistant", "content": [THINKING["content"][1], *THINKING["content"][3:]]}


class MessageContract(StoreTests):
    # Appending

    def test_messages_come_back_in_the_order_they_were_appended(
        self, store: StateStore, session_id: str
    ) -> None:
        assert store.append_messages(session_id, messages(2)) == 2
        assert store.append_messages(session_id, messages(3, first=3)) == 5
        page = store.get_messages(session_id)
        assert (page.messages, page.total, page.has_more) == (messages(5), 5, False)

    def test_an_append_is_one_version_however_many_messages(self, store: StateStore, session_id: str) -> None:
        store.append_messages(session_id, messages(5))
        state = loaded(store, session_id)
        assert (state.version, state.message_count) == (2, 5)

    def test_appending_nothing_writes_nothing(self, store: StateStore, session_id: str) -> None:
        store.append_messages(session_id, messages(2))
        before = contents(store, session_id)
        assert store.append_messages(session_id, []) == 2
        assert contents(store, session_id) == before

    def test_one_bad_message_keeps_all_of_them_out(self, store: StateStore, session_id: str) -> None:
        before = contents(store, session_id)
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            store.append_messages(session_id, [message("good"), {"role": "user", "content": float("nan")}])
        assert contents(store, session_id) == before

    @table(
        "bad",
        [{}, {"content": "no role"}, {"role": None}, {"role": 7}, "text", None, ["role"], [("role", "user")]],
        shared=True,
    )
    def test_a_message_is_an_object_with_a_role(self, store: StateStore, session_id: str, bad: Any) -> None:
        before = contents(store, session_id)
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            store.append_messages(session_id, [bad])
        assert contents(store, session_id) == before

    @table("bad", [message("alone"), "text", None, 7], shared=True)
    def test_messages_are_a_list(self, store: StateStore, session_id: str, bad: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            store.append_messages(session_id, bad)

    def test_an_append_on_top_of_another_version_writes_nothing(
        self, store: StateStore, session_id: str
    ) -> None:
        store.append_messages(session_id, messages(1), expected_version=1)
        before = contents(store, session_id)
        with pytest.raises(StaleStateError):
            store.append_messages(session_id, messages(1), expected_version=1)
        assert contents(store, session_id) == before

    def test_batches_appended_at_once_are_neither_lost_nor_mixed(
        self, store: StateStore, session_id: str
    ) -> None:
        batches = [[message(f"{letter} {number}") for number in range(5)] for letter in "abcdefgh"]
        counts = self.at_once(
            *(lambda batch=batch: store.append_messages(session_id, batch) for batch in batches)
        )
        assert sorted(counts, key=repr) == sorted(range(5, 45, 5), key=repr)
        stored = store.get_messages(session_id).messages
        assert len(stored) == 40
        assert all(stored[start : start + 5] in batches for start in range(0, 40, 5))
        assert {stored[start]["content"] for start in range(0, 40, 5)} == {
            f"{letter} 0" for letter in "abcdefgh"
        }

    # Reading

    @table(
        ("query", "expected", "has_more"),
        [
            ({}, [1, 2, 3, 4, 5], False),
            ({"limit": 2}, [1, 2], True),
            ({"limit": 5}, [1, 2, 3, 4, 5], False),
            ({"limit": 9}, [1, 2, 3, 4, 5], False),
            ({"offset": 2}, [3, 4, 5], False),
            ({"offset": 2, "limit": 2}, [3, 4], True),
            ({"offset": 3, "limit": 2}, [4, 5], False),
            ({"offset": 5}, [], False),
            ({"offset": 6, "limit": 2}, [], False),
            ({"order": "desc"}, [5, 4, 3, 2, 1], False),
            ({"order": "desc", "limit": 2}, [5, 4], True),
            ({"order": "desc", "offset": 3, "limit": 2}, [2, 1], False),
            ({"order": "desc", "offset": 5}, [], False),
            ({"order": "asc", "limit": None, "offset": 4}, [5], False),
        ],
    )
    def test_a_page_of_messages(
        self, store: StateStore, session_id: str, query: dict[str, Any], expected: list[int], has_more: bool
    ) -> None:
        store.append_messages(session_id, messages(5))
        page = store.get_messages(session_id, **query)
        assert page.messages == [message(f"message {number}") for number in expected]
        assert (page.total, page.has_more) == (5, has_more)

    def test_without_a_limit_all_messages_come_back(self, store: StateStore, session_id: str) -> None:
        store.append_messages(session_id, messages(450))
        assert store.get_messages(session_id).messages == messages(450)
        assert len(store.get_messages(session_id, limit=450).messages) == 450

    @table(
        "query",
        [
            {"offset": -1},
            {"offset": 0.0},
            {"limit": 0},
            {"limit": -1},
            {"limit": "2"},
            {"limit": True},
            {"order": "newest"},
        ],
        shared=True,
    )
    def test_a_page_of_messages_that_makes_no_sense_is_refused(
        self, store: StateStore, session_id: str, query: dict[str, Any]
    ) -> None:
        with self.storage_untouched(), pytest.raises(InvalidQuery):
            store.get_messages(session_id, **query)

    def test_thinking_is_left_out_on_request_and_kept_in_the_store(
        self, store: StateStore, session_id: str
    ) -> None:
        plain = {"role": "user", "content": "thinking"}
        store.append_messages(session_id, [THINKING, plain])
        page = store.get_messages(session_id, include_thinking=False)
        assert repr(page.messages) == repr([WITHOUT_THINKING, plain])
        assert (page.total, page.has_more) == (2, False)
        assert repr(store.get_messages(session_id).messages) == repr([THINKING, plain])

    def test_messages_that_were_read_or_given_are_detached_from_the_store(
        self, store: StateStore, session_id: str
    ) -> None:
        given = [{"role": "user", "content": [1]}]
        store.append_messages(session_id, given)
        given[0]["content"] = "changed"
        store.get_messages(session_id).messages[0]["content"].append(2)
        next(iter(store.iter_messages(session_id)))["content"].append(3)
        assert store.get_messages(session_id).messages == [{"role": "user", "content": [1]}]

    @table("chunk_size", [1, 2, 5, 6, 500])
    def test_iterating_yields_every_message_in_order(
        self, store: StateStore, session_id: str, chunk_size: int
    ) -> None:
        store.append_messages(session_id, messages(5))
        assert list(store.iter_messages(session_id, chunk_size=chunk_size)) == messages(5)
        assert list(store.iter_messages(session_id)) == messages(5)

    def test_iterating_an_empty_history_yields_nothing(self, store: StateStore, session_id: str) -> None:
        assert list(store.iter_messages(session_id)) == []

    @table("chunk_size", [0, -1, 1.5, None], shared=True)
    def test_a_chunk_holds_at_least_one_message(
        self, store: StateStore, session_id: str, chunk_size: Any
    ) -> None:
        with self.storage_untouched(), pytest.raises(InvalidQuery):
            list(store.iter_messages(session_id, chunk_size=chunk_size))

    def test_the_count_is_the_number_of_messages(self, store: StateStore, session_id: str) -> None:
        assert store.get_message_count(session_id) == 0
        store.append_messages(session_id, messages(3))
        assert store.get_message_count(session_id) == 3

    # Truncating

    @table("keep", [0, 1, 4])
    def test_a_truncation_keeps_the_first_messages(
        self, store: StateStore, session_id: str, keep: int
    ) -> None:
        store.append_messages(session_id, messages(5))
        assert store.truncate_messages(session_id, keep) == 3
        assert store.get_messages(session_id).messages == messages(keep)
        state = loaded(store, session_id)
        assert (state.version, state.message_count, store.get_message_count(session_id)) == (3, keep, keep)

    @table("keep", [5, 6, 10**9])
    def test_a_truncation_beyond_the_end_writes_nothing(
        self, store: StateStore, session_id: str, keep: int
    ) -> None:
        store.append_messages(session_id, messages(5))
        before = contents(store, session_id)
        assert store.truncate_messages(session_id, keep) == 2
        assert contents(store, session_id) == before

    def test_appending_goes_on_where_a_truncation_left_off(self, store: StateStore, session_id: str) -> None:
        store.append_messages(session_id, messages(5))
        store.truncate_messages(session_id, 2)
        assert store.append_messages(session_id, messages(2, first=3)) == 4
        assert store.get_messages(session_id).messages == messages(4)
        assert list(store.iter_messages(session_id, chunk_size=1)) == messages(4)
        commit_step(store, session_id, 1, append=messages(1, first=5))
        assert store.get_messages(session_id).messages == messages(5)

    def test_checkpoints_beyond_the_boundary_go_and_the_state_stays(
        self, store: StateStore, session_id: str
    ) -> None:
        kept = [
            commit_step(store, session_id, 1, append=messages(2), custom_state={"step": 1}),
            commit_step(store, session_id, 2, custom_state={"step": 2}),
        ]
        dropped = commit_step(store, session_id, 3, append=messages(2, first=3), custom_state={"step": 3})
        store.truncate_messages(session_id, 2)
        page = store.list_checkpoints(session_id)
        assert [head.checkpoint_id for head in page.items] == [commit.checkpoint_id for commit in kept[::-1]]
        assert store.get_checkpoint(session_id, dropped.checkpoint_id) is None
        latest = store.get_latest_checkpoint(session_id)
        assert latest is not None
        assert latest.state.custom_state == {"step": 2}
        assert loaded(store, session_id).custom_state == {"step": 3}

    def test_a_truncation_on_top_of_another_version_writes_nothing(
        self, store: StateStore, session_id: str
    ) -> None:
        store.append_messages(session_id, messages(5))
        before = contents(store, session_id)
        with pytest.raises(StaleStateError):
            store.truncate_messages(session_id, 2, expected_version=1)
        assert contents(store, session_id) == before
        assert store.truncate_messages(session_id, 2, expected_version=2) == 3

    @table("keep", [-1, 1.0, "1", None, True])
    def test_a_truncation_keeps_a_whole_number_of_messages(
        self, store: StateStore, session_id: str, keep: Any
    ) -> None:
        store.append_messages(session_id, messages(2))
        before = contents(store, session_id)
        with self.storage_untouched(), pytest.raises(InvalidQuery):
            store.truncate_messages(session_id, keep)
        assert contents(store, session_id) == before
