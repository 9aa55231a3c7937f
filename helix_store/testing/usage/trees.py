"""What a session and its sub-agents spent."""

from __future__ import annotations

import pytest

from helix_store.core.contracts import StateStore, UsageStore
from helix_store.core.types import SubSessionRef
from helix_store.testing.usage.base import UsageTests
from helix_store.testing.usage.samples import rolled_up, tokens

__all__ = ["UsageTreeContract"]


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
    """Prompt tokens and sessions of a tree in which every session has one entry."""
    rollup = rolled_up(usage, session_id, tree=True)
    assert rollup.entry_count == rollup.session_count
    return rollup.tokens.prompt, rollup.session_count


class UsageTreeContract(UsageTests):
    @pytest.fixture
    def spend(self, sessions: StateStore, usage: UsageStore) -> StateStore:
        """Sessions ``a`` to ``g`` without any ties, which spent 1, 10, 100, … prompt tokens."""
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
        """A diamond: ``d`` below ``b`` and ``c``, and below ``a`` itself."""
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
