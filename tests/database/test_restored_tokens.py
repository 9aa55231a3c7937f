"""A database that was restored from a backup gives out tokens again: the holders differ in something else."""

from __future__ import annotations

import pytest

from helix_store.checkpointers import SnapshotCheckpointer
from helix_store.exceptions import LockLostError
from helix_store.models import Checkpoint, Lock
from helix_store.stores import DatabaseLockManager
from tests.databases import CommittedDatabase


def test_a_lock_is_not_refreshed_by_a_holder_from_before(committed_db: CommittedDatabase) -> None:
    locks = DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant)
    before = locks.acquire("name", owner="worker")
    assert before is not None
    assert Lock.objects.using(committed_db.alias).filter(tenant=committed_db.tenant).delete()[0] == 1
    after = locks.acquire("name", owner="worker")
    assert after is not None
    assert after.fencing_token == before.fencing_token
    with pytest.raises(LockLostError):
        before.refresh()
    assert not before.release()
    assert after.refresh() == after.expires_at


def test_a_claim_is_not_refreshed_by_a_holder_from_before(committed_db: CommittedDatabase) -> None:
    snapshots = SnapshotCheckpointer(committed_db.alias, tenant=committed_db.tenant)
    snapshots.put("thread", {"version": 1})
    claim = snapshots.claim("thread", owner="before")
    assert claim is not None
    rows = Checkpoint.objects.using(committed_db.alias).filter(
        session__tenant=committed_db.tenant, claim_owner="before"
    )
    assert rows.update(claim_owner="after") == 1
    with pytest.raises(LockLostError):
        claim.refresh()
