"""Reports over the ledger: the database's sums are those of the entries, for each grouping and filter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final
from zoneinfo import ZoneInfo

import pytest

from helix_store.core.types import UsageKind
from helix_store.core.usage import TokenCounts, UsageEntry, UsageGroup, UsageTotal
from helix_store.exceptions import InvalidPayload, InvalidQuery
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from helix_store.testing.usage.base import EVERY_KIND, NOON, custom, sub_agent, tokens, tool
from helix_store.usage.store import usage_report
from tests.cells import for_each
from tests.databases import CommittedDatabase

HOUR: Final = 60 * 60 * 1_000
GROUPINGS: Final = ("session", "tree", "model", "agent_type", "user", "day")


@dataclass(frozen=True)
class Spent:
    """An entry, and what its session said."""

    entry: UsageEntry
    tenant: str
    agent_type: str
    user_id: str | None
    root: str
    is_deleted: bool


@dataclass(frozen=True)
class Ledger:
    """Two tenants with the same session ids: a tree of three, a single session, and one that was deleted."""

    database: CommittedDatabase

    @property
    def tenants(self) -> list[str]:
        return [self.database.tenant, f"{self.database.tenant}-b"]

    def entries(self) -> list[Spent]:
        """What ``get_entries`` returns of each session."""
        spent = []
        for tenant in self.tenants:
            usage = DatabaseUsageStore(self.database.alias, tenant=tenant)
            for session_id, (agent_type, user_id, root) in SESSIONS.items():
                is_deleted = session_id == "gone"
                about = (tenant, agent_type, user_id, root, is_deleted)
                spent += [Spent(entry, *about) for entry in usage.get_entries(session_id)]
        return spent

    def report(self, by: str, **given: Any) -> Any:
        return usage_report(by=by, using=self.database.alias, **given)


SESSIONS: Final[dict[str, tuple[str, str | None, str]]] = {
    "root": ("planner", "ann", "root"),
    "child": ("helper", None, "root"),
    "grandchild": ("helper", "bob", "root"),
    "alone": ("planner", "bob", "alone"),
    "gone": ("planner", "ann", "gone"),
}
_PARENTS: Final = {"child": "root", "grandchild": "child"}


@pytest.fixture
def ledger(empty_db: CommittedDatabase) -> Ledger:
    ledger = Ledger(empty_db)
    for number, tenant in enumerate(ledger.tenants, 1):
        sessions = DatabaseStateStore(empty_db.alias, tenant=tenant)
        usage = DatabaseUsageStore(empty_db.alias, tenant=tenant)
        for session_id, (agent_type, user_id, _) in SESSIONS.items():
            sessions.create_session(
                session_id,
                agent_type=agent_type,
                user_id=user_id,
                parent_session_id=_PARENTS.get(session_id),
            )
        usage.record_entries({**entry, "session_id": "alone"} for entry in EVERY_KIND)
        usage.record_entries(
            make(session_id, timestamp=NOON + 7 * HOUR * index, cost_usd=f"0.{index + number:012d}")
            for index, session_id in enumerate([*SESSIONS, *SESSIONS])
            for make in (_priced, tool, sub_agent, custom)
        )
        sessions.delete_session("gone", keep_usage=True)
    return ledger


def _priced(session_id: str, **given: Any) -> dict[str, Any]:
    model = f"model-{len(session_id)}"
    return tokens(session_id, model, prompt=3, completion=4, reasoning=1, cached=2, total=7, **given)


def _summed(entries: list[Spent]) -> UsageTotal:
    costs = [spent.entry.cost_usd for spent in entries if spent.entry.cost_usd is not None]
    of_tokens = [spent.entry for spent in entries if spent.entry.kind is UsageKind.TOKENS]
    return UsageTotal(
        entry_count=len(entries),
        tool_calls=sum(spent.entry.kind is UsageKind.TOOL for spent in entries),
        unpriced=sum(entry.cost_usd is None for entry in of_tokens),
        tokens=sum((entry.tokens for entry in of_tokens if entry.tokens), TokenCounts()),
        cost_usd=sum(costs, Decimal(0)),
    )


Key = tuple[str | None, str | None, bool]


def _key_of(by: str, spent: Spent, zone: str) -> Key:
    entry = spent.entry
    if by in ("session", "tree"):
        return spent.tenant, entry.session_id if by == "session" else spent.root, spent.is_deleted
    if by == "user":
        return spent.tenant, spent.user_id, False
    return None, {"model": entry.model, "agent_type": spent.agent_type}.get(by, _day(entry, zone)), False


def _day(entry: UsageEntry, zone: str) -> str:
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=entry.timestamp)
    if at.year == 9999:
        return "9999-12-31"
    return at.astimezone(ZoneInfo(zone)).date().isoformat()


def _total_of(group: UsageTotal) -> UsageTotal:
    return UsageTotal(
        entry_count=group.entry_count,
        tool_calls=group.tool_calls,
        unpriced=group.unpriced,
        tokens=group.tokens,
        cost_usd=group.cost_usd,
    )


def _expected(entries: list[Spent], by: str, zone: str = "UTC") -> dict[Key, UsageTotal]:
    groups: defaultdict[Key, list[Spent]] = defaultdict(list)
    for spent in entries:
        groups[_key_of(by, spent, zone)].append(spent)
    return {key: _summed(group) for key, group in groups.items()}


def _found(groups: list[UsageGroup]) -> dict[Key, UsageTotal]:
    found = {(group.tenant, group.group, group.is_deleted): _total_of(group) for group in groups}
    assert len(found) == len(groups)
    return found


FILTERS: Final[dict[str, tuple[dict[str, Any], Callable[[Spent], bool]]]] = {
    "nothing": ({}, lambda spent: True),
    "agent type": ({"agent_type": "helper"}, lambda spent: spent.agent_type == "helper"),
    "user": ({"user_id": "bob"}, lambda spent: spent.user_id == "bob"),
    "model": ({"model": "model-5"}, lambda spent: spent.entry.model == "model-5"),
    "start": ({"date_from": NOON + 7 * HOUR}, lambda spent: spent.entry.timestamp >= NOON + 7 * HOUR),
    "end": ({"date_to": NOON + 7 * HOUR}, lambda spent: spent.entry.timestamp < NOON + 7 * HOUR),
    "all of them": (
        {
            "agent_type": "planner",
            "user_id": "ann",
            "model": "model-4",
            "date_from": datetime(2026, 3, 15, 12, tzinfo=UTC),
            "date_to": datetime(2026, 3, 17, tzinfo=UTC),
        },
        lambda spent: (
            (spent.agent_type, spent.user_id, spent.entry.model) == ("planner", "ann", "model-4")
            and NOON <= spent.entry.timestamp < NOON + 36 * HOUR
        ),
    ),
    "a user who spent nothing": ({"user_id": "nobody"}, lambda spent: False),
}


@pytest.mark.thorough
@for_each("by", GROUPINGS, shared=True)
@for_each("chosen", FILTERS, shared=True)
def test_the_sums_of_a_report_are_those_of_the_entries(ledger: Ledger, by: str, chosen: str) -> None:
    given, is_chosen = FILTERS[chosen]
    entries = [spent for spent in ledger.entries() if is_chosen(spent)]
    every = ledger.report(by, **given)
    assert _found(every.groups) == _expected(entries, by)
    assert _total_of(every.total) == _summed(entries)
    assert every.group_count == len(every.groups)
    one = [spent for spent in entries if spent.tenant == ledger.tenants[1]]
    report = ledger.report(by, tenant=ledger.tenants[1], **given)
    assert _found(report.groups) == _expected(one, by)
    assert _total_of(report.total) == _summed(one)


@for_each("zone", ["Asia/Tokyo", "America/New_York", "Asia/Kathmandu", "Pacific/Kiritimati"], shared=True)
def test_a_day_begins_where_the_zone_says(ledger: Ledger, zone: str) -> None:
    report = ledger.report("day", zone=ZoneInfo(zone))
    assert _found(report.groups) == _expected(ledger.entries(), "day", zone)
    assert [group.group for group in report.groups] == sorted(group.group for group in report.groups)
    assert report == ledger.report("day", zone=zone)


def test_a_day_of_25_hours_is_one_day(empty_db: CommittedDatabase) -> None:
    DatabaseStateStore(empty_db.alias).create_session("session", agent_type="agent")
    midnight = datetime(2026, 10, 25, tzinfo=ZoneInfo("Europe/Berlin"))
    first = int(midnight.timestamp() * 1000)
    usage = DatabaseUsageStore(empty_db.alias)
    usage.record_entries(tool(timestamp=first + hour * HOUR + shift) for hour in (0, 25) for shift in (-1, 0))
    report = usage_report(by="day", using=empty_db.alias, zone="Europe/Berlin")
    assert [(group.group, group.entry_count) for group in report.groups] == [
        ("2026-10-24", 1),
        ("2026-10-25", 2),
        ("2026-10-26", 1),
    ]


@for_each("by", GROUPINGS, shared=True)
def test_a_limit_keeps_the_highest_groups_and_the_sums_of_all(ledger: Ledger, by: str) -> None:
    whole = ledger.report(by)
    for limit in range(1, whole.group_count + 2):
        cut = ledger.report(by, limit=limit)
        assert cut.groups == (whole.groups[-limit:] if by == "day" else whole.groups[:limit])
        assert (cut.total, cut.group_count) == (whole.total, whole.group_count)


def test_the_highest_costs_come_first(ledger: Ledger) -> None:
    groups = ledger.report("session").groups
    assert [group.cost_usd for group in groups] == sorted((group.cost_usd for group in groups), reverse=True)
    assert groups[0].group == "alone"


def test_costs_that_differ_in_the_lower_half_of_a_sum_only_are_ordered(empty_db: CommittedDatabase) -> None:
    """On SQLite the two halves are summed apart, and a lower half of many entries has more than 32 bits."""
    store = DatabaseStateStore(empty_db.alias)
    usage = DatabaseUsageStore(empty_db.alias)
    almost = (2**32 - 1) * Decimal("1e-12")
    for name, costs in {"many": [almost] * 3, "one": [3 * almost - Decimal("1e-12")]}.items():
        store.create_session(name, agent_type="agent")
        usage.record_entries(tokens(name, cost_usd=cost) for cost in costs)
    report = usage_report(by="session", using=empty_db.alias, limit=1)
    assert [(group.group, group.cost_usd) for group in report.groups] == [("many", 3 * almost)]


def test_a_session_with_the_id_of_a_deleted_one_is_another_group(ledger: Ledger) -> None:
    tenant = ledger.tenants[0]
    DatabaseStateStore(ledger.database.alias, tenant=tenant).create_session("gone", agent_type="planner")
    usage = DatabaseUsageStore(ledger.database.alias, tenant=tenant)
    usage.record_entry(tool("gone", timestamp=NOON))
    for by in ("session", "tree"):
        groups = ledger.report(by, tenant=tenant).groups
        found = {group.is_deleted: group.entry_count for group in groups if group.group == "gone"}
        assert found == {True: 8, False: 1}


def test_nothing_spent_is_a_report_of_nothing(empty_db: CommittedDatabase) -> None:
    for by in GROUPINGS:
        report = usage_report(by=by, using=empty_db.alias)
        assert (report.groups, report.group_count) == ([], 0)
        assert report.total == _summed([])


@for_each(
    "given",
    [
        {"by": "kind"},
        {"by": None},
        {"zone": "Mars/Olympus"},
        {"zone": ""},
        {"zone": "../secret"},
        {"zone": None},
        {"limit": 0},
        {"limit": True},
        {"date_from": datetime(2026, 1, 1)},  # noqa: DTZ001  that is the fault
        {"date_to": 1_773_576_000},
        {"tenant": "a\x00"},
        {"model": ""},
        {"user_id": 1.5},
        {"user_id": True},
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused_before_any_statement(given: dict[str, Any]) -> None:
    with pytest.raises((InvalidQuery, InvalidPayload)):
        usage_report(**{"by": "day", **given})
