"""What the doctor says about the database itself: schema, settings, durability, pooler, sizes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from django.apps import apps
from django.db import connections, transaction
from django.test import override_settings

from helix_store import catalogue, conf
from helix_store.doctor import Severity, diagnose
from tests.databases import CommittedDatabase
from tests.doctor.planting import execute
from tests.pooler import PGBOUNCER, Address, pgbouncer, transaction_pooler
from tests.processes import WorkerProcess

FIRST = "the settings and the schema, which come first"


def found(database: CommittedDatabase, **options: Any) -> list[str]:
    return [finding.id for finding in diagnose(using=database.alias, **options).findings]


def query(database: CommittedDatabase, sql: str) -> Any:
    with database.connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchall()


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Change the OPTIONS of an alias for one test, and not those of its open connection."""

    def change(alias: str, **changes: Any) -> None:
        settings = connections[alias].settings_dict
        monkeypatch.setitem(settings, "OPTIONS", {**settings["OPTIONS"], **changes})

    return change


# --- Schema --------------------------------------------------------------------------------------------


def test_a_migration_that_is_not_applied_is_found_first(sample: CommittedDatabase) -> None:
    execute(sample, "UPDATE [session] SET version = 0")
    execute(sample, "DELETE FROM django_migrations WHERE app = 'helix_store' AND name LIKE '0007%%'")
    diagnosis = diagnose(using=sample.alias)
    (finding,) = diagnosis.findings
    assert (finding.id, finding.count, diagnosis.schema_version) == ("schema-behind", 1, 6)
    assert [str(each) for each in finding.samples] == ["0007_suspension_context"]
    assert "migrate" in finding.advice
    assert (diagnosis.stopped_at, diagnosis.tables) == (FIRST, [])


def test_a_migration_of_a_newer_version_is_found_first(sample: CommittedDatabase) -> None:
    execute(
        sample,
        "INSERT INTO django_migrations (app, name, applied)"
        " VALUES ('helix_store', '9999_tomorrow', '2030-01-01 00:00:00')",
    )
    (finding,) = diagnose(using=sample.alias).findings
    assert (finding.id, [str(each) for each in finding.samples]) == ("schema-ahead", ["9999_tomorrow"])


def test_a_changed_table_prefix_is_found_first(sample: CommittedDatabase) -> None:
    if sample.vendor == "postgresql":
        execute(sample, "SET CONSTRAINTS ALL IMMEDIATE")
    for model in apps.get_app_config("helix_store").get_models():
        name = model._meta.db_table
        execute(sample, f"ALTER TABLE {name} RENAME TO before_{name.removeprefix(conf.table_name(''))}")
    diagnosis = diagnose(using=sample.alias)
    (finding,) = diagnosis.findings
    assert (finding.id, finding.severity) == ("helix_store.E012", Severity.ERROR)
    assert '"before_"' in finding.advice
    assert diagnosis.stopped_at == FIRST


# --- Settings and durability ---------------------------------------------------------------------------


@pytest.mark.thorough
def test_an_unknown_setting_is_found_beside_what_the_rows_show(sample: CommittedDatabase) -> None:
    execute(sample, "UPDATE [session] SET version = 0 WHERE session_id = 'steps'")
    with override_settings(
        HELIX_STORE={"TABEL_PREFIX": "x_", "STREAM_PERMISSION": "example_project.visitors.may_watch"}
    ):
        assert found(sample) == ["helix_store.E001", "version-zero"]


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (7, "helix_store.E004"),
        ({"PAGE_SIZE": 0}, "helix_store.E004"),
        ({"TABLE_PREFIX": "1"}, "helix_store.E002"),
    ],
)
def test_settings_that_cannot_be_read_end_the_examination(
    sample: CommittedDatabase, settings: Any, rule: str
) -> None:
    with override_settings(HELIX_STORE=settings):
        diagnosis = diagnose(using=sample.alias)
    assert [finding.id for finding in diagnosis.findings] == [rule]
    assert diagnosis.stopped_at == FIRST


def test_sqlite_without_immediate_transactions_is_found(
    sqlite_db: CommittedDatabase, options: Callable[..., None]
) -> None:
    options(sqlite_db.alias, transaction_mode=None)
    assert "helix_store.W001" in found(sqlite_db, tenant=sqlite_db.tenant)


def test_sqlite_that_does_not_sync_commits_is_found_by_its_real_pragma(sqlite_db: CommittedDatabase) -> None:
    assert found(sqlite_db, tenant=sqlite_db.tenant) == []
    query(sqlite_db, "PRAGMA synchronous = OFF")
    assert found(sqlite_db, tenant=sqlite_db.tenant) == ["helix_store.W003"]


def test_the_wal_reset_bug_is_a_matter_of_production(
    sqlite_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 51, 2))
    assert found(sqlite_db, tenant=sqlite_db.tenant) == []
    assert found(sqlite_db, tenant=sqlite_db.tenant, deploy=True) == ["helix_store.W004"]


def test_commits_of_postgresql_that_are_not_durable_are_found(postgres_db: CommittedDatabase) -> None:
    with transaction.atomic(using=postgres_db.alias):
        execute(postgres_db, "SET LOCAL synchronous_commit = off")
        (finding,) = diagnose(using=postgres_db.alias, tenant=postgres_db.tenant).findings
    assert (finding.id, finding.severity) == ("helix_store.E010", Severity.ERROR)
    assert finding.advice


def test_only_the_database_that_is_examined_is_spoken_of(
    sqlite_db: CommittedDatabase, postgres_db: CommittedDatabase, options: Callable[..., None]
) -> None:
    options(sqlite_db.alias, transaction_mode=None)
    assert found(postgres_db, tenant=postgres_db.tenant) == []


# --- Search path and poolers ---------------------------------------------------------------------------


def test_tables_from_several_schemas_are_found(postgres_db: CommittedDatabase) -> None:
    with transaction.atomic(using=postgres_db.alias):
        execute(postgres_db, "CREATE SCHEMA other")
        execute(postgres_db, "CREATE TABLE other.helix_store_checkpoint (LIKE public.helix_store_checkpoint)")
        execute(postgres_db, "SET LOCAL search_path = other, public")
        (finding,) = diagnose(using=postgres_db.alias, tenant=postgres_db.tenant).findings
        transaction.set_rollback(True, using=postgres_db.alias)
    assert finding.id == "search-path-splits"
    assert "other.helix_store_checkpoint" in [str(each) for each in finding.samples]


def test_a_schema_before_that_of_the_tables_is_found(postgres_db: CommittedDatabase) -> None:
    with transaction.atomic(using=postgres_db.alias):
        execute(postgres_db, "CREATE SCHEMA other")
        execute(postgres_db, "SET LOCAL search_path = other, public")
        (finding,) = diagnose(using=postgres_db.alias, tenant=postgres_db.tenant).findings
        transaction.set_rollback(True, using=postgres_db.alias)
    assert (finding.id, finding.severity) == ("search-path-elsewhere", Severity.WARNING)


def examine_behind(alias: str, tenant: str, port: int, disabled: bool) -> list[str]:
    """For a process that has no connection yet."""
    connections.settings[alias].update(HOST="127.0.0.1", PORT=port, DISABLE_SERVER_SIDE_CURSORS=disabled)
    return [finding.id for finding in diagnose(using=alias, tenant=tenant).findings]


@pytest.fixture(
    params=[
        transaction_pooler,
        pytest.param(
            pgbouncer, marks=pytest.mark.skipif(PGBOUNCER is None, reason="pgbouncer is not installed")
        ),
    ],
    ids=["pooler of the tests", "pgbouncer"],
)
def pooler(request: pytest.FixtureRequest, postgres_db: CommittedDatabase) -> Any:
    """Starts a pooler with a number of server connections."""
    server = Address.of(postgres_db.connection)
    if not os.path.isdir(server.host):
        pytest.skip("the server of DATABASE_URL is not reached through a socket that trusts")

    def start(servers: int) -> AbstractContextManager[int]:
        started: AbstractContextManager[int] = request.param(server, servers)
        return started

    return start


@pytest.mark.thorough
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_a_pooler_that_loses_prepared_statements_is_found(
    postgres_db: CommittedDatabase, pooler: Any, servers: int
) -> None:
    with pooler(servers) as port:
        where = (postgres_db.alias, postgres_db.tenant, port)
        enabled = WorkerProcess(examine_behind, *where, False).outcome().unwrap()
        disabled = WorkerProcess(examine_behind, *where, True).outcome().unwrap()
    assert enabled == ["pooler-without-prepared-statements"]
    assert disabled == []


# --- Sizes ---------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_sizes_of_all_tables_are_told(sample: CommittedDatabase) -> None:
    tables = diagnose(using=sample.alias).tables
    assert [size.table for size in tables] == [
        table.model._meta.db_table.removeprefix(conf.table_name("")) for table in catalogue.tables()
    ]
    if sample.vendor == "sqlite" and not query(
        sample, "SELECT 1 FROM pragma_module_list WHERE name = 'dbstat'"
    ):
        assert {(size.table_bytes, size.index_bytes) for size in tables} == {(None, None)}
        return
    assert all((size.table_bytes or 0) > 0 and (size.index_bytes or 0) > 0 for size in tables)
