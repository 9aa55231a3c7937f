"""The console in a browser: under a strict policy, to axe-core, and by keyboard alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.contrib.auth.models import User
from django.test.utils import override_settings

from helix_store.answering import answer_url
from helix_store.models import Session
from tests.admin.conftest import EverythingOn
from tests.admin.console import fill_console
from tests.admin.test_clicking import _sign_in
from tests.asgi_server import AsgiServer, serving
from tests.browser import Browser, axe_core, chromium
from tests.cells import for_each
from tests.databases import CommittedDatabase, delete_all_rows

Opened = tuple[Browser, AsgiServer, dict[str, int]]

_MOST_TABS = 300


@contextmanager
def _console(database: CommittedDatabase) -> Iterator[Opened]:
    delete_all_rows(database.alias)  # The start page shows the first few rows of all tenants.
    with override_settings(HELIX_STORE={"BUILD": "build-7"}):
        keys = fill_console(database)
    with serving(database, settings="tests.strict_settings") as server, chromium() as browser:
        _sign_in(browser, server.url, database)
        browser.complaints()  # The browser asks for an icon, which the project does not have.
        yield browser, server, keys


def _addresses(server: AsgiServer, keys: dict[str, int], database: CommittedDatabase) -> dict[str, str]:
    """The pages of the console by name."""
    admin = f"{server.url}/admin/helix_store"
    session = f"{admin}/session/{{}}/change/?section={{}}"
    secret = {"SECRET_KEY": "for-development-only", "HELIX_STORE": {"ANSWER_PAGES": True}}
    with override_settings(DATABASE_ROUTERS=[EverythingOn(database.alias)], **secret):
        user = User.objects.get(username="clicks")
        answer = answer_url("waits", "call-1", actor=user, using=database.alias, tenant=database.tenant)
    return {
        "start": f"{admin}/",
        "list": f"{admin}/session/",
        "trace": session.format(keys["says"], "timeline"),
        "conversation": session.format(keys["says"], "conversation"),
        "approval": session.format(keys["waits"], "waits"),
        "usage": f"{admin}/usageentry/report/",
        "usage of a session": session.format(keys["says"], "usage"),
        "budgets": f"{admin}/budget/",
        "effects": session.format(keys["unknown"], "effects"),
        "posts": session.format(keys["waits"], "inbox"),
        "checkpoints": session.format(keys["waits"], "checkpoints"),
        "family": session.format(keys["root"], "tree"),
        "calls to answer": f"{admin}/session/approvals/",
        "confirmation": f"{admin}/session/{keys['waits']}/operation/delete-session/",
        "answer": f"{server.url}{answer}",
    }


def test_no_page_breaks_a_strict_policy(sqlite_db: CommittedDatabase) -> None:
    with _console(sqlite_db) as (browser, server, keys):
        for name, address in _addresses(server, keys, sqlite_db).items():
            browser.open(address)
            inline = "script:not([src]):not([type='application/json']), style, [style]"
            assert browser.run(f"return document.querySelectorAll(`{inline}`).length") == 0, name
            assert browser.complaints() == [], name


@for_each(("scheme", "width"), [("light", 1400), ("dark", 390)])
def test_axe_core_finds_nothing_serious(sqlite_db: CommittedDatabase, scheme: str, width: int) -> None:
    axe = axe_core()
    with _console(sqlite_db) as (browser, server, keys):
        browser.run(f"localStorage.setItem('theme', '{scheme}')")
        browser.prefer(scheme)
        browser.resize(width, 900)
        found = {}
        for name, address in _addresses(server, keys, sqlite_db).items():
            browser.open(address)
            if violations := browser.violations(axe):
                found[name] = violations
        assert found == {}


def test_a_link_with_several_lines_underlines_its_first_line_only(sqlite_db: CommittedDatabase) -> None:
    """Django 6.1 underlines links."""
    with _console(sqlite_db) as (browser, server, _keys):
        browser.open(f"{server.url}/admin/helix_store/session/")
        under = "#result_list th a .helix-under"
        assert browser.run(f"return getComputedStyle(document.querySelector('{under}')).display") == (
            "inline-block"
        )
        browser.open(f"{server.url}/admin/helix_store/")
        button = "getComputedStyle(document.querySelector('a.helix-small-button')).textDecorationLine"
        assert browser.run(f"return {button}") == "none"


# --- By keyboard alone

# The arrow keys reach the other radio buttons of a group.
_WATCH = """
const controls = 'a[href], button, input, select, textarea, summary';
const others = '[type=hidden], [type=radio]:not(:checked)';
window.left = new Set([...document.querySelectorAll(`#content :is(${controls}):not(${others})`)]
  .filter((each) => each.checkVisibility({visibilityProperty: true}) && !each.disabled));
document.addEventListener("focusin", (event) => left.delete(event.target));
return left.size;
"""
_MISSED = "return [...left].map((each) => each.outerHTML.slice(0, 200))"


def _tab_to(browser: Browser, selector: str) -> None:
    """Press the Tab key until an element has the focus."""
    for _ in range(_MOST_TABS):
        browser.press("TAB")
        if browser.run(f"return document.activeElement.matches(`{selector}`)"):
            return
    raise AssertionError(f"the Tab key does not reach {selector}")


def test_the_tab_key_reaches_every_control(sqlite_db: CommittedDatabase) -> None:
    with _console(sqlite_db) as (browser, server, keys):
        addresses = _addresses(server, keys, sqlite_db)
        del addresses["answer"]  # It has a test of its own.
        for name, address in addresses.items():
            browser.open(address)
            controls = browser.run(_WATCH)
            assert controls, (name, browser.text("body")[:500])
            # Django's frame has some as well.
            browser.press(*["TAB"] * (controls + 60))
            missed = browser.run(_MISSED)
            assert missed == [], name


def test_operations_are_done_without_a_mouse(sqlite_db: CommittedDatabase) -> None:
    with _console(sqlite_db) as (browser, server, keys):
        # From the start page to the call, and its approval.
        browser.open(f"{server.url}/admin/helix_store/")
        _tab_to(browser, f".helix-need-action a[href*='/{keys['waits']}/change/?section=waits']")
        browser.press("ENTER")
        browser.until("#section", contains="book_trip")
        _tab_to(browser, "button[value=approve]")
        browser.press("ENTER")
        browser.until(".messagelist", contains="approved")

        # An operation with a confirmation.
        browser.open(f"{server.url}/admin/helix_store/session/{keys['root']}/change/")
        _tab_to(browser, "a[href*='/operation/delete-session/']")
        browser.press("ENTER")
        browser.until(".helix-confirm", contains="Delete")
        _tab_to(browser, ".helix-confirm button.helix-danger")
        browser.press("ENTER")
        browser.until_address(lambda address: address.endswith("/session/"))

        # A filter, and an action of the list.
        _tab_to(browser, "#changelist-filter details:has(a[href*='agent_type=analyst']) summary")
        browser.press("ENTER")
        _tab_to(browser, "#changelist-filter a[href*='agent_type=analyst']")
        browser.press("ENTER")
        browser.until_address(lambda address: "agent_type=analyst" in address)
        _tab_to(browser, "select[name=action]")
        browser.press(*"Mark")
        _tab_to(browser, "#result_list input[type=checkbox]")
        browser.press(" ")
        _tab_to(browser, "#result_list tbody tr:last-child input[type=checkbox]")
        browser.press("ENTER")
        browser.until(".helix-confirm", contains="failed-1")
        _tab_to(browser, ".helix-confirm button.helix-danger")
        browser.press("ENTER")
        browser.until(".messagelist", at_least=1)
        rows = Session.objects.using(sqlite_db.alias).filter(agent_type="analyst")
        assert set(rows.values_list("status", flat=True)) == {"failed"}


@pytest.mark.parametrize("answer", ["approve", "reject"])
def test_the_answer_page_needs_no_mouse(sqlite_db: CommittedDatabase, answer: str) -> None:
    with _console(sqlite_db) as (browser, server, keys):
        browser.open(_addresses(server, keys, sqlite_db)["answer"])
        _tab_to(browser, f"button[value={answer}]")
        browser.press("ENTER")
        browser.until("h1", contains="Thank you")
