"""Ten small databases with different content, each written through the public stores."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from asgiref.sync import async_to_sync

from helix_store.contrib.langgraph import DjangoSaver, DjangoStore
from helix_store.contrib.langgraph.models import LangGraphMemory
from helix_store.core.types import StepInfo
from helix_store.items import ItemLog
from helix_store.models import Session, Stream, UsageEntry
from helix_store.stores import DatabaseLockManager
from helix_store.testing.usage.base import custom, sub_agent, tokens, tool
from tests.adapters.conftest import fill
from tests.adapters.third_party.models import Attachment
from tests.adapters.third_party.notebook import Notebook
from tests.doctor.sample import write_sample
from tests.frameworks.langgraph.graphs import put_chain
from tests.security.damaged_world import World

__all__ = ["LONG_AGO", "OWNER", "WORLDS"]

LONG_AGO: Final = datetime(2001, 6, 1, tzinfo=UTC)
OWNER: Final = "ada"
"""The user of some sessions of every world."""


def steps(world: World, session_id: str, number: int, **given: Any) -> None:
    """A session with so many steps, the first of which is the base of the others."""
    state = world.store.create_session(session_id, agent_type="agent", user_id=OWNER, **given)
    state.custom_state = {"ballast": "x" * 1_000}
    for index in range(1, number + 1):
        state.custom_state["step"] = index
        message = {"role": "user", "content": f"é {index}"}
        commit = world.store.save_state_and_promote_staging(
            session_id,
            state,
            [message],
            StepInfo(f"step-{index}", index),
            operation_id=f"operation-{index}" if index == 1 else None,
            expected_version=state.version,
        )
        state.version = commit.new_version


def age(world: World, *models: Any, **columns: Any) -> None:
    """Let all rows of the tenant be old."""
    for model in models:
        model._base_manager.using(world.database.alias).filter(tenant=world.database.tenant).update(**columns)


def plain(world: World) -> None:
    for number in range(3):
        steps(world, f"plain-{number}", number, title=f"Plain {number}", metadata={"b": "1", "a": "2"})
    world.store.start_run("plain-2", "run-1")
    world.store.update_run("plain-2", "run-1", status="completed", completion_reason="done")


def trees(world: World) -> None:
    store = world.store
    store.create_session("root", agent_type="agent", user_id=OWNER)
    for name, parent in (("child", "root"), ("grandchild", "child"), ("other-child", "root")):
        store.create_session(name, agent_type="agent", parent_session_id=parent)
        store.add_sub_session_refs(parent, [{"sub_session_id": name, "agent_type": "agent"}])
    store.create_session("outside", agent_type="agent")
    store.add_sub_session_refs("outside", [{"sub_session_id": "child", "agent_type": "agent"}])
    for name in ("root", "child"):
        world.usage.record_entry(sub_agent(session_id=name, id=f"entry-{name}"))


def suspended(world: World) -> None:
    steps(world, "waits", 2)
    steps(world, "beside", 1)
    calls: dict[str, dict[str, Any]] = {
        "due": {"tool_name": "ask", "deadline": 1_600_000_000_000, "on_expiry": "fail"},
        "open": {"tool_name": "ask"},
        "answered": {"tool_name": "ask"},
    }
    world.store.add_pending_tool_calls("waits", calls)
    world.store.submit_tool_result("waits", "answered", result=[1, None])
    world.store.suspend("waits", kind="suspended_client_tool", context={"at": 1}, step_id="step-2")
    world.store.request_interrupt("waits", reason="because")
    world.store.stage_changes("waits", "step-3", {"tool_call_id": "c", "merge_changes": {"staged": 1}})


def graphs(world: World) -> None:
    world.graphs.create_session("/d", session_id="graph", metadata={"a": 1}, workspace_id="w")
    for step in range(3):
        world.graphs.add_message("graph", role="user", content=f"hello {step}", tool_calls=[{"id": step}])
        namespace = "inner" if step == 1 else ""
        world.graphs.save_checkpoint(
            "graph", namespace=namespace, step=step, node_id="n", pending_nodes=["m"]
        )
    steps(world, "beside", 1)


def snapshots(world: World) -> None:
    for number in range(3):
        world.snapshots.put("thread", {"version": 1, "number": number})
    claim = world.snapshots.claim("thread", owner="worker")
    assert claim is not None
    world.snapshots.put("other-thread", {"version": 1})
    steps(world, "beside", 1)


def streams(world: World) -> None:
    manager = world.streams
    for name in ("ended", "written", "pruned", "of-nobody"):
        if name != "of-nobody":
            world.store.create_session(name, agent_type="agent", stream_id=name, user_id=OWNER)
        async_to_sync(manager.create_writer)(name, "run-1", "agent")
        manager.write_sync(name, [{"type": "text_delta", "delta": str(number)} for number in range(4)])
    async_to_sync(manager.end_stream)("ended", output={"a": 1})
    async_to_sync(manager.end_stream)("pruned", output=None)
    async_to_sync(manager.prune)(older_than=None, keep_chunks=2)
    manager.write_sync("written", [{"type": "end"}])
    age(world, Stream, lease_expires_at=LONG_AGO)


def items(world: World) -> None:
    steps(world, "log", 2)
    for lane in ("", "lane é"):
        log = ItemLog("log", lane, using=world.database.alias, tenant=world.database.tenant)
        log.append([{"role": "user", "content": "é \x00 \ud800"}, 1.0, None], keys=["key é", None, None])
    world.store.branch_session("log", new_session_id="log-branch")
    steps(world, "log-without", 1)
    world.store.branch_session("log-without", new_session_id="without-branch", message_index=0)


def usage(world: World) -> None:
    steps(world, "beside", 1)
    for name in ("spends", "gone"):
        world.store.create_session(name, agent_type="agent", user_id=OWNER)
        for number, entry in enumerate((tokens, tool, custom)):
            world.usage.record_entry(entry(session_id=name, id=f"{name}-{number}"))
    world.usage.record_entry(tokens("spends", id="spends-cost", cost_usd="0.000000000001"))
    world.store.delete_session("gone", keep_usage=True)
    rows = UsageEntry.objects.using(world.database.alias).filter(tenant=world.database.tenant)
    rows.filter(entry_id__endswith="-1").update(timestamp=LONG_AGO)


def adapters(world: World) -> None:
    alias, tenant = world.database.alias, world.database.tenant
    for name in ("one", "two"):
        fill(Notebook("project", name, alias, tenant=tenant))
    book = Notebook("project", "one", alias, tenant=tenant)
    book.write("own", 1, b"of one alone")
    world.store.branch_session(book.session_id, new_session_id="branch")
    Attachment.objects.using(alias).create(tenant=tenant, digest="of nobody", content=b"")
    put_chain(DjangoSaver(using=alias, tenant=tenant), "thread", 2)
    memories = DjangoStore(using=alias, tenant=tenant)
    memories.put(("users",), "expired", {"a": 1}, ttl=60)
    memories.put(("users",), "kept", {"a": 1})
    LangGraphMemory.objects.using(alias).filter(tenant=tenant, key="expired").update(expires_at=LONG_AGO)
    steps(world, "beside", 1)


def expired(world: World) -> None:
    world.store.create_session("live", agent_type="agent", user_id=OWNER)
    for name in ("expired", "expired-child"):
        parent = None if name == "expired" else "expired"
        state = world.store.create_session(name, agent_type="agent", parent_session_id=parent)
        state.workspace_refs = {"code": {"provider": "memory", "path": name}}
        world.store.save_state(name, state)
        locks = DatabaseLockManager(world.database.alias, tenant=world.database.tenant)
        lock = locks.acquire(name, owner="worker")
        assert lock is not None
        lock.release()
    sessions = Session.objects.using(world.database.alias).filter(session_id__startswith="expired")
    sessions.update(expires_at=LONG_AGO, updated_at=LONG_AGO)
    write_sample(world.database)


WORLDS: Final[dict[str, Callable[[World], None]]] = {
    each.__name__: each
    for each in (plain, trees, suspended, graphs, snapshots, streams, items, usage, adapters, expired)
}
