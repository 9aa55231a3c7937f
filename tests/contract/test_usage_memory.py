"""The in-memory usage store under the contract suite, and what only it has."""

from __future__ import annotations

import pytest

from helix_store.stores import InMemoryStateStore, InMemoryUsageStore, MemoryWorld
from helix_store.testing import UsageStoreContract
from helix_store.testing.usage import AsyncUsageContract, UsageArgumentContract
from helix_store.testing.usage.base import (
    custom,
    rolled_up,
    sub_agent,
    tokens,
    tool,
)


class TestInMemoryUsageStore(UsageStoreContract):
    # They are above the back end.
    only_on_databases = (AsyncUsageContract, UsageArgumentContract)

    @pytest.fixture(autouse=True)
    def one_world(self) -> None:
        self.world = MemoryWorld()

    def make_store(self, *, tenant: str = "") -> InMemoryUsageStore:
        return InMemoryUsageStore(tenant=tenant, world=self.world)

    def make_state_store(self, *, tenant: str = "") -> InMemoryStateStore:
        return InMemoryStateStore(tenant=tenant, world=self.world)


class TestAlone:
    """Without a world to share, a ledger knows no sessions and takes entries of any."""

    def test_it_takes_entries_of_any_session(self) -> None:
        usage = InMemoryUsageStore()
        usage.record_entries([tokens("a", prompt=1), tokens("b", prompt=2)])
        assert rolled_up(usage, "a").tokens.prompt == 1
        assert usage.get_rollup("no session") is None
        assert usage.delete("a") == 1
        assert usage.get_rollup("a") is None

    def test_it_finds_sub_agents_by_their_entries(self) -> None:
        usage = InMemoryUsageStore()
        usage.record_entries(
            [
                tokens("root", prompt=1),
                sub_agent("root", sub_session_id="child"),
                sub_agent("root", sub_session_id="child"),
                tokens("child", prompt=10),
                sub_agent("child", sub_session_id="root"),
                tokens("other", prompt=100),
            ]
        )
        rollup = rolled_up(usage, "root", tree=True)
        assert (rollup.tokens.prompt, rollup.entry_count, rollup.session_count) == (11, 5, 2)
        assert rolled_up(usage, "root").tokens.prompt == 1

    def test_the_source_says_what_the_agent_is(self) -> None:
        usage = InMemoryUsageStore()
        usage.record_entry(tokens("a", source={"type": "agent", "name": "planner"}))
        usage.record_entry(tool("a", source={"type": "tool", "name": "planner"}))
        assert [entry.kind.value for entry in usage.query_usage(agent_type="planner").entries] == ["tokens"]

    def test_ledgers_alone_do_not_see_each_other(self) -> None:
        InMemoryUsageStore().record_entry(tokens("a"))
        assert not InMemoryUsageStore().exists("a")


class TestHelpersForTests:
    def test_sessions_and_entries_can_be_counted(self) -> None:
        usage = InMemoryUsageStore()
        assert (usage.size, usage.total_entry_count, usage.get_all_session_ids()) == (0, 0, [])
        usage.record_entries([custom("b"), custom("a"), custom("b", id="x"), custom("b", id="x")])
        assert (usage.size, usage.total_entry_count) == (2, 3)
        assert usage.get_all_session_ids() == ["b", "a"]

    def test_kept_usage_is_counted(self) -> None:
        world = MemoryWorld()
        sessions, usage = InMemoryStateStore(world=world), InMemoryUsageStore(world=world)
        sessions.create_session("a", agent_type="agent")
        usage.record_entry(custom("a"))
        sessions.delete_session("a", keep_usage=True)
        assert (usage.size, usage.total_entry_count, usage.get_all_session_ids()) == (1, 1, ["a"])

    def test_clear_forgets_every_entry_of_the_tenant_and_no_other(self) -> None:
        world = MemoryWorld()
        for tenant in ("mine", "other"):
            InMemoryStateStore(tenant=tenant, world=world).create_session("a", agent_type="agent")
        mine, other = (InMemoryUsageStore(tenant=tenant, world=world) for tenant in ("mine", "other"))
        for usage in (mine, other):
            usage.record_entry(custom("a", id="entry"))
        mine.clear()
        mine.clear()
        assert (mine.size, mine.total_entry_count, other.total_entry_count) == (0, 0, 1)
        mine.record_entry(custom("a", id="entry"))
        assert mine.total_entry_count == 1
        assert InMemoryStateStore(tenant="mine", world=world).session_exists("a")
