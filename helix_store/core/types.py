"""Enumerations and value objects of the stores' API.

Results are frozen; ``SessionState`` is mutable (load, change, save). Each object has ``to_dict()``, which
returns plain JSON values under snake_case keys, and ``from_dict()``. Times named ``…_at`` are aware
datetimes, except ``expires_at``: epoch milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar
from uuid import UUID

from helix_store.core.payloads import Page, Serializable

__all__ = [
    "BRANCHED_FROM",
    "NON_TERMINAL_STATUSES",
    "SESSION_EXPIRED",
    "SUSPENDED_STATUSES",
    "TERMINAL_STATUSES",
    "UNSET",
    "Checkpoint",
    "CheckpointHead",
    "CheckpointPage",
    "CheckpointSource",
    "Duration",
    "InterruptKind",
    "InterruptRequest",
    "LockInfo",
    "MessagePage",
    "PendingToolCall",
    "RetentionPolicy",
    "Run",
    "RunStatus",
    "SessionHead",
    "SessionMode",
    "SessionPage",
    "SessionState",
    "SessionStatus",
    "StagedChanges",
    "StatusChange",
    "StatusConflict",
    "StepCommit",
    "StepInfo",
    "StreamStatus",
    "SubSessionRef",
    "Submission",
    "SubmissionOutcome",
    "Timestamp",
    "Unset",
    "UsageKind",
    "UserId",
]


JSON: TypeAlias = Any
"""A value that the payload gate accepts: dict with str keys, list, str, int, float, bool or None."""

Message: TypeAlias = dict[str, Any]
"""A JSON object with at least ``role``."""

Timestamp: TypeAlias = int | datetime
"""A time: epoch milliseconds, or an aware datetime."""

Duration: TypeAlias = int | timedelta
"""A duration: milliseconds, or a timedelta."""

UserId: TypeAlias = str | int | UUID
"""The id of a user: text, or the primary key of a Django user, which is stored as text."""

BRANCHED_FROM: Final = "branched_from"
"""The key in a branch's metadata that holds the id of its source session."""

SESSION_EXPIRED: Final = "session_expired"
"""The failure reason of a session that was not renewed or resumed before its expiry."""

T = TypeVar("T", bound=Serializable)


class Unset:
    """The type of `UNSET`, the default of arguments for which ``None`` is a value."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()


# --- Enumerations ----------------------------------------------------------------------------------


class SessionStatus(StrEnum):
    """The status of a session. ``is_terminal`` is true if the session has ended.

    Example::

        if session.load().status is SessionStatus.PAUSED:
            print("The session waits for an answer.")
        for head in store.list_sessions(status=SessionStatus.FAILED):
            print(head.session_id, head.failure_reason)
    """

    ACTIVE = "active"
    RUNNING = "running"
    PAUSED = "paused"
    INTERRUPTED = "interrupted"
    COMPLETED = "completed"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        return self in TERMINAL_STATUSES


TERMINAL_STATUSES: Final = (SessionStatus.COMPLETED, SessionStatus.FAILED)
NON_TERMINAL_STATUSES: Final = tuple(status for status in SessionStatus if not status.is_terminal)


class RunStatus(StrEnum):
    """The status of a run.

    Example::

        for run in store.sessions.list_runs("trip"):
            if run.status is RunStatus.FAILED:
                print(run.run_id, run.error)
    """

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    SUSPENDED_CLIENT_TOOL = "suspended_client_tool"
    SUSPENDED_AWAITING_CHILDREN = "suspended_awaiting_children"
    SUSPENDED_STEP_PARTIAL = "suspended_step_partial"

    @property
    def is_suspended(self) -> bool:
        return self in SUSPENDED_STATUSES


SUSPENDED_STATUSES: Final = (
    RunStatus.SUSPENDED_CLIENT_TOOL,
    RunStatus.SUSPENDED_AWAITING_CHILDREN,
    RunStatus.SUSPENDED_STEP_PARTIAL,
)


class SessionMode(StrEnum):
    """The mode of a session, which is written only once.

    Example::

        session = store.new_session("assistant", agent_type="support", mode=SessionMode.PERSISTENT)
        print(session.load().mode)
    """

    STANDARD = "standard"
    PERSISTENT = "persistent"


class UsageKind(StrEnum):
    """The kind of an entry in the usage ledger.

    Example::

        for entry in store.usage.get_entries("trip", kinds=UsageKind.TOKENS):
            print(entry.model, entry.tokens)
    """

    TOKENS = "tokens"
    TOOL = "tool"
    SUBAGENT = "subagent"
    CUSTOM = "custom"


class StreamStatus(StrEnum):
    """The status of a stream.

    Example::

        await store.streams.create_writer("advice", "run-1", "travel")
        info = await store.streams.get_info("advice")
        print(info.status is StreamStatus.ACTIVE)
    """

    ACTIVE = "active"
    PAUSED = "paused"
    ENDED = "ended"
    FAILED = "failed"


class CheckpointSource(StrEnum):
    """The reason for which a graph checkpoint was saved.

    Example::

        graphs = GraphCheckpointStore()
        checkpoint = graphs.save_checkpoint("trip", step=0, node_results={}, source=CheckpointSource.INPUT)
        print(graphs.fork(checkpoint.checkpoint_id).session_id)
    """

    INPUT = "input"
    LOOP = "loop"
    INTERRUPT = "interrupt"
    FORK = "fork"
    STEP = "step"


class InterruptKind(StrEnum):
    INTERRUPT = "interrupt"
    ABORT = "abort"


# --- Sessions --------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """What a store knows of a state that it has returned, beside the state itself. It is never stored."""

    origin: Any = None
    """The full payload from which the state was read, if the next one can be stored as changes since it."""
    cleared: Mapping[str, Any] | None = None
    """The values that a resume has returned and cleared, by the name of their field."""
    has_posts: bool = True
    """False if no posts could be due when the state was read."""
    has_waiting_posts: bool = True
    """False if no posts were waiting when the state was read, neither due ones nor later ones."""
    is_capped: bool = True
    """False if no budgets could apply to the session when the state was read."""
    intent: str | None = None
    """The text that represents the state in an operation's digest: a repeat starts from a later state."""
    claimed: frozenset[str] | None = None
    """The approvals whose answers in the state may be the agent's own; ``None`` if the store did not look."""


NOT_LOADED: Final = Loaded()


class _WithLoaded(Serializable):
    """A base class with a private record that is not a field, just as a model instance has its ``_state``."""

    __slots__ = ("_loaded",)
    _loaded: Loaded


@dataclass(slots=True, kw_only=True)
class SessionState(_WithLoaded):
    """The whole state of one session, without its messages.

    The store sets ``version``, ``message_count``, ``created_at`` and ``updated_at``; a save ignores their
    values in the given state. ``expires_at`` is epoch milliseconds.

    Example::

        state = store.sessions.load_state("trip")
        state.custom_state["seat"] = "12A"
        store.sessions.save_state("trip", state, expected_version=state.version)
    """

    session_id: str
    agent_type: str
    status: SessionStatus = SessionStatus.ACTIVE
    version: int = 0
    step_count: int = 0
    resume_count: int = 0
    mode: SessionMode | None = None
    custom_state: dict[str, Any] = field(default_factory=dict)
    output: JSON = None
    error: JSON = None
    failure_reason: str | None = None
    user_id: str | None = None
    tags: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    title: str | None = None
    workspace_id: str | None = None
    directory: str = ""
    parent_session_id: str | None = None
    root_session_id: str | None = None
    stream_id: str | None = None
    message_count: int = 0
    pending_client_tool_calls: dict[str, Any] = field(default_factory=dict)
    completed_client_tool_calls: dict[str, Any] = field(default_factory=dict)
    client_tool_call_ownership: dict[str, Any] = field(default_factory=dict)
    suspension_kind: RunStatus | None = None
    suspension_context: dict[str, Any] | None = None
    suspended_awaiting_children: list[Any] | None = None
    suspended_step_id: str | None = None
    tracing_context: dict[str, Any] | None = None
    expires_at: int | None = None
    workspace_refs: dict[str, Any] = field(default_factory=dict)
    created_at: datetime | None = None
    updated_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHead(Serializable):
    """A session in a list: a `SessionState` without the payloads.

    Example::

        for head in store.list_sessions(agent_type="planner"):
            print(head.session_id, head.status, head.title, head.updated_at)
    """

    session_id: str
    agent_type: str
    status: SessionStatus
    version: int
    step_count: int
    resume_count: int
    mode: SessionMode | None
    failure_reason: str | None
    user_id: str | None
    tags: list[str]
    metadata: dict[str, str]
    title: str | None
    workspace_id: str | None
    directory: str
    parent_session_id: str | None
    root_session_id: str | None
    stream_id: str | None
    message_count: int
    suspension_kind: RunStatus | None
    suspended_step_id: str | None
    expires_at: int | None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChange(Serializable):
    """The result of a successful compare-and-set.

    Example::

        result = store.sessions.compare_and_set_status("trip", ["active"], "paused")
        if result.ok:
            print("paused at version", result.new_version)
    """

    new_version: int
    ok: Literal[True] = True

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusConflict(Serializable):
    """The result of a failed compare-and-set, with the current status and version.

    Example::

        result = store.sessions.compare_and_set_status("trip", ["paused"], "active")
        if not result.ok:
            print("the session is", result.current_status, "at version", result.current_version)
    """

    current_status: SessionStatus
    current_version: int
    ok: Literal[False] = False

    def __bool__(self) -> bool:
        return False


# --- Steps and checkpoints -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepInfo(Serializable):
    """The id and the number of a step. A reader of the session's stream continues after ``stream_sequence``.

    Example::

        state = store.sessions.load_state("trip")
        info = StepInfo(step_id="step-2", step_count=state.step_count + 1)
        store.sessions.save_state_and_promote_staging("trip", state, [], info, expected_version=state.version)
    """

    step_id: str
    step_count: int
    stream_sequence: int = 0


@dataclass(frozen=True, slots=True)
class StepCommit(Serializable):
    """``received`` contains the messages of posts that the commit received.

    Example::

        with session.step() as step:
            step.say({"role": "assistant", "content": "You have seat 12A."})
        print(step.commit.checkpoint_id, step.commit.new_version)
    """

    checkpoint_id: str
    new_version: int
    received: list[Message] = field(default_factory=list, hash=False)


@dataclass(frozen=True, slots=True)
class StagedChanges(Serializable):
    """The changes of one tool call to ``custom_state``. If both forms are given, only patches are applied.

    ``timestamp`` is epoch milliseconds. It does not decide the order: changes are applied in staging order.

    Example::

        changes = StagedChanges(tool_call_id="call-1", merge_changes={"seat": "12A"})
        store.sessions.stage_changes("trip", "step-2", changes)
        store.sessions.promote_staging("trip", "step-2")
    """

    tool_call_id: str
    patches: list[Any] = field(default_factory=list)
    merge_changes: dict[str, Any] | None = None
    timestamp: Timestamp | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointHead(Serializable):
    """A checkpoint in a list: a `Checkpoint` without the state."""

    checkpoint_id: str
    session_id: str
    run_id: str | None
    step_id: str
    step_count: int
    status: SessionStatus
    message_count: int
    stream_sequence: int
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(CheckpointHead):
    """The result of a step: the state, and ``message_count``, the number of messages that it includes.

    Example::

        checkpoint = store.sessions.get_latest_checkpoint("trip")
        if checkpoint is not None:
            print(checkpoint.step_count, checkpoint.message_count, checkpoint.state.custom_state)
    """

    state: SessionState


# --- Runs, sub-sessions, interrupts ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Serializable):
    """One turn of a session.

    Example::

        run = store.sessions.list_runs("trip")[0]
        print(run.turn, run.status, run.step_count, run.error)
    """

    run_id: str
    session_id: str
    turn: int
    status: RunStatus
    step_count: int
    start_sequence: int
    started_at: datetime
    ended_at: datetime | None = None
    completion_reason: str | None = None
    error: JSON = None
    build: str | None = None
    """The ``BUILD`` of the settings when the run was started or last continued."""


@dataclass(frozen=True, slots=True)
class SubSessionRef(Serializable):
    """A sub-agent that a session started. ``location`` cannot be changed.

    Example::

        store.new_session("hotels", agent_type="searcher", parent_session_id="trip")
        ref = SubSessionRef(sub_session_id="hotels", agent_type="searcher", parent_tool_call_id="call-1")
        store.sessions.add_sub_session_refs("trip", [ref])
    """

    sub_session_id: str
    agent_type: str
    parent_tool_call_id: str | None = None
    status: str = "running"
    location: Literal["local", "remote"] = "local"
    remote: dict[str, Any] | None = None
    output: JSON = None
    error: JSON = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptRequest(Serializable):
    """A stored request to stop a session, which can then continue (``interrupt``) or not (``abort``).

    Example::

        store.sessions.request_interrupt("trip", reason="the user pressed stop")
        if (request := store.sessions.check_interrupt("trip")) is not None:
            print(request.kind, request.reason)
    """

    session_id: str
    kind: InterruptKind
    reason: str | None
    run_id: str | None
    requested_at: datetime


# --- Waiting -------------------------------------------------------------------------------------


class SubmissionOutcome(StrEnum):
    ACCEPTED = "accepted"
    RECORDED = "recorded"
    """One of several approvals is stored; the call stays open."""
    ALREADY_RECORDED = "already_recorded"
    CHANGED = "changed"
    """The call does not have the given digest; nothing is stored."""
    ALREADY_COMPLETED = "already_completed"
    UNKNOWN_TOOL_CALL = "unknown_tool_call"


STORED_ANSWERS: Final = frozenset({SubmissionOutcome.ACCEPTED, SubmissionOutcome.RECORDED})
"""The outcomes of answers that changed the session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission(Serializable):
    """The result of an answer. ``session_id`` is the session that owns the call, if there is one.

    Example::

        sessions = store.sessions
        submission = sessions.submit_tool_result("booking", "call-1", approved=True, approval_id="call-1")
        print(submission.outcome, submission.session_id)
    """

    outcome: SubmissionOutcome
    tool_call_id: str
    session_id: str | None = None
    new_version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingToolCall(Serializable):
    """A tool call without an answer. ``deadline`` is epoch milliseconds.

    Example::

        now = datetime.now(UTC)
        for call in store.sessions.find_expired_pending(now=now + timedelta(days=1)):
            print(call.session_id, call.tool_name, "must be answered within a day")
    """

    session_id: str
    tool_call_id: str
    tool_name: str
    deadline: int
    approval_id: str | None = None
    on_expiry: Any = None


# --- Pages -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPage(Serializable, Page[SessionHead]):
    """``total`` is ``None`` if the list was queried with ``count=False``.

    Example::

        page = store.list_sessions(user_id="ada", limit=20)
        print(page.total, [head.session_id for head in page])
        if page.has_more:
            page = store.list_sessions(user_id="ada", limit=20, cursor=page.next_cursor)
    """

    sessions: list[SessionHead]
    total: int | None
    offset: int
    limit: int
    has_more: bool
    next_cursor: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePage(Serializable, Page[Message]):
    """One page of a session's messages.

    Example::

        page = store.sessions.get_messages("trip", order="desc", limit=10)
        for message in page:
            print(message["role"], message["content"])
    """

    messages: list[Message]
    total: int
    has_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPage(Serializable, Page[CheckpointHead]):
    """One page of a session's checkpoints, newest first, without their states.

    Example::

        page = session.checkpoints()
        print(page.total, "checkpoints")
        print([checkpoint.step_count for checkpoint in page])
    """

    items: list[CheckpointHead]
    next_cursor: str | None
    total: int


def as_value(cls: type[T], value: T | Mapping[str, Any]) -> T:
    """Accept a value object or its dict."""
    return value if isinstance(value, cls) else cls.from_dict(value)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockInfo(Serializable):
    """A held lock.

    Example::

        with session.turn():
            for held in store.locks.get_active_locks():
                print(held.name, held.owner, held.expires_at)
    """

    name: str
    owner: str
    fencing_token: int
    expires_at: datetime


_LONGEST_DAYS: Final = 36_500


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """The rules of retention. The default keeps everything. Raises `ValueError` for an invalid rule."""

    sessions_idle_days: Mapping[str, float] = field(default_factory=dict)
    """Days by status: a tree is deleted once all of its sessions have been idle for that many days."""
    checkpoints_keep: int | None = None
    """The number of newest step checkpoints that each session keeps."""
    streams_ended_days: float | None = None
    """The number of days after the end of a stream at which its chunks are deleted."""
    usage_anonymise_days: float | None = None
    """The age in days at which a usage entry loses its user, session and run."""
    usage_drop_days: float | None = None
    """The age in days at which a usage entry is deleted."""
    budget_periods_days: float | None = None
    """The number of days for which a budget per day or month keeps the counters of ended periods."""
    operations_days: float | None = None
    """The number of days for which a repeated step or staged change is recognised as a repeat."""

    def __post_init__(self) -> None:
        if not isinstance(self.sessions_idle_days, Mapping):
            raise ValueError("sessions_idle_days must be a dict of days by status")
        for status, days in self.sessions_idle_days.items():
            if status not in list(SessionStatus):
                raise ValueError(
                    f"sessions_idle_days has no status {status!r}; the statuses are "
                    f"{', '.join(SessionStatus)}"
                )
            _check_days(f"sessions_idle_days[{str(status)!r}]", days)
        for name in (
            "streams_ended_days",
            "usage_anonymise_days",
            "usage_drop_days",
            "budget_periods_days",
            "operations_days",
        ):
            if getattr(self, name) is not None:
                _check_days(name, getattr(self, name))
        keep = self.checkpoints_keep
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError("checkpoints_keep must be None or a whole number of at least 1")
        anonymise, drop = self.usage_anonymise_days, self.usage_drop_days
        if anonymise is not None and drop is not None and anonymise >= drop:
            raise ValueError("usage_anonymise_days must be less than usage_drop_days")

    @property
    def keeps_everything(self) -> bool:
        return self == RetentionPolicy()


def _check_days(name: str, days: Any) -> None:
    if type(days) not in (int, float) or not 0 <= days <= _LONGEST_DAYS:
        raise ValueError(f"{name} must be a number of days from 0 to {_LONGEST_DAYS:,}")
