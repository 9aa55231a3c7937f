"""Rules of client tool calls: valid calls, valid answers, and the first answer counts.

A session stores its calls by tool call id in two documents. A *pending* call has ``tool_name``, ``input``,
``run_id``, ``requested_at``, ``deadline``, ``approval_id`` and, if given, ``on_expiry``; an answer adds
``submitted_at`` and one of ``result``, ``error`` or ``approved`` with ``reason``. When the agent takes the
answers they move to the *completed* calls, which are never deleted: a durable mark of each answered call.
Times are epoch milliseconds. A call with an ``approval_id`` asks for an approval, any other for a result.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from helix_store.core import validation
from helix_store.core.limits import UNLIMITED, Limits
from helix_store.core.payloads import (
    decode_object,
    encode,
    join_path,
    size_of,
)
from helix_store.core.types import (
    PendingToolCall,
    SessionStatus,
    SubmissionOutcome,
)
from helix_store.exceptions import ConflictError, IntegrityFault, InvalidPayload, shown_id
from helix_store.sessions.layout import earliest_deadline

__all__ = [
    "Answer",
    "ToolCalls",
    "checked_answer",
    "checked_calls",
    "claimed_calls",
    "claimed_ownership",
    "default_answer",
    "due_calls",
    "is_answered",
    "owner_of",
    "readable_due_calls",
    "tree_of",
]

_logger = logging.getLogger(__name__)

_ANSWER_FIELDS: Final = ("result", "error", "approved", "reason", "submitted_at")
_DEADLINE_PASSED: Final = "deadline_passed"
_SHARE_OF_COMPLETED: Final = 4
"""Completed calls have at most one fourth of ``max_state_bytes``; the oldest shrink to a mark."""


def checked_calls(calls: Any, *, requested_at: int, limits: Limits) -> dict[str, dict[str, Any]]:
    """The entries of new calls, complete and in order. Raises `InvalidPayload` and `LimitExceeded`.

    Unknown keys stay in the entry. An entry has at most ``max_message_bytes``.
    """
    if not isinstance(calls, Mapping):
        raise InvalidPayload(path="/calls", reason="expected a dict of calls by tool call id")
    entries = {}
    for tool_call_id, call in validation.items(calls.items(), "calls"):
        path = join_path("/calls", validation.identifier(tool_call_id, "tool_call_id"))
        entries[tool_call_id] = _checked_call(call, path, requested_at)
        encode(entries[tool_call_id], limit=limits.max_message_bytes, name="max_message_bytes", path=path)
    return entries


def _checked_call(call: Any, path: str, requested_at: int) -> dict[str, Any]:
    if type(call) is not dict:
        raise InvalidPayload(path=path, reason=f"expected a dict, got {type(call).__name__}")
    for name in _ANSWER_FIELDS:
        if name in call:
            raise InvalidPayload(
                path=f"{path}/{name}", reason="a new call has no answer; use submit_tool_result"
            )
    given_at, deadline = call.get("requested_at"), call.get("deadline")
    entry = {
        "tool_name": validation.identifier(call.get("tool_name"), f"{path}/tool_name"),
        "input": call.get("input"),
        "run_id": validation.optional_identifier(call.get("run_id"), f"{path}/run_id"),
        "requested_at": (
            requested_at
            if given_at is None
            else validation.epoch_milliseconds(given_at, f"{path}/requested_at")
        ),
        "deadline": (None if deadline is None else _deadline(deadline, f"{path}/deadline", requested_at)),
        "approval_id": validation.optional_identifier(call.get("approval_id"), f"{path}/approval_id"),
    }
    entry.update((name, value) for name, value in call.items() if name not in entry)
    _check_on_expiry(entry, f"{path}/on_expiry")
    return entry


def _deadline(value: Any, path: str, now: int) -> int:
    """A time, or a duration from now."""
    if isinstance(value, timedelta):
        return validation.epoch_milliseconds(now + validation.milliseconds(value, path), path)
    return validation.epoch_milliseconds(value, path)


def _check_on_expiry(entry: Mapping[str, Any], path: str) -> None:
    default = entry.get("on_expiry")
    if default is None:
        return
    if entry["deadline"] is None:
        raise InvalidPayload(path=path, reason="a default needs a deadline")
    if entry["approval_id"] is None:
        if default != "fail" and not (type(default) is dict and default.keys() == {"result"}):
            raise InvalidPayload(path=path, reason='expected "fail" or {"result": …}')
    elif default not in ("fail", "reject"):
        raise InvalidPayload(path=path, reason='an approval takes "fail" or "reject"')


@dataclass(frozen=True, slots=True)
class Answer:
    """A checked answer; ``fields`` are those of the entry, without ``submitted_at``."""

    fields: dict[str, Any]
    approval_id: str | None = None

    def require_fit(self, entry: Mapping[str, Any]) -> None:
        """Raise `InvalidPayload` unless this answers a call of the entry's kind.

        An approval takes a decision with its approval id, or an error; any other call takes a result or an
        error.
        """
        expected = entry.get("approval_id")
        if expected is None:
            if "approved" in self.fields or self.approval_id is not None:
                raise InvalidPayload(path="approval_id", reason="this call asks for a result, not approval")
        elif "result" in self.fields:
            raise InvalidPayload(path="approved", reason="this call asks for approval, not for a result")
        elif self.approval_id != expected and ("approved" in self.fields or self.approval_id is not None):
            raise InvalidPayload(path="approval_id", reason="it is not the approval id of this call")


def checked_answer(
    *, result: Any, error: Any, approval_id: Any, approved: Any, reason: Any, limits: Limits
) -> Answer:
    """A checked answer: a decision, an error, or a result, which may be ``None``.

    Raises `InvalidPayload`, and `LimitExceeded` for an answer over ``max_message_bytes``.
    """
    validation.optional_identifier(approval_id, "approval_id")
    fields: dict[str, Any]
    if approved is not None:
        if type(approved) is not bool:
            raise InvalidPayload(path="approved", reason="expected True or False")
        if result is not None or error is not None:
            raise InvalidPayload(path="approved", reason="a decision comes without a result or an error")
        fields = {"approved": approved, "reason": validation.reason(reason)}
    elif reason is not None:
        raise InvalidPayload(path="reason", reason="a reason belongs to a decision")
    elif error is None:
        fields = {"result": result}
    elif result is None:
        fields = {"error": error}
    else:
        raise InvalidPayload(path="error", reason="an answer is a result or an error, not both")
    for name, value in fields.items():
        encode(value, limit=limits.max_message_bytes, name="max_message_bytes", path=f"/{name}")
    return Answer(fields, approval_id)


def default_answer(call: PendingToolCall) -> dict[str, Any] | None:
    """The arguments of the answer to an overdue call; ``None`` for a call without a default."""
    default = call.on_expiry
    if default == "fail":
        return {"error": {"code": _DEADLINE_PASSED, "message": "Nobody answered before the deadline."}}
    if default == "reject":
        return {"approval_id": call.approval_id, "approved": False, "reason": _DEADLINE_PASSED}
    if type(default) is dict and "result" in default:
        return {"result": default["result"]}
    return None


class ToolCalls:
    """The calls of one session: the pending ones and the completed ones, by tool call id."""

    def __init__(self, pending: Mapping[str, Any], completed: Mapping[str, Any]) -> None:
        self.pending = dict(pending)
        self.completed = dict(completed)

    @classmethod
    def stored(cls, pending: str | None, completed: str | None) -> ToolCalls:
        """Those in the columns of a session. Raises `IntegrityFault`."""
        return cls(_stored(pending), _stored(completed))

    @property
    def answers(self) -> dict[str, dict[str, Any]]:
        """The answers that were not taken yet."""
        return {
            tool_call_id: {name: entry[name] for name in _ANSWER_FIELDS if name in entry}
            for tool_call_id, entry in self.pending.items()
            if "submitted_at" in _entry(entry)
        }

    @property
    def unanswered(self) -> dict[str, dict[str, Any]]:
        """The calls that somebody still has to answer."""
        return {
            tool_call_id: entry
            for tool_call_id, value in self.pending.items()
            if (entry := _entry(value)) and "submitted_at" not in entry
        }

    def add(self, entries: Mapping[str, dict[str, Any]]) -> bool:
        """Add calls and return whether any is new. Raises `ConflictError` for another call with its id."""
        new = {}
        for tool_call_id, entry in entries.items():
            if tool_call_id in self.completed:
                raise _taken(tool_call_id, "was answered before")
            if tool_call_id not in self.pending:
                new[tool_call_id] = entry
            elif not _is_repeat(_entry(self.pending[tool_call_id]), entry):
                raise _taken(tool_call_id, "is another pending tool call")
        self.pending.update(new)
        return bool(new)

    def answer(
        self, tool_call_id: str, answer: Answer, *, submitted_at: int, status: str
    ) -> SubmissionOutcome:
        """Store the first answer to a pending call, unless the session has ended."""
        entry = _entry(self.pending.get(tool_call_id))
        if tool_call_id in self.completed or "submitted_at" in entry:
            return SubmissionOutcome.ALREADY_COMPLETED
        if not entry or SessionStatus(status).is_terminal:
            return SubmissionOutcome.UNKNOWN_TOOL_CALL
        answer.require_fit(entry)
        self.pending[tool_call_id] = {**entry, **answer.fields, "submitted_at": submitted_at}
        return SubmissionOutcome.ACCEPTED

    def take(self, only: Container[str] | None = None) -> dict[str, Any]:
        """Move answered calls, or ``only`` these, to the completed ones and return their answers."""
        taken = {
            tool_call_id: answer
            for tool_call_id, answer in self.answers.items()
            if only is None or tool_call_id in only
        }
        for tool_call_id in taken:
            del self.pending[tool_call_id]
        self.completed.update(taken)
        return taken

    def kept(self, limits: Limits) -> dict[str, Any]:
        """The completed calls as they are stored."""
        return _within(self.completed, limits.max_state_bytes // _SHARE_OF_COMPLETED)

    def columns(self, limits: Limits) -> dict[str, Any]:
        """The columns of the session's head. Raises `LimitExceeded` when the pending calls are too large."""
        completed = self.kept(limits)
        return {
            "pending_client_tool_calls": _column("pending_client_tool_calls", self.pending, limits),
            "pending_deadline": earliest_deadline(self.pending),
            "completed_client_tool_calls": _column("completed_client_tool_calls", completed, limits),
        }


def _entry(value: Any) -> dict[str, Any]:
    """The entry, or an empty dict for a value of another type, which a saved state may hold."""
    return value if type(value) is dict else {}


def _stored(column: str | None) -> dict[str, Any]:
    """What a column of calls, or of their owners, holds. Raises `IntegrityFault`."""
    return {} if column is None else decode_object(column)


def _text(value: Any) -> str | None:
    return value if type(value) is str else None


def _is_repeat(asked: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    """Whether two entries ask for the same; the time of the request does not count."""
    ignored = {*_ANSWER_FIELDS, "requested_at"}
    first, second = ({k: v for k, v in call.items() if k not in ignored} for call in (asked, entry))
    return first == second


def _within(completed: dict[str, Any], limit: int) -> dict[str, Any]:
    """The completed calls within a size: the oldest answers shrink to a mark until the rest fits."""
    sizes = {key: size_of(encode(answer, limit=UNLIMITED)) for key, answer in completed.items()}
    excess = sum(sizes.values()) - limit
    kept = dict(completed)
    for tool_call_id, size in sizes.items():
        if excess <= 0:
            break
        kept[tool_call_id] = {"submitted_at": _entry(completed[tool_call_id]).get("submitted_at")}
        excess -= size
    return kept


def _column(name: str, value: dict[str, Any], limits: Limits) -> str | None:
    return encode(value, limit=limits.max_state_bytes, path=f"/{name}") if value else None


def _taken(tool_call_id: str, reason: str) -> ConflictError:
    return ConflictError(
        f"The tool call id {shown_id(tool_call_id)} {reason}; give the call another id.",
        tool_call_id=tool_call_id,
    )


def due_calls(session_id: str, pending: str | None, now: int) -> list[PendingToolCall]:
    """The calls in a column of pending calls that have no answer and a deadline up to ``now``.

    Raises `IntegrityFault`.
    """
    return [
        PendingToolCall(
            session_id=session_id,
            tool_call_id=tool_call_id,
            tool_name=_text(entry.get("tool_name")) or "",
            deadline=entry["deadline"],
            approval_id=_text(entry.get("approval_id")),
            on_expiry=entry.get("on_expiry"),
        )
        for tool_call_id, value in _stored(pending).items()
        if "submitted_at" not in (entry := _entry(value))
        and type(entry.get("deadline")) is int
        and entry["deadline"] <= now
    ]


def readable_due_calls(session_id: str, pending: str | None, now: int) -> list[PendingToolCall]:
    """`due_calls`; none, with a warning, for a row that cannot be read: other sessions have their calls."""
    try:
        return due_calls(session_id, pending, now)
    except IntegrityFault as fault:
        _logger.warning("The pending tool calls of session %r cannot be read: %s", session_id, fault)
        return []


def is_answered(pending: str | None) -> bool:
    """Whether a column of pending calls has answers to take and no open call."""
    entries = [entry for value in _stored(pending).values() if (entry := _entry(value))]
    return bool(entries) and all("submitted_at" in entry for entry in entries)


def tree_of(session_id: str, root_id: str | None) -> str:
    """What all sessions of a tree have in common: their root, which a session without one is itself."""
    return root_id or session_id


def owner_of(ownership: str | None, tool_call_id: str) -> str | None:
    """The owner of a call, from the ownership column of the root session."""
    return _text(_stored(ownership).get(tool_call_id))


def claimed_calls(owners: Mapping[str, Any], tool_call_ids: Iterable[str], owner_id: str) -> dict[str, Any]:
    """The root's record of owners with these calls. Raises `ConflictError`."""
    claimed = dict(owners)
    for tool_call_id in tool_call_ids:
        if claimed.setdefault(tool_call_id, owner_id) != owner_id:
            raise _taken(tool_call_id, "belongs to another session of the tree")
    return claimed


def claimed_ownership(
    ownership: str | None, tool_call_ids: Mapping[str, Any], owner_id: str, limits: Limits
) -> str | None:
    """The root's ownership column with these calls, or ``None`` if it has them. Raises `ConflictError`."""
    owners = _stored(ownership)
    claimed = claimed_calls(owners, tool_call_ids, owner_id)
    return None if claimed == owners else _column("client_tool_call_ownership", claimed, limits)
