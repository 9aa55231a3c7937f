"""The admin's pages of Claude sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission

from helix_store.contrib.claude_agent import DjangoSessionStore
from helix_store.contrib.claude_agent.models import ClaudeSession
from helix_store.models import Session
from tests.admin.conftest import Browser, browser_on
from tests.databases import CommittedDatabase

KEY: Any = {"project_key": "-srv-app", "session_id": "s<1>"}


@pytest.fixture
def browser(empty_db: CommittedDatabase) -> Iterator[Browser]:
    with browser_on(empty_db) as browser:
        browser.sign_in(superuser=True)
        yield browser


def stored(db: CommittedDatabase, sessions: int = 1) -> ClaudeSession:
    store = DjangoSessionStore(db.alias, tenant=db.tenant)
    for number in range(sessions):
        key: Any = {**KEY, "session_id": f"{KEY['session_id']}{number}"}
        entry: Any = {"type": "user", "uuid": "a", "message": {"content": "Find <the> bug"}}
        asyncio.run(store.append(key, [entry]))
    return ClaudeSession.objects.using(db.alias).order_by("id")[0]


def test_the_list_and_the_page_show_a_session(browser: Browser, empty_db: CommittedDatabase) -> None:
    row = stored(empty_db)
    listed = browser.list_of(ClaudeSession)
    assert (listed.status, listed.row_count) == (200, 1)
    assert "s<1>0" in listed.text
    assert "-srv-app" in listed.text
    page = browser.page_of(row)
    assert page.status == 200
    assert "Find <the> bug" in page.text
    assert "<the>" not in page.html


def test_the_list_reads_no_summary_and_asks_the_same_for_many_sessions(
    browser: Browser, empty_db: CommittedDatabase
) -> None:
    stored(empty_db)
    few = browser.list_of(ClaudeSession)
    stored(empty_db, 12)
    many = browser.list_of(ClaudeSession)
    assert many.row_count == 12
    assert len(many.statements) == len(few.statements)
    assert [each for each in many.statements if "summary" in each] == []


def test_a_damaged_summary_does_not_break_the_page(browser: Browser, empty_db: CommittedDatabase) -> None:
    row = stored(empty_db)
    ClaudeSession.objects.using(empty_db.alias).update(summary="{", mtime_ms=None)
    assert browser.page_of(row).status == 200
    assert browser.list_of(ClaudeSession).status == 200


@pytest.mark.parametrize("sees_sessions", [True, False])
def test_the_session_is_shown_to_those_who_may_see_it(
    empty_db: CommittedDatabase, sees_sessions: bool
) -> None:
    stored(empty_db)
    session = Session.objects.using(empty_db.alias).get()
    with browser_on(empty_db) as browser:
        names = ["view_claudesession", *(["view_session"] if sees_sessions else [])]
        browser.sign_in(*Permission.objects.filter(codename__in=names))
        page = browser.list_of(ClaudeSession)
    assert page.row_count == 1
    assert (session.session_id in page.text) is sees_sessions


def test_nobody_adds_changes_or_deletes(browser: Browser, empty_db: CommittedDatabase) -> None:
    row = stored(empty_db)
    url = f"/admin/helix_store_claude_agent/claudesession/{row.pk}"
    assert browser.open("/admin/helix_store_claude_agent/claudesession/add/").status == 403
    assert browser.open(f"{url}/delete/").status == 403
    assert 'name="_save"' not in browser.page_of(row).html
