"""The async half of a state store: the calls of `StateStore` with the prefix ``a``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from helix_store.core.dicts import AnyMessage, AnyStagedChanges, AnyToolCall
from helix_store.core.types import (
    UNSET,
    Checkpoint,
    CheckpointPage,
    InterruptKind,
    InterruptRequest,
    Message,
    MessagePage,
    PendingToolCall,
    Run,
    RunStatus,
    SessionMode,
    SessionPage,
    SessionState,
    SessionStatus,
    StagedChanges,
    StatusChange,
    StatusConflict,
    StepCommit,
    StepInfo,
    Submission,
    SubSessionRef,
    Timestamp,
    Unset,
)

__all__ = ["AsyncStateStore"]


class AsyncStateStore(Protocol):
    """Each method does what the method of `StateStore` without the prefix does."""

    # Sessions

    async def acreate_session(
        self,
        session_id: str | None = None,
        *,
        agent_type: str,
        user_id: str | None = None,
        parent_session_id: str | None = None,
        tags: Iterable[str] = (),
        metadata: Mapping[str, str] | None = None,
        custom_state: dict[str, Any] | None = None,
        title: str | None = None,
        workspace_id: str | None = None,
        directory: str = "",
        stream_id: str | None = None,
        mode: SessionMode | str | None = None,
        expires_at: Timestamp | None = None,
    ) -> SessionState: ...

    async def asession_exists(self, session_id: str) -> bool: ...

    async def aload_state(self, session_id: str) -> SessionState | None: ...

    async def asave_state(
        self,
        session_id: str,
        state: SessionState,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int: ...

    async def adelete_session(self, session_id: str, *, keep_usage: bool = False) -> int: ...

    async def aupdate_status(
        self, session_id: str, status: SessionStatus | str, *, failure_reason: str | None = None
    ) -> int: ...

    async def acompare_and_set_status(
        self,
        session_id: str,
        expected: Collection[SessionStatus | str],
        status: SessionStatus | str,
        *,
        failure_reason: str | None = None,
        fencing_token: int | None = None,
    ) -> StatusChange | StatusConflict: ...

    async def aincrement_step_count(self, session_id: str) -> int: ...

    async def aincrement_resume_count(self, session_id: str) -> int: ...

    async def amerge_custom_state(
        self,
        session_id: str,
        changes: Mapping[str, Any],
        *,
        array_replacements: Iterable[str] = (),
        expected_version: int | None = None,
    ) -> list[str]: ...

    async def alist_sessions(
        self,
        *,
        agent_type: str | None = None,
        status: SessionStatus | str | Collection[SessionStatus | str] | None = None,
        user_id: str | None = None,
        parent_session_id: str | Unset | None = UNSET,
        root_session_id: str | None = None,
        workspace_id: str | None = None,
        tags: Iterable[str] | None = None,
        metadata: Mapping[str, str] | None = None,
        created_from: Timestamp | None = None,
        created_to: Timestamp | None = None,
        order_by: str = "updated_at",
        direction: str = "desc",
        limit: int = 50,
        offset: int = 0,
        cursor: str | None = None,
        count: bool = True,
    ) -> SessionPage: ...

    # Messages

    async def aappend_messages(
        self,
        session_id: str,
        messages: Sequence[AnyMessage],
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int: ...

    async def aget_messages(
        self,
        session_id: str,
        *,
        offset: int = 0,
        limit: int | None = None,
        include_thinking: bool = True,
        order: str = "asc",
    ) -> MessagePage: ...

    def aiter_messages(self, session_id: str, *, chunk_size: int = 500) -> AsyncIterator[Message]: ...

    async def aget_message_count(self, session_id: str) -> int: ...

    async def atruncate_messages(
        self, session_id: str, keep: int, *, expected_version: int | None = None
    ) -> int: ...

    # Staging and the atomic step

    async def astage_changes(
        self, session_id: str, step_id: str, staged: StagedChanges | AnyStagedChanges
    ) -> None: ...

    async def aget_staged_changes(self, session_id: str, step_id: str) -> list[StagedChanges]: ...

    async def apromote_staging(
        self,
        session_id: str,
        step_id: str,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int: ...

    async def adiscard_staging(self, session_id: str, step_id: str) -> int: ...

    async def asave_state_and_promote_staging(
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
    ) -> StepCommit: ...

    # Checkpoints

    async def aget_checkpoint(self, session_id: str, checkpoint_id: str) -> Checkpoint | None: ...

    async def aget_latest_checkpoint(self, session_id: str) -> Checkpoint | None: ...

    async def alist_checkpoints(
        self, session_id: str, *, limit: int = 20, cursor: str | None = None
    ) -> CheckpointPage: ...

    async def arestore_checkpoint(
        self,
        session_id: str,
        checkpoint_id: str,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int: ...

    async def abranch_session(
        self,
        session_id: str,
        checkpoint_id: str | None = None,
        *,
        new_session_id: str | None = None,
        message_index: int | None = None,
        title: str | None = None,
    ) -> SessionState: ...

    async def adelete_checkpoint(self, session_id: str, checkpoint_id: str) -> bool: ...

    async def aprune_checkpoints(self, session_id: str, *, keep: int) -> int: ...

    # Runs, sub-sessions, interrupts

    async def astart_run(
        self,
        session_id: str,
        run_id: str | None = None,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
        start_sequence: int = 0,
        supersede: bool = False,
    ) -> Run: ...

    async def aupdate_run(
        self,
        session_id: str,
        run_id: str,
        *,
        status: RunStatus | str,
        step_count: int | None = None,
        completion_reason: str | None = None,
        error: Any = None,
        fencing_token: int | None = None,
    ) -> Run: ...

    async def aget_current_run(self, session_id: str) -> Run | None: ...

    async def alist_runs(self, session_id: str, *, limit: int = 50, offset: int = 0) -> list[Run]: ...

    async def aadd_sub_session_refs(
        self, session_id: str, refs: Iterable[SubSessionRef | Mapping[str, Any]]
    ) -> None: ...

    async def aupdate_sub_session_ref(
        self,
        session_id: str,
        sub_session_id: str,
        *,
        status: str | None = None,
        output: Any = None,
        error: Any = None,
    ) -> SubSessionRef: ...

    async def aget_sub_session_refs(self, session_id: str) -> list[SubSessionRef]: ...

    async def arequest_interrupt(
        self,
        session_id: str,
        *,
        kind: InterruptKind | str = "interrupt",
        reason: str | None = None,
        run_id: str | None = None,
    ) -> InterruptRequest: ...

    async def acheck_interrupt(
        self, session_id: str, *, run_id: str | None = None
    ) -> InterruptRequest | None: ...

    async def aclear_interrupt(self, session_id: str) -> bool: ...

    # Human in the loop

    async def aadd_pending_tool_calls(
        self,
        session_id: str,
        calls: Mapping[str, AnyToolCall],
        *,
        owner_session_id: str | None = None,
        fencing_token: int | None = None,
    ) -> None: ...

    async def asubmit_tool_result(
        self,
        session_id: str,
        tool_call_id: str,
        *,
        result: Any = None,
        error: Any = None,
        approval_id: str | None = None,
        approved: bool | None = None,
        reason: str | None = None,
    ) -> Submission: ...

    async def atake_tool_results(
        self, session_id: str, *, expected_version: int | None = None, fencing_token: int | None = None
    ) -> dict[str, dict[str, Any]]: ...

    async def afind_expired_pending(
        self, *, now: Timestamp | None = None, limit: int = 200
    ) -> list[PendingToolCall]: ...

    async def asuspend(
        self,
        session_id: str,
        *,
        kind: RunStatus | str,
        context: dict[str, Any],
        pending: Mapping[str, AnyToolCall] | None = None,
        awaiting_children: list[Any] | None = None,
        step_id: str | None = None,
        tracing: dict[str, Any] | None = None,
        expires_at: Timestamp | None = None,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int: ...

    async def aresume(
        self, session_id: str, *, expected_version: int | None = None, fencing_token: int | None = None
    ) -> SessionState: ...
