"""Claims: one resumer for one snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import transaction

from helix_store.checkpointers import InMemorySnapshotCheckpointer, SnapshotCheckpointer
from helix_store.core import moments
from helix_store.engine.memory import MemoryWorld
from helix_store.exceptions import InvalidPayload, LockLostError
from helix_store.models import Checkpoint
from tests.cells import for_each
from tests.checkpointers.conftest import Snapshots
from tests.databases import CommittedDatabase
from tests.processes import run_in_processes, run_in_threads

pytestmark = pytest.mark.usefixtures("machine")


def snapshot(number: int = 0) -> dict[str, Any]:
    return {"version": 1, "number": number}


def transaction_of(store: Snapshots) -> AbstractContextManager[object]:
    backend: Any = store._backend
    if isinstance(store, InMemorySnapshotCheckpointer):
        world: MemoryWorld = backend._scope.world
        return world.transaction()
    alias: str = backend.db.alias
    return transaction.atomic(using=alias)


@pytest.fixture
def store(make_snapshots: Callable[..., Snapshots]) -> Snapshots:
    store = make_snapshots()
    store.put("t", snapshot(1))
    return store


class TestClaim:
    def test_hands_out_the_newest_snapshot_once(self, store: Snapshots) -> None:
        newest = store.put("t", snapshot(2))
        claim = store.claim("t", owner="one")
        assert claim is not None
        assert (claim.thread_id, claim.checkpoint_id, claim.owner) == ("t", newest, "one")
        assert claim.snapshot == snapshot(2)
        assert store.claim("t", owner="two") is None
        assert store.claim("t", owner="one") is None
        assert store.claim("t", newest, owner="two") is None

    def test_of_another_snapshot_of_the_thread_is_another_claim(self, store: Snapshots) -> None:
        first = store.list("t")[0].id
        store.put("t", snapshot(2))
        assert store.claim("t", owner="one") is not None
        older = store.claim("t", first, owner="two")
        assert older is not None
        assert older.snapshot == snapshot(1)

    def test_is_none_when_there_is_nothing_to_resume(self, store: Snapshots) -> None:
        assert store.claim("unknown", owner="o") is None
        assert store.claim("t", "unknown", owner="o") is None
        store.delete("t")
        assert store.claim("t", owner="o") is None

    def test_done_is_for_ever(self, store: Snapshots) -> None:
        claim = store.claim("t", owner="o")
        assert claim is not None
        assert claim.done()
        assert claim.done()
        assert not claim.release()
        with pytest.raises(LockLostError):
            claim.refresh()
        assert store.claim("t", owner="two") is None
        assert store.get("t") == snapshot(1)

    def test_released_is_free_again_and_the_former_claim_is_void(self, store: Snapshots) -> None:
        first = store.claim("t", owner="o")
        assert first is not None
        assert first.release()
        assert not first.release()
        assert not first.done()
        second = store.claim("t", owner="o")
        assert second is not None
        assert second.token > first.token
        assert not first.done()
        assert not first.release()
        with pytest.raises(LockLostError):
            first.refresh()
        assert second.done()

    def test_rolled_back_is_void_even_if_the_same_owner_claims_again(self, store: Snapshots) -> None:
        with suppress(KeyError), transaction_of(store):
            first = store.claim("t", owner="o")
            raise KeyError
        assert first is not None
        second = store.claim("t", owner="o")
        assert second is not None
        with pytest.raises(LockLostError):
            first.refresh()
        assert not first.done()
        assert not first.release()
        assert second.done()

    def test_a_new_snapshot_can_be_claimed_while_an_older_one_is_being_resumed(
        self, store: Snapshots
    ) -> None:
        claim = store.claim("t", owner="one")
        assert claim is not None
        store.put("t", snapshot(2))
        again = store.claim("t", owner="two")
        assert again is not None
        assert again.snapshot == snapshot(2)
        assert claim.done()

    def test_ends_with_its_snapshot(self, store: Snapshots) -> None:
        claim = store.claim("t", owner="o")
        assert claim is not None
        store.delete("t")
        assert not claim.done()
        assert not claim.release()
        with pytest.raises(LockLostError):
            claim.refresh()
        store.delete_threads(["t"])
        assert not claim.done()

    def test_what_it_hands_out_is_detached(self, store: Snapshots) -> None:
        claim = store.claim("t", owner="o")
        assert claim is not None
        claim.snapshot.clear()
        assert store.get("t") == snapshot(1)

    @for_each("owner", ["", "a\x00", None, 7])
    def test_refuses_a_bad_owner(self, store: Snapshots, owner: Any) -> None:
        with pytest.raises(InvalidPayload):
            store.claim("t", owner=owner)

    @for_each("ttl_ms", [0, -1, 1.5, float("nan"), "1", True, 8 * 24 * 60 * 60 * 1000])
    def test_refuses_a_bad_term(self, store: Snapshots, ttl_ms: Any) -> None:
        with pytest.raises(InvalidPayload):
            store.claim("t", owner="o", ttl_ms=ttl_ms)
        claim = store.claim("t", owner="o")
        assert claim is not None
        with pytest.raises(InvalidPayload):
            claim.refresh(ttl_ms)


class TestTerm:
    """The end of a term, without waiting for it: memory by its clock, the database by its row."""

    @pytest.fixture
    def snapshots(self, snapshots: SnapshotCheckpointer) -> SnapshotCheckpointer:
        snapshots.put("t", snapshot(1))
        return snapshots

    def expire(self, database: CommittedDatabase) -> None:
        rows = Checkpoint.objects.using(database.alias).filter(session__tenant=database.tenant)
        assert rows.exclude(claim_expires_at=None).update(claim_expires_at=datetime(2020, 1, 1).astimezone())

    def test_over_lets_the_next_one_in(
        self, snapshots: SnapshotCheckpointer, committed_db: CommittedDatabase
    ) -> None:
        dead = snapshots.claim("t", owner="dead")
        assert dead is not None
        self.expire(committed_db)
        with pytest.raises(LockLostError):
            dead.refresh()
        assert not dead.release()
        heir = snapshots.claim("t", owner="heir")
        assert heir is not None
        assert heir.token > dead.token
        assert not dead.done()
        assert snapshots.claim("t", owner="third") is None

    def test_is_done_after_its_term_when_there_was_no_other_claim(
        self, snapshots: SnapshotCheckpointer, committed_db: CommittedDatabase
    ) -> None:
        late = snapshots.claim("t", owner="late")
        assert late is not None
        self.expire(committed_db)
        assert late.done()
        assert snapshots.claim("t", owner="next") is None

    def test_is_on_the_databases_clock_and_not_on_the_workers(
        self, snapshots: SnapshotCheckpointer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        claim = snapshots.claim("t", owner="o", ttl_ms=60_000)
        assert claim is not None
        now = moments.now()
        assert abs(claim.expires_at - now - timedelta(minutes=1)) < timedelta(seconds=30)
        monkeypatch.setattr(moments, "now", lambda: now + timedelta(days=365))
        assert snapshots.claim("t", owner="hasty") is None

    def test_refreshed_lasts_longer(self, snapshots: SnapshotCheckpointer) -> None:
        claim = snapshots.claim("t", owner="o", ttl_ms=60_000)
        assert claim is not None
        first = claim.expires_at
        assert claim.refresh(600_000) == claim.expires_at
        assert claim.expires_at - first > timedelta(minutes=8)

    def test_over_lets_the_next_one_in_also_in_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = InMemorySnapshotCheckpointer()
        store.put("t", snapshot(1))
        first = store.claim("t", owner="dead", ttl_ms=1_000)
        assert first is not None
        assert store.claim("t", owner="heir") is None
        later = time.monotonic() + 2
        monkeypatch.setattr(time, "monotonic", lambda: later)
        second = store.claim("t", owner="heir")
        assert second is not None
        assert not first.done()
        assert second.done()


def claim_and_say(alias: str, tenant: str, owner: str) -> bool:
    return SnapshotCheckpointer(alias, tenant=tenant).claim("t", owner=owner) is not None


@pytest.mark.thorough
@pytest.mark.parametrize("run", [run_in_processes, run_in_threads], ids=["processes", "threads"])
def test_of_eight_resumers_at_once_exactly_one_gets_it(
    snapshots: SnapshotCheckpointer, committed_db: CommittedDatabase, run: Any
) -> None:
    snapshots.put("t", snapshot(1))
    arguments = [(committed_db.alias, committed_db.tenant, f"worker-{each}") for each in range(8)]
    assert [outcome.unwrap() for outcome in run(claim_and_say, arguments)].count(True) == 1


def test_of_eight_threads_at_once_exactly_one_gets_it_in_memory() -> None:
    store = InMemorySnapshotCheckpointer()
    for number in range(20):
        store.put("t", snapshot(number))
        outcomes = run_in_threads(lambda owner: store.claim("t", owner=owner), [(f"w{n}",) for n in range(8)])
        assert sum(outcome.unwrap() is not None for outcome in outcomes) == 1


def test_done_commits_with_the_side_effect_or_not_at_all(
    snapshots: SnapshotCheckpointer, committed_db: CommittedDatabase
) -> None:
    snapshots.put("t", snapshot(1))
    claim = snapshots.claim("t", owner="o")
    assert claim is not None
    with transaction.atomic(using=committed_db.alias):
        assert claim.done()
        snapshots.put("side effect", snapshot(2))
        transaction.set_rollback(True, using=committed_db.alias)
    assert snapshots.get("side effect") is None
    assert claim.release()
