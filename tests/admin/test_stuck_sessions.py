"""A session that cannot go on says so, in the list, on its page and on the start page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.urls import reverse

from helix_store import Store, signals
from helix_store.models import Run, Session
from tests.admin.conftest import Browser
from tests.admin.test_operations import address, told


class Broken(Exception):
    """An error of the agent."""


@pytest.fixture
def store(browser: Browser) -> Store:
    store = Store(browser.database.alias, tenant=browser.database.tenant)
    for session_id in ("fine", "crashed", "abandoned"):
        store.new_session(session_id, agent_type="agent", title=f"Is {session_id}")
    with pytest.raises(Broken), store.session("crashed").turn():
        raise Broken
    lock = store.locks.acquire("abandoned")
    assert lock is not None
    store.sessions.start_run("abandoned", fencing_token=lock.fencing_token)
    lock.release()
    return store


@pytest.fixture
def ready() -> Iterator[list[tuple[str, str]]]:
    said: list[tuple[str, str]] = []

    def receive(session_id: str, reason: str, **_: Any) -> None:
        said.append((session_id, reason))

    signals.session_ready.connect(receive)
    yield said
    assert signals.session_ready.disconnect(receive)


def row_of(store: Store, session_id: str) -> Session:
    return Session.objects.using(store.alias).get(tenant=store.tenant, session_id=session_id)


def test_the_list_shows_and_filters_conditions(browser: Browser, store: Store) -> None:
    page = browser.list_of(Session)
    for text in ("crashed Broken", "abandoned", "active"):
        assert text in page.text
    assert "helix-badge-bad" in page.html
    for condition, shown in (
        ("crashed", {"crashed"}),
        ("abandoned", {"abandoned"}),
        ("any", {"crashed", "abandoned"}),
        ("over_budget", set()),
    ):
        text = browser.list_of(Session, condition=condition).text
        assert {each for each in ("fine", "crashed", "abandoned") if f"Is {each}" in text} == shown


def test_the_page_says_since_when_and_why(browser: Browser, store: Store) -> None:
    page = browser.page_of(row_of(store, "crashed"))
    assert "crashed since" in page.text
    assert ": Broken" in page.text
    assert "active" in browser.page_of(row_of(store, "fine")).text


def test_the_start_page_names_them_with_the_reason(browser: Browser, store: Store) -> None:
    page = browser.open(reverse("admin:app_list", args=["helix_store"]))
    assert "1 crashed 1 abandoned" in page.text
    assert "crashed Is crashed crashed Broken" in page.text


def test_the_start_page_leads_to_the_sessions_that_it_counts(browser: Browser, store: Store) -> None:
    for session_id in ("posted", "unsettled"):
        store.new_session(session_id, agent_type="agent", title=f"Is {session_id}")
    store.sessions.post_message("posted", {"role": "user", "content": "Hello"})
    with pytest.raises(Broken), store.session("unsettled").effect("charge"):
        raise Broken
    page = browser.open(reverse("admin:app_list", args=["helix_store"]))
    links = {a["href"] for tag, a in page.elements.started if tag == "a" and a.get("href")}
    found = {}
    for link in sorted(link for link in links if link and "condition=" in link):
        listed = browser.open(link)
        assert listed.row_count == 1
        found[link.rpartition("=")[2]] = re.findall(r"Is \w+", listed.text)
    expected = {"crashed": "crashed", "abandoned": "abandoned", "effect_unknown": "unsettled"}
    assert found == {condition: [f"Is {name}"] for condition, name in expected.items()}
    assert browser.list_of(Session, condition="any").row_count == 4


def test_run_again_sends_the_signal(browser: Browser, store: Store, ready: list[Any]) -> None:
    said = told(browser, address(row_of(store, "crashed"), "run-again"), {})
    assert said == ["Asked for another turn of the session."]
    assert ready == [("crashed", "again")]


def test_who_may_not_view_runs_sees_no_condition(browser: Browser, store: Store) -> None:
    browser.sign_in(Permission.objects.get(content_type__app_label="helix_store", codename="view_session"))
    page = browser.list_of(Session)
    assert "Broken" not in page.text
    # The mark of the list, by which the page learns of a change, reads no column of a run but the newest key.
    others = [each for each in page.statements if "SELECT max(id)" not in each]
    assert len(others) == len(page.statements) - 1
    assert Run._meta.db_table not in " ".join(others)
