"""Snapshots in memory."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Any

from helix_store.checkpointers.snapshots.rules import (
    SNAPSHOT_AGENT_TYPE,
    CheckpointMeta,
    ClaimTerm,
    EncodedSnapshot,
    new_thread,
)
from helix_store.core import moments
from helix_store.core.guards import Guard
from helix_store.core.payloads import decode_object
from helix_store.exceptions import CheckpointNotFound, ConflictError, SessionNotFound
from helix_store.locks.memory import StoredLock
from helix_store.sessions.memory.records import SessionRecord
from helix_store.sessions.memory.scope import TenantScope
from helix_store.sessions.memory.sessions import with_descendants


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot with its newest claim; ``is_done`` means that it was resumed."""

    meta: CheckpointMeta
    text: str
    claim: StoredLock | None = None
    is_done: bool = False

    @property
    def is_held(self) -> bool:
        return self.claim is not None and self.claim.lasts and not self.is_done


class MemorySnapshots:
    """The in-memory back end; see `DatabaseSnapshots` for its operations."""

    def __init__(self, scope: TenantScope) -> None:
        self._scope = scope

    def put(
        self, thread_id: str, checkpoint_id: str, snapshot: EncodedSnapshot, *, cap: int | None, guard: Guard
    ) -> None:
        with self._scope.lock:
            record = self._scope.find(thread_id)
            draft = _new_record(thread_id) if record is None else record.draft()
            self._scope.check_guard(draft, guard)
            if checkpoint_id in draft.snapshots:
                raise ConflictError("The thread already has a checkpoint with this id.")
            at = moments.now()
            draft.snapshots[checkpoint_id] = StoredSnapshot(
                CheckpointMeta(
                    id=checkpoint_id,
                    thread_id=thread_id,
                    created_at=at,
                    agent_snapshot_version=snapshot.version,
                    size_bytes=snapshot.size_bytes,
                ),
                snapshot.text,
            )
            excess = 0 if cap is None else max(len(draft.snapshots) - cap, 0)
            for oldest in list(islice(draft.snapshots, excess)):
                del draft.snapshots[oldest]
            draft.columns["updated_at"] = at
            self._scope.sessions[thread_id] = draft

    def get(self, thread_id: str, checkpoint_id: str | None) -> dict[str, Any] | None:
        stored = _chosen(self._snapshots(thread_id), checkpoint_id)
        return None if stored is None else decode_object(stored.text)

    def select(self, thread_id: str, *, limit: int | None, before: str | None) -> list[CheckpointMeta]:
        metas = [stored.meta for stored in reversed(self._snapshots(thread_id).values())]
        if before is not None:
            ids = [meta.id for meta in metas]
            if before not in ids:
                raise CheckpointNotFound(before)
            metas = metas[ids.index(before) + 1 :]
        return metas if limit is None else metas[:limit]

    def delete(self, thread_id: str, checkpoint_id: str | None) -> int:
        with suppress(SessionNotFound), self._scope.writing(thread_id) as draft:
            doomed = list(draft.snapshots) if checkpoint_id is None else [checkpoint_id]
            deleted = sum(draft.snapshots.pop(each, None) is not None for each in doomed)
            if deleted:
                draft.columns["updated_at"] = moments.now()
            return deleted
        return 0

    def delete_threads(self, thread_ids: Collection[str]) -> dict[str, int]:
        with self._scope.lock:
            deleted = {thread_id: self.delete(thread_id, None) for thread_id in thread_ids}
            for thread_id in thread_ids:
                record = self._scope.find(thread_id)
                if record is not None and record.columns["agent_type"] == SNAPSHOT_AGENT_TYPE:
                    for doomed in with_descendants(self._scope.sessions, thread_id):
                        self._scope.forget(doomed)
        return deleted

    def claim(
        self, thread_id: str, checkpoint_id: str | None, *, owner: str, ttl_ms: int
    ) -> ClaimTerm | None:
        with suppress(SessionNotFound), self._scope.writing(thread_id) as draft:
            stored = _chosen(draft.snapshots, checkpoint_id)
            if stored is None or stored.is_done or stored.is_held:
                return None
            snapshot = decode_object(stored.text)
            token = 1 if stored.claim is None else stored.claim.token + 1
            claim = StoredLock.until(owner, token, ttl_ms)
            draft.snapshots[stored.meta.id] = replace(stored, claim=claim)
            return ClaimTerm(
                thread_id=thread_id,
                checkpoint_id=stored.meta.id,
                owner=owner,
                token=token,
                expires_at=claim.expires_at,
                snapshot=snapshot,
            )
        return None

    def refresh_claim(self, term: ClaimTerm, *, ttl_ms: int) -> datetime | None:
        with self._scope.lock:
            stored = self._claimed(term)
            if stored is None or not stored.is_held:
                return None
            claim = StoredLock.until(term.owner, term.token, ttl_ms)
            self._replace(term, replace(stored, claim=claim))
        return claim.expires_at

    def release_claim(self, term: ClaimTerm) -> bool:
        with self._scope.lock:
            stored = self._claimed(term)
            if stored is None or stored.claim is None or not stored.is_held:
                return False
            self._replace(term, replace(stored, claim=stored.claim.ended()))
        return True

    def finish_claim(self, term: ClaimTerm) -> bool:
        with self._scope.lock:
            stored = self._claimed(term)
            if stored is None or stored.claim is None or stored.claim.was_released:
                return False
            self._replace(term, replace(stored, is_done=True))
        return True

    def _snapshots(self, thread_id: str) -> dict[str, StoredSnapshot]:
        record = self._scope.find(thread_id)
        return {} if record is None else record.snapshots

    def _claimed(self, term: ClaimTerm) -> StoredSnapshot | None:
        """Return the snapshot, unless someone else has claimed it since."""
        stored = self._snapshots(term.thread_id).get(term.checkpoint_id)
        claim = None if stored is None else stored.claim
        is_own = claim is not None and (claim.owner, claim.token) == (term.owner, term.token)
        return stored if is_own else None

    def _replace(self, term: ClaimTerm, stored: StoredSnapshot) -> None:
        with self._scope.writing(term.thread_id) as draft:
            draft.snapshots[term.checkpoint_id] = stored


def _new_record(thread_id: str) -> SessionRecord:
    return SessionRecord.new(thread_id, new_thread(thread_id).encoded)


def _chosen(snapshots: dict[str, StoredSnapshot], checkpoint_id: str | None) -> StoredSnapshot | None:
    """Return the snapshot with this id, or the newest one."""
    if checkpoint_id is not None:
        return snapshots.get(checkpoint_id)
    return next(reversed(snapshots.values()), None)
