"""Checked requests: what the API hands to a back end after validation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, NamedTuple

from helix_store.core.guards import Guard
from helix_store.core.limits import Limits
from helix_store.core.types import (
    UNSET,
    SessionState,
    SessionStatus,
    StepInfo,
    Unset,
)
from helix_store.sessions.layout import EncodedState

__all__ = [
    "BranchRequest",
    "EncodedMessage",
    "NewSession",
    "SessionQuery",
    "StepRequest",
]


class EncodedMessage(NamedTuple):
    role: str
    text: str


@dataclass(frozen=True, slots=True)
class NewSession:
    """A session to be; the back end finds its root, which is a column and nothing else."""

    session_id: str
    encoded: EncodedState


@dataclass(frozen=True, slots=True)
class StepRequest:
    session_id: str
    state: SessionState
    encoded: EncodedState
    messages: Sequence[EncodedMessage]
    step: StepInfo
    guard: Guard
    limits: Limits
    run_id: str | None = None
    operation_id: str | None = None

    def digest(self) -> str:
        """What tells a repeat of an operation from another payload under the same id."""
        digest = hashlib.sha256()
        parts = (
            self.encoded.payload,
            self.encoded.envelope,
            self.step.step_id,
            str(self.step.step_count),
            str(self.step.stream_sequence),
            self.run_id or "",
            *(message.text for message in self.messages),
        )
        for part in parts:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class BranchRequest:
    session_id: str
    new_session_id: str
    checkpoint_id: str | None = None
    message_index: int | None = None
    title: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionQuery:
    """Filters are AND; ``None`` means no filter, except ``parent_session_id``: None = roots, UNSET = any."""

    agent_type: str | None = None
    statuses: frozenset[SessionStatus] | None = None
    user_id: str | None = None
    parent_session_id: str | Unset | None = UNSET
    root_session_id: str | None = None
    workspace_id: str | None = None
    tags: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    created_from: datetime | None = None
    created_to: datetime | None = None
    order_by: Literal["created_at", "updated_at"] = "updated_at"
    descending: bool = True
    limit: int = 50
    offset: int = 0
    after: tuple[datetime, str] | None = None
    count: bool = True
