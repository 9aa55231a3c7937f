"""The start page of the app: what needs somebody, what failed and why, what runs, costs, the oldest lock."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.auth.models import Permission
from django.db import connections
from django.db.models import TextField
from django.db.models.expressions import RawSQL
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from helix_store import Store
from helix_store.admin import start
from helix_store.admin.base import Scope
from helix_store.core import moments
from helix_store.models import Lock, Run, Session
from helix_store.signals import session_ready
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
    """Something for each part of the page."""
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


def _needs(page: Page) -> str:
    """The list of what needs somebody."""
    return page.text.partition("Needs somebody")[2].partition("Failures of the past")[0]


def test_the_page_says_what_needs_somebody_failed_runs_and_costs(browser: Browser) -> None:
    _fill(browser, "x")
    text = _start_page(browser).text
    assert "Needs somebody 1 waiting for an answer" in text
    assert "Book a trip waits-x book_trip deadline in 5 hours Answer" in text
    assert re.search(r"Running runs 1 Works on it works-x \d+ seconds? ago", text)
    assert re.search(r"by cause 1 No model answered. last \d+ seconds? ago Is broken broken-x", text)
    assert "Costs by day and agent $1.25 today $1.25 in 14 days" in text
    assert "a $1.25" in text.partition("in 14 days")[2]
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
    assert "Needs somebody 1 waiting for an answer" in text
    assert "Title asks asks tool-second" in text
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
    assert "1 waiting for an answer" in _start_page(browser).text
    assert "Title broken broken an answer" in _start_page(browser).text
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


def _crash(browser: Browser, name: str, error: Exception) -> None:
    store = store_of(browser.database)
    store.create_session(name, agent_type="a", title=f"Title {name}")
    with suppress(type(error)), store.session(name).turn():
        raise error


@pytest.mark.thorough
def test_a_run_that_an_exception_ended_is_counted_and_says_why(browser: Browser) -> None:
    _crash(browser, "trip", OutOfSeats("no seat left"))
    page = _start_page(browser)
    assert "1 crashed" in _needs(page)
    assert re.search(r"crashed Title trip trip OutOfSeats \d+ seconds? ago Run again", _needs(page))
    assert re.search(r"1 OutOfSeats no seat left last \d+ seconds? ago Title trip trip", page.text)
    links = {a["href"] for tag, a in page.elements.started if tag == "a" and "href" in a}
    (address,) = {link for link in links if link and "condition=crashed" in link}
    assert browser.open(address).row_count == 1
    run = Run.objects.using(browser.database.alias).get()
    shown = browser.page_of(run).text
    assert 'raise OutOfSeats("no seat left")' in shown or "raise error" in shown
    assert "OutOfSeats: no seat left" in shown
    timeline = browser.sections_of(run.session)["timeline"]
    assert "OutOfSeats: no seat left" in timeline.text


def test_failures_are_grouped_by_cause_with_counts_over_the_days(browser: Browser) -> None:
    for number in range(3):
        _crash(browser, f"full-{number}", OutOfSeats(f"no seat left on flight {number}"))
    _crash(browser, "other", ValueError("no such town"))
    alias, now = browser.database.alias, moments.now()
    runs = Run.objects.using(alias)
    runs.filter(session__session_id="full-0").update(ended_at=now - timedelta(days=2))
    runs.filter(session__session_id="full-1").update(ended_at=now - timedelta(days=9))
    page = _start_page(browser)
    causes = page.text.partition("by cause")[2].partition("Running runs")[0]
    assert re.match(
        r" 2 OutOfSeats no seat left on flight 2 last .* Title full-2 full-2 1 ValueError", causes
    )
    assert '<span class="helix-cause-days" title="0, 0, 0, 0, 1, 0, 1">' in page.html


def test_a_failure_of_a_run_and_of_its_session_is_counted_once(browser: Browser) -> None:
    _crash(browser, "trip", OutOfSeats("no seat left"))
    store_of(browser.database).update_status("trip", "failed", failure_reason="It crashed.")
    causes = _start_page(browser).text.partition("by cause")[2]
    assert "1 OutOfSeats" in causes
    assert "It crashed." not in causes


def test_a_step_that_fails_gives_its_reason_as_the_cause(browser: Browser) -> None:
    session = store_of(browser.database).new_session("trip", agent_type="travel")
    with session.turn() as turn, turn.step() as step:
        step.fail("The model answered 529.")
    causes = _start_page(browser).text.partition("by cause")[2]
    assert "1 The model answered 529." in causes
    assert "no reason given" not in causes


def test_run_again_from_the_start_page_leads_back_to_it(browser: Browser) -> None:
    _crash(browser, "trip", OutOfSeats("no seat left"))
    page = _start_page(browser)
    _, _, form = page.html.partition('<li class="helix-need">')
    elements = Page(200, form.partition("</form>")[0]).elements.started
    (action,) = [a["action"] for tag, a in elements if tag == "form"]
    given = {str(a["name"]): str(a["value"]) for tag, a in elements if tag == "input" and "value" in a}
    heard: list[str] = []

    def receiver(*, session_id: str, reason: str, **_more: object) -> None:
        heard.append(f"{session_id} {reason}")

    session_ready.connect(receiver)
    try:
        response = browser.client.post(str(action), given)
    finally:
        session_ready.disconnect(receiver)
    assert heard == ["trip again"]
    assert (response.status_code, response["Location"]) == (
        302,
        reverse("admin:app_list", args=["helix_store"]),
    )


def test_a_session_is_listed_once_for_what_has_to_be_done_first(browser: Browser) -> None:
    alias, tenant = browser.database.alias, browser.database.tenant
    store = Store(alias, tenant=tenant)
    session = store.new_session("lost", agent_type="a", title="Title lost")
    turn = session.turn()
    turn.__enter__()
    turn.effect("charge", tool_name="charge_card").__enter__()
    Lock.objects.using(alias).update(expires_at=moments.now() - timedelta(seconds=1))
    text = _start_page(browser).text
    assert "Unknown effects 1 with an unknown effect" in text
    assert re.search(r"Title lost lost charge_card .* Decide", text)
    assert text.count("Title lost") == 1
    for title in ("Needs somebody", "abandoned", "Running runs"):
        assert title not in text


def test_unknown_effects_come_first(browser: Browser) -> None:
    """Until they are settled, no agent of their sessions goes on, whatever a person answers."""
    alias, tenant = browser.database.alias, browser.database.tenant
    store = Store(alias, tenant=tenant)
    _wait_for_a_person(browser, "waits", "Title waits", None)
    before = _start_page(browser)
    for session_id in ("lost", "both"):
        session = store.new_session(session_id, agent_type="a", title=f"Title {session_id}")
        with suppress(TimeoutError), session.effect("charge", tool_name="charge_card"):
            raise TimeoutError
    rows = Session.objects.using(alias).filter(session_id="both")
    rows.update(suspension_kind="suspended_client_tool", status="paused", pending_client_tool_calls={"c": {}})
    page = _start_page(browser)
    places = [
        "Unknown effects 2 with an unknown effect",
        "Title lost",
        "Title both",
        "Needs somebody 2 waiting for an answer",
        "Title waits",
    ]
    assert [page.text.count(place) for place in places] == [1] * 5
    assert sorted(places, key=page.text.index) in (places, [places[0], places[2], places[1], *places[3:]])
    # The only one more reads the sessions of the effects.
    assert len(page.statements) == len(before.statements) + 1


def test_adapters_that_wait_for_a_person_are_listed(browser: Browser) -> None:
    store_of(browser.database).create_session("graph", agent_type="a", title="Title graph")
    Session.objects.using(browser.database.alias).update(waiting_kind="a LangGraph interrupt")
    needs = _needs(_start_page(browser))
    assert "1 waiting for an answer" in needs
    assert "Title graph graph a LangGraph interrupt" in needs
    assert "Look at it" in needs


def test_costs_are_drawn_by_day_and_agent(browser: Browser) -> None:
    alias, tenant, store = browser.database.alias, browser.database.tenant, store_of(browser.database)
    usage = DatabaseUsageStore(alias, tenant=tenant)
    for number in range(8):
        agent = f"agent-{number}"
        store.create_session(agent, agent_type=agent)
        for days_ago in (0, 3, 20):
            at = datetime.now(UTC) - timedelta(days=days_ago)
            usage.record_entry(
                {
                    "kind": "tokens",
                    "session_id": agent,
                    "step_count": 1,
                    "timestamp": int(at.timestamp() * 1_000),
                    "source": {"type": "agent", "name": agent},
                    "model": "m",
                    "tokens": {"prompt": 1, "completion": 1, "total": 2},
                    "cost_usd": str(1 + number),
                }
            )
    page = _start_page(browser)
    costs = page.text.partition("Costs by day and agent")[2]
    assert costs.startswith(" $36.00 today $72.00 in 14 days")
    assert "agent-7 $16.00 agent-6 $14.00 agent-5 $12.00 agent-4 $10.00 agent-3 $8.00 others $12.00" in costs
    assert page.html.count('<rect class="helix-series-') == 2 * 6 + 6
    assert 'preserveAspectRatio="none"' in page.html


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
    text = _needs(page)
    assert "4 with a post that nobody has received" in text
    posts = {name for name in names if f"post not received Title {name} " in text}
    assert posts == overdue
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
    page = _start_page(browser)
    assert "Nothing needs you" in page.text
    for words in ("Failures of the past", "Running runs", "Costs by day", "Oldest lock"):
        assert words not in page.text


def test_each_part_leads_to_the_list_behind_it(browser: Browser) -> None:
    _fill(browser, "x")
    page = _start_page(browser)
    links = [a["href"] or "" for tag, a in page.elements.started if tag == "a" and "href" in a]
    for part, expected in (
        ("condition=waiting", "Book a trip"),
        ("status__exact=running", "works-x"),
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
    assert "10 waiting for an answer" in ten.text
    assert len(ten.statements) == len(one.statements)


@pytest.mark.thorough
@for_each(
    ("codename", "seen"),
    [
        ("view_session", {"Needs somebody", "Failures of the past"}),
        ("view_usageentry", {"Costs by day"}),
        ("view_lock", {"Oldest lock"}),
        ("view_message", set()),
    ],
)
def test_a_user_sees_the_parts_of_what_the_user_may_view(
    visitor: Browser, codename: str, seen: set[str]
) -> None:
    _fill(visitor, "x")
    visitor.sign_in(Permission.objects.get(codename=codename, content_type__app_label="helix_store"))
    page = _start_page(visitor)
    parts = {"Needs somebody", "Running runs", "Failures of the past", "Costs by day", "Oldest lock"}
    assert {part for part in parts if part in page.text} == seen
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
            start.oldest_held_lock(Scope(alias))
        statements = [query["sql"] for query in captured.captured_queries]
        reads = [sql for sql in statements if Lock._meta.db_table in sql and not re.search("MAX|MIN", sql)]
        assert all(each in sql for each, sql in zip(conditions, reads, strict=True))


def test_an_expired_lease_is_not_the_oldest_lock(browser: Browser) -> None:
    alias, tenant = browser.database.alias, browser.database.tenant
    DatabaseLockManager(alias, tenant=tenant).acquire("gone")
    Lock.objects.using(alias).update(expires_at=moments.now() - timedelta(seconds=1))
    assert "Oldest lock" not in _start_page(browser).text
