"""Sessions: create, load, save, delete, status, listing, and refs to their sub-sessions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Any

from helix_store.core import validation
from helix_store.core.guards import guard
from helix_store.core.ids import new_id
from helix_store.core.payloads import encode
from helix_store.core.signatures import takes_session_filters
from helix_store.core.types import (
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
from helix_store.engine.async_twins import async_twin
from helix_store.exceptions import InvalidPayload
from helix_store.sessions.backend import StoreCalls
from helix_store.sessions.layout import encode_state
from helix_store.sessions.queries import after_cursor, checked_query, next_cursor
from helix_store.sessions.requests import EncodedRef, NewSession


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
            tags=validation.tags(tags if isinstance(tags, str) else list(tags)),
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
        encoded = encode_state(state, self.limits, session_id)
        return self._backend.sessions.save(session_id, encoded, guard(expected_version, fencing_token))

    def delete_session(self, session_id: str, *, keep_usage: bool = False) -> int:
        """Delete a session with all its data and local descendants; return the number of sessions deleted.

        Runs in one transaction that locks every session of the tree. Deletes usage entries unless
        ``keep_usage`` is set. Safe to repeat: returns 0 if the session is unknown.
        """
        validation.identifier(session_id, "session_id")
        return self._backend.sessions.delete(session_id, keep_usage=bool(keep_usage))

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


def _status_text(status: str) -> str:
    """Return the string for a ref's status, which is any identifier or the value of an enumeration member."""
    return validation.identifier(status.value if isinstance(status, StrEnum) else status, "status")
