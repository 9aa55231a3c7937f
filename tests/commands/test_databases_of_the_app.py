"""Commands in a database that the routers keep the app out of: they say so, and where the app is."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from helix_store.doctor import diagnose
from helix_store.exceptions import InvalidQuery
from helix_store.schema import LATEST_VERSION, current_version
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.commands.running import run
from tests.databases import ALIASES, CommittedDatabase
from tests.faults_found.test_routed_commands import COMMANDS

OTHER = "other"


class NotInTheOther:
    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return db != OTHER


class NowhereMigrated:
    """No database is migrated from here, as with the alias of a standby."""

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return False


@pytest.fixture(scope="module")
def migrated_without_the_app(
    django_db_setup: None, django_db_blocker: DjangoDbBlocker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    if "sqlite" not in ALIASES:
        pytest.skip("HELIX_TEST_DATABASES leaves sqlite out of this run")
    settings = connections[ALIASES["sqlite"]].settings_dict
    connections.settings[OTHER] = {**settings, "NAME": tmp_path_factory.mktemp("other") / "other.sqlite3"}
    with django_db_blocker.unblock():
        with override_settings(DATABASE_ROUTERS=[f"{__name__}.NotInTheOther"]):
            call_command("migrate", "helix_store", database=OTHER, verbosity=0, stdout=StringIO())
        yield
        connections[OTHER].close()
    del connections[OTHER]
    del connections.settings[OTHER]


@pytest.fixture
def kept_out(migrated_without_the_app: None, sqlite_db: CommittedDatabase) -> Iterator[str]:
    """A migrated database without a table of the app."""
    with override_settings(DATABASE_ROUTERS=[f"{__name__}.NotInTheOther"]):
        yield OTHER


@for_each("command", [*COMMANDS, "helix_move acme"], shared=True)
def test_every_command_says_where_the_app_is(kept_out: str, tmp_path: Path, command: str) -> None:
    file = tmp_path / "sessions.jsonl"
    file.touch()
    ended = run(kept_out, *command.format(file=file).split())
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"The app is not in a database {OTHER!r}: default")


def test_the_schema_version_is_0_without_tables(kept_out: str) -> None:
    assert current_version(kept_out) == 0
    assert current_version("default") == LATEST_VERSION


def test_a_diagnosis_says_where_the_app_is(kept_out: str) -> None:
    with pytest.raises(InvalidQuery, match="The app is not in a database 'other': default"):
        diagnose(using=kept_out)


def test_a_standby_that_the_routers_do_not_migrate_can_be_read(committed_db: CommittedDatabase) -> None:
    DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant).create_session("a", agent_type="agent")
    with override_settings(DATABASE_ROUTERS=[f"{__name__}.NowhereMigrated"]):
        ended = run(committed_db.alias, "helix_sessions", "show", "a", "--tenant", committed_db.tenant)
        assert current_version(committed_db.alias) == LATEST_VERSION
    assert ended.code == 0
