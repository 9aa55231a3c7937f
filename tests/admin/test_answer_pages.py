"""Pages on which a person answers an approval without the admin."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, Permission, User
from django.test import Client, override_settings
from django.utils import translation

from helix_store import (
    ConflictError,
    InvalidPayload,
    NotFoundError,
    SessionNotFound,
    Store,
    session_waiting,
)
from helix_store.answering import aanswer_url, answer_url
from tests.admin.conftest import Browser, Page
from tests.admin.test_shown_inputs import deep, innermost
from tests.cells import for_each

INPUT = {"amount": 12, "to": "Ada\u202e"}
PAGES = override_settings(HELIX_STORE={"ANSWER_PAGES": True})


@pytest.fixture(autouse=True)
def pages() -> Iterator[None]:
    with PAGES:
        yield


@pytest.fixture
def store(visitor: Browser) -> Store:
    return Store(visitor.database.alias)


@pytest.fixture
def ada(visitor: Browser) -> User:
    return visitor.sign_in()


def ask(store: Store, session_id: str = "trip", **given: Any) -> None:
    with store.new_session(session_id, agent_type="agent").step() as step:
        step.ask_approval("pay", "pay_out", given.pop("input", INPUT), **given)


def link(store: Store, user: Any, session_id: str = "trip", **given: Any) -> str:
    return answer_url(session_id, "pay", actor=user, using=store.alias, **given)


def send(visitor: Browser, url: str, **given: str) -> Page:
    response = visitor.client.post(url, given)
    return Page(response.status_code, response.content.decode())


def outcome(store: Store, session_id: str = "trip") -> Any:
    return store.session(session_id).load().pending_client_tool_calls["pay"].get("approved")


@for_each(("answer", "approved"), [("approve", True), ("reject", False)])
def test_a_person_answers_once(
    store: Store, visitor: Browser, ada: User, answer: str, approved: bool
) -> None:
    ask(store, answer)
    url = link(store, ada, answer)
    page = visitor.open(url)
    assert page.status == 200
    assert "pay_out" in page.text
    assert r"Ada\u202e" in page.text
    answered = send(visitor, url, answer=answer, reason="because")
    assert answered.status == 200
    assert "pay" in answered.text
    call = store.session(answer).load().pending_client_tool_calls["pay"]
    assert (call["approved"], call["actors"], call["reason"]) == (approved, [f"user:{ada.pk}"], "because")
    for again in (visitor.open(url), send(visitor, url, answer="reject")):
        assert (again.status, "has been answered" in again.text) == (410, True)
    assert outcome(store, answer) is approved


def test_the_link_is_for_one_user(store: Store, visitor: Browser, ada: User) -> None:
    ask(store)
    url = link(store, ada)
    visitor.client.logout()
    for response in (visitor.client.get(url), visitor.client.post(url, {"answer": "approve"})):
        assert response.status_code == 302
        assert "/login/?next=" in response.headers["Location"]
    visitor.sign_in(superuser=True)
    for page in (visitor.open(url), send(visitor, url, answer="approve")):
        assert (page.status, "somebody else" in page.text) == (403, True)
        assert "pay_out" not in page.html
    assert outcome(store) is None


def test_the_link_ends(store: Store, visitor: Browser, ada: User) -> None:
    ask(store)
    expired = link(store, ada, expires=timedelta(microseconds=1))
    url = link(store, ada)
    pages = {
        "has expired": [visitor.open(expired), send(visitor, expired, answer="approve")],
        "not valid": [visitor.open(url[:-3] + "/"), visitor.open("/answer/x/")],
    }
    store.sessions.restore_checkpoint("trip", store.session("trip").checkpoints().items[0].checkpoint_id)
    with store.session("trip").step() as step:
        step.state.pending_client_tool_calls = {}
    with store.session("trip").step() as step:
        step.ask_approval("pay", "pay_out", {"amount": 13})
    pages["has changed"] = [visitor.open(url), send(visitor, url, answer="approve")]
    store.session("trip").delete()
    pages["has been deleted"] = [visitor.open(url), send(visitor, url, answer="approve")]
    for text, found in pages.items():
        for page in found:
            assert page.status in (404, 410), text
            assert text in page.text
            assert "<form" not in page.html


def test_a_permission_and_a_requester_count(store: Store, visitor: Browser, ada: User) -> None:
    ask(store, "permitted", permission="helix_store.change_session")
    ask(store, "requested", requester=ada)
    urls = {name: link(store, ada, name) for name in ("permitted", "requested")}
    for name, url in urls.items():
        assert "may not answer" in visitor.open(url).text, name
        assert (send(visitor, url, answer="approve").status, outcome(store, name)) == (409, None)
    permission = Permission.objects.get(codename="change_session", content_type__app_label="helix_store")
    ada.user_permissions.add(permission)
    assert send(visitor, urls["permitted"], answer="approve").status == 200
    assert outcome(store, "permitted") is True


def test_two_approvals_need_two_people(store: Store, visitor: Browser, ada: User) -> None:
    ask(store, approvals=2)
    url = link(store, ada)
    assert "0 of 2 approvals" in visitor.open(url).text
    assert send(visitor, url, answer="approve").status == 200
    page = visitor.open(url)
    assert "1 of 2 approvals" in page.text
    assert "You have approved it" in page.text
    assert 'value="approve"' not in page.html
    assert send(visitor, url, answer="approve").status == 409
    assert outcome(store) is None
    bob = visitor.sign_in()
    assert send(visitor, link(store, bob), answer="approve").status == 200
    assert outcome(store) is True


def test_an_editable_input_is_shown_with_its_changes_before_it_is_approved(
    store: Store, visitor: Browser, ada: User
) -> None:
    ask(store, input={"amount": 12}, editable=True)
    url = link(store, ada)
    assert "Change the input" in visitor.open(url).text
    wrong = send(visitor, url, answer="approve", edit="{")
    assert (wrong.status, "This is not JSON" in wrong.text) == (400, True)
    text = '{"amount": 13}'
    shown = send(visitor, url, answer="approve", edit=text)
    assert (shown.status, outcome(store)) == (200, None)
    assert "/amount" in shown.text
    (seen,) = [
        attributes["value"]
        for tag, attributes in shown.elements.started
        if tag == "input" and attributes.get("name") == "seen"
    ]
    assert send(visitor, url, answer="approve", edit=text, seen=str(seen)).status == 200
    call = store.session("trip").load().pending_client_tool_calls["pay"]
    assert (call["approved"], call["input"]) == (True, {"amount": 13})


def test_the_form_cannot_name_another_call_or_digest(store: Store, visitor: Browser, ada: User) -> None:
    ask(store)
    ask(store, "other")
    url = link(store, ada)
    page = send(visitor, url, answer="approve", call="x", approval="y", digest="z", shown="")
    assert (page.status, outcome(store), outcome(store, "other")) == (200, True, None)
    assert send(visitor, link(store, ada, "other"), answer="result", value="1").status == 400
    assert outcome(store, "other") is None


def test_a_long_input_is_shown_whole(store: Store, visitor: Browser, ada: User) -> None:
    ask(store, input=["x" * 30_000, "the end"])
    url = link(store, ada)
    assert "the end" in visitor.open(url).text
    assert send(visitor, url, answer="approve").status == 200
    assert outcome(store) is True


@pytest.mark.thorough
def test_a_long_and_deep_input_is_shown_whole_at_little_cost(
    store: Store, visitor: Browser, ada: User
) -> None:
    """An input of 972 KiB took 12 seconds and 400 MB."""
    before, after = (deep(True, 243 * 1024) for _ in range(2))
    inner = innermost(after)
    inner[:] = [2] * len(inner)
    ask(store, input=before, approvals=2, editable=True)
    url = link(store, ada)
    seen = visitor.open(url).text
    assert seen.count("1, 1") > 50_000
    assert "Change the input" not in seen
    store.sessions.submit_tool_result(
        "trip", "pay", approved=True, approval_id="pay", actor="bob", input=after
    )
    tracemalloc.start()
    page = visitor.open(link(store, ada))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "This was requested" in page.text
    assert page.text.count("1, 1") > 50_000
    assert page.text.count("2, 2") > 50_000
    assert peak < 15e6


def test_the_page_is_protected(
    store: Store, visitor: Browser, ada: User, caplog: pytest.LogCaptureFixture
) -> None:
    ask(store)
    url = link(store, ada)
    response = visitor.client.get(url)
    assert response.headers["Referrer-Policy"] == "same-origin"
    assert response.headers["X-Frame-Options"] == "DENY"
    assert "no-store" in response.headers["Cache-Control"]
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(ada)
    assert strict.post(url, {"answer": "approve"}).status_code == 403
    assert visitor.client.put(url).status_code == 405
    with override_settings(HELIX_STORE={}):
        assert visitor.open(url).status == 404
        with caplog.at_level("WARNING", "helix_store.answering"):
            assert visitor.open(link(store, ada)).status == 404
        assert "ANSWER_PAGES" in caplog.text
    assert outcome(store) is None


def test_a_link_needs_an_open_approval_and_a_user(store: Store, ada: User) -> None:
    ask(store)
    store.sessions.add_pending_tool_calls("trip", {"ask": {"tool_name": "ask"}})
    cases: list[tuple[type[Exception], str, str, dict[str, Any]]] = [
        (SessionNotFound, "none", "pay", {"actor": ada}),
        (NotFoundError, "trip", "none", {"actor": ada}),
        (InvalidPayload, "trip", "ask", {"actor": ada}),
        (InvalidPayload, "trip", "pay", {"actor": "ada"}),
        (InvalidPayload, "trip", "pay", {"actor": AnonymousUser()}),
        (InvalidPayload, "trip", "pay", {"actor": ada, "expires": timedelta(0)}),
    ]
    for error, session_id, call, given in cases:
        with pytest.raises(error):
            answer_url(session_id, call, using=store.alias, **given)
    with pytest.raises(SessionNotFound):
        answer_url("trip", "pay", actor=ada, using=store.alias, tenant="other")
    store.sessions.submit_tool_result("trip", "pay", approved=True, approval_id="pay")
    with pytest.raises(ConflictError):
        link(store, ada)


def test_a_receiver_sends_a_link(store: Store, visitor: Browser, ada: User) -> None:
    sent: list[str] = []

    def receive(session_id: str, tool_call_ids: list[str], tenant: str, using: str, **_: Any) -> None:
        sent.extend(
            answer_url(session_id, call, actor=ada, tenant=tenant, using=using) for call in tool_call_ids
        )

    session_waiting.connect(receive)
    try:
        ask(store)
    finally:
        session_waiting.disconnect(receive)
    (url,) = sent
    assert visitor.open(url).status == 200


def test_the_page_speaks_german(store: Store, visitor: Browser, ada: User) -> None:
    ask(store)
    with translation.override("de"):
        response = visitor.client.get(link(store, ada))
    text = response.content.decode()
    assert '<html lang="de"' in text
    for words in ("Ein Agent wartet auf Ihre Antwort", "Genehmigen", "Ablehnen"):
        assert words in text, words


def test_the_call_has_an_async_twin() -> None:
    assert aanswer_url.__name__ == "aanswer_url"
