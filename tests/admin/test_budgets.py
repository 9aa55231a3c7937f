"""Budgets in the admin: bars and values, what a person sets, and the budgets that apply to a session."""

from __future__ import annotations

import re
from typing import Any, Final

import pytest
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.auth.models import Permission
from django.db import connections
from django.urls import reverse

from helix_store import BudgetExceeded, Store
from helix_store.models import Budget, BudgetCounter, Run, Session
from helix_store.reports import session as reports
from helix_store.reports.session import session_report
from tests.admin.conftest import Browser, Page
from tests.admin.rows import store_of
from tests.admin.test_operations import row_of, told
from tests.cells import for_each
from tests.plans.explained import plans_of

EACH: Final[dict[str, Any]] = {"scope": "user", "period": "day", "limit_usd": "0.50"}


def _store(browser: Browser) -> Store:
    return Store(browser.database.alias, tenant=browser.database.tenant)


def _spend(browser: Browser, user: str, cost: str, *, session_id: str = "") -> None:
    """Commit a step of a session of the user. Usage that no budget allows is not recorded."""
    store, session_id = _store(browser), session_id or f"of {user}"
    known = store.sessions.session_exists(session_id)
    session = (
        store.session(session_id) if known else store.new_session(session_id, agent_type="a", user_id=user)
    )
    with session.turn(rest=False) as turn, turn.step() as step:
        turn.tokens(model="m", prompt=90, completion=10, cost_usd=cost)
        step.end_turn()


def _row(browser: Browser, name: str = "cap") -> Budget:
    return Budget.objects.using(browser.database.alias).get(tenant=browser.database.tenant, name=name)


def _address(row: Budget | None, name: str) -> str:
    if row is None:
        return reverse("admin:helix_store_budget_table_operation", args=[name])
    return reverse("admin:helix_store_budget_operation", args=[row.pk, name])


def _values(page: Page) -> str:
    """The text below the values of a budget."""
    return page.text.partition("the highest first")[2]


def _sent(browser: Browser) -> int:
    """The number of statements of the list of budgets, with prepared ones."""
    sent: list[str] = []

    def count(execute: Any, sql: str, *rest: Any) -> Any:
        sent.append(sql)
        return execute(sql, *rest)

    with connections[browser.database.alias].execute_wrapper(count):
        browser.list_of(Budget)
    assert sum("value_count" in sql for sql in sent) == 1
    return len(sent)


def _problems(html: str) -> dict[str, str]:
    """The errors of a form by field, as the page shows them before the field."""
    found = re.findall(
        r'<ul class="errorlist[^"]*"[^>]*><li>(.*?)</li></ul>\s*(?:<p>)?.*?name="(\w+)"', html, re.S
    )
    return {field: words for words, field in found}


# --- The list and the page -----------------------------------------------------------------------


def test_a_list_shows_what_is_spent_held_and_left_in_words_and_as_a_bar(browser: Browser) -> None:
    store = _store(browser)
    store.budgets.set_budget("cap", scope="tenant", period="month", limit_usd=2, limit_tokens=1_000)
    _spend(browser, "ada", "0.25")
    with store.new_session("busy", agent_type="a").turn(estimate_usd="0.5") as turn, turn.step():
        page = browser.list_of(Budget)
    assert "cap" in page.text
    assert "the whole tenant per month resets in" in page.text
    assert "$0.25 of $2.00 $0.50 held, $1.25 left 100 of 1,000 tokens 900 tokens left" in page.text
    widths = re.findall(r'<rect class="helix-meter-(\w+)"[^>]*? width="([\d.]+)"', page.html)
    assert widths == [
        *(("whole", "200"), ("spent", "25"), ("held", "50")),
        *(("whole", "200"), ("spent", "20"), ("held", "0")),
    ]
    bars = [
        found for tag, found in page.elements.started if tag == "svg" and "meter" in (found["class"] or "")
    ]
    assert [bar["aria-hidden"] for bar in bars] == ["true", "true"]


def test_a_reached_limit_is_marked(browser: Browser) -> None:
    _store(browser).budgets.set_budget("cap", scope="user", value="ada", limit_usd=0)
    page = browser.list_of(Budget)
    assert "user ada in total $0.00 of $0.00 limit reached $0.00 left" in page.text
    assert "helix-meter-full" in page.html


def test_a_budget_for_each_user_shows_the_highest_and_how_many_have_spent(browser: Browser) -> None:
    _store(browser).budgets.set_budget("cap", **EACH)
    assert "each user 0 have spent per day" in browser.list_of(Budget).text
    for user, cost in (("ada", "0.1"), ("eve", "0.3"), ("bob", "0.2")):
        _spend(browser, user, cost)
    page = browser.list_of(Budget)
    assert "each user 3 have spent" in page.text
    assert "highest: eve $0.30 of $0.50 $0.20 left" in page.text


def test_budgets_show_users_by_name(browser: Browser) -> None:
    user = browser.sign_in(superuser=True)
    key = str(user.pk)
    store = _store(browser)
    store.budgets.set_budget("one", scope="user", value=key, limit_usd=1)
    store.budgets.set_budget("each", **EACH)
    _spend(browser, key, "0.3")
    page = browser.list_of(Budget)
    assert f"user {user.username} in total" in page.text
    assert f"highest: {user.username} $0.30" in page.text
    row = Budget.objects.using(browser.database.alias).get(tenant=browser.database.tenant, name="one")
    assert f"user {user.username}" in browser.page_of(row).text


def test_of_very_many_values_a_list_counts_and_compares_the_first(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helix_store.admin.usage.MOST_COUNTERS", 2)
    _store(browser).budgets.set_budget("cap", **EACH)
    for user in ("ada", "bob", "eve"):
        _spend(browser, user, "0.1")
    page = browser.list_of(Budget)
    assert "more than 2 have spent" in page.text
    assert "highest of 2: ada" in page.text


@pytest.mark.thorough
def test_a_list_takes_as_many_statements_for_many_budgets_as_for_one(browser: Browser) -> None:
    store = _store(browser)
    store.budgets.set_budget("cap", **EACH)
    _spend(browser, "ada", "0.1")
    one = _sent(browser)
    for number in range(30):
        store.budgets.set_budget(f"cap {number}", scope="user", value=f"user {number}", limit_tokens=10)
        store.budgets.set_budget(f"tree {number}", scope="tree", value=f"session {number}", limit_tokens=10)
    assert browser.list_of(Budget).text.count(" of 10 tokens") == 49  # A page has 50 budgets.
    assert _sent(browser) == one


def test_the_page_of_a_budget_lists_its_values_the_highest_first(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helix_store.admin.usage._PAGE", 2)
    _store(browser).budgets.set_budget("cap", **EACH)
    for user, cost in (("ada", "0.1"), ("eve", "0.3"), ("bob", "0.2"), ("dan", "0.2"), ("zoe", "0")):
        _spend(browser, user, cost)
    page = browser.page_of(_row(browser))
    assert "User Spent and held eve $0.30 of $0.50 $0.20 left bob $0.20" in _values(page)
    assert "Later" in _values(page)
    following = browser.page_of(_row(browser), first=2)
    assert re.search(r"held dan .* ada .* First Later", _values(following))
    last = browser.page_of(_row(browser), first=4)
    assert re.search(r"held zoe \$0\.00 of .* First$", _values(last))
    assert len(last.statements) == len(page.statements)
    assert browser.page_of(_row(browser), first="x").status == 200


def test_values_of_another_tenant_are_not_shown(browser: Browser) -> None:
    _store(browser).budgets.set_budget("cap", **EACH)
    _spend(browser, "ada", "0.1")
    other = Store(browser.database.alias, tenant=f"{browser.database.tenant}-other")
    other.budgets.set_budget("cap", **EACH)
    with other.new_session("s", agent_type="a", user_id="eve").turn() as turn, turn.step() as step:
        turn.tokens(model="m", prompt=90, cost_usd="0.3")
        step.end_turn()
    row, alias = _row(browser), browser.database.alias
    (shown,) = reports.reports_of_values(row, using=alias, first=0, limit=9)
    assert shown.status.value == "ada"
    highest = reports.reports_of_budgets([row], using=alias)[row.pk]
    assert (highest.status.value, highest.value_count) == ("ada", 1)


def test_values_of_an_earlier_day_are_not_shown(browser: Browser) -> None:
    _store(browser).budgets.set_budget("cap", **EACH)
    _spend(browser, "ada", "0.1")
    BudgetCounter.objects.using(browser.database.alias).update(period="2020-01-01")
    assert "Nothing was spent in this period." in browser.page_of(_row(browser)).text
    assert "each user 0 have spent" in browser.list_of(Budget).text


def test_the_values_of_a_budget_are_found_by_an_index(browser: Browser) -> None:
    _store(browser).budgets.set_budget("cap", **EACH)
    _spend(browser, "ada", "0.1")
    counters = [
        BudgetCounter(tenant=browser.database.tenant, name="cap", value=f"user {number}", period=period)
        for number in range(100)
        for period in (f"2020-02-{day:02}" for day in range(1, 29))
    ]
    BudgetCounter.objects.using(browser.database.alias).bulk_create(counters)
    with connections[browser.database.alias].cursor() as cursor:
        cursor.execute("ANALYZE")
    row = _row(browser)
    calls = (
        lambda: reports.reports_of_values(row, using=browser.database.alias, first=0, limit=51),
        lambda: reports.reports_of_budgets([row], using=browser.database.alias),
    )
    for call in calls:
        (plan,) = plans_of(browser.database, call)
        assert any("budget_counter" in name for name in plan.indexes), plan.text
        # Of 2,800 counters. SQLite counts the operations of its cursors, some 20 for three rows.
        assert plan.rows_read < 50, plan.text
    BudgetCounter.objects.using(browser.database.alias).all().delete()


def test_a_budget_of_a_tree_links_to_its_root(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    _store(browser).budgets.set_budget("cap", scope="tree", value="s", limit_usd=1)
    page = browser.page_of(_row(browser))
    assert reverse("admin:helix_store_session_change", args=[row_of(browser).pk]) in page.html
    assert "Spent and held $0.00 of $1.00 $1.00 left" in page.text


def test_a_hold_that_cannot_be_read_hides_no_other_budget(browser: Browser) -> None:
    store = _store(browser)
    store.budgets.set_budget("cap", scope="tenant", limit_usd=1)
    store.budgets.set_budget("other", scope="user", value="ada", limit_usd=1)
    session = store.new_session("s", agent_type="a", user_id="ada")
    with session.turn(estimate_usd="0.5") as turn, turn.step():
        rows = BudgetCounter.objects.using(browser.database.alias).filter(name="cap")
        rows.update(holds={str(row_of(browser).pk): [turn.fencing_token, "much", 0]})
        page, of_cap = browser.list_of(Budget), browser.page_of(_row(browser))
        of_session = browser.page_of(row_of(browser), section="budgets")
        report = session_report(store.sessions, "s")
        rows.update(holds={})
    assert "The held amounts cannot be read." in page.text
    assert "$0.00 of $1.00 $0.50 held" in page.text
    assert "The held amounts cannot be read." in of_cap.text
    assert "A stored hold of a budget cannot be read" in of_session.text
    assert report.budgets is None
    assert "A stored hold of a budget" in report.problems[0]


# --- What a person may do ------------------------------------------------------------------------


def test_a_budget_is_added_by_the_store_and_counts_what_was_spent(browser: Browser) -> None:
    _spend(browser, "ada", "0.25")
    given = {"tenant": browser.database.tenant, "name": "cap", "scope": "user", "value": "", "period": "day"}
    assert "Add a budget" in browser.list_of(Budget).text
    (message,) = told(browser, _address(None, "add-budget"), {**given, "limit_usd": "0.5"})
    assert message.startswith("Set the budget cap.")
    status = _store(browser).budgets.status("cap", value="ada")
    assert (str(status.remaining_usd), status.limit_tokens) == ("0.250000000000", None)
    assert LogEntry.objects.latest("pk").change_message == message


@for_each(
    ("given", "field", "words"),
    [
        ({"scope": "tenant", "value": "ada"}, "value", "a budget of the tenant has no value"),
        ({"scope": "tree"}, "value", "a budget of a tree needs the session id of its root"),
        ({"limit_usd": ""}, "limit_usd", "a budget needs a limit in dollars, tokens or both"),
        ({"limit_usd": "-1"}, "limit_usd", "0"),
        ({"limit_tokens": "9" * 30}, "limit_tokens", "9223372036854775807"),
        ({"name": "known"}, "name", "This tenant already has a budget with this name."),
        ({"name": "a\x00b"}, "name", "Null characters are not allowed."),
    ],
)
def test_a_refused_value_is_explained_at_its_field(
    browser: Browser, given: dict[str, str], field: str, words: str
) -> None:
    _store(browser).budgets.set_budget("known", scope="tenant", limit_usd=1)
    whole = {"tenant": browser.database.tenant, "name": "cap", "scope": "user", "period": "day"}
    response = browser.client.post(_address(None, "add-budget"), {**whole, "limit_usd": "1", **given})
    assert response.status_code == 200
    problems = _problems(response.content.decode())
    assert words in problems[field], problems
    assert [budget.name for budget in _store(browser).budgets.list_budgets()] == ["known"]
    assert _store(browser).budgets.list_budgets()[0].limit_usd == 1


def test_a_limit_is_raised_and_the_session_continues(browser: Browser) -> None:
    _store(browser).budgets.set_budget("cap", **EACH)
    _spend(browser, "ada", "0.50")
    session = _store(browser).session("of ada")
    with session.turn(rest=False) as turn, pytest.raises(BudgetExceeded), turn.step():
        pass
    row = _row(browser)
    form = browser.open(_address(row, "change-budget"))
    fields = {found.get("name"): found.get("value") for tag, found in form.elements.started if tag == "input"}
    assert fields["limit_usd"] == "0.5"
    given = {**EACH, "limit_usd": "0.75", "expected": fields["expected"]}
    (message,) = told(browser, _address(row, "change-budget"), given)
    assert message.startswith("Set the budget cap.")
    with session.turn(rest=False) as turn, turn.step() as step:
        step.end_turn()
    assert [run.completion_reason for run in session.store.list_runs(session.id)][:2] == [
        "end_turn",
        "budget:cap",
    ]
    logged = LogEntry.objects.filter(object_id=str(row.pk)).values_list("action_flag", "change_message")
    assert list(logged) == [(CHANGE, message)]


def test_a_budget_that_somebody_else_has_changed_is_not_overwritten(browser: Browser) -> None:
    _store(browser).budgets.set_budget("cap", **EACH)
    row = _row(browser)
    _store(browser).budgets.set_budget("cap", **{**EACH, "limit_usd": 9})
    given = {"scope": "user", "period": "day", "limit_usd": "1", "expected": str(row.updated_at)}
    (message,) = told(browser, _address(row, "change-budget"), given)
    assert "somebody" in message or "another person" in message
    budget = _store(browser).budgets.get_budget("cap")
    assert budget is not None
    assert budget.limit_usd == 9


def test_a_budget_is_deleted_after_a_question(browser: Browser) -> None:
    _store(browser).budgets.set_budget("cap", **EACH)
    row = _row(browser)
    given = {"expected": str(row.updated_at)}
    asked = browser.client.post(_address(row, "delete-budget"), given)
    assert "no longer capped by this budget" in asked.content.decode()
    assert told(browser, _address(row, "delete-budget"), {**given, "confirmed": "yes"}) == [
        "Deleted the budget cap."
    ]
    assert _store(browser).budgets.list_budgets() == []
    assert LogEntry.objects.get(object_id=str(row.pk)).action_flag == DELETION


@pytest.mark.thorough
@for_each("allowed", ["add", "change", "delete", None])
def test_each_change_needs_its_permission(visitor: Browser, allowed: str | None) -> None:
    _store(visitor).budgets.set_budget("cap", **EACH)
    row = _row(visitor)
    names = ["view_budget", *([f"{allowed}_budget"] if allowed else [])]
    visitor.sign_in(*Permission.objects.filter(codename__in=names))
    listed, page = visitor.list_of(Budget), visitor.page_of(row)
    assert ("Add a budget" in listed.text) is (allowed == "add")
    for name in ("change", "delete"):
        of = _address(row, f"{name}-budget")
        assert (of in page.html) is (allowed == name)
        assert visitor.client.get(of).status_code == (200 if allowed == name else 403)
        assert visitor.client.post(of, {"confirmed": "yes"}).status_code != 302 or allowed == name
    if allowed != "delete":
        assert [budget.name for budget in _store(visitor).budgets.list_budgets()] == ["cap"]


# --- The page of a session -----------------------------------------------------------------------


def _with_budgets(browser: Browser) -> Session:
    store = _store(browser)
    store.budgets.set_budget("free-plan", **EACH)
    store.budgets.set_budget("of-eve", scope="user", value="eve", limit_usd=1)
    store.budgets.set_budget("tree", scope="tree", value="s", limit_tokens=1_000)
    _spend(browser, "ada", "0.50", session_id="s")
    return row_of(browser)


def test_the_section_and_the_report_show_the_budgets_that_apply(browser: Browser) -> None:
    session = _with_budgets(browser)
    page = browser.page_of(session, section="budgets").text
    assert "free-plan each user per day resets in" in page
    assert "$0.50 of $0.50 limit reached" in page
    assert "tree tree s in total 100 of 1,000 tokens 900 tokens left" in page
    assert "of-eve" not in page
    report = session_report(_store(browser).sessions, "s")
    assert report.budgets is not None
    assert [(each.status.name, each.status.value) for each in report.budgets] == [
        ("free-plan", "ada"),
        ("tree", "s"),
    ]
    plain = report.to_dict()["budgets"]
    assert plain[0]["spent_usd"] == plain[0]["limit_usd"] == "0.5"
    assert plain[0]["remaining_usd"] == "0"


@pytest.mark.thorough
def test_a_run_that_a_budget_ended_explains_itself(browser: Browser) -> None:
    session = _with_budgets(browser)
    assert "did not allow" not in browser.page_of(session).text
    _spend(browser, "ada", "0", session_id="s")
    stopped = "The budget “free-plan” did not allow the last step."
    page = browser.page_of(session).text
    assert f"{stopped} Spent now: $0.50 of $0.50. It resets in" in page
    assert "interrupted budget “free-plan”" in browser.list_of(Run).text
    assert "interrupted · budget “free-plan”" in browser.page_of(session, section="timeline").text
    start = browser.open(reverse("admin:app_list", args=["helix_store"])).text
    assert re.search(r"over budget .{0,80} budget “free-plan”", start), start
    assert "The next turn tries again. See the budgets" in page
    _store(browser).budgets.delete_budget("free-plan")
    assert f"{stopped} It no longer applies to this session: the next turn continues." in (
        browser.page_of(session).text
    )
    _spend(browser, "ada", "0", session_id="s")
    assert "did not allow" not in browser.page_of(session).text


def test_budgets_are_shown_to_those_who_may_view_them(visitor: Browser) -> None:
    session = _with_budgets(visitor)
    _spend(visitor, "ada", "0", session_id="s")
    visitor.sign_in(*Permission.objects.filter(codename__in=["view_session", "view_run"]))
    page = visitor.page_of(session)
    assert "The budget “free-plan” did not allow the last step." in page.text
    assert "$0.50 of $0.50" not in page.text
    assert "section=budgets" not in page.html
    assert visitor.page_of(session, section="budgets").status == 403


def test_the_name_of_a_budget_is_read_from_the_reason_of_a_run() -> None:
    assert BudgetExceeded("a:b", 1, 1).reason == "budget:a:b"
    assert reports.budget_that_stopped("budget:a:b") == "a:b"
    assert reports.budget_that_stopped("interrupt") is None
    assert reports.budget_that_stopped(None) is None
