"""A process that still has the old answer of the router, after its tenant was moved and the rows are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from django.db import transaction

from helix_store.checkpointers import SnapshotCheckpointer
from helix_store.cleanup import erase
from helix_store.core.types import StagedChanges
from helix_store.exceptions import HelixStoreError
from helix_store.handles import SessionHandle
from helix_store.items import ItemLog
from helix_store.stores import DatabaseStateStore, DatabaseStreamManager, DatabaseUsageStore
from helix_store.testing.usage.base import tokens
from tests.shards.conftest import Pair
from tests.shards.routers import PLACES
from tests.shards.test_moves import GROUP, filled, move

HELLO: dict[str, Any] = {"role": "user", "content": "hello"}


def _items(store: DatabaseStateStore) -> ItemLog:
    return ItemLog("session-0", "lane", using=store.alias, tenant=store.tenant)


def _snapshots(store: DatabaseStateStore) -> SnapshotCheckpointer:
    return SnapshotCheckpointer(using=store.alias, tenant=store.tenant)


def _streams(store: DatabaseStateStore) -> DatabaseStreamManager:
    return DatabaseStreamManager(store.alias, tenant=store.tenant)


def _in_a_block(store: DatabaseStateStore) -> None:
    with transaction.atomic(using=store.alias):
        store.append_messages("session-0", [HELLO])


LATE: dict[str, Callable[[DatabaseStateStore], Any]] = {
    "load": lambda store: store.load_state("session-0"),
    "turn": lambda store: SessionHandle(store, "session-0").load(),
    "say": lambda store: SessionHandle(store, "session-0").say(HELLO),
    "append": lambda store: store.append_messages("session-0", [HELLO]),
    "append, async": lambda store: asyncio.run(store.aappend_messages("session-0", [HELLO])),
    "append in a block": _in_a_block,
    "append behind a fencing token": lambda store: store.append_messages(
        "session-0", [HELLO], fencing_token=1
    ),
    "count": lambda store: store.get_message_count("session-0"),
    "truncate": lambda store: store.truncate_messages("session-0", 0),
    "stage": lambda store: store.stage_changes("session-0", "next", StagedChanges(tool_call_id="call")),
    "staged": lambda store: store.get_staged_changes("session-0", "next"),
    "promote": lambda store: store.promote_staging("session-0", "next"),
    "status": lambda store: store.update_status("session-0", "paused"),
    "compare and set": lambda store: store.compare_and_set_status("session-0", ["active"], "paused"),
    "delete": lambda store: store.delete_session("session-0"),
    "runs": lambda store: store.list_runs("session-0"),
    "run": lambda store: store.start_run("session-0"),
    "interrupt": lambda store: store.check_interrupt("session-0"),
    "ask": lambda store: store.add_pending_tool_calls(
        "session-0", {"call": {"tool_name": "tool"}}, owner_session_id="session-0"
    ),
    "submit": lambda store: store.submit_tool_result("session-0", "call", result=1),
    "suspend": lambda store: store.suspend("session-0", kind="suspended_awaiting_children", context={}),
    "branch": lambda store: store.branch_session("session-0"),
    "restore": lambda store: store.restore_checkpoint("session-0", "checkpoint"),
    "pop": lambda store: _items(store).pop(),
    "clear": lambda store: _items(store).clear(),
    "usage": lambda store: DatabaseUsageStore(store.alias, tenant=store.tenant).record_entry(
        tokens("session-0")
    ),
    "delete snapshots": lambda store: _snapshots(store).delete("session-0"),
    "claim": lambda store: _snapshots(store).claim("session-0", owner="late", ttl_ms=60_000),
    "write to a stream": lambda store: _streams(store).write_sync("own stream", [{"type": "text_delta"}]),
    "end a stream": lambda store: asyncio.run(_streams(store).end_stream("own stream", {})),
    "end a stream behind a fencing token": lambda store: asyncio.run(
        _streams(store).end_stream("own stream", {}, fencing_token=1)
    ),
    "delete a stream": lambda store: asyncio.run(_streams(store).delete_stream("own stream")),
    "erase": lambda store: erase(using=store.alias, tenant=store.tenant, session_id="session-0").trees,
}


def _answers(store: DatabaseStateStore) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for name, call in LATE.items():
        try:
            answers[name] = repr(call(store))
        except HelixStoreError as exc:
            answers[name] = (type(exc).__name__, exc.retryable, exc.applied)
    return answers


def test_a_late_process_is_told_that_its_tenant_was_moved(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    late = filled(tenant)
    move(tenant, "--to", routed.second)
    PLACES[GROUP] = routed.second
    move(tenant, "--finish")
    answers = _answers(late)
    others = {name: answer for name, answer in answers.items() if answer != ("TenantMoved", True, "no")}
    assert others == {}
    move(tenant, "--release")
    # The tenant is a new one there.
    assert late.load_state("session-0") is None
    assert late.delete_session("session-0") == 0


def test_a_neighbour_of_a_moved_tenant_is_told_what_it_lacks(routed: Pair) -> None:
    tenant = f"{GROUP}:{routed.tenant}"
    filled(tenant)
    neighbour = DatabaseStateStore(routed.first, tenant=f"{GROUP}:other {routed.tenant}")
    before = _answers(neighbour)
    move(tenant, "--to", routed.second)
    assert _answers(neighbour) == before
    assert all("TenantMoved" not in answer for answer in before.values())
    move(tenant, "--abort")
