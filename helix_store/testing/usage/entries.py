"""Reading a session's entries."""

from __future__ import annotations

from typing import Any

import pytest

from helix_store.core.contracts import UsageStore
from helix_store.core.types import UsageKind
from helix_store.testing.usage.base import UsageTests
from helix_store.testing.usage.samples import (
    NOON,
    custom,
    sub_agent,
    tokens,
    tool,
)

__all__ = ["UsageEntryContract"]


class UsageEntryContract(UsageTests):
    @pytest.fixture
    def twelve(self, usage: UsageStore) -> UsageStore:
        """Twelve entries: steps 1, 1, 1, 1, 2, 2, …, the kinds in turn, named by their numbers."""
        kinds = (tokens, tool, sub_agent, custom)
        usage.record_entries(
            kinds[number % 4](id=str(number), step_count=1 + number // 4, timestamp=NOON + number)
            for number in range(12)
        )
        return usage

    def test_entries_come_by_their_timestamps(self, usage: UsageStore) -> None:
        for late in (30, 10, 20, 0):
            usage.record_entry(tokens(id=str(late), timestamp=NOON + late))
        assert _chosen(usage) == [0, 10, 20, 30]

    def test_entries_of_one_moment_come_as_they_were_recorded(self, usage: UsageStore) -> None:
        given = [5, 3, 9, 1, 7]
        usage.record_entries(tokens(id=str(number)) for number in given)
        usage.record_entry(tokens(id="0"))
        assert _chosen(usage) == [*given, 0]

    @pytest.mark.parametrize(
        ("kinds", "expected"),
        [
            (["tokens"], [0, 4, 8]),
            (["tool", "custom"], [1, 3, 5, 7, 9, 11]),
            ((UsageKind.SUBAGENT,), [2, 6, 10]),
            ({"tokens", UsageKind.TOOL, "subagent", "custom"}, list(range(12))),
            ("tool", [1, 5, 9]),
            ([], []),
            (None, list(range(12))),
        ],
    )
    def test_kinds_can_be_chosen(self, twelve: UsageStore, kinds: Any, expected: list[int]) -> None:
        assert _chosen(twelve, kinds=kinds) == expected

    @pytest.mark.parametrize(
        ("steps", "expected"),
        [
            ((1, 3), range(12)),
            ((2, 2), range(4, 8)),
            ((2, None), range(4, 12)),
            ((None, 2), range(8)),
            ((None, None), range(12)),
            ((0, 0), range(0)),
            ((3, 1), range(0)),
            ([2, 3], range(4, 12)),
            ((2**63 - 1, None), range(0)),
        ],
    )
    def test_steps_can_be_chosen_inclusively(self, twelve: UsageStore, steps: Any, expected: range) -> None:
        assert _chosen(twelve, step_range=steps) == list(expected)

    @pytest.mark.parametrize(
        ("page", "expected"),
        [
            ({"limit": 5}, range(5)),
            ({"limit": 5, "offset": 5}, range(5, 10)),
            ({"offset": 5}, range(5, 12)),
            ({"limit": 500, "offset": 10}, range(10, 12)),
            ({"offset": 12}, range(0)),
            ({"limit": 2**63 - 1, "offset": 2**63 - 1}, range(0)),
        ],
    )
    def test_entries_can_be_paged(self, twelve: UsageStore, page: dict[str, int], expected: range) -> None:
        assert _chosen(twelve, **page) == list(expected)

    def test_choices_hold_together(self, twelve: UsageStore) -> None:
        chosen = _chosen(twelve, kinds=["tokens", "tool"], step_range=(2, 3), limit=2, offset=1)
        assert chosen == [5, 8]

    def test_other_sessions_are_left_out(self, twelve: UsageStore) -> None:
        self.make_state_store().create_session("other", agent_type="agent")
        assert twelve.get_entries("other") == []
        twelve.record_entry(tokens("other", id="other"))
        assert [entry.id for entry in twelve.get_entries("other")] == ["other"]
        assert len(twelve.get_entries("session")) == 12

    def test_an_unknown_session_has_no_entries(self, usage: UsageStore) -> None:
        assert usage.get_entries("nobody") == []
        assert usage.exists("nobody") is False

    def test_a_session_exists_for_the_twelve_once_it_has_spent_something(self, usage: UsageStore) -> None:
        assert usage.exists("session") is False
        usage.record_entry(tokens())
        assert usage.exists("session") is True


def _chosen(usage: UsageStore, **chosen: Any) -> list[int]:
    return [int(str(entry.id)) for entry in usage.get_entries("session", **chosen)]
