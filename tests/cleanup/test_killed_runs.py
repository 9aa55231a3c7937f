"""An erasure or a retention run that is killed between any two writes: the next run completes it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from helix_store.cleanup import ErasureReceipt, erase
from helix_store.conf import table_name
from helix_store.core import moments
from helix_store.models import Session, Stream, Tombstone, UsageEntry
from helix_store.retention import RetentionPolicy, RetentionSummary, apply_retention
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
)
from helix_store.testing.usage.base import tokens
from tests.cleanup.providers import FolderProvider
from tests.databases import CommittedDatabase, delete_all_rows
from tests.invariants import broken_invariants
from tests.processes import PROCESSES, WorkerProcess

_TREES: Final = 3
_KILLED_TIMES: Final = 5
_LONG: Final = timedelta(days=100)
_POLICY: Final = RetentionPolicy(
    sessions_idle_days={"completed": 30}, checkpoints_keep=1, streams_ended_days=7, usage_anonymise_days=7
)

Report = ErasureReceipt | RetentionSummary
Run = Callable[[str, str, Path], Report]


def erase_tenant(alias: str, tenant: str, folder: Path) -> ErasureReceipt:
    return erase(using=alias, tenant=tenant, workspace_providers={"folder": FolderProvider(folder)})


def erase_user(alias: str, tenant: str, folder: Path) -> ErasureReceipt:
    providers = {"folder": FolderProvider(folder)}
    return erase(using=alias, tenant=tenant, user_id="ada", workspace_providers=providers)


def retain(alias: str, tenant: str, folder: Path) -> RetentionSummary:
    providers = {"folder": FolderProvider(folder)}
    return apply_retention(
        using=alias, tenant=tenant, policy=_POLICY, workspace_providers=providers, page_size=2
    )


def write_trees(database: CommittedDatabase, folder: Path) -> None:
    """Trees with everything that sessions have, a branch, and a session that only loses its old parts."""
    store = DatabaseStateStore(database.alias, tenant=database.tenant)
    for number in range(_TREES):
        write_session(database, f"root-{number}", folder)
        write_session(database, f"child-{number}", folder, parent_session_id=f"root-{number}")
    ref = {"sub_session_id": "child-1", "agent_type": "agent", "status": "done"}
    store.add_sub_session_refs("root-1", [ref])
    store.branch_session("root-0", new_session_id="branch")
    store.update_status("branch", "completed")
    write_session(database, "in-between", folder, status="active")
    Session.objects.using(database.alias).update(updated_at=moments.now() - _LONG)
    Stream.objects.using(database.alias).update(ended_at=moments.now() - _LONG)
    UsageEntry.objects.using(database.alias).update(timestamp=moments.now() - _LONG)


def write_session(
    database: CommittedDatabase, session_id: str, folder: Path, *, status: str = "completed", **columns: Any
) -> None:
    store = DatabaseStateStore(database.alias, tenant=database.tenant)
    state = store.create_session(session_id, agent_type="agent", user_id="ada", **columns)
    state.workspace_refs = {"main": {"provider": "folder"}}
    for step in range(3):
        state.custom_state = {"step": step}
        message = {"role": "user", "content": "hello"}
        info = {"step_id": f"step-{step}", "step_count": step}
        store.save_state_and_promote_staging(session_id, state, [message], info)
    (folder / session_id).mkdir()
    (folder / session_id / "snapshot").touch()
    streams = DatabaseStreamManager(database.alias, tenant=database.tenant)

    async def stream() -> None:
        writer = await streams.create_writer(session_id, "run", "agent")
        await writer.write({"type": "text_delta", "text": "hello"})
        await writer.close()
        await streams.end_stream(session_id)

    async_to_sync(stream)()
    DatabaseUsageStore(database.alias, tenant=database.tenant).record_entry(tokens(session_id))
    lock = DatabaseLockManager(database.alias, tenant=database.tenant).acquire(session_id)
    assert lock is not None
    lock.release()
    if status != "active":
        store.update_status(session_id, status)


def is_write(sql: str) -> bool:
    return sql.lstrip().startswith(("DELETE", "UPDATE", "INSERT"))


def run_until(run: Run, alias: str, tenant: str, folder: Path, last: int, reached: Event) -> None:
    """Stop for ever before a write, after so many of them."""
    count = 0

    def stop(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal count
        count += is_write(sql)
        if count > last:
            reached.set()
            PROCESSES.Event().wait()
        return execute(sql, params, many, context)

    with connections[alias].execute_wrapper(stop):
        run(alias, tenant, folder)
    reached.set()


def rows(alias: str) -> Counter[str]:
    """The numbers of rows by the name that a report has for the table, without zeros."""
    models = [model for model in apps.get_app_config("helix_store").get_models() if model._meta.managed]
    # An erasure adds them.
    models.remove(Tombstone)
    counts = {
        model._meta.db_table.removeprefix(table_name("")): model._base_manager.using(alias).count()
        for model in models
    }
    return Counter({name: count for name, count in counts.items() if count})


def snapshots(folder: Path) -> set[Path]:
    return {each.relative_to(folder) for each in folder.glob("*/snapshot")}


def wait_for_the_killed(alias: str) -> None:
    """The server ends the transaction of a killed client when it finds the socket closed."""
    with transaction.atomic(using=alias):
        list(Session.objects.using(alias).select_for_update().values_list("pk", flat=True))


def deleted(report: Report) -> Counter[str]:
    if isinstance(report, ErasureReceipt):
        return Counter(report.deleted)
    return Counter(report.sessions) + Counter(report.checkpoints) + Counter(report.streams)


@dataclass(frozen=True)
class Killed:
    before: Counter[str]
    left: Counter[str]
    report: Report
    after: Counter[str]


def kill_and_repeat(run: Run, database: CommittedDatabase, folder: Path, last: int) -> Killed:
    delete_all_rows(database.alias)
    write_trees(database, folder)
    before = rows(database.alias)
    reached = PROCESSES.Event()
    worker = WorkerProcess(run_until, run, database.alias, database.tenant, folder, last, reached)
    assert reached.wait(60), worker.outcome(1)
    worker.kill()
    wait_for_the_killed(database.alias)
    assert broken_invariants(database) == []
    left = rows(database.alias)
    report = run(database.alias, database.tenant, folder)
    return Killed(before, left, report, rows(database.alias))


def writes_of(run: Run, database: CommittedDatabase, folder: Path) -> int:
    write_trees(database, folder)
    with CaptureQueriesContext(connections[database.alias]) as captured:
        run(database.alias, database.tenant, folder)
    return sum(is_write(query["sql"]) for query in captured.captured_queries)


@pytest.mark.parametrize("run", [erase_tenant, erase_user, retain])
def test_a_killed_run_is_completed_by_the_next_one(
    empty_db: CommittedDatabase, tmp_path: Path, run: Run
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    writes = writes_of(run, empty_db, whole)
    at_the_end = rows(empty_db.alias)
    assert writes > 20
    points = random.Random(run.__name__).sample(range(1, writes), _KILLED_TIMES)  # noqa: S311
    stopped_halfway = 0
    for last in points:
        folder = tmp_path / f"killed-after-{last}"
        folder.mkdir()
        killed = kill_and_repeat(run, empty_db, folder, last)
        stopped_halfway += killed.before != killed.left
        assert deleted(killed.report) == killed.left - killed.after, last
        assert killed.after == at_the_end, last
        assert broken_invariants(empty_db) == []
        assert snapshots(folder) == snapshots(whole)
        if isinstance(killed.report, ErasureReceipt):
            assert killed.report.complete
        else:
            assert (killed.report.errors, killed.report.in_use) == (0, 0)
    assert stopped_halfway, points
