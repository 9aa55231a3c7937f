"""What a person does in the admin: by the store, with a permission, confirmed, guarded and logged."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.db import connections, transaction
from django.db.models import Model
from django.test import Client, RequestFactory, override_settings
from django.urls import reverse

from helix_store.actions.answers import ANSWER
from helix_store.actions.sessions import BRANCH, DELETE, INTERRUPT, MARK_FAILED, RESTORE
from helix_store.actions.upkeep import CLEAN_UP
from helix_store.admin import SessionAdmin
from helix_store.admin.operating import list_action, run
from helix_store.admin.sections import SECTIONS
from helix_store.core.types import RunStatus, SessionState, StepInfo
from helix_store.models import Session
from tests.admin.conftest import Browser, EverythingOn
from tests.admin.rows import store_of
from tests.cells import for_each
from tests.databases import CommittedDatabase

SESSION_OPERATIONS: Final = SessionAdmin.row_operations


def address(session: Session, name: str) -> str:
    return reverse("admin:helix_store_session_operation", args=[session.pk, name])


def row_of(browser: Browser, session_id: str = "s") -> Session:
    sessions = Session.objects.using(browser.database.alias)
    return sessions.get(tenant=browser.database.tenant, session_id=session_id)


def step(browser: Browser, number: int, session_id: str = "s") -> str:
    """Commit a step with one message, and return the id of its checkpoint."""
    store = store_of(browser.database)
    state = store.load_state(session_id)
    assert state is not None
    state.custom_state = {"step": number}
    message = {"role": "user", "content": f"message {number}"}
    commit = store.save_state_and_promote_staging(
        session_id, state, [message], StepInfo(f"step-{number}", number)
    )
    return commit.checkpoint_id


def waiting_session(browser: Browser, **call: Any) -> SessionState:
    store = store_of(browser.database)
    state = store.create_session("s", agent_type="a")
    store.start_run("s")
    store.suspend(
        "s",
        kind=RunStatus.SUSPENDED_CLIENT_TOOL,
        context={},
        pending={"call-1": {"tool_name": "book", "input": {"to": "Oslo"}, **call}},
    )
    return state


def shown_digest(browser: Browser, session_id: str = "s", call: str = "call-1") -> str:
    """The digest that the page of the session shows for an open call."""
    state = store_of(browser.database).load_state(session_id)
    assert state is not None
    return str(state.pending_client_tool_calls.get(call, {}).get("digest", ""))


def told(browser: Browser, url: str, given: dict[str, Any]) -> list[str]:
    """The messages that the page after the POST shows, without those of earlier pages."""
    browser.client.cookies.pop("messages", None)
    response = browser.client.post(url, given)
    assert response.status_code == 302, response.status_code
    return [str(message) for message in get_messages(response.wsgi_request)]


def log_of(session: Session) -> list[tuple[int, str, str]]:
    entries = LogEntry.objects.filter(object_id=str(session.pk)).order_by("pk")
    return list(entries.values_list("action_flag", "object_repr", "change_message"))


# --- Each operation -------------------------------------------------------------------------------


def test_a_run_is_interrupted_with_a_reason(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    run = store.start_run("s")
    session = row_of(browser)
    (message,) = told(browser, address(session, "interrupt"), {"reason": "costs too much"})
    assert "stops at its next step" in message
    request = store.check_interrupt("s", run_id=run.run_id)
    assert request is not None
    assert (str(request.kind), request.reason) == ("interrupt", "costs too much")
    assert log_of(session) == [(CHANGE, "s", message)]


def test_an_approval_is_given_and_a_second_answer_is_refused(browser: Browser) -> None:
    waiting_session(browser, approval_id="approval-1")
    session = row_of(browser)
    given = {"call": "call-1", "approval": "approval-1", "answer": "approve", "reason": "fine"}
    given["digest"] = shown_digest(browser)
    assert told(browser, address(session, "answer"), given) == ["'call-1': approved."]
    (refusal,) = told(browser, address(session, "answer"), {**given, "answer": "reject"})
    assert "somebody has already answered this call" in refusal
    (answer,) = store_of(browser.database).take_tool_results("s").values()
    assert answer["approved"] is True
    assert answer["reason"] == "fine"
    assert log_of(session) == [(CHANGE, "s", "'call-1': approved.")]


@for_each(
    ("answer", "value", "expected"),
    [
        ("result", '{"seat": 4}', {"result": {"seat": 4}}),
        ("result", "a seat at the window", {"result": "a seat at the window"}),
        ("result", "[" * 5_000, {"result": "[" * 5_000}),
        ("error", '"sold out"', {"error": "sold out"}),
    ],
)
def test_a_call_is_answered_with_a_value(browser: Browser, answer: str, value: str, expected: Any) -> None:
    waiting_session(browser)
    told(browser, address(row_of(browser), "answer"), {"call": "call-1", "answer": answer, "value": value})
    (stored,) = store_of(browser.database).take_tool_results("s").values()
    del stored["submitted_at"], stored["actors"]
    assert stored == expected


def test_an_answer_of_the_wrong_kind_is_refused_in_words(browser: Browser) -> None:
    waiting_session(browser)
    given = {"call": "call-1", "approval": "", "answer": "approve"}
    (refusal,) = told(browser, address(row_of(browser), "answer"), given)
    assert refusal.startswith("Nothing was done:")
    assert "this call asks for a result" in refusal
    assert log_of(row_of(browser)) == []


def test_a_checkpoint_is_restored(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    first = step(browser, 1)
    step(browser, 2)
    session = row_of(browser)
    given = {"checkpoint": first, "expected": session.version, "confirmed": "yes"}
    (message,) = told(browser, address(session, "restore"), given)
    assert f"version {session.version + 1}" in message
    state = store.load_state("s")
    assert state is not None
    assert state.custom_state == {"step": 1}
    assert store.get_message_count("s") == 1


def test_a_branch_leads_to_the_new_session(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    checkpoint = step(browser, 1)
    session = row_of(browser)
    given = {"checkpoint": checkpoint, "title": "What if", "next": "/admin/"}
    response = browser.client.post(address(session, "branch"), given)
    branch = Session.objects.using(browser.database.alias).exclude(pk=session.pk).get()
    assert branch.title == "What if"
    assert response["Location"] == reverse("admin:helix_store_session_change", args=[branch.pk])


def test_checkpoints_are_pruned(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    for number in range(1, 4):
        step(browser, number)
    session = row_of(browser)
    assert told(browser, address(session, "prune-checkpoints"), {"keep": 1, "confirmed": "yes"}) == [
        "Deleted 2 checkpoints."
    ]
    assert store.list_checkpoints("s").total == 1
    assert log_of(session) == [(CHANGE, "s", "Deleted 2 checkpoints.")]


def test_a_session_is_marked_as_failed(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    session = row_of(browser)
    given = {"expected": "active", "reason": "worker lost", "confirmed": "yes"}
    told(browser, address(session, "mark-failed"), given)
    state = store.load_state("s")
    assert state is not None
    assert (str(state.status), state.failure_reason) == ("failed", "worker lost")


def test_a_deleted_session_leads_to_the_list_and_stays_in_the_log(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    session = row_of(browser)
    given = {"expected": session.version, "confirmed": "yes"}
    response = browser.client.post(address(session, "delete-session"), given)
    assert response["Location"] == reverse("admin:helix_store_session_changelist")
    assert not store_of(browser.database).session_exists("s")
    assert log_of(session) == [(DELETION, "s", "Deleted 1 sessions.")]
    (refusal,) = told(browser, address(session, "delete-session"), given)
    assert "may have been deleted" in refusal


def test_expired_sessions_are_cleaned_up(browser: Browser) -> None:
    past = datetime.now(UTC) - timedelta(hours=1)
    store = store_of(browser.database)
    store.create_session("s", agent_type="a", expires_at=int(past.timestamp() * 1_000))
    url = reverse("admin:helix_store_session_table_operation", args=[CLEAN_UP.name])
    (message,) = told(browser, url, {"confirmed": "yes"})
    assert message.startswith("Found 1 expired sessions: 1 are marked as failed")
    assert row_of(browser).failure_reason == "session_expired"
    assert LogEntry.objects.filter(object_id=None, change_message=message).exists()


# --- Guards ---------------------------------------------------------------------------------------


def test_a_page_that_is_older_than_the_last_step_changes_nothing(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    checkpoint = step(browser, 1)
    shown = row_of(browser)
    step(browser, 2)
    before = store.load_state("s")
    for name in ("restore", "delete-session"):
        given = {"checkpoint": checkpoint, "expected": shown.version, "confirmed": "yes"}
        (refusal,) = told(browser, address(shown, name), given)
        assert refusal == (
            "Nothing was done: an agent or another person has changed the session since this page was shown "
            f"(version {shown.version}, now {shown.version + 1}). Look at it again, then repeat."
        )
    assert store.load_state("s") == before
    assert log_of(shown) == []


@pytest.mark.thorough
@for_each("expected", ["", "None", "x", "9" * 5_000, "-1", "\u0661", "active", "paused"])
def test_a_form_without_the_guard_of_its_page_changes_nothing(browser: Browser, expected: str) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    store.update_status("s", "interrupted")
    session = row_of(browser)
    for name in ("mark-failed", "delete-session"):
        (refusal,) = told(browser, address(session, name), {"expected": expected, "confirmed": "yes"})
        assert refusal.startswith("Nothing was done: an agent or another person has changed")
    assert str(row_of(browser).status) == "interrupted"


DESTRUCTIVE: Final = [each.name for each in SESSION_OPERATIONS if each.is_destructive]


@for_each("name", DESTRUCTIVE)
def test_a_destructive_operation_is_confirmed_on_a_page(browser: Browser, name: str) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    checkpoint = step(browser, 1)
    session = row_of(browser)
    given = {"checkpoint": checkpoint, "keep": 0, "expected": session.version}
    response = browser.client.post(address(session, name), given)
    assert response.status_code == 200
    page = response.content.decode()
    (operation,) = [each for each in SESSION_OPERATIONS if each.name == name]
    assert str(operation.warning) in page
    assert f'name="expected" value="{session.version}"' in page
    assert row_of(browser).version == session.version
    assert log_of(session) == []


@pytest.mark.thorough
@for_each("operation", SESSION_OPERATIONS, ids=lambda each: each.name)
def test_opening_an_address_of_an_operation_changes_nothing(browser: Browser, operation: Any) -> None:
    store = store_of(browser.database)
    waiting_session(browser)
    before = (store.load_state("s"), store.check_interrupt("s"))
    query = {"call": "call-1", "answer": "result", "value": "1", "confirmed": "yes", "keep": "0"}
    page = browser.open(address(row_of(browser), operation.name), **query)
    assert page.status == 200
    assert (store.load_state("s"), store.check_interrupt("s")) == before
    assert log_of(row_of(browser)) == []


def test_the_address_of_an_answer_shows_the_call_and_fills_in_nothing(browser: Browser) -> None:
    waiting_session(browser, approval_id="approval-1")
    query = {"call": "call-1", "approval": "approval-1", "answer": "approve", "reason": "the boss agreed"}
    page = browser.open(address(row_of(browser), "answer"), **query)
    assert "the boss agreed" not in page.html
    assert "Open calls book call-1" in page.text
    assert "Oslo" in page.text


def test_an_answer_that_is_not_valid_is_explained_beside_its_call(browser: Browser) -> None:
    waiting_session(browser, approval_id="approval-1")
    given = {"call": "call-1", "approval": "approval-1", "answer": "approve", "reason": "x" * 1_001}
    page = browser.client.post(address(row_of(browser), "answer"), given).content.decode()
    assert "at most 1000 characters" in page
    assert "Oslo" in page
    assert log_of(row_of(browser)) == []


@for_each("name", ["interrupt", "branch", "delete-session", "prune-checkpoints"])
def test_the_address_of_an_operation_fills_in_no_field_that_a_person_decides(
    browser: Browser, name: str
) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    query = {"reason": "planted", "title": "planted", "keep": "987", "keep_usage": ""}
    page = browser.open(address(row_of(browser), name), **query)
    assert "planted" not in page.html
    assert 'value="987"' not in page.html
    assert ('name="keep_usage"' in page.html) is ("checked" in page.html)


def test_the_confirmation_of_a_restore_names_its_checkpoint(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    checkpoint = step(browser, 1)
    assert checkpoint in browser.open(address(row_of(browser), "restore"), checkpoint=checkpoint).text


def test_a_form_of_another_site_is_refused(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    visitor = Client(enforce_csrf_checks=True)
    visitor.cookies = browser.client.cookies
    response = visitor.post(address(row_of(browser), "interrupt"))
    assert response.status_code == 403
    assert store_of(browser.database).check_interrupt("s") is None


@for_each("target", ["https://elsewhere.example/", "//elsewhere.example", "javascript:alert(1)"])
def test_an_operation_leads_to_no_other_site(browser: Browser, target: str) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    session = row_of(browser)
    response = browser.client.post(address(session, "interrupt"), {"next": target})
    assert response["Location"] == reverse("admin:helix_store_session_change", args=[session.pk])


# --- Permissions ----------------------------------------------------------------------------------


def _sign_in(browser: Browser, *codenames: str) -> None:
    permissions = Permission.objects.filter(codename__in=codenames, content_type__app_label="helix_store")
    assert permissions.count() == len(codenames)
    browser.sign_in(*permissions)


WHO: Final[dict[str, tuple[Callable[[Browser], object], set[str]]]] = {
    "anonymous": (lambda visitor: None, set()),
    "staff without permissions": (lambda visitor: visitor.sign_in(), set()),
    "viewer": (lambda visitor: _sign_in(visitor, "view_session"), set()),
    "changer": (lambda visitor: _sign_in(visitor, "change_session"), {"change"}),
    "deleter": (lambda visitor: _sign_in(visitor, "view_session", "delete_session"), {"delete"}),
    "deleter who may not view": (lambda visitor: _sign_in(visitor, "delete_session"), set()),
    "superuser": (
        lambda visitor: visitor.sign_in(superuser=True),
        {"change", "delete", "checkpoint", "post", "effect"},
    ),
}


@pytest.mark.thorough
@for_each("who", WHO)
def test_an_operation_needs_its_permission_and_that_to_view_the_page(visitor: Browser, who: str) -> None:
    sign_in, permitted = WHO[who]
    store = store_of(visitor.database)
    waiting_session(visitor)
    session = row_of(visitor)
    sign_in(visitor)
    before = (store.load_state("s"), store.check_interrupt("s"))
    urls = {each.name: address(session, each.name) for each in SESSION_OPERATIONS}
    urls[CLEAN_UP.name] = reverse("admin:helix_store_session_table_operation", args=[CLEAN_UP.name])
    for operation in (*SESSION_OPERATIONS, CLEAN_UP):
        needed = operation.permission if operation.model is Session else str(operation.model._meta.model_name)
        refused = 302 if who == "anonymous" else 403
        expected = 200 if needed in permitted else refused
        assert visitor.client.get(urls[operation.name]).status_code == expected, operation.name
        if needed not in permitted:
            given = {"call": "call-1", "answer": "result", "keep": 0, "confirmed": "yes", "expected": ""}
            assert visitor.client.post(urls[operation.name], given).status_code == refused, operation.name
    assert (store.load_state("s"), store.check_interrupt("s")) == before
    assert not LogEntry.objects.filter(object_id=str(session.pk)).exists()


@pytest.mark.thorough
@for_each("who", WHO)
def test_a_session_page_offers_what_its_user_may_do_and_no_more(visitor: Browser, who: str) -> None:
    sign_in, permitted = WHO[who]
    waiting_session(visitor)
    step(visitor, 1)
    store_of(visitor.database).post_message("s", {"role": "user", "content": "hello"})
    session = row_of(visitor)
    sign_in(visitor)
    may_view = who not in ("anonymous", "staff without permissions", "deleter who may not view")
    offered: set[str] = set()
    for section in SECTIONS:
        page = visitor.page_of(session, section=section.name)
        # Items and conversations are those of the app or of any other one, each with its own permission.
        is_hidden = (section.needs or section.name in ("items", "conversation")) and who != "superuser"
        expected = 302 if who == "anonymous" else 200 if may_view and not is_hidden else 403
        assert page.status == expected, section.name
        offered |= set(re.findall(r"/operation/([a-z-]+)/", page.html))
        # Whatever the page offers can be opened.
        for tag, attributes in page.elements.started:
            if tag == "a" and "/operation/" in str(attributes.get("href")):
                assert visitor.open(str(attributes["href"])).status == 200
        assert visitor.client.post(f"{_page_of(session)}?section={section.name}").status_code in (302, 403)
    names = {
        "change": {"interrupt", "abort", "mark-failed", "answer", "run-again"},
        "delete": {"delete-session"},
    }
    names["checkpoint"] = {"prune-checkpoints", "restore", "branch"}
    names["post"] = {"post", "withdraw-post"}
    # There is no unknown effect.
    names["effect"] = set()
    assert offered == set().union(*(names[each] for each in permitted))


def _page_of(session: Session) -> str:
    return reverse("admin:helix_store_session_change", args=[session.pk])


def test_an_operation_that_does_not_exist_is_not_found(browser: Browser) -> None:
    store_of(browser.database).create_session("s", agent_type="a")
    session = row_of(browser)
    assert browser.open(address(session, "unknown")).status == 404
    assert browser.open(address(session, CLEAN_UP.name)).status == 404
    # A row that is not there leads to the list.
    url = reverse("admin:helix_store_session_operation", args=[session.pk + 1, "interrupt"])
    assert browser.open(url).status == 302


def test_of_two_people_who_act_on_the_same_page_one_is_refused(browser: Browser) -> None:
    """Both hold a page of the same version; the row is locked before the version is compared."""
    store_of(browser.database).create_session("s", agent_type="a")
    checkpoint = step(browser, 1)
    session = row_of(browser)
    given = {"checkpoint": checkpoint, "expected": session.version, "confirmed": "yes"}
    barrier = threading.Barrier(2)
    said: list[str] = []
    user = User.objects.get(username__startswith="user-")

    def act() -> None:
        request = RequestFactory().post("/")
        request.user = user
        try:
            barrier.wait()
            outcome = run(request, RESTORE, session, given, expected=str(session.version))
            said.append(f"{outcome.is_done} {outcome.message}")
        finally:
            connections.close_all()

    threads = [threading.Thread(target=act) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused, done = sorted(said)
    assert done.startswith("True Restored the checkpoint")
    assert refused.startswith("False Nothing was done: an agent or another person has changed the session")
    assert row_of(browser).version == session.version + 1


# --- Lists ----------------------------------------------------------------------------------------


def _act(browser: Browser, action: str, sessions: list[Session], **given: Any) -> Any:
    selected = {"action": action, "_selected_action": [each.pk for each in sessions], **given}
    return browser.client.post(reverse("admin:helix_store_session_changelist"), selected)


@pytest.fixture
def actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SessionAdmin, "actions", [list_action(each) for each in (INTERRUPT, MARK_FAILED, DELETE)]
    )


@pytest.mark.usefixtures("actions")
def test_an_action_of_a_list_runs_on_each_selected_row(browser: Browser) -> None:
    store = store_of(browser.database)
    for name in ("one", "two", "three"):
        store.create_session(name, agent_type="a")
    response = _act(browser, "interrupt", [row_of(browser, "one"), row_of(browser, "two")])
    assert [str(each) for each in get_messages(response.wsgi_request)] == ["Interrupt: 2 done."]
    asked = {name: store.check_interrupt(name) is not None for name in ("one", "two", "three")}
    assert asked == {"one": True, "two": True, "three": False}
    assert len(log_of(row_of(browser, "one"))) == 1


@pytest.mark.usefixtures("actions")
def test_a_destructive_action_of_a_list_refuses_rows_that_changed_since_its_page(browser: Browser) -> None:
    store = store_of(browser.database)
    for name in ("one", "two"):
        store.create_session(name, agent_type="a")
    rows = [row_of(browser, "one"), row_of(browser, "two")]
    asked = _act(browser, "delete_session", rows)
    assert asked.status_code == 200
    assert str(DELETE.warning) in asked.content.decode()
    store.append_messages("two", [{"role": "user", "content": "the agent goes on"}])
    expected = {f"expected-{row.pk}": row.version for row in rows}
    response = _act(browser, "delete_session", rows, confirmed="yes", **expected)
    done, refused = [str(each) for each in get_messages(response.wsgi_request)]
    assert done == "Delete: 1 done."
    assert refused.startswith("two: Nothing was done: an agent or another person has changed the session")
    assert not store.session_exists("one")
    assert store.session_exists("two")


@pytest.mark.usefixtures("actions")
def test_a_list_offers_the_actions_that_the_user_may_run(visitor: Browser) -> None:
    store_of(visitor.database).create_session("s", agent_type="a")
    for codenames, offered in (
        (["view_session"], set()),
        (["change_session"], {"interrupt", "mark_failed"}),
        (["view_session", "delete_session"], {"delete_session"}),
    ):
        _sign_in(visitor, *codenames)
        html = visitor.list_of(Session).html
        names = {"interrupt", "mark_failed", "delete_session"}
        assert {name for name in names if f'<option value="{name}">' in html} == offered
        for name in names - offered:
            _act(visitor, name, [row_of(visitor)], confirmed="yes", **{f"expected-{row_of(visitor).pk}": 1})
    assert store_of(visitor.database).session_exists("s")
    assert row_of(visitor).status == "active"


def test_the_operations_of_a_session_have_names_that_differ() -> None:
    names = [each.name for each in SESSION_OPERATIONS]
    assert len(set(names)) == len(names)
    assert {ANSWER, BRANCH, RESTORE} <= set(SESSION_OPERATIONS)


# --- What is lost


def test_a_restore_says_which_step_it_goes_back_to_and_what_is_lost(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    for number in (1, 2, 3):
        step(browser, number)
    first = store.list_checkpoints("s").items[-1].checkpoint_id
    page = browser.open(address(row_of(browser), "restore"), checkpoint=first)
    lost = page.text.partition("What is lost")[2]
    assert re.match(r" Back to step 1 \S+ Messages after it 2 Checkpoints after it 2 Staged changes 0", lost)
    for unknown in ("x", "\x00", "x" * 400, "cpv1-s-s9-t1-abcdef"):
        page = browser.open(address(row_of(browser), "restore"), checkpoint=unknown)
        assert (page.status, "What is lost" in page.text) == (200, False)


def test_a_deletion_says_how_much_of_each_kind_is_lost(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a")
    for number in (1, 2):
        step(browser, number)
    store.create_session("below", agent_type="a", parent_session_id="s")
    store.add_sub_session_refs("s", [{"sub_session_id": "below", "agent_type": "a"}])
    store.append_messages("below", [{"role": "user", "content": "hello"}])
    store.create_session("another", agent_type="a")
    row = Session.objects.using(browser.database.alias).get(session_id="s")
    page = browser.open(address(row, "delete-session"))
    lost = page.text.partition("What is lost")[2]
    assert "Sessions 2" in lost
    assert "Messages 3" in lost
    assert "Checkpoints" in lost
    assert "Posts" not in lost
    assert len(page.statements) <= 12


class LogElsewhere(EverythingOn):
    """Routes the admin, with its users and log, to another database than the app."""

    def __init__(self, alias: str, others: str) -> None:
        super().__init__(alias)
        self.others = others

    def db_for_write(self, model: type[Model], **hints: Any) -> str:
        return self.alias if model._meta.app_label == "helix_store" else self.others

    db_for_read = db_for_write

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return app_label != "helix_store" or db == self.alias


def test_a_log_in_another_database_has_what_was_committed(
    sqlite_db: CommittedDatabase, postgres_db: CommittedDatabase
) -> None:
    store_of(postgres_db).create_session("s", agent_type="a")
    session = Session.objects.using(postgres_db.alias).get(tenant=postgres_db.tenant, session_id="s")
    with override_settings(DATABASE_ROUTERS=[LogElsewhere(postgres_db.alias, sqlite_db.alias)]):
        request = RequestFactory().post("/")
        request.user = User.objects.create_superuser(f"admin of {sqlite_db.tenant}")
        entries = LogEntry.objects.filter(user_id=request.user.pk)

        def mark() -> None:
            assert run(
                request, MARK_FAILED, session, {"reason": "by hand"}, expected=MARK_FAILED.shown(session)
            ).is_done

        with transaction.atomic(using=postgres_db.alias):
            mark()
            transaction.set_rollback(True, using=postgres_db.alias)
        assert not entries.exists()
        mark()
        assert [entry.object_id for entry in entries] == [str(session.pk)]
