"""A sound database with a row of every kind in every table, written through the stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from asgiref.sync import async_to_sync

from example_project.transcripts import read_transcripts, replay
from helix_store.cleanup import erase
from helix_store.core import moments
from helix_store.core.types import StepInfo
from helix_store.models import Effect, Session
from helix_store.stores import DatabaseLockManager, DatabaseStateStore, DatabaseStreamManager, Store
from helix_store.testing.usage.base import custom
from tests.databases import CommittedDatabase
from tests.security.damaged_world import World

__all__ = ["STEPS", "write_sample"]

STEPS: Final = 6
"""Steps of the session ``steps``; the first is a base that the later ones are deltas from."""

_TRANSCRIPTS: Final = Path(__file__).parents[2] / "example_project" / "sample_transcripts.json"
_BALLAST: Final = "x" * 1_000


def write_sample(database: CommittedDatabase) -> None:
    world = World(database)
    store = world.store
    for transcript in read_transcripts(_TRANSCRIPTS):
        replay(store, transcript)
    world.populate("full")
    _write_steps(store)
    _write_tree(store)
    store.create_session("gone", agent_type="agent")
    world.usage.record_entry(custom(session_id="gone"))
    store.delete_session("gone", keep_usage=True)
    store.create_session("erased", agent_type="agent")
    erase(using=database.alias, session_id="erased", tenant=database.tenant)
    budgets = Store(database.alias, tenant=database.tenant).budgets
    budgets.set_budget("monthly", scope="user", period="month", limit_usd=10)
    budgets.set_budget("all", scope="tenant", limit_tokens=10)
    locks = DatabaseLockManager(database.alias, tenant=database.tenant)
    assert locks.acquire("steps", owner="worker")
    _write_streams(world.streams)
    session = Session.objects.using(database.alias).get(tenant=database.tenant, session_id="steps")
    effect = {"effect_id": "charge", "sequence": 1, "state": "done", "input": "{}", "digest": ""}
    Effect.objects.using(database.alias).create(session=session, started_at=moments.now(), **effect)


def _write_steps(store: DatabaseStateStore) -> None:
    """Deltas from a base, some pruned; an operation whose checkpoint is there, and one whose is not."""
    state = store.create_session("steps", agent_type="agent", custom_state={"ballast": _BALLAST})
    store.start_run("steps", "run-1")
    for number in range(1, STEPS + 1):
        state.custom_state["number"] = number
        message = {"role": "user", "content": f"message {number}"}
        operation = f"operation-{number}" if number in (2, 5) else None
        step = StepInfo(f"step-{number}", number)
        commit = store.save_state_and_promote_staging(
            "steps", state, [message], step, operation_id=operation, run_id="run-1"
        )
        state.version = commit.new_version
    store.prune_checkpoints("steps", keep=3)
    store.branch_session("steps", new_session_id="branch")


def _write_tree(store: DatabaseStateStore) -> None:
    store.create_session("root", agent_type="agent")
    for name, parent in (("child", "root"), ("grandchild", "child")):
        store.create_session(name, agent_type="agent", parent_session_id=parent)
        store.add_sub_session_refs(parent, [{"sub_session_id": name, "agent_type": "agent"}])
    calls: dict[str, dict[str, Any]] = {"call-1": {"tool_name": "ask", "deadline": 4_000_000_000_000}}
    store.add_pending_tool_calls("root", calls, owner_session_id="grandchild")
    store.post_message("root", {"role": "user", "content": "hello"})
    store.add_pending_tool_calls("root", {"call-2": {"tool_name": "pay", "approval_id": "approval"}})
    store.submit_tool_result("root", "call-2", approved=True, approval_id="approval", actor="ann")


def _write_streams(streams: DatabaseStreamManager) -> None:
    """One that ended, one that was pruned to its newest chunks, one without any."""
    for name in ("pruned", "empty"):
        async_to_sync(streams.create_writer)(name, "run-1", "agent")
    streams.write_sync("pruned", [{"type": "text_delta", "delta": str(number)} for number in range(6)])
    async_to_sync(streams.prune)(older_than=None, keep_chunks=4)
