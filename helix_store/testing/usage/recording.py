"""Tests for recording entries and reading them back."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from helix_store.core.contracts import UsageStore
from helix_store.core.types import UsageKind
from helix_store.core.usage import (
    TokenCounts,
    UsageEntry,
    UsageSource,
)
from helix_store.exceptions import InvalidPayload, SessionNotFound
from helix_store.testing.cells import table
from helix_store.testing.usage.base import (
    EVERY_KIND,
    NOON,
    UsageTests,
    custom,
    sub_agent,
    tokens,
    tool,
)

__all__ = ["RecordingContract", "UsageEntryContract"]


class RecordingContract(UsageTests):
    @table("entry", EVERY_KIND)
    def test_an_entry_comes_back_as_it_was_given(self, usage: UsageStore, entry: dict[str, Any]) -> None:
        entry_id = usage.record_entry({"cost_usd": "0.5", **entry})
        expected = UsageEntry.from_dict({"cost_usd": "0.5", **entry, "id": entry_id})
        (stored,) = usage.get_entries("session")
        assert stored == expected
        assert type(stored.amount) is type(expected.amount)
        assert entry_id == entry.get("id", entry_id)

    def test_an_entry_may_be_a_value_object(self, usage: UsageStore) -> None:
        source = UsageSource(type="agent", name="planner")
        entry = UsageEntry(
            kind=UsageKind.TOKENS,
            session_id="session",
            step_count=1,
            timestamp=NOON,
            source=source,
            id="entry",
            cost_usd=Decimal("0.25"),
            model="model",
            tokens=TokenCounts(prompt=1),
        )
        usage.record_entry(entry)
        assert usage.get_entries("session") == [entry]
        assert usage.get_entries("session")[0].source == source

    def test_what_comes_back_can_be_given_again(self, usage: UsageStore) -> None:
        usage.record_entries([{**entry, "id": f"entry {n}"} for n, entry in enumerate(EVERY_KIND)])
        stored = usage.get_entries("session")
        assert usage.delete("session") == len(EVERY_KIND)
        usage.record_entries([entry.to_dict() for entry in stored])
        assert usage.get_entries("session") == stored

    def test_tokens_that_are_not_given_count_as_none(self, usage: UsageStore) -> None:
        usage.record_entry(tokens(prompt=3, cached=None))
        (entry,) = usage.get_entries("session")
        assert entry.tokens == TokenCounts(prompt=3, completion=0, reasoning=0, cached=0, total=0)

    @table(
        ("given", "stored"),
        [
            (Decimal("0.1"), "0.1"),
            (0.1, "0.1"),
            ("0.1", "0.1"),
            (3, "3"),
            (0, "0"),
            (1e-12, "0.000000000001"),
            (Decimal("1e-13"), "0"),
            ("0.0000000000015", "0.000000000002"),
            ("0.0000000000025", "0.000000000002"),
        ],
    )
    def test_a_cost_is_kept_to_twelve_places(self, usage: UsageStore, given: Any, stored: str) -> None:
        usage.record_entry(custom(cost_usd=given))
        assert usage.get_entries("session")[0].cost_usd == Decimal(stored)

    def test_a_model_without_a_price_costs_nothing_that_is_known(self, usage: UsageStore) -> None:
        usage.record_entry(tokens(model="no-such-model", prompt=1_000))
        assert usage.get_entries("session")[0].cost_usd is None

    def test_counts_that_contradict_each_other_are_recorded_without_a_price(self, usage: UsageStore) -> None:
        """A provider reported them, and there is no price for more cached tokens than there were."""
        given: list[dict[str, Any]] = [
            {"prompt": 1, "cached": 5, "cache_write": 3, "total": 1},
            {"prompt": 10, "cached": 6, "cache_write": 6, "completion": 2, "total": 12},
            {"prompt": 1, "audio_prompt": 2, "total": 1},
            {"completion": 1, "reasoning": 1, "audio_completion": 1, "total": 1},
        ]
        for counts in given:
            usage.record_entry(tokens(model="gpt-4o", **counts))
        stored = usage.get_entries("session")
        assert [each.tokens for each in stored] == [TokenCounts(**counts) for counts in given]
        assert [each.cost_usd for each in stored] == [None] * len(given)
        rollup = usage.get_rollup("session")
        assert rollup is not None
        assert (rollup.tokens.total, rollup.tokens.cached, rollup.cost_usd) == (15, 11, Decimal(0))

    @table("amount", [0, 1, 2**53, 0.1, 5e-324, 1e300])
    def test_an_amount_keeps_its_value_and_type(self, usage: UsageStore, amount: float) -> None:
        usage.record_entry(custom(amount=amount))
        assert repr(usage.get_entries("session")[0].amount) == repr(amount)

    def test_a_whole_amount_comes_back_as_a_whole_number(self, usage: UsageStore) -> None:
        usage.record_entries([custom(amount=2.0), custom(amount=-0.0)])
        assert [repr(entry.amount) for entry in usage.get_entries("session")] == ["2", "0"]

    # Ids

    def test_ids_are_made_where_none_is_given(self, usage: UsageStore) -> None:
        given = [tokens(), tokens(id="mine"), tokens(id=None)]
        first, mine, third = usage.record_entries(given)
        assert (len({first, mine, third}), mine) == (3, "mine")
        assert [entry.id for entry in usage.get_entries("session")] == [first, "mine", third]

    def test_the_same_id_again_records_nothing(self, usage: UsageStore) -> None:
        assert usage.record_entry(tokens(id="entry", prompt=1)) == "entry"
        assert usage.record_entry(tokens(id="entry", prompt=1)) == "entry"
        assert usage.record_entry(tool(id="entry")) == "entry"
        assert usage.record_entries([custom(id="entry"), tokens(id="new")]) == ["entry", "new"]
        stored = usage.get_entries("session")
        assert [(entry.id, entry.kind.value) for entry in stored] == [("entry", "tokens"), ("new", "tokens")]

    def test_the_same_id_twice_in_a_batch_counts_once(self, usage: UsageStore) -> None:
        ids = usage.record_entries([custom(id="entry", amount=1), custom(id="entry", amount=2)])
        assert ids == ["entry", "entry"]
        assert [entry.amount for entry in usage.get_entries("session")] == [1]

    def test_an_id_belongs_to_the_tenant_not_to_the_session(self, usage: UsageStore) -> None:
        self.make_state_store().create_session("other", agent_type="agent")
        usage.record_entry(tokens("session", id="entry"))
        usage.record_entry(tokens("other", id="entry"))
        assert usage.get_entries("other") == []

    def test_an_entry_recorded_by_many_at_once_counts_once(self, usage: UsageStore) -> None:
        results = self.at_once(*[lambda: usage.record_entry(custom(id="entry"))] * 8)
        assert results == ["entry"] * 8
        assert len(usage.get_entries("session")) == 1

    def test_entries_recorded_by_many_at_once_all_count(self, usage: UsageStore) -> None:
        self.at_once(*[lambda: [usage.record_entry(custom()) for _ in range(10)]] * 8)
        assert len(usage.get_entries("session")) == 80

    # Batches

    def test_a_batch_is_kept_in_its_order(self, usage: UsageStore) -> None:
        ids = usage.record_entries(tokens(step_count=number) for number in range(2_500))
        stored = usage.get_entries("session")
        assert [entry.id for entry in stored] == ids
        assert [entry.step_count for entry in stored] == list(range(2_500))

    def test_a_batch_may_be_of_many_sessions_and_kinds(self, usage: UsageStore) -> None:
        self.make_state_store().create_session("other", agent_type="agent")
        usage.record_entries([tokens("other"), tool("session"), sub_agent("other"), custom("session")])
        kinds = {
            name: [entry.kind.value for entry in usage.get_entries(name)] for name in ("session", "other")
        }
        assert kinds == {"session": ["tool", "custom"], "other": ["tokens", "subagent"]}

    def test_an_empty_batch_records_nothing(self, usage: UsageStore) -> None:
        with self.storage_untouched():
            assert usage.record_entries([]) == []

    def test_an_unknown_session_is_refused(self, usage: UsageStore) -> None:
        with pytest.raises(SessionNotFound) as caught:
            usage.record_entry(tokens("nobody", id="entry"))
        assert caught.value.session_id == "nobody"
        assert usage.query_usage().total == 0
        usage.record_entry(tokens("session", id="entry"))
        assert usage.exists("session")

    @table("index", [0, 1, 1_500], shared=True)
    def test_a_batch_with_an_unknown_session_is_refused_whole(self, usage: UsageStore, index: int) -> None:
        entries = [tokens() for _ in range(1_501)]
        entries[index] = tokens("nobody")
        with pytest.raises(SessionNotFound) as caught:
            usage.record_entries(entries)
        assert caught.value.session_id == "nobody"
        assert usage.query_usage().total == 0

    @table("index", [0, 1, 1_500], shared=True)
    def test_a_batch_with_a_bad_entry_is_refused_whole(self, usage: UsageStore, index: int) -> None:
        entries = [tokens() for _ in range(1_501)]
        entries[index] = tokens(prompt=-1)
        with self.storage_untouched(), pytest.raises(InvalidPayload) as caught:
            usage.record_entries(entries)
        assert caught.value.path == f"/entries/{index}/tokens/prompt"
        assert usage.query_usage().total == 0

    def test_recording_does_not_change_the_session(self, usage: UsageStore) -> None:
        before = self.make_state_store().load_state("session")
        usage.record_entries(EVERY_KIND)
        assert self.make_state_store().load_state("session") == before


class UsageEntryContract(UsageTests):
    @pytest.fixture
    def twelve(self, usage: UsageStore) -> UsageStore:
        """Record twelve entries: steps 1, 1, 1, 1, 2, 2, …, the kinds in turn, named by their numbers."""
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

    @table(
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
        shared=True,
    )
    def test_kinds_can_be_chosen(self, twelve: UsageStore, kinds: Any, expected: list[int]) -> None:
        assert _chosen(twelve, kinds=kinds) == expected

    @table(
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
        shared=True,
    )
    def test_steps_can_be_chosen_inclusively(self, twelve: UsageStore, steps: Any, expected: range) -> None:
        assert _chosen(twelve, step_range=steps) == list(expected)

    @table(
        ("page", "expected"),
        [
            ({"limit": 5}, range(5)),
            ({"limit": 5, "offset": 5}, range(5, 10)),
            ({"offset": 5}, range(5, 12)),
            ({"limit": 500, "offset": 10}, range(10, 12)),
            ({"offset": 12}, range(0)),
            ({"limit": 2**63 - 1, "offset": 2**63 - 1}, range(0)),
        ],
        shared=True,
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
