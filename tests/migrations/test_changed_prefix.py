"""A table prefix that was changed after the tables were made."""

from __future__ import annotations

import pytest

from tests.migrations.conftest import FreshDatabase


@pytest.mark.parametrize("command", [("check", "--database", "default"), ("migrate",)])
def test_the_error_names_both_prefixes(fresh_database: FreshDatabase, command: tuple[str, ...]) -> None:
    fresh_database.run("migrate", TABLE_PREFIX="before_")
    tables = fresh_database.tables()
    process = fresh_database.start(*command, TABLE_PREFIX="after_")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "helix_store.E012" in output
    assert '"before_"' in output
    assert '"after_"' in output
    assert fresh_database.tables() == tables
    assert "helix_store.E012" not in fresh_database.run(
        "check", "--database", "default", TABLE_PREFIX="before_"
    )


def test_tables_of_another_project_are_no_error(fresh_database: FreshDatabase) -> None:
    """They look like this app's, but no migration of it is recorded here."""
    fresh_database.run("migrate", TABLE_PREFIX="before_")
    # The app of a third party, whose tables have no prefix, and depend on those that have.
    fresh_database.run("migrate", "notebook", "zero", TABLE_PREFIX="before_")
    with fresh_database.connection.cursor() as cursor:
        cursor.execute("DELETE FROM django_migrations WHERE app LIKE 'helix_store%'")
    assert "helix_store.E012" not in fresh_database.run(
        "check", "--database", "default", TABLE_PREFIX="after_"
    )
    fresh_database.run("migrate", TABLE_PREFIX="after_")
