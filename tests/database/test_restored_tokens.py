"""A database that was restored from a backup gives out tokens again: the owner tells the holders apart."""

from __future__ import annotations

import pytest

from helix_store.checkpointers import SnapshotCheckpointer
from helix_store.exceptions import LockLostError
from helix_store.models import Checkpoint, Lock
from helix_store.stores import DatabaseLockManager
from tests.databases import CommittedDatabase


def test_a_lock_is_not_refreshed_by_a_holder_from_before(committed_db: CommittedDatabase) -> None:
    lock = DatabaseLockManager(committed_db.alias, tenant=committed_db.tenant).acquire("name", owner="before")
    assert lock is not None
    locks = Lock.objects.using(committed_db.alias).filter(tenant=committed_db.tenant)
    assert locks.update(owner="after") == 1
    with pytest.raises(LockLostError):
        lock.refresh()


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
