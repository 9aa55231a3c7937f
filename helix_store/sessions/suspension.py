"""A session that waits: what is put aside for whoever goes on with it, and when it may go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.core.payloads import encode
from helix_store.core.types import SessionState, SessionStatus
from helix_store.exceptions import ConflictError, InvalidPayload
from helix_store.sessions.layout import suspension_kind

__all__ = ["RESUMED_COLUMNS", "Suspension", "checked_suspension", "require_suspended", "resumed_state"]

_RESUMABLE: Final = frozenset({SessionStatus.PAUSED, SessionStatus.INTERRUPTED})

RESUMED_COLUMNS: Final[dict[str, Any]] = {
    "status": SessionStatus.ACTIVE.value,
    "suspension_kind": None,
    "suspension_context": None,
    "suspended_awaiting_children": None,
    "suspended_step_id": None,
    "tracing_context": None,
    "expires_at": None,
}
"""What resuming writes. The expiry was that of the wait: a session that goes on must not be cleaned up."""


@dataclass(frozen=True, slots=True)
class Suspension:
    """A checked suspension: ``columns`` of the head, and the calls that are asked in the same write."""

    kind: str
    columns: dict[str, Any]
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)

    def require_allowed(self, status: str) -> None:
        """Raise `ConflictError` for a session that has ended: it may not wait, and so come back."""
        if SessionStatus(status).is_terminal:
            raise ConflictError(f"The session is {status}; a session that has ended cannot be suspended.")


def checked_suspension(
    *,
    kind: Any,
    context: Any,
    calls: dict[str, dict[str, Any]],
    awaiting_children: Any,
    step_id: Any,
    tracing: Any,
    expires_at: Any,
    limits: Limits,
) -> Suspension:
    """The columns of a suspension; without ``tracing`` or ``expires_at`` what is there stays.

    Raises `InvalidPayload` and `LimitExceeded`.
    """
    kind = suspension_kind(kind, "kind")
    columns: dict[str, Any] = {
        "status": SessionStatus.PAUSED.value,
        "suspension_kind": kind,
        "suspension_context": _encoded("context", context, dict, limits),
        "suspended_awaiting_children": None,
        "suspended_step_id": validation.optional_identifier(step_id, "step_id"),
    }
    if awaiting_children is not None:
        columns["suspended_awaiting_children"] = _encoded(
            "awaiting_children", awaiting_children, list, limits
        )
    if tracing is not None:
        columns["tracing_context"] = _encoded("tracing", tracing, dict, limits)
    if expires_at is not None:
        milliseconds = validation.epoch_milliseconds(expires_at, "expires_at")
        columns["expires_at"] = validation.milliseconds_to_datetime(milliseconds)
    return Suspension(kind, columns, calls)


def _encoded(name: str, value: Any, expected: type, limits: Limits) -> str:
    if type(value) is not expected:
        raise InvalidPayload(path=f"/{name}", reason=f"expected a {expected.__name__}")
    return encode(value, limit=limits.max_state_bytes, path=f"/{name}")


def require_suspended(columns: Mapping[str, Any]) -> None:
    """Raise `ConflictError` unless the session waits: paused or interrupted, with something put aside."""
    waits = any(
        columns[name] is not None
        for name in (
            "suspension_kind",
            "suspension_context",
            "suspended_awaiting_children",
            "suspended_step_id",
        )
    )
    if not waits or columns["status"] not in _RESUMABLE:
        raise ConflictError(
            "The session is not suspended: it was resumed already, it has ended, or it never waited."
        )


def resumed_state(state: SessionState, *, version: int, at: datetime) -> SessionState:
    """The state after resuming, still holding the continuation that the store has cleared."""
    state.status = SessionStatus.ACTIVE
    state.resume_count += 1
    state.expires_at = None
    state.version = version
    state.updated_at = at
    return state
