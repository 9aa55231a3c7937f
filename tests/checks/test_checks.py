"""Each system check: what it finds, and that it keeps quiet otherwise."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.checks import CheckMessage, Error, Tags, run_checks
from django.core.checks.registry import registry
from django.db import connections, transaction
from django.db.utils import ConnectionHandler
from django.test import override_settings

from helix_store import checks, sqlite_options
from tests.cells import Cells, for_each
from tests.cleanup.providers import MemoryProvider
from tests.databases import CommittedDatabase
from tests.postgres import NOT_DURABLE, PostgresCluster

ROOT = Path(__file__).resolve().parents[2]


def ids(messages: list[Any]) -> list[str]:
    return [message.id for message in messages]


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Change the settings of one alias for one test."""

    def change(alias: str, **changes: Any) -> None:
        settings = connections[alias].settings_dict
        monkeypatch.setitem(settings, "OPTIONS", {**settings["OPTIONS"], **changes.pop("OPTIONS", {})})
        for key, value in changes.items():
            monkeypatch.setitem(settings, key, value)

    return change


def test_the_test_project_passes_every_check(committed_db: CommittedDatabase) -> None:
    found = [each for each in run_checks(databases=[committed_db.alias]) if not each.is_silenced()]
    assert [id_ for id_ in ids(found) if id_.startswith("helix_store.")] == []


def test_every_message_has_a_hint_and_an_id_of_its_kind() -> None:
    with override_settings(HELIX_STORE={"NOPE": 1, "TABLE_PREFIX": "1", "PAGE_SIZE": 0}):
        found = checks.settings.check_settings()
    assert len(found) == 3
    for message in found:
        assert message.hint
        assert isinstance(message, Error) == str(message.id).startswith("helix_store.E")


def test_e001_unknown_setting() -> None:
    with override_settings(HELIX_STORE={"TABEL_PREFIX": "x_"}):
        assert ids(checks.settings.check_settings()) == ["helix_store.E001"]
    with override_settings(HELIX_STORE={"TABLE_PREFIX": "x_"}):
        assert checks.settings.check_settings() == []


@for_each("prefix", ['a"; DROP TABLE x; --', "agents_\n", "1agents", "", "a-b", "ä_", "a" * 40, 7, None])
def test_e002_table_prefix(prefix: object) -> None:
    with override_settings(HELIX_STORE={"TABLE_PREFIX": prefix}):
        assert ids(checks.settings.check_settings()) == ["helix_store.E002"]


@pytest.mark.parametrize("prefix", ["a", "_", "Agents2_", "a" * 39])
def test_e002_keeps_quiet_about_a_good_prefix(prefix: str) -> None:
    with override_settings(HELIX_STORE={"TABLE_PREFIX": prefix}):
        assert checks.settings.check_settings() == []


def test_e003_sessions_routed_to_a_missing_alias() -> None:
    with override_settings(DATABASE_ROUTERS=["tests.checks.test_checks.NowhereRouter"]):
        assert ids(checks.settings.check_database_alias()) == ["helix_store.E003"]
    assert checks.settings.check_database_alias() == []


def test_e019_a_database_that_the_stores_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = connections["default"]
    unusable: list[dict[str, Any]] = [
        {"vendor": "mysql", "display_name": "MySQL"},
        {"vendor": "postgresql", "Database": SimpleNamespace(__name__="psycopg2")},
    ]
    for attributes in unusable:
        with monkeypatch.context() as patched:
            for name, value in attributes.items():
                patched.setattr(connection, name, value)
            assert ids(checks.settings.check_database_alias()) == ["helix_store.E019"]
    assert checks.settings.check_database_alias() == []


class LabelRouter:
    """The usual router of one app, which forgets the apps of the adapters."""

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return (db == "default") == (app_label == "helix_store")


class PrefixRouter:
    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        if app_label.startswith(("helix_store", "notebook")):
            return db == "default"
        return None


class KeptOutRouter:
    """Only the tables of the adapters may be everywhere."""

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return db == "default" if app_label == "helix_store" else None


@pytest.fixture
def two_databases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections.settings, "other", connections.settings["default"])


def routed_by(name: str) -> Any:
    return override_settings(DATABASE_ROUTERS=[f"{__name__}.{name}"])


def test_e021_tables_that_are_not_where_the_sessions_are(two_databases: None) -> None:
    assert checks.settings.check_routed_tables() == []
    with routed_by("PrefixRouter"):
        assert checks.settings.check_routed_tables() == []
    with routed_by("LabelRouter"):
        missing, *unused = checks.settings.check_routed_tables()
    assert (missing.id, set(ids(unused))) == ("helix_store.E021", {"helix_store.W012"})
    assert "'default'" in missing.msg
    assert {"helix_store_langgraph", "notebook"} <= set(re.findall(r"\w+", missing.msg))


def test_w012_tables_where_no_sessions_are(two_databases: None) -> None:
    with routed_by("KeptOutRouter"):
        found = checks.settings.check_routed_tables()
    assert set(ids(found)) == {"helix_store.W012"}
    assert all("'default'" not in each.msg for each in found)
    assert "helix_store_langgraph" in found[0].msg


class NowhereRouter:
    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "nowhere"


@for_each(
    "configured",
    [
        ["TABLE_PREFIX"],
        {"LIMITS": {"max_state_bytes": 0}},
        {"LIMITS": {"max_states": 5}},
        {"DEFAULT_LOCK_TTL_MS": 0},
        {"DEFAULT_LOCK_TTL_MS": 1.5},
        {"DEFAULT_LOCK_TTL_MS": 7 * 86_400_000 + 1},
        {"PAGE_SIZE": "200"},
        {"PAGE_SIZE": 1_001},
        {"ASYNC_THREADS": -1},
        {"ASYNC_THREADS": True},
        {"ASYNC_THREADS": 1_001},
        {"FAST_PATHS": "no"},
        {"RUN_ERROR_DETAILS": "no"},
        {"TOMBSTONE_DAYS": -1},
        {"TOMBSTONE_DAYS": True},
        {"CHAT_THREADS": 0},
        {"CHAT_THREADS": 1_001},
        {"CHAT_FLUSH_MS": -1},
        {"CHAT_FLUSH_MS": 40.0},
        {"CHAT_FLUSH_MS": 10_001},
        {"ANSWER_PAGES": 1},
        {"ADMIN_TENANTS": 7},
        {"BUILD": 7},
        {"BUILD": ""},
        {"BUILD": "v" * 65},
        {"ADMIN_TENANTS": "nowhere.at_all"},
        {"ADMIN_USERS": print},
        {"ADMIN_VIEWS": ["status__exact=failed"]},
        {"ADMIN_VIEWS": {"failed": None}},
        {"CHECKPOINTS_KEEP": 0},
        {"STREAMS": []},
        {"STREAMS": {"poll_interval": 0}},
        {"STREAMS": {"writer_lease": "60"}},
        {"STREAMS": {"heartbeat": True}},
        {"STREAMS": {"notify": 1}},
        {"STREAMS": {"using": 1}},
        {"STREAMS": {"listen_database": 1}},
        {"STREAMS": {"listen_database": {"default": None}}},
        {"STREAMS": {"LISTEN_DATABASE": "nowhere"}},
        {"STREAMS": {"nope": 1}},
        {"STREAMS": {"using": "nowhere"}},
        {"STREAMS": {"poll_interval": 1, "POLL_INTERVAL": 2}},
        {"STREAMS": {5: 1}},
        {"STREAM_PERMISSION": print},
        {"STREAM_PERMISSION": "nowhere.may_watch"},
        {"STREAM_PERMISSION": f"{__name__}.ROOT"},
        {"STREAM_PERMISSION": "tests.checks.raises_on_import.may_watch"},
        {"ADMIN_USERS": "names"},
        {"ADMIN_USERS": "tests.checks.raises_on_import.names"},
        {"ADMIN_TENANTS": "tests.checks.raises_on_import.tenants"},
        {"WORKSPACE_PROVIDERS": "x"},
        {"WORKSPACE_PROVIDERS": {"files": None}},
        {"WORKSPACE_PROVIDERS": {7: "nowhere.Provider"}},
        {"WORKSPACE_PROVIDERS": {"files": "nowhere.Provider"}},
        {"WORKSPACE_PROVIDERS": {"files": "tests.checks.raises_on_import.Provider"}},
        {"WORKSPACE_PROVIDERS": {"files": "os.path"}},
        {"WORKSPACE_PROVIDERS": {"files": f"{__name__}.ROOT"}},
    ],
)
def test_e004_wrong_value(configured: Any) -> None:
    with override_settings(HELIX_STORE=configured):
        assert ids(checks.settings.check_settings()) == ["helix_store.E004"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "value"),
    [
        ("check", "7"),
        ("helix_doctor", "[1]"),
        ("cleanup_expired_sessions", "None"),
        ("cleanup_expired_sessions", '{"PAGE_SIZE": "many"}'),
    ],
)
def test_e004_a_process_with_unreadable_settings_says_so(tmp_path: Path, command: str, value: str) -> None:
    (tmp_path / "unreadable.py").write_text(
        f"from example_project.settings import *\nHELIX_STORE = {value}\n"
    )
    process = subprocess.run(
        [sys.executable, "manage.py", command],
        cwd=ROOT,
        env={
            **os.environ,
            "DATABASE_URL": f"sqlite:///{tmp_path / 'db.sqlite3'}",
            "DJANGO_SETTINGS_MODULE": "unreadable",
            "PYTHONPATH": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert "helix_store.E004" in process.stdout + process.stderr
    assert "Traceback" not in process.stderr


def test_a_provider_may_be_anything_that_the_cleanup_can_load() -> None:
    """A class, an object, a module or a function, which is not called by the check."""
    for path in (
        "tests.cleanup.providers.MemoryProvider",
        "helix_store.workspaces.StorageWorkspaceProvider",
        f"{__name__}.PROVIDER",
        f"{__name__}.provider_of_the_project",
        __name__,
    ):
        with override_settings(HELIX_STORE={"WORKSPACE_PROVIDERS": {"files": path}}):
            assert checks.settings.check_settings() == [], path
    for name in ("using", "USING"):
        with override_settings(HELIX_STORE={"STREAMS": {name: "default"}}):
            assert checks.settings.check_settings() == []


PROVIDER = MemoryProvider()


def provider_of_the_project() -> MemoryProvider:
    raise AssertionError("a check must not open connections to the service of a provider")


def list_snapshots(session_id: str, ref: Any) -> list[str]:
    return []


def delete_snapshot(snapshot_id: str) -> None: ...


def test_e004_a_listening_alias_has_to_be_on_postgresql(
    sqlite_db: CommittedDatabase, postgres_db: CommittedDatabase
) -> None:
    for alias, expected in ((sqlite_db.alias, ["helix_store.E004"]), (postgres_db.alias, [])):
        with override_settings(HELIX_STORE={"STREAMS": {"listen_database": alias}}):
            assert ids(checks.settings.check_settings()) == expected


def test_w001_deferred_transactions_on_sqlite(sqlite_db: CommittedDatabase, options: Any) -> None:
    options(sqlite_db.alias, OPTIONS={"transaction_mode": "DEFERRED"})
    assert ids(checks.databases.check_sqlite_settings()) == ["helix_store.W001"]


@for_each("name", [":memory:", "file:memorydb_default?mode=memory&cache=shared"])
def test_a_database_in_memory_needs_no_options(sqlite_db: CommittedDatabase, options: Any, name: str) -> None:
    options(sqlite_db.alias, NAME=name, OPTIONS={"transaction_mode": "DEFERRED", "init_command": ""})
    assert checks.databases.check_sqlite_settings(databases=[sqlite_db.alias]) == []


@for_each(
    ("command", "expected"),
    [
        ("PRAGMA synchronous=FULL;", ["helix_store.W002"]),
        ("pragma journal_mode = wal; pragma synchronous = normal", ["helix_store.W003"]),
        ("", ["helix_store.W002"]),
        (None, ["helix_store.W002"]),
        ("PRAGMA journal_mode='wal'; PRAGMA synchronous=2", []),
        ("PRAGMA synchronous=EXTRA; PRAGMA journal_mode=WAL", []),
    ],
)
def test_w002_and_w003_from_the_settings(
    sqlite_db: CommittedDatabase, options: Any, command: str | None, expected: list[str]
) -> None:
    options(sqlite_db.alias, OPTIONS={"init_command": command})
    assert ids(checks.databases.check_sqlite_settings()) == expected


def test_w002_and_w003_from_the_database_when_it_may_be_asked(sqlite_db: CommittedDatabase) -> None:
    with sqlite_db.connection.cursor() as cursor:
        cursor.execute("PRAGMA synchronous=NORMAL")
    assert checks.databases.check_sqlite_settings() == []
    assert ids(checks.databases.check_sqlite_settings(databases=[sqlite_db.alias])) == ["helix_store.W003"]


@for_each(
    ("version", "has_the_bug"),
    [
        ((3, 40, 1), True),
        ((3, 44, 5), True),
        ((3, 44, 6), False),
        ((3, 45, 0), True),
        ((3, 50, 6), True),
        ((3, 50, 7), False),
        ((3, 51, 2), True),
        ((3, 51, 3), False),
        ((3, 53, 0), False),
    ],
)
def test_w004_sqlite_with_the_wal_reset_bug_under_deploy_only(
    sqlite_db: CommittedDatabase,
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, int, int],
    has_the_bug: bool,
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    assert ids(checks.databases.check_sqlite_version()) == ["helix_store.W004"] * has_the_bug
    assert ("helix_store.W004" in ids(run_checks(include_deployment_checks=True))) == has_the_bug
    assert "helix_store.W004" not in ids(run_checks())


@for_each(
    "version",
    [(3, 40, 1), (3, 44, 6), (3, 50, 7), (3, 51, 2), (3, 51, 3), (3, 53, 0)],
    ids=lambda version: str(version),
)
def test_the_options_for_sqlite_satisfy_every_check(
    sqlite_db: CommittedDatabase, options: Any, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    options(sqlite_db.alias, OPTIONS=sqlite_options())
    assert ids(sqlite_warnings()) == []


def test_options_that_are_missing_are_one_warning(sqlite_db: CommittedDatabase, options: Any) -> None:
    options(sqlite_db.alias, OPTIONS={"transaction_mode": None, "init_command": None})
    (found,) = checks.databases.check_sqlite_settings()
    assert found.id == "helix_store.W001"
    for problem in ("deferred transactions", "not in WAL mode", "synchronous=FULL"):
        assert problem in str(found.msg)
    assert "helix_store.sqlite_options()" in str(found.hint)


def test_a_silenced_problem_hides_no_other_one(sqlite_db: CommittedDatabase, options: Any) -> None:
    options(sqlite_db.alias, OPTIONS={"transaction_mode": None, "init_command": None})
    with override_settings(SILENCED_SYSTEM_CHECKS=["helix_store.W001"]):
        assert ids(checks.databases.check_sqlite_settings()) == ["helix_store.W002"]


@pytest.mark.parametrize(
    ("version", "expected"), [((3, 40, 1), []), ((3, 51, 3), ["helix_store.W002"])], ids=["old", "new"]
)
def test_a_rollback_journal_is_right_where_wal_may_corrupt(
    sqlite_db: CommittedDatabase,
    options: Any,
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, int, int],
    expected: list[str],
) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    options(
        sqlite_db.alias, OPTIONS={"init_command": "PRAGMA journal_mode=TRUNCATE; PRAGMA synchronous=FULL;"}
    )
    assert ids(sqlite_warnings()) == expected


def test_w004_asks_a_database_for_its_journal_mode_where_it_may(
    sqlite_db: CommittedDatabase, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings have changed, but a file stays in WAL mode until nobody else has it open."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 40, 1))
    with sqlite_db.connection.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode=WAL")
    options(
        sqlite_db.alias, OPTIONS={"init_command": "PRAGMA journal_mode=TRUNCATE; PRAGMA synchronous=FULL;"}
    )
    assert checks.databases.check_sqlite_version() == []
    assert ids(checks.databases.check_sqlite_version(databases=[sqlite_db.alias])) == ["helix_store.W004"]


def sqlite_warnings() -> list[Any]:
    return [*checks.databases.check_sqlite_settings(), *checks.databases.check_sqlite_version()]


@pytest.mark.parametrize(("asgi", "expected"), [("project.asgi.app", "W005"), (None, "I005")])
def test_w005_and_i005_persistent_connections(
    committed_db: CommittedDatabase, options: Any, asgi: str | None, expected: str
) -> None:
    with override_settings(ASGI_APPLICATION=asgi):
        assert checks.databases.check_connections_under_asgi() == []
        for age in (60, None):
            options(committed_db.alias, CONN_MAX_AGE=age)
            (message,) = checks.databases.check_connections_under_asgi()
            assert message.id == f"helix_store.{expected}"
            assert ("pool" in str(message.hint)) == (committed_db.connection.vendor == "postgresql")
            assert checks.databases.check_connections_under_asgi(only="another") == []


def test_w005_keeps_quiet_about_a_database_in_memory(sqlite_db: CommittedDatabase, options: Any) -> None:
    """Django never closes its connection, however old it is."""
    options(sqlite_db.alias, CONN_MAX_AGE=None, NAME=":memory:")
    with override_settings(ASGI_APPLICATION="project.asgi.app"):
        assert checks.databases.check_connections_under_asgi() == []


def test_a_new_project_on_sqlite_gets_one_warning_and_with_the_options_none(
    sqlite_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``django-admin startproject`` writes the settings, without CONN_MAX_AGE, and served by ASGI."""
    settings = sqlite_db.connection.settings_dict
    assert settings["CONN_MAX_AGE"] == 0
    for given, expected in (({}, ["helix_store.W001"]), (sqlite_options(), [])):
        monkeypatch.setitem(settings, "OPTIONS", given)
        with override_settings(ASGI_APPLICATION="project.asgi.app"):
            found = [*sqlite_warnings(), *checks.databases.check_connections_under_asgi()]
        assert ids(found) == expected


@pytest.mark.parametrize("permission", [None, ""])
def test_w006_the_stream_view_without_a_permission(permission: str | None) -> None:
    with override_settings(HELIX_STORE={"STREAM_PERMISSION": permission}):
        (message,) = checks.settings.check_stream_permission()
        assert message.id == "helix_store.W006"
        assert "STREAM_PERMISSION" in str(message.hint)
        assert "helix_store.W006" in ids(run_checks(databases=[]))
        with override_settings(ROOT_URLCONF="tests.checks.nested_urls"):
            assert ids(checks.settings.check_stream_permission()) == ["helix_store.W006"]


@pytest.mark.parametrize("urls", ["tests.checks.other_urls", None])
def test_w006_keeps_quiet_where_the_urls_are_not_included(urls: str | None) -> None:
    with override_settings(HELIX_STORE={}, ROOT_URLCONF=urls):
        assert checks.settings.check_stream_permission() == []


def test_w006_keeps_quiet_about_a_project_with_a_permission() -> None:
    with override_settings(HELIX_STORE={"STREAM_PERMISSION": "project.permissions.may_watch"}):
        assert checks.settings.check_stream_permission() == []


def test_w007_row_level_security_on_sqlite(committed_db: CommittedDatabase) -> None:
    assert checks.databases.check_row_level_security() == []
    with override_settings(HELIX_STORE={"ROW_LEVEL_SECURITY": True}):
        found = checks.databases.check_row_level_security(only=committed_db.alias)
        assert ids(found) == (["helix_store.W007"] if committed_db.vendor == "sqlite" else [])
        assert all(message.hint for message in found)
        has_sqlite = any(connections[alias].vendor == "sqlite" for alias in connections)
        assert ("helix_store.W007" in ids(run_checks(databases=[]))) == has_sqlite


def _durability(alias: str) -> list[CheckMessage]:
    """Return what is reported besides E011, which holds for the suite's own server."""
    found = checks.databases.check_postgres_durability(databases=[alias])
    return [message for message in found if message.id != "helix_store.E011"]


def test_e010_commits_that_are_not_durable(postgres_db: CommittedDatabase) -> None:
    with postgres_db.connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit = off")
    assert checks.databases.check_postgres_durability() == []
    assert ids(_durability(postgres_db.alias)) == ["helix_store.E010"]
    with postgres_db.connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit = local")
    assert _durability(postgres_db.alias) == []


def test_w011_transactions_that_nothing_ends(postgres_db: CommittedDatabase) -> None:
    alias = postgres_db.alias
    with postgres_db.connection.cursor() as cursor:
        cursor.execute("SET idle_in_transaction_session_timeout = 0")
        assert checks.databases.check_orphaned_transactions() == []
        (message,) = checks.databases.check_orphaned_transactions(databases=[alias])
        assert message.id == "helix_store.W011"
        assert "idle_in_transaction_session_timeout" in str(message.hint)
        assert "helix_store.W011" not in ids(run_checks(databases=[alias]))
        assert "helix_store.W011" in ids(run_checks(databases=[alias], include_deployment_checks=True))
        cursor.execute("SET idle_in_transaction_session_timeout = '60s'")
    assert checks.databases.check_orphaned_transactions(databases=[alias]) == []


def test_e014_a_table_that_a_crash_empties(postgres_db: CommittedDatabase) -> None:
    alias = postgres_db.alias
    assert _durability(alias) == []
    with transaction.atomic(using=alias):
        with postgres_db.connection.cursor() as cursor:
            cursor.execute("ALTER TABLE helix_store_lock SET UNLOGGED")
        (message,) = _durability(alias)
        transaction.set_rollback(True, using=alias)
    assert message.id == "helix_store.E014"
    assert message.hint == "Run ALTER TABLE helix_store_lock SET LOGGED."


@pytest.mark.thorough
def test_e011_a_server_that_does_not_sync(postgres_db: CommittedDatabase) -> None:
    with PostgresCluster(options=NOT_DURABLE) as cluster:
        process = subprocess.run(
            [sys.executable, "manage.py", "check", "--database", "default"],
            cwd=ROOT,
            env={
                **os.environ,
                "DATABASE_URL": cluster.url,
                "DJANGO_SETTINGS_MODULE": "example_project.settings",
            },
            capture_output=True,
            text=True,
            check=False,
        )
    assert process.returncode == 1
    assert process.stderr.count("helix_store.E011") == 2
    assert "helix_store.E010" not in process.stderr


def test_a_check_that_is_not_for_databases_bears_those_that_are_down(
    sqlite_db: CommittedDatabase, tmp_path: Path
) -> None:
    # Django 6.1 passes every alias to these checks, with every command: also where an image is built.
    down = {
        "down": {"ENGINE": "django.db.backends.postgresql", "HOST": str(tmp_path), "NAME": "agents"},
        "missing": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": tmp_path / "no folder/db.sqlite3",
            "OPTIONS": sqlite_options(),
        },
    }
    with_defaults = ConnectionHandler({"default": {}, **down}).settings
    connections.settings.update({alias: with_defaults[alias] for alias in down})
    own = [
        check
        for check in registry.get_checks(include_deployment_checks=True)
        if "helix_store" in check.tags and Tags.database not in check.tags
    ]
    try:
        with Cells() as cells:
            for check in own:
                with cells.check(getattr(check, "__name__", str(check))):
                    found = check(app_configs=None, databases=list(connections))
                    assert [each for each in found if "missing" in each.msg or "down" in each.msg] == []
    finally:
        for alias in down:
            del connections[alias]
            del connections.settings[alias]
    assert len(own) > 5
