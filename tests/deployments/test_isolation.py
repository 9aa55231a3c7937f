"""A project whose transactions are repeatable reads by default: those of the store are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
from django.db import connections, transaction
from django.db.backends.postgresql.psycopg_any import IsolationLevel

from helix_store.engine.database import Database
from helix_store.engine.statement import Statement
from helix_store.exceptions import StoreBusy
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from tests.databases import CommittedDatabase
from tests.deployments.deployments import another_alias
from tests.processes import run_in_threads

_LEVEL: Final = Statement("SELECT current_setting('transaction_isolation')")
_SERVER: Final = {"options": "-c default_transaction_isolation=repeatable\\ read"}
_DJANGO: Final = {"isolation_level": IsolationLevel.REPEATABLE_READ}


@pytest.fixture(params=[_SERVER, _DJANGO], ids=["by the server", "by Django"])
def repeatable(request: pytest.FixtureRequest, postgres_db: CommittedDatabase) -> Iterator[str]:
    settings = connections.settings[postgres_db.alias]
    options = {**settings["OPTIONS"], **request.param}
    with another_alias("repeatable", **{**settings, "OPTIONS": options}) as alias:
        yield alias


def _level(db: Database) -> Any:
    ((level,),) = db.execute(_LEVEL, {})
    return level


def test_a_transaction_of_the_store_is_read_committed_and_leaves_the_default(repeatable: str) -> None:
    db = Database(repeatable, "")

    def in_a_block_of_the_caller() -> Any:
        with transaction.atomic(using=repeatable):
            return _level(db), db.transaction(lambda: _level(db))

    assert in_a_block_of_the_caller() == ("repeatable read",) * 2
    assert db.transaction(lambda: _level(db)) == "read committed"
    assert in_a_block_of_the_caller() == ("repeatable read",) * 2


def test_a_failed_transaction_leaves_the_default_too(repeatable: str) -> None:
    db = Database(repeatable, "")

    def fail() -> None:
        assert _level(db) == "read committed"
        raise KeyError

    with pytest.raises(KeyError):
        db.transaction(fail)
    with transaction.atomic(using=repeatable):
        assert _level(db) == "repeatable read"


def test_takeovers_at_once_all_succeed(repeatable: str, postgres_db: CommittedDatabase) -> None:
    locks = DatabaseLockManager(repeatable, tenant=postgres_db.tenant)
    assert locks.acquire("job") is not None

    def release_and_take() -> None:
        for _ in range(20):
            locks.force_release("job")
            locks.acquire("job")

    outcomes = run_in_threads(release_and_take, [()] * 4)
    assert [outcome.error for outcome in outcomes] == [None] * 4


def test_a_conflict_in_a_block_of_the_caller_is_a_busy_store(
    repeatable: str, postgres_db: CommittedDatabase
) -> None:
    store = DatabaseStateStore(repeatable, tenant=postgres_db.tenant)
    store.create_session("s", agent_type="t")

    def change_what_another_has_changed() -> None:
        with transaction.atomic(using=repeatable):
            store.load_state("s")
            run_in_threads(store.update_status, [("s", "paused")])[0].unwrap()
            store.update_status("s", "running")

    with pytest.raises(StoreBusy) as raised:
        change_what_another_has_changed()
    assert raised.value.retryable
    state = store.load_state("s")
    assert state is not None
    assert state.status == "paused"
