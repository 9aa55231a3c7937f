"""Sums of random ledgers over random trees against a plain reference, in every back end.

The reference knows nothing of the package: entries are dicts, trees are walked with a set, money is counted
in fractions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from helix_store.core.contracts import StateStore, UsageStore
from helix_store.core.types import SubSessionRef
from helix_store.core.usage import UsageRollup
from helix_store.stores import (
    DatabaseStateStore,
    DatabaseUsageStore,
    InMemoryStateStore,
    InMemoryUsageStore,
    MemoryWorld,
)
from tests.databases import fresh_tenant

TOKEN_FIELDS = (
    "prompt",
    "completion",
    "reasoning",
    "cached",
    "cache_write",
    "audio_prompt",
    "audio_completion",
    "total",
)
START = 1_773_576_000_000
HOUR = 60 * 60 * 1_000


@dataclass(frozen=True)
class Ledger:
    """Sessions by number: who is whose parent, who refers to whom and where, and what they spent."""

    parents: list[int | None]
    refs: list[tuple[int, int, str]]
    entries: list[dict[str, Any]]

    def name(self, number: int) -> str:
        return f"session-{number}"


counts = st.one_of(st.integers(0, 1_000), st.sampled_from([2**53 + 1, 2**63 - 1]))
names = st.sampled_from(["a", "b", "ä", "A"])
# Eighths of moderate size add up exactly in any order, as floats.
amounts = st.one_of(st.integers(0, 2**40), st.integers(0, 2**20).map(lambda eighths: eighths / 8))
costs = st.none() | st.integers(0, 10**18).map(lambda units: f"{units}e-12")
own_fields = st.one_of(
    st.fixed_dictionaries(
        {
            "kind": st.just("tokens"),
            "model": names.map("no-such-model-{}".format),
            "tokens": st.dictionaries(st.sampled_from(TOKEN_FIELDS), counts),
        }
    ),
    st.fixed_dictionaries(
        {"kind": st.just("tool"), "tool_name": names, "success": st.booleans(), "duration_ms": counts}
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("subagent"),
            "agent_type": names,
            "sub_session_id": names,
            "success": st.booleans(),
            "duration_ms": counts,
        }
    ),
    st.fixed_dictionaries({"kind": st.just("custom"), "type": names, "name": names, "amount": amounts}),
)


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    size = draw(st.integers(1, 6))
    numbers = st.integers(0, size - 1)
    entries = draw(
        st.lists(
            st.tuples(numbers, own_fields, costs, st.integers(0, 100 * HOUR), st.integers(0, 30)), max_size=25
        )
    )
    return Ledger(
        parents=draw(st.lists(st.none() | numbers, min_size=size, max_size=size)),
        refs=draw(
            st.lists(
                st.tuples(numbers, numbers, st.sampled_from(["local", "local", "remote"])),
                max_size=8,
                unique_by=lambda ref: ref[:2],
            )
        ),
        entries=[
            {
                "session_id": f"session-{number}",
                "step_count": 0,
                "timestamp": START + offset,
                "source": {"type": "agent", "name": "x"},
                "cost_usd": cost,
                # Few enough that some are the same.
                "id": f"entry-{number_of_id}",
                **own,
            }
            for number, own, cost, offset, number_of_id in entries
        ],
    )


DIAMOND_IN_A_CYCLE = Ledger(
    parents=[1, None, 3, 2],
    refs=[(0, 1, "local"), (0, 2, "local"), (1, 3, "local"), (2, 3, "local"), (3, 0, "local")],
    entries=[
        {
            "kind": "custom",
            "session_id": f"session-{number}",
            "step_count": 0,
            "timestamp": START + number,
            "source": {"type": "agent", "name": "x"},
            "cost_usd": "0.1",
            "id": f"entry-{number}",
            "type": "api",
            "name": "search",
            "amount": 10**number,
        }
        for number in range(4)
    ],
)


# --- The reference ----------------------------------------------------------------------------------


def recorded(ledger: Ledger) -> list[dict[str, Any]]:
    by_id: dict[str, dict[str, Any]] = {}
    for entry in ledger.entries:
        by_id.setdefault(entry["id"], entry)
    return list(by_id.values())


def tree(ledger: Ledger, root: int) -> set[int]:
    found: set[int] = set()

    def visit(number: int) -> None:
        if number in found:
            return
        found.add(number)
        for child, parent in enumerate(ledger.parents):
            if parent == number:
                visit(child)
        for source, target, location in ledger.refs:
            if source == number and location == "local":
                visit(target)

    visit(root)
    return found


def expected_rollup(ledger: Ledger, numbers: set[int]) -> dict[str, Any]:
    wanted = {ledger.name(number) for number in numbers}
    tokens: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(TOKEN_FIELDS, 0))
    calls: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    custom: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    cost = Fraction()
    entry_count = 0
    for entry in recorded(ledger):
        if entry["session_id"] not in wanted:
            continue
        entry_count += 1
        cost += Fraction(entry["cost_usd"] or 0)
        if entry["kind"] == "tokens":
            for field, count in entry["tokens"].items():
                tokens[entry["model"]][field] += count
            tokens[entry["model"]]["prompt"] += 0
        elif entry["kind"] == "custom":
            custom[entry["type"], entry["name"]] += Fraction(entry["amount"])
        else:
            stats = calls[entry["kind"], entry.get("tool_name") or entry["agent_type"]]
            stats[0] += 1
            stats[1] += not entry["success"]
            stats[2] += entry["duration_ms"]
    return {
        "tokens": {field: sum(model[field] for model in tokens.values()) for field in TOKEN_FIELDS},
        "tokens_by_model": dict(tokens),
        "calls": dict(calls),
        "total_calls": sum(stats[0] for (kind, _), stats in calls.items() if kind == "tool"),
        "custom": dict(custom),
        "cost": cost,
        "entry_count": entry_count,
        "session_count": len(numbers),
    }


def told(rollup: UsageRollup | None) -> dict[str, Any]:
    """A rollup in the words of the reference."""
    assert rollup is not None
    stats = [("tool", rollup.tool_stats.by_tool), ("subagent", rollup.sub_agents)]
    return {
        "tokens": rollup.tokens.to_dict(),
        "tokens_by_model": {model: sums.to_dict() for model, sums in rollup.tokens_by_model.items()},
        "calls": {
            (kind, name): [calls.calls, calls.failures, calls.total_duration_ms]
            for kind, by_name in stats
            for name, calls in by_name.items()
        },
        "total_calls": rollup.tool_stats.total_calls,
        "custom": {
            (custom_type, name): Fraction(amount)
            for custom_type, by_name in rollup.custom.items()
            for name, amount in by_name.items()
        },
        "cost": Fraction(rollup.cost_usd),
        "entry_count": rollup.entry_count,
        "session_count": rollup.session_count,
    }


def expected_series(ledger: Ledger, hours: int) -> dict[tuple[datetime, str], tuple[int, Fraction, int]]:
    """Total tokens, cost and entries by the start of each bucket of so many hours, and by kind."""
    series: dict[tuple[datetime, str], tuple[int, Fraction, int]] = {}
    for entry in recorded(ledger):
        at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=entry["timestamp"])
        start = at - (at - datetime(2026, 1, 1, tzinfo=UTC)) % timedelta(hours=hours)
        tokens, cost, count = series.get((start, entry["kind"]), (0, Fraction(), 0))
        series[start, entry["kind"]] = (
            tokens + entry.get("tokens", {}).get("total", 0),
            cost + Fraction(entry["cost_usd"] or 0),
            count + 1,
        )
    return series


# --- The back ends ----------------------------------------------------------------------------------

Stores = tuple[StateStore, UsageStore]


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def new_stores(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Makes stores of a tenant that no other example has."""
    if request.param == "memory":

        def in_memory() -> Stores:
            world = MemoryWorld()
            return InMemoryStateStore(world=world), InMemoryUsageStore(world=world)

        yield in_memory
        return
    alias = request.getfixturevalue(f"{request.param}_db").alias

    def in_database() -> Stores:
        tenant = fresh_tenant()
        return DatabaseStateStore(alias, tenant=tenant), DatabaseUsageStore(alias, tenant=tenant)

    yield in_database


def write(ledger: Ledger, sessions: StateStore, usage: UsageStore) -> None:
    for number in range(len(ledger.parents)):
        sessions.create_session(ledger.name(number), agent_type="agent")
    for number, parent in enumerate(ledger.parents):
        if parent is not None:
            state = sessions.load_state(ledger.name(number))
            assert state is not None
            state.parent_session_id = ledger.name(parent)
            sessions.save_state(ledger.name(number), state)
    for source, target, location in ledger.refs:
        ref = SubSessionRef(sub_session_id=ledger.name(target), agent_type="agent", location=location)  # type: ignore[arg-type]
        sessions.add_sub_session_refs(ledger.name(source), [ref])
    usage.record_entries(ledger.entries)


@given(ledger=ledgers())
@example(ledger=DIAMOND_IN_A_CYCLE)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sums_are_those_of_the_reference(new_stores: Any, ledger: Ledger) -> None:
    sessions, usage = new_stores()
    write(ledger, sessions, usage)
    for number in range(len(ledger.parents)):
        name = ledger.name(number)
        assert told(usage.get_rollup(name)) == expected_rollup(ledger, {number})
        whole_tree = usage.get_rollup(name, include_sub_agents=True)
        assert told(whole_tree) == expected_rollup(ledger, tree(ledger, number))
    for bucket, hours in (("hour", 1), ("day", 24)):
        series = usage.timeseries(bucket=bucket, group_by="kind", date_from=START, date_to=START + 101 * HOUR)
        assert {
            (part.start, str(part.group)): (part.tokens.total, Fraction(part.cost_usd), part.entry_count)
            for part in series
        } == expected_series(ledger, hours)
