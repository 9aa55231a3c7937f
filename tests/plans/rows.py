"""Tens of thousands of rows in every table, so that a planner has a choice; two sessions have very many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from asgiref.sync import async_to_sync
from django.apps import apps
from django.db import connections
from django.db.models import Model, OuterRef, Subquery

from helix_store.checkpointers import GraphCheckpointStore, SnapshotCheckpointer
from helix_store.items import ItemLog
from helix_store.models import (
    Budget,
    BudgetCounter,
    Checkpoint,
    CheckpointKind,
    Decision,
    Effect,
    InterruptRequest,
    Item,
    Lock,
    Message,
    Operation,
    Post,
    Run,
    Session,
    StagedChange,
    Stream,
    StreamChunk,
    SubSessionRef,
    Tombstone,
    UsageEntry,
)
from helix_store.stores import (
    DatabaseBudgetStore,
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
)
from helix_store.testing.usage.base import (
    custom,
    sub_agent,
    tokens,
    tool,
)
from tests.databases import CommittedDatabase

__all__ = [
    *("BUSY", "BUSY_GRAPH", "CAPPED", "CHAT", "LONG", "NOW", "SESSIONS", "STEPPING", "TEMPLATE", "World"),
    *("fill", "write_templates"),
]

NOW = datetime.now(UTC).replace(microsecond=0)
SESSIONS = 10_000
"""Of each tenant, named ``session-1``, ``session-2``…"""
BUSY, BUSY_GRAPH, STEPPING, CHAT = "session-7", "session-5", "session-9", "session-11"
LONG = 1_000
"""Rows that a busy session has of each kind; the others that have any have a few."""

BUDGETS = 30_000
"""Named ``budget-1``…, each of a user of its own, ``capped-1``…. One in a hundred belongs to the tenant
``CAPPED``, which has no session; the others belong to tenants of their own."""
CAPPED = "capped"

TEMPLATE = "template"
_USED = 3_000
_FEW = 3
_LOCKS = 30_000
_STREAMS = 30_000
_PARENTS = 20


@dataclass(frozen=True)
class World:
    """One database, and the faces of the tenant that is looked at; two more tenants have as many sessions."""

    name: str
    database: CommittedDatabase

    @cached_property
    def store(self) -> DatabaseStateStore:
        return DatabaseStateStore(self.database.alias, tenant=self.database.tenant)

    @cached_property
    def locks(self) -> DatabaseLockManager:
        return DatabaseLockManager(self.database.alias, tenant=self.database.tenant)

    @cached_property
    def usage(self) -> DatabaseUsageStore:
        return DatabaseUsageStore(self.database.alias, tenant=self.database.tenant)

    @cached_property
    def budgets(self) -> DatabaseBudgetStore:
        return DatabaseBudgetStore(self.database.alias, tenant=CAPPED)

    @cached_property
    def streams(self) -> DatabaseStreamManager:
        return DatabaseStreamManager(self.database.alias, tenant=self.database.tenant)

    @cached_property
    def graph(self) -> GraphCheckpointStore:
        return GraphCheckpointStore(self.database.alias, tenant=self.database.tenant)

    def items_of(self, session_id: str, lane: str = "") -> ItemLog:
        return ItemLog(session_id, lane, using=self.database.alias, tenant=self.database.tenant)

    @cached_property
    def snapshots(self) -> SnapshotCheckpointer:
        return SnapshotCheckpointer(self.database.alias, tenant=self.database.tenant)


def fill(world: World) -> None:
    """Write one row of each kind through the stores, and copy it in the database, which must be empty."""
    write_templates(world)
    world.budgets.set_budget("budget", scope="user", value="somebody", limit_tokens=1)
    counter = {"tenant": CAPPED, "name": "budget", "value": "somebody"}
    BudgetCounter.objects.using(world.database.alias).create(**counter)
    marked = {"tenant": world.database.tenant, "digest": "digest", "erased_at": NOW}
    Tombstone.objects.using(world.database.alias).create(**marked)
    copies = _Copies(world)
    copies.of_sessions()
    copies.of_histories()
    copies.point_at_current_state()
    copies.of_work()
    copies.of_usage()
    copies.of_budgets()
    copies.of_locks()
    copies.of_streams()
    copies.of_tombstones()


def write_templates(world: World) -> None:
    store = world.store
    state = store.create_session(TEMPLATE, agent_type="template", user_id="somebody")
    store.start_run(TEMPLATE, "run")
    store.save_state_and_promote_staging(
        TEMPLATE,
        state,
        [{"role": "user", "content": "hello"}],
        {"step_id": "step", "step_count": 1},
        run_id="run",
        operation_id="operation",
    )
    store.stage_changes(TEMPLATE, "waiting", {"tool_call_id": "call"})
    store.add_sub_session_refs(TEMPLATE, [{"sub_session_id": "sub", "agent_type": "a", "status": "active"}])
    store.request_interrupt(TEMPLATE)
    store.post_message(TEMPLATE, {"role": "user"}, key="key", author="author", not_before=NOW)
    session = Session.objects.using(store.alias).get(tenant=store.tenant, session_id=TEMPLATE)
    effect = {"effect_id": "effect", "sequence": 1, "state": "done", "input": "{}", "started_at": NOW}
    Effect.objects.using(store.alias).create(session=session, digest="digest", **effect)
    decision = {"tool_call_id": "call", "outcome": "approved", "is_final": True, "decided_at": NOW}
    Decision.objects.using(store.alias).create(session=session, version=1, asking=1, **decision)
    world.locks.acquire(TEMPLATE)
    world.usage.record_entries(kind(TEMPLATE) for kind in (tokens, tool, sub_agent, custom))
    world.graph.save_checkpoint(TEMPLATE, step=1)
    world.snapshots.put(TEMPLATE, {"version": 1})
    world.items_of(TEMPLATE).append([1], keys=["key"])
    async_to_sync(world.streams.create_writer)(TEMPLATE, "run", "agent")
    world.streams.write_sync(TEMPLATE, [{"type": "text_delta"}])


@dataclass(frozen=True)
class _Spread:
    """How copies are dealt out to sessions: SQL for the session's number and the row's number within it."""

    count: int
    session: str
    row: str


_FEW_EACH = _Spread(_USED * _FEW, f"(n % {_USED} + 1)", f"((n - 1) / {_USED} + 1)")
_LONG_ONES = _Spread(
    2 * LONG,
    f"(CASE n % 2 WHEN 0 THEN {BUSY.partition('-')[2]} ELSE {BUSY_GRAPH.partition('-')[2]} END)",
    f"((n - 1) / 2 + 1 + {_FEW})",
)
_CHATS = _Spread(LONG, CHAT.partition("-")[2], f"(n + {_FEW})")


class _Copies:
    """Rows that are copied within the database; ``n`` numbers the copies of a template from 1."""

    def __init__(self, world: World) -> None:
        self._alias = world.database.alias
        self._is_sqlite = world.database.vendor == "sqlite"
        self._tenant = world.database.tenant
        self._templates = {
            model: list(model._default_manager.using(self._alias).values_list("pk", flat=True))
            for model in apps.get_app_config("helix_store").get_models()
        }

    def of_sessions(self) -> None:
        # The divisors have no common factor, so that every combination of filters finds some.
        parent = f"CASE WHEN n > {_PARENTS} AND n % 3 = 0 THEN 'session-' || (n % {_PARENTS} + 1) END"
        is_busy = f"'session-' || n IN ('{BUSY}', '{BUSY_GRAPH}')"
        length = f"CASE WHEN {is_busy} THEN {LONG + _FEW} ELSE {_FEW} END"
        shared = {
            "session_id": "'session-' || n",
            "agent_type": "CASE n % 5 WHEN 0 THEN 'graph' ELSE 'agent-' || (n % 5) END",
            "status": """CASE n % 11 WHEN 0 THEN 'active' WHEN 1 THEN 'paused' WHEN 2 THEN 'failed'
                         ELSE 'completed' END""",
            "failure_reason": "CASE n % 11 WHEN 2 THEN 'session_expired' END",
            "user_id": "'user-' || (n % 97)",
            "workspace_id": "CASE WHEN n % 4 > 0 THEN 'workspace-' || (n % 89) END",
            "parent_session_id": parent,
            "root_session_id": f"COALESCE({parent}, 'session-' || n)",
            "stream_id": "CASE n % 10 WHEN 0 THEN 'stream-' || (n % 7) ELSE 'session-' || n END",
            "tags": self._json("CASE n % 499 WHEN 0 THEN '[\"rare\"]' ELSE '[\"common\"]' END"),
            "metadata": self._json("""'{"customer": "' || (n % 499) || '"}'"""),
            "expires_at": self._moment("(n % 1000 - 500) * 60"),
            "pending_deadline": self._moment("(n % 1000 - 500) * 60"),
            "stopped_by": f"""CASE WHEN n > {_USED} THEN NULL WHEN n % 40 = 13 THEN 'error'
                WHEN n % 40 = 14 THEN 'budget' WHEN n % 40 = 18 THEN 'effect' END""",
            "stopped_at": self._moment("-n * 60"),
            "waiting_kind": "CASE n % 40 WHEN 17 THEN 'interrupt' END",
            "next_post_at": f"CASE WHEN n % 50 IN (0, 11) THEN {self._moment('-n * 60')} END",
            "created_at": self._moment("-(n * 7919 % 10007) * 600"),
            # A few sessions share each moment.
            "updated_at": self._moment("-(n / 3)"),
            "message_count": length,
            "version": length,
            # Each has a current row of its own, among the checkpoints to come, as far as statistics go.
            "current_id": "CASE WHEN n < 100 THEN current_id ELSE current_id + n END",
        }
        for suffix in ("", "-b", "-c"):
            self._copy(Session, SESSIONS, {"tenant": f"'{self._tenant}{suffix}'", **shared})

    def of_histories(self) -> None:
        """Messages, items and checkpoints."""
        for spread in (_FEW_EACH, _LONG_ONES):
            number, at = spread.row, self._moment(spread.row)
            self._copy_to(spread, Message, {"sequence": number, "created_at": at})
            lanes = {
                "lane": f"CASE {number} % 2 WHEN 0 THEN 'branch' ELSE '' END",
                "key": f"'key-' || {number}",
            }
            self._copy_to(spread, Item, lanes)
            for kind in (CheckpointKind.STEP, CheckpointKind.GRAPH, CheckpointKind.SNAPSHOT):
                in_two = f"CASE {number} % 2 WHEN 0 THEN 'sub' ELSE '' END"
                changed = {
                    "version": number,
                    "checkpoint_id": f"'{kind}-' || {spread.session} || '-' || {number}",
                    "parent_checkpoint_id": "NULL",
                    "namespace": in_two if kind == CheckpointKind.GRAPH else "''",
                    "message_count": number,
                    "created_at": at,
                }
                self._copy_to(spread, Checkpoint, changed, kind=kind)

    def point_at_current_state(self) -> None:
        """The newest checkpoint is the current state of the sessions whose state is read."""
        newest = Checkpoint.objects.filter(session=OuterRef("pk"), kind=CheckpointKind.STEP)
        Session.objects.using(self._alias).filter(
            tenant=self._tenant, session_id__in=[BUSY, STEPPING]
        ).update(current_id=Subquery(newest.order_by("-version").values("pk")[:1]))

    def of_work(self) -> None:
        """Runs, operations, posts, staged changes, sub-sessions and interrupts."""
        for spread in (_FEW_EACH, _LONG_ONES):
            number = spread.row
            turns = {
                "run_id": f"'run-' || {number}",
                "turn": number,
                "status": f"""CASE WHEN {number} = {LONG + _FEW} THEN 'running'
                    WHEN {number} <> {_FEW} THEN 'completed'
                    ELSE CASE {spread.session} % 40 WHEN 13 THEN 'failed' WHEN 14 THEN 'interrupted'
                        WHEN 15 THEN 'running' WHEN 18 THEN 'interrupted' ELSE 'completed' END END""",
                "completion_reason": f"""CASE {spread.session} % 40 WHEN 14 THEN 'budget:budget'
                    WHEN 18 THEN 'effect:effect-1' END""",
                "fencing_token": "1",
                "started_at": self._moment(f"-{spread.session} * 60"),
            }
            self._copy_to(spread, Run, turns)
            effects = {
                "effect_id": f"'effect-' || {number}",
                "sequence": number,
                "state": f"""CASE WHEN {number} = {_FEW} AND {spread.session} % 40 = 16 THEN 'unknown'
                    ELSE 'done' END""",
                "started_at": self._moment(f"-{spread.session} * 60"),
            }
            self._copy_to(spread, Effect, effects)
            self._copy_to(spread, Decision, {"version": number, "tool_call_id": f"'call-' || {number}"})
            self._copy_to(spread, Operation, {"operation_id": f"'operation-' || {number}"})
            steps = {"step_id": f"'step-' || ({number} / 10)", "tool_call_id": f"'call-' || {number}"}
            self._copy_to(spread, StagedChange, steps)
        for spread in (_FEW_EACH, _CHATS):
            number = spread.row
            posts = {
                "post_id": f"'post-' || {number}",
                "sequence": number,
                "key": f"'key-' || {number}",
                "author": f"'author-' || (n % {LONG})",
                "state": f"CASE {number} % 3 WHEN 0 THEN 'waiting' ELSE 'received' END",
            }
            self._copy_to(spread, Post, posts)
        below = {"sub_session_id": f"'session-' || ({_FEW_EACH.session} + {_FEW_EACH.row} * {_USED})"}
        self._copy_to(_FEW_EACH, SubSessionRef, below)
        self._copy(InterruptRequest, _USED, {"session_id": self._key_of("n")})

    def of_usage(self) -> None:
        for spread in (_FEW_EACH, _LONG_ONES):
            changed = {
                "session_id": f"CASE n % 3 WHEN 0 THEN NULL ELSE {self._key_of(spread.session)} END",
                "recorded_for": f"'session-' || {spread.session}",
                "entry_id": f"entry_id || '-{spread.count}-' || n",
                "session_agent_type": "'agent-' || (n % 5)",
                "user_id": "'user-' || (n % 97)",
                "timestamp": self._moment("-n * 60"),
            }
            self._copy(UsageEntry, spread.count, changed)

    def of_budgets(self) -> None:
        changed = {
            "tenant": f"CASE n % 100 WHEN 7 THEN '{CAPPED}' ELSE '{self._tenant}-' || n END",
            "name": "'budget-' || n",
            "value": "'capped-' || n",
        }
        for model in (Budget, BudgetCounter):
            self._copy(model, BUDGETS, changed)

    def of_locks(self) -> None:
        held_until = self._moment("86400")
        held = {"name": "'lock-' || n", "expires_at": f"CASE n % 1000 WHEN 0 THEN {held_until} END"}
        self._copy(Lock, _LOCKS, held)
        self._copy(Lock, _USED, {"name": "'session-' || n", "token": "1", "expires_at": "NULL"})

    def of_tombstones(self) -> None:
        self._copy(Tombstone, _LOCKS, {"digest": "'digest-' || n", "erased_at": self._moment("n")})

    def of_streams(self) -> None:
        # One in a hundred still takes chunks; of those that are over, nearly all have been emptied.
        is_active, is_full = "n % 100 = 0", "n % 100 = 50"
        ago, hence = self._moment("-n * 60"), self._moment("n * 60")
        changed = {
            "stream_id": "'session-' || n",
            "status": f"CASE WHEN {is_active} THEN 'active' ELSE 'ended' END",
            "lease_expires_at": f"CASE WHEN {is_active} THEN {self._moment('n')} END",
            "ended_at": f"CASE WHEN {is_active} THEN NULL ELSE {ago} END",
            "keep_until": f"CASE WHEN {is_active} THEN NULL ELSE {hence} END",
            "is_emptied": f"NOT ({is_active} OR {is_full})",
            "last_sequence": str(LONG),
            "floor": f"CASE WHEN {is_active} OR {is_full} THEN 0 ELSE {LONG} END",
        }
        self._copy(Stream, _STREAMS, changed)
        table = Stream._meta.db_table
        of_every_fiftieth = (
            f"(SELECT s.id FROM {table} AS s WHERE s.tenant = '{self._tenant}' "
            "AND s.stream_id = 'session-' || (((n - 1) % 20 + 1) * 50))"
        )
        self._copy(StreamChunk, 20 * LONG, {"stream_id": of_every_fiftieth, "sequence": "((n - 1) / 20 + 1)"})

    def _key_of(self, number: str) -> str:
        table = Session._meta.db_table
        return (
            f"(SELECT s.id FROM {table} AS s WHERE s.tenant = '{self._tenant}' "
            f"AND s.session_id = 'session-' || {number})"
        )

    def _moment(self, seconds: str) -> str:
        """So many seconds after `NOW`."""
        if self._is_sqlite:
            return f"datetime('{NOW:%Y-%m-%d %H:%M:%S}', ({seconds}) || ' seconds')"
        return f"timestamptz '{NOW:%Y-%m-%d %H:%M:%S}+00' + ({seconds}) * interval '1 second'"

    def _json(self, text: str) -> str:
        return text if self._is_sqlite else f"CAST({text} AS jsonb)"

    def _copy_to(self, spread: _Spread, model: type[Model], changed: Mapping[str, str], **of: Any) -> None:
        self._copy(model, spread.count, {"session_id": self._key_of(spread.session), **changed}, **of)

    def _copy(self, model: type[Model], count: int, changed: Mapping[str, str], **of: Any) -> None:
        """Insert so many copies of each template that ``of`` chooses, with other values in some columns."""
        templates = model._default_manager.using(self._alias).filter(pk__in=self._templates[model], **of)
        keys = ", ".join(str(key) for key in templates.values_list("pk", flat=True))
        columns = [str(field.column) for field in model._meta.concrete_fields if not field.primary_key]
        selected = ", ".join(changed.get(column, column) for column in columns)
        table = model._meta.db_table
        numbers = f"SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count}"
        with connections[self._alias].cursor() as cursor:
            cursor.execute(
                f"WITH RECURSIVE numbers(n) AS ({numbers}) INSERT INTO {table} ({', '.join(columns)}) "
                f"SELECT {selected} FROM {table} CROSS JOIN numbers WHERE {table}.id IN ({keys})"
            )
