"""Value objects of the snapshot checkpointer, and its argument checks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.core.payloads import encode, size_of
from helix_store.core.serialization import Serializable
from helix_store.exceptions import InvalidPayload
from helix_store.sessions.requests import NewSession, root_session

SNAPSHOT_AGENT_TYPE: Final = "snapshot"
"""The agent type of the session that the first snapshot of an unknown thread creates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta(Serializable):
    """A listed snapshot, without its payload."""

    id: str
    thread_id: str
    created_at: datetime
    agent_snapshot_version: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimTerm:
    """The owner of a claimed snapshot, and the time when the claim expires."""

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


def new_thread(thread_id: str) -> NewSession:
    """Return the session that the first snapshot of an unknown thread creates."""
    return root_session(thread_id, SNAPSHOT_AGENT_TYPE)


def optional_count(value: Any, name: str) -> int | None:
    """Return a whole number of at least 1, or ``None`` for no bound. Raises `InvalidQuery`."""
    return None if value is None else validation.query_number(value, name, minimum=1)
