"""The errors of the package, under one root class.

The docstring of each class is its default message. Errors have attributes, can be pickled, and never contain
payload text, connection strings or the database's DETAIL.
"""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any, ClassVar, Final, Literal

__all__ = [
    "ApprovalUsed",
    "BudgetExceeded",
    "CheckpointNotFound",
    "ConflictError",
    "EffectUnknown",
    "FencedOutError",
    "HelixStoreError",
    "IdempotencyConflict",
    "IntegrityFault",
    "InvalidCursor",
    "InvalidPayload",
    "InvalidQuery",
    "LimitExceeded",
    "LockLostError",
    "NotApproved",
    "NotFoundError",
    "NotPermitted",
    "NotSupportedOnBackend",
    "OutcomeUnknown",
    "OutsideTransaction",
    "PatchError",
    "RunNotFound",
    "SessionBusy",
    "SessionEnded",
    "SessionErased",
    "SessionExists",
    "SessionNotFound",
    "StaleStateError",
    "StoreBusy",
    "StoreFull",
    "StoreTimeout",
    "StoreUnavailable",
    "StreamClosed",
    "StreamNotFound",
    "StreamTruncated",
    "TenantMoved",
    "TurnInterrupted",
    "UnsupportedIsolation",
]

Applied = Literal["no", "yes", "unknown"]

_LONGEST_SHOWN_ID: Final = 60


def shown_id(value: object) -> str:
    """Return an id for a message: escaped, in quotes, and cut after 60 characters."""
    text = str(value)
    return repr(text if len(text) <= _LONGEST_SHOWN_ID else f"{text[:_LONGEST_SHOWN_ID]}…")


def _pointer(path: str) -> str:
    """Return a path, or an argument's name, as a JSON pointer (RFC 6901); it is empty for the whole value."""
    return path if not path or path.startswith("/") else f"/{path}"


class HelixStoreError(Exception):
    """The store could not run the operation."""

    code: ClassVar[str] = "store_error"
    retryable: bool = False
    applied: Applied = "no"

    def __init__(self, message: str | None = None, **attributes: Any) -> None:
        self.attributes = attributes
        for name, value in attributes.items():
            setattr(self, name, value)
        super().__init__(message or self.default_message())

    @classmethod
    def default_message(cls) -> str:
        return (cls.__doc__ or cls.__name__).strip().splitlines()[0]

    @classmethod
    def _message_with(cls, value: str | None) -> str:
        """Return the default message with the id in place of "this id"."""
        message = cls.default_message()
        return message if value is None else message.replace("this id", f"the id {shown_id(value)}", 1)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), str(self), self.attributes))

    def to_dict(self) -> dict[str, Any]:
        """Return code, message, flags and attributes as plain values, for logs and HTTP responses."""
        return {
            "code": self.code,
            "message": str(self),
            "retryable": self.retryable,
            "applied": self.applied,
            **self.attributes,
        }


def _rebuild(cls: type[HelixStoreError], message: str, attributes: dict[str, Any]) -> HelixStoreError:
    error = cls.__new__(cls)
    HelixStoreError.__init__(error, message, **attributes)
    return error


# --- Unknown ids -----------------------------------------------------------------------------------


class NotFoundError(HelixStoreError):
    """Nothing exists with this id."""

    code = "not_found"


class SessionNotFound(NotFoundError):
    """There is no session with this id."""

    code = "session_not_found"
    session_id: str | None

    def __init__(self, session_id: str | None = None) -> None:
        super().__init__(self._message_with(session_id), session_id=session_id)


class CheckpointNotFound(NotFoundError):
    """The session has no checkpoint with this id."""

    code = "checkpoint_not_found"
    checkpoint_id: str | None

    def __init__(self, checkpoint_id: str | None = None) -> None:
        super().__init__(self._message_with(checkpoint_id), checkpoint_id=checkpoint_id)


class RunNotFound(NotFoundError):
    """The session has no run with this id."""

    code = "run_not_found"
    run_id: str | None

    def __init__(self, run_id: str | None = None) -> None:
        super().__init__(self._message_with(run_id), run_id=run_id)


class StreamNotFound(NotFoundError):
    """There is no stream with this id."""

    code = "stream_not_found"
    stream_id: str | None

    def __init__(self, stream_id: str | None = None) -> None:
        super().__init__(self._message_with(stream_id), stream_id=stream_id)


# --- Conflicts -------------------------------------------------------------------------------------


class ConflictError(HelixStoreError):
    """The write conflicts with what is stored; load the current state and decide again."""

    code = "conflict"


class SessionExists(ConflictError):
    """A session with this id already exists; choose another id or load that session."""

    code = "session_exists"
    session_id: str | None

    def __init__(self, session_id: str | None = None) -> None:
        super().__init__(self._message_with(session_id), session_id=session_id)


class IdempotencyConflict(ConflictError):
    """An operation with this id was recorded with another payload; use a new id for a new operation."""

    code = "idempotency_conflict"
    operation_id: str | None

    def __init__(self, operation_id: str | None = None) -> None:
        super().__init__(self._message_with(operation_id), operation_id=operation_id)


class NotPermitted(HelixStoreError):
    """This actor may not answer the call; nothing was stored."""

    code = "not_permitted"
    tool_call_id: str
    reason: Literal["permission", "requester"]
    permission: str | None

    def __init__(
        self, tool_call_id: str, reason: Literal["permission", "requester"], permission: str | None = None
    ) -> None:
        named = "its permission" if permission is None else f"the permission {shown_id(permission)}"
        needed = {
            "permission": f"it needs an active Django user with {named}",
            "requester": "it needs an actor who has not requested it",
        }
        # A reason that this version does not know, such as one of a newer version, must not hide the error.
        lacks = needed.get(reason, "it needs another actor")
        super().__init__(
            f"This actor may not answer the call {shown_id(tool_call_id)}: {lacks}.",
            tool_call_id=tool_call_id,
            reason=reason,
            permission=permission,
        )


class NotApproved(ConflictError):
    """The call is not approved; do not make it."""

    code = "not_approved"
    tool_call_id: str
    reason: Literal["rejected", "expired", "open", "unknown"]

    def __init__(self, tool_call_id: str, reason: Literal["rejected", "expired", "open", "unknown"]) -> None:
        super().__init__(
            f"The call {shown_id(tool_call_id)} is not approved ({reason}); do not make it.",
            tool_call_id=tool_call_id,
            reason=reason,
        )


class ApprovalUsed(ConflictError):
    """A committed step or an effect has used this approval; ask for another one."""

    code = "approval_used"
    tool_call_id: str
    step_id: str | None
    effect_id: str | None

    def __init__(self, tool_call_id: str, step_id: str | None = None, effect_id: str | None = None) -> None:
        user = f"step {shown_id(step_id or '')}" if effect_id is None else f"effect {shown_id(effect_id)}"
        super().__init__(
            f"The {user} has used the approval of the call {shown_id(tool_call_id)}; ask for another one.",
            tool_call_id=tool_call_id,
            step_id=step_id,
            effect_id=effect_id,
        )


class SessionEnded(ConflictError):
    """The session has ended and accepts no posts; nothing was stored."""

    code = "session_ended"
    session_id: str
    status: str

    def __init__(self, session_id: str, status: str) -> None:
        super().__init__(
            f"The session {shown_id(session_id)} is {status} and accepts no posts; nothing was stored.",
            session_id=session_id,
            status=status,
        )


class SessionErased(SessionEnded):
    """The session was erased, and a write must not create it again; nothing was stored.

    Until a cleanup deletes the tombstone of the erasure, only `create_session` of the store, or an adapter
    that was made with ``recreate=True``, uses the id again.
    """

    code = "session_erased"

    def __init__(self, session_id: str, status: str = "erased") -> None:
        HelixStoreError.__init__(
            self,
            f"The session {shown_id(session_id)} was erased, and a write must not create it again; nothing "
            "was stored. To use the id again, create the session explicitly, or pass recreate=True to the "
            "adapter.",
            session_id=session_id,
            status=status,
        )


class StaleStateError(HelixStoreError):
    """The session was changed after it was read; load it again and redo the change."""

    code = "stale_state"
    expected_version: int
    current_version: int

    def __init__(self, expected_version: int, current_version: int) -> None:
        super().__init__(
            f"Expected version {expected_version}, but the session is at version {current_version}; "
            "load it again and redo the change.",
            expected_version=expected_version,
            current_version=current_version,
        )


class FencedOutError(HelixStoreError):
    """A newer holder has the lock; this worker must stop."""

    code = "fenced_out"
    # The name by which LangGraph's proposed write-ownership clauses recognise the error of any checkpointer.
    is_stale_write_owner_error: ClassVar[bool] = True
    token: int
    current_token: int

    def __init__(self, token: int, current_token: int) -> None:
        super().__init__(
            f"Fencing token {token} is older than {current_token}: a newer holder has the lock; "
            "this worker must stop.",
            token=token,
            current_token=current_token,
        )


class LockLostError(HelixStoreError):
    """The lock has expired or was released; acquire it again before you continue."""

    code = "lock_lost"


class TurnInterrupted(HelixStoreError):
    """Somebody asked this turn to stop; leave it, and the session can continue in another turn."""

    code = "turn_interrupted"
    kind: str
    reason: str | None

    def __init__(self, kind: str, reason: str | None = None) -> None:
        super().__init__(kind=kind, reason=reason)


class BudgetExceeded(TurnInterrupted):
    """A budget does not allow this step; raise its limit, or wait until it resets.

    ``limit`` and ``spent`` are in the limit's unit, dollars or tokens; ``held`` is the total that other
    sessions hold.
    """

    code = "budget_exceeded"
    kind = "budget"
    name: str
    limit: Decimal | int
    spent: Decimal | int
    held: Decimal | int

    def __init__(
        self, name: str, limit: Decimal | int, spent: Decimal | int, held: Decimal | int = 0
    ) -> None:
        HelixStoreError.__init__(
            self,
            f"The budget {shown_id(name)} does not allow this step: of {limit}, {spent} are spent and {held} "
            "are held by others; raise its limit, or wait until it resets.",
            name=name,
            limit=limit,
            spent=spent,
            held=held,
        )

    @property
    def reason(self) -> str:  # type: ignore[override]  # read-only here
        return f"budget:{self.name}"


class EffectUnknown(TurnInterrupted):
    """Nobody knows whether this effect happened; settle it, or pass ``retry=True`` or ``reconcile``.

    ``started_at`` is the start of its last attempt.
    """

    code = "effect_unknown"
    kind = "effect"
    effect_id: str
    tool_name: str
    started_at: datetime
    _of: tuple[object, str] | None = None
    """The stores and the session, if the effect is one of a handle."""

    def __init__(self, effect_id: str, tool_name: str, started_at: datetime) -> None:
        named = f" ({tool_name})" if tool_name else ""
        HelixStoreError.__init__(
            self,
            f"Nobody knows whether the effect {shown_id(effect_id)}{named} happened: it began at "
            f"{started_at:%Y-%m-%d %H:%M:%S} UTC, and no result is stored. Settle it with settle_effect() or "
            "in the admin.",
            effect_id=effect_id,
            tool_name=tool_name,
            started_at=started_at,
        )

    @property
    def reason(self) -> str:  # type: ignore[override]  # read-only here
        return f"effect:{self.effect_id}"


# --- Refused input ---------------------------------------------------------------------------------


class InvalidPayload(HelixStoreError):
    """The value cannot be stored exactly; nothing was written.

    ``path`` is a JSON pointer whose first segment is the argument or field, empty for the value as a whole.
    """

    code = "invalid_payload"
    path: str
    reason: str

    def __init__(self, *, path: str, reason: str) -> None:
        path = _pointer(path)
        super().__init__(f"Invalid value at {path or 'the top level'}: {reason}.", path=path, reason=reason)


class LimitExceeded(HelixStoreError):
    """A limit was exceeded; nothing was written."""

    code = "limit_exceeded"
    name: str
    limit: int
    actual: int

    def __init__(self, *, limit: int, actual: int, name: str = "limit") -> None:
        super().__init__(
            f"{name} is {limit}, but the value has at least {actual}; nothing was written.",
            name=name,
            limit=limit,
            actual=actual,
        )


class PatchError(HelixStoreError):
    """A patch operation cannot be applied; nothing was changed."""

    code = "patch_error"
    index: int
    op: str
    reason: str

    def __init__(self, index: int, op: str, reason: str) -> None:
        super().__init__(
            f"Patch operation {index} ({op}) cannot be applied: {reason}; nothing was changed.",
            index=index,
            op=op,
            reason=reason,
        )


class InvalidCursor(HelixStoreError):
    """The cursor does not belong to this query; start from the first page."""

    code = "invalid_cursor"


class InvalidQuery(HelixStoreError):
    """The query is invalid."""

    code = "invalid_query"
    path: str

    def __init__(self, message: str | None = None, *, path: str = "") -> None:
        super().__init__(message, path=_pointer(path))


# --- Streams ---------------------------------------------------------------------------------------


class StreamClosed(HelixStoreError):
    """The stream accepts no more chunks; reactivate it or write to another stream."""

    code = "stream_closed"


class StreamTruncated(HelixStoreError):
    """Chunks before this position were removed; load the session and read from the oldest chunk."""

    code = "stream_truncated"
    oldest: int

    def __init__(self, oldest: int) -> None:
        super().__init__(oldest=oldest)


# --- The database ----------------------------------------------------------------------------------


class StoreBusy(HelixStoreError):
    """The database is busy with a conflicting transaction; try again shortly."""

    code = "store_busy"
    retryable = True


class SessionBusy(StoreBusy):
    """Another worker is driving the session with this id; nothing was changed, try again later."""

    code = "session_busy"
    session_id: str

    def __init__(self, session_id: str) -> None:
        super().__init__(self._message_with(session_id), session_id=session_id)


class StoreTimeout(HelixStoreError):
    """The database cancelled the statement because it took too long."""

    code = "store_timeout"


class StoreUnavailable(HelixStoreError):
    """The database cannot be reached or does not accept writes at the moment; try again later."""

    code = "store_unavailable"
    retryable = True


class TenantMoved(HelixStoreError):
    """The tenant is being moved; try again with a new store, which asks the router for the database."""

    code = "tenant_moved"
    retryable = True


class OutsideTransaction(HelixStoreError):
    """The caller's atomic() block is open in another thread; leave it first, or make the call in its thread.

    `asgiref.sync.async_to_sync` makes async calls in the thread of its caller. ``asyncio.run``, and the
    executors of agent frameworks, do not. The error is also raised by a synchronous call if another task
    has a transaction of the store open in this thread.
    """

    code = "outside_transaction"


class UnsupportedIsolation(HelixStoreError):
    """The caller's atomic() block has an isolation level above READ COMMITTED; make the call outside of it.

    The call depends on rows that others may have committed since the snapshot of the block, and that no lock
    reveals. Nothing was written.
    """

    code = "unsupported_isolation"


class StoreFull(HelixStoreError):
    """The database has no space left; reads still work, free space before writing."""

    code = "store_full"


class OutcomeUnknown(HelixStoreError):
    """The connection broke during COMMIT; repeat the call with the same operation id to learn the outcome."""

    code = "outcome_unknown"
    applied: Applied = "unknown"
    operation_id: str | None

    def __init__(self, operation_id: str | None = None) -> None:
        super().__init__(operation_id=operation_id)


class IntegrityFault(HelixStoreError):
    """A stored row cannot be read; other rows are not affected."""

    code = "integrity_fault"


class NotSupportedOnBackend(HelixStoreError):
    """This database does not support the operation."""

    code = "not_supported_on_backend"
