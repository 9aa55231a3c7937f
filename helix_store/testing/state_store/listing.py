"""Tests for listing sessions: the contents of a list, its filters and its order."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from helix_store.core.contracts import StateStore
from helix_store.core.types import (
    UNSET,
    SessionHead,
    SessionStatus,
)
from helix_store.exceptions import InvalidPayload, InvalidQuery
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.samples import (
    commit_step,
    full_session,
    loaded,
    messages,
    touch_after,
)

__all__ = ["ListingContract"]


class ListingContract(StoreTests):
    @pytest.fixture
    def listed(self, store: StateStore) -> StateStore:
        """Return a store with sessions of all kinds."""
        store.create_session("plain", agent_type="writer")
        store.create_session("alice", agent_type="writer", user_id="alice", tags=["x", "y"], workspace_id="w")
        store.create_session("bob", agent_type="coder", user_id="bob", tags=["x"], workspace_id="")
        store.create_session(
            "child", agent_type="coder", parent_session_id="alice", metadata={"a": "1", "b": "2"}
        )
        store.create_session("grandchild", agent_type="coder", parent_session_id="child", metadata={"a": "2"})
        store.update_status("bob", "paused")
        store.update_status("child", "completed")
        return store

    @table(
        ("filters", "expected"),
        [
            ({}, {"plain", "alice", "bob", "child", "grandchild"}),
            ({"agent_type": "writer"}, {"plain", "alice"}),
            ({"agent_type": "Writer"}, set()),
            ({"agent_type": "w%"}, set()),
            ({"status": "paused"}, {"bob"}),
            ({"status": SessionStatus.PAUSED}, {"bob"}),
            ({"status": ["paused", SessionStatus.COMPLETED]}, {"bob", "child"}),
            ({"status": ["failed"]}, set()),
            ({"status": []}, set()),
            ({"user_id": "alice"}, {"alice"}),
            ({"parent_session_id": UNSET}, {"plain", "alice", "bob", "child", "grandchild"}),
            ({"parent_session_id": None}, {"plain", "alice", "bob"}),
            ({"parent_session_id": "alice"}, {"child"}),
            ({"parent_session_id": "nobody"}, set()),
            ({"root_session_id": "alice"}, {"alice", "child", "grandchild"}),
            ({"root_session_id": "child"}, set()),
            ({"workspace_id": "w"}, {"alice"}),
            ({"workspace_id": ""}, {"bob"}),
            ({"tags": ["x"]}, {"alice", "bob"}),
            ({"tags": ["y", "x"]}, {"alice"}),
            ({"tags": ["x", "z"]}, set()),
            ({"tags": ["X"]}, set()),
            ({"tags": []}, {"plain", "alice", "bob", "child", "grandchild"}),
            ({"metadata": {"a": "1"}}, {"child"}),
            ({"metadata": {"a": "1", "b": "2"}}, {"child"}),
            ({"metadata": {"a": "1", "b": "1"}}, set()),
            ({"metadata": {"b": "1"}}, set()),
            ({"metadata": {}}, {"plain", "alice", "bob", "child", "grandchild"}),
            ({"agent_type": "coder", "status": "paused", "user_id": "bob", "tags": ["x"]}, {"bob"}),
            ({"agent_type": "coder", "user_id": "alice"}, set()),
        ],
        shared=True,
    )
    def test_filters_are_exact_and_all_of_them_must_hold(
        self, listed: StateStore, filters: dict[str, Any], expected: set[str]
    ) -> None:
        page = listed.list_sessions(**filters)
        assert {session.session_id for session in page.sessions} == expected
        assert len(page.sessions) == page.total == len(expected)
        assert page.has_more is False

    @table("tag", ["50%", "a_b", "it's", 'say "hi"', "a\\b", "[1]", "ł🚂", "", "null", "$.x"])
    def test_any_text_is_a_tag_and_a_metadata_key_and_value(self, store: StateStore, tag: str) -> None:
        store.create_session("tagged", agent_type="agent", tags=["first", tag], metadata={tag: tag})
        store.create_session(
            "other", agent_type="agent", tags=["first", f"{tag}."], metadata={tag: f"{tag}."}
        )
        assert [session.session_id for session in store.list_sessions(tags=[tag]).sessions] == ["tagged"]
        assert [session.session_id for session in store.list_sessions(metadata={tag: tag}).sessions] == [
            "tagged"
        ]

    def test_filters_follow_what_was_saved_last(self, store: StateStore) -> None:
        state = store.create_session("session", agent_type="agent", tags=["old"], metadata={"k": "old"})
        state.tags, state.metadata, state.user_id = ["new"], {"k": "new"}, "user"
        store.save_state("session", state)
        assert (
            store.list_sessions(tags=["old"]).total == store.list_sessions(metadata={"k": "old"}).total == 0
        )
        assert store.list_sessions(tags=["new"], metadata={"k": "new"}, user_id="user").total == 1

    def test_the_time_of_creation_counts_from_its_start_and_up_to_its_end(self, store: StateStore) -> None:
        store.create_session("session", agent_type="agent")
        created = loaded(store, "session").created_at
        assert created is not None
        later = created + timedelta(microseconds=1)
        assert store.list_sessions(created_from=created).total == 1
        assert store.list_sessions(created_from=later).total == 0
        assert store.list_sessions(created_to=created).total == 0
        assert store.list_sessions(created_to=later).total == 1
        assert store.list_sessions(created_from=created, created_to=later).total == 1

    def test_a_time_may_be_epoch_milliseconds(self, store: StateStore) -> None:
        store.create_session("session", agent_type="agent")
        created = loaded(store, "session").created_at
        assert created is not None
        milliseconds = int(created.timestamp()) * 1000
        assert store.list_sessions(created_from=milliseconds).total == 1
        assert store.list_sessions(created_to=milliseconds).total == 0
        assert store.list_sessions(created_to=milliseconds + 1000).total == 1

    # The contents of a list

    def test_a_listed_session_is_its_state_without_the_payloads(self, store: StateStore) -> None:
        full_session(store, "session")
        (head,) = store.list_sessions().sessions
        state = loaded(store, "session")
        assert type(head) is SessionHead
        names = [field.name for field in fields(head)]
        assert repr({name: getattr(head, name) for name in names}) == repr(
            {name: getattr(state, name) for name in names}
        )
        assert not {"custom_state", "output", "error", "suspension_context", "workspace_refs"} & set(names)

    def test_a_list_follows_every_kind_of_write(self, store: StateStore) -> None:
        store.create_session("session", agent_type="agent")
        store.append_messages("session", messages(3))
        commit_step(store, "session", 4, append=messages(1), title="Title", step_count=4, metadata={"k": "v"})
        store.update_status("session", "failed", failure_reason="boom")
        (head,) = store.list_sessions().sessions
        assert (head.message_count, head.title, head.step_count) == (4, "Title", 4)
        assert (head.status, head.failure_reason, head.metadata) == (SessionStatus.FAILED, "boom", {"k": "v"})
        assert head.version == 4

    def test_an_empty_store_lists_nothing(self, store: StateStore) -> None:
        page = store.list_sessions()
        assert (page.sessions, page.total, page.has_more, page.next_cursor) == ([], 0, False, None)

    # Order

    def test_sessions_are_ordered_by_their_last_update_newest_first(self, store: StateStore) -> None:
        for name in ("a", "b", "c"):
            store.create_session(name, agent_type="agent")
        touch_after(store, "b", loaded(store, "c").updated_at)
        touch_after(store, "a", loaded(store, "b").updated_at)
        assert _ids(store) == ["a", "b", "c"]
        assert _ids(store, direction="asc") == ["c", "b", "a"]

    def test_sessions_can_be_ordered_by_their_creation(self, store: StateStore) -> None:
        for name in ("a", "b", "c"):
            store.create_session(name, agent_type="agent")
        touch_after(store, "a", loaded(store, "c").updated_at)
        assert _ids(store, order_by="created_at") == ["c", "b", "a"]
        assert _ids(store, order_by="created_at", direction="asc") == ["a", "b", "c"]

    @table(
        "query",
        [
            {"order_by": "version"},
            {"order_by": "title; DROP TABLE"},
            {"direction": "down"},
            {"limit": 0},
            {"limit": -1},
            {"limit": 1.5},
            {"limit": "10"},
            {"limit": True},
            {"limit": None},
            {"offset": -1},
            {"offset": "0"},
            {"status": "asleep"},
            {"status": ["active", "asleep"]},
            {"created_from": datetime(2026, 1, 1)},  # noqa: DTZ001  without a zone is what is refused
            {"created_to": "2026-01-01"},
            {"created_from": 1_700_000_000},
        ],
        shared=True,
    )
    def test_a_query_that_makes_no_sense_is_refused(self, store: StateStore, query: dict[str, Any]) -> None:
        with self.storage_untouched(), pytest.raises(InvalidQuery):
            store.list_sessions(**query)

    @table(
        "query",
        [
            {"agent_type": ""},
            {"agent_type": "a\x00"},
            {"user_id": "x" * 256},
            {"user_id": 1.5},
            {"user_id": True},
            {"parent_session_id": "\n"},
            {"root_session_id": ""},
            {"workspace_id": "\ud800"},
            {"tags": "text"},
            {"tags": ["\x00"]},
            {"tags": [1]},
            {"metadata": {"k": 1}},
            {"metadata": {"\ud800": "v"}},
            {"metadata": {"k": "\x00"}},
        ],
        shared=True,
    )
    def test_a_filter_for_what_cannot_be_stored_is_refused(
        self, store: StateStore, query: dict[str, Any]
    ) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            store.list_sessions(**query)

    def test_a_time_far_away_selects_all_or_nothing(self, store: StateStore, session_id: str) -> None:
        assert store.list_sessions(created_from=datetime(1, 1, 2, tzinfo=UTC)).total == 1
        assert store.list_sessions(created_from=datetime(9999, 1, 1, tzinfo=UTC)).total == 0


def _ids(store: StateStore, **query: Any) -> list[str]:
    return [session.session_id for session in store.list_sessions(**query).sessions]
