"""Every public call of the stores, on sessions with a little of everything, for `test_query_counts`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final

from asgiref.sync import async_to_sync
from django.db import transaction

from helix_store.checkpointers import Claim, GraphCheckpointStore, SnapshotCheckpointer
from helix_store.core import moments
from helix_store.core.types import SessionState, SessionStatus, StepInfo
from helix_store.handles import SessionHandle
from helix_store.items import ItemLog
from helix_store.stores import (
    DatabaseBudgetStore,
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
    Lock,
)
from helix_store.streams.manager import StreamWriter
from helix_store.testing.state_store.tool_calls import IN_A_WHILE
from helix_store.testing.usage.base import NOON, custom
from tests.database.counted_framework_calls import FRAMEWORK_CALLS
from tests.databases import CommittedDatabase

__all__ = ["CALLS", "CLASSES", "Faces"]

CLASSES: Final[dict[str, type[Any]]] = {
    "state store": DatabaseStateStore,
    "session handle": SessionHandle,
    "locks": DatabaseLockManager,
    "lock": Lock,
    "usage": DatabaseUsageStore,
    "budgets": DatabaseBudgetStore,
    "streams": DatabaseStreamManager,
    "stream writer": StreamWriter,
    "graph": GraphCheckpointStore,
    "items": ItemLog,
    "snapshots": SnapshotCheckpointer,
    "claim": Claim,
}

_ASK: Final = {"tool_name": "ask"}
_APPROVE: Final = {"tool_name": "pay", "approval_id": "approved"}
_PERMITTED: Final = {**_APPROVE, "permission": "helix_store.change_session"}
_MESSAGE: Final = {"role": "user", "content": "hello"}
_CHUNK: Final = {"type": "text_delta", "delta": "word"}
_STAGED_CHANGE: Final = {"merge_changes": {"notes": [1]}}


@dataclass(frozen=True)
class Faces:
    """The stores of one tenant; what a call works on is written when a face is first asked for."""

    database: CommittedDatabase

    def _of(self, face: type[Any]) -> Any:
        return face(self.database.alias, tenant=self.database.tenant)

    @cached_property
    def store(self) -> DatabaseStateStore:
        """``s`` with a checkpoint, a run, a child, staged changes and calls; ``suspended``."""
        store: DatabaseStateStore = self._of(DatabaseStateStore)
        state = store.create_session("s", agent_type="t")
        store.start_run("s", "run")
        store.save_state_and_promote_staging("s", state, [_MESSAGE] * 5, StepInfo("step-1", 1))
        store.save_state_and_promote_staging("s", state, [_MESSAGE] * 5, StepInfo("step-2", 2))
        store.stage_changes("s", "staged", {"tool_call_id": "call", **_STAGED_CHANGE})
        store.add_sub_session_refs("s", [{"sub_session_id": "sub", "agent_type": "a", "status": "active"}])
        store.request_interrupt("s")
        store.create_session("child", agent_type="t", parent_session_id="s")
        store.add_pending_tool_calls("s", {"open": _ASK, "answered": _ASK})
        store.submit_tool_result("s", "answered", result=1)
        store.create_session("suspended", agent_type="t")
        store.suspend("suspended", kind="suspended_client_tool", context={})
        return DatabaseStateStore(self.database.alias, tenant=self.database.tenant)

    @cached_property
    def handle(self) -> SessionHandle:
        """Of ``driven``, which a turn has driven before."""
        store = self._of(DatabaseStateStore)
        session: SessionHandle = store.new_session("driven", agent_type="t")
        session.say(*[_MESSAGE] * 5)
        _drive(session, steps=1)
        return session

    @property
    def handles_checkpoint_id(self) -> str:
        return self.handle.checkpoints().items[0].checkpoint_id

    @property
    def saved(self) -> SessionState:
        # The owners as loaded: a step that would drop some takes more statements.
        owners = {"open": "s", "answered": "s"}
        return SessionState(session_id="s", agent_type="t", client_tool_call_ownership=owners)

    @property
    def checkpoint_id(self) -> str:
        """The older one of ``s``."""
        oldest = self.store.list_checkpoints("s").items[-1]
        return oldest.checkpoint_id

    @cached_property
    def locks(self) -> DatabaseLockManager:
        locks: DatabaseLockManager = self._of(DatabaseLockManager)
        assert locks.acquire("held")
        free = locks.acquire("free")
        assert free is not None
        free.release()
        return locks

    @cached_property
    def lock(self) -> Lock:
        lock = self.locks.acquire("mine")
        assert lock is not None
        return lock

    @cached_property
    def usage(self) -> DatabaseUsageStore:
        """``root`` and its child ``leaf`` have spent something, ``gone`` had."""
        store: DatabaseStateStore = self._of(DatabaseStateStore)
        usage: DatabaseUsageStore = self._of(DatabaseUsageStore)
        store.create_session("root", agent_type="t")
        store.create_session("leaf", agent_type="t", parent_session_id="root")
        store.create_session("gone", agent_type="t")
        usage.record_entries([custom("root", id="known"), custom("leaf"), custom("gone")])
        store.delete_session("gone", keep_usage=True)
        return usage

    @cached_property
    def budgets(self) -> DatabaseBudgetStore:
        """``cap`` of the tenant, which has spent something."""
        self.usage.record_entry(custom("root", cost_usd="0.5"))
        budgets: DatabaseBudgetStore = self._of(DatabaseBudgetStore)
        budgets.set_budget("cap", scope="tenant", limit_usd=1_000)
        return budgets

    @cached_property
    def streams(self) -> DatabaseStreamManager:
        streams: DatabaseStreamManager = self._of(DatabaseStreamManager)
        async_to_sync(streams.create_writer)("stream", "run", "agent")
        streams.write_sync("stream", [_CHUNK] * 5)
        return streams

    @cached_property
    def writer(self) -> StreamWriter:
        return async_to_sync(self.streams.create_writer)("stream", "run", "agent")

    @property
    def fence(self) -> int:
        lock = self._of(DatabaseLockManager).acquire("stream")
        assert lock is not None
        return int(lock.fencing_token)

    @cached_property
    def graph(self) -> GraphCheckpointStore:
        graph: GraphCheckpointStore = self._of(GraphCheckpointStore)
        graph.create_session("here", session_id="g")
        graph.add_messages("g", [{"role": "user", "content": "hello"}] * 3)
        graph.save_checkpoint("g", step=1)
        graph.save_checkpoint("g", step=2)
        return graph

    @property
    def graph_checkpoint_id(self) -> str:
        latest = self.graph.get_latest_checkpoint("g")
        assert latest is not None
        return latest.checkpoint_id

    @cached_property
    def items(self) -> ItemLog:
        log = ItemLog("i", using=self.database.alias, tenant=self.database.tenant)
        log.append(["first", "second", "third"], keys=["key", None, None])
        return log

    @property
    def new_items(self) -> ItemLog:
        return ItemLog("new", using=self.database.alias, tenant=self.database.tenant)

    @cached_property
    def snapshots(self) -> SnapshotCheckpointer:
        snapshots = SnapshotCheckpointer(
            self.database.alias, tenant=self.database.tenant, max_checkpoints_per_thread=2
        )
        snapshots.put("thread", {"version": 1})
        snapshots.put("thread", {"version": 1})
        return snapshots

    @property
    def snapshot_id(self) -> str:
        return self.snapshots.list("thread")[0].id

    @cached_property
    def claim(self) -> Claim:
        claim = self.snapshots.claim("thread", owner="me")
        assert claim is not None
        return claim


def _drive(
    session: SessionHandle, *, steps: int, spends: bool = False, waits: bool = False, **estimates: Any
) -> None:
    """A turn of some steps that say something."""
    with session.turn(**estimates) as turn:
        for number in range(steps):
            if spends:
                turn.tokens(model="m", prompt=1)
            with turn.step() as step:
                step.say(_MESSAGE)
                if waits and number == steps - 1:
                    step.wait_for({"call": _ASK})


Call = Callable[[], object]
Calls = dict[str, Callable[[Faces], Call]]


def _last_step(faces: Faces) -> Call:
    faces.saved.status = SessionStatus.COMPLETED
    return _step(faces)


def _step(faces: Faces, **options: Any) -> Call:
    info = StepInfo("step-3", 3)
    return partial(faces.store.save_state_and_promote_staging, "s", faces.saved, [_MESSAGE], info, **options)


def _step_with_staging(faces: Faces, steps_before: int = 0) -> Call:
    """The last one of some steps that all have something staged."""
    for number in range(steps_before + 1):
        faces.store.stage_changes("s", f"late-{number}", {"tool_call_id": "call", **_STAGED_CHANGE})
    for number in range(steps_before):
        info = StepInfo(f"late-{number}", 10 + number)
        faces.store.save_state_and_promote_staging("s", faces.saved, [_MESSAGE], info)
    info = StepInfo(f"late-{steps_before}", 30)
    return partial(faces.store.save_state_and_promote_staging, "s", faces.saved, [_MESSAGE], info)


def _deletion_with_stream(faces: Faces) -> Call:
    store = faces.store
    store.create_session("stream", agent_type="t")
    assert faces.streams.read_after("stream", 0)
    return partial(store.delete_session, "stream")


def _repeated_operation(faces: Faces) -> Call:
    again = _step(faces, operation_id="operation")
    again()
    return again


def _all_messages(faces: Faces) -> Call:
    store = faces.store
    return lambda: list(store.iter_messages("s", chunk_size=5))


def _kept_alive(faces: Faces) -> Call:
    lock = faces.lock
    return lambda: lock.keep_alive().stop()


def _reading(faces: Faces, method: str) -> Call:
    """In a transaction, where readers use the connection of their caller."""
    create = getattr(faces.streams, method)

    async def create_and_close() -> None:
        reader = await create("stream")
        await reader.aclose()

    def read() -> None:
        with transaction.atomic(using=faces.database.alias):
            async_to_sync(create_and_close)()

    return read


def _paused(faces: Faces) -> Call:
    async_to_sync(faces.streams.pause_stream)("stream")
    return partial(async_to_sync(faces.streams.reactivate_stream), "stream")


def _of(face: str, method: str, *arguments: Any, **options: Any) -> Callable[[Faces], Call]:
    return lambda faces: partial(getattr(getattr(faces, face), method), *arguments, **options)


def _async_of(face: str, method: str, *arguments: Any, **options: Any) -> Callable[[Faces], Call]:
    return lambda faces: partial(async_to_sync(getattr(getattr(faces, face), method)), *arguments, **options)


def _approval(faces: Faces) -> Call:
    """The first one of the two that the call needs."""
    faces.store.add_pending_tool_calls("s", {"approved": {**_APPROVE, "approvals": 2}})
    answer: dict[str, Any] = {"approved": True, "approval_id": "approved", "actor": "ann"}
    return partial(faces.store.submit_tool_result, "s", "approved", **answer)


def _answered_approval(faces: Faces) -> Call:
    faces.store.add_pending_tool_calls("s", {"approved": _APPROVE})
    return partial(
        faces.store.submit_tool_result, "s", "approved", approved=True, approval_id="approved", actor="ann"
    )


def _counted_entry(faces: Faces) -> Call:
    _ = faces.budgets
    return partial(faces.usage.record_entry, custom("root", cost_usd="0.5"))


def _of_store(method: str, *arguments: Any, **options: Any) -> Callable[[Faces], Call]:
    return _of("store", method, "s", *arguments, **options)


def _behind_a_post(method: str, *arguments: Any, **options: Any) -> Callable[[Faces], Call]:
    def prepared(faces: Faces) -> Call:
        faces.store.post_message("s", _MESSAGE, key="key")
        return partial(getattr(faces.store, method), *arguments, **options)

    return prepared


def _effect(faces: Faces, **options: Any) -> Call:
    """From the intent to the result, guarded by a lock."""
    session = faces.store.session("s", fencing_token=1)

    def make() -> None:
        with session.effect("effect", **options) as effect:
            if not effect.is_done:
                effect.done(1)

    return make


def _done_effect(faces: Faces) -> Call:
    _effect(faces)()
    return _effect(faces)


def _effect_again(faces: Faces) -> Call:
    with faces.store.session("s").effect("effect") as effect:
        effect.not_done()
    return _effect(faces)


def _approved_effect(faces: Faces) -> Call:
    _answered_approval(faces)()
    session = faces.store.session("s")

    def make() -> None:
        with session.effect("approved", approval=True) as effect:
            if not effect.is_done:
                effect.done(1)

    return make


def _done_approved_effect(faces: Faces) -> Call:
    call = _approved_effect(faces)
    call()
    return call


def _settled(faces: Faces) -> Call:
    faces.store.session("s").effect("effect").__enter__()
    return partial(faces.store.settle_effect, "s", "effect", done=True)


_STORE: Final[Calls] = {
    "create_session": _of("store", "create_session", agent_type="t"),
    "new_session": _of("store", "new_session", agent_type="t"),
    "session": _of_store("session"),
    "create_session of a child": _of("store", "create_session", agent_type="t", parent_session_id="s"),
    "session_exists": _of_store("session_exists"),
    "load_state": _of_store("load_state"),
    "save_state": lambda faces: partial(faces.store.save_state, "s", faces.saved),
    "delete_session": _of("store", "delete_session", "child"),
    "delete_session of a tree": _of_store("delete_session"),
    "delete_session with its stream": _deletion_with_stream,
    "delete_session that keeps usage": _of("store", "delete_session", "child", keep_usage=True),
    "update_status": _of_store("update_status", "running"),
    "compare_and_set_status": _of_store("compare_and_set_status", ["active"], "paused"),
    "compare_and_set_status that loses": _of_store("compare_and_set_status", ["failed"], "paused"),
    "increment_step_count": _of_store("increment_step_count"),
    "increment_resume_count": _of_store("increment_resume_count"),
    "merge_custom_state": _of_store("merge_custom_state", {"a": 1}),
    "list_sessions": _of("store", "list_sessions"),
    "list_sessions without a count": _of("store", "list_sessions", count=False),
    "append_messages": _of_store("append_messages", [_MESSAGE] * 9),
    "get_messages": _of_store("get_messages", offset=3, limit=5),
    "get_messages from the end": _of_store("get_messages", limit=5, order="desc"),
    "get_messages beyond the end": _of_store("get_messages", offset=50),
    "iter_messages of two chunks": _all_messages,
    "get_message_count": _of_store("get_message_count"),
    "truncate_messages": _of_store("truncate_messages", 3),
    "stage_changes": _of_store("stage_changes", "staged", {"tool_call_id": "another"}),
    "get_staged_changes": _of_store("get_staged_changes", "staged"),
    "promote_staging": _of_store("promote_staging", "staged"),
    "discard_staging": _of_store("discard_staging", "staged"),
    "save_state_and_promote_staging": _step,
    "save_state_and_promote_staging that ends the session": _last_step,
    "save_state_and_promote_staging with a run": partial(_step, run_id="run"),
    "save_state_and_promote_staging with a fence": partial(_step, fencing_token=1),
    "save_state_and_promote_staging with an operation": partial(_step, operation_id="operation"),
    "save_state_and_promote_staging that repeats an operation": _repeated_operation,
    "save_state_and_promote_staging with staged changes": _step_with_staging,
    "save_state_and_promote_staging with staged changes, third step": partial(
        _step_with_staging, steps_before=2
    ),
    "get_checkpoint": lambda faces: partial(faces.store.get_checkpoint, "s", faces.checkpoint_id),
    "get_latest_checkpoint": _of_store("get_latest_checkpoint"),
    "list_checkpoints": _of_store("list_checkpoints"),
    "restore_checkpoint": lambda faces: partial(faces.store.restore_checkpoint, "s", faces.checkpoint_id),
    "branch_session": _of_store("branch_session"),
    "delete_checkpoint": lambda faces: partial(faces.store.delete_checkpoint, "s", faces.checkpoint_id),
    "prune_checkpoints": _of_store("prune_checkpoints", keep=1),
    "start_run": _of("store", "start_run", "child"),
    "start_run that supersedes": _of_store("start_run", supersede=True, fencing_token=1),
    "update_run": _of_store("update_run", "run", status="completed"),
    "get_current_run": _of_store("get_current_run"),
    "list_runs": _of_store("list_runs"),
    "add_sub_session_refs": _of_store(
        "add_sub_session_refs", [{"sub_session_id": "new", "agent_type": "a", "status": "active"}]
    ),
    "update_sub_session_ref": _of_store("update_sub_session_ref", "sub", status="completed"),
    "get_sub_session_refs": _of_store("get_sub_session_refs"),
    "request_interrupt": _of("store", "request_interrupt", "child"),
    "check_interrupt": _of_store("check_interrupt"),
    "clear_interrupt": _of_store("clear_interrupt"),
    "add_pending_tool_calls": _of_store("add_pending_tool_calls", {"new": _ASK}),
    "add_pending_tool_calls of a child": _of("store", "add_pending_tool_calls", "child", {"new": _ASK}),
    "submit_tool_result": _of_store("submit_tool_result", "open", result=1),
    "submit_tool_result through a child": _of("store", "submit_tool_result", "child", "open", result=1),
    "submit_tool_result with one of two approvals": _approval,
    "submit_tool_result with an approval": _answered_approval,
    "submit_tool_result too late": _of_store("submit_tool_result", "answered", result=1),
    "take_tool_results": _of_store("take_tool_results"),
    "find_expired_pending": _of("store", "find_expired_pending"),
    "find_expired_pending at a given time": lambda faces: partial(
        faces.store.find_expired_pending, now=moments.now()
    ),
    "suspend": _of_store("suspend", kind="suspended_step_partial", context={}),
    "suspend with calls": _of_store(
        "suspend", kind="suspended_client_tool", context={}, pending={"new": _ASK}
    ),
    "resume": _of("store", "resume", "suspended"),
    "post_message": _of_store("post_message", _MESSAGE),
    "post_message behind other posts": _behind_a_post("post_message", "s", _MESSAGE, key="new"),
    "post_message with a known key": _behind_a_post("post_message", "s", _MESSAGE, key="key"),
    "list_posts": _behind_a_post("list_posts", "s"),
    "withdraw_post": lambda faces: partial(
        faces.store.withdraw_post, "s", faces.store.post_message("s", _MESSAGE).post_id
    ),
    "receive_posts": _behind_a_post("receive_posts", "s"),
    "receive_posts without due posts": _of_store("receive_posts"),
    "find_due_posts": _behind_a_post("find_due_posts"),
    "settle_effect": _settled,
    "list_effects": _of_store("list_effects", states=["done"]),
    "find_unknown_effects": _of("store", "find_unknown_effects"),
}


def _handles_step(faces: Faces, *, stages: bool = False, waits_for: dict[str, Any] | None = None) -> Call:
    session = faces.handle

    def make() -> None:
        with session.step() as step:
            step.say(_MESSAGE)
            if stages:
                step.stage("call", merge_changes={"notes": [1]})
            if waits_for is not None:
                step.wait_for({"call": waits_for})

    return make


def _step_that_uses_an_approval(faces: Faces) -> Call:
    session = faces.handle
    session.store.add_pending_tool_calls(session.id, {"approved": _APPROVE})
    session.store.submit_tool_result(session.id, "approved", approved=True, approval_id="approved")

    def make() -> None:
        with session.step() as step:
            step.say(_MESSAGE)
            step.use_approval("approved")

    return make


def _step_beside_an_answered_approval(faces: Faces, **deadline: Any) -> Call:
    session = faces.handle
    session.store.add_pending_tool_calls(session.id, {"approved": {**_APPROVE, **deadline}})
    session.store.submit_tool_result(session.id, "approved", approved=True, approval_id="approved")
    return _handles_step(faces)


def _turn(faces: Faces, **options: Any) -> Call:
    return partial(_drive, faces.handle, **options)


def _turn_at_rest(faces: Faces) -> Call:
    with faces.handle.turn() as turn, turn.step() as step:
        step.end_turn()
    return partial(_drive, faces.handle, steps=0)


def _turn_with_a_budget(faces: Faces, **options: Any) -> Call:
    _ = faces.budgets
    return partial(_drive, faces.handle, steps=6, **options)


def _turn_while_waiting(faces: Faces) -> Call:
    _drive(faces.handle, steps=1, waits=True)
    return partial(_drive, faces.handle, steps=0)


def _turn_after_an_answer(faces: Faces, *, steps: int) -> Call:
    _drive(faces.handle, steps=1, waits=True)
    faces.handle.store.submit_tool_result("driven", "call", result=1)
    return partial(_drive, faces.handle, steps=steps)


def _first_turn(faces: Faces) -> Call:
    return partial(_drive, faces.store.new_session("new", agent_type="t"), steps=0)


def _first_turn_after_an_answer(faces: Faces) -> Call:
    session = faces.store.new_session("asked", agent_type="t")
    with session.step() as step:
        step.wait_for({"call": _ASK})
    faces.store.submit_tool_result("asked", "call", result=1)
    return partial(_drive, session, steps=0)


def _turn_after_a_dead_worker(faces: Faces) -> Call:
    """Whose run was asked to stop."""
    session = faces.handle
    session.store.start_run("driven", "dead", fencing_token=1)
    session.store.request_interrupt("driven")
    return partial(_drive, session, steps=0)


_HANDLE: Final[Calls] = {
    "load": _of("handle", "load"),
    "messages": _of("handle", "messages"),
    "messages from the end": _of("handle", "messages", last=2),
    "say": _of("handle", "say", _MESSAGE),
    "post": _of("handle", "post", _MESSAGE),
    "posts": _of("handle", "posts"),
    "update": _of("handle", "update", lambda state: None),
    "branch": _of("handle", "branch"),
    "rewind": lambda faces: partial(faces.handle.rewind, faces.handles_checkpoint_id),
    "checkpoints": _of("handle", "checkpoints"),
    "usage": _of("handle", "usage"),
    "usage of a tree": _of("handle", "usage", tree=True),
    "delete": _of("handle", "delete"),
    "step": _handles_step,
    "step with staged changes": partial(_handles_step, stages=True),
    "step that waits": partial(_handles_step, waits_for=_ASK),
    "step that waits for a permission": partial(_handles_step, waits_for=_PERMITTED),
    "step that uses an approval": _step_that_uses_an_approval,
    "step before an approval is taken": _step_beside_an_answered_approval,
    "step before an approval with a deadline is taken": partial(
        _step_beside_an_answered_approval, deadline=IN_A_WHILE
    ),
    "effect": _effect,
    "effect that is done": _done_effect,
    "effect that is attempted again": _effect_again,
    "effect with an approval": _approved_effect,
    "effect with an approval that is done": _done_approved_effect,
    "turn without a step": partial(_turn, steps=0),
    "turn of one step": partial(_turn, steps=1),
    "turn of two steps": partial(_turn, steps=2),
    "turn of six steps": partial(_turn, steps=6),
    "turn of six steps that spend tokens": partial(_turn, steps=6, spends=True),
    "turn of six steps with a budget": partial(_turn_with_a_budget, spends=True),
    "turn of six steps with a budget and an estimate": partial(
        _turn_with_a_budget, spends=True, estimate_usd=1
    ),
    "turn of one step that waits": partial(_turn, steps=1, waits=True),
    "turn without a step of a new session": _first_turn,
    "turn without a step after a dead worker": _turn_after_a_dead_worker,
    "turn without a step after an answer": partial(_turn_after_an_answer, steps=0),
    "turn without a step after an answer, the first one": _first_turn_after_an_answer,
    "turn of one step after an answer": partial(_turn_after_an_answer, steps=1),
    "turn of six steps after an answer": partial(_turn_after_an_answer, steps=6),
    "turn while it waits": _turn_while_waiting,
    "turn at rest": _turn_at_rest,
}

_LOCKS: Final[Calls] = {
    "acquire": _of("locks", "acquire", "free"),
    "acquire of a new name": _of("locks", "acquire", "new"),
    "acquire of a held name": _of("locks", "acquire", "held"),
    "wait_acquire": _of("locks", "wait_acquire", "free", timeout_ms=0),
    "take_over": _of("locks", "take_over", "held"),
    "take_over of a new name": _of("locks", "take_over", "new"),
    "is_locked": _of("locks", "is_locked", "held"),
    "get_active_locks": _of("locks", "get_active_locks"),
    "force_release": _of("locks", "force_release", "held"),
}

_LOCK: Final[Calls] = {
    "is_trusted": _of("lock", "is_trusted"),
    "refresh": _of("lock", "refresh"),
    "release": _of("lock", "release"),
    "keep_alive": _kept_alive,
}

_USAGE: Final[Calls] = {
    "record_entry": _of("usage", "record_entry", custom("root")),
    "record_entry of a known id": _of("usage", "record_entry", custom("root", id="known")),
    "record_entries of a thousand": _of("usage", "record_entries", [custom("root")] * 1_000),
    "record_entry that a budget counts": _counted_entry,
    "get_entries": _of("usage", "get_entries", "root"),
    "get_rollup": _of("usage", "get_rollup", "root"),
    "get_rollup of a tree": _of("usage", "get_rollup", "root", include_sub_agents=True),
    "get_rollup of a deleted session": _of("usage", "get_rollup", "gone"),
    "exists": _of("usage", "exists", "root"),
    "delete": _of("usage", "delete", "root"),
    "query_usage": _of("usage", "query_usage"),
    "query_usage without a count": _of("usage", "query_usage", count=False),
    "timeseries": _of("usage", "timeseries", date_from=0, date_to=NOON),
}

_BUDGETS: Final[Calls] = {
    "set_budget": _of("budgets", "set_budget", "new", scope="user", period="day", limit_usd=1),
    "set_budget of a known name": _of("budgets", "set_budget", "cap", scope="tenant", limit_usd=1),
    "get_budget": _of("budgets", "get_budget", "cap"),
    "list_budgets": _of("budgets", "list_budgets"),
    "delete_budget": _of("budgets", "delete_budget", "cap"),
    "status": _of("budgets", "status", "cap"),
}

_STREAMS: Final[Calls] = {
    "create_writer": _async_of("streams", "create_writer", "new", "run", "agent"),
    "write_sync": _of("streams", "write_sync", "stream", [_CHUNK] * 100),
    "write_sync with a fence": lambda faces: partial(
        faces.streams.write_sync, "stream", [_CHUNK] * 100, fencing_token=faces.fence
    ),
    "write_sync of nothing": _of("streams", "write_sync", "stream", []),
    "end_stream": _async_of("streams", "end_stream", "stream"),
    "fail_stream": _async_of("streams", "fail_stream", "stream", "error"),
    "pause_stream": _async_of("streams", "pause_stream", "stream"),
    "reactivate_stream": _paused,
    "reset_stream": _async_of("streams", "reset_stream", "stream"),
    "delete_stream": _async_of("streams", "delete_stream", "stream"),
    "get_info": _async_of("streams", "get_info", "stream"),
    "read_after": _of("streams", "read_after", "stream", 2),
    "create_reader": partial(_reading, method="create_reader"),
    "create_resumable_reader": partial(_reading, method="create_resumable_reader"),
    "prune that finds nothing": _async_of("streams", "prune", older_than=None),
    "prune to two chunks of one stream": _async_of("streams", "prune", older_than=None, keep_chunks=2),
}

_WRITER: Final[Calls] = {
    "write": _async_of("writer", "write", _CHUNK),
    "write_many": _async_of("writer", "write_many", [_CHUNK] * 100),
    "heartbeat": _async_of("writer", "heartbeat"),
    "close": _async_of("writer", "close"),
}

_GRAPH: Final[Calls] = {
    "create_session": _of("graph", "create_session", "here"),
    "get_session": _of("graph", "get_session", "g"),
    "update_session": _of("graph", "update_session", "g", title="new"),
    "delete_session": _of("graph", "delete_session", "g"),
    "list_sessions": _of("graph", "list_sessions"),
    "search_sessions": _of("graph", "search_sessions", "title"),
    "continue_latest": _of("graph", "continue_latest"),
    "get_session_summary": _of("graph", "get_session_summary", "g"),
    "list_session_summaries": _of("graph", "list_session_summaries"),
    "add_message": _of("graph", "add_message", "g", role="user", content="hello"),
    "add_messages": _of("graph", "add_messages", "g", [{"role": "user", "content": "hello"}] * 9),
    "get_messages": _of("graph", "get_messages", "g", limit=2),
    "save_checkpoint": _of("graph", "save_checkpoint", "g", step=3),
    "save_checkpoint of a given version": _of("graph", "save_checkpoint", "g", step=3, version=9),
    "save_checkpoint with a parent": lambda faces: partial(
        faces.graph.save_checkpoint, "g", step=3, parent_id=faces.graph_checkpoint_id
    ),
    "get_checkpoint": lambda faces: partial(faces.graph.get_checkpoint, faces.graph_checkpoint_id),
    "get_latest_checkpoint": _of("graph", "get_latest_checkpoint", "g"),
    "list_checkpoints": _of("graph", "list_checkpoints", "g"),
    "fork": lambda faces: partial(faces.graph.fork, faces.graph_checkpoint_id),
    "fork with history": lambda faces: partial(
        faces.graph.fork, faces.graph_checkpoint_id, with_history=True
    ),
}

_ITEMS: Final[Calls] = {
    "append": lambda f: partial(f.items.append, ["fourth"]),
    "append in a new session": lambda f: partial(f.new_items.append, ["first"]),
    "append of 1,000 items": lambda f: partial(f.items.append, range(1_000)),
    "put": lambda f: partial(f.items.put, "key", "changed"),
    "pop": lambda f: f.items.pop,
    "pop of the third": lambda f: partial(f.items.pop, lambda payload: payload == "first"),
    "replace_suffix": lambda f: partial(f.items.replace_suffix, ["third"], ["fourth"]),
    "copy_to": lambda f: partial(f.items.copy_to, "other"),
    "clear": lambda f: f.items.clear,
    "clear_all": lambda f: f.items.clear_all,
    "delete_lane": lambda f: partial(f.items.delete_lane, ""),
    "tail": lambda f: f.items.tail,
    "get": lambda f: partial(f.items.get, "key"),
    "count": lambda f: f.items.count,
    "lanes": lambda f: f.items.lanes,
}

_SNAPSHOTS: Final[Calls] = {
    "put": _of("snapshots", "put", "thread", {"version": 1}),
    "put of a new thread": _of("snapshots", "put", "new", {"version": 1}),
    "get": _of("snapshots", "get", "thread"),
    "list": _of("snapshots", "list", "thread"),
    "list before one": lambda faces: partial(faces.snapshots.list, "thread", before=faces.snapshot_id),
    "delete": _of("snapshots", "delete", "thread"),
    "delete_threads": _of("snapshots", "delete_threads", ["thread"]),
    "claim": _of("snapshots", "claim", "thread", owner="me"),
}

_CLAIM: Final[Calls] = {
    "refresh": _of("claim", "refresh"),
    "done": _of("claim", "done"),
    "release": _of("claim", "release"),
}

CALLS: Final[dict[str, Calls]] = {
    "state store": _STORE,
    "session handle": _HANDLE,
    "locks": _LOCKS,
    "lock": _LOCK,
    "usage": _USAGE,
    "budgets": _BUDGETS,
    "streams": _STREAMS,
    "stream writer": _WRITER,
    "graph": _GRAPH,
    "items": _ITEMS,
    "snapshots": _SNAPSHOTS,
    "claim": _CLAIM,
    **FRAMEWORK_CALLS,
}
"""By face and name, which is that of the method and, when that is not all, in which case."""
