"""The usage page: charts and tables of what is filtered, and CSV."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.auth.models import Permission
from django.urls import reverse

from helix_store.admin.filters import start_of_day
from helix_store.core.limits import MAX_BIGINT
from helix_store.models import UsageEntry
from helix_store.stores import DatabaseUsageStore
from helix_store.testing.usage.base import tool
from tests.admin.conftest import Browser, Page
from tests.admin.rows import store_of
from tests.cells import for_each

PERIOD = {"since": "2026-03-01", "until": "2026-03-10"}
FILTERS = ("model", "agent_type", "user", "tenant")
HOSTILE = "<script>alert('usage')</script>"


def _open(browser: Browser, **query: str) -> Page:
    return browser.open(reverse("admin:helix_store_usageentry_report"), **{**PERIOD, **query})


def _csv(browser: Browser, **query: str) -> list[list[str]]:
    address = f"{reverse('admin:helix_store_usageentry_csv')}?{urlencode({**PERIOD, **query})}"
    response: Any = browser.client.get(address)
    assert response.status_code == 200
    assert response["Content-Type"].startswith("text/csv")
    assert "attachment" in response["Content-Disposition"]
    return list(csv.reader(io.StringIO(response.content.decode())))


@pytest.fixture
def spent(browser: Browser) -> Browser:
    store_of(browser.database).create_session("s", agent_type="planner", user_id="=ann")
    usage = DatabaseUsageStore(browser.database.alias, tenant=browser.database.tenant)
    for day, model, dollars in (
        (2, "big", "1.5"),
        (2, "small", "0.0123456789"),
        (4, "big", "0.25"),
        (20, "big", "9"),
    ):
        usage.record_entry(
            {
                "kind": "tokens",
                "session_id": "s",
                "step_count": 1,
                "timestamp": int(datetime(2026, 3, day, 18, tzinfo=UTC).timestamp() * 1_000),
                "source": {"type": "agent", "name": "a"},
                "model": model,
                "tokens": {"prompt": 700, "completion": 300, "total": 1_000},
                "cost_usd": dollars,
            }
        )
    return browser


def test_the_page_adds_up_the_period_by_day_model_agent_type_and_user(spent: Browser) -> None:
    text = _open(spent).text
    assert "$1.76 3,000 tokens, 3 entries" in text
    assert "2026-03-02 $1.51 2,000 2" in text
    assert "By model Name Cost Tokens Entries big $1.75 2,000 2 small $0.012 1,000 1" in text
    assert "planner $1.76 - 3,000 3" in text
    assert "=ann (" in text


def test_a_filter_changes_all_sums(spent: Browser) -> None:
    text = _open(spent, model="small").text
    assert "$0.012 1,000 tokens, 1 entries" in text
    assert "big" not in text
    assert "No usage in this period." in _open(spent, user="nobody").text


def test_the_exact_cost_is_a_tooltip(spent: Browser) -> None:
    titles = [attributes.get("title") for _tag, attributes in _open(spent).elements.started]
    assert "0.0123456789 USD" in titles


def test_a_chart_has_a_column_for_each_day_and_no_style_of_its_own(spent: Browser) -> None:
    page = _open(spent)
    _, _, chart = page.html.partition("helix-columns")
    chart, _, ends = chart.partition("</svg>")
    assert 'viewBox="0 0 200 120"' in chart  # ten days, one of them without usage at its place
    assert "<title>03/04/2026: $0.25</title>" in chart
    assert "<span>03/01/2026</span><span>highest day: $1.51</span><span>03/10/2026</span>" in ends
    started = page.elements.started
    assert [tag for tag, attributes in started if tag == "style" or "style" in attributes] == []
    charts = [a for tag, a in started if tag == "svg" and (a.get("class") or "").startswith("helix-")]
    assert len(charts) > 1
    assert all(attributes.get("aria-hidden") == "true" for attributes in charts)


def test_csv_has_exact_costs_and_no_formula(spent: Browser) -> None:
    rows = _csv(spent, by="model")
    assert rows[0][1] == "model"
    assert [(row[1], row[-1]) for row in rows[1:]] == [("big", "1.75"), ("small", "0.0123456789")]
    assert [row[1] for row in _csv(spent, by="user")[1:]] == ["'=ann"]
    assert [row[1] for row in _csv(spent, by="day", model="small")[1:]] == ["2026-03-02"]


@pytest.mark.thorough
@for_each(
    "query",
    [
        {"since": "2026-03-10", "until": "2026-03-01"},
        {"since": "x"},
        {"since": "2000-01-01"},
        {"model": "x" * 300},
        {"user": "a\x00"},
        *({name: value} for name in FILTERS for value in ("\x80", "\x01", "\N{PARROT}" * 255)),
    ],
    shared=True,
)
def test_a_period_that_is_not_valid_is_explained_without_a_report(
    spent: Browser, query: dict[str, str]
) -> None:
    page = _open(spent, **query)
    assert page.status == 200
    assert "errorlist" in page.html
    assert UsageEntry._meta.db_table not in " ".join(page.statements)
    assert (
        spent.client.get(reverse("admin:helix_store_usageentry_csv"), {**PERIOD, **query}).status_code == 400
    )
    address = f"{reverse('admin:helix_store_usageentry_csv')}?{urlencode({**PERIOD, **query})}"
    assert spent.client.get(address).status_code == 400


def test_names_are_inert_on_the_page(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type=HOSTILE, user_id=HOSTILE)
    usage = DatabaseUsageStore(browser.database.alias, tenant=browser.database.tenant)
    usage.record_entry(
        {
            "kind": "tokens",
            "session_id": "s",
            "step_count": 1,
            "timestamp": int(datetime(2026, 3, 2, tzinfo=UTC).timestamp() * 1_000),
            "source": {"type": "agent", "name": "a"},
            "model": HOSTILE,
            "tokens": {"prompt": 1, "completion": 1, "total": 2},
        }
    )
    page = _open(browser)
    assert page.text.count(HOSTILE) == 3
    assert "<script>alert" not in page.html


def test_a_tool_may_have_taken_any_time(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="agent")
    usage = DatabaseUsageStore(browser.database.alias, tenant=browser.database.tenant)
    at = int(datetime(2026, 3, 2, tzinfo=UTC).timestamp() * 1_000)
    usage.record_entry(tool("s", duration_ms=MAX_BIGINT, timestamp=at))
    assert "9,223,372,036,854,775,807 ms" in _open(browser).text


def test_the_page_takes_as_many_queries_for_many_entries(spent: Browser) -> None:
    _open(spent)
    few = _open(spent)
    usage = DatabaseUsageStore(spent.database.alias, tenant=spent.database.tenant)
    usage.record_entries(
        [
            {
                "kind": "tokens",
                "session_id": "s",
                "step_count": 1,
                "timestamp": int(datetime(2026, 3, 1 + number % 9, 18, tzinfo=UTC).timestamp() * 1_000),
                "source": {"type": "agent", "name": "a"},
                "model": f"model-{number}",
                "tokens": {"prompt": 1, "completion": 1, "total": 2},
            }
            for number in range(40)
        ]
    )
    many = _open(spent)
    assert len(many.statements) == len(few.statements)
    assert "Not shown: 22 more." in many.text


def test_the_page_needs_the_permission_to_view_usage(visitor: Browser) -> None:
    permissions = Permission.objects.filter(content_type__app_label="helix_store")
    visitor.sign_in(permissions.get(codename="view_session"))
    for view in ("report", "csv"):
        assert visitor.open(reverse(f"admin:helix_store_usageentry_{view}")).status == 403
    visitor.sign_in(permissions.get(codename="view_usageentry"))
    assert _open(visitor).status == 200


def test_the_page_begins_with_the_past_week(browser: Browser) -> None:
    page = browser.open(reverse("admin:helix_store_usageentry_report"))
    fields = {given.get("name"): given.get("value") for tag, given in page.elements.started if tag == "input"}
    assert fields["since"] == str(start_of_day(days_ago=6).date())
    assert fields["until"] == str(start_of_day().date())
