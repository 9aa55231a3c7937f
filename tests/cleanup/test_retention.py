"""Retention: what each rule deletes, what it leaves alone, and a dry run that says the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from helix_store import conf
from helix_store.checks.settings import check_settings
from helix_store.cleanup import retention
from helix_store.cleanup.retention import Retention
from helix_store.core import moments
from helix_store.core.types import StepInfo, UsageKind
from helix_store.core.usage import UsageEntry, UsageSource
from helix_store.engine.database import Database
from helix_store.models import Operation, Session, Stream, StreamChunk
from helix_store.models import UsageEntry as UsageRow
from helix_store.retention import RetentionPolicy, RetentionSummary, apply_retention
from helix_store.sessions.heads import delete_locked_sessions
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
)
from tests.cells import for_each
from tests.cleanup.providers import MemoryProvider
from tests.databases import CommittedDatabase, delete_all_rows
from tests.frameworks.pydantic_ai.conversations import forked, saved
from tests.processes import run_in_threads

DAY = timedelta(days=1)
IDLE = RetentionPolicy(sessions_idle_days={"completed": 30, "active": 90})
LONG = 100 * DAY


@pytest.fixture
def store(empty_db: CommittedDatabase) -> DatabaseStateStore:
    return DatabaseStateStore(empty_db.alias, tenant=empty_db.tenant)


def rows(store: DatabaseStateStore, model: Any) -> Any:
    return model.objects.using(store.alias)


def age(store: DatabaseStateStore, *session_ids: str, by: timedelta) -> None:
    """Make sessions look as if they had been written so long ago."""
    sessions = rows(store, Session).filter(tenant=store.tenant, session_id__in=session_ids)
    assert sessions.update(updated_at=moments.now() - by) == len(session_ids)


def completed(store: DatabaseStateStore, session_id: str, *, by: timedelta = LONG, **columns: Any) -> str:
    store.create_session(session_id, agent_type="agent", **columns)
    store.append_messages(session_id, [{"role": "user", "content": "hello"}])
    store.update_status(session_id, "completed")
    age(store, session_id, by=by)
    return session_id


def link(store: DatabaseStateStore, owner: str, session_id: str) -> None:
    ref = {"sub_session_id": session_id, "agent_type": "agent", "status": "running"}
    store.add_sub_session_refs(owner, [ref])


def retain(store: DatabaseStateStore, policy: RetentionPolicy, **options: Any) -> RetentionSummary:
    return apply_retention(using=store.alias, policy=policy, **options)


def everything(store: DatabaseStateStore) -> dict[str, list[Any]]:
    models = apps.get_app_config("helix_store").get_models()
    return {str(model): list(rows(store, model).order_by("pk").values()) for model in models}


def known(store: DatabaseStateStore) -> set[str]:
    return set(rows(store, Session).values_list("session_id", flat=True))


def test_sessions_go_by_the_idle_age_of_their_status(store: DatabaseStateStore) -> None:
    completed(store, "old")
    completed(store, "young", by=29 * DAY)
    for session_id, by in (("open", LONG), ("used", 31 * DAY), ("failed", LONG)):
        store.create_session(session_id, agent_type="agent")
        if session_id == "failed":
            store.update_status(session_id, "failed")
        age(store, session_id, by=by)
    summary = retain(store, IDLE)
    assert known(store) == {"young", "used", "failed"}
    assert summary.trees == 2
    assert summary.sessions == {"checkpoint": 2, "message": 1, "session": 2}


def test_a_session_with_something_to_come_is_idle_only_after_that(store: DatabaseStateStore) -> None:
    to_come = {"soon": DAY, "long ago": -LONG}
    for name, distance in to_come.items():
        store.create_session(f"post {name}", agent_type="agent")
        store.post_message(
            f"post {name}", {"role": "user", "content": "Hi"}, not_before=moments.now() + distance
        )
        for kind in ("call", "failed call"):
            store.create_session(f"{kind} {name}", agent_type="agent")
            call = {"tool_name": "pay", "deadline": moments.now() + distance}
            store.suspend(f"{kind} {name}", kind="suspended_client_tool", context={}, pending={"call": call})
        store.update_status(f"failed call {name}", "failed")
    every = known(store)
    assert len(every) == 6
    age(store, *every, by=LONG)
    days = dict.fromkeys(("active", "paused", "failed"), 30)
    expected = {"post soon", "call soon"}
    policy = RetentionPolicy(sessions_idle_days=days)
    assert retain(store, policy, dry_run=True).trees == 4
    assert retain(store, policy).trees == 4
    assert known(store) == expected


def test_every_tenant_or_one(store: DatabaseStateStore) -> None:
    for tenant in ("", "a", store.tenant):
        completed(DatabaseStateStore(store.alias, tenant=tenant), "old")
    assert retain(store, IDLE, tenant="a").trees == 1
    assert set(rows(store, Session).values_list("tenant", flat=True)) == {"", store.tenant}
    assert retain(store, IDLE).trees == 2


def test_a_tree_goes_as_a_whole_or_not_at_all(store: DatabaseStateStore) -> None:
    for root in ("idle", "used"):
        completed(store, root)
        completed(store, f"{root}-child", parent_session_id=root)
        store.create_session(f"{root}-linked", agent_type="agent")
        store.update_status(f"{root}-linked", "completed")
        link(store, root, f"{root}-linked")
        age(store, root, f"{root}-child", f"{root}-linked", by=LONG)
    age(store, "used-child", by=DAY)
    summary = retain(store, IDLE)
    assert known(store) == {"used", "used-child", "used-linked"}
    assert (summary.trees, summary.sessions["session"]) == (1, 3)


def test_a_session_that_another_tree_has_too_stays(store: DatabaseStateStore) -> None:
    completed(store, "shared")
    completed(store, "old")
    store.create_session("live", agent_type="agent")
    for owner in ("old", "live"):
        link(store, owner, "shared")
    age(store, "old", "shared", by=LONG)
    assert retain(store, IDLE).trees == 0
    assert known(store) == {"shared", "old", "live"}


def _lock(store: DatabaseStateStore) -> object:
    return DatabaseLockManager(store.alias, tenant=store.tenant).acquire("old-child")


def _run(store: DatabaseStateStore) -> object:
    return store.start_run("old-child", "run-1")


def _write(store: DatabaseStateStore) -> object:
    streams = DatabaseStreamManager(store.alias, tenant=store.tenant)
    return async_to_sync(streams.create_writer)("old-child", "run-1", "agent")


@for_each("use", [_lock, _run, _write])
def test_a_tree_in_use_is_left_alone(
    store: DatabaseStateStore, use: Callable[[DatabaseStateStore], object]
) -> None:
    completed(store, "old")
    completed(store, "old-child", parent_session_id="old")
    assert use(store)
    store.update_status("old-child", "completed")
    age(store, "old", "old-child", by=LONG)
    before = everything(store)
    for dry_run in (True, False):
        summary = retain(store, IDLE, dry_run=dry_run)
        assert (summary.trees, summary.in_use) == (0, 1)
    assert everything(store) == before


def test_an_expired_lock_does_not_keep_a_session(store: DatabaseStateStore) -> None:
    lock = DatabaseLockManager(store.alias, tenant=store.tenant).acquire(completed(store, "old"))
    assert lock is not None
    lock.release()
    assert retain(store, IDLE).trees == 1


def interrupted(store: DatabaseStateStore, way: str, use: Callable[[], object]) -> list[int]:
    """Apply a retention that deletes trees this way, with ``use`` before; return the counts of trees."""

    class Interrupted(Retention):
        def _delete_together(self, db: Database, tops: Any) -> Any:
            if way == "alone":
                return ()
            use()
            return super()._delete_together(db, tops)

        def _delete(self, db: Database, session_id: str) -> None:
            if way == "alone":
                use()
            super()._delete(db, session_id)

    return [summary.trees for summary in Interrupted(using=store.alias, policy=IDLE).batches()]


@for_each("way", ["together", "alone"])
def test_a_session_used_between_the_look_and_the_deletion_stays(store: DatabaseStateStore, way: str) -> None:
    completed(store, "old")
    text = [{"role": "user", "content": "wait"}]
    assert interrupted(store, way, lambda: store.append_messages("old", text)) == [0]
    assert store.session_exists("old")


@for_each("way", ["together", "alone"])
def test_a_child_made_between_the_look_and_the_deletion_saves_its_tree(
    store: DatabaseStateStore, way: str
) -> None:
    completed(store, "old")

    def create_child() -> None:
        store.create_session("new", agent_type="agent", parent_session_id="old")

    assert interrupted(store, way, create_child) == [0]
    assert known(store) == {"old", "new"}


def test_a_tree_that_fails_leaves_the_others_to_their_deletion(
    store: DatabaseStateStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {completed(store, name): rows(store, Session).get(session_id=name).pk for name in "abc"}

    def refuse(db: Database, locked: Any, **options: Any) -> Any:
        if keys["b"] in locked:
            raise RuntimeError("the trigger of another app")
        return delete_locked_sessions(db, locked, **options)

    monkeypatch.setattr(retention, "delete_locked_sessions", refuse)
    summary = retain(store, IDLE)
    assert (summary.trees, summary.errors) == (2, 1)
    assert known(store) == {"b"}
    assert "Session 'b' could not be deleted." in caplog.text


def test_a_session_that_another_transaction_has_locked_is_not_waited_for(
    postgres_db: CommittedDatabase,
) -> None:
    delete_all_rows(postgres_db.alias)
    store = DatabaseStateStore(postgres_db.alias, tenant=postgres_db.tenant)
    completed(store, "old")
    with postgres_db.second_connection() as other, other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(f"SELECT 1 FROM {Session._meta.db_table} FOR NO KEY UPDATE")
        assert retain(store, IDLE).in_use == 1
        cursor.execute("ROLLBACK")
    assert retain(store, IDLE).trees == 1


def test_snapshots_go_through_their_providers(store: DatabaseStateStore) -> None:
    for session_id, parent in (("old", None), ("old-child", "old"), ("lost", None)):
        completed(store, session_id, parent_session_id=parent)
        state = store.load_state(session_id)
        assert state is not None
        state.workspace_refs = {"code": {"provider": "unknown" if session_id == "lost" else "memory"}}
        store.save_state(session_id, state)
    age(store, "old", "old-child", "lost", by=LONG)
    provider = MemoryProvider({"old": ["a"], "old-child": ["b", "c"]})
    providers = {"memory": provider}
    assert retain(store, IDLE, workspace_providers=providers, dry_run=True).snapshots_deleted == 0
    assert provider.deleted == []
    summary = retain(store, IDLE, workspace_providers=providers)
    assert sorted(provider.deleted) == ["a", "b", "c"]
    assert (summary.snapshots_deleted, summary.trees, summary.errors) == (3, 1, 1)
    assert known(store) == {"lost"}


def test_the_newest_checkpoints_stay(store: DatabaseStateStore) -> None:
    for session_id, steps in (("many", 5), ("few", 2), ("locked", 5)):
        store.create_session(session_id, agent_type="agent")
        for number in range(1, steps + 1):
            state = store.load_state(session_id)
            assert state is not None
            state.custom_state = {"number": number}
            store.save_state_and_promote_staging(session_id, state, [], StepInfo(f"step-{number}", number))
    assert DatabaseLockManager(store.alias, tenant=store.tenant).acquire("locked")
    policy = RetentionPolicy(checkpoints_keep=2)
    for dry_run in (True, False):
        summary = retain(store, policy, dry_run=dry_run, page_size=1)
        assert summary.checkpoints == {"checkpoint": 3}
    counts = {name: len(store.list_checkpoints(name).items) for name in ("many", "few", "locked")}
    assert counts == {"many": 2, "few": 2, "locked": 5}
    state = store.load_state("many")
    assert state is not None
    assert state.custom_state == {"number": 5}
    assert retain(store, policy).checkpoints == {}


def test_ended_streams_lose_their_chunks(store: DatabaseStateStore) -> None:
    streams = DatabaseStreamManager(store.alias, tenant=store.tenant)

    async def write(stream_id: str) -> None:
        writer = await streams.create_writer(stream_id, "run-1", "agent")
        for number in range(3):
            await writer.write({"type": "text", "number": number})
        await writer.close()

    for stream_id in ("old", "young"):
        async_to_sync(write)(stream_id)
        async_to_sync(streams.end_stream)(stream_id)
    rows(store, Stream).filter(stream_id="old").update(ended_at=moments.now() - LONG)
    policy = RetentionPolicy(streams_ended_days=7)
    for dry_run in (True, False):
        assert retain(store, policy, dry_run=dry_run).streams == {"stream_chunk": 3}
    assert rows(store, StreamChunk).count() == 3
    assert retain(store, policy).streams == {}


def spend(store: DatabaseStateStore, session_id: str, entry_id: str, age: timedelta) -> None:
    at = int((moments.now() - age).timestamp() * 1000)
    entry = UsageEntry(
        id=entry_id,
        session_id=session_id,
        kind=UsageKind.SUBAGENT,
        timestamp=at,
        source=UsageSource(type="agent", name="a"),
        agent_type="search",
        step_count=1,
        success=True,
        duration_ms=1,
        run_id="run-1",
        sub_session_id="sub",
    )
    DatabaseUsageStore(store.alias, tenant=store.tenant).record_entry(entry)


def test_usage_is_kept_anonymised_or_dropped_by_its_age(store: DatabaseStateStore) -> None:
    store.create_session("open", agent_type="agent", user_id="ada")
    for entry_id, days in (("young", 5), ("old", 50), ("older", 500)):
        spend(store, "open", f"open-{entry_id}", days * DAY)
    assert retain(store, RetentionPolicy(streams_ended_days=1)).usage_dropped == {}
    policy = RetentionPolicy(usage_anonymise_days=30, usage_drop_days=400)
    for dry_run in (True, False):
        summary = retain(store, policy, dry_run=dry_run)
        assert summary.usage_dropped == {"usage_entry": 1}
        assert summary.usage_anonymised == {"usage_entry": 1}
    columns = ("user_id", "session_id", "recorded_for", "run_id", "sub_session_id")
    old, young = rows(store, UsageRow).order_by("timestamp").values(*columns, "entry_id", "agent_type")
    assert {name: old[name] for name in columns} == {**dict.fromkeys(columns), "recorded_for": ""}
    assert "open" not in old["entry_id"]
    assert (old["agent_type"], young["user_id"], young["entry_id"]) == ("search", "ada", "open-young")
    usage = DatabaseUsageStore(store.alias, tenant=store.tenant)
    assert [entry.id for entry in usage.query_usage().entries] == [young["entry_id"], old["entry_id"]]
    summary = retain(store, policy)
    assert (summary.usage_dropped, summary.usage_anonymised) == ({}, {})


def test_usage_outlives_its_session(store: DatabaseStateStore) -> None:
    completed(store, "old")
    spend(store, "old", "one", DAY)
    retain(store, IDLE)
    assert DatabaseUsageStore(store.alias, tenant=store.tenant).get_rollup("old") is not None


def test_a_dry_run_says_what_the_run_then_does_and_changes_nothing(store: DatabaseStateStore) -> None:
    streams = DatabaseStreamManager(store.alias, tenant=store.tenant)

    async def write(stream_id: str) -> None:
        writer = await streams.create_writer(stream_id, "run-1", "agent")
        await writer.write({"type": "text", "text": "hello"})
        await writer.close()
        await streams.end_stream(stream_id)

    for session_id in ("old", "young"):
        store.create_session(session_id, agent_type="agent")
        for number in range(1, 4):
            state = store.load_state(session_id)
            assert state is not None
            store.save_state_and_promote_staging(
                session_id, state, [{"role": "user", "content": "hi"}], StepInfo(f"step-{number}", number)
            )
        async_to_sync(write)(session_id)
        spend(store, session_id, session_id, LONG)
        store.update_status(session_id, "completed")
    rows(store, Stream).update(ended_at=moments.now() - LONG)
    age(store, "old", by=LONG)
    policy = RetentionPolicy(
        sessions_idle_days={"completed": 30},
        checkpoints_keep=1,
        streams_ended_days=7,
        usage_anonymise_days=7,
    )
    before = everything(store)
    said = retain(store, policy, dry_run=True)
    assert everything(store) == before
    assert said.dry_run
    assert said.sessions["stream_chunk"] == 1
    assert said.streams == {"stream_chunk": 1}
    assert replace(said, dry_run=False) == retain(store, policy)
    assert RetentionSummary.from_dict(said.to_dict()) == said


def test_a_dry_run_does_not_count_the_writer_of_a_stream_that_goes_with_its_session(
    store: DatabaseStateStore,
) -> None:
    streams = DatabaseStreamManager(store.alias, tenant=store.tenant)
    for session_id in ("old", "young"):
        store.create_session(session_id, agent_type="agent")
        async_to_sync(streams.create_writer)(session_id, "run-1", "agent")
        store.update_status(session_id, "completed")
    rows(store, Stream).update(lease_expires_at=moments.now() - DAY)
    age(store, "old", by=LONG)
    policy = RetentionPolicy(sessions_idle_days={"completed": 30}, streams_ended_days=7)
    said = retain(store, policy, dry_run=True)
    assert (said.trees, said.streams_failed) == (1, 1)
    assert replace(said, dry_run=False) == retain(store, policy)


def _with_an_old_operation(store: DatabaseStateStore) -> None:
    for session_id in ("old", "young"):
        state = store.create_session(session_id, agent_type="agent")
        store.save_state_and_promote_staging(
            session_id, state, [], StepInfo("step-1", 1), operation_id="operation"
        )
    rows(store, Operation).update(created_at=moments.now() - LONG)
    age(store, "old", by=LONG)


def _with_a_shared_stream(store: DatabaseStateStore) -> None:
    for session_id, stream_id in (("a", "gone"), ("b", "gone"), ("c", "kept"), ("young", "kept")):
        store.create_session(session_id, agent_type="agent", stream_id=stream_id)
    streams = DatabaseStreamManager(store.alias, tenant=store.tenant)
    for stream_id in ("gone", "kept"):
        async_to_sync(streams.create_writer)(stream_id, "run-1", "agent")
        streams.write_sync(stream_id, [{"type": "text", "text": "hello"}])
    rows(store, Stream).update(lease_expires_at=moments.now() - DAY)
    store.update_status("b", "completed")
    age(store, "a", "b", "c", by=LONG)


def _with_shared_rows_of_an_app(store: DatabaseStateStore) -> None:
    database = CommittedDatabase(alias=store.alias, tenant=store.tenant)
    saved(database, "source", "one", "two")
    forked(database, "source", "fork", "three")
    saved(database, "other", "one")
    forked(database, "other", "young", "two")
    age(store, "source", "fork", "other", by=LONG)


@pytest.mark.parametrize("page_size", [1, 200])
@pytest.mark.parametrize(
    "write", [_with_an_old_operation, _with_a_shared_stream, _with_shared_rows_of_an_app]
)
def test_a_dry_run_counts_each_row_once_wherever_its_sessions_are(
    store: DatabaseStateStore, write: Callable[[DatabaseStateStore], None], page_size: int
) -> None:
    write(store)
    policy = RetentionPolicy(
        sessions_idle_days={"active": 30, "completed": 30}, operations_days=30, streams_ended_days=7
    )
    before = everything(store)
    said = retain(store, policy, dry_run=True, page_size=page_size)
    assert everything(store) == before
    assert replace(said, dry_run=False) == retain(store, policy, page_size=page_size)
    assert known(store) == {"young"}


def test_a_dry_run_takes_as_many_statements_for_many_trees_as_for_one(store: DatabaseStateStore) -> None:
    policy = RetentionPolicy(sessions_idle_days={"completed": 30}, checkpoints_keep=1, streams_ended_days=7)
    counts = []
    for number in range(6):
        completed(store, f"old-{number}")
        completed(store, f"old-{number}-child", parent_session_id=f"old-{number}")
        if number in (0, 5):
            with CaptureQueriesContext(connections[store.alias]) as captured:
                assert retain(store, policy, dry_run=True).trees == number + 1
            counts.append(len(captured))
    assert counts[0] == counts[1] > 0


def test_batches_can_be_stopped_and_started_again(store: DatabaseStateStore) -> None:
    for number in range(5):
        completed(store, f"old-{number}")
    assert next(Retention(using=store.alias, policy=IDLE, page_size=2).batches()).trees == 2
    assert len(known(store)) == 3
    assert retain(store, IDLE).trees == 3


def _retain(alias: str) -> int:
    return apply_retention(using=alias, policy=IDLE, page_size=3).trees


@pytest.mark.thorough
def test_several_at_once_delete_each_tree_once(store: DatabaseStateStore) -> None:
    for number in range(20):
        completed(store, f"old-{number}")
    counts = [outcome.unwrap() for outcome in run_in_threads(_retain, [(store.alias,)] * 4)]
    assert sum(counts) == 20
    assert known(store) == set()


def test_the_policy_of_the_settings_is_the_default(store: DatabaseStateStore) -> None:
    completed(store, "old")
    with override_settings(HELIX_STORE={}):
        assert apply_retention(using=store.alias).trees == 0
    with override_settings(HELIX_STORE={"RETENTION": {"sessions_idle_days": {"completed": 30}}}):
        assert apply_retention(using=store.alias).trees == 1


@for_each(
    "policy",
    [
        {"sessions_idle_days": {"done": 1}},
        {"sessions_idle_days": {"completed": -1}},
        {"sessions_idle_days": 30},
        {"checkpoints_keep": 0},
        {"streams_ended_days": True},
        {"streams_ended_days": float("nan")},
        {"usage_drop_days": "30"},
        {"usage_anonymise_days": 30, "usage_drop_days": 30},
        {"sessions": 1},
        [],
    ],
)
def test_an_invalid_policy_is_refused_by_the_setting_and_its_check(policy: Any) -> None:
    with override_settings(HELIX_STORE={"RETENTION": policy}):
        with pytest.raises(ImproperlyConfigured, match="RETENTION"):
            conf.retention()
        (message,) = check_settings()
    assert (message.id, bool(message.hint)) == ("helix_store.E004", True)


def test_zero_days_are_a_rule() -> None:
    assert RetentionPolicy().keeps_everything
    assert not RetentionPolicy(streams_ended_days=0).keeps_everything
