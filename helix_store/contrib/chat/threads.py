"""A thread as it is stored: whether there is something to do in it, and what a client's request changes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from functools import partial
from http import HTTPStatus
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from django.db import transaction
from django.db.models import Exists, OuterRef

from helix_store import (
    UNSET,
    IdempotencyConflict,
    InvalidPayload,
    Message,
    NotPermitted,
    Post,
    Run,
    RunStatus,
    SessionEnded,
    SessionExists,
    SessionNotFound,
    SessionState,
    SessionStatus,
    Store,
    StreamNotFound,
)
from helix_store.contrib.chat.aisdk import groups_of
from helix_store.contrib.chat.requests import Answered, NewMessage, Refusal, refuse
from helix_store.contrib.chat.stored import (
    OWN,
    entries,
    id_at,
    id_of_post,
    is_of_user,
    may_be_given,
    own_id,
    own_of,
)
from helix_store.core.payloads import decode
from helix_store.core.types import TERMINAL_STATUSES, CheckpointHead
from helix_store.core.validation import milliseconds_to_datetime
from helix_store.engine.database import Database
from helix_store.items import ItemLog
from helix_store.models import Message as StoredMessage
from helix_store.models import Post as StoredPost
from helix_store.models import StreamChunk
from helix_store.sessions.calls import open_claims
from helix_store.sessions.messages import has_open_calls, posts_of
from helix_store.sessions.runs import BUDGET_REASON, EFFECT_REASON
from helix_store.sessions.state import loaded_of
from helix_store.sessions.tool_calls import CallActor, ToolCalls, current_call
from helix_store.stores.conditions import conditions_of_ids

__all__ = [
    "THREAD",
    "Activity",
    "Look",
    "Thread",
    "activity_of",
    "ask_again",
    "client_of",
    "give_answers",
    "has_ended",
    "is_due",
    "is_known",
    "load_thread",
    "look_at",
    "messages_of_thread",
    "newest_chunk",
    "newest_client",
    "open_calls",
    "post_message",
    "rewind_and_post",
    "stop_thread",
    "unanswered_calls",
    "withdraw",
]

THREAD: Final = "thread"
"""The key of a session's metadata with the id of the thread."""
_PATIENCE_MS: Final = 5_000
_SECONDS_BETWEEN_TRIES: Final = 0.05
_PAGE: Final = 200
_LOOK_BACK: Final = 4
_LOOK_BACK_FOR_USER: Final = 20
_BROKEN_OFF: Final = (RunStatus.FAILED, RunStatus.INTERRUPTED)
_LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)


class Activity(Enum):
    """Whether somebody drives a thread, whether somebody must, or whether it is idle."""

    RUNNING = "running"
    DUE = "due"
    IDLE = "idle"

    @property
    def is_running(self) -> bool:
        return self is Activity.RUNNING

    @property
    def is_due(self) -> bool:
        return self is Activity.DUE


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """A thread as it is stored, read after the stream was looked at. All its messages and posts have ids."""

    state: SessionState
    messages: Sequence[Message]
    posts: Sequence[Post]
    run: Run | None
    activity: Activity
    open_calls: Mapping[str, dict[str, Any]]
    """The calls that somebody still has to answer, by id: see `open_calls`."""


def has_ended(state: SessionState) -> bool:
    """Return whether a session takes no messages, answers and edits any more."""
    return state.status in TERMINAL_STATUSES


def _require_not_ended(store: Store, session_id: str) -> None:
    state = store.sessions.load_state(session_id)
    if state is not None and has_ended(state):
        raise SessionEnded(session_id, state.status)


def unanswered_calls(store: Store, state: SessionState) -> dict[str, dict[str, Any]]:
    """Return the calls of a thread that nobody has answered, by id. The next turn waits for them.

    An agent can write an answer to an approval into its own state. It has no effect: a person can still give
    one. This takes one statement if an answer may be the agent's own, otherwise none.
    """
    claims = open_claims(store.sessions, state)
    forged = {key: current_call(call) for key, call in claims.items()}
    return ToolCalls(state.pending_client_tool_calls, {}).unanswered | forged


def open_calls(store: Store, state: SessionState) -> dict[str, dict[str, Any]]:
    """Return the `unanswered_calls` of a thread; none if its session has ended."""
    return {} if has_ended(state) else unanswered_calls(store, state)


Arrival: TypeAlias = tuple[str, str]
"""What a turn is for: ``post``, ``answer`` or ``again``, and the id of the post, the call or the run."""


class Look(NamedTuple):
    """Whether a thread is due, and what has arrived for its next turn."""

    activity: Activity
    arrived: frozenset[Arrival]


def look_at(store: Store, session_id: str) -> Look:
    """Return whether a thread is due, and what has arrived in it. Raises `SessionNotFound`."""
    state = store.sessions.load_state(session_id)
    if state is None:
        raise SessionNotFound(session_id)
    posts = _posts_of(store, state)
    run = _newest_run(store, session_id)
    unanswered = unanswered_calls(store, state)
    arrived = _arrived(store, state, posts, run, unanswered)
    return Look(_activity(store, state, run, arrived, unanswered), arrived)


def activity_of(store: Store, session_id: str) -> Activity:
    """Return whether a thread is due. Raises `SessionNotFound`."""
    return look_at(store, session_id).activity


def _posts_of(store: Store, state: SessionState) -> list[Post]:
    """Return the posts that wait. No statement if there were none when the state was read."""
    return _waiting_posts(store, state.session_id) if loaded_of(state).has_waiting_posts else []


def _waiting_posts(store: Store, session_id: str) -> list[Post]:
    """Return the posts that wait: none if there is no such thread, which the callers find out themselves."""
    db = Database(store.alias, store.tenant)
    posts: list[Post] = []
    while True:
        after = posts[-1].sequence if posts else 0
        page = db.query(partial(posts_of, db, session_id, states=("waiting",), after=after, limit=_PAGE))
        posts += map(_with_id, page)
        if len(page) < _PAGE:
            return posts


def _with_id(post: Post) -> Post:
    if post.message is None or own_id(post.message) is not None:
        return post
    return replace(post, message={**post.message, "id": id_of_post(post.post_id)})


def messages_of_thread(store: Store, session_id: str, last: int | None = None) -> list[Message]:
    """Return the history, or its ``last`` messages, with the ids that clients see.

    A message without an id of its own keeps the one that it had as a post, or is named by its index.
    """
    page = store.sessions.get_messages(session_id, limit=last, order="asc" if last is None else "desc")
    messages = page.messages if last is None else page.messages[::-1]
    first = page.total - len(messages)
    nameless = [first + number for number, message in enumerate(messages) if own_id(message) is None]
    if not nameless:
        return messages
    posts = _posts_at(store, session_id, nameless[0])
    given = {index: id_of_post(posts[index]) if index in posts else id_at(index) for index in nameless}
    return [
        {**message, "id": given[index]} if index in given else message
        for index, message in enumerate(messages, first)
    ]


def _posts_at(store: Store, session_id: str, first: int) -> dict[int, str]:
    """Return the ids of the posts that were received as messages from this index on, by their index.

    After a rewind, another message may have the index of a post, but not the time of its reception.
    """
    message = StoredMessage.objects.filter(
        session=OuterRef("session"), sequence=OuterRef("position") + 1, created_at=OuterRef("received_at")
    )
    found = StoredPost.objects.using(store.alias).filter(
        Exists(message), session__tenant=store.tenant, session__session_id=session_id, position__gte=first
    )
    rows = found.values_list("position", "post_id")
    return dict(Database(store.alias, store.tenant).query(partial(list, rows)))


def load_thread(store: Store, session_id: str, *, activity: Activity | None = None) -> Thread:
    """Read a thread. Pass its ``activity`` if it is known, to save the statements that find it out.

    Raises `SessionNotFound`.
    """
    state = store.sessions.load_state(session_id)
    if state is None:
        raise SessionNotFound(session_id)
    posts = _posts_of(store, state)
    run, unanswered = None, unanswered_calls(store, state)
    if activity is None:
        run = _newest_run(store, session_id)
        arrived = _arrived(store, state, posts, run, unanswered)
        activity = _activity(store, state, run, arrived, unanswered)
    # Last, so that the messages are never older than what the activity was derived from.
    messages = messages_of_thread(store, session_id)
    return Thread(
        state=state,
        messages=messages,
        posts=posts,
        run=run,
        activity=activity,
        open_calls={} if has_ended(state) else unanswered,
    )


def _newest_run(store: Store, session_id: str) -> Run | None:
    runs = store.sessions.list_runs(session_id, limit=1)
    return runs[0] if runs else None


def _activity(
    store: Store,
    state: SessionState,
    run: Run | None,
    arrived: Collection[Arrival],
    unanswered: Collection[str],
) -> Activity:
    """Decide whether a thread is due: the one definition of `drive`, of the addresses, and of a wake-up.

    A thread is due if a post is due, if its calls are answered, if its last run is running and nobody holds
    its lock, or if what stopped its last run does not any more: a budget that was raised or has a new period,
    or an effect that was settled. As long as these would stop the next run too, the thread is idle. It is
    also idle if its last run has failed or was stopped, until something arrives that this run did not have,
    or somebody asks for another turn.
    """
    if has_ended(state) or (state.status == SessionStatus.PAUSED and state.suspension_kind is None):
        # A thread that somebody has paused waits for nothing that a client can give.
        return Activity.IDLE
    if store.locks.is_locked(state.session_id):
        return Activity.RUNNING
    if run is not None and run.status == RunStatus.RUNNING:
        return Activity.DUE
    if run is not None and run.status == RunStatus.INTERRUPTED:
        reason = run.completion_reason or ""
        if reason.startswith((BUDGET_REASON, EFFECT_REASON)):
            stuck = conditions_of_ids(store.alias, [(store.tenant, state.session_id)]).values()
            is_stopped = any(each.condition in ("over_budget", "effect_unknown") for each in stuck)
            return Activity.IDLE if is_stopped else Activity.DUE
    if unanswered:
        return Activity.IDLE
    return Activity.DUE if arrived else Activity.IDLE


def _arrived(
    store: Store,
    state: SessionState,
    posts: Sequence[Post],
    run: Run | None,
    unanswered: Collection[str],
) -> frozenset[Arrival]:
    """Return the due posts, the answers that wait to be taken, and the request for another turn."""
    now = datetime.now(UTC)
    due: Sequence[Post] = [post for post in posts if is_due(post, now)]
    answered = {id: call for id, call in state.pending_client_tool_calls.items() if id not in unanswered}
    again: list[Arrival] = []
    if run is not None and run.status in _BROKEN_OFF:
        # It had what had arrived before it. A turn with the same would end in the same way, again and again.
        due = [post for post in due if _due_at(post) >= run.started_at] or _receivable(store, state, due)
        if state.suspension_kind is None:
            answered = {id: call for id, call in answered.items() if _answered_at(call) >= run.started_at}
        if _is_asked_again(store, run):
            again = [("again", run.run_id)]
    return frozenset(
        [*(("post", post.post_id) for post in due), *(("answer", call_id) for call_id in answered), *again]
    )


def _receivable(store: Store, state: SessionState, posts: Sequence[Post]) -> Sequence[Post]:
    """Return the posts if a turn receives them as it begins: unless tool calls have no results."""
    if not posts:
        return posts
    page = store.sessions.get_messages(state.session_id, limit=_PAGE, order="desc")
    return [] if has_open_calls(page.messages) else posts


def _answered_at(call: Any) -> datetime:
    """Return the end of the millisecond in which a call was answered; long ago if the state has no such time.

    An agent can write anything there.
    """
    at = call.get("submitted_at") if isinstance(call, dict) else None
    try:
        return milliseconds_to_datetime(at + 1) if isinstance(at, int) else _LONG_AGO
    except OverflowError:
        return _LONG_AGO


def ask_again(store: Store, session_id: str) -> None:
    """Make a thread due whose last run has failed or was stopped: somebody asks for another turn of it.

    The request is for that run, so that the next one, whatever comes of it, has fulfilled it. It is stored,
    because the runner of a chat may be a queue, which only knows which thread to drive. Safe to repeat.
    """
    run = _newest_run(store, session_id)
    if run is not None and run.status in _BROKEN_OFF:
        _own_items(store, session_id).put(_AGAIN, {"run": run.run_id})


def _is_asked_again(store: Store, run: Run) -> bool:
    request = _own_items(store, run.session_id).get(_AGAIN)
    return request is not None and request.payload["run"] == run.run_id


def is_due(post: Post, now: datetime) -> bool:
    """Return whether a waiting post is due, as far as this process' clock knows."""
    return post.not_before is None or _due_at(post) <= now


def _due_at(post: Post) -> datetime:
    at = post.not_before
    if at is None:
        return post.posted_at
    return max(at if at.tzinfo else at.replace(tzinfo=UTC), post.posted_at)


def newest_chunk(store: Store, session_id: str) -> tuple[int, dict[str, Any]]:
    """Return the newest sequence of a thread's stream, and the newest chunk of a worker: 0 and an empty dict
    if there is none.
    """
    found = StreamChunk.objects.using(store.alias).filter(
        stream__tenant=store.tenant, stream__stream_id=session_id
    )
    rows = found.order_by("-sequence").values_list("sequence", "payload")[:_LOOK_BACK]
    newest: list[tuple[int, str]] = Database(store.alias, store.tenant).query(partial(list, rows))
    chunks = [decode(payload) for _, payload in newest]
    # The notes of others, such as a request to stop, have no token.
    return (newest[0][0] if newest else 0), next((chunk for chunk in chunks if "r" in chunk), {})


# --- Messages, answers, and the request to stop ----------------------------------------------------------


class _Chat(Protocol):
    """A chat, as far as the beginning of a thread is concerned."""

    @property
    def agent_type(self) -> str: ...

    def title_of(self, message: dict[str, Any]) -> str | None: ...


def post_message(
    chat: _Chat,
    store: Store,
    session_id: str,
    thread_id: str,
    message: NewMessage,
    *,
    owner: str,
    actor: Any,
    client: Mapping[str, Any],
    begin: bool = True,
) -> tuple[Post | None, SessionState | None]:
    """Post a user's message, whatever the agent is doing. Safe to repeat.

    The first message begins the thread: then this also returns the state of the new session. Without
    ``begin``, an unknown thread is refused with `SessionNotFound`. There is no post to return of a message
    that the history got without an id of its own, and that the client sends again.
    """
    own: dict[str, Any] = {"client": dict(client)} if client else {}
    if message.metadata is not None:
        own["metadata"] = message.metadata
    stored: Message = {"role": "user", "content": message.content, "id": message.id}
    if own:
        stored[OWN] = own
    session = store.session(session_id)
    try:
        if may_be_given(message.id):
            # No post has this key if the message was stored without an id.
            post, first = _found(store, session_id, message.id)
            if first is not None:
                _require_same(first, message)
                return post, None
        return session.post(stored, key=message.id, author=actor), None
    except IdempotencyConflict:
        # A repeat says the same, but the client may have another state or context by now.
        _, first = _found(store, session_id, message.id)
        if first is None:
            raise
        _require_same(first, message)
        key = own_of(first).get("answer", message.id)
        return session.post(first, key=key, author=actor), None
    except SessionNotFound:
        if not begin:
            raise
        state = None
        with suppress(SessionExists):
            state = store.sessions.create_session(
                session_id,
                agent_type=chat.agent_type,
                user_id=owner,
                title=chat.title_of(stored),
                tags=["chat"],
                metadata={THREAD: thread_id},
                stream_id=session_id,
            )
        return session.post(stored, key=message.id, author=actor), state


def _found(store: Store, session_id: str, message_id: str) -> tuple[Post | None, Message | None]:
    """Return the message of a thread with this id, and its post if it waits."""
    post = _waiting_post(store, session_id, message_id)
    if post is not None:
        return post, post.message
    # Read after the posts: a message that is received in between is found.
    messages = messages_of_thread(store, session_id)
    return None, next((message for message in reversed(messages) if message["id"] == message_id), None)


def _require_same(stored: Message, message: NewMessage) -> None:
    if stored.get("content") != message.content:
        raise IdempotencyConflict(message.id)


def give_answers(
    store: Store,
    state: SessionState,
    answers: Sequence[Answered],
    *,
    calls: Mapping[str, dict[str, Any]],
    actor: Any,
    client: Mapping[str, Any] | None = None,
    messages: Sequence[Message] = (),
) -> dict[str, bool]:
    """Store the answers to calls. Return the ids of those that are new, and whether each call is answered
    now: some need several approvals. Answers that are stored are left alone.

    ``calls`` are the `open_calls` of the state. ``client`` is what the client sent with the answers, for
    `newest_client`, which needs the ``messages`` of the thread. Raises `SessionEnded` if a call is open in a
    session that has ended.
    """
    new: dict[str, bool] = {}
    if has_ended(state):
        calls = unanswered_calls(store, state)
    for answer in answers:
        call = calls.get(answer.call_id)
        if call is None:
            if answer.approved is not None and not _is_known(state, answer.call_id):
                refuse(answer.id_path, "the thread has no such call")
            continue
        approval_id = call.get("approval_id")
        if (approval_id is None) != (answer.approved is None):
            continue
        if has_ended(state):
            raise SessionEnded(state.session_id, state.status)
        if CallActor(state.user_id).has_requested(call):
            # The owner of a thread answers in it, whatever the name of the actor is.
            raise NotPermitted(answer.call_id, "requester")
        if client and not new:
            # Before the answer, because the next turn may begin as soon as that is stored.
            _keep_client(store, state.session_id, client, messages)
        outcome = _give(store, state.session_id, answer, approval_id, actor=actor)
        if outcome in ("accepted", "recorded"):
            new[answer.call_id] = outcome == "accepted"
    return new


def newest_client(store: Store, session_id: str) -> dict[str, Any]:
    """Return what the client sent with the newest message of a user, or with an answer to a call after it."""
    message = _newest_of_user(store, session_id)
    client = client_of(message)
    kept = _own_items(store, session_id).get(_CLIENT)
    if kept is not None and kept.payload["after"] == _answer_of(message):
        client = dict(kept.payload["client"])
    return client


def client_of(message: Message) -> dict[str, Any]:
    """Return what the client sent with a user's message."""
    return dict(own_of(message).get("client", {}))


def _keep_client(
    store: Store, session_id: str, client: Mapping[str, Any], messages: Sequence[Message]
) -> None:
    after = _answer_of(_last_of_user(messages) or {})
    _own_items(store, session_id).put(_CLIENT, {"after": after, "client": dict(client)})


def _own_items(store: Store, session_id: str) -> ItemLog:
    """Return the lane of the chat itself: a request for another turn, and the client of the last answer.

    Unlike a message, an answer has no place for what the client sent, and several answers of a request share
    it.
    """
    return store.items(session_id, "chat")


_CLIENT: Final = "client"
_AGAIN: Final = "again"


def _newest_of_user(store: Store, session_id: str) -> Message:
    """Return the newest message of a user that the thread has received; empty if there is none."""
    last = _LOOK_BACK_FOR_USER
    while True:
        messages = messages_of_thread(store, session_id, last)
        message = _last_of_user(messages)
        if message is not None or len(messages) < last:
            return message or {}
        last *= 10


def _last_of_user(messages: Sequence[Message]) -> Message | None:
    return next((message for message in reversed(messages) if is_of_user(message)), None)


def _answer_of(message: Message) -> str | None:
    """Return what distinguishes a user's message from the same one that is posted anew."""
    return own_of(message).get("answer") or message.get("id")


def _is_known(state: SessionState, call_id: str) -> bool:
    return call_id in state.completed_client_tool_calls or call_id in state.pending_client_tool_calls


def _give(store: Store, session_id: str, answer: Answered, approval_id: str | None, *, actor: Any) -> str:
    if approval_id is not None and answer.needs_digest and answer.digest is None:
        refuse(f"{answer.path}/digest", "an answer to an approval needs the digest that was shown")
    given: dict[str, Any] = {"actor": actor}
    if approval_id is not None:
        given |= {"approved": answer.approved, "approval_id": approval_id}
        if answer.digest is not None:
            given["digest"] = answer.digest
        if answer.reason is not None:
            given["reason"] = answer.reason
        given["input"] = answer.input if answer.approved and answer.input is not ... else UNSET
    elif answer.error is not None:
        given["error"] = answer.error
    else:
        given["result"] = answer.result
    try:
        outcome = store.sessions.submit_tool_result(session_id, answer.call_id, **given).outcome
    except InvalidPayload as exc:
        refuse(f"{answer.path}{exc.path}", exc.reason)
    if outcome == "changed":
        message = "The call has changed since it was shown; load the thread and decide again."
        raise Refusal(HTTPStatus.CONFLICT, "changed", message, path=answer.path)
    if outcome == "unknown_tool_call":
        _require_not_ended(store, session_id)
        raise Refusal(
            HTTPStatus.NOT_FOUND, "call_not_found", "The thread has no such call.", path=answer.id_path
        )
    return str(outcome)


def withdraw(store: Store, session_id: str, message_id: str) -> bool:
    """Withdraw the waiting message with this id, and return whether it was waiting."""
    for post in _waiting_posts(store, session_id):
        if message_id in ((post.message or {}).get("id"), post.post_id):
            return store.sessions.withdraw_post(session_id, post.post_id)
    return False


def stop_thread(store: Store, session_id: str) -> bool:
    """Ask the run of a thread to stop, and return whether there is one.

    A message may have been posted whose turn has not begun: this waits for its run.
    """
    until = time.monotonic() + _PATIENCE_MS / 1000
    while True:
        activity = activity_of(store, session_id)
        if activity is Activity.RUNNING and _interrupt(store, session_id, "stopped"):
            return True
        if activity is Activity.IDLE or time.monotonic() > until:
            return False
        time.sleep(_SECONDS_BETWEEN_TRIES)


def _interrupt(store: Store, session_id: str, reason: str) -> bool:
    run = store.sessions.get_current_run(session_id)
    if run is None:
        return False
    store.sessions.request_interrupt(session_id, run_id=run.run_id, reason=reason)
    # The writer of the stream sees that somebody else has written, and looks for the request. A writer that
    # has not begun yet looks for it with its first chunk.
    with suppress(StreamNotFound):
        store.streams.write_sync(session_id, [{"type": "stop"}])
    return True


# --- Edits -------------------------------------------------------------------------------------------


def rewind_and_post(
    store: Store,
    session_id: str,
    *,
    before: str | None,
    edited: NewMessage | None = None,
    actor: Any,
    client: Mapping[str, Any],
) -> str:
    """Rewind a thread to before a user's message, post it anew, and return its id. Safe to repeat.

    Without ``edited``, the message stays as it was: the answer to it is made anew. ``before`` is then the id
    of the message or of the answer, or ``None`` for the last one. With ``edited``, it is the id of the
    message. A message that waits is withdrawn. A run is interrupted, because what it says would be taken
    back, unless it makes this answer already. Raises `SessionEnded`.
    """
    content = None if edited is None else edited.content
    post = None if edited is None else _waiting_post(store, session_id, before)
    if post is not None and post.message is not None:
        if post.message.get("content") == content:
            return str(before)
        new = _made_anew(post.message, edited, client, seed=[before, post.sequence])
        with transaction.atomic(using=store.alias):
            if store.sessions.withdraw_post(session_id, post.post_id):
                store.session(session_id).post(new, key=new[OWN]["answer"], author=actor)
                return str(before)

    def found(*, is_locked: bool) -> tuple[Sequence[Message], int | None]:
        messages = messages_of_thread(store, session_id)
        return messages, _index_of(store, session_id, messages, before, content, is_locked=is_locked)

    def joined() -> str:
        return str(before) if edited is not None else _message_to_join(store, session_id, messages, before)

    messages, index = found(is_locked=False)
    if index is None:
        return joined()
    answer = _answer_of(messages[index])
    # Looked at again: another request may have been faster since, and its turn has the lock.
    if activity_of(store, session_id) is Activity.RUNNING:
        if edited is None and index == _users_in(messages)[-1]:
            # The thread was idle, so another request has had this answer made anew.
            return joined()
        _interrupt(store, session_id, "rewound")
    with store.locks.wait_acquire(session_id, timeout_ms=_PATIENCE_MS) as lock:
        # Another request may have rewound the thread before this one had the lock.
        messages, index = found(is_locked=True)
        if index is None or (edited is None and _answer_of(messages[index]) != answer):
            return joined()
        _require_not_ended(store, session_id)
        new = _made_anew(messages[index], edited, client, seed=[before, index])
        with transaction.atomic(using=store.alias):
            _rewind(store, session_id, messages, index, token=lock.fencing_token)
            with suppress(StreamNotFound):
                # A client that comes back after an older chunk gets all that is stored.
                store.streams.write_sync(session_id, [{"type": "rewound"}])
            store.session(session_id).post(new, key=new[OWN]["answer"], author=actor)
    return str(new["id"])


def _made_anew(
    message: Message, edited: NewMessage | None, client: Mapping[str, Any], *, seed: Sequence[Any]
) -> dict[str, Any]:
    """Return a user's message with another id of its answer, and with what an edit has changed."""
    own = dict(own_of(message))
    content = None if edited is None else edited.content
    text = json.dumps([message["id"], own.get("answer"), content, *seed], sort_keys=True)
    own["answer"] = f"answer-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:24]}"
    new = {**message, OWN: own}
    if edited is not None:
        new["content"] = edited.content
        own["metadata"] = edited.metadata
    if client:
        own["client"] = dict(client)
    return new


def _index_of(
    store: Store,
    session_id: str,
    messages: Sequence[Message],
    before: str | None,
    content: Any,
    *,
    is_locked: bool,
) -> int | None:
    """Return the index of the user's message to post anew, or ``None`` if that has happened already.

    If this request has the lock of the thread (``is_locked``), nobody else drives it.
    """
    users = _users_in(messages)
    named = [index for index in users if messages[index]["id"] == before]
    if content is not None:
        if not named:
            if _waiting_post(store, session_id, before) is not None:
                return None
            raise Refusal(
                HTTPStatus.NOT_FOUND,
                "message_not_found",
                "The thread has no such message of a user.",
                path="/messageId",
            )
        return None if messages[named[-1]].get("content") == content else named[-1]
    if named and named[-1] != users[-1]:
        return named[-1]
    if named or before is None:
        # A repeat finds that the last message is being answered.
        look = look_at(store, session_id)
        is_at_work = bool(look.arrived) if is_locked else look.activity is not Activity.IDLE
        return None if is_at_work or not users else users[-1]
    for group in groups_of(entries(messages)):
        if group.id == before and group.after:
            # The agent can have said the message before the answer itself: then it says it again.
            ids = [message["id"] for message in messages]
            return max((index for index in users if group.after in ids[index:]), default=None)
    return None


def _users_in(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if is_of_user(message)]


def is_known(store: Store, session_id: str, message_id: str) -> bool:
    """Return whether a thread has a message with this id, received or waiting."""
    if not store.sessions.session_exists(session_id):
        return False
    return _found(store, session_id, message_id)[1] is not None


def _waiting_post(store: Store, session_id: str, message_id: str | None) -> Post | None:
    posts = _waiting_posts(store, session_id)
    return next((post for post in posts if (post.message or {}).get("id") == message_id), None)


def _message_to_join(store: Store, session_id: str, messages: Sequence[Message], before: str | None) -> str:
    """Return the id of the user's message whose answer a repeat follows: by default, the newest one."""
    posts = [post.message for post in _waiting_posts(store, session_id) if post.message is not None]
    users = [str(message["id"]) for message in (*messages, *posts) if is_of_user(message)]
    if not users:
        refuse("/messageId", "the thread has no message of a user")
    return before if before in users else users[-1]


def _rewind(store: Store, session_id: str, messages: Sequence[Message], keep: int, *, token: int) -> None:
    found = _checkpoint_before(store, session_id, keep)
    if found is not None:
        store.sessions.restore_checkpoint(session_id, found.checkpoint_id, fencing_token=token)
        between = list(messages[found.message_count : keep])
        if between:
            store.sessions.append_messages(session_id, between, fencing_token=token)
        return
    store.sessions.truncate_messages(session_id, keep)
    store.session(session_id, fencing_token=token).update(_forget_answers)


def _checkpoint_before(store: Store, session_id: str, keep: int) -> CheckpointHead | None:
    """Return the newest checkpoint of a step before which there were no more messages than these."""
    cursor = None
    while True:
        page = store.sessions.list_checkpoints(session_id, limit=_PAGE, cursor=cursor)
        found = next((each for each in page.items if each.message_count <= keep), None)
        cursor = page.next_cursor
        if found is not None or cursor is None:
            return found


def _forget_answers(state: SessionState) -> None:
    """Make a thread as it was before its first step."""
    state.custom_state = {}
    state.status = SessionStatus.ACTIVE
    state.pending_client_tool_calls = {}
    state.completed_client_tool_calls = {}
    state.suspension_kind = state.suspension_context = state.suspended_step_id = None
