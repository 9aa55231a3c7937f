"""The schema from nothing: by version, by eight processes at once, under another prefix, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.recorder import MigrationRecorder
from django.db.models.signals import pre_migrate

from helix_store.schema import current_version
from tests.databases import CommittedDatabase
from tests.migrations.conftest import FreshDatabase

MIGRATIONS = {
    1: "0001_sessions",
    2: "0002_remote_sub_sessions",
    3: "0003_pending_client_tool_calls",
    4: "0004_root_session_and_call_ownership",
    5: "0005_completed_client_tool_calls",
    6: "0006_mode_and_completion_reason",
    7: "0007_suspension_context",
}


def migrate(database: FreshDatabase, *target: str) -> None:
    call_command("migrate", *target, database=database.connection.alias, verbosity=0)


def test_each_schema_version_is_one_migration(fresh_database: FreshDatabase) -> None:
    alias = fresh_database.connection.alias
    assert current_version(alias) == 0
    for version, name in MIGRATIONS.items():
        call_command("migrate", "helix_store", name, database=alias, verbosity=0)
        assert current_version(alias) == version
    call_command("migrate", "helix_store", database=alias, verbosity=0)
    assert current_version(alias) == 7


def test_migrating_again_does_nothing(fresh_database: FreshDatabase) -> None:
    fresh_database.run("migrate")
    assert "No migrations to apply" in fresh_database.run("migrate")


def test_a_database_that_has_the_replaced_migrations_needs_none(fresh_database: FreshDatabase) -> None:
    migrate(fresh_database)
    recorder = MigrationRecorder(fresh_database.connection)
    recorder.record_unapplied("helix_store", "0008_additions")
    tables = fresh_database.tables()
    assert "No migrations to apply" in fresh_database.run("migrate")
    assert ("helix_store", "0008_additions") in recorder.applied_migrations()
    migrate(fresh_database, "helix_store", MIGRATIONS[7])
    assert {name for app, name in recorder.applied_migrations() if app == "helix_store"} == {
        *MIGRATIONS.values()
    }
    migrate(fresh_database)
    assert fresh_database.tables() == tables


def test_the_schema_can_be_taken_back_and_built_again(fresh_database: FreshDatabase) -> None:
    alias = fresh_database.connection.alias
    call_command("migrate", "helix_store", database=alias, verbosity=0)
    tables = fresh_database.tables()
    for version in reversed(MIGRATIONS):
        call_command("migrate", "helix_store", MIGRATIONS[version], database=alias, verbosity=0)
        assert current_version(alias) == version
    call_command("migrate", "helix_store", "zero", database=alias, verbosity=0)
    assert current_version(alias) == 0
    assert not {name for name in fresh_database.tables() if name.startswith("helix_store_")}
    call_command("migrate", "helix_store", database=alias, verbosity=0)
    assert fresh_database.tables() == tables


def test_eight_processes_migrate_a_fresh_database_at_once(fresh_database: FreshDatabase) -> None:
    processes = [fresh_database.start("migrate", "--no-color") for _ in range(8)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, "\n\n".join(outputs)
    assert sum("Applying helix_store.0001_sessions... OK" in output for output in outputs) == 1
    with fresh_database.connection.cursor() as cursor:
        cursor.execute(
            "SELECT app, name, count(*) FROM django_migrations GROUP BY app, name HAVING count(*) > 1"
        )
        assert cursor.fetchall() == []
    assert current_version(fresh_database.connection.alias) == 7


@pytest.fixture
def before_the_plan_is_executed() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Has something happen once, between the plan of the next ``migrate`` in this process and its lock."""
    earlier = apps.get_app_config("auth")
    actions: list[Callable[[], object]] = []

    def act(**kwargs: object) -> None:
        while actions:
            actions.pop()()

    pre_migrate.connect(act, sender=earlier)
    yield actions.append
    pre_migrate.disconnect(act, sender=earlier)


def test_migrations_that_another_process_applies_meanwhile_are_skipped(
    fresh_database: FreshDatabase, before_the_plan_is_executed: Callable[[Callable[[], object]], None]
) -> None:
    before_the_plan_is_executed(lambda: fresh_database.run("migrate", "helix_store", MIGRATIONS[4]))
    migrate(fresh_database)
    assert current_version(fresh_database.connection.alias) == 7
    before_the_plan_is_executed(lambda: fresh_database.run("migrate", "helix_store", MIGRATIONS[6]))
    migrate(fresh_database, "helix_store", MIGRATIONS[5])
    assert current_version(fresh_database.connection.alias) == 5
    before_the_plan_is_executed(lambda: fresh_database.run("migrate"))
    migrate(fresh_database)
    assert "No migrations to apply" in fresh_database.run("migrate")


def test_a_migration_that_fails_does_not_hold_off_other_processes(
    fresh_database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MigrationExecutor, "apply_migration", lambda *args, **kwargs: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        migrate(fresh_database)
    fresh_database.run("migrate")


def test_a_migrating_process_that_is_killed_does_not_hold_off_the_next(fresh_postgres: FreshDatabase) -> None:
    process = fresh_postgres.start("migrate")
    assert process.stdout is not None
    for line in process.stdout:
        if "helix_store.0001" in line:
            break
    process.kill()
    process.communicate()
    fresh_postgres.run("migrate")
    assert current_version(fresh_postgres.connection.alias) == 7


@pytest.mark.parametrize("prefix", ["Agents_", "p" * 39])
def test_tables_take_the_configured_prefix(fresh_database: FreshDatabase, prefix: str) -> None:
    """The longest prefix fits too. The fast form of a step writes out the name of a sequence."""
    fresh_database.run("migrate", TABLE_PREFIX=prefix)
    tables = fresh_database.tables()
    assert {f"{prefix}session", f"{prefix}interrupt_request"} <= tables
    assert not {name for name in tables if name.startswith("helix_store_")}
    make_a_step = (
        "from helix_store.stores import DatabaseStateStore as Store; store = Store();"
        "state = store.create_session('s', agent_type='t');"
        "step = {'step_id': 'first', 'step_count': 1};"
        "print('version', store.save_state_and_promote_staging('s', state, [], step).new_version)"
    )
    assert "version 2" in fresh_database.run("shell", "-c", make_a_step, TABLE_PREFIX=prefix)


def test_a_prefix_changes_no_migration(fresh_database: FreshDatabase) -> None:
    unchanged = fresh_database.run("makemigrations", "--check", "--dry-run", TABLE_PREFIX="Agents_")
    assert "No changes detected" in unchanged


def test_a_bad_prefix_is_refused_before_any_table_is_made(fresh_database: FreshDatabase) -> None:
    process = fresh_database.start("migrate", TABLE_PREFIX='x"; DROP TABLE y; --')
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "helix_store.E002" in output
    assert fresh_database.tables() == set()


def test_no_migration_is_missing(committed_db: CommittedDatabase) -> None:
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)


def test_payloads_are_compressed_with_lz4_where_the_server_has_it(fresh_postgres: FreshDatabase) -> None:
    alias = fresh_postgres.connection.alias
    call_command("migrate", "helix_store", database=alias, verbosity=0)
    with fresh_postgres.connection.cursor() as cursor:
        cursor.execute("SELECT enumvals FROM pg_settings WHERE name = 'default_toast_compression'")
        (methods,) = cursor.fetchone()
        columns = "SELECT attname, attcompression FROM pg_attribute WHERE attrelid = %s::regclass"
        cursor.execute(columns, ["helix_store_checkpoint"])
        compression = dict(cursor.fetchall())
        asked = "l" if "lz4" in methods else ""
        assert (compression["payload"], compression["envelope"], compression["status"]) == (asked, asked, "")
        for table in ("message", "staged_change", "stream_chunk"):
            cursor.execute(columns, [f"helix_store_{table}"])
            assert dict(cursor.fetchall())["payload"] == asked
        call_command("migrate", "helix_store", MIGRATIONS[7], database=alias, verbosity=0)
        cursor.execute(columns, ["helix_store_checkpoint"])
        assert dict(cursor.fetchall())["payload"] == ""


def test_a_vacuum_leaves_the_table_of_staged_changes_its_pages(fresh_postgres: FreshDatabase) -> None:
    alias = fresh_postgres.connection.alias
    options = "SELECT reloptions FROM pg_class WHERE oid = 'helix_store_staged_change'::regclass"
    call_command("migrate", "helix_store", database=alias, verbosity=0)
    with fresh_postgres.connection.cursor() as cursor:
        cursor.execute(options)
        assert cursor.fetchone() == (["vacuum_truncate=false"],)
        call_command("migrate", "helix_store", MIGRATIONS[7], database=alias, verbosity=0)
        cursor.execute(options)
        assert cursor.fetchone() == (None,)


def test_a_migrated_database_reports_its_version(committed_db: CommittedDatabase) -> None:
    assert current_version(committed_db.alias) == 7
