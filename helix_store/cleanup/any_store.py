"""What a cleanup needs of a store: expired sessions, overdue calls, and how to settle them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from django.utils import timezone

from helix_store.cleanup.candidates import (
    SeenSession,
    SessionKey,
    Settlement,
)
from helix_store.core.contracts import StateStore
from helix_store.core.payloads import encode
from helix_store.core.types import (
    NON_TERMINAL_STATUSES,
    SESSION_EXPIRED,
    PendingToolCall,
    SessionHead,
    SessionStatus,
)
from helix_store.core.validation import datetime_to_milliseconds, milliseconds_to_datetime
from helix_store.exceptions import StaleStateError
from helix_store.sessions.tool_calls import due_calls

__all__ = ["Expiry", "Page", "StateStoreExpiry"]

_UNLIMITED = 2**62


class Page(NamedTuple):
    """Some sessions, and the position to go on from: ``None`` at the end."""

    keys: list[SessionKey]
    position: Any


class Expiry(Protocol):
    """Pages begin at the position ``None`` and keep to an order that cleaning does not change."""

    def now(self) -> datetime: ...

    def expired(self, now: datetime, after: Any, limit: int) -> Page:
        """Sessions that have not ended and are past their expiry."""
        ...

    def overdue(self, now: datetime, after: Any, limit: int) -> Page:
        """Sessions that have not ended, with calls past their deadline."""
        ...

    def deletable(self, before: datetime, after: Any, limit: int) -> Page:
        """Sessions that a cleanup has marked and that expired before that moment."""
        ...

    def still_open(self, keys: list[SessionKey]) -> list[SessionKey]:
        """Those of the sessions that have not ended, in one look; a store without one returns them all."""
        ...

    def mark(self, keys: list[SessionKey], now: datetime) -> list[SessionKey]:
        """Mark at once what can be, and return the rest, to be settled one by one."""
        ...

    def see(self, key: SessionKey) -> SeenSession | None: ...

    def settle(self, seen: SeenSession, release: Callable[[], None], *, wait: bool) -> Settlement:
        """Call ``release`` and mark the session: `MARKED`, or `BUSY` if it was changed since it was seen.

        Who does not ``wait`` passes over a session that somebody else is busy with. What ``release`` raises
        leaves the session as it is.
        """
        ...

    def due(self, key: SessionKey, now: datetime) -> tuple[StateStore, list[PendingToolCall]]:
        """The calls of a session past their deadline, and a store that can answer them."""
        ...

    def delete(self, key: SessionKey, before: datetime) -> int:
        """Delete a session with its tree and return how many sessions went; usage stays.

        Nothing goes while a session of the tree has not ended.
        """
        ...


class StateStoreExpiry:
    """Any state store, by its public methods: a version that is still the one seen stands in for a lock."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def now(self) -> datetime:
        return timezone.now()

    def expired(self, now: datetime, after: Any, limit: int) -> Page:
        heads, position = self._heads(NON_TERMINAL_STATUSES, after, limit)
        return Page(_keys(head for head in heads if _has_expired(head, now)), position)

    def overdue(self, now: datetime, after: Any, limit: int) -> Page:
        heads, position = self._heads(NON_TERMINAL_STATUSES, after, limit)
        return Page(_keys(heads), position)

    def deletable(self, before: datetime, after: Any, limit: int) -> Page:
        heads, position = self._heads([SessionStatus.FAILED], after, limit)
        marked = (head for head in heads if head.failure_reason == SESSION_EXPIRED)
        return Page(_keys(head for head in marked if _has_expired(head, before)), position)

    def still_open(self, keys: list[SessionKey]) -> list[SessionKey]:
        return keys

    def mark(self, keys: list[SessionKey], now: datetime) -> list[SessionKey]:
        return keys

    def see(self, key: SessionKey) -> SeenSession | None:
        state = self._store.load_state(key.session_id)
        if state is None:
            return None
        expires_at = None if state.expires_at is None else milliseconds_to_datetime(state.expires_at)
        return SeenSession(key, state.version, state.status.is_terminal, expires_at, state.workspace_refs)

    def settle(self, seen: SeenSession, release: Callable[[], None], *, wait: bool) -> Settlement:
        state = self._store.load_state(seen.key.session_id)
        if state is None or state.version != seen.version:
            return Settlement.BUSY
        release()
        state.status, state.failure_reason = SessionStatus.FAILED, SESSION_EXPIRED
        try:
            self._store.save_state(seen.key.session_id, state, expected_version=seen.version)
        except StaleStateError:
            return Settlement.BUSY
        return Settlement.MARKED

    def due(self, key: SessionKey, now: datetime) -> tuple[StateStore, list[PendingToolCall]]:
        state = self._store.load_state(key.session_id)
        pending = {} if state is None else state.pending_client_tool_calls
        text = encode(pending, limit=_UNLIMITED)
        return self._store, due_calls(key.session_id, text, datetime_to_milliseconds(now))

    def delete(self, key: SessionKey, before: datetime) -> int:
        state = self._store.load_state(key.session_id)
        if state is None or state.failure_reason != SESSION_EXPIRED or not _has_expired(state, before):
            return 0
        live = self._store.list_sessions(
            root_session_id=state.root_session_id or key.session_id, status=NON_TERMINAL_STATUSES, limit=1
        )
        return 0 if live.sessions else self._store.delete_session(key.session_id, keep_usage=True)

    def _heads(self, statuses: Any, cursor: Any, limit: int) -> tuple[list[SessionHead], Any]:
        page = self._store.list_sessions(
            status=statuses, order_by="created_at", direction="asc", limit=limit, cursor=cursor, count=False
        )
        return page.sessions, page.next_cursor


def _keys(heads: Any) -> list[SessionKey]:
    return [SessionKey(head.session_id) for head in heads]


def _has_expired(session: Any, now: datetime) -> bool:
    return session.expires_at is not None and session.expires_at <= datetime_to_milliseconds(now)
