"""The statements of the usage ledger: their number, and the indexes that they use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models import Model
from django.test.utils import CaptureQueriesContext
from pytest_django import DjangoDbBlocker

from helix_store.exceptions import SessionNotFound
from helix_store.models import Session, UsageEntry
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from helix_store.testing.usage.base import (
    NOON,
    custom,
    rolled_up,
    sub_agent,
    tokens,
    tool,
)
from tests.cells import for_each
from tests.databases import ALIASES, close_connections, forget_statistics, fresh_tenant

TRANSACTION_CONTROL = ("BEGIN", "COMMIT", "SAVEPOINT", "RELEASE SAVEPOINT")
DAY = 24 * 60 * 60 * 1_000
SESSIONS = 50
NAMES = ["root", *(f"child-{number}" for number in range(1, SESSIONS))]
ENTRIES = 10_000
COPIED_TREES = 19
COPIED_LEDGERS = 5
"""Beside what is looked at: an index is of no use in a table that is wanted whole."""

Call = Callable[[DatabaseUsageStore], Any]


@dataclass(frozen=True)
class Ledger:
    """A tree of 50 sessions under ``root`` with 10,000 entries, among more like it."""

    alias: str
    tenant: str

    @property
    def usage(self) -> DatabaseUsageStore:
        return DatabaseUsageStore(self.alias, tenant=self.tenant)

    @property
    def sessions(self) -> DatabaseStateStore:
        return DatabaseStateStore(self.alias, tenant=self.tenant)

    def statements(self, call: Call) -> list[str]:
        with CaptureQueriesContext(connections[self.alias]) as captured:
            call(self.usage)
        return [
            query["sql"]
            for query in captured.captured_queries
            if not query["sql"].startswith(TRANSACTION_CONTROL)
        ]

    def plan(self, statement: str) -> str:
        connection = connections[self.alias]
        explain = "EXPLAIN QUERY PLAN" if connection.vendor == "sqlite" else "EXPLAIN"
        with connection.cursor() as cursor:
            cursor.execute(f"{explain} {statement}".replace("%", "%%"), [])
            return "\n".join(" ".join(map(str, row)) for row in cursor.fetchall())


@pytest.fixture(scope="module", params=list(ALIASES))
def ledger(
    request: pytest.FixtureRequest, django_db_setup: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[Ledger]:
    with django_db_blocker.unblock():
        ledger = Ledger(ALIASES[request.param], fresh_tenant())
        try:
            _fill(ledger)
            yield ledger
        finally:
            rows = UsageEntry.objects.using(ledger.alias).filter(tenant=ledger.tenant)
            rows._raw_delete(ledger.alias)
            Session.objects.using(ledger.alias).filter(tenant=ledger.tenant).update(current=None)
            ledger.sessions.delete_session("root")
            for session in ledger.sessions.list_sessions(limit=200, count=False).sessions:
                ledger.sessions.delete_session(session.session_id)
            forget_statistics(ledger.alias)
            close_connections()


def _fill(ledger: Ledger) -> None:
    ledger.sessions.create_session("root", agent_type="planner", user_id="ann")
    for number in range(1, SESSIONS):
        parent = "root" if number < 8 else f"child-{number // 8}"
        ledger.sessions.create_session(f"child-{number}", agent_type="helper", parent_session_id=parent)
    kinds = (tokens, tool, sub_agent, custom)
    ledger.usage.record_entries(
        kinds[number % 4](NAMES[number % SESSIONS], timestamp=NOON + number, step_count=number)
        for number in range(ENTRIES)
    )
    _copy_trees(ledger)
    ledger.sessions.create_session("gone", agent_type="planner", user_id="bob")
    ledger.usage.record_entries(tokens("gone", timestamp=NOON - DAY + number) for number in range(10))
    ledger.sessions.delete_session("gone", keep_usage=True)
    with connections[ledger.alias].cursor() as cursor:
        cursor.execute(f"ANALYZE {UsageEntry._meta.db_table}")
        cursor.execute(f"ANALYZE {Session._meta.db_table}")


def _copy_trees(ledger: Ledger) -> None:
    """More trees like it, by SQL alone, and entries that another user spent two months before."""
    is_sqlite = connections[ledger.alias].vendor == "sqlite"
    copied = "|| ' ' || copy.number"
    _copy(
        ledger,
        Session,
        {
            "session_id": f"session_id {copied}",
            "parent_session_id": f"parent_session_id {copied}",
            "current_id": "NULL",
            "user_id": "'bob'",
        },
        COPIED_TREES,
    )
    key = f"SELECT id FROM {Session._meta.db_table} AS s WHERE s.tenant = %s AND s.session_id ="
    _copy(
        ledger,
        UsageEntry,
        {
            "entry_id": f"entry_id {copied}",
            "session_id": f"({key} recorded_for {copied})",
            "recorded_for": f"recorded_for {copied}",
            "user_id": "'bob'",
            "timestamp": "datetime(timestamp, '-60 days')" if is_sqlite else "timestamp - interval '60 days'",
        },
        COPIED_LEDGERS,
    )


def _copy(ledger: Ledger, model: type[Model], changed: dict[str, str], times: int) -> None:
    columns = [str(field.column) for field in model._meta.concrete_fields if not field.primary_key]
    selected = ", ".join(changed.get(name, name) for name in columns)
    table = model._meta.db_table
    copies = f"SELECT 1 AS number UNION ALL SELECT number + 1 FROM copy WHERE number < {times}"
    sql = f"""
        WITH RECURSIVE copy(number) AS ({copies})
        INSERT INTO {table} ({", ".join(columns)})
        SELECT {selected} FROM {table} CROSS JOIN copy WHERE tenant = %s
        """
    with connections[ledger.alias].cursor() as cursor:
        cursor.execute(sql, [ledger.tenant] * sql.count("%s"))


class TestRollup:
    def test_a_tree_of_fifty_sessions_costs_two_statements(self, ledger: Ledger) -> None:
        rollup = rolled_up(ledger.usage, "root", tree=True)
        # Other tests of the module add entries.
        entries = UsageEntry.objects.using(ledger.alias).filter(tenant=ledger.tenant, recorded_for__in=NAMES)
        assert (rollup.session_count, rollup.entry_count) == (SESSIONS, entries.count())
        sent = ledger.statements(lambda usage: usage.get_rollup("root", include_sub_agents=True))
        assert len(sent) == 2, sent

    def test_a_session_costs_one_statement_and_one_without_entries_three(self, ledger: Ledger) -> None:
        assert len(ledger.statements(lambda usage: usage.get_rollup("root"))) == 1
        assert len(ledger.statements(lambda usage: usage.get_rollup("no session"))) == 3

    @pytest.mark.parametrize("tree", [False, True])
    def test_entries_are_found_by_the_index_of_their_sessions(self, ledger: Ledger, tree: bool) -> None:
        *_, summing = ledger.statements(lambda usage: usage.get_rollup("root", include_sub_agents=tree))
        assert "usage_session_idx" in ledger.plan(summing)
        assert _scanned_whole(ledger.plan(summing)) == []

    def test_a_tree_of_more_sessions_than_a_statement_has_parameters_costs_two(self, ledger: Ledger) -> None:
        many = 33_000
        large = Ledger(ledger.alias, fresh_tenant())
        with transaction.atomic(using=large.alias):
            large.sessions.create_session("root", agent_type="planner")
            child = {"session_id": "'child-' || number", "parent_session_id": "'root'", "current_id": "NULL"}
            _copy(large, Session, child, many)
            with connections[large.alias].cursor() as cursor:
                cursor.execute(f"ANALYZE {Session._meta.db_table}")
            large.usage.record_entries(tool(f"child-{number}", timestamp=NOON) for number in (1, many))
            rollup = rolled_up(large.usage, "root", tree=True)
            sent = large.statements(lambda usage: usage.get_rollup("root", include_sub_agents=True))
            plan = large.plan(sent[0])
            transaction.set_rollback(True, using=large.alias)
        assert (rollup.session_count, rollup.entry_count) == (many + 1, 2)
        assert len(sent) == 2
        # Of a tenant with few sessions, the server may as well read all of them.
        assert "session_parent_idx" in plan


@for_each(
    ("index", "call"),
    [
        ("usage_session_idx", lambda usage: usage.get_entries("root", limit=20, offset=20)),
        ("usage_session_idx", lambda usage: usage.exists("root")),
        ("usage_kept_idx", lambda usage: usage.get_entries("gone", limit=20)),
        ("usage_time_idx", lambda usage: usage.query_usage(count=False)),
        ("usage_time_idx", lambda usage: usage.query_usage(count=False, order="asc")),
        ("usage_time_idx", lambda usage: usage.query_usage(date_from=NOON + ENTRIES - 100)),
        ("usage_user_idx", lambda usage: usage.query_usage(user_id="ann", count=False)),
        (
            "usage_time_idx",
            lambda usage: usage.timeseries(date_from=NOON + ENTRIES - 100, date_to=NOON + DAY),
        ),
    ],
)
def test_rows_are_found_by_an_index_and_come_in_its_order(ledger: Ledger, index: str, call: Call) -> None:
    plan = ledger.plan(ledger.statements(call)[-1])
    assert index in plan
    assert _scanned_whole(plan) == []
    if "GROUP BY" not in plan.upper() and index != "usage_time_idx":
        assert "USE TEMP B-TREE FOR ORDER BY" not in plan


def test_a_page_far_from_the_first_one_starts_where_the_last_one_ended(ledger: Ledger) -> None:
    page = ledger.usage.query_usage(limit=200, count=False)
    for _ in range(3):
        page = ledger.usage.query_usage(limit=200, count=False, cursor=page.next_cursor)
    (sent,) = ledger.statements(
        lambda usage: usage.query_usage(limit=200, count=False, cursor=page.next_cursor)
    )
    plan = ledger.plan(sent)
    (found_by,) = [line for line in plan.splitlines() if re.search("Index Cond|USING INDEX", line)]
    assert re.search(r'timestamp"?[^<>]*<', found_by)


@for_each(
    ("name", "expected", "call"),
    [
        ("record_entry", 1, lambda usage: usage.record_entry(custom("root"))),
        ("record_entry of a known id", 3, lambda usage: usage.record_entry(custom("root", id="known"))),
        ("record_entries of one", 1, lambda usage: usage.record_entries([custom("root")])),
        ("record_entries of two", 2, lambda usage: usage.record_entries([custom("root")] * 2)),
        ("get_entries", 2, lambda usage: usage.get_entries("root", limit=50)),
        ("query_usage", 2, lambda usage: usage.query_usage()),
        ("query_usage without a count", 1, lambda usage: usage.query_usage(count=False)),
        ("timeseries", 1, lambda usage: usage.timeseries(date_from=0, date_to=NOON)),
        ("exists", 2, lambda usage: usage.exists("root")),
        ("delete", 2, lambda usage: usage.delete("no session")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_statements_of(ledger: Ledger, name: str, expected: int, call: Call) -> None:
    ledger.usage.record_entry(custom("root", id="known"))
    sent = ledger.statements(call)
    if name == "delete" and connections[ledger.alias].vendor == "sqlite":
        # It asks first whether budgets count the entries; PostgreSQL does so while it deletes.
        expected += 1
    assert len(sent) == expected, sent


@for_each(("entries", "insertions"), [(2, 1), (1_000, 1), (1_001, 2), (2_500, 3)])
@for_each("spread", [1, SESSIONS])
def test_a_thousand_entries_are_one_insertion(
    ledger: Ledger, entries: int, insertions: int, spread: int
) -> None:
    batch = [tokens(NAMES[number % spread], timestamp=NOON - 90 * DAY) for number in range(entries)]
    sent = ledger.statements(lambda usage: usage.record_entries(batch))
    inserted = [statement for statement in sent if "INSERT" in statement]
    assert len(inserted) == insertions
    assert len(sent) == insertions + 1


def test_entries_of_very_many_sessions_find_them_in_one_statement(ledger: Ledger) -> None:
    """SQLite takes at most 32,766 parameters."""

    def refused(usage: DatabaseUsageStore) -> None:
        with pytest.raises(SessionNotFound):
            usage.record_entries(custom(f"unknown-{number}") for number in range(33_000))

    selects = [statement for statement in ledger.statements(refused) if "SELECT" in statement]
    # What finds nothing asks whether the tenant was moved.
    assert len([statement for statement in selects if "helix_fence" not in statement]) == 1


def test_an_unknown_session_costs_no_insertion_of_others(ledger: Ledger) -> None:
    def refused(usage: DatabaseUsageStore) -> None:
        with pytest.raises(SessionNotFound):
            usage.record_entries([custom("root"), custom("no session")])

    assert not [statement for statement in ledger.statements(refused) if "INSERT INTO" in statement]


def _scanned_whole(plan: str) -> list[str]:
    """The lines of a plan that read all entries."""
    table = UsageEntry._meta.db_table
    scans = (f"Seq Scan on {table}", f"SCAN {table}")
    return [line for line in plan.splitlines() if any(scan in line for scan in scans) and "INDEX" not in line]
