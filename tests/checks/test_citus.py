"""System checks of databases in which Citus distributes the tables: one alias, one entry node."""

from __future__ import annotations

from typing import Any, Final

from django.db import connections, transaction
from django.db.utils import ConnectionHandler
from django.test import override_settings

from helix_store import checks
from tests.databases import CommittedDatabase

CITUS: Final = {"HELIX_STORE_CITUS": True}


def found_in(**databases: dict[str, Any]) -> list[str]:
    """What is said of databases that are added to those of the tests. None of their servers is asked."""
    with_defaults = ConnectionHandler({"default": {}, **databases}).settings
    connections.settings.update({alias: with_defaults[alias] for alias in databases})
    try:
        messages = [
            message for alias in databases for message in checks.databases.check_citus_settings(only=alias)
        ]
    finally:
        for alias in databases:
            assert connections[alias].connection is None
            del connections[alias]
            del connections.settings[alias]
    assert {message.id for message in messages} <= {"helix_store.E016"}
    return [message.msg for message in messages]


def postgres(**changes: Any) -> dict[str, Any]:
    address = {"NAME": "agents", "USER": "agent", "HOST": "coordinator", "PORT": "5432"}
    return {"ENGINE": "django.db.backends.postgresql", **address, **CITUS, **changes}


def test_one_entry_node_is_right() -> None:
    assert found_in(one=postgres()) == []
    assert found_in(one=postgres(), other=postgres(NAME="others", HOST="other")) == []
    assert found_in(one=postgres(), same=postgres()) == []


def test_e016_several_hosts() -> None:
    for several in (postgres(HOST="a,b"), postgres(OPTIONS={"host": "a,b"}), postgres(PORT="5432,5433")):
        (message,) = found_in(one=several)
        assert "several hosts" in message


def test_e016_two_aliases_with_the_same_tables_through_two_nodes() -> None:
    for other in (postgres(HOST="worker"), postgres(PORT="5433")):
        (message,) = found_in(one=postgres(), other=other)
        assert "another node" in message
    assert found_in(one=postgres(), other=postgres(HOST="worker", USER="of-another-schema")) == []
    assert found_in(one=postgres(), other=postgres(HOST="worker", HELIX_STORE_CITUS=False)) == []


def test_e016_a_database_without_citus() -> None:
    (message,) = found_in(one={"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:", **CITUS})
    assert "not PostgreSQL" in message


def test_e016_a_value_that_is_no_boolean() -> None:
    (message,) = found_in(one=postgres(HELIX_STORE_CITUS="yes"))
    assert "neither True nor False" in message


def test_e016_row_level_security() -> None:
    with override_settings(HELIX_STORE={"ROW_LEVEL_SECURITY": True}):
        (message,) = found_in(one=postgres())
    assert "ROW_LEVEL_SECURITY" in message


def test_w009_a_database_with_citus_that_does_not_say_so(postgres_db: CommittedDatabase) -> None:
    alias = postgres_db.alias
    assert checks.databases.check_citus(databases=[alias]) == []
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        # The extension is not installed here; its row is what is asked for.
        cursor.execute("SET LOCAL allow_system_table_mods = on")
        cursor.execute("UPDATE pg_extension SET extname = 'citus' WHERE extname = 'plpgsql'")
        (warning,) = checks.databases.check_citus(databases=[alias])
        settings = connections[alias].settings_dict
        settings["HELIX_STORE_CITUS"] = True
        try:
            assert checks.databases.check_citus(databases=[alias]) == []
        finally:
            del settings["HELIX_STORE_CITUS"]
        assert checks.databases.check_citus() == []
        transaction.set_rollback(True, using=alias)
    assert warning.id == "helix_store.W009"
    assert warning.hint
