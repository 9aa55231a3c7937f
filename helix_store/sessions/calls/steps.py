"""Staging, and the atomic step that promotes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from helix_store import conf
from helix_store.core import validation
from helix_store.core.dicts import AnyMessage, AnyStagedChanges
from helix_store.core.guards import Guard, guard
from helix_store.core.ids import checkpoint_id
from helix_store.core.patches import check_operation_count
from helix_store.core.payloads import encode
from helix_store.core.types import (
    SessionState,
    StagedChanges,
    StepCommit,
    StepInfo,
    as_value,
)
from helix_store.engine.async_twins import async_twin
from helix_store.exceptions import InvalidPayload
from helix_store.sessions.backend import StoreCalls
from helix_store.sessions.layout import encode_state
from helix_store.sessions.requests import StepRequest, encode_messages

__all__ = ["StepCalls"]


_STEP_RULES: Final[dict[str, validation.Rule]] = {
    "session_id": validation.identifier,
    "step_id": validation.identifier,
    "step_count": validation.whole_number,
    "stream_sequence": validation.whole_number,
    "expected_version": validation.optional(validation.whole_number),
    "fencing_token": validation.optional(validation.whole_number),
    "run_id": validation.optional_identifier,
    "operation_id": validation.optional_identifier,
}


class StepCalls(StoreCalls):
    def stage_changes(self, session_id: str, step_id: str, staged: StagedChanges | AnyStagedChanges) -> None:
        """Stage one tool call's changes for a step; `load_state` does not show them before they are promoted.

        One transaction that shares the session's lock with steps: a step that commits at the same time
        promotes the whole change, or the change stays staged. Safe to repeat: the same tool call replaces
        its earlier change and keeps its order.
        """
        validation.identifier(session_id, "session_id")
        validation.identifier(step_id, "step_id")
        changes = as_value(StagedChanges, staged)
        validation.identifier(changes.tool_call_id, "tool_call_id")
        at = changes.timestamp
        at = None if at is None else validation.epoch_milliseconds(at, "timestamp")
        if changes.merge_changes is not None and type(changes.merge_changes) is not dict:
            raise InvalidPayload(path="/merge_changes", reason="expected a dict")
        if type(changes.patches) is not list:
            raise InvalidPayload(path="/patches", reason="expected a list")
        check_operation_count(changes.patches)
        document = {field.name: getattr(changes, field.name) for field in fields(changes)} | {"timestamp": at}
        text = encode(document, limit=self.limits.max_staged_bytes, name="max_staged_bytes")
        self._backend.staging.stage(session_id, step_id, changes.tool_call_id, text)

    def get_staged_changes(self, session_id: str, step_id: str) -> list[StagedChanges]:
        """The changes staged for a step, in staging order."""
        validation.identifier(session_id, "session_id")
        return self._backend.staging.staged(session_id, validation.identifier(step_id, "step_id"))

    def promote_staging(
        self,
        session_id: str,
        step_id: str,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int:
        """Apply a step's staged changes to the custom state in staging order, clear them, return the version.

        One transaction. The version stays if no change is staged. A patch that cannot be applied raises
        `PatchError`: no change is applied, and all stay staged.
        """
        validation.identifier(session_id, "session_id")
        validation.identifier(step_id, "step_id")
        return self._backend.staging.promote(session_id, step_id, guard(expected_version, fencing_token))

    def discard_staging(self, session_id: str, step_id: str) -> int:
        """Delete a step's staged changes and return their number. Safe to repeat."""
        validation.identifier(session_id, "session_id")
        return self._backend.staging.discard(session_id, validation.identifier(step_id, "step_id"))

    def save_state_and_promote_staging(
        self,
        session_id: str,
        state: SessionState,
        append_messages: Sequence[AnyMessage],
        step: StepInfo | Mapping[str, Any],
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
        operation_id: str | None = None,
        run_id: str | None = None,
    ) -> StepCommit:
        """Commit one step: state, messages, staged changes and checkpoint, all or nothing.

        One transaction under the session's lock. The step's staged changes are applied on top of
        ``state.custom_state`` and cleared; the checkpoint refers to the history by message count. The stored
        state has the ``step_count`` of the step, whatever that of ``state`` is. Raises `StaleStateError`,
        `PatchError`, `RunNotFound` for a run of another session, and `ConflictError` for a second mode; then
        nothing is written. With an ``operation_id`` a repeat returns the first result; another payload with
        the same id raises `IdempotencyConflict`. With ``CHECKPOINTS_KEEP`` in the settings it also deletes
        all but the newest checkpoints.

        When the reply to COMMIT is lost, the call finds the outcome on another connection and writes the step
        if it is not stored. While the server gives no answer for five seconds it raises `OutcomeUnknown`: a
        repeat with the ``operation_id`` of that error finds the outcome. Inside the caller's ``atomic()``
        block the caller owns the commit.
        Source: the atomic save and promote of the state store document.
        """
        info = step if isinstance(step, StepInfo) else StepInfo.from_dict(step)
        validation.arguments(
            _STEP_RULES,
            session_id=session_id,
            step_id=info.step_id,
            step_count=info.step_count,
            stream_sequence=info.stream_sequence,
            expected_version=expected_version,
            fencing_token=fencing_token,
            run_id=run_id,
            operation_id=operation_id,
        )
        limits = conf.limits(self._given_limits)
        request = StepRequest(
            session_id=session_id,
            checkpoint_id=checkpoint_id(session_id, info.step_count),
            state=state,
            encoded=encode_state(
                state,
                limits,
                session_id,
                step_count=info.step_count,
                # The digest of an operation needs the text that any process would write.
                reuse_texts=operation_id is None,
            ),
            messages=encode_messages(append_messages, limits),
            step=info,
            guard=Guard(expected_version, fencing_token),
            limits=limits,
            run_id=run_id,
            operation_id=operation_id,
            keep=conf.checkpoints_keep(),
        )
        return self._backend.steps.commit(request)

    astage_changes = async_twin(stage_changes)
    aget_staged_changes = async_twin(get_staged_changes)
    apromote_staging = async_twin(promote_staging)
    adiscard_staging = async_twin(discard_staging)
    asave_state_and_promote_staging = async_twin(save_state_and_promote_staging)
