"""What the pages refuse, hide, and survive."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.db import OperationalError
from django.db.models import Model, TextField, Value
from django.db.models.functions import Cast
from django.urls import reverse

from helix_store.admin.elements import HIDDEN
from helix_store.core.types import StepInfo
from helix_store.models import (
    Checkpoint,
    Message,
    Run,
    Session,
    StagedChange,
    SubSessionRef,
)
from tests.admin.conftest import Browser, Page
from tests.admin.rows import MODELS, rows_of, store_of, write_session
from tests.cells import for_each

HOSTILE = (
    "\"'><script>alert('stored')</script><img src=x onerror=alert(1)>{{7*7}}{% now 'Y' %}</pre></details>"
)


def _row(browser: Browser, session_id: str) -> Session:
    sessions = Session.objects.using(browser.database.alias)
    return sessions.get(tenant=browser.database.tenant, session_id=session_id)


def _all_pages(browser: Browser, session: Session) -> dict[str, Page]:
    lists = {f"list of {model.__name__}": browser.list_of(model) for model in MODELS}
    pages = {f"page of {type(row).__name__}": browser.page_of(row) for row in rows_of(session)}
    sections = {f"section {name}": page for name, page in browser.sections_of(session).items()}
    return lists | pages | sections


@pytest.mark.thorough
def test_stored_text_is_inert_on_every_page(browser: Browser) -> None:
    session = write_session(browser.database, HOSTILE, session_id=HOSTILE)
    for name, page in _all_pages(browser, session).items():
        assert page.status == 200, name
        assert "alert('stored')" in page.text, name
        elements = page.elements.started
        assert [tag for tag, attributes in elements if attributes.get("src") == "x"] == [], name
        assert [tag for tag, attributes in elements if "onerror" in attributes] == [], name
        assert "<script>alert" not in page.html, name
        assert "{{7*7}}" in page.text, name


@pytest.mark.thorough
def test_text_that_cannot_be_encoded_or_seen_is_shown_as_escapes(browser: Browser) -> None:
    store = store_of(browser.database)
    store.create_session("s", agent_type="a", title="turned \u202e around")
    text = "lone \ud800 pair \ud800\udc00 nul \x00 turned \u202e"
    state = store.load_state("s")
    assert state is not None
    state.custom_state = {text: text}
    store.save_state_and_promote_staging("s", state, [{"role": "user", "content": text}], StepInfo("1", 1))
    store.start_run("s")
    session = _row(browser, "s")
    message = Message.objects.using(browser.database.alias).get(session=session)
    sections = browser.sections_of(session)
    pages = sections["state"], sections["conversation"], browser.page_of(message), browser.list_of(Message)
    for page in pages:
        assert page.status == 200
        assert "lone \\ud800 pair \\ud800\\udc00 nul \\u0000 turned \\u202e" in page.text
    assert "turned \\u202e around" in browser.list_of(Session).text


def _damage(browser: Browser, session: Session, broken: Any) -> None:
    alias = browser.database.alias
    Message.objects.using(alias).filter(session=session).update(payload=broken)
    Checkpoint.objects.using(alias).filter(session=session).update(payload=broken, envelope=broken)
    Run.objects.using(alias).filter(session=session).update(error=broken)
    StagedChange.objects.using(alias).filter(session=session).update(payload=broken)
    SubSessionRef.objects.using(alias).filter(session=session).update(output=broken)
    Session.objects.using(alias).filter(pk=session.pk).update(
        pending_client_tool_calls=broken, suspension_context=broken, tracing_context=broken
    )


def _check_that_pages_survive(browser: Browser, session: Session) -> None:
    store = store_of(browser.database)
    store.create_session("readable", agent_type="a")
    store.append_messages("readable", [{"role": "user", "content": "still here"}])
    pages = _all_pages(browser, session)
    for name, page in pages.items():
        assert page.status == 200, name
    assert "This message cannot be read." in pages["list of Message"].text
    assert "still here" in pages["list of Message"].text
    assert "cannot be read as JSON" in pages["section state"].text
    assert pages["section waits"].text.count("cannot be read as JSON") == 3
    assert "This message cannot be read." in pages["section conversation"].text


@pytest.mark.thorough
@for_each("broken", ["{not json", "~\u2603", "[" * 3_000, "x" * 5_000, ""])
def test_a_row_that_cannot_be_read_breaks_no_page(browser: Browser, broken: str) -> None:
    session = write_session(browser.database)
    _damage(browser, session, broken)
    _check_that_pages_survive(browser, session)


@pytest.mark.thorough
@pytest.mark.parametrize("length", [1, 5_000])
def test_text_that_is_not_utf_8_breaks_no_page(sqlite_browser: Browser, length: int) -> None:
    session = write_session(sqlite_browser.database)
    _damage(sqlite_browser, session, Cast(Value(b"\xff" * length), TextField()))
    with pytest.raises(OperationalError):
        Message.objects.using(sqlite_browser.database.alias).get(session=session)
    _check_that_pages_survive(sqlite_browser, session)


@pytest.mark.thorough
@for_each("document", ["[]", '"text"', "null", "1"])
def test_a_document_of_another_shape_breaks_no_page(browser: Browser, document: str) -> None:
    session = write_session(browser.database)
    alias = browser.database.alias
    Message.objects.using(alias).filter(session=session).update(payload=document)
    Checkpoint.objects.using(alias).filter(session=session).update(payload=document, envelope=document)
    for name, page in _all_pages(browser, session).items():
        assert page.status == 200, name


def test_a_session_without_its_state_has_a_page(browser: Browser) -> None:
    session = write_session(browser.database)
    Checkpoint.objects.using(browser.database.alias).filter(session=session).delete()
    assert "The state of this session is missing." in browser.page_of(session, section="state").text


def test_a_message_without_its_session_breaks_no_page(browser: Browser) -> None:
    message = Message.objects.using(browser.database.alias).create(
        session_id=2**40, sequence=1, role="user", payload="{}", created_at=datetime.now(UTC)
    )
    assert browser.list_of(Message).row_count == 0
    assert browser.page_of(message).status == 302


def test_values_of_a_tracing_context_are_hidden(browser: Browser) -> None:
    store = store_of(browser.database)
    state = store.create_session("s", agent_type="a")
    state.tracing_context = {
        "trace_id": "known-trace",
        "api_key": "secret-1",
        "headers": {"anything": "secret-2", "trace_id": ["secret-3"]},
        "list": ["secret-4", None],
    }
    store.save_state_and_promote_staging("s", state, [], StepInfo("1", 1))
    session = _row(browser, "s")
    checkpoint = Checkpoint.objects.using(browser.database.alias).get(session=session)
    for page in (browser.page_of(session, section="details"), browser.page_of(checkpoint)):
        assert '"trace_id": "known-trace"' in page.text
        assert "secret-" not in page.html
        assert page.text.count(HIDDEN) == 4


# --- Permissions -----------------------------------------------------------------------------------


def _address(model: type[Model], view: str, *arguments: Any) -> str:
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_{view}", args=arguments)


def test_nothing_can_be_added_changed_or_deleted_by_a_superuser(browser: Browser) -> None:
    session = write_session(browser.database)
    for row in rows_of(session):
        model = type(row)
        before = model._default_manager.using(browser.database.alias).values().get(pk=row.pk)
        urls = [_address(model, "change", row.pk), _address(model, "delete", row.pk), _address(model, "add")]
        given = dict.fromkeys(before, "changed") | {"_save": "Save", "post": "yes"}
        answers = [browser.client.post(url, given) for url in urls]
        assert [answer.status_code for answer in answers] == [403, 403, 403]
        selected = {"action": "delete_selected", "_selected_action": [row.pk], "post": "yes"}
        browser.client.post(_address(model, "changelist"), selected)
        assert model._default_manager.using(browser.database.alias).values().get(pk=row.pk) == before
        if model is not Session:
            fields = [
                attributes for tag, attributes in browser.page_of(row).elements.started if tag == "input"
            ]
            assert {field.get("type") for field in fields} <= {"hidden", "search", "submit"}
            assert not [field for field in fields if str(field.get("name")).startswith("_save")]


ACTIONS = re.compile(r"^/admin/(logout/|helix_store/session/[0-9]+/operation/[a-z-]+/)$")


@pytest.mark.thorough
def test_the_forms_of_a_session_page_go_to_operations(browser: Browser) -> None:
    session = write_session(browser.database)
    pages = browser.sections_of(session)
    assert "/operation/answer/" in pages["waits"].html
    for page in pages.values():
        _check_that_forms_only_operate(page)


def _check_that_forms_only_operate(page: Page) -> None:
    """Each form that a page sends by POST goes to an operation, and none saves a row."""
    elements = page.elements.started
    sent = [
        str(attributes.get("action"))
        for tag, attributes in elements
        if tag == "form" and attributes.get("method") == "post"
    ]
    assert [action for action in sent if not ACTIONS.search(action)] == []
    names = [str(attributes.get("name")) for tag, attributes in elements if tag in ("input", "button")]
    assert [name for name in names if name.startswith("_save")] == []


@pytest.mark.thorough
def test_a_member_of_staff_sees_what_the_view_permission_names_and_nothing_else(visitor: Browser) -> None:
    session = write_session(visitor.database)
    for allowed in MODELS:
        may_view = Permission.objects.get(
            codename=f"view_{allowed._meta.model_name}", content_type__app_label=allowed._meta.app_label
        )
        visitor.sign_in(may_view)
        for row in rows_of(session):
            expected = 200 if type(row) is allowed else 403
            assert visitor.page_of(row).status == expected
            assert visitor.list_of(type(row)).status == expected


def test_a_visitor_is_sent_to_sign_in(visitor: Browser) -> None:
    session = write_session(visitor.database)
    for row in rows_of(session):
        assert visitor.page_of(row).status == 302
        assert visitor.list_of(type(row)).status == 302
