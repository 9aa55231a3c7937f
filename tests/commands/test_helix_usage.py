"""``helix_usage``: the report as a table that fits, as bars, as JSON and as CSV."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from io import StringIO
from typing import Any, Final

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings

from helix_store.core.payloads import exact_cost
from helix_store.core.usage import rounded_cost
from helix_store.management.output import width_of
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from helix_store.testing.usage.base import NOON, custom, tokens, tool
from helix_store.usage.store import usage_report
from tests.cells import for_each
from tests.commands.running import run as run_command
from tests.databases import CommittedDatabase

DAY: Final = 24 * 60 * 60 * 1_000
GROUPINGS: Final = ("session", "tree", "model", "agent_type", "user", "day")
LONG_ID: Final = "session-" + "0123456789" * 20


def run(alias: str, *arguments: str, **options: Any) -> str:
    out = StringIO()
    call_command("helix_usage", *arguments, database=alias, stdout=out, **options)
    return out.getvalue()


def spend(alias: str, session_id: str, *entries: dict[str, Any], tenant: str = "", **session: Any) -> None:
    store = DatabaseStateStore(alias, tenant=tenant)
    if not store.session_exists(session_id):
        store.create_session(session_id, agent_type="planner", **session)
    DatabaseUsageStore(alias, tenant=tenant).record_entries(
        {**entry, "session_id": session_id} for entry in entries
    )


@pytest.fixture
def filled(empty_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with a cheap and a dear session."""
    monkeypatch.setenv("COLUMNS", "80")
    dear = tokens(model="model-a", prompt=1_200, completion=34, total=1_234, cost_usd="12.3456789")
    cheap = tokens(model="model-b", prompt=5, total=5, cost_usd="0.000004567890", timestamp=NOON + 3 * DAY)
    spend(empty_db.alias, "dear", dear, tool(), tool(timestamp=NOON + DAY), user_id="ann")
    spend(empty_db.alias, "cheap", cheap, tokens(model="model-c", total=1), user_id="bob")
    return empty_db.alias


def test_a_table_has_the_highest_costs_first_and_the_total(filled: str) -> None:
    assert run(filled, "--by", "session").splitlines() == [
        "session    cost USD  tokens  prompt  completion  entries  tools",
        "dear     12.35        1,234   1,200          34        3      2",
        "cheap     0.0000046       6       5           0        2      0",
        "total    12.35        1,240   1,205          34        5      2",
        "Token entries without a known cost: 1.",
    ]


def test_a_series_of_days_is_drawn_as_bars(filled: str) -> None:
    *lines, note = run(filled, "--zone", "UTC").splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["day", "(UTC)", "cost", "USD"],
        ["2026-03-15", "12.35", "1,235", "3"],
        ["2026-03-16", "0.00", "0", "1"],
        ["2026-03-18", "0.0000046", "5", "1"],
        ["total", "12.35", "1,240", "5"],
    ]
    assert len(lines[1]) == 80
    drawn = [line.partition("  ")[2].split("  ")[-1].strip("0123456789., ") for line in lines[1:]]
    assert [set(each) for each in drawn] == [{"█"}, set(), {"▏"}, set()]
    assert note == "Token entries without a known cost: 1."


def test_without_costs_the_bars_are_of_tokens(empty_db: CommittedDatabase) -> None:
    spend(empty_db.alias, "s", tokens(total=100), tokens(total=50, timestamp=NOON + DAY))
    _, one, two, *_ = run(empty_db.alias).splitlines()
    assert one.count("█") == pytest.approx(2 * two.count("█"), abs=1)
    assert two.count("█") > 10


def test_days_without_usage_are_left_out(empty_db: CommittedDatabase) -> None:
    spend(empty_db.alias, "s", tool(timestamp=0), tool(), tool(timestamp=NOON + 32 * DAY))
    days = [line.split()[0] for line in run(empty_db.alias, "--zone", "UTC").splitlines()]
    assert days == ["day", "1970-01-01", "2026-03-15", "2026-04-16", "total"]


@pytest.mark.thorough
@for_each("columns", [80, 100, 160])
@for_each("by", GROUPINGS)
def test_no_line_is_wider_than_the_terminal(
    filled: str, monkeypatch: pytest.MonkeyPatch, by: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    huge = tokens(model="m" * 255, total=2**62, prompt=2**62, completion=2**62, cost_usd="9223372")
    for tenant in ("t" * 255, ""):
        spend(filled, LONG_ID, huge, huge, tenant=tenant, user_id="\N{CJK UNIFIED IDEOGRAPH-4E00}" * 200)
    lines = run(filled, "--by", by).splitlines()
    assert max(map(width_of, lines)) <= columns
    assert any("36,893,500.35" in line for line in lines)
    if by in ("session", "tree"):
        assert LONG_ID not in "".join(lines)
        assert LONG_ID in run(filled, "--by", by, "--wide")


def test_stored_text_does_not_reach_the_terminal_as_a_control(empty_db: CommittedDatabase) -> None:
    spend(empty_db.alias, "evil\N{RIGHT-TO-LEFT OVERRIDE}id", tool())
    printed = run(empty_db.alias, "--by", "session")
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in printed
    assert "\\u202e" in printed


def test_a_deleted_session_and_entries_without_a_value_are_named(empty_db: CommittedDatabase) -> None:
    spend(empty_db.alias, "gone", tool())
    DatabaseStateStore(empty_db.alias).delete_session("gone", keep_usage=True)
    printed = run(empty_db.alias, "--by", "session")
    assert "gone *" in printed
    assert "* The session was deleted" in printed
    assert "(none)" in run(empty_db.alias, "--by", "model")


def test_tenants_are_named_where_groups_belong_to_them(filled: str) -> None:
    spend(filled, "dear", tool(), tenant="other")
    assert run(filled, "--by", "session").splitlines()[0].split()[:2] == ["tenant", "session"]
    assert "tenant" not in run(filled, "--by", "model")
    only = run(filled, "--by", "session", "--tenant", "")
    assert "tenant" not in only
    assert len(only.splitlines()) == 5
    assert json.loads(run(filled, "--tenant", "other", "--format", "json"))["total"]["entry_count"] == 1


@for_each("by", GROUPINGS, shared=True)
def test_json_and_csv_are_exact(filled: str, by: str) -> None:
    report = usage_report(by=by, using=filled)
    data = json.loads(run(filled, "--by", by.replace("_", "-"), "--zone", "UTC", "--format", "json"))
    assert data.keys() == {"tenant", "since", "until", "zone", "by", "groups", "group_count", "total"}
    assert (data["by"], data["zone"], data["group_count"]) == (by, "UTC", report.group_count)
    assert data["total"]["cost_usd"] == "12.34568346789"
    rows = list(csv.DictReader(StringIO(run(filled, "--by", by, "--zone", "UTC", "--csv"))))
    assert len(rows) == len(data["groups"]) == len(report.groups)
    for row, plain, group in zip(rows, data["groups"], report.groups, strict=True):
        assert plain == group.to_dict()
        assert row == {
            "tenant": group.tenant or "",
            by: group.group or "",
            "is_deleted": "false",
            "entry_count": str(group.entry_count),
            "tool_calls": str(group.tool_calls),
            "unpriced": str(group.unpriced),
            **{f"{name}_tokens": str(count) for name, count in group.tokens.to_dict().items()},
            "cost_usd": exact_cost(group.cost_usd),
        }
        assert Decimal(row["cost_usd"]) == group.cost_usd


def test_a_spreadsheet_finds_no_formula(empty_db: CommittedDatabase) -> None:
    for start in "=+-@":
        spend(empty_db.alias, f'{start}HYPERLINK("a","b")', tool(), tenant=f"{start}t")
    cells = [row[:2] for row in csv.reader(StringIO(run(empty_db.alias, "--by", "session", "--csv")))]
    assert sorted(cells[1:]) == sorted([f"'{start}t", f'\'{start}HYPERLINK("a","b")'] for start in "=+-@")


def test_csv_on_a_terminal_has_no_character_that_it_obeys_or_hides(empty_db: CommittedDatabase) -> None:
    model = "m\u200b\u202e\u2066é"
    spend(empty_db.alias, "session", tokens(model=model, prompt=1))
    arguments = ("helix_usage", "--by", "model", "--csv")
    shown = run_command(empty_db.alias, *arguments, terminal=True).out
    assert r"m\u200b\u202e\u2066é" in shown
    assert not set(model[1:4]) & set(shown)
    assert shown.count("\n") == 2
    assert model in run_command(empty_db.alias, *arguments).out


def test_json_goes_through_a_pipe(filled: str) -> None:
    if shutil.which("jq"):
        command = ["jq", "-r", '.groups[] | [.group, .cost_usd] | join(" ")']
        expected = "dear 12.3456789\ncheap 0.00000456789\n"
    else:
        command = [sys.executable, "-m", "json.tool", "--compact"]
        expected = ""
    printed = run(filled, "--by", "session", "--format", "json")
    piped = subprocess.run(command, input=printed, capture_output=True, text=True, check=True)
    assert piped.stdout == expected if expected else json.loads(piped.stdout) == json.loads(printed)


def test_since_and_until_are_dates_in_the_zone(filled: str) -> None:
    def entries(*arguments: str) -> int:
        return int(json.loads(run(filled, *arguments, "--format", "json"))["total"]["entry_count"])

    assert entries("--since", "2026-03-16", "--zone", "UTC") == 2
    assert entries("--until", "2026-03-16", "--zone", "UTC") == 3
    assert entries("--since", "2026-03-15T12:00", "--until", "2026-03-15 12:00:01", "--zone", "UTC") == 3
    assert entries("--since", "2026-03-15T12:00:01Z") == 2
    # Noon in UTC is the next day in Kiritimati.
    assert entries("--until", "2026-03-16", "--zone", "Pacific/Kiritimati") == 0
    assert entries("--since", "2026-03-16", "--zone", "Pacific/Kiritimati") == 5
    assert entries("--since", "2026-03-15T21:00+09:00", "--until", "2026-03-15T21:01+09:00") == 3
    with override_settings(TIME_ZONE="Pacific/Kiritimati"):
        assert entries("--until", "2026-03-16") == 0
        assert json.loads(run(filled, "--format", "json"))["zone"] == "Pacific/Kiritimati"


def test_since_and_until_are_ages(empty_db: CommittedDatabase) -> None:
    now = datetime.now(UTC)
    ages = [timedelta(minutes=5), timedelta(hours=30), timedelta(days=10), timedelta(weeks=4)]
    spend(empty_db.alias, "s", *(custom(timestamp=int((now - age).timestamp() * 1000)) for age in ages))
    found = {
        text: json.loads(run(empty_db.alias, "--since", text, "--format", "json"))["total"]["entry_count"]
        for text in ("60s", "10m", "24h", "48h", "7d", "2w", "5w")
    }
    assert found == {"60s": 0, "10m": 1, "24h": 1, "48h": 2, "7d": 2, "2w": 3, "5w": 4}
    before = json.loads(run(empty_db.alias, "--until", "7d", "--format", "json"))
    assert before["total"]["entry_count"] == 2
    assert datetime.fromisoformat(before["until"]) - now == pytest.approx(
        timedelta(days=-7), abs=timedelta(minutes=5)
    )


def test_filters_and_a_limit(filled: str) -> None:
    assert "Groups in the total that are not shown: 1." in run(filled, "--by", "session", "--limit", "1")
    assert run(filled, "--user", "nobody") == "No usage.\n"
    assert run(filled, "--by", "model", "--model", "model-a").splitlines()[1].split()[:2] == [
        "model-a",
        "12.35",
    ]
    assert "cheap" not in run(filled, "--by", "session", "--user", "ann")
    assert run(filled, "--agent-type", "nobody", "--csv").count("\n") == 1


@for_each(
    "arguments",
    [
        ["--zone", "Mars/Olympus"],
        ["--csv", "--format", "json"],
        ["--tenant", "a\nb"],
        ["--since", "0001-01-01", "--zone", "Asia/Tokyo"],
        ["--model", ""],
    ],
    ids=" ".join,
    shared=True,
)
def test_wrong_usage_is_exit_code_two(filled: str, arguments: list[str]) -> None:
    with pytest.raises(CommandError) as caught:
        run(filled, *arguments)
    assert caught.value.returncode == 2


@for_each(
    "arguments",
    [
        ["--by", "kind"],
        ["--since", "yesterday"],
        ["--since", "7 d"],
        ["--until", "-7d"],
        ["--until", "40000d"],
        ["--since", "999999999w"],
        ["--limit", "0"],
    ],
    ids=" ".join,
)
def test_an_argument_that_cannot_be_read_is_refused(filled: str, arguments: list[str]) -> None:
    with pytest.raises(CommandError, match=arguments[0]):
        run(filled, *arguments)


class FirstWrite(StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.has_come = threading.Event()

    def write(self, text: str) -> int:
        self.has_come.set()
        return super().write(text)


@pytest.mark.thorough
def test_what_takes_longer_than_a_second_is_told(filled: str) -> None:
    err = FirstWrite()

    def wait(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "WITH grouped" in sql:
            assert err.has_come.wait(30)
        return execute(sql, params, many, context)

    with connections[filled].execute_wrapper(wait):
        run(filled, stderr=err)
    assert err.getvalue() == "Adding up the usage…\n"
    quick = StringIO()
    run(filled, stderr=quick)
    assert quick.getvalue() == ""


@for_each(
    ("cost", "rounded", "exact"),
    [
        ("0", "0.00", "0"),
        ("0E-12", "0.00", "0"),
        ("1E-12", "0.0000000000010", "0.000000000001"),
        ("0.000750000000", "0.00075", "0.00075"),
        ("0.0996", "0.100", "0.0996"),
        ("0.1", "0.10", "0.1"),
        ("0.995", "1.00", "0.995"),
        ("12.345000000000", "12.34", "12.345"),
        ("1234567.891", "1,234,567.89", "1234567.891"),
        ("100", "100.00", "100"),
        (
            "1234567890123456789012345678901.5",
            "1,234,567,890,123,456,789,012,345,678,901.50",
            "1234567890123456789012345678901.5",
        ),
    ],
)
def test_costs_are_rounded_for_people_and_exact_for_programs(cost: str, rounded: str, exact: str) -> None:
    assert (rounded_cost(Decimal(cost)), exact_cost(Decimal(cost))) == (rounded, exact)
