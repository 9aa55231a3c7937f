"""The operations of a state store's back end, and the base class of the public calls.

A back end receives checked arguments, valid ids and encoded payloads. Every write is atomic, takes the
session's lock first and raises `SessionNotFound` if the session is unknown. A returned version is the new
version. Session ids belong to the back end's tenant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol

from helix_store import conf
from helix_store.core.approvals import ApprovedCall
from helix_store.core.guards import Guard
from helix_store.core.limits import Limits
from helix_store.core.posts import DuePost, Post, PostState
from helix_store.core.types import (
    Checkpoint,
    CheckpointHead,
    InterruptKind,
    InterruptRequest,
    PendingToolCall,
    Run,
    SessionHead,
    SessionState,
    SessionStatus,
    StagedChanges,
    StatusChange,
    StatusConflict,
    StepCommit,
    Submission,
    SubSessionRef,
)
from helix_store.sessions.answers import Answer
from helix_store.sessions.layout import EncodedState
from helix_store.sessions.posts import NewPost
from helix_store.sessions.requests import (
    BranchRequest,
    EncodedMessage,
    EncodedRef,
    NewSession,
    RunUpdate,
    SessionQuery,
    StagedRow,
    StepRequest,
)
from helix_store.sessions.rules import Suspension

__all__ = [
    "Backend",
    "CheckpointOperations",
    "MessageOperations",
    "PostOperations",
    "RunOperations",
    "SessionOperations",
    "StagingOperations",
    "StepOperations",
    "StoreCalls",
    "WaitingOperations",
]

Counter = Literal["step_count", "resume_count"]


class SessionOperations(Protocol):
    def create(self, new: NewSession) -> SessionState: ...

    def exists(self, session_id: str) -> bool: ...

    def load(self, session_id: str) -> SessionState | None: ...

    def save(self, session_id: str, encoded: EncodedState, guard: Guard) -> int: ...

    def delete(self, session_id: str, *, keep_usage: bool) -> int: ...

    def update_status(self, session_id: str, status: SessionStatus, failure_reason: str | None) -> int: ...

    def compare_and_set_status(
        self,
        session_id: str,
        expected: frozenset[SessionStatus],
        status: SessionStatus,
        failure_reason: str | None,
        guard: Guard,
    ) -> StatusChange | StatusConflict: ...

    def increment(self, session_id: str, counter: Counter) -> int: ...

    def merge_custom_state(
        self, session_id: str, changes: Mapping[str, Any], array_replacements: frozenset[str], guard: Guard
    ) -> list[str]: ...

    def select(self, query: SessionQuery) -> tuple[list[SessionHead], int | None, bool]:
        """Return the page, the total if the query counts, and whether more sessions follow."""
        ...


class MessageOperations(Protocol):
    def append(self, session_id: str, messages: Sequence[EncodedMessage], guard: Guard) -> int:
        """Append messages and return the new message count."""
        ...

    def page(
        self, session_id: str, *, offset: int, limit: int | None, descending: bool
    ) -> tuple[list[str], int]:
        """Return the texts of the page, and the number of messages of the session."""
        ...

    def after(self, session_id: str, sequence: int, limit: int) -> list[str]:
        """Return the texts of at most ``limit`` messages after a sequence."""
        ...

    def count(self, session_id: str) -> int: ...

    def truncate(self, session_id: str, keep: int, guard: Guard) -> int:
        """Truncate the history and return the version, unchanged if ``keep`` reaches the end."""
        ...


class StagingOperations(Protocol):
    def stage(self, session_id: str, step_id: str, tool_call_id: str, text: str) -> StagedRow | None:
        """Stage a change, and return its row if the step can promote the row without reading it."""
        ...

    def staged(self, session_id: str, step_id: str) -> list[StagedChanges]: ...

    def promote(self, session_id: str, step_id: str, guard: Guard) -> int: ...

    def discard(self, session_id: str, step_id: str) -> int: ...


class StepOperations(Protocol):
    def commit(self, request: StepRequest) -> StepCommit: ...


class CheckpointOperations(Protocol):
    def get(self, session_id: str, checkpoint_id: str) -> Checkpoint | None: ...

    def latest(self, session_id: str) -> Checkpoint | None: ...

    def select(
        self, session_id: str, *, limit: int, before_version: int | None
    ) -> tuple[list[CheckpointHead], int, int | None]:
        """Return the page (newest first), the total, and the next page's ``before_version``, if any."""
        ...

    def restore(self, session_id: str, checkpoint_id: str, guard: Guard) -> int: ...

    def branch(self, request: BranchRequest) -> SessionState: ...

    def delete(self, session_id: str, checkpoint_id: str) -> bool: ...

    def prune(self, session_id: str, keep: int) -> int: ...


class RunOperations(Protocol):
    def start_run(
        self, session_id: str, run_id: str, *, start_sequence: int, supersede: bool, guard: Guard
    ) -> Run: ...

    def update_run(self, session_id: str, run_id: str, update: RunUpdate, guard: Guard) -> Run: ...

    def current_run(self, session_id: str) -> Run | None: ...

    def select_runs(self, session_id: str, *, limit: int, offset: int) -> list[Run]: ...

    def add_refs(self, session_id: str, refs: Sequence[EncodedRef]) -> None: ...

    def update_ref(
        self, session_id: str, sub_session_id: str, changes: Mapping[str, str]
    ) -> SubSessionRef: ...

    def select_refs(self, session_id: str) -> list[SubSessionRef]: ...

    def request_interrupt(
        self, session_id: str, kind: InterruptKind, reason: str | None, run_id: str | None
    ) -> InterruptRequest: ...

    def check_interrupt(self, session_id: str, run_id: str | None) -> InterruptRequest | None: ...

    def clear_interrupt(self, session_id: str) -> bool: ...


class WaitingOperations(Protocol):
    def add_calls(
        self, session_id: str, calls: Mapping[str, dict[str, Any]], owner_id: str, guard: Guard
    ) -> None:
        """Add pending calls to the owner, and record the owner on the root of both sessions.

        The guard's fence belongs to ``session_id``.
        """
        ...

    def submit_answer(
        self, session_id: str, tool_call_id: str, answer: Answer, *, submitted_at: int
    ) -> Submission: ...

    def approved_call(self, session_id: str, tool_call_id: str) -> tuple[int, ApprovedCall]:
        """Return the version of the session and the approved call."""
        ...

    def take_answers(self, session_id: str, guard: Guard) -> dict[str, Any]: ...

    def overdue_calls(self, now: datetime | None, limit: int) -> list[PendingToolCall]:
        """Return calls ordered by deadline; ``now=None`` means the time of the back end's clock."""
        ...

    def suspend(self, session_id: str, suspension: Suspension, guard: Guard) -> int: ...

    def resume(self, session_id: str, guard: Guard) -> SessionState: ...


class PostOperations(Protocol):
    def post(self, session_id: str, new: NewPost, most: int) -> Post:
        """Store a post if fewer than ``most`` are waiting, or return the existing one with its key."""
        ...

    def select(self, session_id: str, *, states: Sequence[PostState], after: int, limit: int) -> list[Post]:
        """Return the posts after a sequence."""
        ...

    def withdraw(self, session_id: str, post_id: str) -> bool: ...

    def receive(self, session_id: str, limit: int | None, guard: Guard) -> list[str]:
        """Return the texts of the received messages."""
        ...

    def due(self, limit: int) -> list[DuePost]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """All operations of a back end, by subject."""

    sessions: SessionOperations
    messages: MessageOperations
    staging: StagingOperations
    steps: StepOperations
    checkpoints: CheckpointOperations
    runs: RunOperations
    waiting: WaitingOperations
    posts: PostOperations


class StoreCalls:
    """The base of the public calls, for one tenant. ``limits`` replaces ``HELIX_STORE["LIMITS"]``."""

    def __init__(self, backend: Backend, *, tenant: str, limits: Limits | None) -> None:
        self._backend = backend
        self._tenant = tenant
        self._given_limits = limits

    @property
    def tenant(self) -> str:
        return self._tenant

    @property
    def limits(self) -> Limits:
        return conf.limits(self._given_limits)
