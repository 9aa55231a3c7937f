"""The admin's answer form: who may answer, how many have, what was changed, and what was shown."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth.models import Permission

from helix_store import call_digest
from helix_store.models import Session
from tests.admin.conftest import Browser, Page
from tests.admin.rows import store_of
from tests.admin.test_operations import address, row_of, shown_digest, told, waiting_session
from tests.cells import for_each

GIVEN = {"call": "call-1", "approval": "approval-1", "answer": "approve"}
APPROVE = 'value="approve"'


def _waits(browser: Browser) -> Page:
    return browser.page_of(row_of(browser), section="waits")


def _ask(browser: Browser, **demands: Any) -> None:
    waiting_session(browser, approval_id="approval-1", **demands)


def _answers(browser: Browser) -> Any:
    return store_of(browser.database).take_tool_results("s")


def _answer(browser: Browser, **given: Any) -> list[str]:
    digest = shown_digest(browser, call=given.get("call", "call-1"))
    return told(browser, address(row_of(browser), "answer"), {**GIVEN, "digest": digest, **given})


def _hidden(page: Page, name: str) -> str:
    return str(re.findall(rf'name="{name}" value="([^"]*)"', page.html)[0])


def test_the_user_is_kept_with_the_answer_and_named(browser: Browser) -> None:
    user = browser.sign_in(superuser=True)
    _ask(browser)
    _answer(browser)
    assert f"by {user.username}" in _waits(browser).text
    assert _answers(browser)["call-1"]["actors"] == [f"user:{user.pk}"]
    assert f"by {user.username}" in _waits(browser).text


def test_ids_that_begin_alike_are_not_mixed_up(browser: Browser) -> None:
    """An id is cut in the log, so the log cannot tell who answered."""
    store = store_of(browser.database)
    waiting_session(browser, approval_id="approval-1")
    ids = ["x" * 70 + "1", "x" * 70 + "2"]
    store.add_pending_tool_calls("s", {key: {"tool_name": "t", "approval_id": "approval-1"} for key in ids})
    _answer(browser, call=ids[0])
    store.submit_tool_result("s", ids[1], approved=False, approval_id="approval-1", actor="the pager")
    assert "rejected now by “the pager”" in re.sub(r"\d+ \w+ ago|just now", "now", _waits(browser).text)


def test_an_answer_to_a_replaced_input_is_refused(browser: Browser) -> None:
    _ask(browser)
    digest = _hidden(_waits(browser), "digest")
    store = store_of(browser.database)
    state = store.load_state("s")
    assert state is not None
    state.pending_client_tool_calls["call-1"]["input"] = {"to": "Paris"}
    store.save_state("s", state)
    for answer in ("approve", "reject"):
        (refusal,) = _answer(browser, answer=answer, digest=digest)
        assert "the call has changed" in refusal
    assert _hidden(_waits(browser), "digest") == call_digest("book", {"to": "Paris"})
    _answer(browser, digest=_hidden(_waits(browser), "digest"))
    assert _answers(browser)["call-1"]["approved"] is True


def test_the_page_says_who_may_answer_and_why_this_user_may_not(browser: Browser) -> None:
    user = browser.sign_in(*Permission.objects.filter(codename__in=["view_session", "change_session"]))
    _ask(browser, permission="auth.add_user", requester="the agent of ann")
    page = _waits(browser)
    assert "Requested by “the agent of ann”, who may not answer it" in page.text
    assert "Needs a user with the permission auth.add_user" in page.text
    assert "You may not answer it: it needs an active user with its permission." in page.text
    assert APPROVE not in page.html
    assert 'value="reject"' not in page.html
    for answer in ("approve", "reject"):
        (refusal,) = _answer(browser, answer=answer)
        assert "you may not answer this call" in refusal
    assert _answers(browser) == {}
    user.user_permissions.add(Permission.objects.get(codename="add_user"))
    assert APPROVE in _waits(browser).html
    assert _answer(browser) == ["'call-1': approved."]


def test_a_user_does_not_answer_an_own_request(browser: Browser) -> None:
    user = browser.sign_in(superuser=True)
    _ask(browser, requester=f"user:{user.pk}")
    page = _waits(browser)
    assert f"Requested by {user.username}, who may not answer it" in page.text
    assert "somebody other than the requester must answer it" in page.text
    assert APPROVE not in page.html
    (refusal,) = _answer(browser)
    assert "you may not answer this call" in refusal


@pytest.mark.thorough
@for_each("requester", ["user:", "user:x", "user:9" + "9" * 30, "user:-1", "user:<b>"])
def test_an_unknown_requester_is_shown_as_it_is(browser: Browser, requester: str) -> None:
    _ask(browser, requester=requester)
    assert f"Requested by {requester}," in _waits(browser).text


def test_a_text_is_not_shown_like_a_user(browser: Browser) -> None:
    user = browser.sign_in(superuser=True)
    _ask(browser, approvals=3)
    store_of(browser.database).submit_tool_result(
        "s", "call-1", approved=True, approval_id="approval-1", actor=user.username
    )
    _answer(browser)
    assert f"2 of 3 approvals: “{user.username}”, {user.username}" in _waits(browser).text


def test_two_users_approve(browser: Browser) -> None:
    first = browser.sign_in(superuser=True)
    _ask(browser, approvals=2)
    assert "0 of 2 approvals" in _waits(browser).text
    (message,) = _answer(browser)
    assert message == "'call-1': approved; it also needs the approval of somebody else."
    page = _waits(browser)
    assert f"1 of 2 approvals: {first.username}" in page.text
    assert "You have approved it." in page.text
    assert APPROVE not in page.html
    assert 'value="reject"' in page.html
    (refusal,) = _answer(browser)
    assert "you have already approved this call" in refusal
    second = browser.sign_in(superuser=True)
    assert APPROVE in _waits(browser).html
    assert _answer(browser) == ["'call-1': approved."]
    assert f"by {first.username}, {second.username}" in _waits(browser).text
    assert len(_answers(browser)["call-1"]["actors"]) == 2


def test_an_edited_input_is_approved_after_its_difference_was_shown(browser: Browser) -> None:
    _ask(browser, editable=True)
    page = _waits(browser)
    assert 'name="edit"' in page.html
    url, digest = address(row_of(browser), "answer"), _hidden(page, "digest")
    given = {**GIVEN, "digest": digest, "edit": '{"to": "Rome", "class": 2}'}
    response = browser.client.post(url, given)
    shown = Page(response.status_code, response.content.decode())
    assert shown.status == 200
    assert "/to" in shown.text
    assert "Oslo" in shown.text
    assert "Rome" in shown.text
    seen = _hidden(shown, "seen")
    # Whoever changes it again sees the new difference first.
    again = browser.client.post(url, {**given, "seen": seen, "edit": '{"to": "Nice"}', "confirmed": "yes"})
    assert again.status_code == 200
    assert "Nice" in again.content.decode()
    assert _answers(browser) == {}
    assert told(browser, url, {**given, "seen": seen}) == ["'call-1': approved."]
    answered = _waits(browser)
    assert "Answered, not taken by the agent yet book" in answered.text
    assert "Open calls" not in answered.text
    _title, _heading, changes = answered.text.partition("Somebody has changed the requested input")
    assert "Oslo" in changes
    assert "Rome" in changes
    answer = _answers(browser)["call-1"]
    assert answer["input"] == {"to": "Rome", "class": 2}
    assert answer["digest"] == call_digest("book", {"to": "Rome", "class": 2})


def test_a_text_that_is_not_json_is_shown_again(browser: Browser) -> None:
    _ask(browser, editable=True)
    for text in ("{to", "~1", "", "NaN", "1e999", "[" * 500 + "]" * 500):
        response = browser.client.post(address(row_of(browser), "answer"), {**GIVEN, "edit": text})
        assert response.status_code == 200
        assert 'class="errorlist"' in response.content.decode()
    assert _answers(browser) == {}


def test_an_edit_without_a_call_or_of_a_damaged_one_is_refused(browser: Browser) -> None:
    _ask(browser, editable=True)
    session = row_of(browser)
    assert (
        browser.client.post(address(session, "answer"), {"answer": "approve", "edit": "1"}).status_code == 200
    )
    Session.objects.using(browser.database.alias).filter(pk=session.pk).update(pending_client_tool_calls="[]")
    response = browser.client.post(address(session, "answer"), {**GIVEN, "edit": "1"})
    assert response.status_code == 200
    seen = _hidden(Page(200, response.content.decode()), "seen")
    (refusal,) = told(browser, address(session, "answer"), {**GIVEN, "edit": "1", "seen": seen})
    assert "Nothing was done" in refusal


def test_a_call_that_is_not_editable_has_no_editor_and_is_not_edited(browser: Browser) -> None:
    _ask(browser)
    assert 'name="edit"' not in _waits(browser).html
    given = {**GIVEN, "edit": "1"}
    response = browser.client.post(address(row_of(browser), "answer"), given)
    seen = _hidden(Page(200, response.content.decode()), "seen")
    (refusal,) = _answer(browser, edit="1", seen=seen)
    assert "cannot be changed" in refusal


def test_the_next_approver_sees_what_an_edit_changed(browser: Browser) -> None:
    _ask(browser, editable=True, approvals=2)
    store_of(browser.database).submit_tool_result(
        "s", "call-1", approved=True, approval_id="approval-1", actor="ann", input={"to": "Rome"}
    )
    page = _waits(browser)
    assert "1 of 2 approvals: “ann”" in page.text
    assert "Somebody has changed the requested input" in page.text
    assert "Oslo" in page.text


def test_the_editor_escapes_what_nobody_can_see(browser: Browser) -> None:
    _ask(browser, editable=True, input={"to": "Os\u202elo"})
    editor = _waits(browser).html.partition("<textarea")[2].partition("</textarea>")[0]
    assert r"Os\u202elo" in editor


def test_the_page_says_which_step_used_an_approval(browser: Browser) -> None:
    _ask(browser)
    _answer(browser)
    with store_of(browser.database).session("s").turn() as turn, turn.step("the booking") as step:
        step.use_approval("call-1")
    assert "used in the step the booking" in _waits(browser).text


def test_it_also_says_so_before_the_answer_is_taken(browser: Browser) -> None:
    _ask(browser)
    _answer(browser)
    with store_of(browser.database).session("s").step("the booking") as step:
        step.use_approval("call-1")
    assert "used in the step the booking" in _waits(browser).text
