"""A pooler that drops the search path of the settings."""

from __future__ import annotations

from django.core.checks import run_checks
from django.db import connections

from helix_store import checks
from tests.cells import for_each
from tests.database.separate import execute
from tests.databases import CommittedDatabase
from tests.deployments.conftest import PooledAlias
from tests.deployments.deployments import another_alias

_SHARD = "-c search_path=shard,\\ public -c statement_timeout=60000"


def _found(alias: str) -> list[str | None]:
    return [message.id for message in checks.databases.check_search_path(databases=[alias])]


def test_a_dropped_search_path_is_an_error(postgres_db: CommittedDatabase, pooled_alias: PooledAlias) -> None:
    with pooled_alias(OPTIONS={"options": _SHARD}) as alias:
        (message,) = checks.databases.check_search_path(databases=[alias])
        assert message.id == "helix_store.E015"
        assert "search_path=shard, public" in message.msg
        assert "helix_store.E015" in {each.id for each in run_checks(databases=[alias])}
        assert _found(postgres_db.alias) == []


@for_each(
    "options",
    [_SHARD, "--search_path=shard,public", '-csearch_path="shard",public', "-c statement_timeout=60000", ""],
)
def test_a_search_path_that_reaches_the_server_is_none(postgres_db: CommittedDatabase, options: str) -> None:
    settings = connections.settings[postgres_db.alias]
    with another_alias(
        "shard", **{**settings, "OPTIONS": {**settings["OPTIONS"], "options": options}}
    ) as alias:
        assert _found(alias) == []


def test_a_search_path_of_the_role_passes_the_pooler(
    postgres_db: CommittedDatabase, pooled_alias: PooledAlias
) -> None:
    database = connections[postgres_db.alias].settings_dict["NAME"]
    execute(postgres_db.connection, f'ALTER DATABASE "{database}" SET search_path = public')
    try:
        with pooled_alias() as alias:
            assert _found(alias) == []
    finally:
        execute(postgres_db.connection, f'ALTER DATABASE "{database}" RESET search_path')
