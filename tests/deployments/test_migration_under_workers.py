"""A column changes its type while a worker holds prepared statements that return it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import transaction

from helix_store.engine import postgres
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore
from tests.database.separate import execute, fetch
from tests.databases import CommittedDatabase

_TABLE = Session._meta.db_table
_TYPE = (
    "SELECT format_type(atttypid, atttypmod) FROM pg_attribute"
    f" WHERE attrelid = '{_TABLE}'::regclass AND attname = 'agent_type'"
)


@contextmanager
def _migrated(database: CommittedDatabase) -> Iterator[None]:
    """The type of a column is another one, as another process has made it."""
    alter = f"ALTER TABLE {_TABLE} ALTER COLUMN agent_type TYPE "
    with database.second_connection() as other:
        ((before,),) = fetch(other, _TYPE)
        execute(other, alter + "text")
        try:
            yield
        finally:
            execute(other, alter + before)


@pytest.mark.parametrize("in_a_block", [False, True], ids=["alone", "in a block"])
def test_a_worker_goes_on_without_an_error(postgres_db: CommittedDatabase, in_a_block: bool) -> None:
    store = DatabaseStateStore(postgres_db.alias, tenant=postgres_db.tenant)
    store.create_session("s", agent_type="before")

    def heads() -> list[str]:
        return [head.agent_type for head in store.list_sessions().sessions]

    def step() -> int:
        state = store.load_state("s")
        assert state is not None
        commit = store.save_state_and_promote_staging(
            "s", state, [], {"step_id": "step", "step_count": state.step_count + 1}
        )
        return commit.new_version

    assert (step(), heads()) == (2, ["before"])
    connection = postgres_db.connection.connection
    with _migrated(postgres_db):
        if in_a_block:
            with transaction.atomic(using=postgres_db.alias):
                assert (step(), heads()) == (3, ["before"])
        else:
            assert (step(), heads()) == (3, ["before"])
        assert connection in postgres._unpreparable
    assert (step(), heads()) == (4, ["before"])
    assert postgres_db.connection.connection is connection
