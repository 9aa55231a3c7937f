"""The writes of items, graphs, snapshots, and stores of frameworks. Memory has no twin of these."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from helix_store.checkpointers import Claim, GraphCheckpointStore, SnapshotCheckpointer
from helix_store.contrib.langgraph import DjangoSaver, DjangoStore
from helix_store.contrib.openai_agents import RunStateClaim, RunStateStore
from helix_store.items import ItemLog
from tests.faults.writes.faces import Faces, Write

__all__ = ["CLAIMS", "LOGS", "begin_logs"]

_HOUR: Final = timedelta(hours=1)

# Items


def _items(faces: Faces, key: str, lane: str = "") -> ItemLog:
    return ItemLog(f"{key}-items", lane, using=faces.alias, tenant=faces.tenant)


def _of_items(method: str, *arguments: Any, **options: Any) -> Write:
    return lambda faces, key: getattr(_items(faces, key), method)(*arguments, **options)


def _append(faces: Faces, key: str) -> object:
    items = _items(faces, key)
    count = items.count()
    return items.append([{"n": count}, "second", "third"], keys=[f"key-{count}", None, "third"])


def _replace_suffix(faces: Faces, key: str) -> object:
    items = _items(faces, key)
    return items.replace_suffix([item.payload for item in items.tail(2)], ["replaced", 2, 3])


# Graphs


def _graph(faces: Faces) -> GraphCheckpointStore:
    return GraphCheckpointStore(faces.alias, tenant=faces.tenant)


def _save_checkpoint(faces: Faces, key: str) -> object:
    graph, session_id = _graph(faces), f"{key}-graph"
    latest = graph.get_latest_checkpoint(session_id)
    return graph.save_checkpoint(
        session_id,
        step=1 if latest is None else latest.step + 1,
        node_results={"node": {"status": "completed"}},
        parent_id=None if latest is None else latest.checkpoint_id,
    )


def _fork(faces: Faces, key: str) -> object:
    latest = _graph(faces).get_latest_checkpoint(f"{key}-graph")
    return latest and _graph(faces).fork(latest.checkpoint_id, with_history=True)


_SAID: Final[dict[str, Any]] = {"role": "user", "content": "hello"}


# Snapshots


def _snapshots(faces: Faces) -> SnapshotCheckpointer:
    return SnapshotCheckpointer(faces.alias, tenant=faces.tenant, max_checkpoints_per_thread=5)


def _put_snapshot(faces: Faces, key: str) -> object:
    thread_id = f"{key}-thread"
    count = len(_snapshots(faces).list(thread_id))
    return _snapshots(faces).put(thread_id, {"version": 1, "count": count})


def _claim(faces: Faces, key: str) -> Claim | None:
    return _snapshots(faces).claim(f"{key}-thread", owner="worker", ttl_ms=_HOUR)


def _with_claim(faces: Faces, key: str, then: Callable[[Claim], object]) -> object:
    claim = _claim(faces, key)
    faces.between()
    return claim and then(claim)


# LangGraph


def _config(key: str, checkpoint_id: str | None = None) -> Any:
    given = {"thread_id": f"{key}-langgraph", "checkpoint_ns": ""}
    return {"configurable": given | ({"checkpoint_id": checkpoint_id} if checkpoint_id else {})}


def _copy_of(key: str) -> Any:
    return {"configurable": {"thread_id": f"{key}-copy", "checkpoint_ns": ""}}


def _saver(faces: Faces) -> DjangoSaver:
    return DjangoSaver(faces.alias, tenant=faces.tenant)


def _put(faces: Faces, key: str) -> object:
    latest = _saver(faces).get_tuple(_config(key))
    step = 0 if latest is None else latest.metadata["step"] + 1
    checkpoint: Any = {
        "v": 1,
        "id": f"checkpoint-{step:04}",
        "ts": "2026-03-15T12:00:00+00:00",
        "channel_values": {"log": list(range(step))},
        "channel_versions": {"log": f"{step:04}"},
        "versions_seen": {},
    }
    metadata: Any = {"source": "loop", "step": step, "parents": {}, "run_id": f"run-{step}"}
    config = _config(key) if latest is None else latest.config
    return _saver(faces).put(config, checkpoint, metadata, {"log": f"{step:04}"})


def _put_writes(faces: Faces, key: str) -> None:
    latest = _saver(faces).get_tuple(_config(key))
    if latest is not None:
        task = f"task-{len(latest.pending_writes or [])}"
        _saver(faces).put_writes(latest.config, [("log", [1]), ("other", 2)], task)


def _delete_for_runs(faces: Faces, key: str) -> None:
    """The newest run that the copy has no part of: a run of two threads is deleted in two transactions."""
    saver = _saver(faces)
    copied = {found.metadata["step"] for found in saver.list(_copy_of(key))}
    steps = [found.metadata["step"] for found in saver.list(_config(key))]
    saver.delete_for_runs([f"run-{step}" for step in steps if step not in copied][:1])


def _remember(faces: Faces, key: str) -> None:
    memory = DjangoStore(using=faces.alias, tenant=faces.tenant)
    found = memory.get((key, "memories"), "count")
    memory.put((key, "memories"), "count", {"n": 1 if found is None else found.value["n"] + 1})
    memory.delete((key, "memories"), "other")


# OpenAI Agents SDK


def _run_states(faces: Faces) -> RunStateStore:
    return RunStateStore(faces.alias, tenant=faces.tenant)


def _save_run_state(faces: Faces, key: str) -> str:
    count = len(_run_states(faces).waiting(key))
    return _run_states(faces).save(key, f'{{"run": {count}}}', state_id=f"state-{count}", owner="alice")


def _claim_run(faces: Faces, key: str) -> RunStateClaim | None:
    return _run_states(faces).claim(key, "state-0", resumer="worker", owner="alice", ttl_ms=_HOUR)


def _with_run(faces: Faces, key: str, then: Callable[[RunStateClaim], object]) -> object:
    claim = _claim_run(faces, key)
    faces.between()
    return claim and then(claim)


CLAIMS: Final[dict[str, Write]] = {
    "claim: refresh": lambda faces, key: _with_claim(faces, key, lambda claim: claim.refresh(2 * _HOUR)),
    "claim: done": lambda faces, key: _with_claim(faces, key, lambda claim: claim.done()),
    "claim: release": lambda faces, key: _with_claim(faces, key, lambda claim: claim.release()),
    "run claim: refresh": lambda faces, key: _with_run(faces, key, lambda claim: claim.refresh(2 * _HOUR)),
    "run claim: done": lambda faces, key: _with_run(faces, key, lambda claim: claim.done()),
    "run claim: release": lambda faces, key: _with_run(faces, key, lambda claim: claim.release()),
}
"""Each is two transactions: the claim, and what is done with it."""

LOGS: Final[dict[str, Write]] = {
    **CLAIMS,
    "items: append": _append,
    "items: put": _of_items("put", "third", {"put": True}),
    "items: pop": _of_items("pop"),
    "items: replace_suffix": _replace_suffix,
    "items: copy_to": _of_items("copy_to", "copy"),
    "items: clear": _of_items("clear"),
    "items: delete_lane": _of_items("delete_lane", "copy"),
    "items: clear_all": _of_items("clear_all"),
    "graph: create_session": lambda faces, key: _graph(faces).create_session(
        "here", session_id=f"{key}-graph"
    ),
    "graph: update_session": lambda faces, key: _graph(faces).update_session(f"{key}-graph", title="title"),
    "graph: delete_session": lambda faces, key: _graph(faces).delete_session(f"{key}-graph"),
    "graph: add_message": lambda faces, key: _graph(faces).add_message(f"{key}-graph", **_SAID),
    "graph: add_messages": lambda faces, key: _graph(faces).add_messages(f"{key}-graph", [_SAID] * 3),
    "graph: save_checkpoint": _save_checkpoint,
    "graph: fork": _fork,
    "snapshots: put": _put_snapshot,
    "snapshots: delete": lambda faces, key: _snapshots(faces).delete(f"{key}-thread"),
    "snapshots: delete_threads": lambda faces, key: _snapshots(faces).delete_threads([f"{key}-thread"]),
    "snapshots: claim": _claim,
    "run states: save": _save_run_state,
    "run states: claim": _claim_run,
    "run states: delete": lambda faces, key: _run_states(faces).delete(key, "state-0"),
    "langgraph saver: put": _put,
    "langgraph saver: put_writes": _put_writes,
    "langgraph saver: copy_thread": lambda faces, key: _saver(faces).copy_thread(
        f"{key}-langgraph", f"{key}-copy"
    ),
    "langgraph saver: prune": lambda faces, key: _saver(faces).prune([f"{key}-langgraph"]),
    "langgraph saver: delete_for_runs": _delete_for_runs,
    "langgraph saver: delete_thread": lambda faces, key: _saver(faces).delete_thread(f"{key}-copy"),
    "langgraph store: put and delete": _remember,
}


def begin_logs(faces: Faces, key: str) -> None:
    first = (_append, LOGS["graph: create_session"], _save_checkpoint, _put_snapshot, _put, _save_run_state)
    for write in first:
        write(faces, key)
