"""A write of one statement whose reply is lost while another writer changes the same rows."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync
from django.db.models import Model
from django.test import override_settings
from langgraph.checkpoint.serde.types import RESUME

from helix_store.checkpointers import SnapshotCheckpointer
from helix_store.contrib.langgraph import DjangoSaver
from helix_store.core import moments
from helix_store.core.types import RunStatus, StatusChange
from helix_store.engine.database import new_call_id
from helix_store.engine.statement import CALL_IDS_LENGTH, recorded_value
from helix_store.exceptions import ConflictError, LockLostError, OutcomeUnknown
from helix_store.models import Lock, Operation
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
)
from helix_store.testing.usage.base import tokens
from tests.cells import for_each
from tests.faults.proxy import Cut
from tests.faults.wires import Wire
from tests.frameworks.langgraph.graphs import config_of, put

CUTS: Final = pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.AFTER], ids=["not stored", "stored"])
TICK: Final = {"type": "text", "text": "\n"}
ORDER: Final = {"tool_call_id": "order", "merge_changes": {"orders": ["A-17"]}}


def session(alias: str, wire: Wire) -> DatabaseStateStore:
    return DatabaseStateStore(alias, tenant=wire.tenant)


def streams(alias: str, wire: Wire) -> DatabaseStreamManager:
    return DatabaseStreamManager(alias, tenant=wire.tenant)


def open_stream(manager: DatabaseStreamManager) -> None:
    async_to_sync(manager.create_writer)("stream", "run", "agent")


def snapshots(alias: str, wire: Wire) -> SnapshotCheckpointer:
    return SnapshotCheckpointer(alias, tenant=wire.tenant)


def rows(model: type[Model], wire: Wire) -> Any:
    return model._default_manager.using(wire.direct)


# --- Staged changes ---


def by_a_step(store: DatabaseStateStore) -> None:
    state = store.load_state("session")
    assert state is not None
    store.save_state_and_promote_staging("session", state, [], {"step_id": "step", "step_count": 1})


def by_a_portable_step(store: DatabaseStateStore) -> None:
    state = store.load_state("session")
    assert state is not None
    store.save_state_and_promote_staging(
        "session", state, [], {"step_id": "step", "step_count": 1}, operation_id="operation"
    )


def by_a_promotion(store: DatabaseStateStore) -> None:
    store.promote_staging("session", "step")


def by_a_discard(store: DatabaseStateStore) -> None:
    store.discard_staging("session", "step")


def by_a_restore(store: DatabaseStateStore) -> None:
    store.restore_checkpoint("session", store.list_checkpoints("session").items[0].checkpoint_id)


TAKEN: Final[list[Callable[[DatabaseStateStore], None]]] = [
    by_a_step,
    by_a_portable_step,
    by_a_promotion,
    by_a_discard,
    by_a_restore,
]


@for_each("take", TAKEN, ids=lambda take: take.__name__)
def test_a_staged_change_that_was_taken_is_not_staged_again(
    wire: Wire, take: Callable[[DatabaseStateStore], None]
) -> None:
    store, other = session(wire.alias, wire), session(wire.direct, wire)
    state = store.create_session("session", agent_type="agent")
    store.save_state_and_promote_staging("session", state, [], {"step_id": "first", "step_count": 0})
    wire.proxy.arm(Cut.AFTER, meanwhile=lambda: take(other))
    store.stage_changes("session", "step", ORDER)
    assert store.get_staged_changes("session", "step") == []
    store.promote_staging("session", "step")
    loaded = store.load_state("session")
    assert loaded is not None
    is_kept = take not in (by_a_discard, by_a_restore)
    assert loaded.custom_state == ({"orders": ["A-17"]} if is_kept else {})


@CUTS
def test_a_staged_change_keeps_its_place_before_a_later_one_of_the_same_call(wire: Wire, cut: Cut) -> None:
    store, other = session(wire.alias, wire), session(wire.direct, wire)
    store.create_session("session", agent_type="agent")
    later = {"tool_call_id": "order", "merge_changes": {"orders": ["B-4"]}}
    wire.proxy.arm(cut, meanwhile=lambda: other.stage_changes("session", "step", later))
    store.stage_changes("session", "step", ORDER)
    (staged,) = store.get_staged_changes("session", "step")
    # The one that was not stored before is stored after the other.
    assert staged.merge_changes == (later if cut is Cut.AFTER else ORDER)["merge_changes"]


def test_a_change_that_was_staged_before_a_step_leaves_one_mark(wire: Wire) -> None:
    store = session(wire.alias, wire)
    store.create_session("session", agent_type="agent")
    store.stage_changes("session", "step", ORDER)
    by_a_step(store)
    (mark,) = rows(Operation, wire).filter(session__tenant=wire.tenant)
    assert mark.digest == ""


# --- Steps ---


@CUTS
@pytest.mark.parametrize("operation_id", [None, "operation"], ids=["checkpoint", "operation"])
def test_a_step_that_others_went_on_from_is_counted_once(
    wire: Wire, cut: Cut, operation_id: str | None
) -> None:
    store, other = session(wire.alias, wire), session(wire.direct, wire)
    state = store.create_session("session", agent_type="agent")
    wire.proxy.arm(cut, meanwhile=lambda: by_a_step(other))
    message = {"role": "assistant", "content": "mine"}
    step = {"step_id": "step", "step_count": 1}
    store.save_state_and_promote_staging("session", state, [message], step, operation_id=operation_id)
    assert len(other.get_messages("session").messages) == 1
    assert len(other.list_checkpoints("session").items) == 2


# --- Streams ---


@pytest.mark.thorough
@CUTS
@pytest.mark.parametrize("fast", [True, False], ids=["one statement", "portable"])
def test_equal_chunks_of_two_writers_are_both_stored(wire: Wire, cut: Cut, fast: bool, settings: Any) -> None:
    settings.HELIX_STORE = {"FAST_PATHS": fast}
    writer = streams(wire.alias, wire)
    open_stream(writer)
    told: list[int] = []
    other = streams(wire.direct, wire)
    wire.proxy.arm(cut, meanwhile=lambda: told.append(other.write_sync("stream", [TICK])))
    told.append(writer.write_sync("stream", [TICK]))
    assert sorted(told) == [1, 2]
    assert told == ([2, 1] if cut is Cut.AFTER else [1, 2])
    assert len(other.read_after("stream", 0)) == 2


@CUTS
def test_an_append_whose_stream_was_reset_meanwhile_is_unknown(wire: Wire, cut: Cut) -> None:
    writer, other = streams(wire.alias, wire), streams(wire.direct, wire)
    open_stream(writer)
    wire.proxy.arm(cut, meanwhile=lambda: async_to_sync(other.reset_stream)("stream"))
    with pytest.raises(OutcomeUnknown):
        writer.write_sync("stream", [{"type": "text", "text": "lost"}])
    assert other.read_after("stream", 0) == []


@pytest.mark.thorough
def test_an_append_that_another_worker_ended_the_stream_after_is_known(wire: Wire) -> None:
    writer, other = streams(wire.alias, wire), streams(wire.direct, wire)
    open_stream(writer)
    wire.proxy.arm(Cut.AFTER, meanwhile=lambda: async_to_sync(other.end_stream)("stream"))
    assert writer.write_sync("stream", [{"type": "text", "text": "last"}]) == 1


@pytest.mark.thorough
@CUTS
def test_a_lease_that_another_writer_took_is_renewed_and_nothing_else(wire: Wire, cut: Cut) -> None:
    mine = async_to_sync(streams(wire.alias, wire).create_writer)("stream", "run", "agent")
    theirs = async_to_sync(streams(wire.direct, wire).create_writer)("stream", "run", "other")
    wire.proxy.arm(cut, meanwhile=lambda: async_to_sync(theirs.write)(TICK))
    async_to_sync(mine.heartbeat)()
    assert [async_to_sync(writer.write)(TICK) for writer in (mine, theirs)] == [2, 3]


# --- Runs and statuses ---


def test_a_run_that_another_worker_resumed_is_not_ended_again(wire: Wire) -> None:
    store, other = session(wire.alias, wire), session(wire.direct, wire)
    store.create_session("session", agent_type="agent")
    store.start_run("session", "run")
    wire.proxy.arm(
        Cut.AFTER, meanwhile=lambda: other.update_run("session", "run", status=RunStatus.RUNNING.value)
    )
    store.update_run("session", "run", status=RunStatus.INTERRUPTED.value)
    current = other.get_current_run("session")
    assert current is not None
    assert current.run_id == "run"


def test_a_run_that_was_not_ended_is_ended_after_what_others_wrote(wire: Wire) -> None:
    store, other = session(wire.alias, wire), session(wire.direct, wire)
    store.create_session("session", agent_type="agent")
    store.start_run("session", "run")
    wire.proxy.arm(
        Cut.BEFORE, meanwhile=lambda: other.update_run("session", "run", status=RunStatus.INTERRUPTED.value)
    )
    ended = store.update_run("session", "run", status=RunStatus.FAILED.value)
    assert ended.status is RunStatus.FAILED


def test_a_status_that_another_worker_set_back_is_not_set_again(wire: Wire) -> None:
    store, other = session(wire.alias, wire), session(wire.direct, wire)
    version = store.create_session("session", agent_type="agent").version
    wire.proxy.arm(Cut.AFTER, meanwhile=lambda: other.compare_and_set_status("session", {"paused"}, "active"))
    changed = store.compare_and_set_status("session", {"active"}, "paused")
    assert changed == StatusChange(new_version=version + 1)
    loaded = other.load_state("session")
    assert loaded is not None
    assert (loaded.status.value, loaded.version) == ("active", version + 2)


def test_a_status_that_was_not_set_is_set_after_what_others_wrote(wire: Wire) -> None:
    store, other = session(wire.alias, wire), session(wire.direct, wire)
    version = store.create_session("session", agent_type="agent").version
    wire.proxy.arm(Cut.BEFORE, meanwhile=lambda: other.increment_step_count("session"))
    changed = store.compare_and_set_status("session", {"active"}, "paused")
    assert changed == StatusChange(new_version=version + 2)


def test_a_status_behind_too_many_others_is_unknown(wire: Wire) -> None:
    store, other = session(wire.alias, wire), session(wire.direct, wire)
    store.create_session("session", agent_type="agent")

    def set_often() -> None:
        for _ in range(20):
            other.compare_and_set_status("session", {"active", "paused"}, "active")

    wire.proxy.arm(Cut.AFTER, meanwhile=set_often)
    with pytest.raises(OutcomeUnknown):
        store.compare_and_set_status("session", {"active"}, "paused")


# --- Snapshots ---


@CUTS
@pytest.mark.parametrize("fast_paths", [True, False], ids=["one statement", "portable"])
def test_a_snapshot_is_put_once_beside_those_of_others(wire: Wire, cut: Cut, fast_paths: bool) -> None:
    mine, other = snapshots(wire.alias, wire), snapshots(wire.direct, wire)
    mine.put("thread", {"version": 1, "by": "nobody"})
    wire.proxy.arm(cut, meanwhile=lambda: other.put("thread", {"version": 1, "by": "other"}))
    with override_settings(HELIX_STORE={"FAST_PATHS": fast_paths}):
        put = mine.put("thread", {"version": 1, "by": "me"})
    order = [str(mine.get("thread", each.id)) for each in mine.list("thread")]
    assert ["'me'" in each for each in order] == (
        [False, True, False] if cut is Cut.AFTER else [True, False, False]
    )
    assert "'me'" in str(mine.get("thread", put))


def test_a_snapshot_of_another_writer_with_the_same_id_is_a_conflict(wire: Wire) -> None:
    mine = SnapshotCheckpointer(wire.alias, tenant=wire.tenant, id_factory=lambda: "same")
    other = SnapshotCheckpointer(wire.direct, tenant=wire.tenant, id_factory=lambda: "same")
    snapshots(wire.direct, wire).put("thread", {"version": 1})
    wire.proxy.arm(Cut.BEFORE, meanwhile=lambda: other.put("thread", {"version": 1, "by": "other"}))
    with pytest.raises(ConflictError):
        mine.put("thread", {"version": 1, "by": "me"})


# --- Locks ---


def test_an_acquisition_keeps_the_term_that_it_began(wire: Wire) -> None:
    locks = DatabaseLockManager(wire.alias, tenant=wire.tenant)
    wire.proxy.arm(Cut.AFTER)
    lock = locks.acquire("name", owner="worker")
    assert lock is not None
    assert lock.fencing_token == 1


def test_a_term_of_the_same_owner_that_began_meanwhile_stays(wire: Wire) -> None:
    locks = DatabaseLockManager(wire.alias, tenant=wire.tenant)
    other = DatabaseLockManager(wire.direct, tenant=wire.tenant)
    wire.proxy.arm(Cut.BEFORE, meanwhile=lambda: other.acquire("name", owner="worker"))
    assert locks.acquire("name", owner="worker") is None
    row = rows(Lock, wire).get(tenant=wire.tenant, name="name")
    assert row.token == 1


@CUTS
def test_a_release_ends_no_term_that_began_meanwhile(wire: Wire, cut: Cut) -> None:
    locks = DatabaseLockManager(wire.alias, tenant=wire.tenant)
    other = DatabaseLockManager(wire.direct, tenant=wire.tenant)
    lock = locks.acquire("name", owner="worker")
    assert lock is not None
    wire.proxy.arm(cut, meanwhile=lambda: other.take_over("name", owner="worker"))
    assert lock.release() is False
    assert [each.fencing_token for each in other.get_active_locks()] == [2]


@CUTS
def test_a_refresh_extends_no_term_that_began_meanwhile(wire: Wire, cut: Cut) -> None:
    locks = DatabaseLockManager(wire.alias, tenant=wire.tenant)
    other = DatabaseLockManager(wire.direct, tenant=wire.tenant)
    lock = locks.acquire("name", owner="worker")
    assert lock is not None
    wire.proxy.arm(cut, meanwhile=lambda: other.take_over("name", owner="worker", ttl_ms=60_000))
    with pytest.raises(LockLostError):
        lock.refresh(3_600_000)
    (term,) = other.get_active_locks()
    assert term.expires_at < moments.now() + timedelta(minutes=30)


# --- Usage ---


@CUTS
def test_equal_usage_of_two_writers_is_counted_of_both(wire: Wire, cut: Cut) -> None:
    session(wire.direct, wire).create_session("session", agent_type="agent")
    mine, other = (DatabaseUsageStore(alias, tenant=wire.tenant) for alias in (wire.alias, wire.direct))
    wire.proxy.arm(cut, meanwhile=lambda: other.record_entry(tokens(total=5)))
    mine.record_entry(tokens(total=5))
    assert len(other.get_entries("session")) == 2
    rollup = other.get_rollup("session")
    assert rollup is not None
    assert rollup.tokens.total == 10


# --- The checkpoints of LangGraph ---


THREAD: Final = config_of("thread")


def saver(alias: str, wire: Wire) -> DjangoSaver:
    return DjangoSaver(alias, tenant=wire.tenant)


@CUTS
def test_checkpoints_of_two_workers_in_one_thread_are_both_stored_once(wire: Wire, cut: Cut) -> None:
    mine, other = saver(wire.alias, wire), saver(wire.direct, wire)
    put(other, THREAD, {"said": "hello"})
    wire.proxy.arm(cut, meanwhile=lambda: put(other, THREAD, {"said": "theirs"}))
    put(mine, THREAD, {"said": "mine"})
    stored = [each.checkpoint["channel_values"]["said"] for each in other.list(THREAD)]
    assert sorted(stored) == ["hello", "mine", "theirs"]


@CUTS
def test_a_value_that_another_worker_resumed_with_meanwhile_is_not_replaced(wire: Wire, cut: Cut) -> None:
    mine, other = saver(wire.alias, wire), saver(wire.direct, wire)
    config = put(other, THREAD, {"said": "hello"})
    wire.proxy.arm(cut, meanwhile=lambda: other.put_writes(config, [(RESUME, "theirs")], "task"))
    mine.put_writes(config, [(RESUME, "mine")], "task")
    stored = other.get_tuple(config)
    assert stored is not None
    # The last one that was stored counts.
    resumed = "theirs" if cut is Cut.AFTER else "mine"
    assert stored.pending_writes == [("task", RESUME, resumed)]


@CUTS
def test_writes_of_a_task_are_those_of_the_worker_that_stored_them_first(wire: Wire, cut: Cut) -> None:
    mine, other = saver(wire.alias, wire), saver(wire.direct, wire)
    config = put(other, THREAD, {"said": "hello"})
    wire.proxy.arm(cut, meanwhile=lambda: other.put_writes(config, [("said", "theirs")], "task"))
    mine.put_writes(config, [("said", "mine")], "task")
    stored = other.get_tuple(config)
    assert stored is not None
    assert stored.pending_writes == [("task", "said", "mine" if cut is Cut.AFTER else "theirs")]


# --- The ids of a row ---


def test_an_id_that_may_have_been_dropped_leaves_the_outcome_unknown() -> None:
    kept = "".join(f"{new_call_id()}:{number} " for number in range(20))[:CALL_IDS_LENGTH]
    first = kept.split(":")[0]
    assert recorded_value(kept, first) == "0"
    with pytest.raises(OutcomeUnknown):
        recorded_value(kept, new_call_id())
    assert recorded_value(kept[:-1], new_call_id()) is None
    assert recorded_value(None, first) is None
