"""Tests for deleting usage, and for deleting its session."""

from __future__ import annotations

import pytest

from helix_store.core.contracts import StateStore, UsageStore
from helix_store.exceptions import SessionNotFound
from helix_store.testing.usage.base import (
    EVERY_KIND,
    UsageTests,
    custom,
    rolled_up,
    tokens,
)

__all__ = ["UsageDeletionContract"]


class UsageDeletionContract(UsageTests):
    def test_usage_can_be_deleted_without_its_session(self, usage: UsageStore, sessions: StateStore) -> None:
        sessions.create_session("other", agent_type="agent")
        usage.record_entries([*EVERY_KIND, tokens("other", prompt=3)])
        assert usage.delete("session") == len(EVERY_KIND)
        assert usage.delete("session") == 0
        assert (usage.get_entries("session"), usage.exists("session")) == ([], False)
        assert rolled_up(usage).entry_count == 0
        assert sessions.session_exists("session")
        assert rolled_up(usage, "other").tokens.prompt == 3

    def test_deleting_the_usage_of_an_unknown_session_does_nothing(self, usage: UsageStore) -> None:
        usage.record_entry(tokens())
        assert usage.delete("nobody") == 0
        assert usage.exists("session")

    def test_a_deleted_id_can_be_recorded_again(self, usage: UsageStore) -> None:
        usage.record_entry(custom(id="entry", amount=1))
        usage.delete("session")
        usage.record_entry(custom(id="entry", amount=2))
        assert [entry.amount for entry in usage.get_entries("session")] == [2]

    def test_usage_goes_with_its_session(self, usage: UsageStore, sessions: StateStore) -> None:
        sessions.create_session("child", agent_type="agent", parent_session_id="session")
        usage.record_entries([tokens("session"), tokens("child")])
        assert sessions.delete_session("session") == 2
        assert usage.query_usage().entries == []
        assert usage.get_rollup("session") is None
        assert not usage.exists("child")
        with pytest.raises(SessionNotFound):
            usage.record_entry(tokens("session"))

    def test_usage_may_outlive_its_session(self, usage: UsageStore, sessions: StateStore) -> None:
        usage.record_entries(EVERY_KIND)
        before = usage.get_entries("session")
        spent = rolled_up(usage)
        assert sessions.delete_session("session", keep_usage=True) == 1
        assert usage.get_entries("session") == before
        assert usage.get_entries("session", limit=2, offset=3) == before[3:5]
        assert usage.query_usage(order="asc", agent_type="agent", user_id="user").entries == before
        assert usage.exists("session")
        assert rolled_up(usage) == rolled_up(usage, tree=True) == spent

    def test_usage_that_was_kept_can_be_deleted(self, usage: UsageStore, sessions: StateStore) -> None:
        usage.record_entries(EVERY_KIND)
        sessions.delete_session("session", keep_usage=True)
        assert usage.delete("session") == len(EVERY_KIND)
        assert (usage.exists("session"), usage.query_usage().total) == (False, 0)
        assert usage.get_rollup("session") is None

    def test_a_new_session_of_the_same_id_starts_with_nothing_spent(
        self, usage: UsageStore, sessions: StateStore
    ) -> None:
        usage.record_entry(tokens(id="old", prompt=1))
        sessions.delete_session("session", keep_usage=True)
        sessions.create_session("session", agent_type="agent")
        assert (usage.get_entries("session"), usage.exists("session")) == ([], False)
        assert rolled_up(usage, tree=True).entry_count == 0
        usage.record_entry(tokens(id="new", prompt=2))
        assert [entry.id for entry in usage.get_entries("session")] == ["new"]
        assert rolled_up(usage, tree=True).tokens.prompt == 2
        assert usage.query_usage().total == 2

    def test_deleting_takes_kept_usage_too(self, usage: UsageStore, sessions: StateStore) -> None:
        usage.record_entry(tokens())
        sessions.delete_session("session", keep_usage=True)
        sessions.create_session("session", agent_type="agent")
        usage.record_entry(tokens())
        assert usage.delete("session") == 2
        assert usage.query_usage().total == 0

    def test_kept_usage_keeps_its_ids(self, usage: UsageStore, sessions: StateStore) -> None:
        usage.record_entry(custom(id="entry", amount=1))
        sessions.delete_session("session", keep_usage=True)
        sessions.create_session("session", agent_type="agent")
        usage.record_entry(custom(id="entry", amount=2))
        assert usage.get_entries("session") == []
        assert [entry.amount for entry in usage.query_usage().entries] == [1]
