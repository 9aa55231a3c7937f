"""``helix_move``: a tenant goes from one database to another, with every row or not at all."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections

from helix_store.cleanup import expired_session_cleanup
from helix_store.core.types import StagedChanges
from helix_store.engine.database import Database
from helix_store.exceptions import TenantMoved
from helix_store.items import ItemLog
from helix_store.models import Session
from helix_store.stores import DatabaseLockManager, DatabaseStateStore, DatabaseUsageStore
from helix_store.testing.usage.base import tokens
from helix_store.transfer import DatabaseSource, write_export
from helix_store.transfer.fences import fence_of, through_the_fence
from helix_store.transfer.moves import TenantCopy, TenantMove
from tests.cleanup.conftest import LONG_AGO
from tests.databases import CommittedDatabase
from tests.shards.conftest import Pair
from tests.shards.routers import PLACES
from tests.transfer.files import fill

GROUP = "north"


@dataclass(frozen=True)
class _CopyWithMore(TenantCopy):
    after_rows: Callable[[], None]

    def copy_rows(self) -> None:
        super().copy_rows()
        self.after_rows()


class MoveWithMore(TenantMove):
    """A move that does more when all rows are copied."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._copy = _CopyWithMore(**vars(self._copy), after_rows=self.after_rows)

    def after_rows(self) -> None:
        raise NotImplementedError


def filled(tenant: str) -> DatabaseStateStore:
    """A store of a tenant with rows in every table."""
    store = DatabaseStateStore(tenant=tenant)
    fill(CommittedDatabase(alias=store.alias, tenant=tenant))
    for number in range(3):
        store.create_session(f"session-{number}", agent_type="agent")
        store.append_messages(f"session-{number}", [{"role": "user", "content": "hello"}])
        store.stage_changes(f"session-{number}", "next", StagedChanges(tool_call_id="call"))
    return store


def move(tenant: str, *options: str) -> dict[str, Any]:
    printed = io.StringIO()
    call_command("helix_move", tenant, *options, format="json", stdout=printed, verbosity=0)
    report: dict[str, Any] = json.loads(printed.getvalue())
    return report


def exported(alias: str, tenant: str) -> tuple[int, str | None]:
    summary = write_export(DatabaseSource(alias, tenant=tenant), io.BytesIO())
    return summary.sessions, summary.sha256


def test_a_tenant_is_moved_whole(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    filled(tenant)
    DatabaseStateStore(tenant=f"{GROUP}:other {routed.tenant}").create_session("stays", agent_type="agent")
    before = exported(routed.first, tenant)
    copied = move(tenant, "--to", routed.second)
    assert (copied["source"], copied["target"], copied["phase"]) == (routed.first, routed.second, "copied")
    assert copied["records"]["session"] == before[0]
    assert exported(routed.second, tenant) == before
    PLACES[GROUP] = routed.second
    assert move(tenant, "--finish")["phase"] == "moved"
    assert exported(routed.second, tenant) == before
    assert exported(routed.first, tenant)[0] == 0
    assert exported(routed.first, f"{GROUP}:other {routed.tenant}")[0] == 1
    assert move(tenant, "--release")["phase"] == "none"
    assert fence_of(Database(routed.first, tenant)) is None


@pytest.mark.thorough
def test_a_move_can_be_taken_back_and_made_again(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    store = filled(tenant)
    before = exported(routed.first, tenant)
    move(tenant, "--to", routed.second)
    assert move(tenant, "--abort")["phase"] == "none"
    assert exported(routed.first, tenant) == before
    assert exported(routed.second, tenant)[0] == 0
    store.append_messages("session-0", [{"role": "user", "content": "more"}])
    move(tenant, "--to", routed.second)
    PLACES[GROUP] = routed.second
    move(tenant, "--finish")
    # And back, while the fence is still up where it comes to.
    assert move(tenant, "--to", routed.first)["phase"] == "copied"
    PLACES[GROUP] = routed.first
    assert move(tenant, "--finish")["phase"] == "moved"
    assert len(DatabaseStateStore(tenant=tenant).get_messages("session-0").messages) == 2
    move(tenant, "--release")


@pytest.mark.parametrize("options", [[], ["--to", "{second}"], ["--to", "{second}", "--force"]])
def test_a_tenant_without_rows_is_not_moved(routed: Pair, options: list[str]) -> None:
    tenant = f"{GROUP}:nobody {routed.tenant}"
    given = [each.format(second=routed.second) for each in options]
    with pytest.raises(CommandError, match=r"^Nothing is stored for the tenant 'north:nobody ") as caught:
        move(tenant, *given)
    assert caught.value.returncode == 1
    for alias in routed.aliases:
        assert fence_of(Database(alias, tenant)) is None


@pytest.mark.thorough
def test_a_tenant_that_is_emptied_during_its_move_is_moved(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    store = DatabaseStateStore(tenant=tenant)
    store.create_session("session", agent_type="agent")

    class Stopped(MoveWithMore):
        def after_rows(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Stopped(tenant, routed.first, routed.second).copy()
    store.delete_session("session")
    assert move(tenant, "--to", routed.second)["phase"] == "copied"
    assert move(tenant, "--to", routed.second)["phase"] == "copied"
    PLACES[GROUP] = routed.second
    assert move(tenant, "--finish")["phase"] == "moved"
    assert move(tenant)["phase"] == "moved"
    assert move(tenant, "--release")["phase"] == "none"


Write = Callable[[str, DatabaseStateStore], Any]
WRITES: dict[str, Write] = {
    "create": lambda tenant, store: store.create_session("new", agent_type="agent"),
    "append": lambda tenant, store: store.append_messages("session-0", [{"role": "user", "content": "x"}]),
    "stage": lambda tenant, store: store.stage_changes(
        "session-0", "next", StagedChanges(tool_call_id="other")
    ),
    "discard": lambda tenant, store: store.discard_staging("session-0", "next"),
    "promote": lambda tenant, store: store.promote_staging("session-0", "next"),
    "status": lambda tenant, store: store.compare_and_set_status("session-0", ["active"], "paused"),
    "lock": lambda tenant, store: DatabaseLockManager(tenant=tenant).acquire("session-0"),
    "new lock": lambda tenant, store: DatabaseLockManager(tenant=tenant).acquire("new"),
    "usage": lambda tenant, store: DatabaseUsageStore(tenant=tenant).record_entry(tokens("session-0")),
    "items": lambda tenant, store: ItemLog("session-2", "lane", tenant=tenant).append([{"n": 3}]),
    "delete": lambda tenant, store: store.delete_session("session-0"),
}


@pytest.mark.thorough
def test_writers_are_refused_while_the_tenant_moves(routed: Pair) -> None:
    tenant, other = (f"{GROUP}:{name}{routed.tenant}" for name in ("", "other "))
    store, neighbour = filled(tenant), filled(other)
    before = exported(routed.first, tenant)
    move(tenant, "--to", routed.second)
    for name, write in WRITES.items():
        error = refused(write, tenant, store)
        assert error is not None, name
        assert (error.retryable, error.applied) == (True, "no")
        assert error.attributes["database_code"] == "TM001"
    assert exported(routed.first, tenant) == before
    assert store.load_state("session-0") is not None
    for write in WRITES.values():
        write(other, neighbour)
    PLACES[GROUP] = routed.second
    for write in WRITES.values():
        write(tenant, DatabaseStateStore(tenant=tenant))
    move(tenant, "--finish")
    # A process that has not noticed loses nothing.
    with pytest.raises(TenantMoved):
        store.create_session("late", agent_type="agent")
    move(tenant, "--release")


def refused(write: Write, tenant: str, store: DatabaseStateStore) -> TenantMoved | None:
    try:
        write(tenant, store)
    except TenantMoved as exc:
        return exc
    return None


def test_the_fence_knows_every_table_of_a_tenant(routed: Pair) -> None:
    """A table that a later version adds must not be forgotten."""
    from helix_store.catalogue import tables
    from helix_store.transfer.fences import fenced_tables

    fenced = {each.table.strip('"') for each in fenced_tables()}
    assert {each.model._meta.db_table for each in tables()} <= fenced


@pytest.mark.thorough
def test_a_transaction_with_an_older_snapshot_is_refused(routed: Pair) -> None:
    if routed.vendor != "postgresql":
        pytest.skip("SQLite refuses it itself")
    tenant = f"{GROUP}:{routed.tenant}"
    filled(tenant)
    late = connections.create_connection(routed.first)
    try:
        with late.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT 1")
        move(tenant, "--to", routed.second)
        with late.cursor() as cursor, pytest.raises(Exception, match="the tenant is moved"):
            cursor.execute(f"UPDATE {Session._meta.db_table} SET title = 'x' WHERE tenant = %s", [tenant])
    finally:
        late.close()
    move(tenant, "--abort")


@pytest.mark.thorough
def test_the_fence_is_open_to_its_own_transaction_alone(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    store = filled(tenant)
    move(tenant, "--to", routed.second)
    database = Database(routed.first, tenant)
    through_the_fence(database, lambda: store.delete_session("session-2"))
    with pytest.raises(TenantMoved):
        store.delete_session("session-1")
    move(tenant, "--abort", "--force")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--to", "nowhere"], "no database 'nowhere' in DATABASES"),
        (["--to", "{first}"], "is already in '.*'"),
        (["--finish"], "not being moved"),
        (["--abort"], "not being moved"),
        (["--release"], "not being moved"),
    ],
)
def test_a_wrong_step_is_wrong_usage(routed: Pair, options: list[str], reason: str) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    filled(tenant)
    with pytest.raises(CommandError, match=reason) as caught:
        move(tenant, *(option.format(first=routed.first) for option in options))
    assert caught.value.returncode == 2


@pytest.mark.thorough
def test_the_router_decides_what_may_be_deleted(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    filled(tenant)
    move(tenant, "--to", routed.second)
    with pytest.raises(CommandError, match="router still places the tenant"):
        move(tenant, "--finish")
    PLACES[GROUP] = routed.second
    with pytest.raises(CommandError, match="there may be new writes"):
        move(tenant, "--abort")
    assert exported(routed.first, tenant) == exported(routed.second, tenant)
    move(tenant, "--finish")
    move(tenant, "--release")


def test_rows_in_the_target_are_never_mixed(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    store = filled(tenant)
    DatabaseStateStore(routed.second, tenant=tenant).create_session("theirs", agent_type="agent")
    with pytest.raises(CommandError, match="already has rows of the tenant"):
        move(tenant, "--to", routed.second)
    store.create_session("goes on", agent_type="agent")


@pytest.mark.thorough
def test_a_copy_that_differs_is_not_complete(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    filled(tenant)
    stopped = TenantMove(tenant, routed.first, routed.second, is_stopped=lambda: True)
    assert stopped.copy().phase == "copying"
    theirs = DatabaseStateStore(routed.second, tenant=tenant)
    through_the_fence(
        Database(routed.second, tenant), lambda: theirs.create_session("theirs", agent_type="agent")
    )
    report = TenantMove(tenant, routed.first, routed.second).copy()
    assert (report.phase, report.records) == ("fenced", {})
    assert "differs" in report.problems[0]
    move(tenant, "--abort")
    assert exported(routed.second, tenant)[0] == 0


class Snapshots:
    """A provider whose snapshots are names; they are in no database."""

    def __init__(self) -> None:
        self.names = {"snapshot-1"}

    def list_snapshots(self, session_id: str, ref: Any, *, tenant: str) -> list[str]:
        return sorted(self.names)

    def delete_snapshot(self, snapshot_id: str) -> None:
        self.names.discard(snapshot_id)


@pytest.mark.thorough
def test_a_cleanup_of_the_source_leaves_the_snapshots_of_a_moved_session(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    store = DatabaseStateStore(tenant=tenant)
    state = store.create_session("session", agent_type="agent", expires_at=LONG_AGO)
    state.workspace_refs = {"disk": {"provider": "disk"}}
    store.save_state("session", state)
    move(tenant, "--to", routed.second)
    snapshots = Snapshots()
    summary = expired_session_cleanup(state_store=store, workspace_providers={"disk": snapshots})
    assert (summary.errors, summary.snapshots_deleted, snapshots.names) == (1, 0, {"snapshot-1"})
    move(tenant, "--abort")
    assert expired_session_cleanup(state_store=store, workspace_providers={"disk": snapshots}).marked == 1
    assert snapshots.names == set()
