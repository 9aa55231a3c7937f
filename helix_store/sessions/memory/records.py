"""The records of the in-memory store. They hold strings and immutable values, so a shallow copy is enough."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple

from helix_store.core import moments
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
    StepCommit,
)
from helix_store.sessions.layout import EncodedState
from helix_store.sessions.reading import checkpoint_state, current_state, head_values
from helix_store.sessions.requests import EncodedMessage, EncodedRef
from helix_store.sessions.rules import is_stale, written_columns


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
    staged: dict[tuple[str, str], str] = field(default_factory=dict)
    operations: dict[str, StoredOperation] = field(default_factory=dict)
    runs: dict[str, StoredRun] = field(default_factory=dict)
    refs: dict[str, EncodedRef] = field(default_factory=dict)
    snapshots: dict[str, Any] = field(default_factory=dict)
    """The snapshots of the session, which the package `checkpointers` writes and reads."""
    posts: dict[str, StoredPost] = field(default_factory=dict)
    interrupt: InterruptRequest | None = None

    @classmethod
    def new(cls, session_id: str, encoded: EncodedState) -> SessionRecord:
        now = moments.now()
        columns = {
            **encoded.columns,
            "approved_tool_calls": None,
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
        columns = written_columns(encoded, self.columns)
        self.payload = encoded.payload
        self.envelope = encoded.envelope
        return self.write(**columns)

    def _detached_columns(self) -> Mapping[str, Any]:
        return {
            **self.columns,
            "tags": self.columns["tags"].copy(),
            "metadata": self.columns["metadata"].copy(),
        }
