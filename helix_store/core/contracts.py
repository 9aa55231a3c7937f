"""Protocols of a state store and a usage store, and the check that an object is a state store."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from helix_store.core.async_contracts import AsyncStateStore
from helix_store.core.dicts import AnyMessage, AnyStagedChanges, AnyToolCall, AnyUsageEntry
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
    UsageKind,
)
from helix_store.core.usage import (
    UsageBucket,
    UsageEntry,
    UsageGrouping,
    UsagePage,
    UsageRollup,
    UsageTimeBucket,
)

__all__ = ["REQUIRED_METHODS", "StateStore", "UsageStore", "require_state_store"]


class StateStore(AsyncStateStore, Protocol):
    """Durable agent sessions. `helix_store.testing.StateStoreContract` tests what each method must do.

    Each method has an async counterpart with the same signature and the prefix ``a``: `AsyncStateStore`. The
    counterpart of ``iter_messages`` is an async iterator.
    """

    # Sessions

    def create_session(
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

    def session_exists(self, session_id: str) -> bool: ...

    def load_state(self, session_id: str) -> SessionState | None: ...

    def save_state(
        self,
        session_id: str,
        state: SessionState,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int: ...

    def delete_session(self, session_id: str, *, keep_usage: bool = False) -> int: ...

    def update_status(
        self, session_id: str, status: SessionStatus | str, *, failure_reason: str | None = None
    ) -> int: ...

    def compare_and_set_status(
        self,
        session_id: str,
        expected: Collection[SessionStatus | str],
        status: SessionStatus | str,
        *,
        failure_reason: str | None = None,
        fencing_token: int | None = None,
    ) -> StatusChange | StatusConflict: ...

    def increment_step_count(self, session_id: str) -> int: ...

    def increment_resume_count(self, session_id: str) -> int: ...

    def merge_custom_state(
        self,
        session_id: str,
        changes: Mapping[str, Any],
        *,
        array_replacements: Iterable[str] = (),
        expected_version: int | None = None,
    ) -> list[str]: ...

    def list_sessions(
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

    def append_messages(
        self,
        session_id: str,
        messages: Sequence[AnyMessage],
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int: ...

    def get_messages(
        self,
        session_id: str,
        *,
        offset: int = 0,
        limit: int | None = None,
        include_thinking: bool = True,
        order: str = "asc",
    ) -> MessagePage: ...

    def iter_messages(self, session_id: str, *, chunk_size: int = 500) -> Iterator[Message]: ...

    def get_message_count(self, session_id: str) -> int: ...

    def truncate_messages(
        self, session_id: str, keep: int, *, expected_version: int | None = None
    ) -> int: ...

    # Staging and the atomic step

    def stage_changes(
        self, session_id: str, step_id: str, staged: StagedChanges | AnyStagedChanges
    ) -> None: ...

    def get_staged_changes(self, session_id: str, step_id: str) -> list[StagedChanges]: ...

    def promote_staging(
        self,
        session_id: str,
        step_id: str,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int: ...

    def discard_staging(self, session_id: str, step_id: str) -> int: ...

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
    ) -> StepCommit: ...

    # Checkpoints

    def get_checkpoint(self, session_id: str, checkpoint_id: str) -> Checkpoint | None: ...

    def get_latest_checkpoint(self, session_id: str) -> Checkpoint | None: ...

    def list_checkpoints(
        self, session_id: str, *, limit: int = 20, cursor: str | None = None
    ) -> CheckpointPage: ...

    def restore_checkpoint(
        self,
        session_id: str,
        checkpoint_id: str,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int: ...

    def branch_session(
        self,
        session_id: str,
        checkpoint_id: str | None = None,
        *,
        new_session_id: str | None = None,
        message_index: int | None = None,
        title: str | None = None,
    ) -> SessionState: ...

    def delete_checkpoint(self, session_id: str, checkpoint_id: str) -> bool: ...

    def prune_checkpoints(self, session_id: str, *, keep: int) -> int: ...

    # Runs, sub-sessions, interrupts

    def start_run(
        self,
        session_id: str,
        run_id: str | None = None,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
        start_sequence: int = 0,
        supersede: bool = False,
    ) -> Run: ...

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
    ) -> Run: ...

    def get_current_run(self, session_id: str) -> Run | None: ...

    def list_runs(self, session_id: str, *, limit: int = 50, offset: int = 0) -> list[Run]: ...

    def add_sub_session_refs(
        self, session_id: str, refs: Iterable[SubSessionRef | Mapping[str, Any]]
    ) -> None: ...

    def update_sub_session_ref(
        self,
        session_id: str,
        sub_session_id: str,
        *,
        status: str | None = None,
        output: Any = None,
        error: Any = None,
    ) -> SubSessionRef: ...

    def get_sub_session_refs(self, session_id: str) -> list[SubSessionRef]: ...

    def request_interrupt(
        self,
        session_id: str,
        *,
        kind: InterruptKind | str = "interrupt",
        reason: str | None = None,
        run_id: str | None = None,
    ) -> InterruptRequest: ...

    def check_interrupt(self, session_id: str, *, run_id: str | None = None) -> InterruptRequest | None: ...

    def clear_interrupt(self, session_id: str) -> bool: ...

    # Human in the loop

    def add_pending_tool_calls(
        self,
        session_id: str,
        calls: Mapping[str, AnyToolCall],
        *,
        owner_session_id: str | None = None,
        fencing_token: int | None = None,
    ) -> None: ...

    def submit_tool_result(
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

    def take_tool_results(
        self, session_id: str, *, expected_version: int | None = None, fencing_token: int | None = None
    ) -> dict[str, dict[str, Any]]: ...

    def find_expired_pending(
        self, *, now: Timestamp | None = None, limit: int = 200
    ) -> list[PendingToolCall]: ...

    def suspend(
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

    def resume(
        self, session_id: str, *, expected_version: int | None = None, fencing_token: int | None = None
    ) -> SessionState: ...


_SYNCHRONOUS: Final = tuple(name for name in vars(StateStore) if not name.startswith("_"))

REQUIRED_METHODS: Final = (*_SYNCHRONOUS, *(f"a{name}" for name in _SYNCHRONOUS))
"""The names of all methods that a state store must have, the async ones included."""


def require_state_store(store: object) -> None:
    """Raise `TypeError` with the names of the missing methods if an object is not a state store."""
    missing = [name for name in REQUIRED_METHODS if not callable(getattr(store, name, None))]
    if missing:
        raise TypeError(f"{type(store).__name__} is not a state store; it lacks {', '.join(missing)}.")


class UsageStore(Protocol):
    """Usage of sessions. `helix_store.testing.UsageStoreContract` tests what each method must do.

    Each method has an async counterpart with the same signature and the prefix ``a``: ``aget_rollup``.
    """

    def record_entry(self, entry: UsageEntry | AnyUsageEntry) -> str: ...

    def record_entries(self, entries: Iterable[UsageEntry | AnyUsageEntry]) -> list[str]: ...

    def get_entries(
        self,
        session_id: str,
        *,
        kinds: UsageKind | str | Collection[UsageKind | str] | None = None,
        step_range: tuple[int | None, int | None] | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[UsageEntry]: ...

    def get_rollup(self, session_id: str, *, include_sub_agents: bool = False) -> UsageRollup | None: ...

    def exists(self, session_id: str) -> bool: ...

    def delete(self, session_id: str) -> int: ...

    def query_usage(
        self,
        *,
        agent_type: str | None = None,
        kinds: UsageKind | str | Collection[UsageKind | str] | None = None,
        user_id: str | None = None,
        model: str | None = None,
        date_from: Timestamp | None = None,
        date_to: Timestamp | None = None,
        order: str = "desc",
        limit: int = 50,
        offset: int = 0,
        cursor: str | None = None,
        count: bool = True,
    ) -> UsagePage: ...

    def timeseries(
        self,
        *,
        bucket: UsageTimeBucket | str = "day",
        group_by: UsageGrouping | str = "model",
        date_from: Timestamp,
        date_to: Timestamp,
        agent_type: str | None = None,
    ) -> list[UsageBucket]: ...
