"""Tests for pages of sessions: limits, offsets and cursors."""

from __future__ import annotations

from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.exceptions import InvalidCursor, InvalidQuery
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import commit_step

__all__ = ["PagingContract"]

NAMES = [f"session-{number}" for number in range(7)]


class PagingContract(StoreTests):
    @pytest.fixture
    def seven(self, store: StateStore) -> StateStore:
        """Return a store with seven sessions, numbered in the order of their creation."""
        for name in NAMES:
            store.create_session(name, agent_type="agent")
        return store

    def test_a_page_says_what_it_is_a_page_of(self, seven: StateStore) -> None:
        page = seven.list_sessions(order_by="created_at", direction="asc", limit=3, offset=2)
        assert [session.session_id for session in page.sessions] == NAMES[2:5]
        assert (page.total, page.offset, page.limit, page.has_more) == (7, 2, 3, True)

    def test_the_last_page_says_that_nothing_follows(self, seven: StateStore) -> None:
        exact = seven.list_sessions(limit=7)
        assert (len(exact.sessions), exact.has_more, exact.next_cursor) == (7, False, None)
        rest = seven.list_sessions(limit=3, offset=6)
        assert (len(rest.sessions), rest.has_more, rest.total) == (1, False, 7)

    def test_an_offset_beyond_the_end_is_an_empty_page(self, seven: StateStore) -> None:
        page = seven.list_sessions(offset=7)
        assert (page.sessions, page.total, page.has_more, page.next_cursor) == ([], 7, False, None)

    def test_a_page_has_fifty_sessions_unless_told(self, store: StateStore) -> None:
        for _ in range(51):
            store.create_session(agent_type="agent")
        page = store.list_sessions()
        assert (len(page.sessions), page.total, page.offset, page.limit) == (50, 51, 0, 50)
        assert page.has_more is True

    @table("limit", [201, 10**6], shared=True)
    def test_a_limit_above_two_hundred_is_two_hundred(self, store: StateStore, limit: int) -> None:
        assert store.list_sessions(limit=limit).limit == 200

    def test_a_page_holds_up_to_two_hundred_sessions(self, store: StateStore) -> None:
        for _ in range(201):
            store.create_session(agent_type="agent")
        assert len(store.list_sessions(limit=200).sessions) == 200
        assert len(store.list_sessions(limit=500).sessions) == 200

    def test_the_total_is_left_out_when_it_is_not_wanted(self, seven: StateStore) -> None:
        page = seven.list_sessions(limit=3, count=False)
        assert (page.total, page.has_more, len(page.sessions)) == (None, True, 3)
        assert seven.list_sessions(count=False).has_more is False

    # Cursors

    @table("order_by", ["created_at", "updated_at"], shared=True)
    @table(("direction", "expected"), [("asc", NAMES), ("desc", NAMES[::-1])])
    @table("limit", [1, 2, 3, 7])
    def test_cursors_lead_through_all_pages_once(
        self, seven: StateStore, order_by: str, direction: str, expected: list[str], limit: int
    ) -> None:
        walked = _walk(seven, order_by=order_by, direction=direction, limit=limit)
        assert walked == expected

    def test_a_cursor_follows_the_filters(self, seven: StateStore) -> None:
        for name in NAMES[::2]:
            seven.update_status(name, "paused")
        assert _walk(seven, status="paused", order_by="created_at", direction="asc", limit=2) == NAMES[::2]

    def test_pages_neither_repeat_nor_skip_while_sessions_come_and_go(self, seven: StateStore) -> None:
        query: dict[str, Any] = {"order_by": "created_at", "direction": "desc", "limit": 3}
        first = seven.list_sessions(**query)
        seven.create_session("newcomer", agent_type="agent")
        seven.delete_session(first.sessions[-1].session_id)
        rest = _walk(seven, cursor=first.next_cursor, **query)
        assert rest == NAMES[3::-1]

    def test_the_total_counts_all_pages(self, seven: StateStore) -> None:
        first = seven.list_sessions(limit=3)
        second = seven.list_sessions(limit=3, cursor=first.next_cursor)
        assert (second.total, len(second.sessions), second.has_more) == (7, 3, True)

    def test_a_cursor_and_an_offset_together_are_refused(self, seven: StateStore) -> None:
        cursor = seven.list_sessions(limit=3).next_cursor
        with pytest.raises(InvalidQuery):
            seven.list_sessions(limit=3, cursor=cursor, offset=1)

    @table("cursor", ["", "x", "0", "session-3", "\x00", "é", "a:b:c", "W10", "x" * 100_000], shared=True)
    def test_a_made_up_cursor_is_refused(self, seven: StateStore, cursor: str) -> None:
        with self.storage_untouched(), pytest.raises(InvalidCursor):
            seven.list_sessions(cursor=cursor)

    @table("cursor", [7, b"x", ["x"]], shared=True)
    def test_a_cursor_that_is_no_text_is_refused(self, seven: StateStore, cursor: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidCursor):
            seven.list_sessions(cursor=cursor)

    def test_a_cursor_changed_anywhere_is_refused(self, seven: StateStore) -> None:
        cursor = seven.list_sessions(limit=3).next_cursor
        assert cursor is not None
        for position in range(len(cursor)):
            other = "B" if cursor[position] == "A" else "A"
            forged = cursor[:position] + other + cursor[position + 1 :]
            with self.storage_untouched(), pytest.raises(InvalidCursor):
                seven.list_sessions(limit=3, cursor=forged)
        for forged in (cursor[:-1], cursor + "A", cursor.swapcase()):
            with pytest.raises(InvalidCursor):
                seven.list_sessions(limit=3, cursor=forged)

    @table(
        "query",
        [
            {"agent_type": "agent"},
            {"status": "active"},
            {"user_id": "user"},
            {"parent_session_id": None},
            {"root_session_id": "root"},
            {"workspace_id": ""},
            {"tags": ["t"]},
            {"metadata": {"k": "v"}},
            {"created_from": 0},
            {"created_to": 253_402_300_799_000},
            {"order_by": "created_at"},
            {"direction": "asc"},
        ],
        shared=True,
    )
    def test_a_cursor_of_another_query_is_refused(self, seven: StateStore, query: dict[str, Any]) -> None:
        cursor = seven.list_sessions(limit=3).next_cursor
        with self.storage_untouched(), pytest.raises(InvalidCursor):
            seven.list_sessions(limit=3, cursor=cursor, **query)

    def test_a_cursor_of_another_list_is_refused(self, seven: StateStore) -> None:
        for number in (1, 2):
            commit_step(seven, NAMES[0], number)
        foreign = seven.list_checkpoints(NAMES[0], limit=1).next_cursor
        assert foreign is not None
        with pytest.raises(InvalidCursor):
            seven.list_sessions(cursor=foreign)


def _walk(store: StateStore, *, cursor: str | None = None, **query: Any) -> list[str]:
    """Return the session ids of all pages from a cursor on. Only the last page has no next page."""
    names: list[str] = []
    while True:
        page = store.list_sessions(cursor=cursor, **query)
        names += [session.session_id for session in page.sessions]
        assert page.has_more == (page.next_cursor is not None)
        cursor = page.next_cursor
        if cursor is None:
            return names
