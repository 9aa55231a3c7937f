"""What is stored of a thread, and whether there is something to do in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final

from helix_store import Message, Post, Run, RunStatus, SessionNotFound, SessionState, SessionStatus, Store
from helix_store.core.payloads import decode
from helix_store.models import StreamChunk
from helix_store.sessions.runs import BUDGET_REASON, EFFECT_REASON
from helix_store.stores.conditions import conditions_of_ids

__all__ = ["Standing", "Thread", "load_thread", "newest_chunk", "open_calls", "standing_of"]

_LOOK_BACK: Final = 4
_ENDED: Final = (SessionStatus.COMPLETED, SessionStatus.FAILED)


class Standing(Enum):
    """Whether somebody drives a thread, whether somebody must, or whether it rests."""

    RUNNING = "running"
    DUE = "due"
    RESTING = "resting"

    @property
    def is_running(self) -> bool:
        return self is Standing.RUNNING

    @property
    def is_due(self) -> bool:
        return self is Standing.DUE


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """A thread as it is stored, read after the stream was looked at."""

    state: SessionState
    messages: Sequence[Message]
    posts: Sequence[Post]
    run: Run | None
    standing: Standing


def open_calls(state: SessionState) -> dict[str, dict[str, Any]]:
    """Return the calls of a thread that wait for an answer, by id."""
    return {
        call_id: call
        for call_id, call in state.pending_client_tool_calls.items()
        if isinstance(call, dict) and "submitted_at" not in call
    }


def standing_of(store: Store, session_id: str) -> Standing:
    """Return whether a thread is due. Raises `SessionNotFound`."""
    state = store.sessions.load_state(session_id)
    if state is None:
        raise SessionNotFound(session_id)
    posts = store.sessions.list_posts(session_id).items
    runs = store.sessions.list_runs(session_id, limit=1)
    return _standing(store, state, posts, runs[0] if runs else None)


def load_thread(
    store: Store, session_id: str, *, standing: Standing | None = None, has_posts: bool = True
) -> Thread:
    """Read a thread. Pass its ``standing`` if it is known, to save the statements that find it out.

    Raises `SessionNotFound`.
    """
    state = store.sessions.load_state(session_id)
    if state is None:
        raise SessionNotFound(session_id)
    posts = store.sessions.list_posts(session_id).items if has_posts else []
    run = None
    if standing is None:
        runs = store.sessions.list_runs(session_id, limit=1)
        run = runs[0] if runs else None
        standing = _standing(store, state, posts, run)
    # Last, so that the messages are never older than what the standing was decided on.
    messages = store.sessions.get_messages(session_id).messages
    return Thread(state=state, messages=messages, posts=posts, run=run, standing=standing)


def _standing(store: Store, state: SessionState, posts: Sequence[Post], run: Run | None) -> Standing:
    """Decide whether a thread is due: the one definition of `drive`, of the addresses, and of a wake-up.

    A thread is due if a post is due, if its calls are answered, if its last run is running and nobody holds
    its lock, or if what stopped its last run does not any more: a budget that was raised or has a new period,
    or an effect that was settled. As long as these would stop the next run too, the thread rests.
    """
    if state.status in _ENDED:
        return Standing.RESTING
    if store.locks.is_locked(state.session_id):
        return Standing.RUNNING
    if run is not None and run.status == RunStatus.RUNNING:
        return Standing.DUE
    if run is not None and run.status == RunStatus.INTERRUPTED:
        reason = run.completion_reason or ""
        if reason.startswith((BUDGET_REASON, EFFECT_REASON)):
            stuck = conditions_of_ids(store.alias, [(store.tenant, state.session_id)]).values()
            is_stopped = any(each.condition in ("over_budget", "effect_unknown") for each in stuck)
            return Standing.RESTING if is_stopped else Standing.DUE
    if open_calls(state):
        return Standing.RESTING
    if state.pending_client_tool_calls:
        return Standing.DUE
    now = datetime.now(UTC)
    has_due_post = any(_is_due(post, now) for post in posts)
    return Standing.DUE if has_due_post else Standing.RESTING


def _is_due(post: Post, now: datetime) -> bool:
    if post.not_before is None:
        return True
    at = post.not_before
    return (at if at.tzinfo else at.replace(tzinfo=UTC)) <= now


def newest_chunk(store: Store, session_id: str) -> tuple[int, dict[str, Any]]:
    """Return the newest sequence of a thread's stream, and the newest chunk of a worker: 0 and an empty dict
    if there is none.
    """
    found = StreamChunk.objects.using(store.alias).filter(
        stream__tenant=store.tenant, stream__stream_id=session_id
    )
    newest = list(found.order_by("-sequence").values_list("sequence", "payload")[:_LOOK_BACK])
    chunks = [decode(payload) for _, payload in newest]
    # The notes of others, such as a request to stop, have no token.
    return (newest[0][0] if newest else 0), next((chunk for chunk in chunks if "r" in chunk), {})
