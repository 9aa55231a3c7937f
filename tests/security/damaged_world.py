"""Two sessions with a row in every table, and every call that reads one or both of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Final

from asgiref.sync import async_to_sync
from django.apps import apps
from django.db import transaction
from django.db.models import F, Field, JSONField, Model, Q

from helix_store.checkpointers import GraphCheckpointStore, SnapshotCheckpointer
from helix_store.cleanup import expired_session_cleanup
from helix_store.core.types import SessionState, StepInfo
from helix_store.items import ItemLog
from helix_store.models import BudgetCounter, Session, Stream
from helix_store.models.fields import PayloadField
from helix_store.stores import DatabaseStateStore, DatabaseStreamManager, DatabaseUsageStore, Store
from helix_store.testing.usage.base import custom
from tests.databases import CommittedDatabase

__all__ = ["COLUMNS", "LISTS", "READS", "WRITES", "World", "damages", "read_stream"]

LONG_AGO: Final = 1_600_000_000_000
EPOCH: Final = datetime(2020, 1, 1, tzinfo=UTC)
BALLAST: Final = "x" * 1_000

# Not payloads, but read as a member of an enumeration without a constraint of the database.
_UNCHECKED_NAMES: Final = {("Checkpoint", "status")}


def _is_damageable(model: type[Model], field: Field[Any, Any]) -> bool:
    # It belongs to no session.
    if model is BudgetCounter:
        return False
    return isinstance(field, PayloadField | JSONField) or (model.__name__, field.attname) in _UNCHECKED_NAMES


COLUMNS: Final[dict[str, tuple[type[Model], Field[Any, Any]]]] = {
    f"{model.__name__}.{field.attname}": (model, field)
    for model in apps.get_app_config("helix_store").get_models()
    for field in model._meta.concrete_fields
    if _is_damageable(model, field)
}
"""Every column whose content is decoded, by name."""

_WRONG: Final = ("null", "7", "[]", "{}", '"text"', '[1,{"a":1}]', '{"a":1}')
_UNREADABLE: Final = ("", "nonsense", "~{", "[" * 5_000)
_WRONG_CALLS: Final = (
    '{"call-due":7,"call-open":[]}',
    '{"call-due":{"deadline":5},"call-open":{"deadline":"soon","tool_name":[]}}',
    '{"call-due":{"deadline":-5,"tool_name":7},"call-open":{"deadline":99999999999999999999}}',
    '{"call-due":{"submitted_at":"yesterday","tool_name":null}}',
)
_WRONG_INSIDE: Final[dict[str, tuple[str, ...]]] = {
    "pending_client_tool_calls": _WRONG_CALLS,
    "completed_client_tool_calls": _WRONG_CALLS,
    "tags": ("[7]", "[null]"),
    "metadata": ('{"m":7}',),
    "status": ("asleep",),
    "payload": (
        '{"removed":["gone"],"set":{}}',
        '{"tool_call_id":7,"patches":{},"merge_changes":[]}',
        '{"tool_call_id":"c","patches":[7],"timestamp":"soon"}',
        '{"role":7,"content":[{"type":7}],"thinking":{}}',
    ),
    "envelope": (
        '{"agent_type":"t"}',
        '{"agent_type":7,"status":"active"}',
        '{"agent_type":"t","status":"asleep"}',
        '{"agent_type":"t","status":"active","tags":{}}',
        '{"agent_type":"t","status":"active","tags":[7]}',
        '{"agent_type":"t","status":"active","metadata":{"a":7}}',
        '{"agent_type":"t","status":"active","mode":"odd"}',
        '{"agent_type":"t","status":"active","suspension_kind":"running"}',
        '{"agent_type":"t","status":"active","expires_at":"soon"}',
        '{"agent_type":"t","status":"active","workspace_refs":[1]}',
        '{"agent_type":"t","status":"active","workspace_refs":{"w":7}}',
        '{"agent_type":"t","status":"active","workspace_refs":{"w":{"provider":[]}}}',
        '{"agent_type":"t","status":"active","suspended_awaiting_children":{}}',
        '{"agent_type":"t","status":"active","step_count":"x"}',
    ),
}


def damages(field: Field[Any, Any]) -> Iterator[str]:
    """Texts of another shape; where the database does not check the text, unreadable ones as well."""
    yield from _WRONG
    yield from _WRONG_INSIDE.get(field.attname, ())
    if not isinstance(field, JSONField):
        yield from _UNREADABLE


@dataclass(frozen=True)
class World:
    database: CommittedDatabase

    @cached_property
    def store(self) -> DatabaseStateStore:
        return DatabaseStateStore(self.database.alias, tenant=self.database.tenant)

    @cached_property
    def usage(self) -> DatabaseUsageStore:
        return DatabaseUsageStore(self.database.alias, tenant=self.database.tenant)

    @cached_property
    def graphs(self) -> GraphCheckpointStore:
        return GraphCheckpointStore(self.database.alias, tenant=self.database.tenant)

    @cached_property
    def snapshots(self) -> SnapshotCheckpointer:
        return SnapshotCheckpointer(self.database.alias, tenant=self.database.tenant)

    @cached_property
    def streams(self) -> DatabaseStreamManager:
        return DatabaseStreamManager(self.database.alias, tenant=self.database.tenant)

    def populate(self, name: str) -> None:
        store = self.store
        store.create_session(
            name, agent_type="t", tags=["t"], metadata={"m": "1"}, custom_state={"ballast": BALLAST}
        )
        store.create_session(f"{name}-child", agent_type="t", parent_session_id=name)
        store.start_run(name, "run-1")
        store.update_run(name, "run-1", status="failed", error={"code": 1})
        for number in (1, 2, 3):
            state = store.load_state(name)
            assert state is not None
            state.custom_state["n"], state.output = number, {"answer": number}
            message = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
            store.save_state_and_promote_staging(name, state, [message], StepInfo(f"step-{number}", number))
        log = ItemLog(name, using=self.database.alias, tenant=self.database.tenant)
        log.append([{"role": "user", "content": "hello"}] * 2, keys=["key", None])
        ref = {"sub_session_id": f"{name}-child", "agent_type": "t", "remote": {"a": 1}, "output": [1]}
        store.add_sub_session_refs(name, [{**ref, "error": {"b": 2}}])
        pending: dict[str, dict[str, Any]] = {
            "call-due": {"tool_name": "ask", "deadline": LONG_AGO, "on_expiry": "fail"},
            "call-open": {"tool_name": "ask"},
            "call-answered": {"tool_name": "ask"},
            "call-taken": {"tool_name": "ask"},
        }
        store.add_pending_tool_calls(name, pending)
        store.submit_tool_result(name, "call-taken", result=1)
        store.take_tool_results(name)
        store.submit_tool_result(name, "call-answered", result=1)
        store.suspend(
            name,
            kind="suspended_client_tool",
            context={"at": 1},
            awaiting_children=[1],
            step_id="step-3",
            tracing={"trace": "1"},
            expires_at=LONG_AGO,
        )
        store.post_message(name, message, key="key", author="u")
        store.request_interrupt(name)
        store.stage_changes(name, "step-9", {"tool_call_id": "c", "merge_changes": {"staged": 1}})
        self.usage.record_entry(custom(session_id=name))
        self.graphs.create_session("/d", session_id=f"{name}-graph", metadata={"a": 1}, workspace_id="w")
        self.graphs.add_message(f"{name}-graph", role="user", content="hello", tool_calls=[{"id": 1}])
        self.graphs.save_checkpoint(f"{name}-graph", step=1, node_id="n", pending_nodes=["m"])
        self.snapshots.put(f"{name}-thread", {"version": 1, "a": [1]})
        async_to_sync(self.streams.create_writer)(name, "run-1", "agent")
        self.streams.write_sync(name, [{"type": "text"}, {"type": "end"}])
        async_to_sync(self.streams.end_stream)(name, output={"a": 1})

    def add_decision_and_effects(self, name: str) -> None:
        """Add what cannot be made in a transaction: an approval, and effects with each of their ends."""
        approval = {"tool_name": "ask", "approval_id": "approval"}
        self.store.add_pending_tool_calls(name, {"call-approved": approval})
        self.store.submit_tool_result(name, "call-approved", approval_id="approval", approved=True)
        session = Store(self.database.alias, tenant=self.database.tenant).session(name)
        for state in ("done", "not_done", "unknown"):
            with suppress(RuntimeError), session.effect(state, tool_name="pay", input={"eur": 7}) as effect:
                if state == "done":
                    effect.done({"receipt": 1})
                elif state == "not_done":
                    effect.not_done("declined")
                else:
                    raise RuntimeError("The card service hung up.")

    def rows(self, model: type[Model], name: str) -> Any:
        """The rows of the table that belong to a session made by `populate`."""
        of_name = {"tenant": self.database.tenant}
        if model is Session:
            owners = Q(session_id__in=(name, f"{name}-graph", f"{name}-thread"))
        elif model is Stream:
            owners = Q(stream_id=name)
        elif hasattr(model, "stream"):
            owners, of_name = Q(stream__stream_id=name), {"stream__tenant": self.database.tenant}
        else:
            owners = Q(session__session_id__in=(name, f"{name}-graph", f"{name}-thread"))
            of_name = {"session__tenant": self.database.tenant}
        return model._default_manager.using(self.database.alias).filter(owners, **of_name)

    def rolled_back(self, call: Callable[[], Any]) -> Any:
        with transaction.atomic(using=self.database.alias):
            try:
                return call()
            finally:
                transaction.set_rollback(True, using=self.database.alias)

    def overdue_first(self, name: str) -> None:
        """Make the session's calls the longest overdue."""
        self.rows(Session, name).filter(pending_deadline__isnull=False).update(
            pending_deadline=F("pending_deadline") - timedelta(days=1)
        )


def read_stream(world: World, name: str) -> list[Any]:
    async def read() -> list[Any]:
        reader = await world.streams.create_reader(name)
        assert reader is not None
        return [chunk async for chunk in reader]

    return async_to_sync(read)()


def _checkpoints(world: World, name: str) -> list[Any]:
    heads = world.store.list_checkpoints(name).items
    return [world.store.get_checkpoint(name, head.checkpoint_id) for head in heads]


READS: Final[dict[str, Callable[[World, str], Any]]] = {
    "load_state": lambda world, name: world.store.load_state(name),
    "session_exists": lambda world, name: world.store.session_exists(name),
    "get_messages": lambda world, name: world.store.get_messages(name),
    "get_messages without thinking": lambda world, name: world.store.get_messages(
        name, include_thinking=False
    ),
    "get_messages backwards": lambda world, name: world.store.get_messages(name, order="desc", limit=2),
    "iter_messages": lambda world, name: list(world.store.iter_messages(name)),
    "get_staged_changes": lambda world, name: world.store.get_staged_changes(name, "step-9"),
    "get_checkpoint": _checkpoints,
    "get_latest_checkpoint": lambda world, name: world.store.get_latest_checkpoint(name),
    "list_checkpoints": lambda world, name: world.store.list_checkpoints(name),
    "list_runs": lambda world, name: world.store.list_runs(name),
    "get_current_run": lambda world, name: world.store.get_current_run(name),
    "get_sub_session_refs": lambda world, name: world.store.get_sub_session_refs(name),
    "list_posts": lambda world, name: world.store.list_posts(name),
    "list_effects": lambda world, name: world.store.list_effects(name),
    "check_interrupt": lambda world, name: world.store.check_interrupt(name),
    "get_entries": lambda world, name: world.usage.get_entries(name),
    "get_rollup": lambda world, name: world.usage.get_rollup(name, include_sub_agents=True),
    "graph get_session": lambda world, name: world.graphs.get_session(f"{name}-graph"),
    "graph get_messages": lambda world, name: [
        (message.id, message.content) for message in world.graphs.get_messages(f"{name}-graph")
    ],
    "graph get_session_summary": lambda world, name: getattr(
        world.graphs.get_session_summary(f"{name}-graph"), "checkpoint_count", None
    ),
    "graph get_latest_checkpoint": lambda world, name: world.graphs.get_latest_checkpoint(f"{name}-graph"),
    "graph list_checkpoints": lambda world, name: [
        (checkpoint.checkpoint_id, checkpoint.pending_nodes)
        for checkpoint in world.graphs.list_checkpoints(f"{name}-graph").items
    ],
    "snapshot get": lambda world, name: world.snapshots.get(f"{name}-thread"),
    "snapshot list": lambda world, name: world.snapshots.list(f"{name}-thread"),
    "stream read_after": lambda world, name: world.streams.read_after(name, 0),
    "stream get_info": lambda world, name: async_to_sync(world.streams.get_info)(name),
    "stream reader": read_stream,
}
"""What reads one session."""

LISTS: Final[dict[str, Callable[[World], Any]]] = {
    "list_sessions": lambda world: [head.session_id for head in world.store.list_sessions().sessions],
    "list_sessions by tag": lambda world: [
        head.session_id for head in world.store.list_sessions(tags=["t"], metadata={"m": "1"}).sessions
    ],
    "find_expired_pending": lambda world: [
        (call.session_id, call.tool_call_id) for call in world.store.find_expired_pending()
    ],
    "find_expired_pending, one": lambda world: [
        (call.session_id, call.tool_call_id) for call in world.store.find_expired_pending(limit=1)
    ],
    "find_due_posts": lambda world: world.store.find_due_posts(),
    "find_unknown_effects": lambda world: [
        (effect.session_id, effect.id) for effect in world.store.find_unknown_effects()
    ],
    "query_usage": lambda world: [entry.session_id for entry in world.usage.query_usage().entries],
    "timeseries": lambda world: world.usage.timeseries(
        date_from=EPOCH, date_to=EPOCH + timedelta(days=9_000)
    ),
    "graph list_sessions": lambda world: [
        session.session_id for session in world.graphs.list_sessions().items
    ],
    "graph search_sessions": lambda world: [
        session.session_id for session in world.graphs.search_sessions("graph").items
    ],
    "graph list_session_summaries": lambda world: [
        summary.session.session_id for summary in world.graphs.list_session_summaries().items
    ],
    "cleanup": lambda world: expired_session_cleanup(state_store=world.store, dry_run=True).detected,
}
"""What reads the sessions of the tenant."""


def _step(world: World, name: str) -> Any:
    state = SessionState(session_id=name, agent_type="t", custom_state={"n": 9})
    return world.store.save_state_and_promote_staging(name, state, [], StepInfo("step-9", 9))


def _entered(world: World, name: str) -> Any:
    """Enter the effect that is done: it returns what is stored."""
    with (
        Store(world.database.alias, tenant=world.database.tenant)
        .session(name)
        .effect("done", tool_name="pay", input={"eur": 7}) as effect
    ):
        return effect.result


WRITES: Final[dict[str, Callable[[World, str], Any]]] = {
    "a step": _step,
    "save_state": lambda world, name: world.store.save_state(
        name, SessionState(session_id=name, agent_type="t")
    ),
    "merge_custom_state": lambda world, name: world.store.merge_custom_state(name, {"a": 1}),
    "promote_staging": lambda world, name: world.store.promote_staging(name, "step-9"),
    "add_pending_tool_calls": lambda world, name: world.store.add_pending_tool_calls(
        name, {"call-new": {"tool_name": "ask"}}
    ),
    "submit_tool_result": lambda world, name: world.store.submit_tool_result(name, "call-open", result=1),
    "submit_tool_result to the child": lambda world, name: world.store.submit_tool_result(
        f"{name}-child", "call-due", result=1
    ),
    "take_tool_results": lambda world, name: world.store.take_tool_results(name),
    "suspend": lambda world, name: world.store.suspend(
        name, kind="suspended_client_tool", context={}, pending={"call-new": {"tool_name": "ask"}}
    ),
    "settle_effect": lambda world, name: world.store.settle_effect(name, "unknown", done=True, actor="ann"),
    "enter an effect": lambda world, name: _entered(world, name),
    "resume": lambda world, name: world.store.resume(name),
    "update_run": lambda world, name: world.store.update_run(name, "run-1", status="failed"),
    "update_sub_session_ref": lambda world, name: world.store.update_sub_session_ref(
        name, f"{name}-child", status="done"
    ),
    "receive_posts": lambda world, name: world.store.receive_posts(name),
    "branch_session": lambda world, name: world.store.branch_session(name),
    "restore_checkpoint": lambda world, name: world.store.restore_checkpoint(
        name, world.store.list_checkpoints(name).items[-1].checkpoint_id
    ),
    "prune_checkpoints": lambda world, name: world.store.prune_checkpoints(name, keep=0),
    "truncate_messages": lambda world, name: world.store.truncate_messages(name, 1),
    "cleanup": lambda world, name: expired_session_cleanup(state_store=world.store),
    "delete_session": lambda world, name: world.store.delete_session(name),
}
"""What reads a session and then writes."""
