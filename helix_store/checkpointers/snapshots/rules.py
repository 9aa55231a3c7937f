"""Value objects of the snapshot checkpointer, and what it accepts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.core.payloads import (
    decode,
    encode,
    size_of,
)
from helix_store.core.serialization import Serializable
from helix_store.exceptions import (
    IntegrityFault,
    InvalidPayload,
    InvalidQuery,
)

__all__ = [
    "SNAPSHOT_AGENT_TYPE",
    "CheckpointMeta",
    "ClaimTerm",
    "EncodedSnapshot",
    "encode_snapshot",
    "optional_count",
    "read_snapshot",
]

SNAPSHOT_AGENT_TYPE: Final = "snapshot"
"""The agent type of the session that the first snapshot of an unknown thread creates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta(Serializable):
    """A listed snapshot: everything but the payload."""

    id: str
    thread_id: str
    created_at: datetime
    agent_snapshot_version: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimTerm:
    """What a back end hands out: who may resume a snapshot, and until when."""

    thread_id: str
    checkpoint_id: str
    owner: str
    token: int
    expires_at: datetime
    snapshot: dict[str, Any]


class EncodedSnapshot(NamedTuple):
    text: str
    version: int
    size_bytes: int


def encode_snapshot(snapshot: Any, limits: Limits) -> EncodedSnapshot:
    """Check and encode a snapshot. Raises `InvalidPayload` and `LimitExceeded`."""
    if type(snapshot) is not dict:
        raise InvalidPayload(path="/snapshot", reason=f"expected a dict, got {type(snapshot).__name__}")
    version = validation.whole_number(snapshot.get("version"), "/snapshot/version", minimum=1)
    text = encode(snapshot, limit=limits.max_state_bytes, path="/snapshot")
    return EncodedSnapshot(text, version, size_of(text))


def read_snapshot(text: str) -> dict[str, Any]:
    """The snapshot of a stored text; `IntegrityFault` when it cannot be read."""
    snapshot = decode(text)
    if type(snapshot) is not dict:
        raise IntegrityFault("A stored snapshot is not a JSON object; other rows are not affected.")
    return snapshot


def optional_count(value: Any, name: str) -> int | None:
    """A whole number from 1, or ``None`` for no bound. Raises `InvalidQuery`."""
    if value is not None and (type(value) is not int or value < 1):
        raise InvalidQuery(f"{name} must be a whole number from 1, or None.", path=name)
    return value
