"""Every kind of write to a session, as steps of a story that a seed tells.

A store in memory tells the same story: what a database has after a kill is what memory has after as many
writes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any, Final

from helix_store.core.contracts import StateStore
from helix_store.exceptions import HelixStoreError, NotFoundError
from helix_store.testing.state_store.calls import WRITES
from helix_store.testing.state_store.samples import (
    commit_step,
    contents,
    full_session,
    loaded,
    messages,
    step,
)

__all__ = ["KINDS", "everything", "story", "write"]

_TIME: Final = re.compile(r"datetime\.datetime\((?:[^()]|\([^()]*\))*\)")
_MILLISECONDS: Final = re.compile(r"\b[12]\d{12}\b")
_CHECKPOINT: Final = re.compile(r"-t\d{13}-[0-9a-f]{6}")
_PARTS: Final = ("", "-branch")

Write = Callable[[StateStore, str], object]


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


# In this order for ever: a seed chooses by position.
KINDS: Final[dict[str, Write]] = {
    **{call.method: call.invoke for call in WRITES if call.method != "branch_session"},
    "create_session": lambda store, key: store.create_session(f"{key}-branch", agent_type="agent"),
    "branch_session": lambda store, key: store.branch_session(key, new_session_id=f"{key}-branch"),
    "delete_session": lambda store, key: store.delete_session(f"{key}-branch"),
    "restore_checkpoint": lambda store, key: store.restore_checkpoint(key, _checkpoint_of(store, key)),
    "delete_checkpoint": lambda store, key: store.delete_checkpoint(key, _checkpoint_of(store, key)),
    "prune_checkpoints": lambda store, key: store.prune_checkpoints(key, keep=2),
    "truncate_messages": lambda store, key: store.truncate_messages(key, 3),
    "append_messages": lambda store, key: store.append_messages(key, messages(7)),
    "a step": _next_step,
    "a guarded step": _guarded_step,
    "a step with an operation id": _step_with_an_operation_id,
    "a step that completes": _step_that_completes,
    "a guarded save": _guarded_save,
}


def story(seed: int, length: int) -> list[str]:
    """The kinds of the writes that follow a session with something of everything in it."""
    chance = random.Random(seed)  # noqa: S311  the same story for the same seed
    return [chance.choice(list(KINDS)) for _ in range(length)]


def begin(store: StateStore, session_id: str) -> None:
    full_session(store, session_id)


def write(store: StateStore, session_id: str, kind: str) -> None:
    """Make a write. A refusal is a result: the store in memory refuses the same."""
    try:
        KINDS[kind](store, session_id)
    except HelixStoreError as exc:
        if exc.retryable or exc.applied == "unknown":
            raise


def everything(store: StateStore, session_id: str) -> dict[str, Any]:
    """What is stored of a session and its branch, without times and random ids."""
    return {part: _contents(store, session_id + part) for part in _PARTS}


def _contents(store: StateStore, session_id: str) -> dict[str, str] | None:
    try:
        seen = contents(store, session_id)
    except NotFoundError:
        return None
    return {name: _masked(text) for name, text in seen.items()}


def _masked(text: str) -> str:
    text = _CHECKPOINT.sub("-t0-000000", _TIME.sub("T", text))
    return _MILLISECONDS.sub("0", text)
