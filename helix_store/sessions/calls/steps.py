"""Runs and steps: a turn and its end, staging changes, and the atomic step that promotes them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from helix_store import conf
from helix_store.core import validation
from helix_store.core.dicts import AnyMessage, AnyStagedChanges
from helix_store.core.guards import Guard, guard
from helix_store.core.ids import new_checkpoint_id, new_id
from helix_store.core.patches import check_operation_count, check_staged_patches
from helix_store.core.payloads import encode
from helix_store.core.types import (
    Run,
    RunStatus,
    SessionState,
    StagedChanges,
    StepCommit,
    StepInfo,
)
from helix_store.engine.async_twins import async_twin
from helix_store.exceptions import InvalidPayload
from helix_store.sessions.backend import StoreCalls
from helix_store.sessions.layout import encode_state
from helix_store.sessions.requests import (
    CommittedStep,
    RunUpdate,
    StagedRow,
    StepRequest,
    StepWrite,
    encode_messages,
)

_RUN_RULES: Final[dict[str, validation.Rule]] = {
    "session_id": validation.identifier,
    "run_id": validation.identifier,
    "status": validation.enum_text(RunStatus),
    "start_sequence": validation.whole_number,
    "step_count": validation.optional(validation.whole_number),
    "completion_reason": validation.reason,
    "expected_version": validation.optional(validation.whole_number),
    "fencing_token": validation.optional(validation.whole_number),
}
_STEP_RULES: Final[dict[str, validation.Rule]] = {
    "session_id": validation.identifier,
    "step_id": validation.identifier,
    "tool_call_id": validation.identifier,
    "step_count": validation.whole_number,
    "stream_sequence": validation.whole_number,
    "expected_version": validation.optional(validation.whole_number),
    "fencing_token": validation.optional(validation.whole_number),
    "run_id": validation.optional_identifier,
    "operation_id": validation.optional_identifier,
}


class StepCalls(StoreCalls):
    def start_run(
        self,
        session_id: str,
        run_id: str | None = None,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
        start_sequence: int = 0,
        supersede: bool = False,
    ) -> Run:
        """Open the session's next turn and set the session active.

        Runs in one transaction that also clears a pending interrupt request. Raises `ConflictError` if the
        run id exists, or if another run is running. With ``supersede``, or a newer ``fencing_token`` than
        that run's, the other run ends as ``interrupted`` with the reason ``superseded`` instead.
        """
        run_id = new_id() if run_id is None else run_id
        validation.arguments(
            _RUN_RULES,
            session_id=session_id,
            run_id=run_id,
            start_sequence=start_sequence,
            expected_version=expected_version,
            fencing_token=fencing_token,
        )
        return self._backend.runs.start_run(
            session_id,
            run_id,
            start_sequence=start_sequence,
            supersede=bool(supersede),
            guard=Guard(expected_version, fencing_token),
        )

    def update_run(
        self,
        session_id: str,
        run_id: str,
        *,
        status: RunStatus | str,
        step_count: int | None = None,
        completion_reason: str | None = None,
        error: Any = None,
        fencing_token: int | None = None,
    ) -> Run:
        """Set a run's status; any status but ``running`` ends it. ``None`` leaves a field unchanged.

        A run that waits or was interrupted can be set to ``running`` again, which clears a pending interrupt
        request as `start_run` does. Raises `RunNotFound`. Raises `ConflictError` for status ``running`` if
        another run is running, or if the run has completed, failed or been superseded. With a
        ``fencing_token``, no status can be set on a superseded run.
        """
        validation.arguments(
            _RUN_RULES,
            status=status,
            step_count=step_count,
            completion_reason=completion_reason,
            session_id=session_id,
            run_id=run_id,
            fencing_token=fencing_token,
        )
        update = RunUpdate(
            status=RunStatus(status),
            step_count=step_count,
            completion_reason=completion_reason,
            error=None if error is None else encode(error, limit=self.limits.max_state_bytes, path="/error"),
        )
        return self._backend.runs.update_run(session_id, run_id, update, Guard(None, fencing_token))

    def get_current_run(self, session_id: str) -> Run | None:
        """Return the running run, or ``None``. Raises `SessionNotFound`."""
        return self._backend.runs.current_run(validation.identifier(session_id, "session_id"))

    def list_runs(self, session_id: str, *, limit: int = 50, offset: int = 0) -> list[Run]:
        """List the session's runs, newest first. ``limit`` is 1 to 200; larger values mean 200."""
        return self._backend.runs.select_runs(
            validation.identifier(session_id, "session_id"),
            limit=validation.page_limit(limit),
            offset=validation.page_offset(offset),
        )

    def stage_changes(self, session_id: str, step_id: str, staged: StagedChanges | AnyStagedChanges) -> None:
        """Stage one tool call's changes for a step; `load_state` does not show them until they are promoted.

        Runs in one transaction under the same session lock as steps: a step that commits at the same time
        either promotes the whole change or leaves it staged. Safe to repeat: the same tool call replaces its
        earlier change and keeps its order. Raises `InvalidPayload`. Raises `LimitExceeded`, even for a patch
        that could not be applied to any state.
        """
        self._stage(session_id, step_id, staged)

    def _stage(
        self, session_id: str, step_id: str, staged: StagedChanges | AnyStagedChanges
    ) -> StagedRow | None:
        """Stage a change, and return its row if a step of a handle can promote the row without reading it."""
        changes = staged if isinstance(staged, StagedChanges) else StagedChanges.from_dict(staged)
        validation.arguments(
            _STEP_RULES, session_id=session_id, step_id=step_id, tool_call_id=changes.tool_call_id
        )
        limits = conf.limits(self._given_limits)
        at = changes.timestamp
        at = None if at is None else validation.epoch_milliseconds(at, "timestamp")
        if changes.merge_changes is not None and type(changes.merge_changes) is not dict:
            raise InvalidPayload(path="/merge_changes", reason="expected a dict")
        if type(changes.patches) is not list:
            raise InvalidPayload(path="/patches", reason="expected a list")
        if changes.patches:
            check_operation_count(changes.patches)
        document = {field.name: getattr(changes, field.name) for field in fields(changes)} | {"timestamp": at}
        text = encode(document, limit=limits.max_staged_bytes, name="max_staged_bytes")
        if changes.patches:
            check_staged_patches(changes.patches, limits=limits)
        return self._backend.steps.stage(session_id, step_id, changes.tool_call_id, text)

    def get_staged_changes(self, session_id: str, step_id: str) -> list[StagedChanges]:
        """Return the changes staged for a step, in staging order."""
        validation.identifier(session_id, "session_id")
        return self._backend.steps.staged(session_id, validation.identifier(step_id, "step_id"))

    def promote_staging(
        self,
        session_id: str,
        step_id: str,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int:
        """Apply a step's staged changes to the custom state in staging order, clear them, return the version.

        Runs in one transaction. If no change is staged, the version does not change. Raises `PatchError` if a
        patch cannot be applied: then no change is applied, and all changes stay staged.
        """
        validation.identifier(session_id, "session_id")
        validation.identifier(step_id, "step_id")
        return self._backend.steps.promote(session_id, step_id, guard(expected_version, fencing_token))

    def discard_staging(self, session_id: str, step_id: str) -> int:
        """Delete a step's staged changes and return their number. Safe to repeat."""
        validation.identifier(session_id, "session_id")
        return self._backend.steps.discard(session_id, validation.identifier(step_id, "step_id"))

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

        Runs in one transaction under the session's lock. The step's staged changes are applied on top of
        ``state.custom_state`` and cleared; the checkpoint refers to the history by message count. The stored
        state takes the ``step_count`` of the step, regardless of the value in ``state``. Raises
        `StaleStateError` and `PatchError`, `RunNotFound` if the run belongs to another session, and
        `ConflictError` if the mode is already set to another one; then nothing is written. With an
        ``operation_id``, a repeat returns the first result; another payload with the same id raises
        `IdempotencyConflict`. If ``CHECKPOINTS_KEEP`` is set, all but the newest checkpoints are deleted.

        If the reply to COMMIT is lost, the call looks up the outcome on another connection and writes the
        step if it is not stored. If the server does not answer for five seconds, it raises `OutcomeUnknown`:
        repeat the call with the ``operation_id`` of that error to find the outcome. Inside the caller's
        ``atomic()`` block, the caller owns the commit.
        Source: the atomic save and promote of the state store document.
        """
        write = StepWrite(
            session_id=session_id,
            state=state,
            messages=append_messages,
            info=step if isinstance(step, StepInfo) else StepInfo.from_dict(step),
            expected_version=expected_version,
            fencing_token=fencing_token,
            operation_id=operation_id,
            run_id=run_id,
        )
        return self._commit_step(write)[0]

    def _commit_step(self, step: StepWrite) -> CommittedStep:
        """Commit a step, also on behalf of a handle, without the handle's calls.

        A handle passes the changes that it staged and the approvals that it uses, which it has read at the
        expected version. Raises `ConflictError` if any of these changes no longer exists.
        """
        info, state = step.info, step.state
        validation.arguments(
            _STEP_RULES,
            session_id=step.session_id,
            step_id=info.step_id,
            step_count=info.step_count,
            stream_sequence=info.stream_sequence,
            expected_version=step.expected_version,
            fencing_token=step.fencing_token,
            run_id=step.run_id,
            operation_id=step.operation_id,
        )
        limits = conf.limits(self._given_limits)
        # This refuses anything but a state, so the parts of the state are read only afterwards.
        encoded = encode_state(
            state,
            limits,
            step.session_id,
            step_count=info.step_count,
            # The digest of an operation needs the same text that any process would write.
            reuse_texts=step.operation_id is None,
        )
        request = StepRequest(
            session_id=step.session_id,
            checkpoint_id=new_checkpoint_id(step.session_id, info.step_count, time.time_ns() // 1_000_000),
            state=state,
            custom_state=state.custom_state,
            encoded=encoded,
            messages=encode_messages(step.messages, limits),
            step=info,
            guard=Guard(step.expected_version, step.fencing_token),
            limits=limits,
            run_id=step.run_id,
            operation_id=step.operation_id,
            keep=conf.checkpoints_keep(),
            staged=step.staged,
            uses=step.uses,
            reception=step.reception,
            staged_rows=step.staged_rows,
        )
        return self._backend.steps.commit(request), request.custom_state

    astart_run = async_twin(start_run)
    aupdate_run = async_twin(update_run)
    aget_current_run = async_twin(get_current_run)
    alist_runs = async_twin(list_runs)
    astage_changes = async_twin(stage_changes)
    aget_staged_changes = async_twin(get_staged_changes)
    apromote_staging = async_twin(promote_staging)
    adiscard_staging = async_twin(discard_staging)
    asave_state_and_promote_staging = async_twin(save_state_and_promote_staging)
