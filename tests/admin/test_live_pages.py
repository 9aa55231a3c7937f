"""Pages that stay up to date: the marks that they ask for, and what a browser does with them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.test.utils import CaptureQueriesContext, override_settings
from django.urls import reverse

from helix_store import Store
from helix_store.core import moments
from helix_store.models import Session
from helix_store.stores import DatabaseUsageStore
from helix_store.testing.usage.base import tokens
from tests.admin.conftest import Browser, EverythingOn
from tests.admin.rows import store_of
from tests.admin.test_clicking import _sign_in
from tests.asgi_server import serving
from tests.browser import chromium
from tests.cells import for_each
from tests.databases import CommittedDatabase

LIVE = 'id="helix-live-page"'


def _url(browser: Browser) -> str:
    key = Session.objects.using(browser.database.alias).get().pk
    return reverse("admin:helix_store_session_live", args=[key])


def _mark(browser: Browser, url: str) -> Any:
    response = browser.client.get(url)
    assert response.status_code == 200
    assert "no-store" in response["Cache-Control"]
    return response.json()["mark"]


def _store(browser: Browser) -> Store:
    return Store(browser.database.alias, tenant=browser.database.tenant)


def test_the_mark_of_a_session_changes_with_all_that_its_page_shows(browser: Browser) -> None:
    session = _store(browser).new_session("s", agent_type="a")
    url = _url(browser)
    seen = [_mark(browser, url)]
    assert _mark(browser, url) == seen[0]

    def has_changed() -> bool:
        seen.append(_mark(browser, url))
        return seen[-1] not in seen[:-1]

    with session.turn() as turn:
        assert has_changed(), "a run starts"
        with turn.step() as step:
            step.say({"role": "user", "content": "hello"})
        assert has_changed(), "a step is committed"
        with turn.effect("charge") as effect:
            assert has_changed(), "an effect begins"
            effect.done()
        assert has_changed(), "an effect ends"
        with turn.step() as step:
            step.ask_approval("call-1", "pay", {})
    assert has_changed(), "a run waits"
    store_of(browser.database).submit_tool_result("s", "call-1", approval_id="call-1", approved=True)
    assert has_changed(), "a call is answered"
    session.post({"role": "user", "content": "more"}, not_before=moments.now() + timedelta(hours=1))
    assert has_changed(), "a post arrives"
    store_of(browser.database).update_status("s", "failed", failure_reason="why")
    assert browser.client.get(url).json()["is_over"] is True


def test_a_mark_costs_one_statement_of_the_store(browser: Browser) -> None:
    _store(browser).new_session("s", agent_type="a")
    names = ("session_live_start", "session_live_list", "run_live_list")
    for url in (_url(browser), *(reverse(f"admin:helix_store_{name}") for name in names)):
        browser.open(url)
        statements = [each for each in browser.open(url).statements if "helix_store" in each]
        assert len(statements) == 1


def test_the_mark_of_the_start_page_changes_with_runs_and_sessions(browser: Browser) -> None:
    url = reverse("admin:helix_store_session_live_start")
    seen = [_mark(browser, url)]
    session = _store(browser).new_session("s", agent_type="a")
    seen.append(_mark(browser, url))
    with session.turn():
        seen.append(_mark(browser, url))
    seen.append(_mark(browser, url))
    assert len(set(seen)) == 4


def test_an_open_start_page_reads_itself_again_without_the_costs(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    usage = DatabaseUsageStore(browser.database.alias, tenant=browser.database.tenant)
    usage.record_entry(tokens("s", cost_usd="0.5", timestamp=int(moments.now().timestamp() * 1000)))
    url = reverse("admin:app_list", args=["helix_store"])
    whole = browser.open(url)
    with CaptureQueriesContext(browser.database.connection) as statements:
        again = browser.client.get(url, headers={"X-Helix-Live": "without-costs"})
    regions = {region: f'id="helix-{region}"' for region in ("needs", "failures", "tiles", "costs")}
    assert [region for region, found in regions.items() if found not in whole.html] == []
    assert [region for region, found in regions.items() if found not in again.content.decode()] == ["costs"]
    assert len(whole.statements) - len(statements) == 1


def test_the_mark_of_the_lists_also_changes_with_steps_and_messages(browser: Browser) -> None:
    url = reverse("admin:helix_store_session_live_list")
    store, seen = _store(browser), [_mark(browser, url)]
    session = store.new_session("s", agent_type="a")
    seen.append(_mark(browser, url))
    session.say({"role": "user", "content": "hello"})
    seen.append(_mark(browser, url))
    with session.turn() as turn:
        seen.append(_mark(browser, url))
        with turn.step() as step:
            step.say({"role": "assistant", "content": "hello"})
        seen.append(_mark(browser, url))
    assert len(set(seen)) == 5


@for_each("name", ["session_changelist", "session_graphs", "run_changelist", "lock_changelist"])
def test_a_list_asks_for_the_mark_of_its_model(browser: Browser, name: str) -> None:
    page = browser.open(reverse(f"admin:helix_store_{name}"))
    model = name.partition("_")[0]
    assert f'data-url="{reverse(f"admin:helix_store_{model}_live_list")}"' in page.html
    mark = _mark(browser, reverse(f"admin:helix_store_{model}_live_list"))
    assert f'data-mark="{mark}"' in page.html
    assert page.html.count("data-helix-region") == 1


def test_the_mark_of_a_list_needs_the_permission_to_view_its_model(visitor: Browser) -> None:
    visitor.sign_in(*Permission.objects.filter(codename="view_run"))
    for model, status in (("run", 200), ("session", 403)):
        assert visitor.client.get(reverse(f"admin:helix_store_{model}_live_list")).status_code == status


def test_marks_need_the_permission_to_view_what_they_are_about(visitor: Browser) -> None:
    _store(visitor).new_session("s", agent_type="a")
    start = reverse("admin:helix_store_session_live_start")
    for codenames, expected in ((["view_message"], (403, 403)), (["view_session"], (200, 403))):
        visitor.sign_in(*Permission.objects.filter(codename__in=codenames))
        assert tuple(visitor.client.get(url).status_code for url in (_url(visitor), start)) == expected
    for key in ("0", "x", "9" * 30):
        address = reverse("admin:helix_store_session_live", args=[key])
        assert visitor.client.get(address).status_code == 404


def test_the_page_of_a_session_that_has_ended_asks_for_nothing(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    row = Session.objects.using(browser.database.alias).get()
    assert LIVE in browser.page_of(row).html
    store.update_status("s", "completed")
    assert LIVE not in browser.page_of(row).html


@pytest.mark.thorough
def test_a_page_shows_what_happens_while_somebody_reads_it(empty_db: CommittedDatabase) -> None:
    store = store_of(empty_db)
    store.create_session("s", agent_type="a")
    store.append_messages("s", [{"role": "user", "content": "the first message"}])
    with serving(empty_db) as server, chromium() as browser:
        _sign_in(browser, server.url, empty_db)
        key = Session.objects.using(empty_db.alias).get().pk
        with override_settings(DATABASE_ROUTERS=[EverythingOn(empty_db.alias)]):
            address = reverse("admin:helix_store_session_change", args=[key])
        browser.open(f"{server.url}{address}?section=conversation")
        browser.until("#section", contains="the first message")
        store.append_messages("s", [{"role": "user", "content": "a later message"}])
        browser.until("#section", contains="a later message")
        browser.until("#helix-live-page", contains="as of")

        # What somebody writes is not replaced.
        browser.open(f"{server.url}{address}?section=inbox")
        browser.fill("#section textarea", "half a sentence")
        store.post_message("s", {"role": "user", "content": "a post"}, not_before=moments.now())
        browser.until("#helix-live-page", contains="changed")
        assert browser.run("return document.querySelector('#section textarea').value") == "half a sentence"
        assert "a post" not in browser.text("#section")


@pytest.mark.thorough
def test_a_list_shows_what_happens_while_somebody_reads_it(empty_db: CommittedDatabase) -> None:
    store = store_of(empty_db)
    store.create_session("alpha", agent_type="a")
    with serving(empty_db) as server, chromium() as browser:
        _sign_in(browser, server.url, empty_db)
        browser.open(f"{server.url}/admin/helix_store/session/")
        store.create_session("beta", agent_type="a")
        browser.until("#helix-rows", contains="beta")
        # Django's script knows the new rows.
        browser.click("#action-toggle")
        assert (
            browser.run("return document.querySelectorAll('#result_list input.action-select:checked').length")
            == 2
        )
        assert "2 of 2 selected" in browser.text(".action-counter")

        # Rows that somebody has selected stay.
        store.create_session("gamma", agent_type="a")
        browser.until("#helix-live-page", contains="changed")
        assert "gamma" not in browser.text("#helix-rows")
        browser.click("#action-toggle")
        browser.run("document.activeElement.blur()")
        browser.until("#helix-rows", contains="gamma")


@pytest.mark.thorough
def test_the_start_page_shows_what_happens_and_later_what_it_costs(empty_db: CommittedDatabase) -> None:
    store = store_of(empty_db)
    usage = DatabaseUsageStore(empty_db.alias, tenant=empty_db.tenant)
    store.create_session("s", agent_type="a")
    with serving(empty_db) as server, chromium() as browser:
        _sign_in(browser, server.url, empty_db)
        browser.open(f"{server.url}/admin/helix_store/")
        usage.record_entry(tokens("s", cost_usd="0.5", timestamp=int(moments.now().timestamp() * 1000)))
        store.update_status("s", "failed", failure_reason="the model was overloaded")
        store.create_session("changes-the-mark", agent_type="a")
        browser.until("#helix-failures", contains="overloaded")
        assert browser.text("#helix-costs") == ""

        # Nothing happens any more, but the costs are due.
        browser.run("document.getElementById('helix-live-page').dataset.costsSeconds = '1'")
        browser.until("#helix-costs", contains="$0.50")
