"""What a role without rights on the tables can do to locks: PostgreSQL lets any role hold an advisory key."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from tests.database.separate import execute, fetch, separate_connection
from tests.databases import CommittedDatabase

_HELD_KEYS = """
    SELECT (classid::bigint << 32) | objid::bigint FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 1 AND pid = pg_backend_pid()"""


@pytest.fixture
def stranger(postgres_db: CommittedDatabase) -> Iterator[BaseDatabaseWrapper]:
    """A connection of a role that may connect to the database and nothing else."""
    role = f"stranger_{uuid.uuid4().hex}"
    execute(postgres_db.connection, f"CREATE ROLE {role}")
    try:
        with separate_connection(**postgres_db.connection.settings_dict) as connection:
            execute(connection, f"SET SESSION AUTHORIZATION {role}")
            yield connection
    finally:
        execute(postgres_db.connection, f"DROP ROLE {role}")


def test_a_held_key_refuses_acquisitions_and_nothing_else(
    postgres_db: CommittedDatabase, stranger: BaseDatabaseWrapper
) -> None:
    locks = DatabaseLockManager(postgres_db.alias, tenant=postgres_db.tenant)
    store = DatabaseStateStore(postgres_db.alias, tenant=postgres_db.tenant)
    store.create_session("session", agent_type="agent")
    with transaction.atomic(using=postgres_db.alias):
        held = locks.acquire("session")
        ((key,),) = fetch(postgres_db.connection, _HELD_KEYS)
    assert held is not None
    execute(stranger, f"SELECT pg_advisory_lock({key})")
    message = {"role": "user", "content": "hello"}
    assert store.append_messages("session", [message], fencing_token=held.fencing_token)
    assert held.refresh()
    assert held.release()
    assert locks.acquire("session") is None
    assert locks.acquire("another") is not None
    execute(stranger, f"SELECT pg_advisory_unlock({key})")
    again = locks.acquire("session")
    assert again is not None
    assert again.fencing_token == held.fencing_token + 1


def test_a_key_that_is_held_in_another_database_refuses_nothing(postgres_db: CommittedDatabase) -> None:
    locks = DatabaseLockManager(postgres_db.alias, tenant=postgres_db.tenant)
    with transaction.atomic(using=postgres_db.alias):
        held = locks.acquire("session")
        ((key,),) = fetch(postgres_db.connection, _HELD_KEYS)
    assert held is not None
    assert held.release()
    with separate_connection(**{**postgres_db.connection.settings_dict, "NAME": "postgres"}) as elsewhere:
        execute(elsewhere, f"SELECT pg_advisory_lock({key})")
        assert locks.acquire("session") is not None
