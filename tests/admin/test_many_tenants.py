"""Lists of a table with more tenants than a filter looks up: a field for the tenant, and bounded filters."""

from __future__ import annotations

import pytest

from helix_store.admin import base, filters
from helix_store.admin import base as tenants
from helix_store.models import Session, UsageEntry
from helix_store.stores import DatabaseStateStore
from tests.admin.conftest import Browser


@pytest.fixture
def crowded(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> Browser:
    """Four tenants with a paused session each, of which three are too many, and the newest two rows seen."""
    for number in range(4):
        store = DatabaseStateStore(browser.database.alias, tenant=f"tenant-{number}")
        store.create_session(f"session-{number}", agent_type="a", title=f"Title {number}")
        store.update_status(f"session-{number}", "paused")
    for module in (filters, tenants):
        monkeypatch.setattr(module, "MOST_TENANTS", 2)
    for place in (base, tenants):
        monkeypatch.setattr(place, "NEWEST_FILTERED", 2)
    return browser


def test_a_tenant_is_typed_and_not_chosen_from_a_long_list(crowded: Browser) -> None:
    page = crowded.list_of(Session)
    assert ("input", "tenant") in {(tag, given.get("name")) for tag, given in page.elements.started}
    assert "?tenant=tenant-1" not in page.html
    assert page.row_count == 4
    assert "Title 0" in crowded.list_of(Session, tenant="tenant-0").text


def test_a_filter_without_a_tenant_sees_the_newest_rows_and_says_so(crowded: Browser) -> None:
    words = "Filtered among the newest 2 rows. Choose a tenant"
    page = crowded.list_of(Session, status__exact="paused")
    assert page.row_count == 2
    assert words in page.text
    assert '"id" >' in " ".join(page.statements)
    old = crowded.list_of(Session, status__exact="paused", tenant="tenant-0")
    assert old.row_count == 1
    assert words not in old.text
    assert words not in crowded.list_of(Session).text


def test_a_session_that_waits_for_a_person_is_found_however_old_it_is(crowded: Browser) -> None:
    first = Session.objects.using(crowded.database.alias).order_by("pk")[:1]
    Session.objects.using(crowded.database.alias).filter(pk__in=[row.pk for row in first]).update(
        suspension_kind="suspended_client_tool"
    )
    assert "Title 0" in crowded.list_of(Session, waiting="person").text


def test_an_id_is_found_in_all_tenants(crowded: Browser) -> None:
    assert "Title 0" in crowded.list_of(Session, q="session-0").text


@pytest.mark.parametrize("value", ["x" * 300, "a\x00"])
def test_a_tenant_that_no_row_can_have_is_refused(crowded: Browser, value: str) -> None:
    assert crowded.list_of(Session, tenant=value).status == 302
    assert crowded.list_of(UsageEntry, of_tenant=value).status == 302
