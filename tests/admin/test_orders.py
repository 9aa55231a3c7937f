"""Lists in the order of time over all tenants, although the indexes begin with the tenant."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.urls import reverse

from helix_store.admin import base as tenants
from helix_store.admin import filters
from helix_store.admin.sessions import SessionAdmin
from helix_store.core import moments
from helix_store.models import Session, UsageEntry
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from tests.admin.conftest import Browser, Page
from tests.cells import for_each

NAMES = ("row-0", "row-1", "row-2", "row-3", "row-4", "row-5")
"""In the order of time, of two tenants in turn."""


def _write(browser: Browser, **fields: Any) -> None:
    alias = browser.database.alias
    for number, name in enumerate(NAMES):
        store = DatabaseStateStore(alias, tenant=f"tenant-{number % 2}")
        store.create_session(name, agent_type="a", title=f"Title {name}", tags=["t"])
        at = moments.now() - timedelta(milliseconds=10 - number)
        Session.objects.using(alias).filter(session_id=name).update(
            **{"created_at": at, "updated_at": at, **fields}
        )


def _shown(page: Page) -> list[str]:
    assert page.status == 200
    table = page.html.partition('id="result_list"')[2]
    return list(dict.fromkeys(re.findall(r"row-\d", table)))


@pytest.mark.thorough
@for_each(
    ("query", "newest_first"),
    [
        ({}, True),
        ({"order": "oldest"}, False),
        ({"order": "created"}, True),
        ({"order": "first"}, False),
        ({"status__exact": "active"}, True),
        ({"agent_type": "a"}, True),
        ({"changed": "today"}, True),
        ({"tag": "t"}, True),
        ({"q": "row"}, True),
        ({"all": ""}, True),
    ],
    ids=str,
)
def test_a_list_is_in_the_order_of_time_over_all_tenants(
    browser: Browser, query: dict[str, str], newest_first: bool
) -> None:
    _write(browser)
    expected = list(NAMES[::-1] if newest_first else NAMES)
    assert _shown(browser.list_of(Session, **query)) == expected


def test_waiting_sessions_are_in_the_order_of_time_over_all_tenants(browser: Browser) -> None:
    _write(browser, suspension_kind="suspended_client_tool", status="paused")
    assert _shown(browser.list_of(Session, waiting="person")) == list(NAMES[::-1])


def test_the_pages_of_a_list_continue_its_order(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionAdmin, "list_per_page", 4)
    _write(browser)
    assert _shown(browser.list_of(Session)) == list(NAMES[:1:-1])
    assert _shown(browser.list_of(Session, p="2")) == list(NAMES[1::-1])
    assert _shown(browser.list_of(Session, tenant="tenant-0")) == ["row-4", "row-2", "row-0"]


def test_usage_entries_are_in_the_order_of_time_over_all_tenants(browser: Browser) -> None:
    _write(browser)
    for number, name in enumerate(NAMES):
        usage = DatabaseUsageStore(browser.database.alias, tenant=f"tenant-{number % 2}")
        entry = {
            "kind": "tokens",
            "session_id": name,
            "step_count": 1,
            "timestamp": int(datetime(2026, 3, 1 + number, tzinfo=UTC).timestamp() * 1_000),
            "source": {"type": "agent", "name": name},
            "model": "m",
            "tokens": {"prompt": 1, "completion": 1, "total": 2},
        }
        usage.record_entry(entry)
    assert _shown(browser.list_of(UsageEntry)) == list(NAMES[::-1])


def test_the_start_page_shows_the_newest_failure_of_all_tenants(browser: Browser) -> None:
    _write(browser, status="failed", updated_at=moments.now())
    rows = Session.objects.using(browser.database.alias)
    for number, name in enumerate(NAMES):
        rows.filter(session_id=name).update(updated_at=moments.now() + timedelta(seconds=number))
    text = browser.open(reverse("admin:app_list", args=["helix_store"])).text.partition("by cause")[2]
    assert re.match(rf" {len(NAMES)} no reason given last .* Title {NAMES[-1]} ", text)


def test_with_too_many_tenants_the_list_says_that_it_is_sorted_by_tenant(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (filters, tenants):
        monkeypatch.setattr(module, "MOST_TENANTS", 1)
    _write(browser)
    page = browser.list_of(Session)
    assert _shown(page) == [*NAMES[5::-2], *NAMES[4::-2]]
    words = "Sorted by tenant, then by time. Choose a tenant to sort by time alone."
    assert words in page.text
    assert words not in browser.list_of(Session, tenant="tenant-1").text
