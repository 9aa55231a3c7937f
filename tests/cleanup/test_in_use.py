"""What keeps a session from retention, and what of another tenant or from an earlier time does not."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync

from helix_store.cleanup import erase
from helix_store.core import moments
from helix_store.core.types import StepInfo, SubSessionRef
from helix_store.locks import Lock as HeldLock
from helix_store.models import Lock, Session, Stream
from helix_store.retention import RetentionPolicy, apply_retention
from helix_store.stores import DatabaseLockManager, DatabaseStateStore, DatabaseStreamManager
from helix_store.testing.state_store.samples import loaded
from tests.cells import for_each
from tests.databases import CommittedDatabase

IDLE: Final = RetentionPolicy(sessions_idle_days={"completed": 30, "active": 10_000})
LAST_CHECKPOINT: Final = RetentionPolicy(checkpoints_keep=1)
MINUTE: Final = timedelta(minutes=1)

Use = Callable[[DatabaseStateStore], object]


@pytest.fixture
def ours(empty_db: CommittedDatabase) -> DatabaseStateStore:
    """A tenant with one session of two checkpoints, whose parent is gone."""
    store = DatabaseStateStore(empty_db.alias, tenant="ours")
    store.create_session("parent", agent_type="agent")
    store.create_session("old", agent_type="agent", parent_session_id="parent")
    Session.objects.using(store.alias).filter(session_id="parent").delete()
    for number in (1, 2):
        state = loaded(store, "old")
        state.stream_id = "stream"
        store.save_state_and_promote_staging("old", state, [], StepInfo(f"step-{number}", number))
    return store


@pytest.fixture
def theirs(ours: DatabaseStateStore) -> DatabaseStateStore:
    return DatabaseStateStore(ours.alias, tenant="theirs")


def end_long_ago(store: DatabaseStateStore) -> None:
    store.update_status("old", "completed")
    rows = Session.objects.using(store.alias).filter(tenant=store.tenant, session_id="old")
    assert rows.update(updated_at=moments.now() - timedelta(days=100)) == 1


def lock(store: DatabaseStateStore) -> object:
    return DatabaseLockManager(store.alias, tenant=store.tenant).acquire("old")


def run(store: DatabaseStateStore) -> object:
    return store.start_run("old", "run")


def _run_of(store: DatabaseStateStore, *, newer_by: int = 0) -> Any:
    """Start a run with the token of a lock, or with a newer one, which no lock of this database has."""
    held = lock(store)
    assert isinstance(held, HeldLock)
    store.start_run("old", "run", fencing_token=held.fencing_token + newer_by)
    return held


def abandon(store: DatabaseStateStore) -> object:
    """The worker has released its lock before it could end its run."""
    return _run_of(store).release()


def abandon_by_death(store: DatabaseStateStore) -> object:
    _run_of(store)
    return _update(store, Lock, expires_at=moments.now() - MINUTE)


def abandon_by_force(store: DatabaseStateStore) -> object:
    _run_of(store)
    return DatabaseLockManager(store.alias, tenant=store.tenant).force_release("old")


def run_with_other_locks(store: DatabaseStateStore) -> object:
    """The run has the token of another lock manager, so nobody can tell whether its worker lives."""
    return _run_of(store, newer_by=1).release()


def run_beside_a_lock_of_another_tenant(store: DatabaseStateStore) -> object:
    elsewhere = lock(DatabaseStateStore(store.alias, tenant="theirs"))
    assert isinstance(elsewhere, HeldLock)
    elsewhere.release()
    return store.start_run("old", "run", fencing_token=1)


def run_to_the_end(store: DatabaseStateStore) -> object:
    store.start_run("old", "run")
    return store.update_run("old", "run", status="completed")


def write(store: DatabaseStateStore) -> object:
    streams = DatabaseStreamManager(store.alias, tenant=store.tenant)
    return async_to_sync(streams.create_writer)("stream", "run", "agent")


def lock_before(store: DatabaseStateStore) -> object:
    lock(store)
    return _update(store, Lock, expires_at=moments.now() - MINUTE)


def write_before(store: DatabaseStateStore) -> object:
    write(store)
    return _update(store, Stream, lease_expires_at=moments.now() - MINUTE)


def write_to_the_end(store: DatabaseStateStore) -> object:
    """The lease of the writer goes on; the stream has ended."""
    write(store)
    return _update(store, Stream, status="ended", ended_at=moments.now())


def own(store: DatabaseStateStore) -> object:
    return store.create_session("parent", agent_type="agent")


def refer(store: DatabaseStateStore, **location: Any) -> object:
    store.create_session("owner", agent_type="agent")
    ref = SubSessionRef(sub_session_id="old", agent_type="agent", **location)
    store.add_sub_session_refs("owner", [ref])
    return ref


def refer_to_a_remote_one(store: DatabaseStateStore) -> object:
    return refer(store, location="remote", remote={"url": "https://example.com/old"})


def _update(store: DatabaseStateStore, model: Any, **columns: Any) -> int:
    count: int = model.objects.using(store.alias).filter(tenant=store.tenant).update(**columns)
    return count


@pytest.mark.thorough
@for_each("use", [lock, run, run_with_other_locks, run_beside_a_lock_of_another_tenant, write, refer])
def test_a_session_that_is_used_or_owned_stays(ours: DatabaseStateStore, use: Use) -> None:
    assert use(ours)
    end_long_ago(ours)
    assert apply_retention(using=ours.alias, policy=IDLE).trees == 0


def test_a_session_whose_status_has_no_rule_keeps_its_tree(ours: DatabaseStateStore) -> None:
    ours.create_session("waits", agent_type="agent", parent_session_id="old")
    ours.update_status("waits", "paused")
    end_long_ago(ours)
    assert _update(ours, Session, updated_at=moments.now() - timedelta(days=100)) == 2
    assert apply_retention(using=ours.alias, policy=IDLE).trees == 0


_OVER: Final = (
    lock_before,
    run_to_the_end,
    abandon,
    abandon_by_death,
    abandon_by_force,
    write_before,
    write_to_the_end,
)


@pytest.mark.thorough
@for_each("use", [*_OVER, refer_to_a_remote_one])
def test_what_is_over_or_elsewhere_keeps_no_session(ours: DatabaseStateStore, use: Use) -> None:
    assert use(ours)
    end_long_ago(ours)
    assert apply_retention(using=ours.alias, policy=IDLE).trees == 1


@for_each("use", [lock, write, own, refer])
def test_another_tenant_keeps_no_session(
    ours: DatabaseStateStore, theirs: DatabaseStateStore, use: Use
) -> None:
    assert use(theirs)
    end_long_ago(ours)
    assert apply_retention(using=ours.alias, policy=IDLE).trees == 1


@pytest.mark.parametrize("use", [lock, run])
def test_a_session_in_use_keeps_its_checkpoints(ours: DatabaseStateStore, use: Use) -> None:
    assert use(ours)
    assert apply_retention(using=ours.alias, policy=LAST_CHECKPOINT).checkpoints == {}


@for_each("use", [abandon, abandon_by_death])
def test_an_abandoned_session_is_free(ours: DatabaseStateStore, use: Use) -> None:
    assert use(ours)
    assert apply_retention(using=ours.alias, policy=LAST_CHECKPOINT).checkpoints == {"checkpoint": 1}
    erase(using=ours.alias, tenant=ours.tenant, session_id="old")
    assert not ours.session_exists("old")


def test_a_lock_that_is_over_or_of_another_tenant_keeps_no_checkpoint(
    ours: DatabaseStateStore, theirs: DatabaseStateStore
) -> None:
    assert lock_before(ours)
    assert lock(theirs)
    assert apply_retention(using=ours.alias, policy=LAST_CHECKPOINT).checkpoints == {"checkpoint": 1}


def test_checkpoints_of_one_tenant_are_counted_without_those_of_another(
    ours: DatabaseStateStore, theirs: DatabaseStateStore
) -> None:
    theirs.create_session("theirs", agent_type="agent")
    report = apply_retention(using=ours.alias, tenant="theirs", policy=LAST_CHECKPOINT)
    assert report.checkpoints == {}
    assert len(ours.list_checkpoints("old").items) == 2


def deleted_by_each(store: DatabaseStateStore) -> dict[str, int]:
    """The rows that retention would delete, and an erasure would and does."""
    end_long_ago(store)
    would = apply_retention(using=store.alias, tenant=store.tenant, policy=IDLE, dry_run=True).sessions
    for dry_run in (True, False):
        receipt = erase(using=store.alias, tenant=store.tenant, session_id="old", dry_run=dry_run)
        assert receipt.deleted == would
    return would


def test_a_stream_goes_with_the_only_session_of_its_tenant_that_refers_to_it(
    ours: DatabaseStateStore, theirs: DatabaseStateStore
) -> None:
    for store in (ours, theirs):
        write_before(store)
    theirs.create_session("one", agent_type="agent", stream_id="stream")
    assert deleted_by_each(ours)["stream"] == 1
    kept = Stream.objects.using(ours.alias).values_list("tenant", "stream_id")
    assert list(kept) == [("theirs", "stream")]


def test_a_stream_of_another_tenant_is_not_counted(
    ours: DatabaseStateStore, theirs: DatabaseStateStore
) -> None:
    for store in (ours, theirs):
        write_before(store)
    assert deleted_by_each(ours)["stream"] == 1


@pytest.mark.parametrize("other", ["stream", "another"])
def test_a_stream_of_another_session_stays_also_if_it_has_its_name(
    ours: DatabaseStateStore, other: str
) -> None:
    write_before(ours)
    ours.create_session(other, agent_type="agent", stream_id="stream")
    assert "stream" not in deleted_by_each(ours)
    assert Stream.objects.using(ours.alias).count() == 1
