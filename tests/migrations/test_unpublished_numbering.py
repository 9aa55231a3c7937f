"""A database of commit d2a738c, whose migrations 0008 to 0019 were merged before they were complete.

``data/`` has the schema of such a database and an export of it, both made by the code of that commit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from helix_store.doctor import diagnose
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from helix_store.transfer import ExportFile, import_units
from tests.databases import CommittedDatabase, delete_all_rows
from tests.migrations.conftest import FreshDatabase

DATA = Path(__file__).parent / "data"
EXPORT = DATA / "d2a738c.export.jsonl"


@pytest.fixture
def old_database(fresh_database: FreshDatabase) -> FreshDatabase:
    vendor = "sqlite" if fresh_database.connection.vendor == "sqlite" else "postgres"
    script = (DATA / f"d2a738c.{vendor}.sql").read_text()
    with fresh_database.connection.cursor() as cursor:
        if vendor == "sqlite":
            cursor.connection.executescript(script)
        else:
            cursor.execute(script)
    return fresh_database


@pytest.mark.parametrize(
    "command",
    [("migrate",), ("check", "--database", "default"), ("helix_doctor",)],
    ids=["migrate", "check", "doctor"],
)
def test_every_command_names_the_way_out_before_django_gives_wrong_advice(
    old_database: FreshDatabase, command: tuple[str, ...]
) -> None:
    tables = old_database.tables()
    process = old_database.start(*command)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    words = " ".join(output.split())
    assert "helix_store.E017" in words
    for part in ("0008_operations", "helix_export", "helix_import"):
        assert part in words
    assert "makemigrations --merge" not in words
    assert "Traceback" not in words
    assert old_database.tables() == tables


def test_a_database_of_today_has_no_such_error(fresh_database: FreshDatabase) -> None:
    fresh_database.run("migrate", "helix_store")
    assert "helix_store.E017" not in fresh_database.run("check", "--database", "default")


def test_an_export_of_such_a_database_is_imported_whole(committed_db: CommittedDatabase) -> None:
    alias = committed_db.alias
    delete_all_rows(alias)
    with EXPORT.open("rb") as file:
        source = ExportFile(file)
        summary = import_units(source.units(), alias)
    assert (source.problems, source.is_complete) == ([], True)
    assert (summary.problems, summary.sessions) == ([], 2)
    assert sum(summary.records.values()) == sum(source.counts.values()) - 2, (
        "locks and kept_usage are no rows"
    )
    store = DatabaseStateStore(alias, tenant="acme")
    state = store.load_state("chat")
    assert state is not None
    assert (state.title, state.custom_state["step"]) == ("Grüße", 3)
    assert [each["content"] for each in store.get_messages("chat").messages] == [
        f"message {number} é" for number in (1, 2, 3)
    ]
    child = store.load_state("child")
    assert child is not None
    assert child.pending_client_tool_calls["pay"]["approval_id"] == "a1"
    assert len(DatabaseUsageStore(alias, tenant="acme").get_entries("chat")) == 1
    # The session goes on with steps that are deltas from what was imported.
    with store.session("chat").turn() as turn, turn.step() as step:
        step.say({"role": "user", "content": "more"})
    assert [finding.id for finding in diagnose(using=alias, tenant="acme").findings if finding.table] == []
    assert Session.objects.using(alias).filter(tenant="acme").count() == 2
