"""The list of sessions: saved views, sub-sessions folded under their parent, and users by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http.cookies import SimpleCookie
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import override_settings
from django.urls import reverse

from helix_store import Store
from helix_store.admin.elements import names_of_users
from helix_store.models import Session
from tests.admin.conftest import Browser, Page
from tests.admin.rows import store_of
from tests.admin.test_session_list import _names, _shown
from tests.cells import for_each

SAVE = "admin:helix_store_session_views"


def _save(browser: Browser, name: str, query: str, action: str = "keep") -> Any:
    return browser.client.post(reverse(SAVE), {"name": name, "query": query, "action": action})


def _views(page: Page) -> str:
    return page.html.partition('class="helix-views"')[2].partition("</nav>")[0]


# --- Saved views


def test_a_view_of_the_settings_is_a_link_above_the_list(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="payer")
    views = {"Payers <b>": "agent_type=payer&order=created"}
    with override_settings(HELIX_STORE={"ADMIN_VIEWS": views}):
        page = browser.list_of(Session)
        assert "Payers &lt;b&gt;</a>" in _views(page)
        assert 'href="?agent_type=payer&amp;order=created"' in _views(page)
        assert 'aria-current="true"' not in _views(page)
        chosen = browser.list_of(Session, agent_type="payer", order="created")
        assert 'aria-current="true"' in _views(chosen)
    assert 'class="helix-views"' not in browser.list_of(Session).html


def test_a_person_keeps_a_view_and_removes_it(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="payer")
    page = browser.list_of(Session, agent_type="payer", q="s")
    assert 'action="' + reverse(SAVE) in page.html
    sent = _save(browser, "My payers", "agent_type=payer&q=s&p=2")
    assert sent["Location"] == reverse("admin:helix_store_session_changelist") + "?agent_type=payer&q=s"
    assert sent.cookies["helix_views"]["httponly"]
    assert sent.cookies["helix_views"]["samesite"] == "Lax"
    page = browser.list_of(Session)
    assert 'href="?agent_type=payer&amp;q=s"' in _views(page)
    assert "My payers" in _views(page)
    _save(browser, "My payers", "agent_type=payer")
    assert _views(browser.list_of(Session)).count("My payers</a>") == 1
    _save(browser, "My payers", "", action="remove")
    assert "My payers" not in browser.list_of(Session).html


def test_the_views_of_one_person_are_not_those_of_another(browser: Browser) -> None:
    _save(browser, "Mine", "agent_type=payer")
    cookie = browser.client.cookies["helix_views"].value
    browser.sign_in(superuser=True)
    browser.client.cookies["helix_views"] = cookie
    assert "Mine" not in browser.list_of(Session).html


@for_each(
    ("name", "query"),
    [
        ("", "agent_type=a"),
        ("x" * 41, "agent_type=a"),
        ("too long", "agent_type=" + "a" * 600),
        ("nothing", ""),
        ("unknown", "state__contains=x"),
    ],
)
def test_what_is_no_view_is_not_kept(browser: Browser, name: str, query: str) -> None:
    sent = _save(browser, name, query)
    assert sent.status_code == 302
    assert "helix_views" not in sent.cookies
    assert 'class="helix-views"' not in browser.list_of(Session).html


def test_a_person_keeps_twelve_views(browser: Browser) -> None:
    for number in range(14):
        _save(browser, f"view {number:02}", f"agent_type={number}")
    page = _views(browser.list_of(Session))
    assert page.count("</a>") == 12
    assert "view 01" not in page
    assert "view 13" in page


@for_each("value", ["", "x", "[]:x", '[["a"]]:1abc:def'])
def test_a_cookie_that_is_not_ours_is_ignored(browser: Browser, value: str) -> None:
    browser.client.cookies = SimpleCookie({**browser.client.cookies, "helix_views": value})
    assert browser.list_of(Session).status == 200


def test_views_are_kept_by_post_only_and_with_the_permission_to_view(visitor: Browser) -> None:
    visitor.sign_in()
    assert _save(visitor, "mine", "agent_type=a").status_code == 403
    visitor.sign_in(superuser=True)
    assert visitor.client.get(reverse(SAVE)).status_code == 405


# --- Sub-sessions


def _family(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("root", agent_type="a")
    for name, parent in (("child-1", "root"), ("child-2", "root"), ("grandchild", "child-1")):
        store.create_session(name, agent_type="b", parent_session_id=parent)


def test_sub_sessions_are_folded_under_their_parent(browser: Browser) -> None:
    _family(browser)
    page = browser.list_of(Session)
    assert page.row_count == 1
    assert "2 sub-sessions" in _shown(page)
    assert "parent_session_id=root" in page.html
    assert "3 sub-sessions of this page are folded under their parents." in page.text
    assert browser.list_of(Session, parent_session_id="root").row_count == 2
    assert "1 sub-session" in _shown(browser.list_of(Session, parent_session_id="root"))
    whole = browser.list_of(Session, family="all")
    assert whole.row_count == 4
    assert "of this page" not in whole.text
    assert browser.list_of(Session, order="oldest").row_count == 1


@for_each("query", [{"agent_type": "b"}, {"q": "grandchild"}, {"status__exact": "active"}, {"tag": "b"}])
def test_a_filter_finds_sub_sessions(browser: Browser, query: dict[str, str]) -> None:
    _family(browser)
    Session.objects.using(browser.database.alias).filter(agent_type="b").update(tags=["b"])
    assert "grandchild" in _names(browser, **query)


# --- Users


def test_users_are_shown_by_name_each_a_link_to_their_sessions(browser: Browser) -> None:
    user = User.objects.create(username="user-ada", first_name="Ada")
    store = store_of(browser.database)
    store.create_session("by-key", agent_type="a", user_id=str(user.pk))
    store.create_session("by-mail", agent_type="a", user_id="sam@example.org")
    page = browser.list_of(Session)
    assert "user-ada" in _shown(page)
    assert f'href="?user={user.pk}"' in page.html
    assert 'href="?user=sam%40example.org"' in page.html
    found = browser.list_of(Session, user=str(user.pk))
    assert found.row_count == 1
    assert f'User: <strong title="{user.pk}">user-ada</strong>' in found.html
    assert f'name="user" value="{user.pk}"' in found.html
    by_mail = browser.list_of(Session, user="sam@example.org")
    assert "User: <strong>sam@example.org</strong>" in by_mail.html
    shown = browser.page_of(Session.objects.using(browser.database.alias).get(session_id="by-key"))
    assert "User user-ada" in shown.text
    assert f"?user={user.pk}" in shown.html


def test_the_users_of_a_page_take_one_statement(browser: Browser) -> None:
    store = store_of(browser.database)
    users = [User.objects.create(username=f"user-{number}") for number in range(10)]
    store.create_session("first", agent_type="a", user_id=str(users[0].pk))
    browser.list_of(Session)
    few = len(browser.list_of(Session).statements)
    for number, user in enumerate(users):
        store.create_session(f"s-{number}", agent_type="a", user_id=str(user.pk))
    assert len(browser.list_of(Session).statements) == few


def names(user_ids: Sequence[str]) -> Mapping[str, Any]:
    """The hook of the next test."""
    return {each: f"Customer <{each}>" for each in user_ids if each.startswith("c")}


def test_a_project_names_its_users(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a", user_id="c17")
    store.create_session("t", agent_type="a", user_id="d18")
    with override_settings(HELIX_STORE={"ADMIN_USERS": f"{__name__}.names"}):
        page = browser.list_of(Session)
    assert "Customer &lt;c17&gt;" in page.html
    assert "d18" in _shown(page)


def test_a_long_id_or_name_does_not_make_a_row_high(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a" * 200, user_id="u" * 200)
    shown = _shown(browser.list_of(Session))
    assert "a" * 40 + "…" in shown
    assert "u" * 40 + "…" in shown
    assert "a" * 41 not in shown
    assert "u" * 41 not in shown


def test_ids_that_no_user_can_have_are_not_looked_up(browser: Browser) -> None:
    assert names_of_users([None, "", "x", "-1", "9" * 40, "sam@example.org"]) == {}


def test_the_report_and_a_budget_show_the_names_of_users(browser: Browser) -> None:
    user = User.objects.create(username="user-ada")
    store = store_of(browser.database)
    store.create_session("s", agent_type="a", user_id=str(user.pk))
    of_tenant = Store(browser.database.alias, tenant=browser.database.tenant)
    budget = of_tenant.budgets.set_budget("each user", scope="user", limit_tokens=100)
    assert budget
    of_tenant.usage.record_entry(
        {
            "kind": "tokens",
            "session_id": "s",
            "step_count": 0,
            "timestamp": 1,
            "source": {"type": "agent", "name": "a"},
            "model": "m",
            "tokens": {"total": 10},
        }
    )
    report = browser.open(
        reverse("admin:helix_store_usageentry_report"), since="1969-12-31", until="1970-01-02"
    )
    assert "user-ada" in report.text


@for_each(("prefix", "finds"), [("01a2260b-7ff2", 1), ("1a2260b", 0)])
def test_the_beginning_of_an_id_is_found_in_all_sessions(
    browser: Browser, prefix: str, finds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(browser.database)
    store.create_session("01a2260b-7ff2-70a0-af45-fae09fd0ecd1", agent_type="a")
    for number in range(3):
        store.create_session(f"later-{number}", agent_type="a")
    monkeypatch.setattr("helix_store.admin.filters.NEWEST_SEARCHED", 2)
    assert browser.list_of(Session, q=prefix).row_count == finds
