"""What reads across tenants: lookups and pages stay small in a database with many sessions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.db import connections

from helix_store.core import moments
from helix_store.models import Checkpoint, Session
from helix_store.stores.directory import SessionDirectory
from tests.databases import CommittedDatabase
from tests.plans.explained import plans_of

SESSIONS = 5_000
TENANTS = 10


@pytest.fixture
def many_sessions(empty_db: CommittedDatabase) -> CommittedDatabase:
    """Sessions of ten tenants; each hundredth one has five checkpoints, the others one."""
    at = moments.now()
    sessions = Session.objects.using(empty_db.alias).bulk_create(
        [
            Session(
                tenant=f"tenant-{number % TENANTS}",
                session_id=f"session-{number}",
                agent_type="agent",
                status="active",
                created_at=at,
                updated_at=at,
            )
            for number in range(SESSIONS)
        ],
        batch_size=500,
    )
    Checkpoint.objects.using(empty_db.alias).bulk_create(
        [
            Checkpoint(
                session=session,
                kind="step",
                version=version,
                checkpoint_id=f"cpv1-{session.session_id}-s{version}-t1-abcdef",
                source="step",
                status="active",
                step_id="step",
                payload="{}",
                created_at=at,
            )
            for number, session in enumerate(sessions)
            for version in range(1, 6 if number % 100 == 0 else 2)
        ],
        batch_size=500,
    )
    with connections[empty_db.alias].cursor() as cursor:
        cursor.execute("ANALYZE")
    return empty_db


def rows_read(database: CommittedDatabase, call: Callable[[], object]) -> int:
    return sum(plan.rows_read for plan in plans_of(database, call))


def test_the_tenants_of_an_id_are_found_by_an_index(many_sessions: CommittedDatabase) -> None:
    directory = SessionDirectory(many_sessions.alias)
    assert directory.tenants_of("session-4321") == ["tenant-1"]
    for session_id in ("session-4321", "unknown"):
        assert rows_read(many_sessions, lambda: directory.tenants_of(session_id)) < 20 * TENANTS  # noqa: B023


def test_a_page_of_a_prune_reads_its_sessions_once(many_sessions: CommittedDatabase) -> None:
    directory = SessionDirectory(many_sessions.alias)
    found = list(directory.prune_checkpoints(keep=4, dry_run=True, page_size=10))
    assert (len(found), found[-1].checkpoints) == (50, 50)
    # The first page ends with the tenth session that has more: it reads a fifth of the checkpoints.
    read = rows_read(
        many_sessions, lambda: next(directory.prune_checkpoints(keep=4, dry_run=True, page_size=10))
    )
    assert read < 1_500
