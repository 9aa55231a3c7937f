"""Sessions in memory: create, load, save, delete, status, listing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helix_store.core.merging import merge_changes
from helix_store.core.payloads import decode
from helix_store.core.requests import Guard, NewSession, SessionQuery
from helix_store.core.session_state import EncodedState, encode_custom_state, settled_mode
from helix_store.core.types import SessionHead, SessionState, SessionStatus, StatusChange, StatusConflict
from helix_store.exceptions import SessionExists
from helix_store.stores.backend import Counter
from helix_store.stores.memory.descendants import with_descendants
from helix_store.stores.memory.queries import select_records
from helix_store.stores.memory.records import SessionRecord
from helix_store.stores.memory.scope import TenantScope

__all__ = ["MemorySessions"]


class MemorySessions:
    def __init__(self, scope: TenantScope) -> None:
        self._scope = scope

    def create(self, new: NewSession) -> SessionState:
        with self._scope.lock:
            record = SessionRecord.new(new.session_id, new.encoded)
            record.columns["root_session_id"] = self._root_of(record)
            if self.exists(new.session_id):
                raise SessionExists(new.session_id)
            self._scope.data.sessions[new.session_id] = record
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
            mode = settled_mode(draft.columns["mode"], encoded.columns["mode"])
            return draft.write_state(encoded, mode)

    def delete(self, session_id: str, *, keep_usage: bool) -> int:
        with self._scope.lock:
            doomed = with_descendants(self._scope.data.sessions, session_id)
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
            records = list(self._scope.data.sessions.values())
        page, total, has_more = select_records(records, query)
        return [record.head() for record in page], total if query.count else None, has_more
