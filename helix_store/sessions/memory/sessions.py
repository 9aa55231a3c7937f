"""Sessions and their messages in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from helix_store.core.guards import Guard
from helix_store.core.merging import merge_changes
from helix_store.core.payloads import decode
from helix_store.core.types import (
    SessionHead,
    SessionState,
    SessionStatus,
    StatusChange,
    StatusConflict,
    Unset,
)
from helix_store.exceptions import SessionExists
from helix_store.sessions.layout import EncodedState, encode_custom_state
from helix_store.sessions.memory.records import SessionRecord
from helix_store.sessions.memory.scope import MemoryOperations
from helix_store.sessions.requests import Counter, NewSession, SessionQuery


def select_records(
    records: Iterable[SessionRecord], query: SessionQuery
) -> tuple[list[SessionRecord], int, bool]:
    """Return the page, the number of sessions that match the filters, and whether more sessions follow."""

    def position(record: SessionRecord) -> tuple[datetime, str]:
        return record.columns[query.order_by], record.session_id

    found = [record for record in records if _matches(record.columns, query)]
    total = len(found)
    found.sort(key=position, reverse=query.descending)
    if query.after is not None:
        seen = query.after
        found = [
            record
            for record in found
            if (position(record) < seen if query.descending else position(record) > seen)
        ]
    end = query.offset + query.limit
    return found[query.offset : end], total, end < len(found)


def _matches(columns: Mapping[str, Any], query: SessionQuery) -> bool:
    for name in ("agent_type", "user_id", "root_session_id", "workspace_id"):
        wanted = getattr(query, name)
        if wanted is not None and columns[name] != wanted:
            return False
    if (
        not isinstance(query.parent_session_id, Unset)
        and columns["parent_session_id"] != query.parent_session_id
    ):
        return False
    if query.statuses is not None and columns["status"] not in query.statuses:
        return False
    if query.created_from is not None and columns["created_at"] < query.created_from:
        return False
    if query.created_to is not None and columns["created_at"] >= query.created_to:
        return False
    return set(query.tags) <= set(columns["tags"]) and query.metadata.items() <= columns["metadata"].items()


def with_descendants(sessions: Mapping[str, SessionRecord], session_id: str) -> list[str]:
    """Return the session and its descendants, by parent id and by local sub-session refs, each once.

    Parents precede their descendants; the list is empty if the session is unknown.
    """
    if session_id not in sessions:
        return []
    children: dict[str, list[str]] = defaultdict(list)
    for record in sessions.values():
        parent_id = record.columns["parent_session_id"]
        if parent_id is not None:
            children[parent_id].append(record.session_id)
        children[record.session_id].extend(
            ref.sub_session_id
            for ref in record.refs.values()
            if ref.location == "local" and ref.sub_session_id in sessions
        )
    found = {session_id: None}
    pending = [session_id]
    while pending:
        for child_id in children[pending.pop()]:
            if child_id not in found:
                found[child_id] = None
                pending.append(child_id)
    return list(found)


class MemorySessions(MemoryOperations):
    def create(self, new: NewSession) -> SessionState:
        with self._scope.lock:
            record = SessionRecord.new(new.session_id, new.encoded)
            record.columns["root_session_id"] = self._root_of(record)
            if self.exists(new.session_id):
                raise SessionExists(new.session_id)
            self._scope.sessions[new.session_id] = record
        return record.state()

    def _root_of(self, record: SessionRecord) -> str:
        parent_id = record.columns["parent_session_id"]
        if parent_id is None:
            return record.session_id
        return str(self._scope.require(parent_id).columns["root_session_id"] or parent_id)

    def exists(self, session_id: str) -> bool:
        return self._scope.find(session_id) is not None

    def load(self, session_id: str) -> SessionState | None:
        record = self._scope.find(session_id)
        return None if record is None else record.state()

    def save(self, session_id: str, encoded: EncodedState, guard: Guard) -> int:
        with self._scope.writing(session_id, guard) as draft:
            return draft.write_state(encoded)

    def delete(self, session_id: str, *, keep_usage: bool) -> int:
        with self._scope.lock:
            doomed = with_descendants(self._scope.sessions, session_id)
            for doomed_id in doomed:
                self._scope.forget(doomed_id, keep_usage=keep_usage)
        return len(doomed)

    def update_status(self, session_id: str, status: SessionStatus, failure_reason: str | None) -> int:
        with self._scope.writing(session_id) as draft:
            return draft.write(status=status.value, failure_reason=failure_reason)

    def compare_and_set_status(
        self,
        session_id: str,
        expected: frozenset[SessionStatus],
        status: SessionStatus,
        failure_reason: str | None,
        guard: Guard,
    ) -> StatusChange | StatusConflict:
        with self._scope.writing(session_id, guard) as draft:
            current = SessionStatus(draft.columns["status"])
            if current not in expected:
                return StatusConflict(current_status=current, current_version=draft.version)
            return StatusChange(new_version=draft.write(status=status.value, failure_reason=failure_reason))

    def increment(self, session_id: str, counter: Counter) -> int:
        with self._scope.writing(session_id) as draft:
            count = int(draft.columns[counter]) + 1
            draft.write(**{counter: count})
            return count

    def merge_custom_state(
        self, session_id: str, changes: Mapping[str, Any], array_replacements: frozenset[str], guard: Guard
    ) -> list[str]:
        with self._scope.writing(session_id, guard) as draft:
            if not changes:
                return []
            merged, warnings = merge_changes(decode(draft.payload), dict(changes), array_replacements)
            draft.payload = encode_custom_state(merged, draft.envelope, self._scope.limits)
            draft.write()
            return warnings

    def select(self, query: SessionQuery) -> tuple[list[SessionHead], int | None, bool]:
        with self._scope.lock:
            records = list(self._scope.sessions.values())
        page, total, has_more = select_records(records, query)
        return [record.head() for record in page], total if query.count else None, has_more
