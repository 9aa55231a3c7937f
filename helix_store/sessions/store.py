"""The public calls of a state store for sessions, messages, checkpoints and effects; all calls together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from helix_store.core import validation
from helix_store.core.approvals import ActingUser, Actor, is_user
from helix_store.core.contracts import takes_session_filters
from helix_store.core.dicts import AnyMessage
from helix_store.core.effects import Effect, EffectPage
from helix_store.core.ids import new_id
from helix_store.core.payloads import encode
from helix_store.core.posts import DuePost, Post, PostPage
from helix_store.core.types import (
    Checkpoint,
    CheckpointPage,
    Message,
    MessagePage,
    SessionMode,
    SessionPage,
    SessionState,
    SessionStatus,
    StatusChange,
    StatusConflict,
    SubSessionRef,
    Timestamp,
    UserId,
    as_value,
)
from helix_store.core.validation import guard
from helix_store.engine.async_twins import async_iterator_twin, async_twin
from helix_store.engine.expressions import read_cursor, write_cursor
from helix_store.exceptions import InvalidPayload, InvalidQuery, NotPermitted
from helix_store.sessions.calls import StepCalls, StoreCalls, WaitingCalls
from helix_store.sessions.checkpoints import BranchRequest
from helix_store.sessions.effects import MOST_EFFECTS, SETTLE_PERMISSION, Settlement, encoded_result
from helix_store.sessions.effects import checked_states as checked_effect_states
from helix_store.sessions.lists import after_cursor, checked_query, next_cursor
from helix_store.sessions.messages import (
    MOST_DUE_POSTS,
    checked_post,
    checked_states,
    decode_messages,
    without_thinking,
)
from helix_store.sessions.state import EncodedRef, NewSession, encode_messages, encode_state
from helix_store.sessions.tool_calls import checked_actor


class SessionCalls(StoreCalls):
    def create_session(
        self,
        session_id: str | None = None,
        *,
        agent_type: str,
        user_id: UserId | None = None,
        parent_session_id: str | None = None,
        tags: Iterable[str] = (),
        metadata: Mapping[str, str] | None = None,
        custom_state: dict[str, Any] | None = None,
        title: str | None = None,
        workspace_id: str | None = None,
        directory: str = "",
        stream_id: str | None = None,
        mode: SessionMode | str | None = None,
        expires_at: Timestamp | None = None,
    ) -> SessionState:
        """Create a session at version 1, with a new id unless one is given.

        Runs in one transaction and locks the parent's row, so that it cannot be deleted in the meantime.
        Raises `SessionExists` if the id exists, in which case nothing changes, and `SessionNotFound` if the
        parent is unknown. ``expires_at`` is epoch milliseconds. Without an id, a repeat creates a second one.
        """
        chosen_id = new_id() if session_id is None else validation.identifier(session_id, "session_id")
        state = SessionState(
            session_id=chosen_id,
            agent_type=agent_type,
            user_id=validation.user_id_text(user_id),
            parent_session_id=parent_session_id,
            tags=validation.tags(validation.items(tags, "tags")),
            metadata={} if metadata is None else validation.metadata(metadata),
            custom_state={} if custom_state is None else custom_state,
            title=title,
            workspace_id=workspace_id,
            directory=directory,
            stream_id=chosen_id if stream_id is None else stream_id,
            mode=None if mode is None else validation.enum(SessionMode, mode, "mode"),
            expires_at=_milliseconds(expires_at, "expires_at"),
        )
        return self._backend.sessions.create(
            NewSession(chosen_id, encode_state(state, self.limits, chosen_id))
        )

    def session_exists(self, session_id: str) -> bool:
        """Return whether the tenant has a session with this id. One query."""
        return self._backend.sessions.exists(validation.identifier(session_id, "session_id"))

    def load_state(self, session_id: str) -> SessionState | None:
        """Return the current state, detached from the store, or ``None`` if unknown. One query."""
        return self._backend.sessions.load(validation.identifier(session_id, "session_id"))

    def save_state(
        self,
        session_id: str,
        state: SessionState,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int:
        """Overwrite the whole state and return the new version.

        Runs in one transaction under the session's lock. Raises `StaleStateError` if ``expected_version`` is
        not the current one, and `ConflictError` if the mode is already set to another one; in both cases
        nothing is written. A repeat writes again.
        """
        validation.identifier(session_id, "session_id")
        if isinstance(state, SessionState) and state.session_id != session_id:
            self._require_session(session_id)
        encoded = encode_state(state, self.limits, session_id)
        return self._backend.sessions.save(session_id, encoded, guard(expected_version, fencing_token))

    def delete_session(self, session_id: str, *, keep_usage: bool = False) -> int:
        """Delete a session with all its data and local descendants; return the number of sessions deleted.

        Runs in one transaction that locks every session of the tree. Deletes usage entries unless
        ``keep_usage`` is set. Safe to repeat: returns 0 if the session is unknown.
        """
        validation.identifier(session_id, "session_id")
        return self._backend.sessions.delete(session_id, keep_usage=validation.flag(keep_usage, "keep_usage"))

    def update_status(
        self, session_id: str, status: SessionStatus | str, *, failure_reason: str | None = None
    ) -> int:
        """Set the status and the failure reason unconditionally; return the new version."""
        return self._backend.sessions.update_status(
            validation.identifier(session_id, "session_id"),
            validation.enum(SessionStatus, status, "status"),
            validation.failure_reason(failure_reason),
        )

    def compare_and_set_status(
        self,
        session_id: str,
        expected: Collection[SessionStatus | str],
        status: SessionStatus | str,
        *,
        failure_reason: str | None = None,
        fencing_token: int | None = None,
    ) -> StatusChange | StatusConflict:
        """Set the status if the current one is in ``expected``.

        Atomic. A `StatusConflict` holds the status and version that the call found. The truth value of both
        results is ``ok``.
        """
        return self._backend.sessions.compare_and_set_status(
            validation.identifier(session_id, "session_id"),
            validation.statuses(expected, "expected"),
            validation.enum(SessionStatus, status, "status"),
            validation.failure_reason(failure_reason),
            guard(fencing_token=fencing_token),
        )

    def increment_step_count(self, session_id: str) -> int:
        """Add one to the step count and return it. Atomic."""
        return self._backend.sessions.increment(validation.identifier(session_id, "session_id"), "step_count")

    def increment_resume_count(self, session_id: str) -> int:
        """Add one to the resume count and return it. Atomic."""
        return self._backend.sessions.increment(
            validation.identifier(session_id, "session_id"), "resume_count"
        )

    def merge_custom_state(
        self,
        session_id: str,
        changes: Mapping[str, Any],
        *,
        array_replacements: Iterable[str] = (),
        expected_version: int | None = None,
    ) -> list[str]:
        """Merge changes into the custom state, one top-level key at a time, and return warnings.

        A value replaces the stored one; an array is appended to the stored array unless its key is in
        ``array_replacements``. Runs in one transaction. If ``changes`` is empty, the version does not change.
        """
        validation.identifier(session_id, "session_id")
        if type(changes) is not dict:
            raise InvalidPayload(path="/changes", reason="expected a dict")
        encode(changes, limit=self.limits.max_state_bytes, path="/changes")
        return self._backend.sessions.merge_custom_state(
            session_id, changes, _keys(array_replacements), guard(expected_version)
        )

    @takes_session_filters
    def list_sessions(self, **filters: Any) -> SessionPage:
        """List a page of session heads without reading their payloads.

        Filters are combined with AND; ``parent_session_id=None`` selects roots only. ``created_from`` is
        inclusive, ``created_to`` exclusive. ``limit`` is 1 to 200; larger values mean 200. Ties are ordered
        by session id. To read the next page, pass ``next_cursor`` as ``cursor`` with the same filters. Raises
        `InvalidCursor` for any other cursor and `InvalidQuery` for an invalid filter, order or page.
        """
        query = after_cursor(checked_query(filters), filters["cursor"], tenant=self.tenant)
        heads, total, has_more = self._backend.sessions.select(query)
        return SessionPage(
            sessions=heads,
            total=total,
            offset=query.offset,
            limit=query.limit,
            has_more=has_more,
            next_cursor=next_cursor(query, heads[-1], tenant=self.tenant) if has_more else None,
        )

    def add_sub_session_refs(
        self, session_id: str, refs: Iterable[SubSessionRef | Mapping[str, Any]]
    ) -> None:
        """Record sub-agents, all or nothing, before they are started.

        Runs in one transaction. Safe to repeat: a recorded ref is left unchanged. Raises `ConflictError` if a
        ref is already recorded with another agent type, tool call or location.
        """
        validation.identifier(session_id, "session_id")
        encoded = [self._encoded_ref(as_value(SubSessionRef, ref)) for ref in validation.items(refs, "refs")]
        self._backend.runs.add_refs(session_id, encoded)

    def update_sub_session_ref(
        self,
        session_id: str,
        sub_session_id: str,
        *,
        status: str | None = None,
        output: Any = None,
        error: Any = None,
    ) -> SubSessionRef:
        """Change the given fields of a ref; agent type, tool call and location never change.

        Raises `NotFoundError` if the ref is unknown.
        """
        changes: dict[str, str] = {}
        if status is not None:
            changes["status"] = _status_text(status)
        for name, value in (("output", output), ("error", error)):
            if value is not None:
                changes[name] = self._encoded(name, value)
        return self._backend.runs.update_ref(
            validation.identifier(session_id, "session_id"),
            validation.identifier(sub_session_id, "sub_session_id"),
            changes,
        )

    def get_sub_session_refs(self, session_id: str) -> list[SubSessionRef]:
        """List a session's sub-agents in the order they were added. Raises `SessionNotFound`."""
        return self._backend.runs.select_refs(validation.identifier(session_id, "session_id"))

    def _encoded(self, name: str, value: Any) -> str:
        return encode(value, limit=self.limits.max_state_bytes, path=f"/{name}")

    def _encoded_ref(self, ref: SubSessionRef) -> EncodedRef:
        if ref.location not in ("local", "remote"):
            raise InvalidPayload(path="/location", reason="must be local or remote")
        if ref.remote is not None and type(ref.remote) is not dict:
            raise InvalidPayload(path="/remote", reason="expected a dict")
        return EncodedRef(
            sub_session_id=validation.identifier(ref.sub_session_id, "sub_session_id"),
            agent_type=validation.identifier(ref.agent_type, "agent_type"),
            parent_tool_call_id=validation.optional_identifier(
                ref.parent_tool_call_id, "parent_tool_call_id"
            ),
            status=_status_text(ref.status),
            location=ref.location,
            remote=None if ref.remote is None else self._encoded("remote", ref.remote),
            output=None if ref.output is None else self._encoded("output", ref.output),
            error=None if ref.error is None else self._encoded("error", ref.error),
        )

    acreate_session = async_twin(create_session)
    asession_exists = async_twin(session_exists)
    aload_state = async_twin(load_state)
    asave_state = async_twin(save_state)
    adelete_session = async_twin(delete_session)
    aupdate_status = async_twin(update_status)
    acompare_and_set_status = async_twin(compare_and_set_status)
    aincrement_step_count = async_twin(increment_step_count)
    aincrement_resume_count = async_twin(increment_resume_count)
    amerge_custom_state = async_twin(merge_custom_state)
    alist_sessions = async_twin(list_sessions)
    aadd_sub_session_refs = async_twin(add_sub_session_refs)
    aupdate_sub_session_ref = async_twin(update_sub_session_ref)
    aget_sub_session_refs = async_twin(get_sub_session_refs)


_milliseconds = validation.optional(validation.epoch_milliseconds)


def _keys(keys: Any) -> frozenset[str]:
    checked = validation.items(keys, "array_replacements")
    if any(type(key) is not str for key in checked):
        raise InvalidPayload(path="/array_replacements", reason="keys must be str")
    return frozenset(checked)


def _cursor_after(items: Sequence[Post | Effect], size: int, binding: list[Any]) -> str | None:
    """Return the cursor of the page after the first ``size`` items, or `None` if there are no more."""
    return write_cursor([items[size - 1].sequence], query=binding) if len(items) > size else None


def _status_text(status: str) -> str:
    """Return the string for a ref's status, which is any identifier or the value of an enumeration member."""
    return validation.identifier(status.value if isinstance(status, StrEnum) else status, "status")


class MessageCalls(StoreCalls):
    def append_messages(
        self,
        session_id: str,
        messages: Sequence[AnyMessage],
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int:
        """Append messages in order, all or nothing, and return the new message count.

        Runs in one transaction under the session's lock: parallel appends lose no message and do not
        interleave. Raises `StaleStateError` if ``expected_version`` is not current. A repeat appends again.
        """
        validation.identifier(session_id, "session_id")
        encoded = encode_messages(messages, self.limits)
        return self._backend.messages.append(session_id, encoded, guard(expected_version, fencing_token))

    def get_messages(
        self,
        session_id: str,
        *,
        offset: int = 0,
        limit: int | None = None,
        include_thinking: bool = True,
        order: str = "asc",
    ) -> MessagePage:
        """Return a page of the history; ``limit=None`` reads to the end.

        With ``order="desc"``, the newest message comes first and ``offset`` counts from the end. If thinking
        is not included, the returned messages omit the key ``thinking`` and content parts of type thinking or
        reasoning. Raises `SessionNotFound`, and `IntegrityFault` if stored messages of the page are missing.
        """
        validation.identifier(session_id, "session_id")
        if order not in ("asc", "desc"):
            raise InvalidQuery("order must be asc or desc.", path="order")
        validation.flag(include_thinking, "include_thinking")
        if limit is not None:
            validation.query_number(limit, "limit", minimum=1)
        texts, total = self._backend.messages.page(
            session_id, offset=validation.page_offset(offset), limit=limit, descending=order == "desc"
        )
        messages = decode_messages(texts)
        if not include_thinking:
            messages = [without_thinking(message) for message in messages]
        return MessagePage(messages=messages, total=total, has_more=offset + len(messages) < total)

    def iter_messages(self, session_id: str, *, chunk_size: int = 500) -> Iterator[Message]:
        """Iterate over all messages in order, in constant memory: one query per ``chunk_size`` messages.

        Messages appended during the iteration are included. Raises `SessionNotFound` immediately when called.
        """
        validation.identifier(session_id, "session_id")
        validation.query_number(chunk_size, "chunk_size", minimum=1)
        self._backend.messages.count(session_id)
        return self._iterate(session_id, chunk_size)

    def _iterate(self, session_id: str, chunk_size: int) -> Iterator[Message]:
        for texts in self._backend.messages.pages(session_id, chunk_size):
            yield from decode_messages(texts)

    def get_message_count(self, session_id: str) -> int:
        """Return the number of messages. Raises `SessionNotFound`."""
        return self._backend.messages.count(validation.identifier(session_id, "session_id"))

    def truncate_messages(self, session_id: str, keep: int, *, expected_version: int | None = None) -> int:
        """Keep the first ``keep`` messages, delete the others and return the version.

        Runs in one transaction that also deletes the checkpoints of deleted messages. The state does not
        change, and neither does the version if there is no message to delete.
        """
        validation.identifier(session_id, "session_id")
        validation.query_number(keep, "keep")
        return self._backend.messages.truncate(session_id, keep, guard(expected_version))

    def post_message(
        self,
        session_id: str,
        message: AnyMessage,
        *,
        key: str | None = None,
        author: UserId | ActingUser | None = None,
        not_before: Timestamp | None = None,
    ) -> Post:
        """Store a message that the next commit of a turn receives, and return the post.

        One transaction under the session's lock, which does not change the history, the state or the version.
        The post is due at ``not_before`` (an aware datetime or epoch milliseconds), or at once. The
        ``author`` is text that does not begin with ``user:``, or a Django user, stored as ``user:<pk>``. With
        a ``key``, a repeat returns the first post; a different message, author or time under the same key
        raises `IdempotencyConflict`. Raises `SessionEnded` for a session that has ended, and `LimitExceeded`
        if ``max_waiting_posts`` are already waiting.
        """
        validation.identifier(session_id, "session_id")
        limits = self.limits
        new = checked_post(message, key=key, author=author, not_before=not_before, limits=limits)
        return self._backend.posts.post(session_id, new, limits.max_waiting_posts)

    def list_posts(
        self,
        session_id: str,
        *,
        states: Collection[str] = ("waiting",),
        limit: int = 50,
        cursor: str | None = None,
    ) -> PostPage:
        """Return a page of the posts in these states, in the order in which they were posted.

        ``states`` contains any of ``waiting``, ``received`` and ``withdrawn``; ``limit`` is 1 to 200 (larger
        values mean 200). Raises `SessionNotFound`, `InvalidCursor` and `InvalidQuery`.
        """
        validation.identifier(session_id, "session_id")
        chosen, size = checked_states(states), validation.page_limit(limit)
        binding = ["posts", self.tenant, session_id, chosen]
        after = 0 if cursor is None else read_cursor(cursor, query=binding)[0]
        items = self._backend.posts.select(session_id, states=chosen, after=after, limit=size + 1)
        return PostPage(items=items[:size], next_cursor=_cursor_after(items, size, binding))

    def withdraw_post(self, session_id: str, post_id: str) -> bool:
        """Withdraw a waiting post, and return whether it was waiting.

        One transaction under the session's lock: if a withdrawal and a reception compete, one of them wins.
        """
        validation.identifier(session_id, "session_id")
        return self._backend.posts.withdraw(session_id, validation.identifier(post_id, "post_id"))

    def receive_posts(
        self,
        session_id: str,
        *,
        limit: int | None = None,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> list[Message]:
        """Move due posts into the history, and return their messages in order of due time and sequence.

        Runs in one transaction and writes one version; if no posts are due, nothing is written. Open tool
        calls do not prevent this. Raises `StaleStateError`, and `SessionEnded` for a session that has ended.
        """
        validation.identifier(session_id, "session_id")
        if limit is not None:
            validation.query_number(limit, "limit", minimum=1)
        fence = guard(expected_version, fencing_token)
        return decode_messages(self._backend.posts.receive(session_id, limit, fence))

    def find_due_posts(self, *, limit: int = 200) -> list[DuePost]:
        """Return the sessions with due posts that a turn could receive now, the longest due first.

        Sessions that have ended, that are waiting for an answer, or that are locked are left out. The
        database's clock decides. ``limit`` is 1 to 1,000 (larger values mean 1,000).
        """
        return self._backend.posts.due(validation.page_limit(limit, maximum=MOST_DUE_POSTS))

    aappend_messages = async_twin(append_messages)
    aget_messages = async_twin(get_messages)
    aiter_messages = async_iterator_twin(iter_messages)
    aget_message_count = async_twin(get_message_count)
    atruncate_messages = async_twin(truncate_messages)
    apost_message = async_twin(post_message)
    alist_posts = async_twin(list_posts)
    awithdraw_post = async_twin(withdraw_post)
    areceive_posts = async_twin(receive_posts)
    afind_due_posts = async_twin(find_due_posts)


class CheckpointCalls(StoreCalls):
    def get_checkpoint(self, session_id: str, checkpoint_id: str) -> Checkpoint | None:
        """Return this session's checkpoint with its state, or ``None`` for any other id. One query."""
        validation.identifier(session_id, "session_id")
        return self._backend.checkpoints.get(session_id, validation.checkpoint_id(checkpoint_id))

    def get_latest_checkpoint(self, session_id: str) -> Checkpoint | None:
        """Return the newest checkpoint, or ``None`` if there is none or the session is unknown. One query."""
        return self._backend.checkpoints.latest(validation.identifier(session_id, "session_id"))

    def list_checkpoints(
        self, session_id: str, *, limit: int = 20, cursor: str | None = None
    ) -> CheckpointPage:
        """List the heads of checkpoints, newest first, without reading their states.

        Pages stay stable while new checkpoints are written. ``limit`` is 1 to 200; larger values mean 200.
        Raises `SessionNotFound`, `InvalidCursor` and `InvalidQuery`.
        """
        validation.identifier(session_id, "session_id")
        binding = ["checkpoints", self.tenant, session_id]
        before = None if cursor is None else read_cursor(cursor, query=binding)[0]
        items, total, following = self._backend.checkpoints.select(
            session_id, limit=validation.page_limit(limit), before_version=before
        )
        next_cursor = None if following is None else write_cursor([following], query=binding)
        return CheckpointPage(items=items, next_cursor=next_cursor, total=total)

    def restore_checkpoint(
        self,
        session_id: str,
        checkpoint_id: str,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int:
        """Restore state and messages from a checkpoint and return the new version, one higher than before.

        Runs in one transaction. Deletes later checkpoints, later messages and all staged changes, and keeps
        the write-once mode. Raises `CheckpointNotFound` and `StaleStateError`.
        """
        validation.identifier(session_id, "session_id")
        return self._backend.checkpoints.restore(
            session_id, validation.checkpoint_id(checkpoint_id), guard(expected_version, fencing_token)
        )

    def branch_session(
        self,
        session_id: str,
        checkpoint_id: str | None = None,
        *,
        new_session_id: str | None = None,
        message_index: int | None = None,
        title: str | None = None,
    ) -> SessionState:
        """Start a new session from a checkpoint of this one, and return its state.

        The source is the given checkpoint, or the first ``message_index`` messages and the newest checkpoint
        within them, or the latest checkpoint; if there is no checkpoint, it is the current state. Messages
        are copied with their original times. The new session is active and the root of a new tree; workspace
        refs, pending calls, suspension and expiry are not copied. Runs in one transaction. Raises
        `CheckpointNotFound` and `SessionExists`. Raises `InvalidQuery` if both a checkpoint and an index are
        passed, or if the index is beyond the last message.
        """
        validation.identifier(session_id, "session_id")
        if checkpoint_id is not None and message_index is not None:
            raise InvalidQuery(
                "Branch from a checkpoint or from a message index, not both.", path="message_index"
            )
        if message_index is not None:
            validation.query_number(message_index, "message_index")
        chosen_id = (
            new_id() if new_session_id is None else validation.identifier(new_session_id, "new_session_id")
        )
        return self._backend.checkpoints.branch(
            BranchRequest(
                session_id=session_id,
                new_session_id=chosen_id,
                checkpoint_id=None if checkpoint_id is None else validation.checkpoint_id(checkpoint_id),
                message_index=message_index,
                title=validation.title(title),
            )
        )

    def delete_checkpoint(self, session_id: str, checkpoint_id: str) -> bool:
        """Delete one checkpoint without touching the current state. Safe to repeat."""
        validation.identifier(session_id, "session_id")
        return self._backend.checkpoints.delete(session_id, validation.checkpoint_id(checkpoint_id))

    def prune_checkpoints(self, session_id: str, *, keep: int) -> int:
        """Delete all but the newest ``keep`` checkpoints and return how many were deleted. Safe to repeat."""
        validation.identifier(session_id, "session_id")
        return self._backend.checkpoints.prune(session_id, validation.query_number(keep, "keep"))

    aget_checkpoint = async_twin(get_checkpoint)
    aget_latest_checkpoint = async_twin(get_latest_checkpoint)
    alist_checkpoints = async_twin(list_checkpoints)
    arestore_checkpoint = async_twin(restore_checkpoint)
    abranch_session = async_twin(branch_session)
    adelete_checkpoint = async_twin(delete_checkpoint)
    aprune_checkpoints = async_twin(prune_checkpoints)


class EffectCalls(StoreCalls):
    """The public calls of a state store for effects. `Turn.effect` and `SessionHandle.effect` make them."""

    def settle_effect(
        self, session_id: str, effect_id: str, *, done: bool, result: Any = None, actor: Actor | None = None
    ) -> bool:
        """Decide an effect that is unknown, and return whether this call decided it.

        If it is ``done``, the worker that enters it next gets the ``result``; otherwise it may attempt the
        effect again. Returns false for an effect that is decided already. The ``actor`` is text or a Django
        user, who needs the permission ``helix_store.settle_effect``. Sends `session_answered` if nothing else
        keeps the session from going on. Raises `NotFoundError`, `NotPermitted`, and `ConflictError` while the
        worker of the effect holds the session's lock.
        """
        validation.identifier(session_id, "session_id")
        validation.identifier(effect_id, "effect_id")
        if type(done) is not bool:
            raise InvalidPayload(path="done", reason="expected True or False")
        if result is not None and not done:
            raise InvalidPayload(path="result", reason="an effect that was not done has no result")
        checked = checked_actor(actor)
        if is_user(actor):
            # First: a visitor who is not signed in has no permission, rather than a wrong type.
            if not (actor.is_active and actor.has_perm(SETTLE_PERMISSION)):
                raise NotPermitted(effect_id, "permission", SETTLE_PERMISSION)
            if checked.id is None:
                raise InvalidPayload(path="actor", reason="the user is not stored")
        text = encoded_result(result, self.limits.max_message_bytes) if done else None
        settlement = Settlement(effect_id=effect_id, is_done=done, result=text, actor=checked.id)
        return self._backend.effects.settle(session_id, settlement)

    def list_effects(
        self,
        session_id: str,
        *,
        states: Collection[str] | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> EffectPage:
        """Return a page of the session's effects in the order in which they began.

        ``states`` contains any of ``started``, ``done``, ``not_done`` and ``unknown``, by default all of
        them. ``limit`` is 1 to 200 (larger values mean 200). Raises `SessionNotFound`, `InvalidCursor` and
        `InvalidQuery`.
        """
        validation.identifier(session_id, "session_id")
        chosen, size = checked_effect_states(states), validation.page_limit(limit)
        binding = ["effects", self.tenant, session_id, chosen]
        after = 0 if cursor is None else read_cursor(cursor, query=binding)[0]
        items = self._backend.effects.select(session_id, states=chosen, after=after, limit=size + 1)
        return EffectPage(items=items[:size], next_cursor=_cursor_after(items, size, binding))

    def find_unknown_effects(self, *, limit: int = 200) -> list[Effect]:
        """Return the unknown effects of all sessions of the tenant, the oldest first.

        ``limit`` is 1 to 1,000 (larger values mean 1,000).
        """
        return self._backend.effects.unknown(validation.page_limit(limit, maximum=MOST_EFFECTS))

    asettle_effect = async_twin(settle_effect)
    alist_effects = async_twin(list_effects)
    afind_unknown_effects = async_twin(find_unknown_effects)


class StateStoreBase(SessionCalls, MessageCalls, StepCalls, CheckpointCalls, WaitingCalls, EffectCalls):
    """The state store of the contract; subclasses pass the back end."""
