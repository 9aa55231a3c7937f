"""The list of sessions: what a row says, and what filters, orders and the search leave."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth.models import Permission

from helix_store.admin import filters as search
from helix_store.models import Session, UsageEntry
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from helix_store.usage import store as reports
from tests.admin.conftest import Browser, Page
from tests.admin.rows import store_of, write_session
from tests.cells import for_each

HOUR = 3_600_000


def _now() -> int:
    return int(datetime.now(UTC).timestamp() * 1_000)


def _shown(page: Page) -> str:
    """The text of the table alone."""
    _, _, rest = page.html.partition('id="result_list"')
    table = Page(200, "<table " + rest.partition("</table>")[0])
    return table.text


def _fail(browser: Browser, session_id: str, reason: str) -> None:
    store_of(browser.database).compare_and_set_status(session_id, ["active"], "failed", failure_reason=reason)


def _wait_for_a_person(browser: Browser, session_id: str, *, deadline: int | None = None) -> None:
    store = store_of(browser.database)
    state = store.create_session(session_id, agent_type="planner")
    call = {"tool_name": "book_trip", **({} if deadline is None else {"deadline": deadline})}
    state.pending_client_tool_calls = {"call-1": call}
    state.status = "paused"  # type: ignore[assignment]
    store.save_state(session_id, state)
    rows = Session.objects.using(browser.database.alias).filter(session_id=session_id)
    assert rows.update(suspension_kind="suspended_client_tool", status="paused")


def test_a_row_begins_with_the_title_and_has_a_short_id(browser: Browser) -> None:
    store = store_of(browser.database)
    session_id = "0193a5b2-7c1e-7d4f-8a6b-1f2e3d4c5b6a"
    store.create_session(session_id, agent_type="planner", title="Trip to Lisbon", user_id="ann")
    store.create_session("bare", agent_type="planner")
    page = browser.list_of(Session)
    of_tenant = f"tenant {browser.database.tenant}"
    assert f"Trip to Lisbon 0193a5b2…3d4c5b6a {of_tenant} planner active ann" in _shown(page)
    assert f"No title bare {of_tenant} planner" in _shown(page)
    assert [a for tag, a in page.elements.started if a.get("title") == session_id]


def test_a_row_counts_messages_and_steps_in_words(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("none", agent_type="a")
    store.create_session("one", agent_type="a")
    store.append_messages("one", [{"role": "user", "content": "Hello"}])
    text = _shown(browser.list_of(Session))
    assert "0 messages 0 steps" in text
    assert "1 message 0 steps" in text


def test_only_a_filtered_list_offers_to_show_all(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="a", title="A trip")
    assert "Show all" not in browser.list_of(Session).text
    for query in ({"q": "trip"}, {"agent_type": "a"}):
        text = browser.list_of(Session, **query).text
        assert "1 result" in text
        assert "Show all" in text


def test_a_row_says_why_a_session_failed_or_what_it_waits_for(browser: Browser) -> None:
    store_of(browser.database).create_session("broken", agent_type="a")
    _fail(browser, "broken", "The model answered 529.")
    _wait_for_a_person(browser, "waiting")
    text = _shown(browser.list_of(Session))
    assert "failed The model answered 529." in text
    assert "paused waits for book_trip" in text


def test_a_row_shows_tokens_and_cost_with_the_exact_figure_as_a_tooltip(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    _spend(browser, "s", "0.012345678901")
    _spend(browser, "s", "0.000000000001")
    page = browser.list_of(Session)
    assert "$0.012 3,000 tokens" in _shown(page)
    assert [a for tag, a in page.elements.started if a.get("title") == "0.012345678902 USD"]


def test_no_more_than_so_many_entries_are_added_up_for_a_row(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    for _number in range(3):
        _spend(browser, "s", "1")
    monkeypatch.setattr(reports, "ENTRIES_READ", 1)
    assert "> $2.00 > 3,000 tokens" in _shown(browser.list_of(Session))


def _spend(browser: Browser, session_id: str, dollars: str) -> None:
    usage = DatabaseUsageStore(browser.database.alias, tenant=browser.database.tenant)
    usage.record_entry(
        {
            "kind": "tokens",
            "session_id": session_id,
            "step_count": 1,
            "timestamp": _now(),
            "source": {"type": "agent", "name": "a"},
            "model": "m",
            "tokens": {"prompt": 1_000, "completion": 500, "total": 1_500},
            "cost_usd": dollars,
        }
    )


def test_costs_need_the_permission_to_view_usage(visitor: Browser) -> None:
    store_of(visitor.database).create_session("s", agent_type="a", title="Trip")
    _spend(visitor, "s", "0.5")
    permissions = Permission.objects.filter(content_type__app_label="helix_store")
    visitor.sign_in(permissions.get(codename="view_session"))
    page = visitor.list_of(Session)
    assert "Trip" in page.text
    assert "$0.50" not in page.text
    assert UsageEntry._meta.db_table not in " ".join(page.statements)
    visitor.sign_in(*permissions.filter(codename__in=("view_session", "view_usageentry")))
    assert "$0.50" in visitor.list_of(Session).text


def test_only_a_session_that_can_still_expire_shows_when(browser: Browser) -> None:
    store = store_of(browser.database)
    for name, expires_at in (("late", _now() - 3 * HOUR - 1_000), ("early", _now() + 48 * HOUR + 60_000)):
        store.create_session(name, agent_type="a", expires_at=expires_at)
    store.create_session("over", agent_type="a", expires_at=_now() + HOUR)
    _fail(browser, "over", "reason")
    text = _shown(browser.list_of(Session))
    assert "expired 3 hours ago" in text
    assert "expires in 2 days" in text
    assert text.count("expire") == 2


def _names(browser: Browser, **query: str) -> set[str]:
    page = browser.list_of(Session, **query)
    assert page.status == 200
    ids = Session.objects.using(browser.database.alias).values_list("session_id", flat=True)
    return {session_id for session_id in ids if session_id in _shown(page)}


def test_sessions_are_filtered_by_status_and_agent_type(browser: Browser) -> None:
    store = store_of(browser.database)
    for agent_type, status in (("writer", "active"), ("writer", "paused"), ("reader", "paused")):
        state = store.create_session(f"{agent_type}-{status}", agent_type=agent_type)
        store.update_status(state.session_id, status)
    assert _names(browser, status__exact="paused", agent_type="writer") == {"writer-paused"}
    assert "?agent_type=reader" in browser.list_of(Session).html


def test_sessions_that_wait_for_a_person_are_found(browser: Browser) -> None:
    store_of(browser.database).create_session("busy", agent_type="a")
    _wait_for_a_person(browser, "no-deadline")
    _wait_for_a_person(browser, "overdue")
    rows = Session.objects.using(browser.database.alias).filter(session_id="overdue")
    rows.update(pending_deadline=datetime(2020, 1, 1, tzinfo=UTC))
    assert _names(browser, waiting="person") == {"no-deadline", "overdue"}
    assert _names(browser, waiting="late") == {"overdue"}


def test_sessions_are_filtered_by_expiry_and_last_change(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("gone", agent_type="a", expires_at=_now() - HOUR)
    store.create_session("soon", agent_type="a", expires_at=_now() + HOUR)
    store.create_session("later", agent_type="a", expires_at=_now() + 90 * HOUR)
    store.create_session("marked", agent_type="a", expires_at=_now() - HOUR)
    _fail(browser, "marked", "session_expired")
    assert _names(browser, expiry="past") == {"gone"}
    assert _names(browser, expiry="day") == {"soon"}
    assert _names(browser, expiry="failed") == {"marked"}
    rows = Session.objects.using(browser.database.alias).filter(session_id="later")
    rows.update(updated_at=datetime(2020, 1, 1, tzinfo=UTC))
    assert _names(browser, changed="month") == {"gone", "soon", "marked"}


def test_sessions_are_filtered_by_a_tag_and_by_tenant(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("urgent-one", agent_type="a", tags=["urgent", 'wörd "x"'])
    store.create_session("other-one", agent_type="a", tags=["not urgent"])
    DatabaseStateStore(browser.database.alias, tenant="acme").create_session("theirs", agent_type="a")
    assert _names(browser, tag="urgent") == {"urgent-one"}
    assert _names(browser, tag='wörd "x"') == {"urgent-one"}
    assert _names(browser, tag="urgen") == set()
    assert _names(browser, tenant="acme") == {"theirs"}
    assert _names(browser, status__exact="active") == {"urgent-one", "other-one", "theirs"}


@for_each("query", [{"waiting": "x"}, {"expiry": ""}, {"changed": "\x00"}, {"order": "tags"}])
def test_a_filter_refuses_a_value_that_it_does_not_offer(browser: Browser, query: dict[str, str]) -> None:
    assert browser.list_of(Session, **query).status == 302


@for_each(
    ("order", "expected"),
    [("", "cab"), ("oldest", "bac"), ("created", "cba"), ("first", "abc"), ("id", "abc")],
)
def test_the_list_has_the_orders_of_the_indexes(browser: Browser, order: str, expected: str) -> None:
    rows = Session.objects.using(browser.database.alias)
    for number, name in enumerate("abc"):
        store_of(browser.database).create_session(f"{name}-session", agent_type="x")
        days = {"a": 2, "b": 1, "c": 3}[name]
        rows.filter(session_id=f"{name}-session").update(
            created_at=datetime(2026, 1, 1 + number, tzinfo=UTC),
            updated_at=datetime(2026, 2, days, tzinfo=UTC),
        )
    text = _shown(browser.list_of(Session, **({"order": order} if order else {})))
    assert sorted("abc", key=lambda name: text.index(f"{name}-session")) == list(expected)


@pytest.mark.thorough
@for_each(
    ("term", "finds"),
    [
        ("conv-", True),
        ("onv-1", True),
        ("ann@", True),
        ("example.org", True),
        ("Lisbon", True),
        ("lisbon TRIP", True),
        ("holiday", True),
        ("Lisbon Porto", False),
        ("100%", True),
        ("L_sbon", False),
        ("nothing", False),
    ],
)
def test_search_finds_words_of_title_user_tag_and_id(browser: Browser, term: str, finds: bool) -> None:
    store = store_of(browser.database)
    store.create_session(
        "conv-1",
        agent_type="a",
        user_id="ann@example.org",
        title="Trip to Lisbon, 100% booked",
        tags=["Holidays"],
    )
    store.create_session("other", agent_type="a", title="Something else")
    assert _names(browser, q=term) == ({"conv-1"} if finds else set())


def test_search_is_combined_with_filters(browser: Browser) -> None:
    store = store_of(browser.database)
    for name in ("trip-1", "trip-2"):
        store.create_session(name, agent_type="a", title="A trip")
    _fail(browser, "trip-2", "reason")
    assert _names(browser, q="trip", status__exact="failed") == {"trip-2"}


def test_search_for_words_is_bounded_and_says_so(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(browser.database)
    for number in range(4):
        store.create_session(f"s-{number}", agent_type="a", title="Word of a trip", user_id="ann")
    assert "Only the newest" not in browser.list_of(Session, q="trip").text
    monkeypatch.setattr(search, "NEWEST_SEARCHED", 2)
    monkeypatch.setattr("helix_store.admin.sessions.NEWEST_SEARCHED", 2)
    bounded = browser.list_of(Session, q="trip")
    assert "Only the newest 2 sessions were searched" in bounded.text
    assert bounded.row_count == 2
    # The beginning of an id or a user is found in all of them, by an index.
    assert _names(browser, q="s-0") == {"s-0"}
    assert browser.list_of(Session, q="ann").row_count == 4
    monkeypatch.setattr(search, "MOST_FOUND", 1)
    assert "more sessions match" in browser.list_of(Session, q="ann").text
    # Deleted sessions leave gaps: the two that are left are all that there are.
    for name in ("s-0", "s-1"):
        store.delete_session(name)
    assert "Only the newest" not in browser.list_of(Session, q="trip").text


@pytest.mark.thorough
def test_filters_and_search_take_as_many_queries_for_fifty_sessions_as_for_one(browser: Browser) -> None:
    queries: list[dict[str, Any]] = [
        {"q": "trip"},
        {"status__exact": "active"},
        {"expiry": "day"},
        {"tag": "x"},
        {"changed": "week"},
    ]
    store = store_of(browser.database)
    store.create_session("s", agent_type="a", title="A trip", tags=["x"], expires_at=_now() + HOUR)
    browser.list_of(Session)
    one = [browser.list_of(Session, **query) for query in queries]
    for number in range(49):
        store.create_session(f"{number}", agent_type="a", title="trip", tags=["x"], expires_at=_now() + HOUR)
    fifty = [browser.list_of(Session, **query) for query in queries]
    assert [page.row_count for page in one + fifty] == [1] * 5 + [50] * 5
    assert [len(page.statements) for page in fifty] == [len(page.statements) for page in one]


def test_a_field_of_the_filters_works_within_the_form_of_a_theme(browser: Browser) -> None:
    page = browser.list_of(Session, status__exact="active", q="trip")
    fields = [attributes for _tag, attributes in page.elements.started if "form" in attributes]
    assert {field["form"] for field in fields} == {"helix-filter-user", "helix-filter-tag"}
    names = [["status__exact", "q", name, None] for name in ("user", "tag")]
    assert [field.get("name") for field in fields] == [name for each in names for name in each]
    for name in ("user", "tag"):
        before, form, _after = page.html.partition(f'<form method="get" id="helix-filter-{name}"></form>')
        assert form
        assert before.count("<form") == before.count("</form")


def test_the_filters_are_one_line_that_says_what_is_chosen(browser: Browser) -> None:
    write_session(browser.database, "reader")
    page = browser.list_of(Session, condition="crashed", agent_type="reader")
    _, _, bar = page.html.partition('id="changelist-filter"')
    bar = bar.partition("</nav>")[0]
    summaries = [" ".join(each.split()) for each in re.findall(r"<summary>(.*?)</summary>", bar, re.DOTALL)]
    assert "Cannot go on: <strong>crashed</strong>" in summaries
    assert "Agent type: <strong>reader</strong>" in summaries
    assert "Status" in summaries
    assert "Clear all filters" in bar
    # Closed filters do not push the list off the screen, and one that opens closes the others.
    assert "<details open" not in bar
    assert bar.count('name="helix-filter"') == len(summaries) >= 7
    assert "Clear all filters" not in browser.list_of(Session).html


def test_a_tag_that_is_filtered_by_stands_in_the_line(browser: Browser) -> None:
    write_session(browser.database, "reader")
    page = browser.list_of(Session, tag="reader")
    assert "<summary>Tag: <strong>reader</strong></summary>" in page.html
