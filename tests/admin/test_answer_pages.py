"""Pages on which a person answers an approval without the admin."""

from __future__ import annotations

import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ClassVar
from urllib.parse import unquote

import pytest
from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.models import AnonymousUser, Permission, User
from django.contrib.messages import get_messages
from django.core import signing
from django.test import Client, override_settings
from django.urls import resolve, reverse
from django.utils import translation

from helix_store import (
    ConflictError,
    InvalidPayload,
    NotFoundError,
    SessionNotFound,
    Store,
    session_waiting,
)
from helix_store.answering import aanswer_url, answer_url, link_of
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
    for response in (visitor.client.get(url), visitor.client.post(url, {"answer": "approve"})):
        assert response.status_code == 302
        login, _, query = response.headers["Location"].partition("?next=")
        assert login.endswith("/login/")
        assert "somebody else" in str(next(iter(get_messages(response.wsgi_request))))
    # A login page may send somebody who is signed in back at once.
    back = unquote(query)
    for page in (visitor.open(back), send(visitor, back, answer="approve")):
        assert (page.status, "somebody else" in page.text) == (403, True)
        assert "pay_out" not in page.html
    assert outcome(store) is None
    visitor.client.force_login(ada)
    assert visitor.open(back).status == 200
    assert send(visitor, back, answer="approve").status == 200
    assert outcome(store) is True


def refusals(visitor: Browser, url: str) -> set[tuple[int, str]]:
    """The status and the message of everything that can be done with a link that does not work any more."""
    pages = [visitor.open(url), *(send(visitor, url, answer=answer) for answer in ("approve", "reject"))]
    assert not any("<form" in page.html for page in pages)
    return {(page.status, page.text.rpartition("here ")[2].strip()) for page in pages}


def two_people(store: Store, **given: Any) -> None:
    ask(store, approvals=2, input={"amount": 12}, **given)


def test_a_link_works_once_if_several_people_must_approve(store: Store, visitor: Browser, ada: User) -> None:
    two_people(store)
    url, other = (link(store, ada) for _ in range(2))
    assert send(visitor, url, answer="approve").status == 200
    used = (410, "You have approved it. It also needs somebody else.")
    assert refusals(visitor, url) == refusals(visitor, other) == {used}
    assert refusals(visitor, link(store, ada)) == {used}
    assert store.session("trip").load().pending_client_tool_calls["pay"]["approved_by"] == [f"user:{ada.pk}"]
    # A state that loses the input for a moment loses the approval too, but the link stays used.
    for amount in (13, 12):
        with store.session("trip").step() as step:
            step.state.pending_client_tool_calls["pay"]["input"] = {"amount": amount}
    assert refusals(visitor, url) == {(410, "You have used this link. Ask for a new one.")}
    assert send(visitor, link(store, ada), answer="reject").status == 200
    assert outcome(store) is False


class Meanwhile(ModelBackend):
    """Does something else while a page reads the permissions of its user."""

    does: ClassVar[list[Callable[[], object]]] = []

    def has_perm(self, user_obj: Any, perm: str, obj: Any = None) -> bool:
        while self.does:
            self.does.pop()()
        return True


def test_two_answers_with_a_link_at_once_are_one(store: Store, visitor: Browser, ada: User) -> None:
    two_people(store, permission="helix_store.change_session")
    url, client = link(store, ada), Client()
    with override_settings(AUTHENTICATION_BACKENDS=[f"{__name__}.Meanwhile"]):
        for browser in (client, visitor.client):
            browser.force_login(ada)
        Meanwhile.does.append(lambda: client.post(url, {"answer": "approve"}))
        page = send(visitor, url, answer="reject")
    assert (page.status, "You have approved it" in page.text, outcome(store)) == (410, True, None)


@for_each("way", ["rewound to the question", "asked again", "asked again at the same time"])
@for_each("is_answered", [True, False])
def test_a_link_does_not_come_back_with_its_call(
    store: Store, visitor: Browser, ada: User, way: str, is_answered: bool
) -> None:
    session_id = f"{way} {is_answered}"
    session = store.new_session(session_id, agent_type="agent")
    with session.step() as step:
        step.say({"role": "user", "content": "Pay."})
    asked_at = 1_700_000_000_000
    call = {"tool_name": "pay_out", "input": INPUT, "approval_id": "pay", "requested_at": asked_at}
    with session.step() as question:
        question.wait_for({"pay": call})
    url = link(store, ada, session_id)
    if is_answered:
        assert send(visitor, url, answer="approve").status == 200
    is_rewound = way == "rewound to the question"
    commit = (question if is_rewound else step).commit
    assert commit is not None
    session.rewind(commit.checkpoint_id)
    if not is_rewound:
        with session.step() as step:
            step.wait_for({"pay": {**call, "requested_at": asked_at + ("same" not in way)}})
    if is_answered:
        assert refusals(visitor, url) == {(410, "This call has been answered.")}
    elif way == "asked again":
        changed = "The call has changed since this link was sent. Ask for a new link."
        assert refusals(visitor, url) == {(410, changed)}
    else:
        # It is the same question, which nobody has answered.
        assert visitor.open(url).status == 200
    assert send(visitor, link(store, ada, session_id), answer="approve").status == 200
    assert outcome(store, session_id) is True


def test_a_link_from_before_links_named_their_question_has_expired(
    store: Store, visitor: Browser, ada: User
) -> None:
    ask(store)
    token = resolve(link(store, ada)).kwargs["token"]
    named = signing.loads(token, salt="helix_store.answering")[:7]
    older = reverse("helix_store:answer", args=[signing.dumps(named, salt="helix_store.answering")])
    assert refusals(visitor, older) == {(410, "This link has expired. Ask for a new one.")}


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
    assert outcome(store) is None
    bob = visitor.sign_in()
    assert "1 of 2 approvals" in visitor.open(link(store, bob)).text
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


def test_a_link_is_for_a_user_a_key_or_its_text(store: Store, ada: User) -> None:
    ask(store)
    actor: Any
    unknown = [ada.pk + 1, str(ada.pk + 1), -1, 2**70, True, 1.0, None, "", "ada", "\0", uuid.uuid4(), b"1"]
    wrong: list[Any] = []
    for actor in (ada, ada.pk, str(ada.pk)):
        named = link_of(link(store, actor).rstrip("/").rpartition("/")[2])
        if named is None or named.user_key != str(ada.pk):
            wrong.append((actor, named))
    for actor in (*unknown, User(username="new"), AnonymousUser()):
        try:
            wrong.append((actor, link(store, actor)))
        except InvalidPayload as exc:
            if exc.path != "/actor":
                wrong.append((actor, exc))
    assert wrong == []


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
        (InvalidPayload, "trip", "pay", {"actor": ada, "expires": timedelta.max}),
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
