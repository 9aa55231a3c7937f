"""Tests for usage over time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

from helix_store.core.contracts import StateStore, UsageStore
from helix_store.core.usage import TokenCounts, UsageBucket
from helix_store.testing.cells import table
from helix_store.testing.usage.base import (
    NOON,
    UsageTests,
    custom,
    tokens,
    tool,
)

__all__ = ["TimeSeriesContract"]

EVER: dict[str, Any] = {"date_from": 0, "date_to": 253_402_300_799_999}


def _milliseconds(text: str) -> int:
    time = datetime.fromisoformat(text).replace(tzinfo=UTC)
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def _bucket(start: datetime, group: str | None, counts: TokenCounts, cost: str, entries: int) -> UsageBucket:
    return UsageBucket(start=start, group=group, tokens=counts, cost_usd=Decimal(cost), entry_count=entries)


class TimeSeriesContract(UsageTests):
    def test_each_day_and_model_is_summed(self, usage: UsageStore) -> None:
        day = 24 * 60 * 60 * 1_000
        usage.record_entries(
            [
                tokens(model="b", prompt=1, completion=2, reasoning=3, cached=4, total=5, cost_usd="0.1"),
                tokens(model="b", prompt=10, total=10, cost_usd="0.2"),
                tokens(model="a", prompt=100, total=100),
                tokens(model="b", prompt=1_000, total=1_000, timestamp=NOON + day),
                tool(cost_usd="0.5", timestamp=NOON + 1),
                tokens(model="c", timestamp=NOON + 2 * day),
            ]
        )
        first, second = datetime(2026, 3, 15, tzinfo=UTC), datetime(2026, 3, 16, tzinfo=UTC)
        assert usage.timeseries(date_from=NOON, date_to=NOON + 2 * day) == [
            _bucket(first, None, TokenCounts(), "0.5", 1),
            _bucket(first, "a", TokenCounts(prompt=100, total=100), "0", 1),
            _bucket(
                first, "b", TokenCounts(prompt=11, completion=2, reasoning=3, cached=4, total=15), "0.3", 2
            ),
            _bucket(second, "b", TokenCounts(prompt=1_000, total=1_000), "0", 1),
        ]

    @table(
        ("bucket", "time", "start"),
        [
            ("hour", "2026-03-15T12:59:59.999", "2026-03-15T12:00"),
            ("hour", "2026-03-15T13:00:00.000", "2026-03-15T13:00"),
            ("day", "2026-03-15T23:59:59.999", "2026-03-15"),
            ("day", "2026-03-16T00:00:00.000", "2026-03-16"),
            ("day", "2024-02-29T12:00", "2024-02-29"),
            ("week", "2026-03-15T23:59:59.999", "2026-03-09"),
            ("week", "2026-03-16T00:00", "2026-03-16"),
            ("week", "2027-01-01T00:00", "2026-12-28"),
            ("month", "2026-03-31T23:59:59.999", "2026-03-01"),
            ("month", "2026-04-01T00:00", "2026-04-01"),
            ("day", "1970-01-01T00:00", "1970-01-01"),
            ("hour", "9999-12-31T23:59:59.998", "9999-12-31T23:00"),
            ("month", "9999-12-31T23:59:59.998", "9999-12-01"),
        ],
    )
    def test_buckets_begin_at_full_hours_days_mondays_and_months(
        self, usage: UsageStore, bucket: str, time: str, start: str
    ) -> None:
        usage.record_entry(custom(timestamp=_milliseconds(time)))
        (only,) = usage.timeseries(bucket=bucket, **EVER)
        assert only.start == datetime.fromisoformat(start).replace(tzinfo=UTC)
        assert only.start.utcoffset() == timedelta(0)

    def test_days_are_those_of_utc_also_where_clocks_change(self, usage: UsageStore) -> None:
        """Record around the hours in which European clocks go forward and back."""
        for day in ("2026-03-29", "2026-10-25"):
            for hour in range(24):
                usage.record_entry(custom(timestamp=_milliseconds(f"{day}T{hour:02}:30")))
        assert [bucket.entry_count for bucket in usage.timeseries(bucket="hour", **EVER)] == [1] * 48
        assert [bucket.entry_count for bucket in usage.timeseries(bucket="day", **EVER)] == [24, 24]

    @table(
        ("group_by", "expected"),
        [
            ("model", {None: 2, "m": 1, "n": 1}),
            ("agent_type", {"planner": 1, "writer": 3}),
            ("user_id", {None: 1, "ann": 1, "bob": 2}),
            ("user", {None: 1, "ann": 1, "bob": 2}),
            ("kind", {"custom": 1, "tokens": 2, "tool": 1}),
        ],
    )
    def test_groups_can_be_chosen(
        self,
        sessions: StateStore,
        usage: UsageStore,
        group_by: str,
        expected: dict[str | None, int],
    ) -> None:
        sessions.create_session("one", agent_type="planner", user_id="ann")
        sessions.create_session("two", agent_type="writer", user_id="bob")
        sessions.create_session("three", agent_type="writer")
        usage.record_entries([tokens("one", "m"), tokens("two", "n"), tool("two"), custom("three")])
        series = usage.timeseries(group_by=group_by, **EVER)
        assert [(bucket.group, bucket.entry_count) for bucket in series] == list(expected.items())

    def test_from_is_inclusive_and_to_is_exclusive(self, usage: UsageStore) -> None:
        usage.record_entries(custom(timestamp=NOON + 1_000 * number) for number in range(4))
        noon = datetime(2026, 3, 15, 13, tzinfo=timezone(timedelta(hours=1)))
        between: dict[str, Any] = {"date_from": NOON + 1_000, "date_to": noon + timedelta(seconds=3)}
        assert [bucket.entry_count for bucket in usage.timeseries(**between)] == [2]
        assert usage.timeseries(date_from=NOON + 1, date_to=NOON + 1_000) == []
        assert usage.timeseries(date_from=NOON + 1_000, date_to=NOON) == []

    def test_an_agent_type_can_be_chosen(self, sessions: StateStore, usage: UsageStore) -> None:
        for name in ("planner", "writer"):
            sessions.create_session(name, agent_type=name)
            usage.record_entry(tokens(name, name))
        series = usage.timeseries(agent_type="writer", **EVER)
        assert [bucket.group for bucket in series] == ["writer"]
        assert usage.timeseries(agent_type="nobody", **EVER) == []

    def test_sums_do_not_overflow(self, usage: UsageStore) -> None:
        largest = 2**63 - 1
        for _ in range(3):
            usage.record_entry(tokens(total=largest, cost_usd="9223372.036854775807"))
        (bucket,) = usage.timeseries(**EVER)
        assert bucket.tokens.total == 3 * largest
        assert bucket.cost_usd == Decimal("27670116.110564327421")
