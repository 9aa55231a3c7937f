"""Commands and the schema version use the database of the project's router, as the stores do."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command, get_commands
from django.db import connections
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from helix_store.schema import LATEST_VERSION, current_version
from helix_store.stores import DatabaseStateStore
from tests.cells import for_each
from tests.cleanup.conftest import LONG_AGO
from tests.databases import CommittedDatabase, delete_all_rows


class SessionsOnPostgres:
    def db_for_write(self, model: type[Any], **hints: Any) -> str | None:
        return "postgres" if model._meta.app_label == "helix_store" else None


ROUTED = override_settings(DATABASE_ROUTERS=[f"{__name__}.SessionsOnPostgres"])


def status(alias: str) -> str:
    state = DatabaseStateStore(alias).load_state("session")
    assert state is not None
    return state.status.value


@pytest.mark.parametrize("chosen", [None, "default"])
def test_a_command_without_a_database_uses_that_of_the_stores(
    postgres_db: CommittedDatabase, chosen: str | None
) -> None:
    for alias in ("default", "postgres"):
        delete_all_rows(alias)
        DatabaseStateStore(alias).create_session("session", agent_type="agent", expires_at=LONG_AGO)
    options = {} if chosen is None else {"database": chosen}
    with ROUTED:
        assert DatabaseStateStore().alias == "postgres"
        call_command("cleanup_expired_sessions", stdout=StringIO(), verbosity=0, **options)
    expected = {"default": "active", "postgres": "active"} | {chosen or "postgres": "failed"}
    assert {alias: status(alias) for alias in expected} == expected


COMMANDS = [
    "cleanup_expired_sessions",
    "helix_sessions list",
    "helix_sessions show session",
    "helix_sessions tree session",
    "helix_sessions interrupt session",
    "helix_sessions set-status session paused",
    "helix_sessions post session hello",
    "helix_sessions posts session",
    "helix_sessions wake",
    "helix_checkpoints list session",
    "helix_checkpoints prune session --keep 1",
    "helix_usage",
    "helix_streams list",
    "helix_streams prune --older-than 1d",
    "helix_export --output {file}",
    "helix_import {file}",
    "helix_retention --dry-run",
    "helix_erase --session session --no-input",
    "helix_doctor",
]


@pytest.mark.thorough
@for_each("command", COMMANDS)
def test_every_command_asks_the_database_of_the_stores_alone(
    postgres_db: CommittedDatabase, tmp_path: Path, command: str
) -> None:
    delete_all_rows(postgres_db.alias)
    DatabaseStateStore(postgres_db.alias).create_session("session", agent_type="agent")
    file = tmp_path / "sessions.jsonl"
    call_command("helix_export", database=postgres_db.alias, output=file, stdout=StringIO(), verbosity=0)
    connections["default"].ensure_connection()
    with (
        ROUTED,
        override_settings(HELIX_STORE={**settings.HELIX_STORE, "RETENTION": {"checkpoints_keep": 1}}),
        CaptureQueriesContext(connections["default"]) as other,
        CaptureQueriesContext(connections["postgres"]) as routed,
    ):
        call_command(*command.format(file=file).split(), stdout=StringIO(), verbosity=0)
    assert [query["sql"] for query in other.captured_queries] == []
    assert len(routed) > 0


def test_every_command_is_routed_in_a_test() -> None:
    commands = {name for name, app in get_commands().items() if app == "helix_store"}
    # A move has two databases.
    assert {command.split()[0] for command in COMMANDS} == commands - {"migrate", "helix_move"}


def test_a_router_with_an_unknown_alias_is_wrong_usage(postgres_db: CommittedDatabase) -> None:
    with (
        ROUTED,
        override_settings(DATABASE_ROUTERS=[f"{__name__}.SessionsNowhere"]),
        pytest.raises(CommandError) as caught,
    ):
        call_command("cleanup_expired_sessions", verbosity=0)
    assert caught.value.returncode == 2


class SessionsNowhere:
    def db_for_write(self, model: type[Any], **hints: Any) -> str:
        return "nowhere"


def test_the_schema_version_is_that_of_the_stores_database(postgres_db: CommittedDatabase) -> None:
    aliases = ("default", "postgres")
    with ROUTED:
        with (
            CaptureQueriesContext(connections["default"]) as default,
            CaptureQueriesContext(connections["postgres"]) as routed,
        ):
            assert current_version() == LATEST_VERSION
        assert [current_version(alias) for alias in aliases] == [LATEST_VERSION] * 2
    assert len(default) == 0
    assert len(routed) > 0
