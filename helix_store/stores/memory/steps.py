"""The atomic step in memory."""

from __future__ import annotations

from django.utils import timezone

from helix_store.core.ids import checkpoint_id
from helix_store.core.limits import Limits
from helix_store.core.members import NO_MEMBERS, Members
from helix_store.core.merging import promote_staged
from helix_store.core.requests import StepRequest
from helix_store.core.session_state import EncodedState, settled_mode, with_custom_state
from helix_store.core.types import CheckpointHead, SessionStatus, StepCommit
from helix_store.exceptions import IdempotencyConflict, RunNotFound
from helix_store.stores.memory.messages import stored_messages
from helix_store.stores.memory.records import SessionRecord, StoredCheckpoint, StoredOperation
from helix_store.stores.memory.scope import TenantScope
from helix_store.stores.memory.staging import discard_staged, staged_changes

__all__ = ["MemorySteps"]


class MemorySteps:
    def __init__(self, scope: TenantScope) -> None:
        self._scope = scope

    def earlier_members(self, session_id: str) -> Members:
        return NO_MEMBERS

    def commit(self, request: StepRequest) -> StepCommit:
        with self._scope.writing(request.session_id) as draft:
            earlier = _earlier_commit(draft, request)
            if earlier is not None:
                return earlier
            self._scope.admit(draft, request.guard)
            return _apply(draft, request, self._scope.limits)


def _earlier_commit(record: SessionRecord, request: StepRequest) -> StepCommit | None:
    """The result of the operation that this request repeats, if it does."""
    if request.operation_id is None:
        return None
    operation = record.operations.get(request.operation_id)
    if operation is None:
        return None
    if operation.digest != request.digest():
        raise IdempotencyConflict(request.operation_id)
    return operation.commit


def _apply(draft: SessionRecord, request: StepRequest, limits: Limits) -> StepCommit:
    if request.run_id is not None and request.run_id not in draft.runs:
        raise RunNotFound(request.run_id)
    mode = settled_mode(draft.columns["mode"], request.encoded.columns["mode"])
    encoded = _with_staged_changes(draft, request, limits)
    discard_staged(draft, request.step.step_id)
    draft.messages.extend(stored_messages(request.messages, timezone.now()))
    new_version = draft.write_state(encoded, mode)
    checkpoint = StoredCheckpoint(_checkpoint_head(draft, request), new_version, encoded)
    draft.checkpoints[checkpoint.head.checkpoint_id] = checkpoint
    commit = StepCommit(checkpoint.head.checkpoint_id, new_version)
    if request.operation_id is not None:
        draft.operations[request.operation_id] = StoredOperation(request.digest(), commit)
    return commit


def _with_staged_changes(record: SessionRecord, request: StepRequest, limits: Limits) -> EncodedState:
    staged = staged_changes(record, request.step.step_id)
    if not staged:
        return request.encoded
    promoted = promote_staged(request.custom_state, staged, limits=limits)
    return with_custom_state(request.encoded, request.custom_state, promoted, limits)


def _checkpoint_head(record: SessionRecord, request: StepRequest) -> CheckpointHead:
    step = request.step
    return CheckpointHead(
        checkpoint_id=checkpoint_id(request.session_id, step.step_count),
        session_id=request.session_id,
        run_id=request.run_id,
        step_id=step.step_id,
        step_count=step.step_count,
        status=SessionStatus(record.columns["status"]),
        message_count=len(record.messages),
        stream_sequence=step.stream_sequence,
        created_at=record.columns["updated_at"],
    )
