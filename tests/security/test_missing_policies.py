"""Row-level security covers the tables of other apps too, or says which one it does not."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.db.migrations.loader import MigrationLoader
from django.test import override_settings

from helix_store import checks
from helix_store.catalogue import registered_tables
from helix_store.contrib.row_level_security import EnableRowLevelSecurity
from tests.adapters.third_party.models import Page
from tests.databases import CommittedDatabase

POLICIES = "SELECT count(*) FROM pg_policy WHERE polname = 'helix_store_tenant'"


@pytest.fixture
def alias(postgres_db: CommittedDatabase) -> Iterator[str]:
    """A database whose changes of the schema go with the test."""
    with transaction.atomic(using=postgres_db.alias):
        yield postgres_db.alias
        transaction.set_rollback(True, using=postgres_db.alias)


def enable(alias: str, *, only_of: str | None = None) -> None:
    loader = MigrationLoader(connections[alias])
    nodes = None if only_of is None else loader.graph.leaf_nodes(only_of)
    state = loader.project_state(nodes)
    with connections[alias].schema_editor(atomic=False) as editor:
        EnableRowLevelSecurity().database_forwards("project", editor, state, state)


def messages(alias: str) -> list[str]:
    return [f"{message.id} {message.msg}" for message in checks.databases.check_policies(databases=[alias])]


def run(alias: str, statement: str) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(statement)


def test_a_migration_that_runs_before_those_of_other_apps_is_refused(alias: str) -> None:
    # As on a new database, where that migration sorts before those of the other app.
    for table in registered_tables():
        if table.model._meta.app_label == "notebook":
            name = table.model._meta.db_table
            run(alias, f"ALTER TABLE {name} RENAME TO later_{name}")
    with pytest.raises(ImproperlyConfigured, match=r"notebook.*dependencies"):
        enable(alias, only_of="helix_store")
    with connections[alias].cursor() as cursor:
        cursor.execute(POLICIES)
        assert cursor.fetchone() == (0,)


def test_tables_of_an_app_without_migrations_get_their_policies(alias: str) -> None:
    """Such an app is in no state of the migrations, and its tables were made before all of them."""
    enable(alias, only_of="helix_store")
    assert messages(alias) == []


def test_w010_a_table_without_a_policy(alias: str) -> None:
    assert messages(alias) == []
    enable(alias)
    assert messages(alias) == []
    run(alias, f"DROP POLICY helix_store_tenant ON {Page._meta.db_table}")
    (message,) = messages(alias)
    assert message.startswith("helix_store.W010 ")
    assert message.endswith(f": {Page._meta.db_table}.")


def test_w010_a_policy_that_is_switched_off(alias: str) -> None:
    enable(alias)
    run(alias, "ALTER TABLE helix_store_session DISABLE ROW LEVEL SECURITY")
    (message,) = messages(alias)
    assert message.endswith(": helix_store_session.")


def test_w010_the_setting_without_any_policy(alias: str) -> None:
    with override_settings(HELIX_STORE={"ROW_LEVEL_SECURITY": True}):
        (message,) = messages(alias)
    assert Page._meta.db_table in message
    assert "helix_store_session" in message


def test_w010_a_policy_of_an_earlier_version(alias: str) -> None:
    enable(alias)
    run(alias, "DROP POLICY helix_store_tenant ON helix_store_session")
    condition = "(tenant = '')"
    run(
        alias,
        f"CREATE POLICY helix_store_tenant ON helix_store_session USING {condition} WITH CHECK {condition}",
    )
    (message,) = messages(alias)
    assert message.endswith("refer to another tenant's: helix_store_session.")


def test_w010_a_table_of_moves_of_an_earlier_version(alias: str) -> None:
    run(alias, "CREATE TABLE helix_store_moved_tenant (tenant text)")
    assert messages(alias) == []
    enable(alias)
    (message,) = messages(alias)
    assert message.endswith(": helix_store_moved_tenant.")


def test_a_function_of_a_move_that_an_earlier_version_left_is_an_error_until_the_migration(
    alias: str,
) -> None:
    """Those that no trigger calls are dropped, others are closed, and so are the tables."""
    used, unused = (f"helix_fence_{digit * 24}_log" for digit in "ab")
    for name in (used, unused):
        run(
            alias,
            f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER"
            " AS $$ BEGIN RETURN NEW; END $$",
        )
    run(alias, f"CREATE TRIGGER t BEFORE INSERT ON helix_store_lock FOR EACH ROW EXECUTE FUNCTION {used}()")
    run(alias, "CREATE TABLE helix_store_moved_tenant (tenant text)")
    (message,) = checks.databases.check_functions(databases=[alias])
    assert message.id == "helix_store.E018"
    assert used in message.msg
    assert unused in message.msg
    migration = import_module("helix_store.migrations.0014_leftovers_of_moves")
    with connections[alias].schema_editor(atomic=False) as editor:
        migration.close_leftovers(None, editor)
    assert checks.databases.check_functions(databases=[alias]) == []
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT proname FROM pg_proc WHERE proname LIKE 'helix_fence%'")
        assert cursor.fetchall() == [(used,)]
        cursor.execute("SELECT relrowsecurity FROM pg_class WHERE relname = 'helix_store_moved_tenant'")
        assert cursor.fetchone() == (True,)


def test_w010_needs_a_database_to_ask(alias: str) -> None:
    enable(alias)
    run(alias, f"DROP POLICY helix_store_tenant ON {Page._meta.db_table}")
    assert checks.databases.check_policies() == []
    # The suite's own server does not sync, and its settings silence that.
    found = [message for message in checks.check_database(alias) if not message.is_silenced()]
    assert [message.id for message in found] == ["helix_store.W010"]
