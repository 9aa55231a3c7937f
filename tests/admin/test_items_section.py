"""The section of the session page with the items of a session and the rows of other apps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.test import override_settings

from helix_store.items import ItemLog
from helix_store.models import Item, Session
from tests.admin.conftest import Browser, browser_on
from tests.cells import for_each
from tests.databases import CommittedDatabase


@pytest.fixture
def browser(committed_db: CommittedDatabase) -> Iterator[Browser]:
    with browser_on(committed_db) as browser:
        yield browser


def _log(database: CommittedDatabase, lane: str = "") -> ItemLog:
    return ItemLog("s", lane, using=database.alias, tenant=database.tenant)


def _session(database: CommittedDatabase) -> Session:
    return Session.objects.using(database.alias).get(tenant=database.tenant, session_id="s")


def _links(page: Any) -> list[str]:
    return [str(attributes.get("href")) for tag, attributes in page.elements.started if tag == "a"]


def _may_view(browser: Browser, *models: str) -> None:
    names = [f"view_{model}" for model in models]
    rows = Permission.objects.filter(codename__in=names)
    browser.sign_in(*rows)


def test_the_newest_items_of_a_lane_and_the_way_to_the_others(browser: Browser) -> None:
    database = browser.database
    _log(database).append([{"type": "message", "role": "user", "content": f"said {n}"} for n in range(30)])
    _log(database, "side").append([{"role": "tool", "content": "x" * 50_000}], keys=["a key"])
    browser.sign_in(superuser=True)
    page = browser.page_of(_session(database), section="items")
    assert "Items 31" in page.text
    assert "said 29" in page.text
    assert "said 4 " not in page.text
    assert page.text.index("said 29") < page.text.index("said 5")
    assert "- (30)" in page.text
    (older,) = [each for each in _links(page) if "before=" in each]
    second = browser.open(older)
    assert "said 4" in second.text
    assert "said 5" not in second.text
    (side,) = [each for each in _links(page) if "lane=side" in each]
    other = browser.open(side)
    assert "tool a key" in other.text
    assert "said" not in other.text
    assert len(other.html) < 40_000


def test_a_session_without_items_says_so(browser: Browser) -> None:
    _log(browser.database).append([1])
    _log(browser.database).clear()
    browser.sign_in(superuser=True)
    page = browser.page_of(_session(browser.database), section="items")
    assert "This session has no items." in page.text


@for_each("lane", ["\x00", "unknown", "x" * 5_000])
def test_an_address_with_any_lane_is_answered(browser: Browser, lane: str) -> None:
    _log(browser.database).append(["the only one"])
    browser.sign_in(superuser=True)
    page = browser.page_of(_session(browser.database), section="items", lane=lane)
    assert page.status == 200
    assert ("the only one" in page.text) == (lane != "unknown")


def test_what_a_user_may_not_view_is_not_shown(browser: Browser) -> None:
    _log(browser.database).append(["the only one"])
    session = _session(browser.database)
    _may_view(browser, "session")
    hidden = browser.page_of(session, section="items")
    assert hidden.status == 403
    assert not any("section=items" in each for each in _links(browser.page_of(session)))
    _may_view(browser, "session", "page")
    of_apps = browser.page_of(session, section="items")
    assert (of_apps.status, "the only one" in of_apps.text) == (200, False)
    _may_view(browser, "session", "item")
    assert "the only one" in browser.page_of(session, section="items").text


def test_an_item_that_cannot_be_read_leaves_the_others(browser: Browser) -> None:
    _log(browser.database).append(["sound", "lost"])
    Item.objects.using(browser.database.alias).filter(
        session=_session(browser.database), payload__contains="lost"
    ).update(payload="{")
    browser.sign_in(superuser=True)
    page = browser.page_of(_session(browser.database), section="items")
    assert page.status == 200
    assert "sound" in page.text


def test_the_section_is_translated(browser: Browser) -> None:
    _log(browser.database).append(["hello"])
    browser.sign_in(superuser=True)
    with override_settings(LANGUAGE_CODE="de"):
        page = browser.page_of(_session(browser.database), section="items")
    assert {"Einträge", "Schlüssel", "Zeichen"} <= set(page.text.split())
