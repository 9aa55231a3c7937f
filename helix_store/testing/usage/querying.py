"""Tests for queries over all sessions of a tenant."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from helix_store.core.contracts import StateStore, UsageStore
from helix_store.core.types import SubSessionRef, UsageKind
from helix_store.exceptions import InvalidCursor, InvalidQuery, SessionNotFound
from helix_store.testing.cells import table
from helix_store.testing.usage.base import (
    EVERY_KIND,
    NOON,
    UsageTests,
    custom,
    rolled_up,
    tokens,
    tool,
)

__all__ = ["UsageQueryContract", "UsageTenantContract"]

MOMENT = datetime(2026, 3, 15, 12, tzinfo=UTC)


class UsageQueryContract(UsageTests):
    @pytest.fixture
    def spenders(self, sessions: StateStore, usage: UsageStore) -> UsageStore:
        """Record twelve entries of three sessions, named by their numbers and one second apart."""
        sessions.create_session("one", agent_type="planner", user_id="ann")
        sessions.create_session("two", agent_type="writer", user_id="bob")
        sessions.create_session("three", agent_type="writer")
        for number in range(12):
            name = ("one", "two", "three")[number % 3]
            given: dict[str, Any] = {"id": str(number), "timestamp": NOON + 1_000 * number}
            entry = tokens(name, model="x", **given) if number % 2 else tool(name, **given)
            usage.record_entry(entry)
        return usage

    @table(
        ("query", "expected"),
        [
            ({}, range(12)),
            ({"agent_type": "planner"}, [0, 3, 6, 9]),
            ({"agent_type": "writer"}, [1, 2, 4, 5, 7, 8, 10, 11]),
            ({"agent_type": "nobody"}, []),
            ({"user_id": "bob"}, [1, 4, 7, 10]),
            ({"kinds": ["tool"]}, [0, 2, 4, 6, 8, 10]),
            ({"kinds": UsageKind.TOKENS}, [1, 3, 5, 7, 9, 11]),
            ({"kinds": ["tool", "tokens", "custom"]}, range(12)),
            ({"kinds": []}, []),
            ({"model": "x"}, [1, 3, 5, 7, 9, 11]),
            ({"model": "X"}, []),
            ({"date_from": NOON + 3_000}, range(3, 12)),
            ({"date_to": NOON + 3_000}, range(3)),
            ({"date_from": NOON + 3_000, "date_to": NOON + 5_000}, [3, 4]),
            ({"date_from": NOON + 3_001, "date_to": NOON + 5_001}, [4, 5]),
            ({"date_from": MOMENT + timedelta(seconds=10)}, [10, 11]),
            ({"date_to": MOMENT.astimezone(timezone(timedelta(hours=5)))}, []),
            ({"date_from": NOON + 5_000, "date_to": NOON + 3_000}, []),
            ({"agent_type": "writer", "kinds": "tokens", "user_id": "bob", "model": "x"}, [1, 7]),
        ],
        shared=True,
    )
    def test_filters_hold_together(self, spenders: UsageStore, query: dict[str, Any], expected: Any) -> None:
        assert _found(spenders, **query) == list(expected)
        assert spenders.query_usage(**query).total == len(expected)

    def test_the_newest_come_first_unless_told(self, spenders: UsageStore) -> None:
        page = spenders.query_usage()
        assert [int(str(entry.id)) for entry in page.entries] == list(range(11, -1, -1))

    @table(("order", "expected"), [("asc", [2, 0, 1]), ("desc", [1, 0, 2])])
    def test_entries_of_one_moment_are_ordered_as_recorded(
        self, usage: UsageStore, order: str, expected: list[int]
    ) -> None:
        usage.record_entries([custom(id=str(number)) for number in (2, 0)])
        usage.record_entry(custom(id="1"))
        page = usage.query_usage(order=order)
        assert [int(str(entry.id)) for entry in page.entries] == expected

    def test_an_entry_is_whole(self, usage: UsageStore) -> None:
        usage.record_entries(EVERY_KIND)
        assert usage.query_usage(order="asc").entries == usage.get_entries("session")

    def test_an_entry_keeps_the_agent_type_and_user_of_its_time(
        self, sessions: StateStore, usage: UsageStore
    ) -> None:
        usage.record_entry(custom(id="1"))
        state = sessions.load_state("session")
        assert state is not None
        state.user_id, state.agent_type = "another", "other agent"
        sessions.save_state("session", state)
        usage.record_entries([custom(id="2"), custom(id="3")])
        assert _found(usage, user_id="user") == _found(usage, agent_type="agent") == [1]
        assert _found(usage, user_id="another") == _found(usage, agent_type="other agent") == [2, 3]

    # Pages

    def test_a_page_says_what_it_is_a_page_of(self, spenders: UsageStore) -> None:
        page = spenders.query_usage(order="asc", limit=3, offset=2)
        assert [entry.id for entry in page.entries] == ["2", "3", "4"]
        assert (page.total, page.offset, page.limit, page.has_more) == (12, 2, 3, True)

    def test_the_last_page_says_that_nothing_follows(self, spenders: UsageStore) -> None:
        exact = spenders.query_usage(limit=12)
        assert (len(exact.entries), exact.has_more, exact.next_cursor) == (12, False, None)
        beyond = spenders.query_usage(offset=12)
        assert (beyond.entries, beyond.total, beyond.has_more, beyond.next_cursor) == ([], 12, False, None)

    def test_a_page_has_fifty_entries_unless_told_and_two_hundred_at_most(self, usage: UsageStore) -> None:
        usage.record_entries(custom() for _ in range(201))
        assert (len(usage.query_usage().entries), usage.query_usage().limit) == (50, 50)
        assert (len(usage.query_usage(limit=500).entries), usage.query_usage(limit=500).limit) == (200, 200)

    def test_the_total_is_left_out_when_it_is_not_wanted(self, spenders: UsageStore) -> None:
        page = spenders.query_usage(limit=3, count=False)
        assert (page.total, page.has_more, len(page.entries)) == (None, True, 3)

    @table("order", ["asc", "desc"])
    @table("limit", [1, 2, 3, 5, 12])
    @table("spread", [1_000, 0])
    def test_cursors_lead_through_all_pages_once(
        self, usage: UsageStore, order: str, limit: int, spread: int
    ) -> None:
        usage.record_entries(
            custom(id=str(number), timestamp=NOON + spread * (number % 4)) for number in range(12)
        )
        whole = [entry.id for entry in usage.query_usage(order=order).entries]
        assert _walked(usage, order=order, limit=limit) == whole

    def test_a_cursor_follows_the_filters(self, spenders: UsageStore) -> None:
        query = {"order": "asc", "agent_type": "writer", "kinds": {"tokens"}, "limit": 2}
        assert _walked(spenders, **query) == ["1", "5", "7", "11"]

    def test_pages_neither_repeat_nor_skip_while_entries_are_recorded(self, spenders: UsageStore) -> None:
        first = spenders.query_usage(limit=5)
        spenders.record_entry(custom("one", id="99", timestamp=NOON + 99_000))
        rest = _walked(spenders, limit=5, cursor=first.next_cursor)
        assert rest == ["6", "5", "4", "3", "2", "1", "0"]

    def test_the_kinds_of_a_cursor_may_come_in_any_order(self, spenders: UsageStore) -> None:
        cursor = spenders.query_usage(kinds=["tool", "tokens"], limit=5).next_cursor
        page = spenders.query_usage(kinds=("tokens", UsageKind.TOOL, "tool"), limit=5, cursor=cursor)
        assert [entry.id for entry in page.entries] == ["6", "5", "4", "3", "2"]

    def test_a_cursor_and_an_offset_together_are_refused(self, spenders: UsageStore) -> None:
        cursor = spenders.query_usage(limit=3).next_cursor
        with self.storage_untouched(), pytest.raises(InvalidQuery):
            spenders.query_usage(limit=3, cursor=cursor, offset=1)

    def test_a_cursor_changed_anywhere_is_refused(self, spenders: UsageStore) -> None:
        cursor = spenders.query_usage(limit=3).next_cursor
        assert cursor is not None
        for position in range(len(cursor)):
            other = "B" if cursor[position] == "A" else "A"
            forged = cursor[:position] + other + cursor[position + 1 :]
            with self.storage_untouched(), pytest.raises(InvalidCursor):
                spenders.query_usage(limit=3, cursor=forged)

    @table(
        "query",
        [
            {"agent_type": "writer"},
            {"kinds": ["tool"]},
            {"user_id": "ann"},
            {"model": "x"},
            {"date_from": 0},
            {"date_to": NOON + 999_999},
            {"order": "asc"},
        ],
        shared=True,
    )
    def test_a_cursor_of_another_query_is_refused(self, spenders: UsageStore, query: dict[str, Any]) -> None:
        cursor = spenders.query_usage(limit=3).next_cursor
        with self.storage_untouched(), pytest.raises(InvalidCursor):
            spenders.query_usage(limit=3, cursor=cursor, **query)

    def test_a_cursor_of_sessions_is_refused(self, spenders: UsageStore, sessions: StateStore) -> None:
        cursor = sessions.list_sessions(limit=1).next_cursor
        with self.storage_untouched(), pytest.raises(InvalidCursor):
            spenders.query_usage(cursor=cursor)


def _found(usage: UsageStore, **query: Any) -> list[int]:
    return [int(str(entry.id)) for entry in usage.query_usage(order="asc", **query).entries]


def _walked(usage: UsageStore, **query: Any) -> list[str | None]:
    ids: list[str | None] = []
    while True:
        page = usage.query_usage(**query)
        ids += [entry.id for entry in page.entries]
        assert len(set(ids)) == len(ids), "an entry came twice"
        if page.next_cursor is None:
            return ids
        query["cursor"] = page.next_cursor


class UsageTenantContract(UsageTests):
    def test_ledgers_of_one_tenant_share_their_entries(self) -> None:
        self.make_state_store(tenant="ours").create_session("session", agent_type="agent")
        self.make_store(tenant="ours").record_entry(tokens(prompt=1))
        assert rolled_up(self.make_store(tenant="ours")).tokens.prompt == 1

    def test_another_tenants_sessions_are_unknown(self) -> None:
        ours, theirs = (self.make_store(tenant=tenant) for tenant in ("ours", "theirs"))
        self.make_state_store(tenant="theirs").create_session("session", agent_type="agent")
        theirs.record_entry(tokens(id="entry"))
        with pytest.raises(SessionNotFound):
            ours.record_entry(tokens())
        assert (ours.get_entries("session"), ours.exists("session")) == ([], False)
        assert ours.get_rollup("session") is ours.get_rollup("session", include_sub_agents=True) is None
        assert (ours.query_usage().entries, ours.query_usage().total) == ([], 0)
        assert ours.timeseries(date_from=0, date_to=NOON + 1) == []
        assert ours.delete("session") == 0
        assert theirs.query_usage().total == 1

    def test_tenants_may_use_the_same_ids(self) -> None:
        for amount, tenant in enumerate(("ours", "theirs", ""), start=1):
            sessions, usage = self.make_state_store(tenant=tenant), self.make_store(tenant=tenant)
            sessions.create_session("session", agent_type="agent")
            sessions.create_session("child", agent_type="agent", parent_session_id="session")
            sessions.add_sub_session_refs("session", [SubSessionRef(sub_session_id="sub", agent_type="x")])
            if tenant == "theirs":
                sessions.create_session("sub", agent_type="agent")
            usage.record_entries([tokens(id="1", prompt=amount), tokens("child", id="2", prompt=10 * amount)])
        for amount, tenant in enumerate(("ours", "theirs", ""), start=1):
            rollup = rolled_up(self.make_store(tenant=tenant), tree=True)
            assert rollup.tokens.prompt == 11 * amount
            assert rollup.session_count == (3 if tenant == "theirs" else 2)

    def test_kept_usage_stays_with_its_tenant(self) -> None:
        for tenant in ("ours", "theirs"):
            sessions = self.make_state_store(tenant=tenant)
            sessions.create_session("session", agent_type="agent")
            self.make_store(tenant=tenant).record_entry(tokens(id=tenant))
            sessions.delete_session("session", keep_usage=True)
        ours, theirs = self.make_store(tenant="ours"), self.make_store(tenant="theirs")
        assert [entry.id for entry in ours.get_entries("session")] == ["ours"]
        rollup = ours.get_rollup("session")
        assert rollup is not None
        assert rollup.entry_count == 1
        assert ours.delete("session") == 1
        assert theirs.exists("session")

    def test_a_cursor_of_another_tenant_is_refused(self) -> None:
        for tenant in ("ours", "theirs"):
            self.make_state_store(tenant=tenant).create_session("session", agent_type="agent")
            self.make_store(tenant=tenant).record_entries([tokens(), tokens()])
        cursor = self.make_store(tenant="theirs").query_usage(limit=1).next_cursor
        with pytest.raises(InvalidCursor):
            self.make_store(tenant="ours").query_usage(limit=1, cursor=cursor)
