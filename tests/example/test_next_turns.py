"""A server of the example project takes the next turn of a trip as soon as a person has answered."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from django.db import transaction

from example_project.agent import Agent, answer_approval
from example_project.next_turns import stop_taking_turns, take_next_turns
from example_project.travel import PLANNER, start_trip
from helix_store import SessionStatus, Store
from helix_store.core.ids import new_id
from tests.admin.conftest import browser_on
from tests.admin.test_operations import address, row_of
from tests.databases import CommittedDatabase
from tests.example.test_printed_commands import ROOT


@pytest.fixture
def waiting(committed_db: CommittedDatabase) -> tuple[Store, str]:
    """The store and the id of a trip that waits for an approval."""
    store, session_id = Store(committed_db.alias, tenant=committed_db.tenant), new_id()
    start_trip(store, session_id, title="A trip")
    Agent(store, PLANNER, report=lambda event: None).run(session_id)
    return store, session_id


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The receiver of a server, which waits for the end of the turn however slow the machine is."""
    monkeypatch.setattr("example_project.next_turns._PATIENCE_SECONDS", 60)
    take_next_turns()
    yield
    stop_taking_turns()


@pytest.mark.parametrize(("approved", "end"), [(True, "LX-4711"), (False, "did not approve")])
def test_an_answer_continues_the_trip(
    waiting: tuple[Store, str], receiver: None, approved: bool, end: str
) -> None:
    store, session_id = waiting
    with transaction.atomic(store.alias):
        answer_approval(store, session_id, approved=approved)
        # Nothing runs before the commit: it could be rolled back.
        assert store.session(session_id).load().status is SessionStatus.PAUSED
    session = store.session(session_id)
    assert session.load().status is SessionStatus.COMPLETED
    assert end in str(session.messages())


def test_an_approval_in_the_admin_shows_the_finished_trip(
    waiting: tuple[Store, str], receiver: None, committed_db: CommittedDatabase
) -> None:
    store, session_id = waiting
    (tool_call_id, call) = next(iter(store.session(session_id).load().pending_client_tool_calls.items()))
    given = {
        "call": tool_call_id,
        "approval": call["approval_id"],
        "answer": "approve",
        "digest": call["digest"],
    }
    with browser_on(committed_db) as browser:
        browser.sign_in(superuser=True)
        page = browser.client.post(address(row_of(browser, session_id), "answer"), given, follow=True)
    text = page.content.decode()
    assert "approved." in text
    assert "LX-4711" in text


def test_a_session_that_somebody_drives_is_left_to_them(
    waiting: tuple[Store, str], receiver: None, caplog: pytest.LogCaptureFixture
) -> None:
    store, session_id = waiting
    with store.session(session_id).turn():
        answer_approval(store, session_id, approved=True)
    assert store.session(session_id).load().status is not SessionStatus.COMPLETED
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("module", ["asgi", "wsgi"])
def test_servers_take_next_turns(module: str) -> None:
    program = (
        f"import example_project.{module}; from helix_store import session_answered, session_posted;"
        "print(len(session_answered.receivers), len(session_posted.receivers))"
    )
    environment = {**os.environ, "DATABASE_URL": "sqlite:///:memory:"}
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    # Of trips and of chats.
    assert ended.stdout == "2 1\n"
