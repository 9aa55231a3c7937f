"""Messages, staged changes and the atomic step in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from helix_store.core import moments
from helix_store.core.guards import Guard
from helix_store.core.merging import promote_staged
from helix_store.core.payloads import decode
from helix_store.core.types import CheckpointHead, SessionStatus, StagedChanges, StepCommit
from helix_store.exceptions import IdempotencyConflict, RunNotFound
from helix_store.sessions.approvals import used_approvals
from helix_store.sessions.layout import encode_custom_state
from helix_store.sessions.memory.posts import receive_due
from helix_store.sessions.memory.records import (
    SessionRecord,
    StoredCheckpoint,
    StoredOperation,
    stored_messages,
)
from helix_store.sessions.memory.scope import MemoryOperations
from helix_store.sessions.posts import has_open_calls
from helix_store.sessions.requests import (
    EncodedMessage,
    StepRequest,
    decode_messages,
    decode_staged,
)


class MemoryMessages(MemoryOperations):
    def append(self, session_id: str, messages: Sequence[EncodedMessage], guard: Guard) -> int:
        with self._scope.writing(session_id, guard) as draft:
            if messages:
                draft.messages.extend(stored_messages(messages, moments.now()))
                draft.write()
            return len(draft.messages)

    def page(
        self, session_id: str, *, offset: int, limit: int | None, descending: bool
    ) -> tuple[list[str], int]:
        messages = self._scope.require(session_id).messages
        total = len(messages)
        first = min(offset, total)
        end = total if limit is None else min(first + limit, total)
        page = messages[total - end : total - first][::-1] if descending else messages[first:end]
        return [message.text for message in page], total

    def after(self, session_id: str, sequence: int, limit: int) -> list[str]:
        record = self._scope.find(session_id)
        following = [] if record is None else record.messages[sequence : sequence + limit]
        return [message.text for message in following]

    def count(self, session_id: str) -> int:
        return len(self._scope.require(session_id).messages)

    def truncate(self, session_id: str, keep: int, guard: Guard) -> int:
        with self._scope.writing(session_id, guard) as draft:
            if keep >= len(draft.messages):
                return draft.version
            del draft.messages[keep:]
            draft.checkpoints = {
                checkpoint_id: checkpoint
                for checkpoint_id, checkpoint in draft.checkpoints.items()
                if checkpoint.head.message_count <= keep
            }
            return draft.write()


class MemorySteps(MemoryOperations):
    def stage(self, session_id: str, step_id: str, tool_call_id: str, text: str) -> None:
        with self._scope.writing(session_id) as draft:
            draft.staged[step_id, tool_call_id] = text

    def staged(self, session_id: str, step_id: str) -> list[StagedChanges]:
        return staged_changes(self._scope.require(session_id), step_id)

    def promote(self, session_id: str, step_id: str, guard: Guard) -> int:
        with self._scope.writing(session_id, guard) as draft:
            staged = staged_changes(draft, step_id)
            if not staged:
                return draft.version
            limits = self._scope.limits
            promoted = promote_staged(decode(draft.payload), staged, limits=limits)
            draft.payload = encode_custom_state(promoted, draft.envelope, limits)
            discard_staged(draft, step_id)
            return draft.write()

    def discard(self, session_id: str, step_id: str) -> int:
        with self._scope.writing(session_id) as draft:
            return discard_staged(draft, step_id)

    def commit(self, request: StepRequest) -> StepCommit:
        with self._scope.writing(request.session_id) as draft:
            earlier = _earlier_commit(draft, request)
            if earlier is not None:
                return earlier
            staged = staged_changes(draft, request.step.step_id)
            if request.staged:
                request.require_staged(staged)
            self._scope.check_guard(draft, request.guard)
            return _apply(draft, request, staged)


def staged_changes(record: SessionRecord, step_id: str) -> list[StagedChanges]:
    """Return the changes staged for a step, in staging order."""
    return decode_staged(
        text for (staged_step_id, _), text in record.staged.items() if staged_step_id == step_id
    )


def discard_staged(draft: SessionRecord, step_id: str) -> int:
    """Delete the changes staged for a step and return their number."""
    kept = {key: text for key, text in draft.staged.items() if key[0] != step_id}
    dropped = len(draft.staged) - len(kept)
    draft.staged = kept
    return dropped


def _earlier_commit(record: SessionRecord, request: StepRequest) -> StepCommit | None:
    """Return the result of an earlier commit with the same operation id, if there is one."""
    if request.operation_id is None:
        return None
    operation = record.operations.get(request.operation_id)
    if operation is None:
        return None
    if operation.digest != request.digest():
        raise IdempotencyConflict(request.operation_id)
    return replace(operation.commit, received=decode_messages(operation.received))


def _apply(draft: SessionRecord, request: StepRequest, staged: Sequence[StagedChanges]) -> StepCommit:
    if request.run_id is not None and request.run_id not in draft.runs:
        raise RunNotFound(request.run_id)
    now = moments.now()
    is_due = draft.columns["next_post_at"] is not None and draft.columns["next_post_at"] <= now
    given = request
    if request.reception is not None:
        request = request.continued(request.reception, has_due_posts=is_due)
    encoded = request.promote(staged)
    given.custom_state = request.custom_state
    if request.uses:
        draft.columns["approved_tool_calls"] = used_approvals(
            draft.columns["approved_tool_calls"], request.uses, request.step.step_id
        )
    discard_staged(draft, request.step.step_id)
    draft.messages.extend(stored_messages(request.messages, now))
    received: list[str] = []
    newest_first = (decode_messages([stored.text])[0] for stored in reversed(draft.messages))
    if is_due and request.reception is not None and not has_open_calls(newest_first):
        received = [message.text for message in receive_due(draft)]
    new_version = draft.write_state(encoded)
    head = CheckpointHead(
        checkpoint_id=request.checkpoint_id,
        session_id=request.session_id,
        run_id=request.run_id,
        step_id=request.step.step_id,
        step_count=request.step.step_count,
        status=SessionStatus(draft.columns["status"]),
        message_count=len(draft.messages),
        stream_sequence=request.step.stream_sequence,
        created_at=draft.columns["updated_at"],
    )
    draft.checkpoints[request.checkpoint_id] = StoredCheckpoint(head, new_version, encoded)
    if request.keep is not None:
        draft.keep_checkpoints(request.keep)
    commit = StepCommit(request.checkpoint_id, new_version)
    if request.operation_id is not None:
        draft.operations[request.operation_id] = StoredOperation(given.digest(), commit, received)
    return replace(commit, received=decode_messages(received))
