"""Values that a database cannot have written itself. The doctor names the row, and examines the others."""

from __future__ import annotations

import io
from typing import Final

import pytest
from django.apps import apps
from django.db import transaction

from helix_store.doctor import diagnose
from helix_store.doctor.findings import table_of
from helix_store.models.fields import MomentField
from helix_store.transfer import DatabaseSource, write_export
from tests.cells import Cells
from tests.databases import CommittedDatabase
from tests.doctor.planting import execute

_NOT_TEXT: Final = "CAST(x'fffe' AS TEXT)"
_NOT_A_TIME: Final = "'2020-13-45 99:00:00'"

DAMAGED: Final = [
    ("session", "session_id", _NOT_TEXT, "session"),
    ("session", "typed_metadata", _NOT_TEXT, "session"),
    ("session", "pending_client_tool_calls", _NOT_TEXT, "session"),
    ("session", "pending_deadline", _NOT_A_TIME, "session"),
    ("session", "message_count", _NOT_TEXT, "session"),
    ("message", "payload", _NOT_TEXT, "session"),
    ("checkpoint", "payload", _NOT_TEXT, "session"),
    ("item", "payload", _NOT_TEXT, "session"),
    ("stream", "error", _NOT_TEXT, "stream"),
    ("stream_chunk", "payload", _NOT_TEXT, "stream"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("table", "column", "value", "named"), DAMAGED, ids=lambda value: str(value)[:20])
def test_a_row_that_cannot_be_read_is_a_finding(
    sample: CommittedDatabase, table: str, column: str, value: str, named: str
) -> None:
    if sample.vendor != "sqlite":
        pytest.skip("PostgreSQL stores no such value.")
    before = {finding.id for finding in diagnose(using=sample.alias).findings}
    execute(sample, "UPDATE [session] SET message_count = message_count + 3 WHERE id = [=root]")
    execute(sample, f"UPDATE [{table}] SET {column} = {value} WHERE id = (SELECT max(id) FROM [{table}])")
    for fix in (False, True):
        diagnosis = diagnose(using=sample.alias, fix=fix)
        found = {finding.id: finding for finding in diagnosis.findings if finding.id not in before}
        # The examination goes on, and other rows are fixed.
        assert "message-count-off" in found
        finding = found["unreadable-row"]
        assert (finding.table, finding.count, finding.is_problem) == (named, 1, True)
        assert str(finding.samples[0]).startswith("id ")


TIMES: Final = [
    (table_of(model), field.column)
    for model in apps.get_app_config("helix_store").get_models()
    for field in model._meta.concrete_fields
    if isinstance(field, MomentField)
]


@pytest.mark.thorough
def test_a_time_that_python_cannot_represent_is_a_finding_and_ends_no_export(
    sample: CommittedDatabase,
) -> None:
    value = _NOT_A_TIME if sample.vendor == "sqlite" else "'infinity'"
    sessions = write_export(DatabaseSource(sample.alias), io.BytesIO()).sessions
    with Cells() as cells:
        for table, column in TIMES:
            with cells.check(f"{table}.{column}"), transaction.atomic(using=sample.alias):
                newest = f"(SELECT max(id) FROM [{table}])"
                execute(sample, f"UPDATE [{table}] SET {column} = {value} WHERE id = {newest}")
                diagnosis = diagnose(using=sample.alias, fix=True)
                summary = write_export(DatabaseSource(sample.alias), io.BytesIO())
                transaction.set_rollback(True, using=sample.alias)
                (finding,) = [each for each in diagnosis.findings if each.id == "unreadable-row"]
                assert (finding.count, finding.is_problem) == (1, True)
                assert summary.sha256 is not None
                assert summary.sessions >= sessions - 1


TEXTS_OF_TIMES: Final = {
    "2020-02-29 23:59:59.999999": True,
    "9999-12-31 23:59:59": True,
    "0001-01-01 00:00:00": True,
    # No `MomentField` writes these, but Python reads them.
    "2020-02-29T12:00:00": True,
    "2020-02-29 12:00:00.5": True,
    "2020-02-29 12:00:00+00:00": True,
    "2020-02-29": True,
    "0000-12-31 00:00:00": False,
    "2021-02-29 00:00:00": False,
    "2020-02-29 12:00:60": False,
    "2020-02-29 12:00:00.12345x": False,
    "2020-02-29 12:00:00 later": False,
    "-2020-02-29 12:00:00": False,
    "12020-02-29 12:00:00": False,
    "2020-02-29 12:00:00\u0660": False,
    "now": False,
    "": False,
}


def test_a_text_on_sqlite_is_a_time_if_python_reads_it_as_one(sample: CommittedDatabase) -> None:
    if sample.vendor != "sqlite":
        pytest.skip("PostgreSQL stores no such value.")
    with Cells() as cells:
        for text, is_a_time in TEXTS_OF_TIMES.items():
            with cells.check(text or "empty"), transaction.atomic(using=sample.alias):
                execute(sample, f"UPDATE [session] SET updated_at = '{text}' WHERE id = [=steps]")
                rules = {finding.id for finding in diagnose(using=sample.alias).findings}
                transaction.set_rollback(True, using=sample.alias)
                assert ("unreadable-row" in rules) is not is_a_time


@pytest.mark.thorough
def test_documents_that_are_nested_too_deeply_are_a_finding(sample: CommittedDatabase) -> None:
    nested = "[" * 990 + "]" * 990
    execute(sample, f"UPDATE [session] SET tags = '{nested}' WHERE id = [=steps]")
    assert {finding.id for finding in diagnose(using=sample.alias).findings} == {"unreadable-columns"}
