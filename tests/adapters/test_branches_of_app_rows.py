"""A branch of a session has the rows that each registered table has for it."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db.models import Model

from helix_store.adapters import AppTable, Branch, copy_rows
from helix_store.exceptions import SessionExists
from helix_store.stores import DatabaseStateStore
from tests.adapters.conftest import MakeNotebook, describe, fill
from tests.adapters.third_party.models import Attachment, Page
from tests.databases import CommittedDatabase


def _pages(database: CommittedDatabase, session_id: str) -> list[tuple[Any, ...]]:
    pages = Page.objects.using(database.alias).filter(
        session__tenant=database.tenant, session__session_id=session_id
    )
    return list(pages.order_by("pk").values_list("name", "content", "attachment", "written_at"))


def test_a_branch_has_copies_in_the_same_order(
    committed_db: CommittedDatabase, notebook: MakeNotebook
) -> None:
    book = notebook("one")
    fill(book)
    fill(notebook("another"))
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.branch_session(book.session_id, new_session_id="branch")
    copied = _pages(committed_db, "branch")
    assert [name for name, *_ in copied] == ["zebra", "ant"]
    assert copied == _pages(committed_db, book.session_id)
    book.write("ant", "changed")
    assert _pages(committed_db, "branch") == copied


def test_a_branch_keeps_what_it_shares_when_its_source_goes(
    committed_db: CommittedDatabase, notebook: MakeNotebook
) -> None:
    book = notebook("one")
    fill(book)
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.branch_session(book.session_id, new_session_id="branch")
    attachments = Attachment.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    book.delete()
    assert attachments.count() == 1
    store.delete_session("branch")
    assert attachments.count() == 0


def test_a_table_is_told_where_the_branch_begins(
    committed_db: CommittedDatabase, notebook: MakeNotebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = notebook("one")
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    book.write("page", 1)
    store.append_messages(book.session_id, [{"role": "user", "content": "1"}] * 3)
    told: list[Branch] = []

    def branch(model: object, given: Branch) -> None:
        told.append(given)

    describe(monkeypatch, AppTable(Page, record="notebook_page", order=("name",), branch=branch))
    store.branch_session(book.session_id, new_session_id="branch", message_index=2)
    (given,) = told
    assert (given.source_id, given.target_id) == (book.session_id, "branch")
    assert (given.message_count, given.checkpoint_id) == (2, None)
    assert given.source != given.target
    assert given.db.tenant == committed_db.tenant
    assert _pages(committed_db, "branch") == []


def test_a_branch_that_fails_has_no_rows(
    committed_db: CommittedDatabase, notebook: MakeNotebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = notebook("one")
    fill(book)
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)

    def fails(model: type[Model], given: Branch) -> None:
        copy_rows(model, given)
        raise ImproperlyConfigured

    pages = Page.objects.using(committed_db.alias).filter(session__tenant=committed_db.tenant)
    number = pages.count()
    describe(monkeypatch, AppTable(Page, record="notebook_page", order=("name",), branch=fails))
    with pytest.raises(ImproperlyConfigured):
        store.branch_session(book.session_id, new_session_id="branch")
    assert store.load_state("branch") is None
    assert pages.count() == number
    monkeypatch.undo()
    store.branch_session(book.session_id, new_session_id="branch")
    with pytest.raises(SessionExists):
        store.branch_session(book.session_id, new_session_id="branch")
    assert pages.count() == 2 * number
