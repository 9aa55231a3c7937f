"""The rules of approvals and answers: who may answer a call, with which content; approved and used calls.

A call that asks for an approval can require several of them (``approvals``), and can be ``editable``. While
it is open, ``approved_by`` holds the people who have approved its current input; after an edit,
``original_input`` holds the requested input. Approved calls are also stored in a separate column, by tool
call id: ``tool_name``, ``input``, ``digest`` and ``actors``, and after its use ``digest``, ``actors`` and
``used_by``, the step. The column is not part of the state, so saves, rewinds and branches do not change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from helix_store.core import validation
from helix_store.core.approvals import ActingUser, ApprovedCall, digest_of
from helix_store.core.limits import UNLIMITED, Limits
from helix_store.core.payloads import decode_object, encode
from helix_store.core.types import UNSET, PendingToolCall
from helix_store.exceptions import (
    ApprovalUsed,
    IntegrityFault,
    InvalidPayload,
    NotApproved,
    NotPermitted,
    shown_id,
)

EDITED_FROM: Final = "original_input"

_MOST_APPROVALS: Final = 10
_USER: Final = "user:"
_DEADLINE_PASSED: Final = "deadline_passed"
_FAILED_BY_DEFAULT: Final = {
    "code": _DEADLINE_PASSED,
    "message": "Nobody answered before the deadline.",
}
_RULES: Final[dict[str, validation.Rule]] = {
    "approval_id": validation.optional_identifier,
    "digest": validation.optional_identifier,
    "reason": validation.reason,
}
_EXPIRED: Final[dict[str, dict[str, Any]]] = {
    "fail": {"error": _FAILED_BY_DEFAULT},
    "reject": {"approved": False, "reason": _DEADLINE_PASSED},
}
"""The answers that the defaults of the same names give at a deadline."""


# --- Requirements of a call -----------------------------------------------------------------------


def check_demands(entry: Mapping[str, Any], path: str) -> None:
    """Check the keys of a new call that determine who may answer it, and how. Raises `InvalidPayload`."""
    permission = validation.optional_identifier(entry.get("permission"), f"{path}/permission")
    if permission is not None and not all(permission.partition(".")[::2]):
        raise InvalidPayload(path=f"{path}/permission", reason='expected "app_label.codename"')
    validation.optional_identifier(entry.get("requester"), f"{path}/requester")
    for name in ("approvals", "editable"):
        if name in entry and entry["approval_id"] is None:
            raise InvalidPayload(path=f"{path}/{name}", reason="this call asks for a result, not approval")
    if "approvals" in entry:
        validation.whole_number(entry["approvals"], f"{path}/approvals", minimum=1, maximum=_MOST_APPROVALS)
    if "editable" in entry and type(entry["editable"]) is not bool:
        raise InvalidPayload(path=f"{path}/editable", reason="expected True or False")


def number_of_approvals(entry: Mapping[str, Any]) -> int:
    """Return the number of approvals that a call needs; a saved state may contain any value."""
    number = entry.get("approvals")
    return number if type(number) is int and 1 <= number <= _MOST_APPROVALS else 1


def current_call(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an open call with the digest of its current content, and without approvals of other content.

    A saved state may have replaced the content, and calls of earlier versions have no digest.
    """
    call = dict(entry)
    digest = digest_of(entry.get("tool_name"), entry.get("input"))
    if call.get("digest") != digest or type(call.get("approved_by")) is not list:
        call.pop("approved_by", None)
    call["digest"] = digest
    return call


def current_calls(pending: dict[str, Any]) -> dict[str, Any]:
    """Return pending calls for a reader, with `current_call` applied to each open call that has a digest."""
    return {
        key: current_call(call)
        if type(call) is dict and "digest" in call and "submitted_at" not in call
        else call
        for key, call in pending.items()
    }


def edited(call: dict[str, Any], value: Any) -> dict[str, Any]:
    """Return a call with a different input. Raises `InvalidPayload` unless it is editable."""
    if call.get("editable") is not True:
        raise InvalidPayload(path="input", reason="the input of this call cannot be changed")
    return current_call({EDITED_FROM: call.get("input"), **call, "input": value})


# --- Who answers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallActor:
    """The stored actor of an answer, and the Django user if the actor is one. An anonymous user has no id."""

    id: str | None = None
    user: ActingUser | None = field(default=None, repr=False)


_NOBODY: Final = CallActor()


def checked_actor(actor: Any) -> CallActor:
    """Return who answers. Raises `InvalidPayload` for anything other than a string or a Django user."""
    if actor is None:
        return _NOBODY
    if isinstance(actor, str):
        if actor.startswith(_USER):
            reason = f'a string cannot begin with "{_USER}"; pass the Django user itself'
            raise InvalidPayload(path="actor", reason=reason)
        return CallActor(validation.identifier(actor, "actor"))
    if not callable(getattr(actor, "has_perm", None)):
        raise InvalidPayload(path="actor", reason="expected a string or a Django user")
    key = getattr(actor, "pk", None)
    return CallActor(None if key is None else validation.identifier(f"{_USER}{key}", "actor"), actor)


def require_permitted(tool_call_id: str, call: Mapping[str, Any], actor: CallActor) -> None:
    """Raise `NotPermitted` unless the actor may answer the call, and `InvalidPayload` if it needs a name."""
    permission, requester = call.get("permission"), call.get("requester")
    if permission is not None and not _has_permission(actor.user, permission):
        raise NotPermitted(tool_call_id, "permission")
    if requester is not None and actor.id in (None, requester):
        raise NotPermitted(tool_call_id, "requester")
    if actor.id is None and actor.user is not None:
        raise InvalidPayload(path="actor", reason="the user is not stored")
    if actor.id is None and number_of_approvals(call) > 1:
        raise InvalidPayload(path="actor", reason="a call that needs several approvals needs an actor")


def _has_permission(user: ActingUser | None, permission: Any) -> bool:
    return user is not None and user.is_active and type(permission) is str and user.has_perm(permission)


# --- Answers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """A checked answer; ``fields`` are those of the entry, except ``submitted_at`` and ``actors``.

    It was checked against ``limits``, and the session's calls must stay within them. With a ``digest``, it
    only answers the call with this digest; ``input`` is the input to approve instead. A call's default answer
    does not depend on a person, so it needs no permission and is final.
    """

    fields: dict[str, Any]
    limits: Limits
    approval_id: str | None = None
    actor: CallActor = _NOBODY
    digest: str | None = None
    input: Any = UNSET
    is_default: bool = False

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
        elif self.approval_id is None and "approved" in self.fields:
            reason = f"the approval id is missing; pass approval_id={shown_id(expected)}"
            raise InvalidPayload(path="approval_id", reason=reason)
        elif self.approval_id != expected and ("approved" in self.fields or self.approval_id is not None):
            raise InvalidPayload(path="approval_id", reason="it is not the approval id of this call")


def checked_answer(
    *,
    result: Any = None,
    error: Any = None,
    approval_id: Any = None,
    approved: Any = None,
    reason: Any = None,
    actor: Any = None,
    digest: Any = None,
    input: Any = UNSET,
    limits: Limits,
) -> Answer:
    """Return a checked answer: a decision, an error, or a result, which may be ``None``.

    Raises `InvalidPayload`, and `LimitExceeded` if the answer is larger than ``max_message_bytes``.
    """
    validation.arguments(_RULES, approval_id=approval_id, digest=digest, reason=reason)
    fields: dict[str, Any]
    if approved is not None:
        if type(approved) is not bool:
            raise InvalidPayload(path="approved", reason="expected True or False")
        if result is not None or error is not None:
            raise InvalidPayload(path="approved", reason="a decision comes without a result or an error")
        fields = {"approved": approved, "reason": reason}
    elif reason is not None:
        raise InvalidPayload(path="reason", reason="only a decision takes a reason")
    elif error is None:
        fields = {"result": result}
    elif result is None:
        fields = {"error": error}
    else:
        raise InvalidPayload(path="error", reason="an answer is a result or an error, not both")
    texts = dict(fields)
    if input is not UNSET:
        if approved is not True:
            raise InvalidPayload(path="input", reason="only an approval changes the input")
        texts["input"] = input
    for name, value in texts.items():
        if value is not None and value is not approved:
            encode(value, limit=limits.max_message_bytes, name="max_message_bytes", path=f"/{name}")
    return Answer(fields, limits, approval_id, checked_actor(actor), digest, input)


def default_answer(call: PendingToolCall) -> dict[str, Any] | None:
    """Return the arguments of the answer to an overdue call, or ``None`` if it has no default."""
    default = call.on_expiry
    if default == "fail":
        return {**_EXPIRED["fail"]}
    if default == "reject":
        return {"approval_id": call.approval_id, **_EXPIRED["reject"]}
    if type(default) is dict and "result" in default:
        return {"result": default["result"]}
    return None


def answered(tool_call_id: str, entry: Mapping[str, Any], answer: Answer) -> dict[str, Any] | None:
    """Return the content of an open call to which the answer applies, or ``None`` if the content has changed.

    Raises `NotPermitted` and `InvalidPayload`.
    """
    call = current_call(entry)
    if not answer.is_default:
        require_permitted(tool_call_id, call, answer.actor)
    if answer.digest not in (None, call["digest"]):
        return None
    answer.require_fit(call)
    return call if answer.input is UNSET else edited(call, answer.input)


# --- Approved calls -------------------------------------------------------------------------------


def approved_calls(column: str | None) -> dict[str, Any]:
    """Return the contents of the column of approvals. Raises `IntegrityFault`."""
    approvals = {} if column is None else decode_object(column)
    if not all(type(approval) is dict for approval in approvals.values()):
        raise IntegrityFault("A stored approval is not a JSON object; other rows are not affected.")
    return approvals


def approved_call(tool_call_id: str, entry: Mapping[str, Any], approvals: Mapping[str, Any]) -> ApprovedCall:
    """Return the approved call. ``entry`` is the stored call, pending or completed, or an empty dict.

    Raises `ApprovalUsed` and `NotApproved`.
    """
    approval = approvals.get(tool_call_id)
    if approval is not None and "used_by" in approval:
        raise ApprovalUsed(tool_call_id, approval["used_by"])
    if not entry:
        raise NotApproved(tool_call_id, "unknown")
    if "submitted_at" not in entry:
        raise NotApproved(tool_call_id, "open")
    if entry.get("approved") is False or "error" in entry:
        raise NotApproved(tool_call_id, "expired" if _has_expired(entry) else "rejected")
    if approval is None and entry.get("approved") is True:
        # An earlier version stored this answer without actors, and nobody has taken it yet.
        approval = {**entry, "actors": []}
    if approval is None or "result" in entry or "tool_name" not in approval:
        raise NotApproved(tool_call_id, "unknown")
    tool_name, value = approval["tool_name"], approval.get("input")
    return ApprovedCall(
        tool_name=tool_name,
        input=value,
        actors=approval.get("actors", []),
        digest=digest_of(tool_name, value),
    )


def _has_expired(entry: Mapping[str, Any]) -> bool:
    """Return whether an answer is the default that applies at a deadline. Such an answer has no actors."""
    return "actors" not in entry and any(
        all(entry.get(name) == value for name, value in answer.items()) for answer in _EXPIRED.values()
    )


def used_approvals(column: str | None, uses: Mapping[str, ApprovedCall], step_id: str) -> str:
    """Return the column of approvals after a step has used some of them.

    The step's version guarantees that nobody has used them since it read them.
    """
    used = {
        tool_call_id: {"digest": call.digest, "actors": call.actors, "used_by": step_id}
        for tool_call_id, call in uses.items()
    }
    return encode({**approved_calls(column), **used}, limit=UNLIMITED)
