"""The end of a run that waits for the session's lock finds another run than at its start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.core.types import Run
from helix_store.exceptions import ConflictError, FencedOutError
from helix_store.models import Session
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from tests.database.waiting import in_background, until_it_waits
from tests.databases import CommittedDatabase


@pytest.fixture
def token(store: DatabaseStateStore, postgres_db: CommittedDatabase) -> int:
    """That of the worker whose run is open."""
    store.create_session("s", agent_type="t")
    lock = DatabaseLockManager(postgres_db.alias, tenant=postgres_db.tenant).acquire("s")
    assert lock is not None
    store.start_run("s", "run", fencing_token=lock.fencing_token)
    return lock.fencing_token


def ended_after(
    meanwhile: Callable[[], Any],
    *,
    token: int | None,
    other: BaseDatabaseWrapper,
    database: CommittedDatabase,
    status: str = "completed",
) -> Any:
    """What the end of the run comes to that began before ``meanwhile`` was committed."""
    others_store = DatabaseStateStore(other.alias, tenant=database.tenant)
    with transaction.atomic(using=database.alias):
        meanwhile()
        outcome = in_background(
            other,
            lambda: others_store.update_run("s", "run", status=status, step_count=1, fencing_token=token),
        )
        until_it_waits(database, other)
    return outcome()


def test_a_run_that_was_superseded_while_its_end_waited_stays_superseded(
    store: DatabaseStateStore, token: int, other: BaseDatabaseWrapper, postgres_db: CommittedDatabase
) -> None:
    outcome = ended_after(
        lambda: store.start_run("s", "next", supersede=True), token=token, other=other, database=postgres_db
    )
    assert isinstance(outcome, ConflictError)
    run = store.list_runs("s")[1]
    assert (run.run_id, run.status, run.completion_reason) == ("run", "interrupted", "superseded")


def test_the_first_end_time_counts_when_the_second_end_waited_for_it(
    store: DatabaseStateStore, token: int, other: BaseDatabaseWrapper, postgres_db: CommittedDatabase
) -> None:
    ends: list[Run] = []
    outcome = ended_after(
        lambda: ends.append(store.update_run("s", "run", status="failed", completion_reason="first")),
        token=None,
        other=other,
        database=postgres_db,
    )
    assert (outcome.status, outcome.completion_reason, outcome.step_count) == ("completed", "first", 1)
    assert outcome.ended_at == ends[0].ended_at
    assert store.list_runs("s") == [outcome]


def test_a_run_that_fails_while_the_next_one_starts_does_not_stop_the_session(
    store: DatabaseStateStore, token: int, other: BaseDatabaseWrapper, postgres_db: CommittedDatabase
) -> None:
    outcome = ended_after(
        lambda: store.start_run("s", "next", supersede=True),
        token=None,
        other=other,
        database=postgres_db,
        status="failed",
    )
    assert (outcome.run_id, outcome.status) == ("run", "failed")
    session = Session.objects.using(postgres_db.alias).get(tenant=postgres_db.tenant)
    assert (session.stopped_by, session.stopped_at) == (None, None)


def test_a_run_that_fails_after_it_has_waited_stops_the_session(
    store: DatabaseStateStore, token: int, other: BaseDatabaseWrapper, postgres_db: CommittedDatabase
) -> None:
    outcome = ended_after(
        lambda: store.append_messages("s", [{"role": "user"}]),
        token=token,
        other=other,
        database=postgres_db,
        status="failed",
    )
    session = Session.objects.using(postgres_db.alias).get(tenant=postgres_db.tenant)
    assert (session.stopped_by, session.stopped_at) == ("error", outcome.ended_at)


def test_a_fence_that_is_older_than_the_lock_ends_no_run(
    store: DatabaseStateStore, token: int, postgres_db: CommittedDatabase
) -> None:
    DatabaseLockManager(postgres_db.alias, tenant=postgres_db.tenant).force_release("s")
    with pytest.raises(FencedOutError):
        store.update_run("s", "run", status="completed", fencing_token=token)
    assert store.list_runs("s")[0].status == "running"
