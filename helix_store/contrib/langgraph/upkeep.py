"""Copying and deleting checkpoints.

The caller's runs may continue; checkpoints that they store in the meantime are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from django.db.models import F
from langgraph.checkpoint.serde.base import SerializerProtocol

from helix_store.adapters import LockedSession, SessionAdapter
from helix_store.contrib.langgraph import sql
from helix_store.contrib.langgraph.deltas import ancestors_needed
from helix_store.contrib.langgraph.encoding import Body, Place, about_thread, read_body
from helix_store.contrib.langgraph.models import LangGraphCheckpoint
from helix_store.contrib.langgraph.serializer import read_from
from helix_store.core import validation
from helix_store.engine.expressions import list_parameter
from helix_store.exceptions import IntegrityFault, InvalidPayload, SessionNotFound

_STRATEGIES: Final = ("keep_latest", "delete")
_AT_ONCE: Final = 500


def copy_thread(adapter: SessionAdapter, source: tuple[str, str], target: tuple[str, str]) -> None:
    (_, source_id), (target_thread, target_id) = source, target
    names = {"tenant": adapter.tenant, "session_id": source_id}

    def copy(session: LockedSession) -> None:
        thread_id = None if target_thread == target_id else target_thread
        parameters = {**names, "target": session.key, "thread_id": thread_id}
        for statement in (sql.COPY,) if session.db.is_postgresql else sql.COPY_PARTS:
            session.db.execute(statement, parameters)

    # An empty copy must not create a session.
    checkpoints = LangGraphCheckpoint._base_manager.using(adapter.db.alias)
    of_source = checkpoints.filter(session__tenant=adapter.tenant, session__session_id=source_id)
    about = of_source.values(user_id=F("session__user_id"), title=F("session__title"))[:1]
    if source_id == target_id or not (found := adapter.read(lambda db: list(about))):
        return

    def ensure_and_copy() -> None:
        # The user is copied so that an erasure of the user also finds the copy.
        adapter.ensure(target_id, **about_thread(found[0]))
        adapter.write(target_id, copy)

    adapter.db.transaction(ensure_and_copy)


def delete_for_runs(adapter: SessionAdapter, run_ids: Sequence[str]) -> None:
    runs = [
        validation.text(str(run_id), "run_ids", limit=1_000)
        for run_id in validation.items(run_ids, "run_ids")
    ]
    if not runs:
        return
    alias = adapter.db.alias
    of_runs = LangGraphCheckpoint._base_manager.using(alias).filter(
        session__tenant=adapter.tenant, run_id__in=runs
    )
    of_threads = of_runs.values_list("session__session_id", flat=True)
    threads = adapter.read(lambda db: sorted(set(of_threads)))

    def delete(session: LockedSession) -> None:
        _delete(session, list(of_runs.filter(session_id=session.key).values_list("pk", flat=True)))

    for session_id in threads:
        _in_thread(adapter, session_id, delete)


def prune(
    adapter: SessionAdapter,
    serde: SerializerProtocol,
    thread_ids: Sequence[str],
    strategy: str,
    delete_thread: Callable[[str], None],
) -> None:
    if strategy not in _STRATEGIES:
        raise InvalidPayload(path="strategy", reason=f"expected one of {', '.join(_STRATEGIES)}")
    faults = []
    for thread_id in validation.items(thread_ids, "thread_ids"):
        if strategy == "delete":
            delete_thread(thread_id)
            continue
        names = Place.ids_of_thread(thread_id)
        try:
            _in_thread(adapter, names[1], partial(_keep_latest, serde, names))
        except IntegrityFault as exc:
            faults.append(exc)
    # This is raised only at the end, because an unreadable thread must not prevent the pruning of later ones.
    for fault in faults:
        raise fault


def _in_thread(adapter: SessionAdapter, session_id: str, call: Callable[[LockedSession], None]) -> None:
    try:
        adapter.write(session_id, call, create=False)
    except SessionNotFound:
        return


def _keep_latest(serde: SerializerProtocol, names: tuple[str, str], session: LockedSession) -> None:
    checkpoints = LangGraphCheckpoint._base_manager.using(session.alias).filter(session_id=session.key)
    keys: dict[str, dict[str, int]] = {}
    with_deltas: set[int] = set()
    for key, namespace, checkpoint_id, has_deltas in checkpoints.values_list(
        "pk", "namespace", "checkpoint_id", "has_deltas"
    ).iterator():
        keys.setdefault(namespace, {})[checkpoint_id] = key
        if has_deltas:
            with_deltas.add(key)
    heads = {namespace: max(known) for namespace, known in keys.items()}
    kept = set()
    for namespace, head in heads.items():
        key = keys[namespace][head]
        is_of_call = ":" in namespace
        if not is_of_call and key not in with_deltas:
            kept.add(key)
            continue
        kind, content = checkpoints.values_list("type", "body").get(pk=key)
        body = read_from(names[0], head, partial(read_body, serde, kind, bytes(content)))
        if is_of_call and _is_past(body, keys.get("", {}), heads.get("")):
            continue
        place = Place(*names, namespace, head)
        needed = ancestors_needed(session.db, serde, place, body.delta_channels)
        kept |= {key, *(keys[namespace][each] for each in needed)}
    _delete(session, [key for known in keys.values() for key in known.values() if key not in kept])


def _is_past(body: Body, roots: Iterable[str], newest: str | None) -> bool:
    """Return whether a subgraph was called from a checkpoint of the graph that is now being deleted."""
    parents: Any = body.metadata.get("parents") or {}
    # A call may be stored before the checkpoint from which it was made.
    return parents.get("") in roots and parents.get("") != newest


def _delete(session: LockedSession, keys: Sequence[int]) -> None:
    """Delete checkpoints with their writes, and the values that no other checkpoint refers to."""
    if not keys:
        return
    owner = {"session": session.key}
    for start in range(0, len(keys), _AT_ONCE):
        chosen = {"keys": list_parameter(session.db, keys[start : start + _AT_ONCE])}
        session.db.execute(sql.DELETE_WRITES, {**owner, **chosen})
        session.db.execute(sql.DELETE_CHECKPOINTS, chosen)
    session.db.execute(sql.UNLINK_PARENTS, owner)
    session.db.execute(sql.DELETE_FREE_VALUES, owner)
