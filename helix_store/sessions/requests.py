"""Checked requests: what the public calls pass to a back end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

from helix_store.core import validation
from helix_store.core.dicts import AnyMessage
from helix_store.core.guards import Guard
from helix_store.core.limits import Limits
from helix_store.core.payloads import decode_all, encode_all
from helix_store.core.types import (
    UNSET,
    Message,
    RunStatus,
    SessionState,
    SessionStatus,
    StagedChanges,
    StepInfo,
    Unset,
)
from helix_store.exceptions import IntegrityFault, InvalidPayload
from helix_store.sessions.layout import EncodedState

__all__ = [
    "BranchRequest",
    "EncodedMessage",
    "EncodedRef",
    "NewSession",
    "RunUpdate",
    "SessionQuery",
    "StepRequest",
    "decode_messages",
    "decode_staged",
    "encode_messages",
    "without_thinking",
]

_THINKING_PARTS: Final = frozenset({"thinking", "reasoning"})


class EncodedMessage(NamedTuple):
    role: str
    text: str


def encode_messages(messages: Sequence[AnyMessage], limits: Limits) -> list[EncodedMessage]:
    """Check and encode messages in order. Raises `InvalidPayload` and `LimitExceeded` with its path."""
    roles = validation.messages(messages)
    texts = encode_all(messages, limit=limits.max_message_bytes, name="max_message_bytes", path="/messages")
    return [EncodedMessage(role, text) for role, text in zip(roles, texts, strict=True)]


def decode_messages(texts: Sequence[str]) -> list[Message]:
    """Read stored messages. Raises `IntegrityFault`."""
    messages: list[Message] = decode_all(texts)
    for message in messages:
        if type(message) is not dict:
            raise IntegrityFault("A stored message is not a JSON object; other rows are not affected.")
    return messages


def decode_staged(texts: Iterable[str]) -> list[StagedChanges]:
    """Read stored staged changes. Raises `IntegrityFault`."""
    return [_staged(document) for document in decode_all(list(texts))]


def _staged(document: Any) -> StagedChanges:
    try:
        staged = StagedChanges.from_dict(document)
        is_sound = (
            type(staged.tool_call_id) is str
            and type(staged.patches) is list
            and type(staged.merge_changes) in (dict, type(None))
            and type(staged.timestamp) in (int, type(None))
        )
    except InvalidPayload:
        is_sound = False
    if not is_sound:
        raise IntegrityFault("Stored staged changes cannot be read; other rows are not affected.")
    return staged


def without_thinking(message: Message) -> Message:
    """The message without its ``thinking`` key and without content parts of type thinking or reasoning."""
    kept = {key: value for key, value in message.items() if key != "thinking"}
    if isinstance(kept.get("content"), list):
        kept["content"] = [part for part in kept["content"] if not _is_thinking(part)]
    return kept


def _is_thinking(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in _THINKING_PARTS


@dataclass(frozen=True, slots=True)
class NewSession:
    """A session to create. The back end finds its root, which is stored as a column only."""

    session_id: str
    encoded: EncodedState


@dataclass(frozen=True, slots=True)
class StepRequest:
    """A step to commit; afterwards the session has at most ``keep`` checkpoints of steps."""

    session_id: str
    checkpoint_id: str
    state: SessionState
    encoded: EncodedState
    messages: Sequence[EncodedMessage]
    step: StepInfo
    guard: Guard
    limits: Limits
    run_id: str | None = None
    operation_id: str | None = None
    keep: int | None = None

    @property
    def name(self) -> str:
        """What a repeat looks for: the operation id, or else the id of the checkpoint."""
        return self.operation_id or self.checkpoint_id

    def digest(self) -> str:
        """A digest of the payload, which a repeat under the same operation id must have too."""
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


@dataclass(frozen=True, slots=True)
class RunUpdate:
    """``None`` leaves ``step_count``, ``completion_reason`` or ``error`` unchanged."""

    status: RunStatus
    step_count: int | None = None
    completion_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EncodedRef:
    """A sub-session ref whose payload fields are texts."""

    sub_session_id: str
    agent_type: str
    parent_tool_call_id: str | None
    status: str
    location: str
    remote: str | None
    output: str | None
    error: str | None


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
