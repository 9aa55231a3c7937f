"""Exports and imports with the rows of another app: its pages, and the attachments that they share."""

from __future__ import annotations

import json
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction

from helix_store.models import Session
from helix_store.transfer import ExportFile, ImportSummary, import_units
from tests.adapters.conftest import MakeNotebook, fill
from tests.adapters.third_party.models import Attachment, Page
from tests.adapters.third_party.notebook import Notebook
from tests.cells import for_each
from tests.databases import CommittedDatabase, delete_all_rows
from tests.processes import PROCESSES, WorkerProcess
from tests.transfer.files import exported, imported, lines_of, rehashed


def _stored(database: CommittedDatabase) -> list[tuple[Any, ...]]:
    """The rows of the test's tenant, without their keys."""
    pages = Page.objects.using(database.alias).filter(session__tenant=database.tenant)
    attachments = Attachment.objects.using(database.alias).filter(tenant=database.tenant)
    return [
        *pages.order_by("session__session_id", "name").values_list(
            "session__session_id", "name", "content", "attachment", "written_at"
        ),
        *((row.digest, bytes(row.content)) for row in attachments.order_by("digest")),
    ]


def test_every_value_comes_back_and_the_export_is_the_same(
    committed_db: CommittedDatabase, notebook: MakeNotebook
) -> None:
    fill(notebook("one"))
    fill(notebook("two"))
    data = exported(committed_db)
    stored = _stored(committed_db)
    assert len(stored) == 5
    delete_all_rows(committed_db.alias)
    summary, file = imported(committed_db, data)
    assert summary.problems == [] == file.problems
    assert summary.records["notebook_page"] == 4
    assert summary.records["notebook_attachment"] == 1
    assert _stored(committed_db) == stored
    assert notebook("one").read("zebra") == {"b": 1.0, "a": "NUL \x00 and \ud800", "big": 10**400}
    assert exported(committed_db) == data


def test_the_other_database_writes_the_same_export(
    sqlite_db: CommittedDatabase, postgres_db: CommittedDatabase
) -> None:
    fill(Notebook("project", "one", sqlite_db.alias, tenant=sqlite_db.tenant))
    data = exported(sqlite_db)
    delete_all_rows(postgres_db.alias)
    imported(postgres_db, data)
    moved = CommittedDatabase(alias=postgres_db.alias, tenant=sqlite_db.tenant)
    assert exported(moved) == data
    assert Page.objects.using(postgres_db.alias).count() == 2


def test_the_rows_of_a_session_stand_in_its_unit_in_their_order(
    committed_db: CommittedDatabase, notebook: MakeNotebook
) -> None:
    fill(notebook("one"))
    lines = lines_of(exported(committed_db))
    assert [line["name"] for line in lines if line["record"] == "notebook_page"] == ["ant", "zebra"]
    (end,) = [line for line in lines if line["record"] == "end" and line["of"] == "session"]
    assert end["counts"] == {"notebook_page": 2, "session": 1, "checkpoint": 1}
    names = [line["record"] for line in lines]
    assert names.index("tenant_rows") < names.index("session")


def test_many_rows_are_exported_page_by_page(
    committed_db: CommittedDatabase, notebook: MakeNotebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = notebook("one")
    for number in range(7):
        book.write(f"page {number}", number, str(number).encode())
    whole = exported(committed_db)
    monkeypatch.setattr("helix_store.transfer.export_source._MOST_ROWS", 2)
    assert exported(committed_db) == whole
    delete_all_rows(committed_db.alias)
    monkeypatch.setattr("helix_store.transfer.importing._ROWS", 2)
    summary, _ = imported(committed_db, whole)
    assert summary.records["notebook_attachment"] == 7
    assert exported(committed_db) == whole


def test_an_export_of_one_session_has_the_shared_rows_that_it_needs(
    committed_db: CommittedDatabase, notebook: MakeNotebook
) -> None:
    one, two = notebook("one"), notebook("two")
    one.write("page", 1, b"of both")
    two.write("page", 1, b"of both")
    two.write("other", 2, b"of two")
    chosen = exported(committed_db, session_ids=[one.session_id])
    assert [line["record"] for line in lines_of(chosen)].count("notebook_attachment") == 1
    delete_all_rows(committed_db.alias)
    imported(committed_db, chosen)
    assert [bytes(row.content) for row in Attachment.objects.using(committed_db.alias)] == [b"of both"]
    assert exported(committed_db) == chosen


def test_a_session_whose_app_rows_differ_is_a_problem_and_stays(
    committed_db: CommittedDatabase, notebook: MakeNotebook
) -> None:
    fill(notebook("one"))
    data = exported(committed_db)
    Page.objects.using(committed_db.alias).filter(session__tenant=committed_db.tenant, name="ant").update(
        content="[2]"
    )
    changed = exported(committed_db)
    summary, _ = imported(committed_db, data)
    (problem,) = summary.problems
    assert "differs" in problem.text
    assert exported(committed_db) == changed


def test_shared_rows_are_added_and_never_overwritten(
    committed_db: CommittedDatabase, notebook: MakeNotebook
) -> None:
    notebook("one").write("page", 1, b"first")
    notebook("one").write("other", 1, b"second")
    data = exported(committed_db)
    rows = Attachment.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    kept, lost = rows.order_by("digest")
    rows.filter(pk=lost.pk).delete()
    rows.filter(pk=kept.pk).update(content=b"another")
    summary, _ = imported(committed_db, data)
    (problem,) = summary.problems
    assert "1 rows that are stored already, and differ" in problem.text
    assert summary.records == {"notebook_attachment": 1}
    assert {row.digest: bytes(row.content) for row in rows} == {
        kept.digest: b"another",
        lost.digest: bytes(lost.content),
    }


def test_a_repeated_import_stores_nothing(committed_db: CommittedDatabase, notebook: MakeNotebook) -> None:
    fill(notebook("one"))
    data = exported(committed_db)
    delete_all_rows(committed_db.alias)
    first, _ = imported(committed_db, data)
    again, _ = imported(committed_db, data)
    assert again.records == {} == again.imported
    assert again.identical == first.imported


@pytest.mark.parametrize("record", ["notebook_page", "tenant_rows"])
def test_a_record_of_an_app_that_is_not_installed_is_named(
    committed_db: CommittedDatabase, notebook: MakeNotebook, record: str
) -> None:
    fill(notebook("one"))
    data = exported(committed_db)
    delete_all_rows(committed_db.alias)
    if record == "tenant_rows":
        data = rehashed(data.replace(b'"of":"notebook_attachment"', b'"of":"diary_attachment"'))
    else:
        data = rehashed(data.replace(b"notebook_page", b"diary_page"))
    summary, file = imported(committed_db, data)
    (problem,) = [*summary.problems, *file.problems][:1]
    assert "INSTALLED_APPS" in problem.text
    assert "diary_" in problem.text
    if record == "notebook_page":
        assert not Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).exists()


@for_each(
    ("column", "value"),
    [
        ("content", 1),
        ("content", "AAA"),
        ("content", "AAA=\n"),
        ("digest", "x" * 65),
        ("digest", None),
        ("unknown", "a"),
        ("tenant", "another"),
    ],
)
def test_a_wrong_value_stores_nothing(
    committed_db: CommittedDatabase, notebook: MakeNotebook, column: str, value: object
) -> None:
    notebook("one").write("page", 1, b"content")
    records = lines_of(exported(committed_db))
    (record,) = [each for each in records if each["record"] == "notebook_attachment"]
    record[column] = value
    delete_all_rows(committed_db.alias)
    lines = [json.dumps(each, separators=(",", ":"), ensure_ascii=False).encode() + b"\n" for each in records]
    summary, _ = imported(committed_db, rehashed(b"".join(lines)))
    (problem,) = summary.problems
    assert f"/{column}" in problem.text
    assert not Attachment.objects.using(committed_db.alias).exists()


def test_two_imports_of_shared_rows_at_once_store_them_once(
    committed_db: CommittedDatabase, notebook: MakeNotebook
) -> None:
    notebook("one").write("page", 1, b"content")
    data = exported(committed_db)
    delete_all_rows(committed_db.alias)
    with transaction.atomic(using=committed_db.alias):
        imported(committed_db, data)
        again, _ = imported(committed_db, data)
    assert again.problems == []
    assert Attachment.objects.using(committed_db.alias).count() == 1


def import_until(alias: str, path: str, begun: Event) -> None:
    with Path(path).open("rb") as stream:

        def tell(summary: ImportSummary) -> None:
            if summary.imported["session"] == 5:
                begun.set()

        import_units(ExportFile(stream).units(), alias, progress=tell)


@pytest.mark.thorough
def test_an_import_that_is_killed_is_completed_by_the_next_one(
    committed_db: CommittedDatabase, notebook: MakeNotebook, tmp_path: Path
) -> None:
    for number in range(40):
        notebook(f"{number}").write("page", number, f"attachment {number % 3}".encode())
    data = exported(committed_db)
    delete_all_rows(committed_db.alias)
    path = tmp_path / "export.jsonl"
    path.write_bytes(data)
    begun = PROCESSES.Event()
    worker = WorkerProcess(import_until, committed_db.alias, str(path), begun)
    assert begun.wait(60), worker.outcome(1)
    worker.kill()
    sessions = Session.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    assert 5 <= sessions.count() == Page.objects.using(committed_db.alias).count()
    summary, file = imported(committed_db, data)
    assert (summary.problems, file.is_complete) == ([], True)
    assert exported(committed_db) == data
