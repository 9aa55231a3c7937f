"""What may be registered, and what the doctor, the checks and the admin make of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.core.exceptions import ImproperlyConfigured
from django.db import models
from django.test.utils import isolate_apps

from helix_store import checks
from helix_store.adapters import AppTable, register_table, registered_tables
from helix_store.catalogue import UNIT_RECORDS
from helix_store.catalogue import table as registry
from helix_store.catalogue.table import _tables
from helix_store.doctor import Finding, diagnose
from helix_store.models import Message, Session
from helix_store.transfer.records import formats, units
from tests.adapters.conftest import MakeNotebook, describe, fill, forget
from tests.adapters.third_party.models import Attachment, Page
from tests.adapters.third_party.tables import register
from tests.admin.conftest import Browser, browser_on
from tests.cells import for_each
from tests.databases import CommittedDatabase, delete_all_rows

# --- The registry ------------------------------------------------------------------------------------


def test_a_repeated_registration_changes_nothing() -> None:
    before = registered_tables()
    register()
    assert registered_tables() == before
    assert {Page, Attachment} <= {table.model for table in before}


def test_every_name_of_a_line_of_an_export_is_taken() -> None:
    assert units().keys() <= UNIT_RECORDS | formats().keys()


def _refused(table: AppTable) -> str:
    before = dict(_tables)
    with pytest.raises(ImproperlyConfigured) as caught:
        register_table(table)
    assert before == _tables
    return str(caught.value)


@for_each(
    ("changes", "problem"),
    [
        ({"record": "Page"}, "lower case"),
        ({"record": "message"}, "taken"),
        ({"record": "tenant_rows"}, "taken"),
        ({"record": "notebook_attachment"}, "taken"),
        ({"order": ("written_at",)}, "no unique constraint"),
        ({"order": ("attachment", "name")}, "nullable"),
        ({"order": ("nothing",)}, "no column nothing"),
        ({"not_exported": {"nothing": "?"}}, "no column nothing"),
        ({"not_exported": {"content": "?"}}, "no default"),
        ({"parent": "nothing"}, "no column nothing"),
        ({"parent": "name"}, "not a foreign key to the session"),
        ({"sweep": lambda db, now: 0}, "sweep is for rows of a tenant"),
    ],
)
def test_a_table_that_would_lose_rows_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], problem: str
) -> None:
    table = _tables[Page]
    forget(monkeypatch, Page)
    assert problem in _refused(replace(table, **changes))
    register_table(table)
    assert _tables[Page] == table


def test_another_description_of_a_registered_table_is_refused() -> None:
    assert "registered already" in _refused(replace(_tables[Page], branch=None))


def test_the_rows_of_a_tenant_need_a_name_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    table = _tables[Attachment]
    forget(monkeypatch, Attachment)
    assert "no unique constraint" in _refused(replace(table, order=("id",)))
    assert "rows of sessions" in _refused(replace(table, branch=_tables[Page].branch))


@isolate_apps("tests.adapters.third_party")
def test_a_key_of_another_table_is_refused() -> None:
    class Link(models.Model):
        session = models.ForeignKey(Session, on_delete=models.CASCADE, related_name="+")
        message = models.ForeignKey(Message, on_delete=models.CASCADE, related_name="+")

        class Meta:
            app_label = "notebook"

        def __str__(self) -> str:
            return ""

    class Word(models.Model):
        word = models.CharField(max_length=10, primary_key=True)
        session = models.ForeignKey(Session, on_delete=models.CASCADE, related_name="+")

        class Meta:
            app_label = "notebook"

        def __str__(self) -> str:
            return ""

    class Loose(models.Model):
        session = models.ForeignKey(Session, on_delete=models.SET_NULL, null=True, related_name="+")

        class Meta:
            app_label = "notebook"

        def __str__(self) -> str:
            return ""

    assert "message is a key of one database" in _refused(AppTable(Link, record="link"))
    assert "not a BigAutoField" in _refused(AppTable(Word, record="word", order=("word",)))
    assert "not a foreign key to the session" in _refused(AppTable(Loose, record="loose"))


@isolate_apps("tests.adapters.third_party")
def test_a_column_with_the_key_that_names_a_record_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Track(models.Model):
        session = models.ForeignKey(Session, on_delete=models.CASCADE, related_name="+")
        record = models.CharField(max_length=10, default="")

        class Meta:
            app_label = "notebook"

        def __str__(self) -> str:
            return ""

    monkeypatch.setattr(registry, "_tables", dict(_tables))
    assert "under record; give the column another name" in _refused(AppTable(Track, record="track"))
    without = AppTable(Track, record="track", not_exported={"record": "it is known elsewhere"})
    register_table(without)
    assert without in registered_tables()


# --- System checks -----------------------------------------------------------------------------------


def test_w008_rows_of_sessions_that_nobody_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.settings.check_app_tables() == []
    forget(monkeypatch, Page)
    (message,) = checks.settings.check_app_tables()
    assert (message.id, message.obj) == ("helix_store.W008", Page)
    assert "notebook.Page" in message.msg


@isolate_apps("tests.adapters.third_party")
def test_e013_a_column_without_a_form_in_an_export(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timed(models.Model):
        session = models.ForeignKey(Session, on_delete=models.CASCADE, related_name="+")
        duration = models.DurationField()

        class Meta:
            app_label = "notebook"

        def __str__(self) -> str:
            return ""

    describe(monkeypatch, AppTable(Timed, record="timed"))
    (message,) = checks.settings.check_app_tables()
    assert (message.id, message.obj) == ("helix_store.E013", Timed)
    assert "DurationField duration" in message.msg


# --- The doctor --------------------------------------------------------------------------------------


@pytest.fixture
def book(empty_db: CommittedDatabase, notebook: MakeNotebook) -> Iterator[CommittedDatabase]:
    fill(notebook("one"))
    yield empty_db
    # What these tests leave is damaged, and other tests look at every row.
    delete_all_rows(empty_db.alias)


def _findings(database: CommittedDatabase, **options: Any) -> dict[str, Finding]:
    found = diagnose(using=database.alias, **options).findings
    return {f"{finding.id} {finding.table}": finding for finding in found}


def test_sound_rows_have_no_finding(book: CommittedDatabase) -> None:
    assert _findings(book) == {}


@pytest.mark.thorough
def test_an_unreadable_payload_of_an_app_is_found(book: CommittedDatabase) -> None:
    Page.objects.using(book.alias).filter(name="ant").update(content="{")
    ((name, finding),) = _findings(book).items()
    assert name == "unreadable-payload notebook_page"
    (sample,) = finding.samples
    assert (sample.tenant, sample.row) == (book.tenant, "ant")
    assert sample.name is not None
    assert sample.name.startswith("project.one~")
    assert list(_findings(book, tenant=book.tenant, session_id=sample.name)) == [name]
    assert _findings(book, tenant="another") == {}


def test_the_check_of_an_app_is_asked(book: CommittedDatabase) -> None:
    Attachment.objects.using(book.alias).all().delete()
    ((name, finding),) = _findings(book).items()
    assert name == "app-rows-unsound notebook_page"
    (sample,) = finding.samples
    assert sample.row == "the attachment of page ant is missing"
    assert sample.tenant == book.tenant


def test_rows_of_no_session_are_found(book: CommittedDatabase) -> None:
    Page.objects.using(book.alias).filter(name="zebra").update(session_id=9_000_000_000)
    assert list(_findings(book)) == ["orphan-row notebook_page"]


@pytest.mark.thorough
def test_rows_of_a_tenant_are_examined(book: CommittedDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(db: object, keys: Collection[int]) -> list[tuple[int, str]]:
        return [(key, "too small") for key in keys]

    describe(monkeypatch, replace(_tables[Attachment], check=check))
    ((name, finding),) = _findings(book, tenant=book.tenant).items()
    assert name == "app-rows-unsound notebook_attachment"
    (sample,) = finding.samples
    assert (sample.tenant, sample.name, sample.row) == (book.tenant, None, "too small")
    (session,) = Session.objects.using(book.alias)
    assert _findings(book, tenant=book.tenant, session_id=session.session_id) == {}


def test_the_sizes_of_registered_tables_are_told(book: CommittedDatabase) -> None:
    tables = {size.table for size in diagnose(using=book.alias).tables}
    assert {"notebook_page", "notebook_attachment"} <= tables


# --- The admin ---------------------------------------------------------------------------------------


@pytest.fixture
def browser(book: CommittedDatabase) -> Iterator[Browser]:
    with browser_on(book) as browser:
        yield browser


def test_the_session_page_counts_the_rows_and_leads_to_them(browser: Browser) -> None:
    browser.sign_in(superuser=True)
    (session,) = Session.objects.using(browser.database.alias)
    page = browser.page_of(session, section="items")
    assert "Pages 2" in page.text
    links = [str(attributes.get("href")) for tag, attributes in page.elements.started if tag == "a"]
    (address,) = [each for each in links if "/notebook/page/?session__id__exact=" in each]
    assert browser.open(address).row_count == 2
    assert sum("app_rows" in statement for statement in page.statements) == 1


def test_rows_that_the_user_may_not_view_are_not_counted(browser: Browser) -> None:
    names = ("view_session", "view_item")
    browser.sign_in(*Permission.objects.filter(codename__in=names, content_type__app_label="helix_store"))
    (session,) = Session.objects.using(browser.database.alias)
    page = browser.page_of(session, section="items")
    assert page.status == 200
    assert "Pages" not in page.text
