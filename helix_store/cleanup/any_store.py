"""Cleanup of any state store through its public methods."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from datetime import datetime

from helix_store.catalogue.rows import Sweep
from helix_store.cleanup.outcomes import CleanupOutcome, ExpiryCandidate, SessionKey
from helix_store.core import moments
from helix_store.core.contracts import StateStore
from helix_store.core.limits import UNLIMITED
from helix_store.core.payloads import encode
from helix_store.core.types import (
    NON_TERMINAL_STATUSES,
    SESSION_EXPIRED,
    PendingToolCall,
    SessionHead,
    SessionState,
    SessionStatus,
)
from helix_store.core.validation import datetime_to_milliseconds, milliseconds_to_datetime
from helix_store.exceptions import StaleStateError
from helix_store.sessions.tool_calls import due_calls


class StateStoreCleanup:
    """`DatabaseCleanup` for a store without row locks, which checks the expected version instead."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        # No method of the contract returns the tenant, but every store of this project has the attribute.
        self._tenant: str = getattr(store, "tenant", "")

    def now(self) -> datetime:
        return moments.now()

    def expired(self, now: datetime, size: int) -> Iterator[list[SessionKey]]:
        return self._pages(NON_TERMINAL_STATUSES, size, lambda head: _has_expired(head, now))

    def overdue(self, now: datetime, size: int) -> Iterator[list[SessionKey]]:
        return self._pages(NON_TERMINAL_STATUSES, size, lambda head: True)

    def deletable(self, before: datetime, size: int) -> Iterator[list[SessionKey]]:
        def is_deletable(head: SessionHead) -> bool:
            return head.failure_reason == SESSION_EXPIRED and _has_expired(head, before)

        return self._pages([SessionStatus.FAILED], size, is_deletable)

    def non_terminal(self, keys: list[SessionKey]) -> list[SessionKey]:
        return keys

    def mark_in_bulk(self, keys: list[SessionKey], now: datetime) -> list[SessionKey]:
        return keys

    def sweeps(self) -> Iterator[Sweep]:
        return iter(())

    def inspect(self, key: SessionKey) -> ExpiryCandidate | None:
        state = self._store.load_state(key.session_id)
        if state is None:
            return None
        expires_at = None if state.expires_at is None else milliseconds_to_datetime(state.expires_at)
        return ExpiryCandidate(key, state.version, state.status.is_terminal, expires_at, state.workspace_refs)

    def mark(
        self, candidate: ExpiryCandidate, delete_snapshots: Callable[[], None], *, wait: bool
    ) -> CleanupOutcome:
        session_id, version = candidate.key.session_id, candidate.version
        state = self._store.load_state(session_id)
        if state is None or state.version != version:
            return CleanupOutcome.BUSY
        delete_snapshots()
        state.status, state.failure_reason = SessionStatus.FAILED, SESSION_EXPIRED
        try:
            self._store.save_state(session_id, state, expected_version=version)
        except StaleStateError:
            return CleanupOutcome.BUSY
        return CleanupOutcome.MARKED

    def overdue_calls(self, key: SessionKey, now: datetime) -> tuple[StateStore, list[PendingToolCall]]:
        state = self._store.load_state(key.session_id)
        pending = {} if state is None else state.pending_client_tool_calls
        text = encode(pending, limit=UNLIMITED)
        return self._store, due_calls(key.session_id, text, datetime_to_milliseconds(now))

    def delete(self, key: SessionKey, before: datetime) -> int:
        state = self._store.load_state(key.session_id)
        if state is None or state.failure_reason != SESSION_EXPIRED or not _has_expired(state, before):
            return 0
        root = state.root_session_id or key.session_id
        live = self._store.list_sessions(root_session_id=root, status=NON_TERMINAL_STATUSES, limit=1)
        return 0 if live.sessions else self._store.delete_session(key.session_id, keep_usage=True)

    def _pages(
        self, statuses: Collection[SessionStatus], size: int, is_wanted: Callable[[SessionHead], bool]
    ) -> Iterator[list[SessionKey]]:
        cursor = None
        while True:
            page = self._store.list_sessions(
                status=statuses,
                order_by="created_at",
                direction="asc",
                limit=size,
                cursor=cursor,
                count=False,
            )
            yield [SessionKey(head.session_id, self._tenant) for head in page.sessions if is_wanted(head)]
            cursor = page.next_cursor
            if cursor is None:
                return


def _has_expired(session: SessionHead | SessionState, now: datetime) -> bool:
    return session.expires_at is not None and session.expires_at <= datetime_to_milliseconds(now)
