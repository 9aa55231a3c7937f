"""Tests that invalid arguments are refused, each with its own error, before storage is used."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

import pytest

from helix_store.core.contracts import UsageStore
from helix_store.core.usage import TokenCounts
from helix_store.exceptions import (
    InvalidCursor,
    InvalidPayload,
    InvalidQuery,
)
from helix_store.testing.cells import table
from helix_store.testing.usage.base import (
    NOON,
    UsageTests,
    custom,
    sub_agent,
    tokens,
    tool,
)

__all__ = ["UsageArgumentContract"]

BAD_IDENTIFIERS: Final[list[Any]] = ["", "x" * 256, "a\x00b", "a\nb", "\ud800", 7, b"x", ["x"]]
BAD_COUNTS: Final[list[Any]] = [-1, 2**63, 1.0, 1.5, True, "1", float("nan"), Decimal(1), [1]]
BAD_AMOUNTS: Final[list[Any]] = [
    *(-1, -0.5, 2**53 + 1, 1e301, float("inf"), float("nan"), True, "1", None, Decimal(1)),
]
BAD_COSTS: Final[list[Any]] = [
    *(-1, "-0.1", float("nan"), float("inf"), "NaN", "Infinity", "much", "", True, [1], 9_223_373),
    Decimal("9223372.036854775808"),
]


def _without(entry: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != name}


REFUSED: Final[list[tuple[str, Any]]] = [
    *(("kind", tokens(kind=bad)) for bad in ("money", "", "TOKENS", None, 7, ["tokens"])),
    *(("session_id", tokens(session_id=bad)) for bad in (*BAD_IDENTIFIERS, None)),
    *(("id", tokens(id=bad)) for bad in BAD_IDENTIFIERS),
    *(("run_id", tokens(run_id=bad)) for bad in BAD_IDENTIFIERS),
    *(("step_count", tokens(step_count=bad)) for bad in (*BAD_COUNTS, None)),
    *(
        ("timestamp", tokens(timestamp=bad))
        for bad in (*BAD_COUNTS, None, NOON // 1_000, 253_402_300_800_000)
    ),
    *(("source", tokens(source=bad)) for bad in (None, "agent", 7, ["agent", "x"])),
    ("source/type", tokens(source={"name": "x"})),
    ("source/name", tokens(source={"type": "agent"})),
    ("source/other", tokens(source={"type": "agent", "name": "x", "other": 1})),
    *(("source/type", tokens(source={"type": bad, "name": "x"})) for bad in BAD_IDENTIFIERS),
    *(("source/name", tokens(source={"type": "agent", "name": bad})) for bad in BAD_IDENTIFIERS),
    *(("cost_usd", tokens(cost_usd=bad)) for bad in BAD_COSTS),
    *(("model", tokens(model=bad)) for bad in (*BAD_IDENTIFIERS, None)),
    *(
        (f"tokens/{field.name}", tokens(**{field.name: bad}))
        for field in fields(TokenCounts)
        for bad in BAD_COUNTS
    ),
    ("tokens/input", {**tokens(), "tokens": {"input": 1}}),
    *(("tokens", {**tokens(), "tokens": bad}) for bad in (None, 7, "many", [1])),
    *(("duration_ms", tokens(duration_ms=bad)) for bad in BAD_COUNTS),
    *(("tool_name", tool(tool_name=bad)) for bad in (*BAD_IDENTIFIERS, None)),
    *(("success", tool(success=bad)) for bad in (None, 0, 1, "true")),
    *(("duration_ms", tool(duration_ms=bad)) for bad in (*BAD_COUNTS, None)),
    *(("agent_type", sub_agent(agent_type=bad)) for bad in (*BAD_IDENTIFIERS, None)),
    *(("sub_session_id", sub_agent(sub_session_id=bad)) for bad in (*BAD_IDENTIFIERS, None)),
    *(("success", sub_agent(success=bad)) for bad in (None, 0, 1, "true")),
    *(("duration_ms", sub_agent(duration_ms=bad)) for bad in (*BAD_COUNTS, None)),
    *(("type", custom(type=bad)) for bad in (*BAD_IDENTIFIERS, None)),
    *(("name", custom(name=bad)) for bad in (*BAD_IDENTIFIERS, None)),
    *(("amount", custom(amount=bad)) for bad in BAD_AMOUNTS),
    *(("unit", custom(unit=bad)) for bad in BAD_IDENTIFIERS[1:]),
    *(
        (name, _without(tokens(), name))
        for name in ("kind", "session_id", "step_count", "timestamp", "source", "model", "tokens")
    ),
    ("success", tokens(success=True)),
    ("tokens", tool(tokens={"prompt": 1})),
    ("amount", sub_agent(amount=1)),
    ("model", custom(model="gpt-4o")),
    ("metadata", tokens(metadata={})),
    *(("", bad) for bad in (None, 7, "tokens", [], [tokens()])),
]


class UsageArgumentContract(UsageTests):
    @table(("path", "entry"), REFUSED, shared=True)
    def test_a_bad_entry_is_refused(self, usage: UsageStore, path: str, entry: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload) as caught:
            usage.record_entry(entry)
        assert caught.value.path == f"/{path}".rstrip("/")
        with self.storage_untouched(), pytest.raises(InvalidPayload) as caught:
            usage.record_entries([tokens(), entry])
        assert caught.value.path == f"/entries/1/{path}".rstrip("/")
        assert not usage.exists("session")

    @table("entries", [None, 7, "tokens", b"tokens", tokens()], shared=True)
    def test_entries_that_are_no_collection_are_refused(self, usage: UsageStore, entries: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            usage.record_entries(entries)

    @table("session_id", [*BAD_IDENTIFIERS, None], shared=True)
    def test_a_bad_session_id_is_refused_in_reads_too(self, usage: UsageStore, session_id: Any) -> None:
        for call in (usage.get_entries, usage.get_rollup, usage.exists, usage.delete):
            with self.storage_untouched(), pytest.raises(InvalidPayload):
                call(session_id)

    @table(
        "chosen",
        [
            *({"kinds": bad} for bad in ("money", ["tokens", "money"], [None], 7, {"tokens": 1}, b"tokens")),
            *(
                {"step_range": bad}
                for bad in (1, (1,), (1, 2, 3), "12", (-1, 2), (1, 2**63), (1.0, 2), (True, 2), {1: 2})
            ),
            *({"limit": bad} for bad in (0, -1, 1.0, "1", True)),
            *({"offset": bad} for bad in (-1, 1.0, "1", True, None, 2**63)),
        ],
        shared=True,
    )
    def test_a_choice_of_entries_that_makes_no_sense_is_refused(
        self, usage: UsageStore, chosen: dict[str, Any]
    ) -> None:
        with self.storage_untouched(), pytest.raises(InvalidQuery):
            usage.get_entries("session", **chosen)

    @table(
        "query",
        [
            *({"kinds": bad} for bad in ("money", ["money"], 7)),
            *({"order": bad} for bad in ("newest", "", None, 1)),
            *({"limit": bad} for bad in (0, -1, 1.5, None, "50", True)),
            *({"offset": bad} for bad in (-1, 1.0, None, 2**63)),
            *({"date_from": bad} for bad in ("2026-03-15", datetime(2026, 3, 15), 1.5, -1, True)),  # noqa: DTZ001
            *({"date_to": bad} for bad in ("2026-03-15", datetime(2026, 3, 15), 1.5, -1, True)),  # noqa: DTZ001
        ],
        shared=True,
    )
    def test_a_query_that_makes_no_sense_is_refused(self, usage: UsageStore, query: dict[str, Any]) -> None:
        with self.storage_untouched(), pytest.raises(InvalidQuery):
            usage.query_usage(**query)

    @table(
        ("name", "bad"),
        [
            *((name, bad) for name in ("agent_type", "model") for bad in BAD_IDENTIFIERS),
            *(("user_id", bad) for bad in (*BAD_IDENTIFIERS, 1.5, True) if bad != 7),
        ],
        shared=True,
    )
    def test_a_bad_name_in_a_query_is_refused(self, usage: UsageStore, name: str, bad: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            usage.query_usage(**{name: bad})

    @table("cursor", ["", "x", "\x00", "é", "W10", "x" * 100_000, 7, b"x", ["x"]], shared=True)
    def test_a_made_up_cursor_is_refused(self, usage: UsageStore, cursor: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidCursor):
            usage.query_usage(cursor=cursor)

    @table(
        "query",
        [
            *({"bucket": bad} for bad in ("year", "", None, 7, "Day")),
            *({"group_by": bad} for bad in ("session_id", "", None, 7, ["model"])),
            *({"date_from": bad} for bad in (None, "2026-03-15", datetime(2026, 3, 15), -1)),  # noqa: DTZ001
            *({"date_to": bad} for bad in (None, "2026-03-15", datetime(2026, 3, 15), -1)),  # noqa: DTZ001
        ],
        shared=True,
    )
    def test_a_time_series_that_makes_no_sense_is_refused(
        self, usage: UsageStore, query: dict[str, Any]
    ) -> None:
        with self.storage_untouched(), pytest.raises(InvalidQuery):
            usage.timeseries(**{"date_from": 0, "date_to": NOON, **query})

    @table("entry", [tokens(prompt=-4242), custom(name="secret\nname"), tool(secret=1)], shared=True)
    def test_an_error_does_not_show_the_value(self, usage: UsageStore, entry: dict[str, Any]) -> None:
        with pytest.raises(InvalidPayload) as caught:
            usage.record_entry(entry)
        shown = f"{caught.value!s}{caught.value!r}{caught.value.reason}"
        assert "4242" not in shown
        assert "secret\nname" not in shown
