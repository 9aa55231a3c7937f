"""Rules of client tool calls: valid calls, valid answers, and the rule that the first answer counts.

A session stores its calls by tool call id in two documents. A *pending* call has ``tool_name``, ``input``,
``run_id``, ``requested_at``, ``deadline``, ``approval_id`` and, if given, ``on_expiry``; an answer adds
``submitted_at``, ``actors`` if they are known, and one of ``result``, ``error`` or ``approved`` with
``reason``. Every call has a ``digest``; `approvals` has the rules for other keys. When the agent takes the
answers, they move to the *completed* calls, which are never deleted: a durable mark of each answered call.
Times are epoch milliseconds. A call with an ``approval_id`` requests an approval, any other call a result.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from helix_store.core import validation
from helix_store.core.approvals import ApprovedCall, digest_of
from helix_store.core.limits import AS_STORED, UNLIMITED, Limits
from helix_store.core.payload_faults import join_path
from helix_store.core.payloads import decode_object, encode, size_of
from helix_store.core.types import (
    TERMINAL_STATUSES,
    PendingToolCall,
    SubmissionOutcome,
)
from helix_store.exceptions import ConflictError, IntegrityFault, InvalidPayload, shown_id
from helix_store.sessions.approvals import (
    EDITED_FROM,
    Answer,
    answered,
    approved_call,
    approved_calls,
    check_demands,
    number_of_approvals,
)

_logger = logging.getLogger(__name__)

_ANSWER_FIELDS: Final = ("result", "error", "approved", "reason", "submitted_at", "actors")
_FIELDS_OF_ANSWERS: Final = (*_ANSWER_FIELDS, "approved_by", EDITED_FROM)
"""The fields that only answers add to a call."""
_SHARE_OF_COMPLETED: Final = 4
"""Completed calls take at most one fourth of ``max_state_bytes``; the oldest are reduced to a mark."""


def checked_calls(calls: Any, *, requested_at: int, limits: Limits) -> dict[str, dict[str, Any]]:
    """Check new calls, and return their entries in order. Raises `InvalidPayload` and `LimitExceeded`.

    An entry has all fields, and keeps unknown keys. It can be up to ``max_message_bytes`` long.
    """
    if not isinstance(calls, Mapping):
        raise InvalidPayload(path="/calls", reason="expected a dict of calls by tool call id")
    entries = {}
    for tool_call_id, call in validation.items(calls.items(), "calls"):
        path = join_path("/calls", validation.identifier(tool_call_id, "tool_call_id"))
        entries[tool_call_id] = _checked_call(call, path, requested_at)
        encode(entries[tool_call_id], limit=limits.max_message_bytes, name="max_message_bytes", path=path)
        entries[tool_call_id]["digest"] = digest_of(call["tool_name"], call.get("input"))
    return entries


def _checked_call(call: Any, path: str, requested_at: int) -> dict[str, Any]:
    if type(call) is not dict:
        raise InvalidPayload(path=path, reason=f"expected a dict, got {type(call).__name__}")
    for name in _FIELDS_OF_ANSWERS:
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
    check_demands(entry, path)
    return entry


def _deadline(value: Any, path: str, now: int) -> int:
    """Return a deadline given as a time, or as a duration from now."""
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


class ToolCalls:
    """The pending, completed and approved calls of one session, by tool call id.

    The approved calls are only needed to answer a call, and to use an approval.
    """

    def __init__(
        self,
        pending: Mapping[str, Any],
        completed: Mapping[str, Any],
        approved: Mapping[str, Any] | None = None,
    ) -> None:
        self.pending = dict(pending)
        self.completed = dict(completed)
        self.approved = dict(approved or {})
        self._has_approved = False

    @classmethod
    def stored(cls, pending: str | None, completed: str | None, approved: str | None = None) -> ToolCalls:
        """Return the calls in the columns of a session. Raises `IntegrityFault`."""
        uses = None if approved is None else approved_calls(approved)
        return cls(_stored(pending), _stored(completed), uses)

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> ToolCalls:
        """Return the calls in these columns of a session, by name. Raises `IntegrityFault`."""
        names = ("pending_client_tool_calls", "completed_client_tool_calls", "approved_tool_calls")
        return cls.stored(*map(columns.get, names))

    @property
    def answers(self) -> dict[str, dict[str, Any]]:
        """The answers that the agent has not taken yet."""
        return {
            tool_call_id: _answer_of(entry)
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

    @property
    def is_answered(self) -> bool:
        """True if there are answers to take and no open call."""
        entries = [entry for value in self.pending.values() if (entry := _entry(value))]
        return bool(entries) and all("submitted_at" in entry for entry in entries)

    def add(self, entries: Mapping[str, dict[str, Any]]) -> bool:
        """Add calls and return whether any is new. Raises `ConflictError` if an id has another call."""
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
        """Store an answer to an open call, unless the session has ended. The first final answer counts.

        Raises `NotPermitted` and `InvalidPayload`.
        """
        entry = _entry(self.pending.get(tool_call_id))
        if tool_call_id in self.completed or "submitted_at" in entry:
            return SubmissionOutcome.ALREADY_COMPLETED
        if not entry or status in TERMINAL_STATUSES:
            return SubmissionOutcome.UNKNOWN_TOOL_CALL
        call = answered(tool_call_id, entry, answer)
        if call is None:
            return SubmissionOutcome.CHANGED
        actor = answer.actor.id
        actors = [] if actor is None else [actor]
        if answer.fields.get("approved") is True:
            earlier = call.get("approved_by", [])
            if actor in earlier:
                return SubmissionOutcome.ALREADY_RECORDED
            is_last = len(earlier) + 1 >= number_of_approvals(call)
            actors = [*earlier, *actors]
            if not is_last:
                self.pending[tool_call_id] = {**call, "approved_by": actors}
                return SubmissionOutcome.RECORDED
            self._approve(tool_call_id, call, actors)
        call.pop("approved_by", None)
        call |= answer.fields | {"submitted_at": submitted_at}
        self.pending[tool_call_id] = call | {"actors": actors} if actors else call
        return SubmissionOutcome.ACCEPTED

    def approved_call(self, tool_call_id: str) -> ApprovedCall:
        """Return the approved call. Raises `ApprovalUsed` and `NotApproved`."""
        stored = self.pending if tool_call_id in self.pending else self.completed
        return approved_call(tool_call_id, _entry(stored.get(tool_call_id)), self.approved)

    def _approve(self, tool_call_id: str, call: Mapping[str, Any], actors: list[str]) -> None:
        """Store the approved call. After a rewind, a call may be approved again, but stays used."""
        if "used_by" not in self.approved.get(tool_call_id, {}):
            kept = {"tool_name": call.get("tool_name"), "input": call.get("input"), "digest": call["digest"]}
            self.approved[tool_call_id] = {**kept, "actors": actors}
            self._has_approved = True

    def take(self, only: Container[str] | None = None) -> dict[str, Any]:
        """Move answered calls, or ``only`` those given, to the completed ones and return their answers."""
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
        """Return the completed calls in their stored form."""
        return _within(self.completed, limits.max_state_bytes // _SHARE_OF_COMPLETED)

    def columns(self, limits: Limits) -> dict[str, Any]:
        """Return the columns of the session's head. Raises `LimitExceeded` if pending calls are too large."""
        completed = self.kept(limits)
        approved: dict[str, Any] = {}
        if self._has_approved:
            # Each approved call was within a limit, so the column itself has none.
            approved["approved_tool_calls"] = _column("approved_tool_calls", self.approved, AS_STORED)
        return {
            **approved,
            "pending_client_tool_calls": _column("pending_client_tool_calls", self.pending, limits),
            "pending_deadline": earliest_deadline(self.pending),
            "completed_client_tool_calls": _column("completed_client_tool_calls", completed, limits),
        }


def _entry(value: Any) -> dict[str, Any]:
    """Return the entry, or an empty dict if a saved state holds a value of another type there."""
    return value if type(value) is dict else {}


def _answer_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer in an entry, including the input and its digest if the input was changed."""
    answer = {name: entry[name] for name in _ANSWER_FIELDS if name in entry}
    if EDITED_FROM in entry and entry.get("approved") is True:
        answer |= {name: entry[name] for name in ("input", "digest")}
    return answer


def _stored(column: str | None) -> dict[str, Any]:
    """Return the contents of a column of calls, or of a column of their owners. Raises `IntegrityFault`."""
    return {} if column is None else decode_object(column)


def _text(value: Any) -> str | None:
    return value if type(value) is str else None


def _is_repeat(asked: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    """Return whether two entries make the same request, regardless of when it was made."""
    ignored = {*_FIELDS_OF_ANSWERS, "requested_at", "digest"}
    if EDITED_FROM in asked:
        asked = {**asked, "input": asked[EDITED_FROM]}
    first, second = ({k: v for k, v in call.items() if k not in ignored} for call in (asked, entry))
    return first == second


def _within(completed: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return the completed calls within a size limit: the oldest become a mark until the rest fits."""
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


def earliest_deadline(pending: Mapping[str, Any]) -> datetime | None:
    """Return the deadline of the first unanswered call; entries without a usable deadline wait forever."""
    deadlines = [
        entry["deadline"]
        for entry in pending.values()
        if type(entry) is dict and "submitted_at" not in entry and type(entry.get("deadline")) is int
    ]
    usable = [deadline for deadline in deadlines if 0 <= deadline <= validation.MAX_EPOCH_MILLISECONDS]
    return validation.milliseconds_to_datetime(min(usable)) if usable else None


def due_calls(session_id: str, pending: str | None, now: int) -> list[PendingToolCall]:
    """Return the calls in a column of pending calls that have no answer and are due by ``now``.

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
    """Return `due_calls`; for an unreadable row, log a warning instead, so that other sessions continue."""
    try:
        return due_calls(session_id, pending, now)
    except IntegrityFault as fault:
        _logger.warning("The pending tool calls of session %r cannot be read: %s", session_id, fault)
        return []


def owner_of(ownership: str | None, tool_call_id: str) -> str | None:
    """Return the owner of a call, according to the root session's ownership column."""
    return _text(_stored(ownership).get(tool_call_id))


def claimed_calls(owners: Mapping[str, Any], tool_call_ids: Iterable[str], owner_id: str) -> dict[str, Any]:
    """Return the root's record of owners with these calls added. Raises `ConflictError`."""
    claimed = dict(owners)
    for tool_call_id in tool_call_ids:
        if claimed.setdefault(tool_call_id, owner_id) != owner_id:
            raise _taken(tool_call_id, "belongs to another session of the tree")
    return claimed


def claimed_ownership(
    ownership: str | None, tool_call_ids: Mapping[str, Any], owner_id: str, limits: Limits
) -> str | None:
    """Return the ownership column with these calls, or ``None`` if it has them. Raises `ConflictError`."""
    owners = _stored(ownership)
    claimed = claimed_calls(owners, tool_call_ids, owner_id)
    return None if claimed == owners else _column("client_tool_call_ownership", claimed, limits)


def kept_ownership(given: str | None, stored: str | None, session_id: str) -> str | None:
    """Return the ownership column after a session is written.

    The session's entries for its own calls replace the stored ones. Entries recorded by others are kept: they
    do not change the version, so the session may not know them. A record that cannot be read is replaced.
    """
    if stored is None or stored == given:
        return given
    try:
        recorded = _stored(stored)
    except IntegrityFault:
        return given
    of_others = {call: owner for call, owner in recorded.items() if owner != session_id}
    kept = {**_stored(given), **of_others}
    return _column("client_tool_call_ownership", kept, AS_STORED)
