"""Tests for the rollups of a session and of a tree of sessions."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from helix_store.core.contracts import StateStore, UsageStore
from helix_store.core.types import SubSessionRef
from helix_store.core.usage import (
    CallStats,
    TokenCounts,
    ToolStats,
    UsageRollup,
)
from helix_store.testing.cells import table
from helix_store.testing.usage.base import (
    EVERY_KIND,
    UsageTests,
    custom,
    rolled_up,
    sub_agent,
    tokens,
    tool,
)

__all__ = ["RollupContract", "UsageTreeContract"]

NOTHING = UsageRollup(
    tokens=TokenCounts(),
    tokens_by_model={},
    tool_stats=ToolStats(),
    sub_agents={},
    custom={},
    cost_usd=Decimal(0),
    entry_count=0,
    session_count=1,
)


class RollupContract(UsageTests):
    @table("tree", [False, True], shared=True)
    def test_a_session_that_spent_nothing_adds_up_to_nothing(self, usage: UsageStore, tree: bool) -> None:
        assert usage.get_rollup("session", include_sub_agents=tree) == NOTHING

    @table("tree", [False, True], shared=True)
    def test_an_unknown_session_has_no_rollup(self, usage: UsageStore, tree: bool) -> None:
        assert usage.get_rollup("nobody", include_sub_agents=tree) is None

    @table("tree", [False, True])
    def test_every_kind_is_added_up(self, usage: UsageStore, tree: bool) -> None:
        usage.record_entries(
            [
                tokens(model="b", prompt=100, completion=50, total=150, cost_usd="0.00075"),
                tokens(model="a", prompt=1, completion=2, reasoning=3, cached=4, total=5, cost_usd="0.1"),
                tokens(model="b", prompt=10, cached=7, total=10),
                tool(tool_name="search", duration_ms=10),
                tool(tool_name="search", success=False, duration_ms=20, cost_usd="0.2"),
                tool(tool_name="fetch", duration_ms=5),
                sub_agent(agent_type="writer", duration_ms=1_000),
                sub_agent(agent_type="writer", success=False, duration_ms=500, sub_session_id="sub-2"),
                sub_agent(agent_type="critic", duration_ms=1),
                custom(type="api_calls", name="tavily", amount=1),
                custom(type="api_calls", name="tavily", amount=1),
                custom(type="api_calls", name="bing", amount=0.5),
                custom(type="storage", name="tavily", amount=0.25, unit="MB"),
            ]
        )
        assert rolled_up(usage, tree=tree) == UsageRollup(
            tokens=TokenCounts(prompt=111, completion=52, reasoning=3, cached=11, total=165),
            tokens_by_model={
                "a": TokenCounts(prompt=1, completion=2, reasoning=3, cached=4, total=5),
                "b": TokenCounts(prompt=110, completion=50, cached=7, total=160),
            },
            tool_stats=ToolStats(
                total_calls=3,
                by_tool={
                    "fetch": CallStats(calls=1, failures=0, total_duration_ms=5),
                    "search": CallStats(calls=2, failures=1, total_duration_ms=30),
                },
            ),
            sub_agents={
                "critic": CallStats(calls=1, failures=0, total_duration_ms=1),
                "writer": CallStats(calls=2, failures=1, total_duration_ms=1_500),
            },
            custom={"api_calls": {"bing": 0.5, "tavily": 2}, "storage": {"tavily": 0.25}},
            cost_usd=Decimal("0.30075"),
            entry_count=13,
            session_count=1,
        )

    def test_names_are_in_order(self, usage: UsageStore) -> None:
        names = ["b", "ä", "Z", "a", "🚂", "10", "9"]
        for name in names:
            usage.record_entries([tokens(model=name), tool(tool_name=name), sub_agent(agent_type=name)])
            usage.record_entries([custom(type=name, name=other) for other in names])
        rollup = rolled_up(usage)
        listed: list[dict[str, Any]] = [
            *(rollup.tokens_by_model, rollup.tool_stats.by_tool, rollup.sub_agents, rollup.custom),
            *rollup.custom.values(),
        ]
        assert [list(part) for part in listed] == [sorted(names)] * len(listed)

    def test_names_are_told_apart_by_their_code_points(self, usage: UsageStore) -> None:
        names = {"a", "A", "ä", "a\u0308", "a ", " a"}
        usage.record_entries(tool(tool_name=name) for name in names)
        assert rolled_up(usage).tool_stats.by_tool.keys() == names

    def test_sums_do_not_overflow(self, usage: UsageStore) -> None:
        largest = 2**63 - 1
        dearest = Decimal("9223372.036854775807")
        for _ in range(5):
            usage.record_entry(tokens(model="m", prompt=largest, total=largest, cost_usd=dearest))
            usage.record_entry(tool(tool_name="t", duration_ms=largest, cost_usd=dearest))
            usage.record_entry(custom(type="c", name="n", amount=1e300))
        rollup = rolled_up(usage)
        assert rollup.tokens == TokenCounts(prompt=5 * largest, total=5 * largest)
        assert rollup.tool_stats.by_tool["t"].total_duration_ms == 5 * largest
        assert rollup.cost_usd == 10 * dearest
        assert rollup.custom["c"]["n"] == pytest.approx(5e300)

    def test_costs_do_not_drift(self, usage: UsageStore) -> None:
        usage.record_entries(custom(cost_usd="0.000000000001") for _ in range(999))
        usage.record_entry(custom(cost_usd="0.1"))
        usage.record_entry(custom(cost_usd="0.2"))
        assert str(rolled_up(usage).cost_usd) == "0.300000000999"

    def test_whole_amounts_add_up_to_a_whole_number(self, usage: UsageStore) -> None:
        usage.record_entries([custom(amount=0.5), custom(amount=1.5)])
        assert repr(rolled_up(usage).custom["api_calls"]["tavily"]) == "2"

    def test_an_entry_recorded_again_does_not_count_again(self, usage: UsageStore) -> None:
        for _ in range(3):
            usage.record_entry(tokens(id="entry", prompt=5))
        assert rolled_up(usage).tokens.prompt == 5

    def test_a_rollup_can_be_written_as_json_and_read_back(self, usage: UsageStore) -> None:
        usage.record_entries(EVERY_KIND)
        rollup = rolled_up(usage)
        assert UsageRollup.from_dict(rollup.to_dict()) == rollup
        assert type(rollup.to_dict()["cost_usd"]) is str


def _refer(sessions: StateStore, source: str, *targets: str, location: str = "local") -> None:
    remote = {"url": "https://example.com"} if location == "remote" else None
    sessions.add_sub_session_refs(
        source,
        [
            SubSessionRef(sub_session_id=name, agent_type="agent", location=location, remote=remote)  # type: ignore[arg-type]
            for name in targets
        ],
    )


def _spent(usage: UsageStore, session_id: str) -> tuple[int, int]:
    """Return the prompt tokens and the sessions of a tree in which every session has one entry."""
    rollup = rolled_up(usage, session_id, tree=True)
    assert rollup.entry_count == rollup.session_count
    return rollup.tokens.prompt, rollup.session_count


class UsageTreeContract(UsageTests):
    @pytest.fixture
    def spend(self, sessions: StateStore, usage: UsageStore) -> StateStore:
        """Record 1, 10, 100, … prompt tokens for sessions ``a`` to ``g``, which are not yet linked."""
        for power, name in enumerate("abcdefg"):
            sessions.create_session(name, agent_type="agent")
            usage.record_entry(tokens(name, prompt=10**power))
        return sessions

    def test_children_count_only_when_they_are_asked_for(
        self, sessions: StateStore, usage: UsageStore
    ) -> None:
        sessions.create_session("parent", agent_type="agent")
        sessions.create_session("child", agent_type="agent", parent_session_id="parent")
        sessions.create_session("grandchild", agent_type="agent", parent_session_id="child")
        usage.record_entries([tokens("parent", prompt=1), tokens("child", prompt=10)])
        usage.record_entries([tokens("grandchild", prompt=100)] * 2)
        assert rolled_up(usage, "parent").tokens.prompt == 1
        tree = rolled_up(usage, "parent", tree=True)
        assert (tree.tokens.prompt, tree.entry_count, tree.session_count) == (211, 4, 3)
        assert rolled_up(usage, "child", tree=True).tokens.prompt == 210

    def test_sessions_without_entries_count_as_sessions(
        self, sessions: StateStore, usage: UsageStore
    ) -> None:
        sessions.create_session("parent", agent_type="agent")
        sessions.create_session("child", agent_type="agent", parent_session_id="parent")
        rollup = rolled_up(usage, "parent", tree=True)
        assert (rollup.entry_count, rollup.session_count) == (0, 2)

    def test_sub_sessions_count_by_local_ref(self, spend: StateStore, usage: UsageStore) -> None:
        _refer(spend, "a", "b", "c")
        _refer(spend, "c", "d")
        assert _spent(usage, "a") == (1111, 4)
        assert _spent(usage, "c") == (1100, 2)
        assert _spent(usage, "b") == (10, 1)

    def test_remote_sub_sessions_do_not_count(self, spend: StateStore, usage: UsageStore) -> None:
        _refer(spend, "a", "b", location="remote")
        _refer(spend, "a", "c")
        assert _spent(usage, "a") == (101, 2)

    def test_a_ref_to_a_session_that_does_not_exist_is_passed_over(
        self, spend: StateStore, usage: UsageStore
    ) -> None:
        _refer(spend, "a", "nobody", "b")
        assert _spent(usage, "a") == (11, 2)

    def test_a_session_reached_twice_counts_once(self, spend: StateStore, usage: UsageStore) -> None:
        """Build a diamond: ``d`` is below ``b`` and ``c``, and below ``a`` itself."""
        _refer(spend, "a", "b", "c", "d")
        _refer(spend, "b", "d")
        _refer(spend, "c", "d")
        assert _spent(usage, "a") == (1111, 4)

    def test_a_child_by_parent_and_by_ref_counts_once(self, sessions: StateStore, usage: UsageStore) -> None:
        sessions.create_session("parent", agent_type="agent")
        sessions.create_session("child", agent_type="agent", parent_session_id="parent")
        _refer(sessions, "parent", "child")
        usage.record_entries([tokens("parent", prompt=1), tokens("child", prompt=10)])
        assert _spent(usage, "parent") == (11, 2)

    def test_a_cycle_ends(self, spend: StateStore, usage: UsageStore) -> None:
        _refer(spend, "a", "b")
        _refer(spend, "b", "c")
        _refer(spend, "c", "a", "c")
        for name in "abc":
            assert _spent(usage, name) == (111, 3)

    def test_cycles_within_cycles_end(self, spend: StateStore, usage: UsageStore) -> None:
        for name in "abcdefg":
            _refer(spend, name, *"abcdefg")
        assert _spent(usage, "d") == (1_111_111, 7)

    def test_sessions_that_are_each_others_parents_count_once(
        self, spend: StateStore, usage: UsageStore
    ) -> None:
        for name, parent in zip("abc", "bca", strict=True):
            state = spend.load_state(name)
            assert state is not None
            state.parent_session_id = parent
            spend.save_state(name, state)
        assert _spent(usage, "a") == (111, 3)

    def test_a_deep_chain_counts_to_its_end(self, sessions: StateStore, usage: UsageStore) -> None:
        parent = None
        for depth in range(60):
            parent = sessions.create_session(
                f"depth {depth}", agent_type="agent", parent_session_id=parent
            ).session_id
        usage.record_entries(tokens(f"depth {depth}", prompt=1) for depth in range(60))
        assert _spent(usage, "depth 0") == (60, 60)
        assert _spent(usage, "depth 59") == (1, 1)

    def test_other_trees_do_not_count(self, sessions: StateStore, usage: UsageStore) -> None:
        for root in ("ours", "theirs"):
            sessions.create_session(root, agent_type="agent")
            sessions.create_session(f"{root} child", agent_type="agent", parent_session_id=root)
            usage.record_entries([tokens(root, prompt=1), tokens(f"{root} child", prompt=1)])
        assert _spent(usage, "ours") == (2, 2)
