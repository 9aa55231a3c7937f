"""One permission shows the rows of one model: not those of another, nor links to forbidden pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Permission
from django.db.models import Model
from django.urls import reverse

from helix_store.admin.sections import SECTIONS
from helix_store.models import (
    Checkpoint,
    InterruptRequest,
    Item,
    Lock,
    Message,
    Run,
    Session,
    StagedChange,
    Stream,
    SubSessionRef,
    UsageEntry,
)
from helix_store.stores import DatabaseLockManager, DatabaseStateStore, DatabaseStreamManager
from tests.admin.conftest import Browser, browser_on
from tests.admin.rows import MODELS, rows_of, write_session
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.security.admin_requests import address_of, statements


@pytest.fixture
def visitor(empty_db: CommittedDatabase) -> Iterator[Browser]:
    with browser_on(empty_db) as browser:
        yield browser


def _sign_in_to_view(visitor: Browser, *models: type[Model]) -> None:
    names = [f"view_{model._meta.model_name}" for model in models]
    visitor.sign_in(*Permission.objects.filter(codename__in=names, content_type__app_label="helix_store"))


@for_each("model", [Message, Checkpoint, Run])
def test_a_list_of_one_session_needs_the_permission_to_view_sessions(
    visitor: Browser, model: type[Model]
) -> None:
    session = write_session(visitor.database)
    _sign_in_to_view(visitor, model)
    with statements(visitor) as sent:
        for key in (session.pk, session.pk + 1, "abc"):
            assert visitor.list_of(model, session__id__exact=key).status == 400
    assert sent == []
    _sign_in_to_view(visitor, model, Session)
    assert visitor.list_of(model, session__id__exact=session.pk).row_count == 1


MARKS: Final = {
    Session: "mark of the session",
    Message: "mark of the message",
    Checkpoint: "mark of the checkpoint",
    Run: "mark of the run",
    Lock: "mark of the lock",
    UsageEntry: "mark of the usage",
    Stream: "mark of the stream",
}


def _rows_with_marks(database: CommittedDatabase) -> list[Any]:
    """A session and its rows, each of which holds a text that tells from which table it is."""
    rows = rows_of(write_session(database))
    marks = {
        Session: {"session_id": MARKS[Session], "title": MARKS[Session], "user_id": MARKS[Session]},
        Message: {"role": MARKS[Message], "payload": f'{{"content":"{MARKS[Message]}"}}'},
        Checkpoint: {"checkpoint_id": MARKS[Checkpoint], "step_id": MARKS[Checkpoint]},
        Run: {"run_id": MARKS[Run], "completion_reason": MARKS[Run], "error": f'"{MARKS[Run]}"'},
        Lock: {"name": MARKS[Lock], "owner": MARKS[Lock]},
        UsageEntry: {"entry_id": MARKS[UsageEntry], "source_name": MARKS[UsageEntry]},
        Stream: {"stream_id": MARKS[Stream], "agent_name": MARKS[Stream]},
    }
    for model, texts in marks.items():
        assert model._default_manager.using(database.alias).update(**texts)
    return rows


@pytest.fixture
def marked(visitor: Browser) -> list[Any]:
    return _rows_with_marks(visitor.database)


@pytest.mark.thorough
@for_each("allowed", MODELS, shared=True)
def test_one_permission_shows_the_rows_of_one_model(
    visitor: Browser, marked: list[Any], allowed: type[Model]
) -> None:
    _sign_in_to_view(visitor, allowed)
    asked = {"app_label": "helix_store", "model_name": "message", "field_name": "session", "term": "mark"}
    shown = [visitor.open(reverse("admin:autocomplete"), **asked), visitor.open(reverse("admin:index"))]
    for row in marked:
        pages = [
            visitor.list_of(type(row)),
            visitor.list_of(type(row), q="mark"),
            visitor.page_of(row),
            visitor.open(address_of(row, "history", row.pk)),
            visitor.open(address_of(row, "delete", row.pk)),
        ]
        expected = [200] * 4 if type(row) is allowed else [403] * 4
        assert [page.status for page in pages] == [*expected, 403]
        shown += pages
    for page in shown:
        for other, mark in MARKS.items():
            assert other is allowed or mark not in page.html, other


@pytest.mark.thorough
@for_each("allowed", MODELS)
def test_a_page_has_no_link_to_a_page_that_is_forbidden(visitor: Browser, allowed: type[Model]) -> None:
    store = DatabaseStateStore(visitor.database.alias, tenant=visitor.database.tenant)
    session = write_session(visitor.database)
    store.create_session("child", agent_type="a", parent_session_id=session.session_id)
    _sign_in_to_view(visitor, allowed)
    (row,) = [row for row in rows_of(session) if type(row) is allowed]
    sections = visitor.sections_of(session).values() if allowed is Session else ()
    pages = [
        visitor.list_of(allowed),
        visitor.page_of(row),
        *(each for each in sections if each.status != 403),
    ]
    for page in pages:
        assert page.status == 200
        addresses = [attributes.get("href") or "" for tag, attributes in page.elements.started if tag == "a"]
        for address in addresses:
            if address.startswith("/admin/helix_store/"):
                assert visitor.open(address).status == 200, address


COLUMNS_OF_SECTIONS: Final[dict[type[Model], dict[str, str]]] = {
    SubSessionRef: {"sub_session_id": "mark", "output": '"mark"'},
    InterruptRequest: {"reason": "mark"},
    StagedChange: {"tool_call_id": "mark", "payload": '"mark"'},
    Message: {"role": "mark", "payload": '{"content":"mark"}'},
    Run: {"run_id": "mark", "completion_reason": "mark", "error": '"mark"'},
    Lock: {"owner": "mark"},
    UsageEntry: {"custom_type": "mark", "custom_name": "mark"},
    Stream: {"agent_name": "mark"},
}


@pytest.mark.thorough
def test_a_session_page_shows_rows_of_another_model_with_its_permission(visitor: Browser) -> None:
    session = write_session(visitor.database)
    tenant, alias = visitor.database.tenant, visitor.database.alias
    streams = DatabaseStreamManager(alias, tenant=tenant)
    async_to_sync(streams.create_writer)(session.session_id, "run", "agent")
    assert DatabaseLockManager(alias, tenant=tenant).acquire(session.session_id) is not None
    for model, columns in COLUMNS_OF_SECTIONS.items():
        assert model._default_manager.using(alias).update(**columns)
    _sign_in_to_view(visitor, Session)
    pages = visitor.sections_of(session)
    assert {page.status for page in pages.values()} == {200, 403}
    assert [name for name, page in pages.items() if "mark" in page.text] == []
    for model in COLUMNS_OF_SECTIONS:
        _sign_in_to_view(visitor, Session, model)
        assert [name for name, page in visitor.sections_of(session).items() if "mark" in page.text], model


@pytest.mark.thorough
def test_a_section_needs_the_permission_to_view_its_rows(visitor: Browser) -> None:
    session = write_session(visitor.database)
    _sign_in_to_view(visitor, Session)
    needs = {section.name: section.needs for section in SECTIONS}
    # One of the models whose rows they show is enough.
    needs |= {"items": (Item,), "conversation": (Message,)}
    for name, models in needs.items():
        page = visitor.page_of(session, section=name)
        assert page.status == (403 if models else 200), name
        _sign_in_to_view(visitor, Session, *models)
        assert visitor.page_of(session, section=name).status == 200
        _sign_in_to_view(visitor, Session)
    shown = visitor.page_of(session).html
    assert {name for name in needs if f"section={name}#" in shown} == {
        name for name, models in needs.items() if not models
    }


def test_the_exact_text_of_a_state_needs_the_permission_to_view_sessions(visitor: Browser) -> None:
    session = write_session(visitor.database)
    address = address_of(session, "state", session.pk)
    assert visitor.open(address).status == 302
    _sign_in_to_view(visitor, Checkpoint)
    assert visitor.open(address).status == 403
    _sign_in_to_view(visitor, Session)
    assert visitor.open(address).status == 200
