"""Rules of answers to tool calls: their content, the call that they match, and the default answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.core.payloads import encode
from helix_store.core.types import UNSET, PendingToolCall
from helix_store.exceptions import InvalidPayload, shown_id
from helix_store.sessions.approvals import NOBODY, CallActor, checked_actor, expired_answers

__all__ = ["Answer", "checked_answer", "default_answer"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A checked answer; ``fields`` are those of the entry, except ``submitted_at`` and ``actors``.

    With a ``digest``, it answers only the call with this digest; ``input`` is the input to approve instead. A
    call's default answer is for everybody, so it needs no permission and is final.
    """

    fields: dict[str, Any]
    approval_id: str | None = None
    actor: CallActor = NOBODY
    digest: str | None = None
    input: Any = UNSET
    is_default: bool = False

    def require_fit(self, entry: Mapping[str, Any]) -> None:
        """Raise `InvalidPayload` unless this answers a call of the entry's kind.

        An approval takes a decision with its approval id, or an error; any other call a result or an error.
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
    texts = dict(fields)
    if input is not UNSET:
        if approved is not True:
            raise InvalidPayload(path="input", reason="only an approval changes the input")
        texts["input"] = input
    for name, value in texts.items():
        encode(value, limit=limits.max_message_bytes, name="max_message_bytes", path=f"/{name}")
    validation.optional_identifier(digest, "digest")
    return Answer(fields, approval_id, checked_actor(actor), digest, input)


def default_answer(call: PendingToolCall) -> dict[str, Any] | None:
    """Return the arguments of the answer to an overdue call, or ``None`` if it has no default."""
    default = call.on_expiry
    if default == "fail":
        return {**expired_answers["fail"]}
    if default == "reject":
        return {"approval_id": call.approval_id, **expired_answers["reject"]}
    if type(default) is dict and "result" in default:
        return {"result": default["result"]}
    return None
