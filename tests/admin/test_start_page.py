"""The start page of the app: what needs a person, what runs, what failed, the costs, and the oldest lock."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.auth.models import Permission
from django.db import connections
from django.db.models import TextField
from django.db.models.expressions import RawSQL
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from helix_store.admin import start
from helix_store.core import moments
from helix_store.models import Lock, Run, Session
from helix_store.stores import DatabaseLockManager, DatabaseUsageStore
from tests.admin.conftest import Browser, Page
from tests.admin.rows import store_of
from tests.cells import for_each


def _start_page(browser: Browser) -> Page:
    return browser.open(reverse("admin:app_list", args=["helix_store"]))


def _wait_for_a_person(browser: Browser, session_id: str, title: str, deadline: datetime | None) -> None:
    state = store_of(browser.database).create_session(session_id, agent_type="a", title=title)
    state.pending_client_tool_calls = {"call-1": {"tool_name": "book_trip"}}
    store_of(browser.database).save_state(session_id, state)
    rows = Session.objects.using(browser.database.alias).filter(session_id=session_id)
    rows.update(suspension_kind="suspended_client_tool", status="paused", pending_deadline=deadline)


def _fill(browser: Browser, name: str) -> None:
    """Something for each tile."""
    alias, tenant, store = browser.database.alias, browser.database.tenant, store_of(browser.database)
    _wait_for_a_person(browser, f"waits-{name}", "Book a trip", moments.now() + timedelta(hours=5, minutes=1))
    store.create_session(f"works-{name}", agent_type="a", title="Works on it")
    store.start_run(f"works-{name}")
    store.create_session(f"broken-{name}", agent_type="a", title="Is broken")
    store.compare_and_set_status(f"broken-{name}", ["active"], "failed", failure_reason="No model answered.")
    DatabaseLockManager(alias, tenant=tenant).acquire(f"works-{name}", owner="worker-17")
    DatabaseUsageStore(alias, tenant=tenant).record_entry(
        {
            "kind": "tokens",
            "session_id": f"works-{name}",
            "step_count": 1,
            "timestamp": int(datetime.now(UTC).timestamp() * 1_000),
            "source": {"type": "agent", "name": "a"},
            "model": "m",
            "tokens": {"prompt": 1, "completion": 1, "total": 2},
            "cost_usd": "1.25",
        }
    )


def test_the_tiles_say_what_needs_a_person_runs_failed_and_costs(browser: Browser) -> None:
    _fill(browser, "x")
    text = _start_page(browser).text
    assert "Needs a person 1 Book a trip waits-x book_trip, deadline in 5 hours" in text
    assert re.search(r"Running runs 1 Works on it works-x \d+ seconds? ago", text)
    assert "Failed today 1 Is broken broken-x No model answered." in text
    assert "Cost today $1.25" in text
    assert "Past 7 days $1.25" in text
    assert re.search(r"Oldest lock \d+ seconds? ago works-x held by worker-17 lease ends in", text)


def test_a_session_whose_calls_are_all_answered_needs_nobody(browser: Browser) -> None:
    store = store_of(browser.database)
    calls = {name: {"tool_name": f"tool-{name}", "approval_id": "x"} for name in ("first", "second")}
    for session_id in ("asks", "done"):
        store.create_session(session_id, agent_type="a", title=f"Title {session_id}")
        store.suspend(session_id, kind="suspended_client_tool", context={}, pending=calls)
        store.submit_tool_result(session_id, "first", approval_id="x", approved=True)
    store.submit_tool_result("done", "second", approval_id="x", approved=True)
    text = _start_page(browser).text
    assert "Needs a person 1 Title asks asks tool-second" in text
    assert "Title done" not in text
    listed = browser.list_of(Session)
    assert "paused waits for tool-second" in listed.text
    assert "paused answered, not resumed yet" in listed.text
    assert "tool-first" not in listed.text
    waiting = browser.list_of(Session, waiting="person").text
    assert "Title asks" in waiting
    assert "Title done" not in waiting
    store.take_tool_results("done")
    assert "Title done" not in _start_page(browser).text
    assert "Title done" not in browser.list_of(Session, waiting="person").text


def test_calls_that_cannot_be_read_need_a_person(browser: Browser) -> None:
    _wait_for_a_person(browser, "broken", "Title broken", None)
    rows = Session.objects.using(browser.database.alias)
    damaged = RawSQL("%s", ['{"call-1": {"submitted_at": 1'], output_field=TextField())
    rows.update(pending_client_tool_calls=damaged)
    assert "Needs a person 1 Title broken broken an answer" in _start_page(browser).text
    assert "paused waits for a person" in browser.list_of(Session, waiting="person").text


def test_a_running_run_has_one_name_on_the_start_page_and_in_the_lists(browser: Browser) -> None:
    _fill(browser, "x")
    assert "Running runs 1" in _start_page(browser).text
    assert browser.list_of(Run, status__exact="running").row_count == 1
    sessions = browser.list_of(Session)
    assert "Works on it works-x tenant" in sessions.text
    assert "active running, if the application says so paused" in sessions.text


class OutOfSeats(Exception):
    pass


def test_a_run_that_an_exception_ended_is_counted_and_says_why(browser: Browser) -> None:
    def drive() -> None:
        with store.session("trip").turn():
            raise OutOfSeats("no seat left")

    store = store_of(browser.database)
    store.create_session("trip", agent_type="a", title="Title trip")
    with pytest.raises(OutOfSeats):
        drive()
    page = _start_page(browser)
    assert "Failed runs today 1 Title trip trip OutOfSeats: no seat left" in page.text
    links = {a["href"] for tag, a in page.elements.started if tag == "a" and "href" in a}
    (address,) = {link for link in links if link and "run/?status__exact=failed" in link}
    assert browser.open(address).row_count == 1
    run = Run.objects.using(browser.database.alias).get()
    shown = browser.page_of(run).text
    assert 'raise OutOfSeats("no seat left")' in shown
    assert "OutOfSeats: no seat left" in shown
    timeline = browser.sections_of(run.session)["timeline"]
    assert "OutOfSeats: no seat left" in timeline.text


def test_posts_that_a_worker_could_have_received_five_minutes_ago_are_counted(browser: Browser) -> None:
    alias, tenant, store = browser.database.alias, browser.database.tenant, store_of(browser.database)
    now = moments.now()
    overdue = {"left", "lease over", "interrupted", "answered"}
    names = (*overdue, "held", "paused", "ended", "fresh", "suspended", "half answered", "none")
    for name in names:
        store.create_session(name, agent_type="a", title=f"Title {name}")
        if name != "none":
            at = now - timedelta(minutes=4 if name == "fresh" else 6)
            store.post_message(name, {"role": "user", "content": "hello"}, not_before=at)
    locks = DatabaseLockManager(alias, tenant=tenant)
    assert locks.acquire("lease over")
    Lock.objects.using(alias).update(expires_at=now - timedelta(seconds=1))
    assert locks.acquire("held")
    for name, status in (("interrupted", "interrupted"), ("paused", "paused"), ("ended", "completed")):
        store.update_status(name, status)
    for name, answered in (("answered", "12"), ("half answered", "1"), ("suspended", "")):
        calls = {call_id: {"tool_name": "ask"} for call_id in "12"}
        store.suspend(name, kind="suspended_client_tool", context={}, pending=calls)
        for call_id in answered:
            store.submit_tool_result(name, call_id, result="yes")
    assert {due.session_id for due in store.find_due_posts()} == overdue | {"fresh"}
    page = _start_page(browser)
    text = page.text.partition("Posts that nobody has received")[2].partition("Running runs")[0]
    assert text.startswith(" 4 ")
    assert {name for name in names if f"Title {name} " in text} == overdue
    assert text.count("6 minutes ago") == 4
    links = [a["href"] or "" for tag, a in page.elements.started if tag == "a" and "href" in a]
    (address,) = {link for link in links if "waiting=post" in link}
    behind = browser.open(address)
    assert (behind.status, behind.row_count) == (200, 4)
    assert {name for name in names if f"Title {name} " in behind.text} == overdue


def test_only_users_who_may_view_posts_can_filter_by_them(visitor: Browser) -> None:
    store_of(visitor.database).create_session("s", agent_type="a")
    for codenames, status in ((["view_session"], 302), (["view_session", "view_post"], 200)):
        visitor.sign_in(*Permission.objects.filter(codename__in=codenames))
        assert visitor.list_of(Session, waiting="post").status == status
        assert ("waiting=post" in visitor.list_of(Session).html) == (status == 200)


def test_an_empty_database_has_a_calm_start_page(browser: Browser) -> None:
    text = _start_page(browser).text
    for words in (
        "No session is waiting for a person.",
        "No run is running.",
        "No session has failed today.",
    ):
        assert words in text
    assert "No lock is held." in text
    assert "No post is overdue." in text


def test_each_tile_leads_to_the_list_behind_it(browser: Browser) -> None:
    _fill(browser, "x")
    page = _start_page(browser)
    links = [a["href"] or "" for tag, a in page.elements.started if tag == "a" and "href" in a]
    for part, expected in (
        ("waiting=person", "Book a trip"),
        ("status__exact=running", "works-x"),
        ("session/?status__exact=failed", "Is broken"),
        ("/usageentry/report/", "$1.25"),
        ("state=held", "worker-17"),
    ):
        (url,) = {link for link in links if part in link}
        behind = browser.open(url)
        assert behind.status == 200
        assert expected in behind.text


def test_the_earliest_deadline_comes_first_and_one_that_passed_says_so(browser: Browser) -> None:
    now = moments.now()
    for name, deadline in (
        ("none", None),
        ("late", now - timedelta(hours=2)),
        ("next", now + timedelta(days=3)),
    ):
        _wait_for_a_person(browser, name, f"Title {name}", deadline)
    text = _start_page(browser).text
    assert text.index("Title late") < text.index("Title next") < text.index("Title none")
    assert "deadline passed 2 hours ago" in text


def test_the_start_page_takes_as_many_queries_with_ten_of_each(browser: Browser) -> None:
    _fill(browser, "first")
    _start_page(browser)
    one = _start_page(browser)
    for number in range(9):
        _fill(browser, str(number))
    ten = _start_page(browser)
    assert "Needs a person 10" in ten.text
    assert len(ten.statements) == len(one.statements)


@for_each(
    ("codename", "seen"),
    [
        ("view_session", {"Needs a person", "Failed today"}),
        ("view_usageentry", {"Cost today"}),
        ("view_lock", {"Oldest lock"}),
        ("view_message", set()),
    ],
)
def test_a_user_sees_the_tiles_of_what_the_user_may_view(
    visitor: Browser, codename: str, seen: set[str]
) -> None:
    _fill(visitor, "x")
    visitor.sign_in(Permission.objects.get(codename=codename, content_type__app_label="helix_store"))
    page = _start_page(visitor)
    tiles = {"Needs a person", "Running runs", "Failed today", "Cost today", "Oldest lock"}
    assert {tile for tile in tiles if tile in page.text} == seen
    for tag, attributes in page.elements.started:
        address = attributes.get("href") or ""
        if tag == "a" and address.startswith("/admin/helix_store/"):
            assert visitor.open(address).status == 200, address


def test_the_oldest_lock_is_found_behind_many_newer_rows_if_its_session_runs(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(browser, "long-ago")
    manager = DatabaseLockManager(browser.database.alias, tenant=browser.database.tenant)
    manager.acquire("of-no-session", owner="worker-1")
    for number in range(3):
        manager.acquire(f"newer-{number}", owner="worker-2")
    alias = browser.database.alias
    for bound, conditions in ((10**12, ['"id" >']), (2, ['"id" >', '"name" IN'])):
        monkeypatch.setattr(start, "NEWEST_LOCKS", bound)
        assert "works-long-ago" in _start_page(browser).text.partition("Oldest lock")[2]
        with CaptureQueriesContext(connections[alias]) as captured:
            start.oldest_held_lock(alias)
        statements = [query["sql"] for query in captured.captured_queries]
        reads = [sql for sql in statements if Lock._meta.db_table in sql and "MAX" not in sql]
        assert all(each in sql for each, sql in zip(conditions, reads, strict=True))


def test_an_expired_lease_is_not_the_oldest_lock(browser: Browser) -> None:
    alias, tenant = browser.database.alias, browser.database.tenant
    DatabaseLockManager(alias, tenant=tenant).acquire("gone")
    Lock.objects.using(alias).update(expires_at=moments.now() - timedelta(seconds=1))
    assert "No lock is held." in _start_page(browser).text
