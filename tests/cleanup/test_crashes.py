"""A cleaner that is killed between any two effects: the next one completes, and nothing live is failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from helix_store.cleanup import CleanupSummary, expired_session_cleanup
from helix_store.stores import DatabaseStateStore
from helix_store.testing.state_store.samples import loaded
from tests.cleanup.conftest import LONG_AGO, later
from tests.cleanup.providers import FolderProvider
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants
from tests.processes import PROCESSES, WorkerProcess

REFS = {"main": {"provider": "folder"}}
SNAPSHOTS = ("a", "b")
POINTS = [
    "before the claim",
    "after the claim",
    "between two snapshots",
    "after the snapshots",
    "before the commit",
]


class StoppingProvider(FolderProvider):
    """Stops for ever at one point, after it has said so."""

    def __init__(self, folder: Path, point: str, reached: Event) -> None:
        super().__init__(folder)
        self.point = point
        self.reached = reached
        self.count = 0

    def stop_at(self, point: str) -> None:
        if point == self.point:
            self.reached.set()
            PROCESSES.Event().wait()

    def list_snapshots(self, session_id: str, ref: Mapping[str, Any], *, tenant: str = "") -> Iterable[str]:
        self.stop_at("before the claim")
        return sorted(super().list_snapshots(session_id, ref))

    def delete_snapshot(self, snapshot_id: str) -> None:
        if self.count == 0:
            self.stop_at("after the claim")
        else:
            self.stop_at("between two snapshots")
        super().delete_snapshot(snapshot_id)
        self.count += 1
        if self.count == len(SNAPSHOTS):
            self.stop_at("after the snapshots")


def clean_up(alias: str, tenant: str, folder: Path, point: str, reached: Event) -> None:
    provider = StoppingProvider(folder, point, reached)
    store = DatabaseStateStore(alias, tenant=tenant)

    def stop_after_the_update(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        result = execute(sql, params, many, context)
        # Not the one that asks, before anything is deleted, whether the tenant takes writes.
        if sql.startswith("UPDATE") and provider.count == len(SNAPSHOTS):
            provider.stop_at("before the commit")
        return result

    with connections[alias].execute_wrapper(stop_after_the_update):
        expired_session_cleanup(state_store=store, workspace_providers={"folder": provider})


@pytest.mark.parametrize("then", ["cleaned up again", "renewed first"])
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_cleaner_leaves_what_the_next_one_completes(
    committed_db: CommittedDatabase, tmp_path: Path, point: str, then: str
) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    state = store.create_session("session", agent_type="agent", expires_at=LONG_AGO)
    state.workspace_refs = REFS
    store.save_state("session", state)
    snapshots = tmp_path / "session"
    snapshots.mkdir()
    for name in SNAPSHOTS:
        (snapshots / name).touch()
    before = repr(loaded(store, "session"))

    reached = PROCESSES.Event()
    worker = WorkerProcess(clean_up, committed_db.alias, committed_db.tenant, tmp_path, point, reached)
    assert reached.wait(60), worker.outcome(1)
    worker.kill()

    assert repr(loaded(store, "session")) == before, "a claim that is not kept changes nothing"
    left = len(list(snapshots.iterdir()))
    assert left == {"before the claim": 2, "after the claim": 2, "between two snapshots": 1}.get(point, 0)
    if then == "renewed first":
        state = loaded(store, "session")
        state.expires_at = later()
        store.save_state("session", state, expected_version=state.version)
    providers = {"folder": FolderProvider(tmp_path)}
    summary = expired_session_cleanup(state_store=store, workspace_providers=providers)
    if then == "renewed first":
        assert summary == CleanupSummary()
        assert loaded(store, "session").status.value == "active"
        assert len(list(snapshots.iterdir())) == left
    else:
        assert summary == CleanupSummary(detected=1, marked=1, snapshots_deleted=left)
        assert loaded(store, "session").failure_reason == "session_expired"
        assert list(snapshots.iterdir()) == []
    assert broken_invariants(committed_db) == []
