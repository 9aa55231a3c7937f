"""The protocols of the stores and managers, and a check whether an object is a state store."""

from __future__ import annotations

import inspect
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime, timedelta
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, runtime_checkable

from helix_store.core.approvals import Actor
from helix_store.core.dicts import AnyMessage, AnyStagedChanges, AnyToolCall, AnyUsageEntry
from helix_store.core.streams import PrunedStreams, StoredChunk, StreamInfo
from helix_store.core.types import (
    UNSET,
    Checkpoint,
    CheckpointPage,
    Duration,
    InterruptKind,
    InterruptRequest,
    LockInfo,
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
    StreamStatus,
    Submission,
    SubSessionRef,
    Timestamp,
    Unset,
    UsageKind,
    UserId,
)
from helix_store.core.usage import (
    UsageBucket,
    UsageEntry,
    UsageGrouping,
    UsagePage,
    UsageRollup,
    UsageTimeBucket,
)

__all__ = [
    "REQUIRED_METHODS",
    "ChunkReader",
    "ChunkWriter",
    "HeldLock",
    "LockManager",
    "StateStore",
    "StreamManager",
    "UsageStore",
    "require_state_store",
]


S = TypeVar("S")
R = TypeVar("R")
P = ParamSpec("P")


def async_version_of(
    call: Callable[Concatenate[S, P], R],
) -> Callable[[Callable[[S], None]], Callable[Concatenate[S, P], Coroutine[Any, Any, R]]]:
    """Declare a method with the parameters and the result of a call.

    The decorated method's name is kept.
    """

    def declared(named: Callable[[S], None]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
        @wraps(call)
        async def version(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            raise NotImplementedError

        version.__name__, version.__qualname__ = named.__name__, named.__qualname__
        return version

    return declared


# --- Lists of sessions: filters, order and page -----------------------------------------------------


def _list_sessions(
    self: object,
    *,
    agent_type: str | None = None,
    status: SessionStatus | str | Collection[SessionStatus | str] | None = None,
    user_id: UserId | None = None,
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
) -> SessionPage:
    raise NotImplementedError


_SIGNATURE: Final = inspect.signature(_list_sessions)
_DEFAULTS: Final = {name: each.default for name, each in _SIGNATURE.parameters.items() if name != "self"}

SESSION_FILTERS: Final = tuple(_DEFAULTS)
"""The names of the parameters, for interfaces that offer all of them."""


def _with_parameters_of(
    described: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    def decorated(method: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        @wraps(method)
        def call(self: Any, /, *args: P.args, **given: P.kwargs) -> R:
            if args or not given.keys() <= _DEFAULTS.keys():
                _SIGNATURE.bind(self, *args, **given)  # This raises the same TypeError as an ordinary call
            return method(self, **{**_DEFAULTS, **given})

        call.__signature__ = _SIGNATURE  # type: ignore[attr-defined]  # what `inspect.signature` returns
        return call

    return decorated


takes_session_filters: Final = _with_parameters_of(_list_sessions)
"""Give a method the parameters of ``list_sessions``; its body receives every parameter by keyword."""


@runtime_checkable
class UsageStore(Protocol):
    """Usage of sessions. `helix_store.testing.UsageStoreContract` tests the behaviour of each method.

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
        user_id: UserId | None = None,
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


@runtime_checkable
class StateStore(Protocol):
    """Durable agent sessions. `helix_store.testing.StateStoreContract` tests the behaviour of each method.

    Each method has an async counterpart with the same signature and the prefix ``a``. The counterpart of
    ``iter_messages`` is an async iterator.
    """

    # Sessions

    def create_session(
        self,
        session_id: str | None = None,
        *,
        agent_type: str,
        user_id: UserId | None = None,
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

    @async_version_of(create_session)
    def acreate_session(self) -> None: ...

    def session_exists(self, session_id: str) -> bool: ...

    @async_version_of(session_exists)
    def asession_exists(self) -> None: ...

    def load_state(self, session_id: str) -> SessionState | None: ...

    @async_version_of(load_state)
    def aload_state(self) -> None: ...

    def save_state(
        self,
        session_id: str,
        state: SessionState,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int: ...

    @async_version_of(save_state)
    def asave_state(self) -> None: ...

    def delete_session(self, session_id: str, *, keep_usage: bool = False) -> int: ...

    @async_version_of(delete_session)
    def adelete_session(self) -> None: ...

    def update_status(
        self, session_id: str, status: SessionStatus | str, *, failure_reason: str | None = None
    ) -> int: ...

    @async_version_of(update_status)
    def aupdate_status(self) -> None: ...

    def compare_and_set_status(
        self,
        session_id: str,
        expected: Collection[SessionStatus | str],
        status: SessionStatus | str,
        *,
        failure_reason: str | None = None,
        fencing_token: int | None = None,
    ) -> StatusChange | StatusConflict: ...

    @async_version_of(compare_and_set_status)
    def acompare_and_set_status(self) -> None: ...

    def increment_step_count(self, session_id: str) -> int: ...

    @async_version_of(increment_step_count)
    def aincrement_step_count(self) -> None: ...

    def increment_resume_count(self, session_id: str) -> int: ...

    @async_version_of(increment_resume_count)
    def aincrement_resume_count(self) -> None: ...

    def merge_custom_state(
        self,
        session_id: str,
        changes: Mapping[str, Any],
        *,
        array_replacements: Iterable[str] = (),
        expected_version: int | None = None,
    ) -> list[str]: ...

    @async_version_of(merge_custom_state)
    def amerge_custom_state(self) -> None: ...

    @takes_session_filters
    def list_sessions(self, **filters: Any) -> SessionPage: ...

    @async_version_of(list_sessions)
    def alist_sessions(self) -> None: ...

    # Messages

    def append_messages(
        self,
        session_id: str,
        messages: Sequence[AnyMessage],
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int: ...

    @async_version_of(append_messages)
    def aappend_messages(self) -> None: ...

    def get_messages(
        self,
        session_id: str,
        *,
        offset: int = 0,
        limit: int | None = None,
        include_thinking: bool = True,
        order: str = "asc",
    ) -> MessagePage: ...

    @async_version_of(get_messages)
    def aget_messages(self) -> None: ...

    def iter_messages(self, session_id: str, *, chunk_size: int = 500) -> Iterator[Message]: ...

    def aiter_messages(self, session_id: str, *, chunk_size: int = 500) -> AsyncIterator[Message]: ...

    def get_message_count(self, session_id: str) -> int: ...

    @async_version_of(get_message_count)
    def aget_message_count(self) -> None: ...

    def truncate_messages(
        self, session_id: str, keep: int, *, expected_version: int | None = None
    ) -> int: ...

    @async_version_of(truncate_messages)
    def atruncate_messages(self) -> None: ...

    # Staging and the atomic step

    def stage_changes(
        self, session_id: str, step_id: str, staged: StagedChanges | AnyStagedChanges
    ) -> None: ...

    @async_version_of(stage_changes)
    def astage_changes(self) -> None: ...

    def get_staged_changes(self, session_id: str, step_id: str) -> list[StagedChanges]: ...

    @async_version_of(get_staged_changes)
    def aget_staged_changes(self) -> None: ...

    def promote_staging(
        self,
        session_id: str,
        step_id: str,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int: ...

    @async_version_of(promote_staging)
    def apromote_staging(self) -> None: ...

    def discard_staging(self, session_id: str, step_id: str) -> int: ...

    @async_version_of(discard_staging)
    def adiscard_staging(self) -> None: ...

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

    @async_version_of(save_state_and_promote_staging)
    def asave_state_and_promote_staging(self) -> None: ...

    # Checkpoints

    def get_checkpoint(self, session_id: str, checkpoint_id: str) -> Checkpoint | None: ...

    @async_version_of(get_checkpoint)
    def aget_checkpoint(self) -> None: ...

    def get_latest_checkpoint(self, session_id: str) -> Checkpoint | None: ...

    @async_version_of(get_latest_checkpoint)
    def aget_latest_checkpoint(self) -> None: ...

    def list_checkpoints(
        self, session_id: str, *, limit: int = 20, cursor: str | None = None
    ) -> CheckpointPage: ...

    @async_version_of(list_checkpoints)
    def alist_checkpoints(self) -> None: ...

    def restore_checkpoint(
        self,
        session_id: str,
        checkpoint_id: str,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int: ...

    @async_version_of(restore_checkpoint)
    def arestore_checkpoint(self) -> None: ...

    def branch_session(
        self,
        session_id: str,
        checkpoint_id: str | None = None,
        *,
        new_session_id: str | None = None,
        message_index: int | None = None,
        title: str | None = None,
    ) -> SessionState: ...

    @async_version_of(branch_session)
    def abranch_session(self) -> None: ...

    def delete_checkpoint(self, session_id: str, checkpoint_id: str) -> bool: ...

    @async_version_of(delete_checkpoint)
    def adelete_checkpoint(self) -> None: ...

    def prune_checkpoints(self, session_id: str, *, keep: int) -> int: ...

    @async_version_of(prune_checkpoints)
    def aprune_checkpoints(self) -> None: ...

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

    @async_version_of(start_run)
    def astart_run(self) -> None: ...

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

    @async_version_of(update_run)
    def aupdate_run(self) -> None: ...

    def get_current_run(self, session_id: str) -> Run | None: ...

    @async_version_of(get_current_run)
    def aget_current_run(self) -> None: ...

    def list_runs(self, session_id: str, *, limit: int = 50, offset: int = 0) -> list[Run]: ...

    @async_version_of(list_runs)
    def alist_runs(self) -> None: ...

    def add_sub_session_refs(
        self, session_id: str, refs: Iterable[SubSessionRef | Mapping[str, Any]]
    ) -> None: ...

    @async_version_of(add_sub_session_refs)
    def aadd_sub_session_refs(self) -> None: ...

    def update_sub_session_ref(
        self,
        session_id: str,
        sub_session_id: str,
        *,
        status: str | None = None,
        output: Any = None,
        error: Any = None,
    ) -> SubSessionRef: ...

    @async_version_of(update_sub_session_ref)
    def aupdate_sub_session_ref(self) -> None: ...

    def get_sub_session_refs(self, session_id: str) -> list[SubSessionRef]: ...

    @async_version_of(get_sub_session_refs)
    def aget_sub_session_refs(self) -> None: ...

    def request_interrupt(
        self,
        session_id: str,
        *,
        kind: InterruptKind | str = "interrupt",
        reason: str | None = None,
        run_id: str | None = None,
    ) -> InterruptRequest: ...

    @async_version_of(request_interrupt)
    def arequest_interrupt(self) -> None: ...

    def check_interrupt(self, session_id: str, *, run_id: str | None = None) -> InterruptRequest | None: ...

    @async_version_of(check_interrupt)
    def acheck_interrupt(self) -> None: ...

    def clear_interrupt(self, session_id: str) -> bool: ...

    @async_version_of(clear_interrupt)
    def aclear_interrupt(self) -> None: ...

    # Human in the loop

    def add_pending_tool_calls(
        self,
        session_id: str,
        calls: Mapping[str, AnyToolCall],
        *,
        owner_session_id: str | None = None,
        fencing_token: int | None = None,
    ) -> None: ...

    @async_version_of(add_pending_tool_calls)
    def aadd_pending_tool_calls(self) -> None: ...

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
        actor: Actor | None = None,
        digest: str | None = None,
        input: Any = UNSET,
    ) -> Submission: ...

    @async_version_of(submit_tool_result)
    def asubmit_tool_result(self) -> None: ...

    def take_tool_results(
        self, session_id: str, *, expected_version: int | None = None, fencing_token: int | None = None
    ) -> dict[str, dict[str, Any]]: ...

    @async_version_of(take_tool_results)
    def atake_tool_results(self) -> None: ...

    def find_expired_pending(
        self, *, now: Timestamp | None = None, limit: int = 200
    ) -> list[PendingToolCall]: ...

    @async_version_of(find_expired_pending)
    def afind_expired_pending(self) -> None: ...

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

    @async_version_of(suspend)
    def asuspend(self) -> None: ...

    def resume(
        self, session_id: str, *, expected_version: int | None = None, fencing_token: int | None = None
    ) -> SessionState: ...

    @async_version_of(resume)
    def aresume(self) -> None: ...


_CALLS: Final = tuple(name for name in vars(StateStore) if hasattr(StateStore, f"a{name}"))

REQUIRED_METHODS: Final = (*_CALLS, *(f"a{name}" for name in _CALLS))
"""The names of all methods that a state store must have, the async ones included."""


def require_state_store(store: object) -> None:
    """Raise `TypeError` with the names of the missing methods if an object is not a state store."""
    missing = [name for name in REQUIRED_METHODS if not callable(getattr(store, name, None))]
    if missing:
        raise TypeError(f"{type(store).__name__} is not a state store; it lacks {', '.join(missing)}.")


class HeldLock(AbstractContextManager["HeldLock"], AbstractAsyncContextManager["HeldLock"], Protocol):
    """One term of a lock. It is a synchronous and asynchronous context manager that releases the lock."""

    @property
    def name(self) -> str: ...

    @property
    def owner(self) -> str: ...

    @property
    def fencing_token(self) -> int: ...

    @property
    def expires_at(self) -> datetime: ...

    def is_trusted(self) -> bool: ...

    def refresh(self, ttl_ms: Duration | None = None) -> datetime: ...

    def release(self) -> bool: ...

    async def arefresh(self, ttl_ms: Duration | None = None) -> datetime: ...

    async def arelease(self) -> bool: ...

    def keep_alive(self) -> AbstractContextManager[object]: ...


@runtime_checkable
class LockManager(Protocol):
    """Leases with fencing tokens, as `helix_store.testing.LockManagerContract` tests them."""

    def acquire(
        self, name: str, *, ttl_ms: Duration | None = None, owner: str | None = None
    ) -> HeldLock | None: ...

    def wait_acquire(
        self, name: str, *, timeout_ms: Duration, ttl_ms: Duration | None = None, owner: str | None = None
    ) -> HeldLock: ...

    def is_locked(self, name: str) -> bool: ...

    def get_active_locks(self) -> list[LockInfo]: ...

    def force_release(self, name: str) -> bool: ...

    async def aacquire(
        self, name: str, *, ttl_ms: Duration | None = None, owner: str | None = None
    ) -> HeldLock | None: ...

    async def await_acquire(
        self, name: str, *, timeout_ms: Duration, ttl_ms: Duration | None = None, owner: str | None = None
    ) -> HeldLock: ...

    async def ais_locked(self, name: str) -> bool: ...

    async def aget_active_locks(self) -> list[LockInfo]: ...

    async def aforce_release(self, name: str) -> bool: ...


class ChunkWriter(AbstractAsyncContextManager["ChunkWriter"], Protocol):
    """Writes chunks to one stream. It is an asynchronous context manager."""

    @property
    def stream_id(self) -> str: ...

    @property
    def run_id(self) -> str: ...

    @property
    def agent_name(self) -> str: ...

    async def write(self, chunk: dict[str, Any]) -> int: ...

    async def write_many(self, chunks: Iterable[dict[str, Any]]) -> int: ...

    async def heartbeat(self) -> None: ...

    async def close(self) -> None: ...


class ChunkReader(Protocol):
    """Iterates over the chunks after a position, with their sequences."""

    @property
    def stream_id(self) -> str: ...

    @property
    def status(self) -> StreamStatus: ...

    @property
    def position(self) -> int: ...

    def __aiter__(self) -> AsyncIterator[StoredChunk]: ...

    async def __anext__(self) -> StoredChunk: ...

    async def aclose(self) -> None: ...


@runtime_checkable
class StreamManager(Protocol):
    """The streams in which running sessions write chunks. `helix_store.testing.StreamManagerContract` tests
    an implementation.
    """

    async def create_writer(
        self, stream_id: str, run_id: str, agent_name: str, *, fencing_token: int | None = None
    ) -> ChunkWriter: ...

    def write_sync(
        self, stream_id: str, chunks: Iterable[dict[str, Any]], *, fencing_token: int | None = None
    ) -> int: ...

    async def create_reader(self, stream_id: str) -> AsyncIterator[dict[str, Any]] | None: ...

    async def create_resumable_reader(
        self, stream_id: str, *, from_sequence: int = 0
    ) -> ChunkReader | None: ...

    def read_after(self, stream_id: str, from_sequence: int, *, limit: int = 500) -> list[StoredChunk]: ...

    async def end_stream(
        self, stream_id: str, output: Any = None, *, fencing_token: int | None = None
    ) -> None: ...

    async def fail_stream(self, stream_id: str, error: Any, *, fencing_token: int | None = None) -> None: ...

    async def pause_stream(self, stream_id: str, *, fencing_token: int | None = None) -> None: ...

    async def reactivate_stream(self, stream_id: str, *, fencing_token: int | None = None) -> None: ...

    async def reset_stream(self, stream_id: str, *, fencing_token: int | None = None) -> None: ...

    async def get_info(self, stream_id: str) -> StreamInfo | None: ...

    async def delete_stream(self, stream_id: str) -> bool: ...

    async def prune(
        self,
        *,
        older_than: timedelta | datetime | None,
        keep_chunks: int | None = None,
        dry_run: bool = False,
    ) -> PrunedStreams: ...
