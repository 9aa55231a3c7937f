"""Eight cleaners at once, killed at random, while others renew and resume the very same sessions."""

from __future__ import annotations

import random
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from django.db.models import OuterRef, Subquery

from helix_store.cleanup import CleanupSummary, expired_session_cleanup
from helix_store.core import moments
from helix_store.core.limits import Limits
from helix_store.core.types import SessionState, SessionStatus
from helix_store.exceptions import ConflictError, StaleStateError
from helix_store.models import (
    Checkpoint,
    CheckpointKind,
    Session,
)
from helix_store.sessions.state import encode_state
from helix_store.stores import DatabaseStateStore
from tests.cleanup.conftest import LONG_AGO, later
from tests.cleanup.providers import FolderProvider
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants
from tests.processes import PROCESSES, WorkerProcess, run_in_processes, run_in_threads

CLEANERS = 8
KILLED = 5
SIZES = {"postgresql": (10_000, 2_000), "sqlite": (1_000, 200)}


class CountingProvider(FolderProvider):
    """Says when it has deleted so many snapshots, and goes on."""

    def __init__(self, folder: Path, count: int, reached: Event) -> None:
        super().__init__(folder)
        self.count = count
        self.reached = reached

    def delete_snapshot(self, snapshot_id: str) -> None:
        super().delete_snapshot(snapshot_id)
        self.count -= 1
        if self.count == 0:
            self.reached.set()


def clean_up(alias: str, tenant: str, folder: Path, page_size: int) -> CleanupSummary:
    return expired_session_cleanup(
        state_store=DatabaseStateStore(alias, tenant=tenant),
        workspace_providers={"folder": FolderProvider(folder)},
        page_size=page_size,
    )


def clean_up_until_killed(
    alias: str, tenant: str, folder: Path, limit: int, count: int, reached: Event
) -> None:
    try:
        expired_session_cleanup(
            state_store=DatabaseStateStore(alias, tenant=tenant),
            workspace_providers={"folder": CountingProvider(folder, count, reached)},
            page_size=10,
            limit=limit,
        )
    finally:
        reached.set()


def renew_and_resume(alias: str, tenant: str, expired: int, seed: int) -> list[str]:
    """The sessions that this process has renewed or resumed before any cleaner had them."""
    store = DatabaseStateStore(alias, tenant=tenant)
    chance = random.Random(seed)  # noqa: S311  a replayable mix
    saved = []
    for number in chance.sample(range(expired), expired // 8):
        session_id = f"session-{number}"
        state = store.load_state(session_id)
        assert state is not None
        if state.status.is_terminal or state.version > 1:
            continue
        try:
            if chance.random() < 0.5:
                state.expires_at = later()
                store.save_state(session_id, state, expected_version=state.version)
            else:
                store.resume(session_id, expected_version=state.version)
        except (ConflictError, StaleStateError):
            continue
        saved.append(session_id)
    return saved


def clean_up_or_renew(alias: str, tenant: str, folder: Path, expired: int, role: int) -> Any:
    if role < CLEANERS:
        return clean_up(alias, tenant, folder, page_size=20 + role)
    return renew_and_resume(alias, tenant, expired, seed=role)


def create_sessions(database: CommittedDatabase, folder: Path) -> tuple[int, int]:
    """Suspended sessions, the first of them expired, each with one snapshot."""
    total, expired = SIZES[database.vendor]
    now = moments.now()
    sessions, states = [], []
    for number in range(total):
        session_id = f"session-{number}"
        state = SessionState(
            session_id=session_id,
            agent_type="agent",
            status=SessionStatus.PAUSED,
            suspension_context={"at": number},
            root_session_id=session_id,
            expires_at=LONG_AGO + number if number < expired else later(),
            workspace_refs={"main": {"provider": "folder"}},
        )
        encoded = encode_state(state, Limits())
        columns = {**encoded.columns, "created_at": now, "updated_at": now}
        sessions.append(Session(tenant=database.tenant, session_id=session_id, **columns))
        states.append(encoded)
    rows = Session.objects.using(database.alias)
    rows.bulk_create(sessions, batch_size=500)
    Checkpoint.objects.using(database.alias).bulk_create(
        [
            Checkpoint(
                session_id=session.pk,
                kind=CheckpointKind.STATE,
                source="input",
                version=1,
                payload=state.payload,
                envelope=state.envelope,
                created_at=now,
            )
            for session, state in zip(sessions, states, strict=True)
        ],
        batch_size=500,
    )
    state_row = Checkpoint.objects.filter(session_id=OuterRef("pk")).values("pk")[:1]
    rows.filter(tenant=database.tenant).update(current_id=Subquery(state_row))
    for number in range(expired):
        (folder / f"session-{number}").mkdir()
        (folder / f"session-{number}" / "snapshot").touch()
    return total, expired


def test_every_expired_session_is_marked_once_and_none_that_was_renewed(
    committed_db: CommittedDatabase, tmp_path: Path
) -> None:
    alias, tenant = committed_db.alias, committed_db.tenant
    total, expired = create_sessions(committed_db, tmp_path)
    rows = Session.objects.using(alias).filter(tenant=tenant)
    failed = rows.filter(status="failed", failure_reason="session_expired")

    # Cleaners that die, each at another point of its work (unless the others leave it too little of that).
    renewer = WorkerProcess(renew_and_resume, alias, tenant, expired, 1)
    reached = [PROCESSES.Event() for _ in range(KILLED)]
    cleaners = [
        WorkerProcess(clean_up_until_killed, alias, tenant, tmp_path, expired // 10, 1 + 3 * number, event)
        for number, event in enumerate(reached)
    ]
    for cleaner, event in zip(cleaners, reached, strict=True):
        assert event.wait(60), cleaner.outcome(1)
        cleaner.kill()
    saved = set(renewer.outcome().unwrap())
    marked_before = failed.count()

    # Cleaners that live, at once.
    arguments = [(alias, tenant, tmp_path, expired, role) for role in range(CLEANERS + 2)]
    values = [outcome.unwrap() for outcome in run_in_processes(clean_up_or_renew, arguments, timeout=240)]
    summaries: list[CleanupSummary] = values[:CLEANERS]
    for renewed in values[CLEANERS:]:
        assert not saved & set(renewed)
        saved |= set(renewed)

    assert failed.count() == expired - len(saved)
    assert sum(summary.marked for summary in summaries) == failed.count() - marked_before
    for summary in summaries:
        assert summary.errors == 0
        assert summary.detected == summary.marked + summary.already_terminal + summary.renewed
    assert not failed.filter(session_id__in=saved).exists()
    assert failed.exclude(version=2).count() == 0, "marked more than once, or after a renewal"
    assert rows.filter(session_id__in=saved, version=2).count() == len(saved)
    assert rows.filter(version=1, status="paused").count() == total - expired
    assert clean_up(alias, tenant, tmp_path, page_size=200) == CleanupSummary()

    kept = {path.parent.name for path in tmp_path.glob("*/snapshot")}
    assert kept <= saved
    assert len(saved - kept) <= KILLED, "only a cleaner that died may have taken a snapshot along"
    assert 0 < len(saved) < expired
    assert marked_before < failed.count()
    if committed_db.vendor == "sqlite":
        assert broken_invariants(committed_db) == []


def resume_or_clean(alias: str, tenant: str, role: int) -> str:
    store = DatabaseStateStore(alias, tenant=tenant)
    if role == 0:
        return "marked" if expired_session_cleanup(state_store=store).marked else "left"
    try:
        store.resume("session")
    except ConflictError:
        return "refused"
    return "resumed"


def test_a_resume_that_races_with_its_cleanup_has_one_winner(committed_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    for _ in range(30):
        store.create_session("session", agent_type="agent")
        store.suspend("session", kind="suspended_client_tool", context={}, expires_at=LONG_AGO)
        arguments = [(committed_db.alias, committed_db.tenant, role) for role in (0, 1)]
        outcomes = run_in_threads(resume_or_clean, arguments)
        result = tuple(outcome.unwrap() for outcome in outcomes)
        assert result in {("marked", "refused"), ("left", "resumed")}
        state = store.load_state("session")
        assert state is not None
        assert state.status.value == ("failed" if result[0] == "marked" else "active")
        store.delete_session("session")
