"""Two people act on one session, each in a browser: the second is told so, and nothing is done twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.contrib.admin.models import LogEntry
from django.test.utils import override_settings

from helix_store.models import Session
from tests.admin.conftest import EverythingOn
from tests.admin.rows import store_of
from tests.admin.test_answering import _run_agent, _waiting_trip
from tests.admin.test_clicking import _sign_in, log_in
from tests.asgi_server import serving
from tests.browser import Browser, chromium
from tests.databases import CommittedDatabase


@contextmanager
def _two_windows(database: CommittedDatabase, session: Session, query: str) -> Iterator[list[Browser]]:
    """Two signed-in browsers that show the same page of a session."""
    with serving(database) as server, chromium() as first, chromium() as second:
        _sign_in(first, server.url, database)
        log_in(second, server.url)
        for browser in (first, second):
            browser.open(f"{server.url}/admin/helix_store/session/{session.pk}/change/?{query}")
        yield [first, second]


def _logged(database: CommittedDatabase, session: Session) -> int:
    with override_settings(DATABASE_ROUTERS=[EverythingOn(database.alias)]):
        return LogEntry.objects.filter(object_id=str(session.pk)).count()


def test_of_two_answers_the_first_is_kept_and_the_agent_acts_once(empty_db: CommittedDatabase) -> None:
    session = _waiting_trip(empty_db)
    before = _logged(empty_db, session)
    with _two_windows(empty_db, session, "section=waits") as (first, second):
        first.fill(".helix-answer input[name=reason]", "cheap enough")
        second.fill(".helix-answer input[name=reason]", "too dear")
        first.click(".helix-answer button[value=approve]")
        first.until(".messagelist", contains="'call-book': approved.")
        second.click(".helix-answer button[value=reject]")
        refusal = second.until(".messagelist", at_least=1)
    assert "answered" in refusal
    assert "rejected" not in refusal
    assert _logged(empty_db, session) == before + 1
    _run_agent(empty_db, "trip")
    state = store_of(empty_db).load_state("trip")
    assert state is not None
    assert str(state.status) == "completed"
    assert state.completed_client_tool_calls["call-book"]["reason"] == "cheap enough"


def test_of_two_rewinds_the_second_is_refused(empty_db: CommittedDatabase) -> None:
    session = _waiting_trip(empty_db)
    before = _logged(empty_db, session)
    with _two_windows(empty_db, session, "section=checkpoints") as (first, second):
        for browser in (first, second):
            browser.click(".helix-table tbody tr:last-child a[href*='/operation/restore/']")
            browser.until(".helix-confirm", contains="Later messages")
        first.click(".helix-confirm button.helix-danger")
        first.until(".messagelist", contains="Restored the checkpoint")
        restored = Session.objects.using(empty_db.alias).get(pk=session.pk)
        second.click(".helix-confirm button.helix-danger")
        refusal = second.until(".messagelist", at_least=1)
    assert "Restored" not in refusal
    assert "changed" in refusal
    after = Session.objects.using(empty_db.alias).get(pk=session.pk)
    assert (after.version, after.message_count) == (restored.version, restored.message_count)
    assert _logged(empty_db, session) == before + 1


def test_of_two_deletions_the_second_leads_to_the_list_with_a_message(empty_db: CommittedDatabase) -> None:
    session = _waiting_trip(empty_db)
    with _two_windows(empty_db, session, "section=details") as (first, second):
        for browser in (first, second):
            browser.click("a[href*='/operation/delete-session/']")
            browser.until(".helix-confirm", at_least=1)
        first.click(".helix-confirm button.helix-danger")
        first.until_address(lambda address: address.endswith("/session/"))
        second.click(".helix-confirm button.helix-danger")
        refusal = second.until(".messagelist", contains="does not exist")
        second.until_address(lambda address: address.endswith("/session/"))
    assert "Deleted" not in refusal
    assert not Session.objects.using(empty_db.alias).filter(pk=session.pk).exists()
