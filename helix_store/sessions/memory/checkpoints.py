"""Checkpoints in memory: read, list, restore, branch, prune."""

from __future__ import annotations

from itertools import islice

from helix_store.core.guards import Guard
from helix_store.core.limits import AS_STORED
from helix_store.core.types import (
    Checkpoint,
    CheckpointHead,
    SessionState,
)
from helix_store.exceptions import (
    CheckpointNotFound,
    InvalidQuery,
    SessionExists,
)
from helix_store.sessions.layout import encode_state
from helix_store.sessions.memory.records import SessionRecord, StoredCheckpoint
from helix_store.sessions.memory.scope import MemoryOperations
from helix_store.sessions.requests import (
    BranchRequest,
)
from helix_store.sessions.rules import branched_state


class MemoryCheckpoints(MemoryOperations):
    def get(self, session_id: str, checkpoint_id: str) -> Checkpoint | None:
        record = self._scope.find(session_id)
        return None if record is None else _value(record, record.checkpoints.get(checkpoint_id))

    def latest(self, session_id: str) -> Checkpoint | None:
        record = self._scope.find(session_id)
        return None if record is None else _value(record, record.latest_checkpoint)

    def select(
        self, session_id: str, *, limit: int, before_version: int | None
    ) -> tuple[list[CheckpointHead], int, int | None]:
        checkpoints = self._scope.require(session_id).checkpoints
        older = (
            checkpoint
            for checkpoint in reversed(checkpoints.values())
            if before_version is None or checkpoint.version < before_version
        )
        page = list(islice(older, limit))
        more_follow = next(older, None) is not None
        return (
            [checkpoint.head for checkpoint in page],
            len(checkpoints),
            page[-1].version if more_follow else None,
        )

    def restore(self, session_id: str, checkpoint_id: str, guard: Guard) -> int:
        with self._scope.writing(session_id, guard) as draft:
            target = _required(draft, checkpoint_id)
            del draft.messages[target.head.message_count :]
            draft.checkpoints = {
                kept_id: checkpoint
                for kept_id, checkpoint in draft.checkpoints.items()
                if checkpoint.version <= target.version
            }
            draft.staged.clear()
            return draft.write_state(target.encoded)

    def branch(self, request: BranchRequest) -> SessionState:
        with self._scope.lock:
            source = self._scope.require(request.session_id)
            state, boundary = _branching_point(source, request)
            if self._scope.find(request.new_session_id) is not None:
                raise SessionExists(request.new_session_id)
            branched = branched_state(state, new_session_id=request.new_session_id, title=request.title)
            record = SessionRecord.new(request.new_session_id, encode_state(branched, AS_STORED))
            record.messages = source.messages[:boundary]
            record.columns["message_count"] = boundary
            self._scope.sessions[request.new_session_id] = record
        return record.state()

    def delete(self, session_id: str, checkpoint_id: str) -> bool:
        with self._scope.writing(session_id) as draft:
            return draft.checkpoints.pop(checkpoint_id, None) is not None

    def prune(self, session_id: str, keep: int) -> int:
        with self._scope.writing(session_id) as draft:
            return draft.keep_checkpoints(keep)


def _value(record: SessionRecord, checkpoint: StoredCheckpoint | None) -> Checkpoint | None:
    return None if checkpoint is None else checkpoint.value(record.columns["created_at"])


def _required(record: SessionRecord, checkpoint_id: str) -> StoredCheckpoint:
    checkpoint = record.checkpoints.get(checkpoint_id)
    if checkpoint is None:
        raise CheckpointNotFound(checkpoint_id)
    return checkpoint


def _branching_point(source: SessionRecord, request: BranchRequest) -> tuple[SessionState, int]:
    """Return the state to branch from, and the number of messages to copy."""
    boundary = len(source.messages) if request.message_index is None else request.message_index
    if boundary > len(source.messages):
        raise InvalidQuery("message_index is beyond the end of the history.", path="message_index")
    if request.checkpoint_id is None:
        newest_first = reversed(source.checkpoints.values())
        checkpoint = next((each for each in newest_first if each.head.message_count <= boundary), None)
    else:
        checkpoint = _required(source, request.checkpoint_id)
    if checkpoint is None:
        return source.state(), boundary
    if request.message_index is None:
        boundary = checkpoint.head.message_count
    return checkpoint.state(source.columns["created_at"]), boundary
