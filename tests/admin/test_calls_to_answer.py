"""People who answer calls: their permission, their inbox, and what the pages say about their answers."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from django.contrib.auth.models import Permission, User
from django.test.utils import override_settings
from django.urls import reverse

from helix_store import Store
from helix_store.actions import SESSION_ACTIONS
from helix_store.models import Decision, Session
from tests.admin.conftest import Browser, EverythingOn, Page
from tests.admin.rows import store_of
from tests.admin.test_clicking import _sign_in
from tests.admin.test_operations import address, told
from tests.asgi_server import serving
from tests.browser import chromium
from tests.databases import CommittedDatabase

INPUT = {"order": 17, "eur": 129.5}


def _ask(database: CommittedDatabase, session_id: str = "s", tool: str = "refund", **demands: Any) -> None:
    """A session that asks for the approval of a call, which stands in its conversation."""
    session = Store(database.alias, tenant=database.tenant).new_session(
        session_id, agent_type="a", title=f"Title {session_id}"
    )
    call = {"id": "call-1", "type": "function", "function": {"name": tool, "arguments": json.dumps(INPUT)}}
    with session.turn() as turn, turn.step() as step:
        step.say({"role": "assistant", "tool_calls": [call]})
        step.ask_approval("call-1", tool, INPUT, **demands)


def _row(browser: Browser, session_id: str = "s") -> Session:
    return Session.objects.using(browser.database.alias).get(session_id=session_id)


def _inbox(browser: Browser, **query: Any) -> Page:
    return browser.open(reverse("admin:helix_store_session_approvals"), **query)


def _approver(browser: Browser, *more: str) -> User:
    names = ["view_session", "answer_call", *more]
    return browser.sign_in(*Permission.objects.filter(codename__in=names))


def _approve(browser: Browser, session_id: str = "s", **given: Any) -> bool:
    submission = store_of(browser.database).submit_tool_result(
        session_id, "call-1", approval_id="call-1", approved=True, **given
    )
    return submission.new_version is not None


def _form_of(page: Page) -> dict[str, str]:
    """The hidden fields of the first form that answers."""
    _, _, form = page.html.partition('class="helix-answer"')
    inputs = [a for tag, a in Page(200, form.partition("</form>")[0]).elements.started if tag == "input"]
    return {str(a["name"]): str(a["value"]) for a in inputs if a.get("type") == "hidden" and "value" in a}


# --- The permission


def test_a_user_may_answer_calls_without_the_permission_to_change_sessions(visitor: Browser) -> None:
    _ask(visitor.database)
    user = _approver(visitor)
    row = _row(visitor)
    page = visitor.page_of(row, section="waits")
    assert 'value="approve"' in page.html
    offered = {name for each in SESSION_ACTIONS if f"operation/{(name := each.name)}/" in page.html}
    assert offered == {"answer"}
    for name in ("interrupt", "mark-failed", "run-again"):
        assert visitor.client.post(address(row, name), {"expected": "1"}).status_code == 403
    given = {**_form_of(page), "answer": "approve"}
    assert told(visitor, address(row, "answer"), given) == ["'call-1': approved."]
    (decision,) = Decision.objects.using(visitor.database.alias).all()
    assert decision.actor == f"user:{user.pk}"


def test_without_a_permission_a_user_neither_answers_nor_has_an_inbox(visitor: Browser) -> None:
    _ask(visitor.database)
    visitor.sign_in(*Permission.objects.filter(codename="view_session"))
    assert visitor.client.post(address(_row(visitor), "answer"), {"call": "call-1"}).status_code == 403
    assert _inbox(visitor).status == 403
    assert "Calls to answer" not in visitor.list_of(Session).text
    visitor.sign_in(*Permission.objects.filter(codename="answer_call"))
    assert _inbox(visitor).status == 403


# --- The inbox


def test_the_inbox_has_the_calls_that_the_user_may_answer(visitor: Browser) -> None:
    user = _approver(visitor)
    database = visitor.database
    _ask(database, "plain")
    _ask(database, "own-request", requester=user)
    _ask(database, "of-admins", permission="auth.add_user")
    _ask(database, "of-others", requester="the clerk")
    _ask(database, "half-approved", approvals=2)
    assert _approve(visitor, "half-approved", actor=user)
    _ask(database, "answered")
    assert _approve(visitor, "answered", actor="somebody")
    page = _inbox(visitor)
    named = {name for name in ("plain", "own-request", "of-admins", "of-others", "half-approved", "answered")
             if f"Title {name}" in page.text}  # fmt: skip
    assert named == {"plain", "of-others"}
    assert "Call 1 of 2" in page.text
    assert "asked by “the clerk”" in page.text
    assert "Calls to answer" in visitor.list_of(Session).text


def test_an_answer_leads_to_the_next_call(visitor: Browser) -> None:
    _approver(visitor)
    for name in ("first", "second", "third"):
        _ask(visitor.database, name, tool=f"tool-{name}")
    page = _inbox(visitor)
    seen = []
    for answer in ("approve", "reject", "approve"):
        form = _form_of(page)
        seen.append(page.text.partition("→")[0] and next(n for n in ("first", "second", "third")
                    if f'<strong class="helix-call-name">tool-{n}<' in page.html))  # fmt: skip
        sent = visitor.client.post(address(_row(visitor, seen[-1]), "answer"), {**form, "answer": answer})
        assert sent.status_code == 302
        url = urlsplit(sent["Location"])
        page = visitor.open(url.path, **dict(parse_qsl(url.query)))
    assert seen == ["first", "second", "third"]
    assert "There is no call that you may answer." in page.text
    outcomes = Decision.objects.using(visitor.database.alias).order_by("pk").values_list("outcome", flat=True)
    assert list(outcomes) == ["approved", "rejected", "approved"]


def test_a_call_that_somebody_else_answers_meanwhile_does_not_stop_the_others(visitor: Browser) -> None:
    _approver(visitor)
    for name in ("first", "second"):
        _ask(visitor.database, name)
    key = _row(visitor, "first").pk
    assert _approve(visitor, "first", actor="somebody")
    page = _inbox(visitor, session=key, call="call-1")
    assert "Call 1 of 1" in page.text
    assert "Title second" in page.text
    for query in ({"session": "x"}, {"session": key, "call": "x" * 400}, {"call": "call-1"}):
        assert "Call 1 of 1" in _inbox(visitor, **query).text


def test_the_inbox_takes_as_many_statements_for_twenty_calls_as_for_two(visitor: Browser) -> None:
    _approver(visitor)
    for number in range(2):
        _ask(visitor.database, f"s{number}")
    _inbox(visitor)
    few = _inbox(visitor)
    for number in range(2, 20):
        _ask(visitor.database, f"s{number}")
    many = _inbox(visitor)
    assert "Call 1 of 20" in many.text
    assert len(many.statements) == len(few.statements) <= 16


@pytest.mark.thorough
def test_the_inbox_needs_no_mouse(empty_db: CommittedDatabase) -> None:
    for name in ("first", "second"):
        _ask(empty_db, name, tool=f"tool-{name}")
    with serving(empty_db) as server, chromium() as browser:
        with override_settings(DATABASE_ROUTERS=[EverythingOn(empty_db.alias)]):
            inbox = f"{server.url}{reverse('admin:helix_store_session_approvals')}"
        _sign_in(browser, server.url, empty_db)
        for name in ("first", "second"):
            browser.open(inbox)
            browser.until(".helix-call-name", equals=f"tool-{name}")
            # The links to the other call and to the session, the reason, and the button.
            count = 3 if name == "second" else 4
            browser.press(*["TAB"] * count)
            assert browser.run("return document.activeElement.value") == "approve"
            browser.press("ENTER")
            browser.until(".messagelist", contains="approved")
        browser.until("#content-main", contains="There is no call that you may answer.")


# --- What the pages say about answers


def test_the_conversation_says_who_asked_who_approved_what_and_what_used_it(browser: Browser) -> None:
    _ask(browser.database, requester="the clerk", editable=True)
    waiting = browser.page_of(_row(browser), section="conversation")
    assert "waits for an approval asked by “the clerk”" in waiting.text
    assert "section=waits&amp;call=call-1" in waiting.html
    assert _approve(browser, actor="the boss", input={**INPUT, "eur": 99.5}, reason="Only what was paid")
    session = Store(browser.database.alias, tenant=browser.database.tenant).session("s")
    with session.turn() as turn, turn.step("pay-it") as step:
        step.use_approval("call-1")
        step.say({"role": "tool", "tool_call_id": "call-1", "content": "paid"})
    page = browser.page_of(_row(browser), section="conversation")
    said = page.text.partition("refund call-1")[2].partition("Result")[0]
    assert "approved by “the boss”" in said
    assert "used in the step pay-it" in said
    assert "Only what was paid" in said
    assert "with a changed input:" in said
    assert '"eur": 99.5' in said
    assert "waits for an approval" not in page.text


def test_an_approval_of_the_same_input_is_not_called_changed(browser: Browser) -> None:
    _ask(browser.database, approvals=2)
    for actor in ("ann", "bob"):
        assert _approve(browser, actor=actor)
    page = browser.page_of(_row(browser), section="conversation")
    assert "approved one of several by “ann”" in page.text
    assert "approved by “bob”" in page.text
    assert "with a changed input" not in page.text


def test_a_rejection_stands_at_its_call(browser: Browser) -> None:
    _ask(browser.database)
    store_of(browser.database).submit_tool_result(
        "s", "call-1", approval_id="call-1", approved=False, reason="Too dear", actor="ann"
    )
    page = browser.page_of(_row(browser), section="conversation")
    assert "rejected by “ann”" in page.text
    assert "Too dear" in page.text
    assert "helix-decision-refused" in page.html


def test_an_answer_that_was_taken_still_says_what_was_approved(browser: Browser) -> None:
    _ask(browser.database)
    assert _approve(browser, actor="ann")
    store_of(browser.database).take_tool_results("s")
    page = browser.page_of(_row(browser), section="waits")
    answered = page.text.partition("1 answered call")[2].partition("Decisions")[0]
    assert "refund" in answered
    assert '"order": 17' in answered
    decided = page.text.partition("Decisions")[2]
    assert "refund call-1 approved “ann”" in decided
    assert '"eur": 129.5' in decided


def test_decisions_are_shown_to_users_who_may_view_them(visitor: Browser) -> None:
    _ask(visitor.database)
    assert _approve(visitor, actor="ann")
    visible = ["view_session", "view_message"]
    for codenames, is_seen in ((visible, False), ([*visible, "view_decision"], True)):
        visitor.sign_in(*Permission.objects.filter(codename__in=codenames))
        page = visitor.page_of(_row(visitor), section="conversation")
        assert ("“ann”" in page.text) is is_seen
