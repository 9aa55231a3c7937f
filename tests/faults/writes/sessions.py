"""The writes of the state store to a session with something of everything in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, get_args

from helix_store.core.contracts import StateStore
from helix_store.core.posts import PostState
from helix_store.exceptions import NotFoundError
from helix_store.testing.state_store.calls import WRITES
from helix_store.testing.state_store.samples import (
    commit_step,
    contents,
    full_session,
    loaded,
    message,
    messages,
    step,
)
from tests.faults.writes.faces import Faces, Write

__all__ = ["SESSIONS", "begin_session", "contents_of_session"]

_PARTS: Final = ("", "-branch")


def _next_step(store: StateStore, session_id: str) -> object:
    number = loaded(store, session_id).step_count % 3 + 1
    return commit_step(store, session_id, number, append=messages(2), custom_state={"n": [number] * 50})


def _guarded_step(store: StateStore, session_id: str) -> object:
    state = loaded(store, session_id)
    state.custom_state["guarded"] = state.version
    return store.save_state_and_promote_staging(
        session_id, state, messages(1), step(1), expected_version=state.version
    )


def _step_with_an_operation_id(store: StateStore, session_id: str) -> object:
    state = loaded(store, session_id)
    return store.save_state_and_promote_staging(
        session_id, state, messages(1), step(2), operation_id=f"operation-{state.version}"
    )


def _step_that_completes(store: StateStore, session_id: str) -> object:
    return commit_step(store, session_id, 3, append=messages(6), status="completed", output={"done": True})


def _guarded_save(store: StateStore, session_id: str) -> object:
    state = loaded(store, session_id)
    state.custom_state = {"saved": state.version}
    return store.save_state(session_id, state, expected_version=state.version)


def _checkpoint_of(store: StateStore, session_id: str) -> str:
    heads = store.list_checkpoints(session_id).items
    return heads[len(heads) // 2].checkpoint_id if heads else "none"


def _withdraw_post(store: Any, session_id: str) -> object:
    waiting = store.list_posts(session_id).items
    return store.withdraw_post(session_id, waiting[len(waiting) // 2].post_id if waiting else "none")


_KINDS: Final[dict[str, Callable[[Any, str], object]]] = {
    **{call.method: call.invoke for call in WRITES if call.method != "branch_session"},
    "create_session": lambda store, key: store.create_session(f"{key}-branch", agent_type="agent"),
    "branch_session": lambda store, key: store.branch_session(key, new_session_id=f"{key}-branch"),
    "delete_session": lambda store, key: store.delete_session(f"{key}-branch"),
    "restore_checkpoint": lambda store, key: store.restore_checkpoint(key, _checkpoint_of(store, key)),
    "delete_checkpoint": lambda store, key: store.delete_checkpoint(key, _checkpoint_of(store, key)),
    "prune_checkpoints": lambda store, key: store.prune_checkpoints(key, keep=2),
    "truncate_messages": lambda store, key: store.truncate_messages(key, 3),
    "append_messages": lambda store, key: store.append_messages(key, messages(7)),
    "post_message": lambda store, key: store.post_message(key, message("posted"), author="ada"),
    "withdraw_post": _withdraw_post,
    "receive_posts": lambda store, key: store.receive_posts(key, limit=2),
    "a step": _next_step,
    "a guarded step": _guarded_step,
    "a step with an operation id": _step_with_an_operation_id,
    "a step that completes": _step_that_completes,
    "a guarded save": _guarded_save,
}


def _through(write: Callable[[StateStore, str], object]) -> Write:
    return lambda faces, key: write(faces.store, key)


SESSIONS: Final = {kind: _through(write) for kind, write in _KINDS.items()}


def begin_session(faces: Faces, key: str) -> None:
    full_session(faces.store, key)


def contents_of_session(faces: Faces, key: str) -> dict[str, Any]:
    """What is stored of a session and its branch."""
    parts = [(part, _contents(faces.store, key + part)) for part in _PARTS]
    return {f"{name}{part}": seen for part, contents in parts for name, seen in contents.items()}


def _contents(store: Any, session_id: str) -> dict[str, str]:
    try:
        posts = store.list_posts(session_id, states=get_args(PostState), limit=200).items
        return {**contents(store, session_id), "posts": repr(posts)}
    except NotFoundError:
        return {}
