"""The records of sessions in the memory of one process, and the part of it that a tenant has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from django.dispatch import Signal

from helix_store import conf
from helix_store.core import moments
from helix_store.core.limits import Limits
from helix_store.core.payloads import decode
from helix_store.core.posts import Post
from helix_store.core.types import (
    Checkpoint,
    CheckpointHead,
    InterruptRequest,
    Run,
    RunStatus,
    SessionHead,
    SessionState,
    SessionStatus,
    StepCommit,
)
from helix_store.core.validation import Guard
from helix_store.engine.memory import MemoryRows, MemoryTable, MemoryWorld
from helix_store.exceptions import IntegrityFault, SessionNotFound
from helix_store.locks import LockTable
from helix_store.sessions.effects import StoredEffect
from helix_store.sessions.runs import is_stale
from helix_store.sessions.state import (
    EncodedMessage,
    EncodedRef,
    EncodedState,
    checkpoint_state,
    current_state,
    head_values,
    written_columns,
)
from helix_store.sessions.tool_calls import StoredDecision, ToolCalls
from helix_store.signals import send_signals, session_waiting, signals_of_status
from helix_store.streams.manager import StreamTable


class StoredMessage(NamedTuple):
    role: str
    text: str
    created_at: datetime


def stored_messages(messages: Iterable[EncodedMessage], created_at: datetime) -> list[StoredMessage]:
    return [StoredMessage(message.role, message.text, created_at) for message in messages]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    head: CheckpointHead
    version: int
    encoded: EncodedState

    def state(self, session_created_at: datetime) -> SessionState:
        return checkpoint_state(
            self.encoded.payload,
            self.encoded.envelope,
            session_id=self.head.session_id,
            version=self.version,
            message_count=self.head.message_count,
            created_at=session_created_at,
            updated_at=self.head.created_at,
        )

    def value(self, session_created_at: datetime) -> Checkpoint:
        head = {field.name: getattr(self.head, field.name) for field in fields(self.head)}
        return Checkpoint(**head, state=self.state(session_created_at))


@dataclass(frozen=True, slots=True)
class StoredOperation:
    """``received`` contains the messages that the commit received, as text."""

    digest: str
    commit: StepCommit
    received: list[str]


@dataclass(frozen=True, slots=True)
class StoredPost:
    """``post`` has no message: the message is a payload, which is stored as text."""

    post: Post
    text: str | None
    digest: str

    @property
    def due_at(self) -> datetime:
        return self.post.not_before or self.post.posted_at

    def value(self) -> Post:
        return self.post if self.text is None else replace(self.post, message=decode(self.text))


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run and its error. ``run`` itself has no error, because the error is a payload stored as text."""

    run: Run
    fencing_token: int | None
    error: str | None = None
    refused_usd: int | None = None
    """What a budget refused, in the smallest unit of dollars."""
    refused_tokens: int | None = None

    @property
    def is_running(self) -> bool:
        return self.run.status is RunStatus.RUNNING

    def value(self) -> Run:
        return self.run if self.error is None else replace(self.run, error=decode(self.error))


@dataclass(slots=True)
class SessionRecord:
    """One session. A published record never changes: a write changes a `draft`, which replaces the record.

    ``columns`` holds the columns of the session's head. Checkpoints, runs, refs and snapshots are in the
    order in which they were created.
    """

    columns: dict[str, Any]
    payload: str
    envelope: str
    messages: list[StoredMessage] = field(default_factory=list)
    checkpoints: dict[str, StoredCheckpoint] = field(default_factory=dict)
    newest_step: CheckpointHead | None = None
    """The step with which the history ends, whose checkpoint may have been deleted."""
    staged: dict[tuple[str, str], str] = field(default_factory=dict)
    operations: dict[str, StoredOperation] = field(default_factory=dict)
    runs: dict[str, StoredRun] = field(default_factory=dict)
    refs: dict[str, EncodedRef] = field(default_factory=dict)
    snapshots: dict[str, Any] = field(default_factory=dict)
    """The snapshots of the session, which the package `checkpointers` writes and reads."""
    posts: dict[str, StoredPost] = field(default_factory=dict)
    decisions: list[StoredDecision] = field(default_factory=list)
    effects: dict[str, StoredEffect] = field(default_factory=dict)
    interrupt: InterruptRequest | None = None

    @classmethod
    def new(cls, session_id: str, encoded: EncodedState) -> SessionRecord:
        now = moments.now()
        columns = {
            **encoded.columns,
            "live_decisions": None,
            "session_id": session_id,
            "version": 1,
            "message_count": 0,
            "next_post_at": None,
            "created_at": now,
            "updated_at": now,
        }
        return cls(columns, encoded.payload, encoded.envelope)

    def draft(self) -> SessionRecord:
        return SessionRecord(*(copy(getattr(self, field.name)) for field in fields(self)))

    @property
    def session_id(self) -> str:
        return str(self.columns["session_id"])

    @property
    def version(self) -> int:
        return int(self.columns["version"])

    @property
    def running_run(self) -> StoredRun | None:
        return next((run for run in self.runs.values() if run.is_running), None)

    @property
    def running_run_id(self) -> str | None:
        running = self.running_run
        return None if running is None else running.run.run_id

    @property
    def pending_interrupt(self) -> InterruptRequest | None:
        stored = self.interrupt
        return None if stored is None or is_stale(stored, self.running_run_id) else stored

    @property
    def latest_checkpoint(self) -> StoredCheckpoint | None:
        return next(reversed(self.checkpoints.values()), None)

    def keep_checkpoints(self, keep: int) -> int:
        """Delete all but the newest checkpoints and return how many were deleted."""
        excess = max(len(self.checkpoints) - keep, 0)
        for checkpoint_id in list(islice(self.checkpoints, excess)):
            del self.checkpoints[checkpoint_id]
        return excess

    @property
    def is_at_rest(self) -> bool:
        """True if nothing has arrived since the last turn, which `end_turn` ended, except perhaps answers."""
        newest = next(reversed(self.runs.values()), None)
        step = self.newest_step
        due_at = self.columns["next_post_at"]
        return (
            newest is not None
            and step is not None
            and self.columns["status"] == SessionStatus.ACTIVE
            and (newest.run.status, newest.run.completion_reason) == (RunStatus.COMPLETED, "end_turn")
            and step.run_id == newest.run.run_id
            and step.step_count == newest.run.step_count
            and step.message_count == len(self.messages)
            and (due_at is None or due_at > moments.now())
            and not any(each.is_decided_after(newest.run) for each in self.effects.values())
        )

    @property
    def open_calls(self) -> dict[str, dict[str, Any]] | None:
        """The calls that somebody still has to answer; ``None`` if they cannot be read."""
        try:
            pending, live = self.columns["pending_client_tool_calls"], self.columns["live_decisions"]
            return ToolCalls.stored(pending, None, live).open(self.decisions)
        except IntegrityFault:
            return None

    def state(self) -> SessionState:
        return current_state(self._detached_columns(), self.payload, self.envelope)

    def head(self) -> SessionHead:
        return SessionHead(**head_values(self._detached_columns()))

    def write(self, **columns: Any) -> int:
        """Set columns, increment the version and return it."""
        self.columns.update(
            columns,
            version=self.version + 1,
            message_count=len(self.messages),
            updated_at=moments.now(),
        )
        return self.version

    def write_state(self, encoded: EncodedState) -> int:
        """Write a whole state, as `write` does. Raises `ConflictError` if the mode differs."""
        columns = written_columns(encoded, self.columns, lambda _: self.decisions)
        self.payload = encoded.payload
        self.envelope = encoded.envelope
        return self.write(**columns)

    def _detached_columns(self) -> Mapping[str, Any]:
        return {
            **self.columns,
            "tags": self.columns["tags"].copy(),
            "metadata": self.columns["metadata"].copy(),
        }


T = TypeVar("T", bound=MemoryTable)

_UNGUARDED = Guard()


class SessionTable(MemoryRows[SessionRecord]):
    """The sessions of a tenant by id, in the order in which they were created."""


class TenantScope:
    """The part of a world that one store uses: the tables of its tenant, and its limits."""

    def __init__(self, world: MemoryWorld, *, tenant: str, limits: Limits | None) -> None:
        self.world = world
        self.lock = world.lock
        self.sessions = world.table(SessionTable, tenant)
        self.tenant = tenant
        self._locks = world.table(LockTable, tenant)
        self._streams = world.table(StreamTable, tenant)
        self._given_limits = limits

    def table(self, kind: type[T]) -> T:
        """Return this tenant's table of a given kind."""
        return self.world.table(kind, self.tenant)

    @property
    def limits(self) -> Limits:
        return conf.limits(self._given_limits)

    def find(self, session_id: str) -> SessionRecord | None:
        """Return the published record, which can be read without the lock because it never changes."""
        self.lock.check_task()
        return self.sessions.get(session_id)

    def require(self, session_id: str) -> SessionRecord:
        record = self.find(session_id)
        if record is None:
            raise SessionNotFound(session_id)
        return record

    @contextmanager
    def writing(self, session_id: str, guard: Guard = _UNGUARDED) -> Iterator[SessionRecord]:
        """Yield a draft of the session to modify; publish it at the end, or drop it after an exception.

        Every status change goes through this method, which also announces it.
        """
        with self.lock:
            published = self.require(session_id)
            draft = published.draft()
            self.check_guard(draft, guard)
            yield draft
            self.sessions[session_id] = draft
        before, after = published.columns["status"], draft.columns["status"]
        self.announce(session_id, signals_of_status(before, after, draft.columns["failure_reason"]))

    def announce_waiting(self, session_id: str, root_session_id: str, opened: list[str]) -> None:
        """Send the signal that calls were opened, if there are any. Call this without the lock."""
        if opened:
            self.announce(
                session_id, [session_waiting], tool_call_ids=opened, root_session_id=root_session_id
            )

    def announce(self, session_id: str, signals: Sequence[Signal], **details: Any) -> None:
        """Send signals after the open transaction is kept, or immediately if there is none.

        Call this without the lock: a receiver may wait for another thread that writes.
        """
        if signals:
            details |= {"signals": signals, "session_id": session_id, "tenant": self.tenant}
            self.world.after_commit(partial(send_signals, None, **details))

    def is_held(self, session_id: str, token: int | None) -> bool:
        """Return whether the session's lock is held with this token."""
        return self._locks.is_held(session_id, token)

    def is_locked(self, session_id: str) -> bool:
        lock = self._locks.get(session_id)
        return lock is not None and lock.lasts

    def is_abandoned(self, record: SessionRecord) -> bool:
        """Return whether the worker of the running run is gone, as in `sessions.runs`."""
        running, lock = record.running_run, self._locks.get(record.session_id)
        if running is None or running.fencing_token is None or lock is None:
            return False
        return lock.token >= running.fencing_token and not lock.lasts

    def check_guard(self, record: SessionRecord, guard: Guard) -> None:
        """Check the conditions of a write. Raises `FencedOutError` and `StaleStateError`."""
        self.check_fence(record.session_id, guard)
        guard.check_version(record.version)

    def check_fence(self, session_id: str, guard: Guard) -> None:
        """Raises `FencedOutError`."""
        self._locks.check_fence(session_id, guard)

    def forget(self, session_id: str, *, keep_usage: bool = False) -> None:
        """Delete a session with all its data. The lock must be held."""
        stream_id = self.sessions.pop(session_id).columns["stream_id"]
        others = (record.columns["stream_id"] for record in self.sessions.values())
        if stream_id in self._streams and stream_id not in others:
            self._streams.forget(stream_id)
        self.world.session_is_gone(self.tenant, session_id, keep_usage=keep_usage)


class MemoryOperations:
    """A group of operations on the sessions of one tenant."""

    def __init__(self, scope: TenantScope) -> None:
        self._scope = scope
