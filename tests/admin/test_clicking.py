"""The pages in a real browser on a real server: filters, search and links work by clicking."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

import pytest
from django.contrib.auth.hashers import PBKDF2PasswordHasher
from django.contrib.auth.models import User
from django.test.utils import override_settings

from tests.admin.conftest import EverythingOn
from tests.admin.rows import store_of, write_session
from tests.asgi_server import serving
from tests.browser import Browser, chromium
from tests.databases import CommittedDatabase

ROWS = "#result_list tbody"


def _sign_in(browser: Browser, url: str, database: CommittedDatabase) -> None:
    # The server has other hashers than the tests.
    password = PBKDF2PasswordHasher().encode("secret", "salt", 1)
    with override_settings(DATABASE_ROUTERS=[EverythingOn(database.alias)]):
        User.objects.filter(username="clicks").delete()
        User.objects.create(
            username="clicks", is_staff=True, is_superuser=True, is_active=True, password=password
        )
    log_in(browser, url)


def log_in(browser: Browser, url: str) -> None:
    """As the user that `_sign_in` has made, in one more window."""
    browser.open(f"{url}/admin/login/?next=/admin/helix_store/session/")
    browser.fill("#id_username", "clicks")
    browser.fill("#id_password", "secret")
    browser.click("input[type=submit]")
    browser.until(ROWS, at_least=1)


def _until_query(browser: Browser, **expected: str) -> None:
    browser.until_address(lambda address: dict(parse_qsl(urlsplit(address).query)) == expected)


def test_filters_search_and_links_of_sessions_work_by_clicking(empty_db: CommittedDatabase) -> None:
    store = store_of(empty_db)
    write_session(empty_db, "reader", session_id="the-parent")
    store.create_session("the-child", agent_type="writer", parent_session_id="the-parent")
    store.update_status("the-child", "paused")
    with serving(empty_db) as server, chromium() as browser:
        _sign_in(browser, server.url, empty_db)

        browser.click("#changelist-filter details:has(a[href*='status__exact=paused']) summary")
        browser.click("#changelist-filter a[href*='status__exact=paused']")
        _until_query(browser, status__exact="paused")
        browser.until(ROWS, contains="the-child")
        assert "the-parent" not in browser.text(ROWS)

        browser.click("#changelist-filter details:has(a[href*='agent_type=writer']) summary")
        browser.click("#changelist-filter a[href*='agent_type=writer']")
        _until_query(browser, status__exact="paused", agent_type="writer")
        browser.until(ROWS, contains="the-child")

        browser.fill("#searchbar", "nothing")
        browser.click("#changelist-search input[type=submit]")
        _until_query(browser, status__exact="paused", agent_type="writer", q="nothing")
        browser.until(ROWS, equals="")

        browser.open(f"{server.url}/admin/helix_store/session/?q=the-parent")
        assert "the-child" not in browser.text(ROWS)
        browser.click("#result_list tbody a")
        browser.until_address(lambda address: "/change/" in address)
        browser.until("#content", contains="the-parent")
        parent = urlsplit(browser.address())._replace(query="").geturl()

        browser.click(".helix-tabs a[href*='section=tree']")
        browser.until_address(lambda address: "section=tree" in address)
        browser.click("#content a[href*='parent_session_id=the-parent']")
        browser.until(ROWS, contains="the-child")
        assert "the-parent" not in browser.text(ROWS)

        lists = {"message": "conversation", "checkpoint": "checkpoints", "run": "timeline"}
        for model, section in lists.items():
            browser.open(f"{parent}?section={section}")
            browser.click(f"#content a[href*='/{model}/?session__id__exact=']")
            browser.until(".helix-of-session", contains="the-parent")
            browser.until(ROWS, at_least=1)
            browser.click(".helix-of-session a")
            browser.until_address(lambda address: address == parent)


def test_a_phone_shows_the_list_and_every_filter_works_there(sqlite_db: CommittedDatabase) -> None:
    write_session(sqlite_db, "reader", session_id="the-session")
    with serving(sqlite_db) as server, chromium() as browser:
        browser.resize(390, 844)
        _sign_in(browser, server.url, sqlite_db)
        assert browser.run(f"return document.querySelector('{ROWS}').getBoundingClientRect().top") < 500
        assert browser.content_width() <= 390

        # The last one lies outside of the screen before the line is moved.
        browser.click("#changelist-filter details:last-of-type summary")
        menu = "document.querySelector('#changelist-filter details[open] ul').getBoundingClientRect()"
        # A long page has a scroll bar.
        width = browser.run("return document.documentElement.clientWidth")
        edges = browser.run(f"const menu = {menu}; return [menu.left, menu.right, menu.bottom]")
        assert edges == [0, width, 844]
        browser.click("#changelist-filter details[open] li:last-of-type a")
        _until_query(browser, order="id")
        browser.until(ROWS, contains="the-session")


@pytest.mark.parametrize("query", ["title__regex=%5E%28a%2B%29%2B%24", "tracing_context__contains=s"])
def test_a_refused_lookup_shows_a_page_that_says_so(sqlite_db: CommittedDatabase, query: str) -> None:
    write_session(sqlite_db, "reader")
    with serving(sqlite_db) as server, chromium() as browser:
        _sign_in(browser, server.url, sqlite_db)
        browser.open(f"{server.url}/admin/helix_store/session/?{query}")
        assert any("400" in complaint for complaint in browser.until_complaints())
        assert browser.text(ROWS) == ""
