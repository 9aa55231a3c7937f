"""One declaration of a table is enough for everything that walks over tables.

The table is that of the pages in `tests.adapters.third_party`. Nothing but its declaration names it.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from django.db import connections
from django.db.migrations.loader import MigrationLoader

from helix_store.catalogue import declared, tables
from helix_store.cleanup import erase, expired_session_cleanup
from helix_store.contrib.row_level_security import EnableRowLevelSecurity
from helix_store.doctor import diagnose
from helix_store.engine.database import Database
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore
from tests.adapters.conftest import describe, fill, forget
from tests.adapters.third_party.models import Attachment, Page
from tests.adapters.third_party.notebook import Notebook
from tests.admin.conftest import browser_on
from tests.databases import CommittedDatabase, delete_all_rows
from tests.transfer.files import exported, imported, lines_of


@pytest.fixture
def book(empty_db: CommittedDatabase) -> Notebook:
    """A session with two pages."""
    notebook = Notebook("project", "one", empty_db.alias, tenant=empty_db.tenant)
    fill(notebook)
    return notebook


def pages(database: CommittedDatabase) -> int:
    return Page.objects.using(database.alias).count()


def test_it_is_exported_and_imported(empty_db: CommittedDatabase, book: Notebook) -> None:
    data = exported(empty_db)
    assert [line["record"] for line in lines_of(data)].count("notebook_page") == 2
    delete_all_rows(empty_db.alias)
    imported(empty_db, data)
    assert exported(empty_db) == data


def test_it_is_branched(empty_db: CommittedDatabase, book: Notebook) -> None:
    DatabaseStateStore(empty_db.alias, tenant=empty_db.tenant).branch_session(
        book.session_id, new_session_id="branch"
    )
    assert pages(empty_db) == 4


def test_it_is_erased(empty_db: CommittedDatabase, book: Notebook) -> None:
    foreseen = erase(using=empty_db.alias, tenant=empty_db.tenant, dry_run=True)
    receipt = erase(using=empty_db.alias, tenant=empty_db.tenant)
    assert foreseen.deleted["notebook_page"] == receipt.deleted["notebook_page"] == 2
    assert pages(empty_db) == 0


def test_it_expires_with_its_session(empty_db: CommittedDatabase, book: Notebook) -> None:
    long_ago = datetime.fromisoformat("2001-06-01T00:00:00+00:00")
    Session.objects.using(empty_db.alias).update(expires_at=long_ago)
    expired_session_cleanup(using=empty_db.alias)
    assert pages(empty_db) == 2
    cleaned = expired_session_cleanup(using=empty_db.alias, delete_after=timedelta(days=1))
    assert (cleaned.deleted, pages(empty_db)) == (1, 0)


def test_the_rows_of_a_tenant_expire_by_themselves(
    empty_db: CommittedDatabase, book: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sweep(db: Database, now: datetime) -> int:
        return Attachment.objects.using(db.alias).filter(tenant=db.tenant).delete()[0]

    describe(monkeypatch, replace(declared(Attachment), sweep=sweep))
    assert expired_session_cleanup(using=empty_db.alias).swept == 1


def test_it_is_examined(empty_db: CommittedDatabase, book: Notebook) -> None:
    Page.objects.using(empty_db.alias).filter(name="ant").update(content="nonsense", attachment="lost")
    faults = [finding for finding in diagnose(using=empty_db.alias).findings if finding.table is not None]
    assert [(fault.id, fault.table) for fault in faults] == [
        ("unreadable-payload", "notebook_page"),
        ("app-rows-unsound", "notebook_page"),
    ]


def test_it_is_protected(postgres_db: CommittedDatabase) -> None:
    connection = connections[postgres_db.alias]
    state = MigrationLoader(connection).project_state()
    with connection.schema_editor(collect_sql=True) as editor:
        EnableRowLevelSecurity().database_forwards("project", editor, state, state)
    policies = [line for line in editor.collected_sql if line.startswith("CREATE POLICY")]
    assert len(policies) == len(tables())
    assert sum('"notebook_page" USING' in line for line in policies) == 1


def test_it_is_counted(empty_db: CommittedDatabase, book: Notebook) -> None:
    assert "notebook_page" in {size.table for size in diagnose(using=empty_db.alias).tables}
    with browser_on(empty_db) as browser:
        browser.sign_in(superuser=True)
        page = browser.page_of(Session.objects.using(empty_db.alias).get(), section="items")
    assert "Pages 2" in page.text


def test_without_its_declaration_it_is_only_deleted(
    empty_db: CommittedDatabase, book: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(monkeypatch, Page)
    assert b"notebook_page" not in exported(empty_db)
    erase(using=empty_db.alias, tenant=empty_db.tenant)
    assert pages(empty_db) == 0


def test_a_table_that_follows_another_one_comes_right_after_it() -> None:
    records = [table.record for table in tables("session")]
    assert records[records.index("message") + 1] == "item"
