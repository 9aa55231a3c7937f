"""Tenants: a ledger never shows, changes or counts what belongs to another one."""

from __future__ import annotations

import pytest

from helix_store.core.types import SubSessionRef
from helix_store.exceptions import InvalidCursor, SessionNotFound
from helix_store.testing.usage.base import UsageTests
from helix_store.testing.usage.samples import (
    NOON,
    rolled_up,
    tokens,
)

__all__ = ["UsageTenantContract"]


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
        assert ours.delete("session") == 1
        assert theirs.exists("session")

    def test_a_cursor_of_another_tenant_is_refused(self) -> None:
        for tenant in ("ours", "theirs"):
            self.make_state_store(tenant=tenant).create_session("session", agent_type="agent")
            self.make_store(tenant=tenant).record_entries([tokens(), tokens()])
        cursor = self.make_store(tenant="theirs").query_usage(limit=1).next_cursor
        with pytest.raises(InvalidCursor):
            self.make_store(tenant="ours").query_usage(limit=1, cursor=cursor)
