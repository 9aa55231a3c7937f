"""An answer that only the state holds is no person's: the pages show the call as open, and take an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import override_settings
from django.urls import reverse

from helix_store import ConflictError, Store
from helix_store.answering import answer_url
from helix_store.models import Session
from tests.admin.conftest import Browser, Page
from tests.admin.rows import store_of
from tests.admin.test_calls_to_answer import _ask
from tests.admin.test_operations import address, row_of, shown_digest, told
from tests.cells import for_each

LONG_AGO = 1_700_000_000_000
APPROVE = 'value="approve"'
FORGED: dict[str, dict[str, Any]] = {
    "approved": {"approved": True, "reason": None},
    "rejected": {"approved": False, "reason": "no"},
    "failed": {"error": "no"},
}


@pytest.fixture(autouse=True)
def answer_pages() -> Iterator[None]:
    with override_settings(HELIX_STORE={"ANSWER_PAGES": True}):
        yield


@pytest.fixture
def boss(visitor: Browser) -> User:
    return visitor.sign_in(superuser=True)


def _change(browser: Browser, change: Callable[[Any], None], session_id: str = "s") -> None:
    """An agent writes its own state."""
    store = store_of(browser.database)
    state = store.load_state(session_id)
    assert state is not None
    change(state)
    store.save_state(session_id, state)


def _forge(browser: Browser, user: User, answer: str = "approved", session_id: str = "s") -> None:
    forged = {**FORGED[answer], "submitted_at": LONG_AGO, "actors": [f"user:{user.pk}"]}
    _change(browser, lambda state: state.pending_client_tool_calls["call-1"].update(forged), session_id)


def _submit(browser: Browser, **given: Any) -> str:
    store = store_of(browser.database)
    return store.submit_tool_result("s", "call-1", approval_id="call-1", **given).outcome


def _waits(browser: Browser) -> Page:
    return browser.page_of(row_of(browser), section="waits")


def _inbox(browser: Browser) -> Page:
    return browser.open(reverse("admin:helix_store_session_approvals"))


def _link(browser: Browser, user: User) -> str:
    database = browser.database
    return answer_url("s", "call-1", actor=user, tenant=database.tenant, using=database.alias)


@pytest.mark.thorough
@for_each("answer", list(FORGED))
def test_every_page_shows_the_call_as_open(visitor: Browser, boss: User, answer: str) -> None:
    _ask(visitor.database)
    _forge(visitor, boss, answer)
    page = _waits(visitor)
    assert APPROVE in page.html
    assert f"by {boss.username}" not in page.text
    assert "waits for an approval: refund" in page.text
    assert "Title s" in _inbox(visitor).text
    assert APPROVE in _inbox(visitor).html
    assert "waits for refund" in visitor.list_of(Session, waiting="person").text
    assert "waits for refund" in visitor.list_of(Session).text
    assert "refund" in visitor.list_of(Session, condition="waiting").text
    assert "waiting for an answer" in visitor.open(reverse("admin:app_list", args=["helix_store"])).text
    assert "section=waits&amp;call=call-1" in visitor.page_of(row_of(visitor), section="conversation").html
    assert APPROVE in visitor.open(_link(visitor, boss)).html


@pytest.mark.thorough
@for_each("answer", list(FORGED))
def test_a_person_answers_in_the_admin(visitor: Browser, boss: User, answer: str) -> None:
    _ask(visitor.database)
    _forge(visitor, boss, answer)
    given = {"call": "call-1", "approval": "call-1", "answer": "reject"}
    url = address(row_of(visitor), "answer")
    (refusal,) = told(visitor, url, given)
    assert "does not say which input it is about" in refusal
    digest = shown_digest(visitor, call="call-1")
    assert told(visitor, url, {**given, "digest": digest}) == ["'call-1': rejected."]
    assert "rejected" in _waits(visitor).text
    assert f"by {boss.username}" in _waits(visitor).text


def test_a_person_answers_on_an_answer_page(visitor: Browser, boss: User) -> None:
    _ask(visitor.database)
    _forge(visitor, boss)
    url = _link(visitor, boss)
    assert visitor.client.post(url, {"answer": "reject"}).status_code == 200
    assert "has been answered" in visitor.open(url).text


@pytest.mark.thorough
@for_each("answer", list(FORGED))
def test_an_answer_of_a_person_is_shown_as_answered(visitor: Browser, boss: User, answer: str) -> None:
    _ask(visitor.database)
    given = {name: value for name, value in FORGED[answer].items() if value is not None}
    assert _submit(visitor, **given, actor="ann") == "accepted"
    session = Store(visitor.database.alias, tenant=visitor.database.tenant).session("s")
    for is_used in {False, answer == "approved"}:
        if is_used:
            with session.turn() as turn, turn.effect("call-1", approval=True) as effect:
                effect.done(True)
            assert "call-1" in session.load().pending_client_tool_calls
        assert "by “ann”" in _waits(visitor).text
        assert APPROVE not in _waits(visitor).html
        assert "Title s" not in _inbox(visitor).text
        assert "Title s" not in visitor.list_of(Session, waiting="person").text
        with pytest.raises(ConflictError):
            _link(visitor, boss)
        assert "call=call-1" not in visitor.page_of(row_of(visitor), section="conversation").html


@for_each("approved", [True, False])
@for_each("is_taken", [True, False])
def test_what_was_decided_is_not_what_the_state_says(
    visitor: Browser, boss: User, approved: bool, is_taken: bool
) -> None:
    """The agent changes all of the answer but its moment."""
    _ask(visitor.database)
    _submit(visitor, approved=approved, actor="ann")
    if is_taken:
        store_of(visitor.database).take_tool_results("s")

    def change(state: Any) -> None:
        calls = state.completed_client_tool_calls if is_taken else state.pending_client_tool_calls
        calls["call-1"] |= {"approved": True, "actors": [f"user:{boss.pk}"], "input": {"eur": 5000}}

    _change(visitor, change)
    text = _waits(visitor).text
    assert "by “ann”" in text
    assert f"by {boss.username}" not in text
    assert ("rejected" in text) is not approved
    assert ("5000" in text) is not approved


def test_a_taken_answer_of_nobody_names_nobody(visitor: Browser, boss: User) -> None:
    _ask(visitor.database)

    def forge(state: Any) -> None:
        state.completed_client_tool_calls["call-1"] = {
            **FORGED["approved"],
            "submitted_at": LONG_AGO,
            "actors": [f"user:{boss.pk}"],
        }
        del state.pending_client_tool_calls["call-1"]

    _change(visitor, forge)
    text = _waits(visitor).text
    assert "1 answered call" in text
    assert f"by {boss.username}" not in text


def test_lists_take_as_many_statements_with_ten_forged_answers(visitor: Browser, boss: User) -> None:
    counts = []
    for number in range(10):
        _ask(visitor.database, f"s-{number}")
        _forge(visitor, boss, session_id=f"s-{number}")
        if number in (0, 9):
            pages = [_inbox(visitor), visitor.list_of(Session, waiting="person")]
            assert all(f"Title s-{number}" in page.text for page in pages)
            counts.append([len(page.statements) for page in pages])
    assert counts[0] == counts[1]


def test_a_call_without_its_digest_is_in_the_inbox(browser: Browser) -> None:
    _ask(browser.database)
    _change(browser, lambda state: state.pending_client_tool_calls["call-1"].pop("digest"))
    assert APPROVE in _inbox(browser).html


@for_each("call_id", ["a\x00b", "a\ud800b"], ids=["NUL", "surrogate"])
def test_an_id_that_no_database_can_compare_does_not_break_the_pages(browser: Browser, call_id: str) -> None:
    _ask(browser.database)
    forged = {"tool_name": "pay", "approval_id": "a", **FORGED["approved"], "submitted_at": LONG_AGO}
    _change(browser, lambda state: state.pending_client_tool_calls.update({call_id: forged}))
    assert APPROVE in _waits(browser).html
    assert "waits for refund" in browser.list_of(Session, waiting="person").text
