"""The demo's waiting approval is answered in a real browser, and the agent goes on."""

from __future__ import annotations

from typing import Any

from example_project.agent import Agent
from example_project.travel import PLANNER, start_trip
from helix_store.models import Session
from helix_store.stores import Store
from tests.admin.rows import store_of
from tests.admin.test_clicking import _sign_in
from tests.asgi_server import serving
from tests.browser import chromium
from tests.databases import CommittedDatabase


def _store(database: CommittedDatabase) -> Store:
    return Store(database.alias, tenant=database.tenant)


def _run_agent(database: CommittedDatabase, session_id: str) -> None:
    Agent(_store(database), PLANNER, report=lambda event: None).run(session_id)


def _waiting_trip(database: CommittedDatabase) -> Session:
    start_trip(_store(database), "trip", title="The booking waits for an approval")
    _run_agent(database, "trip")
    return Session.objects.using(database.alias).get(tenant=database.tenant, session_id="trip")


def test_an_approval_that_is_given_by_clicking_lets_the_agent_go_on(empty_db: CommittedDatabase) -> None:
    session = _waiting_trip(empty_db)
    assert str(session.status) == "paused"
    with serving(empty_db) as server, chromium() as browser:
        _sign_in(browser, server.url, empty_db)
        browser.open(f"{server.url}/admin/helix_store/session/{session.pk}/change/")
        assert "waits for an approval: book_trip" in browser.text(".helix-summary")
        browser.click(".helix-buttons a.helix-main")
        browser.until("#section", contains="total_eur")
        browser.fill(".helix-answer input[name=reason]", "cheap enough")
        browser.click(".helix-answer button[value=approve]")
        browser.until(".messagelist", contains="'call-book': approved.")
        assert "by clicks" in browser.text("#section")
        assert "cheap enough" in browser.text("#section")
        # A worker takes the answer and finishes; the page shows what it did.
        _run_agent(empty_db, "trip")
        browser.click(".helix-tabs a[href*='section=conversation']")
        browser.until("#section", contains="Your weekend in Lisbon is booked")
        assert "completed" in browser.text(".helix-summary")
        assert [each for each in browser.complaints() if "favicon" not in each] == []
    state: Any = store_of(empty_db).load_state("trip")
    assert str(state.status) == "completed"
    assert state.completed_client_tool_calls["call-book"]["reason"] == "cheap enough"


def test_a_rewind_is_confirmed_and_done_by_clicking(empty_db: CommittedDatabase) -> None:
    session = _waiting_trip(empty_db)
    before = store_of(empty_db).get_message_count("trip")
    with serving(empty_db) as server, chromium() as browser:
        _sign_in(browser, server.url, empty_db)
        browser.open(f"{server.url}/admin/helix_store/session/{session.pk}/change/?section=checkpoints")
        browser.click(".helix-table tbody tr:last-child a[href*='/operation/restore/']")
        browser.until(".helix-confirm", contains="Later messages")
        browser.click(".helix-confirm button.helix-danger")
        browser.until(".messagelist", contains="Restored the checkpoint")
    assert store_of(empty_db).get_message_count("trip") < before
