"""The calls that a session waits for, and the approvals that they need.

The rules of approvals and answers: who may answer a call, with which content; approved and used calls.

A call that asks for an approval can require several of them (``approvals``), and can be ``editable``. After
an edit, ``original_input`` holds the requested input.

Each answer to an approval is also stored as a `Decision`, outside the state, so that an agent that writes its
state decides nothing. A decision belongs to one *asking* of its call: it counts while the state still holds
the call as it was answered. The column ``live_decisions`` of the session says which decisions count, by tool
call id: the ``asking``, a ``mark`` of the call in the state, and ``by``, the people who have approved it.
Each write of a state removes the entries whose mark the new state does not have.

Rules of client tool calls: valid calls, valid answers, and the rule that the first answer counts.

A session stores its calls by tool call id in two documents. A *pending* call has ``tool_name``, ``input``,
``run_id``, ``requested_at``, ``deadline``, ``approval_id`` and, if given, ``on_expiry``; an answer adds
``submitted_at``, ``actors`` if they are known, and one of ``result``, ``error`` or ``approved`` with
``reason``. Every call has a ``digest``; `approvals` has the rules for other keys. When the agent takes the
answers, they move to the *completed* calls, which are never deleted: a durable mark of each answered call.
Times are epoch milliseconds. A call with an ``approval_id`` requests an approval, any other call a result.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import Any, Final, Literal, NamedTuple

from helix_store.core import validation
from helix_store.core.approvals import (
    USER,
    ActingUser,
    ApprovedCall,
    actor_text,
    canonical_json,
    digest_of,
    is_user,
    user_text,
)
from helix_store.core.limits import AS_STORED, UNLIMITED, Limits
from helix_store.core.payloads import decode, decode_object, encode, join_path, size_of
from helix_store.core.types import (
    TERMINAL_STATUSES,
    UNSET,
    PendingToolCall,
    SubmissionOutcome,
)
from helix_store.exceptions import (
    ApprovalUsed,
    ConflictError,
    IntegrityFault,
    InvalidPayload,
    NotApproved,
    NotPermitted,
    shown_id,
)

EDITED_FROM: Final = "original_input"

_MOST_APPROVALS: Final = 10
_KEYS_OF_APPROVALS: Final = (
    "tool_name",
    "input",
    "run_id",
    "requested_at",
    "deadline",
    "approval_id",
    "on_expiry",
    "permission",
    "requester",
    "requester_name",
    "approvals",
    "editable",
    "metadata",
    "digest",
)
_PERMISSION: Final = re.compile(r"[^\W\d]\w*\.[^\s.]+")
_FIRST_DEADLINE: Final = 946_684_800_000
"""The first moment of the year 2000: an earlier deadline is meant as a duration."""
_NOT_IN_IDS: Final = re.compile("[\x00\ud800-\udfff]")
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
_OF_ANSWERS: Final = frozenset(
    {"result", "error", "approved", "reason", "submitted_at", "actors", "approved_by"}
)
_EXPIRED: Final[dict[str, dict[str, Any]]] = {
    "fail": {"error": _FAILED_BY_DEFAULT},
    "reject": {"approved": False, "reason": _DEADLINE_PASSED},
}
"""The answers that the defaults of the same names give at a deadline."""


# --- Requirements of a call -----------------------------------------------------------------------


def check_demands(entry: Mapping[str, Any], path: str) -> None:
    """Check the keys of a new call that determine who may answer it, and how. Raises `InvalidPayload`.

    An approval has no other keys than those of the contract, because a slip such as ``permision`` would leave
    out a condition without an error.
    """
    is_approval = entry["approval_id"] is not None
    for name in entry if is_approval else ():
        if name not in _KEYS_OF_APPROVALS:
            (nearest,) = get_close_matches(name, _KEYS_OF_APPROVALS, n=1, cutoff=0.0)
            own = "an approval has no other keys, except your own data under metadata"
            raise InvalidPayload(path=join_path(path, name), reason=f"did you mean {nearest}? ({own})")
    if is_approval and type(entry.get("metadata", {})) is not dict:
        raise InvalidPayload(path=f"{path}/metadata", reason="expected a dict")
    if is_approval and entry["deadline"] is not None and entry["deadline"] < _FIRST_DEADLINE:
        reason = "it is before the year 2000; pass a timedelta for a duration from now"
        raise InvalidPayload(path=f"{path}/deadline", reason=reason)
    permission = validation.optional_identifier(entry.get("permission"), f"{path}/permission")
    if permission is not None and not _PERMISSION.fullmatch(permission):
        raise InvalidPayload(path=f"{path}/permission", reason='expected "app_label.codename"')
    for name in ("requester", "requester_name"):
        validation.optional_identifier(entry.get(name), f"{path}/{name}")
    for name in ("approvals", "editable"):
        if name in entry and not is_approval:
            raise InvalidPayload(path=f"{path}/{name}", reason="this call asks for a result, not approval")
    if "approvals" in entry:
        validation.whole_number(entry["approvals"], f"{path}/approvals", minimum=1, maximum=_MOST_APPROVALS)
    if "editable" in entry and type(entry["editable"]) is not bool:
        raise InvalidPayload(path=f"{path}/editable", reason="expected True or False")


def permissions_of(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the permissions that new calls need, each with the path of a call that needs it."""
    return {
        entry["permission"]: join_path("/calls", key) + "/permission"
        for key, entry in entries.items()
        if entry.get("permission") is not None
    }


def number_of_approvals(entry: Mapping[str, Any]) -> int:
    """Return the number of approvals that a call needs; a saved state may contain any value."""
    number = entry.get("approvals")
    return number if type(number) is int and 1 <= number <= _MOST_APPROVALS else 1


def current_call(entry: Mapping[str, Any], digest: str | None = None) -> dict[str, Any]:
    """Return an open call with the digest of its current content, and without what its state says of answers.

    A saved state may have replaced the content, and calls of earlier versions have no digest. ``digest`` is
    that of the current content if the caller has computed it.
    """
    call = {name: value for name, value in entry.items() if name not in _OF_ANSWERS}
    call["digest"] = digest or digest_of(entry.get("tool_name"), entry.get("input"))
    return call


def current_calls(pending: dict[str, Any], live: LiveDecisions) -> dict[str, Any]:
    """Return pending calls for a reader: each open call has the digest of its current content, and
    ``approved_by`` lists the people who have approved it.
    """
    return {key: _current(key, call, live) for key, call in pending.items()}


def _current(key: str, call: Any, live: LiveDecisions) -> Any:
    if type(call) is not dict or "digest" not in call or "submitted_at" in call:
        return call
    current = current_call(call)
    approved_by = live.approved_by(key, current)
    return {**current, "approved_by": approved_by} if approved_by else current


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

    def has_requested(self, call: Mapping[str, Any]) -> bool:
        """Return whether the requester of a call is this actor.

        If one of them is text, it may be the name or the key of the other one, a Django user, because it is
        not known which of them a caller has.
        """
        requester = call.get("requester")
        if self.user is not None:
            names = [self.id, str(self.user.pk), username(self.user)]
            return requester in names
        if self.id is None or type(requester) is not str:
            return False
        of_user = (requester.removeprefix(USER), call.get("requester_name"))
        return self.id == requester or (requester.startswith(USER) and self.id in of_user)


_NOBODY: Final = CallActor()


def username(user: ActingUser) -> str:
    """Return the name of a Django user."""
    return str(getattr(user, "get_username", user.__str__)())


def requester_fields(requester: Any, path: str) -> dict[str, Any]:
    """Return the fields of a new call with this requester.

    The name of a Django user is stored too, so that its text can be recognised without the user.
    """
    if not is_user(requester):
        return {}
    fields = {"requester": user_text(requester, path)}
    try:
        return {**fields, "requester_name": actor_text(username(requester), path)}
    except InvalidPayload:
        # No actor can be this text.
        return fields


def checked_actor(actor: Any) -> CallActor:
    """Return who answers. Raises `InvalidPayload` for anything other than a string or a Django user."""
    if actor is None:
        return _NOBODY
    if isinstance(actor, str):
        return CallActor(actor_text(actor, "actor"))
    if not is_user(actor):
        raise InvalidPayload(path="actor", reason="expected a string or a Django user")
    return CallActor(None if getattr(actor, "pk", None) is None else user_text(actor, "actor"), actor)


def require_permitted(tool_call_id: str, call: Mapping[str, Any], actor: CallActor) -> None:
    """Raise `NotPermitted` unless the actor may answer the call, and `InvalidPayload` if it needs a name."""
    permission, requester = call.get("permission"), call.get("requester")
    if permission is not None and not _has_permission(actor.user, permission):
        raise NotPermitted(tool_call_id, "permission", str(permission))
    if requester is not None and (actor.id is None or actor.has_requested(call)):
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


# --- Decisions ------------------------------------------------------------------------------------


class StoredDecision(NamedTuple):
    """One answer to an approval, by one person.

    ``asking`` is the version of the first decision about the same asking of the call, and ``version`` is the
    version of the session that the answer made; both are negative for answers from before there were
    decisions. ``outcome`` is ``approved``, ``rejected``, ``error`` or ``expired``. The ``content`` of a final
    approval is the tool's name and the input, as text. ``used_by_step`` or ``used_by_effect`` has used it.
    """

    asking: int
    version: int
    tool_call_id: str
    outcome: str
    is_final: bool
    actor: str | None
    digest: str | None
    content: str | None
    reason: str | None
    decided_at: datetime
    used_at: datetime | None = None
    used_by_step: str | None = None
    used_by_effect: str | None = None


class LiveDecisions:
    """The approvals of a session that count and are not used, as its column ``live_decisions`` has them."""

    def __init__(self, column: Any) -> None:
        """Read a column, as text or as a document. A damaged entry counts as none."""
        document = column
        if isinstance(column, str):
            with suppress(ValueError, RecursionError):
                document = json.loads(column)
        entries = document if type(document) is dict else {}
        self._entries: dict[str, dict[str, Any]] = {
            key: entry
            for key, entry in entries.items()
            if type(entry) is dict and type(entry.get("asking")) is int and type(entry.get("by")) is list
        }

    def column(self) -> dict[str, Any] | None:
        return self._entries or None

    def of_open(self, tool_call_id: str, call: Mapping[str, Any]) -> tuple[int | None, list[str]]:
        """Return the asking of an open call that people have approved already, and these people."""
        return self._with_mark(tool_call_id, _open_mark(call))

    def approved_by(self, tool_call_id: str, call: Mapping[str, Any]) -> list[str]:
        return self.of_open(tool_call_id, call)[1]

    def of_answered(self, tool_call_id: str, entry: Mapping[str, Any]) -> int | None:
        """Return the asking whose approval is the answer in an entry of the state."""
        return self._with_mark(tool_call_id, _approved_mark(entry.get("submitted_at")))[0]

    def askings(self) -> list[tuple[str, int]]:
        """Return the ids of the calls and the askings whose approvals count."""
        return [(key, entry["asking"]) for key, entry in self._entries.items()]

    def people(self, tool_call_id: str) -> list[str]:
        """Return everybody who has approved a call, for a page that names them."""
        entry = self._entries.get(tool_call_id, {"by": []})
        return [each for each in entry["by"] if type(each) is str]

    def record(self, tool_call_id: str, call: Mapping[str, Any], asking: int, by: list[str]) -> None:
        """Record the people who have approved an open call, or the answered call that they have approved."""
        mark = _approved_mark(call["submitted_at"]) if "submitted_at" in call else _open_mark(call)
        self._entries[tool_call_id] = {"asking": asking, "mark": mark, "by": by}

    def end(self, tool_call_ids: Iterable[str]) -> None:
        """End the decisions of these calls, because somebody has answered again."""
        for tool_call_id in tool_call_ids:
            self._entries.pop(tool_call_id, None)

    def use(self, askings: Iterable[int]) -> None:
        """End the decisions of these askings, because a step uses them."""
        used = set(askings)
        self._entries = {key: each for key, each in self._entries.items() if each["asking"] not in used}

    def keep(self, marks: Mapping[str, str]) -> None:
        """End the decisions about calls that a new state does not have, or not as they were answered."""
        self._entries = {
            key: entry for key, entry in self._entries.items() if entry.get("mark") == marks.get(key, "")
        }

    def _with_mark(self, tool_call_id: str, mark: str) -> tuple[int | None, list[str]]:
        entry = self._entries.get(tool_call_id)
        if entry is None or entry.get("mark") != mark:
            return None, []
        return entry["asking"], [each for each in entry["by"] if type(each) is str]


def marks_of(pending: Any, completed: Any) -> dict[str, str]:
    """Return the marks of a state's calls about which a live decision may exist, by tool call id."""
    marks = {key: _answered_mark(entry) for key, entry in _items(completed)}
    for key, entry in _items(pending):
        if "submitted_at" in entry:
            marks[key] = _answered_mark(entry)
        elif number_of_approvals(entry) > 1:
            marks[key] = _open_mark(current_call(entry))
    return {key: mark for key, mark in marks.items() if mark and not _NOT_IN_IDS.search(key)}


def _items(calls: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(key, entry) for key, entry in calls.items() if type(entry) is dict] if calls else []


def _answered_mark(entry: Mapping[str, Any]) -> str:
    is_other = "result" in entry or "error" in entry or entry.get("approved") is False
    return "" if is_other else _approved_mark(entry.get("submitted_at"))


def _approved_mark(submitted_at: Any) -> str:
    return f"approved {submitted_at}" if type(submitted_at) is int else "?"


def _open_mark(call: Mapping[str, Any]) -> str:
    """Return the mark of an open call. A call that is asked again is another one, so it has another mark."""
    requested_at = call.get("requested_at")
    return f"open {requested_at if type(requested_at) is int else None} {call['digest']}"


def without_used(column: Any, askings: Iterable[int]) -> dict[str, Any] | None:
    """Return the live decisions without those that a step uses."""
    live = LiveDecisions(column)
    live.use(askings)
    return live.column()


def decision_outcome(answer: Answer) -> str:
    """Return the outcome that a decision with this answer has."""
    if answer.fields.get("approved") is True:
        return "approved"
    if answer.is_default or (answer.actor.id is None and _has_expired(answer.fields)):
        return "expired"
    return "error" if "error" in answer.fields else "rejected"


def content_of(call: Mapping[str, Any]) -> str:
    """Return the tool's name and the input of an approved call, as text."""
    return encode([call.get("tool_name"), call.get("input")], limit=UNLIMITED)


def call_in(content: str) -> tuple[Any, Any]:
    """Return the tool's name and the input that `content_of` has written. Raises `IntegrityFault`."""
    call = decode(content)
    if type(call) is not list or len(call) != 2:
        raise IntegrityFault("A stored decision does not hold an approved call; other rows are not affected.")
    return call[0], call[1]


# --- Approved calls -------------------------------------------------------------------------------


def approved_call(
    tool_call_id: str,
    entry: Mapping[str, Any],
    live: LiveDecisions,
    decisions: Sequence[StoredDecision],
    *,
    is_pending: bool,
    is_own: bool,
) -> tuple[int, ApprovedCall]:
    """Return the asking and the approved call.

    ``entry`` is the call in the state, pending or completed, or an empty dict; ``is_own`` is true if the
    session has asked for it. ``decisions`` are those of the call, the oldest first. Raises `ApprovalUsed` and
    `NotApproved`.
    """
    for each in decisions:
        if each.used_at is not None:
            raise ApprovalUsed(tool_call_id, each.used_by_step, each.used_by_effect)
    if not entry:
        raise NotApproved(tool_call_id, "unknown")
    if "submitted_at" not in entry:
        raise NotApproved(tool_call_id, "open")
    asking = live.of_answered(tool_call_id, entry)
    of_asking = [each for each in decisions if each.asking == asking]
    content = of_asking[-1].content if of_asking else None
    if content is None:
        raise NotApproved(tool_call_id, _refusal(entry, decisions, is_pending=is_pending, is_own=is_own))
    final = of_asking[-1]
    tool_name, value = call_in(content)
    actors = [each.actor for each in of_asking if each.actor is not None]
    return final.asking, ApprovedCall(
        tool_name=tool_name, input=value, actors=actors, digest=digest_of(tool_name, value)
    )


def _refusal(
    entry: Mapping[str, Any], decisions: Sequence[StoredDecision], *, is_pending: bool, is_own: bool
) -> Literal["rejected", "expired", "open", "unknown"]:
    """Return why a call that the state says is answered is not approved."""
    newest = decisions[-1] if decisions else None
    if newest is not None and is_answer(newest, entry):
        if newest.outcome == "approved":
            # Its question was removed, which ended the approval, even if the answer is in the state again.
            return "open"
        return "expired" if newest.outcome == "expired" else "rejected"
    if "result" in entry:
        return "unknown"
    is_rejected = entry.get("approved") is False or "error" in entry
    if is_rejected and not (is_pending and entry.get("approval_id") is not None):
        # It was stored before there were decisions, or the call asked for a result.
        return "expired" if _has_expired(entry) else "rejected"
    # Nobody has given this answer: the agent has written it.
    return "open" if is_own or is_pending else "unknown"


def is_answer(decision: StoredDecision, entry: Mapping[str, Any]) -> bool:
    """Return whether a decision is the answer that an entry of the state holds."""
    return decision.is_final and was_answered_at(entry, decision.decided_at)


def was_answered_at(entry: Mapping[str, Any], moment: datetime) -> bool:
    """Return whether an entry of the state has an answer from this moment."""
    return entry.get("submitted_at") == validation.datetime_to_milliseconds(moment)


def is_over(decision: StoredDecision, entry: Mapping[str, Any]) -> bool:
    """Return whether an answer that is not a live approval is final: a rejection, or a used approval."""
    return is_answer(decision, entry) and (decision.outcome != "approved" or decision.used_at is not None)


def _has_expired(entry: Mapping[str, Any]) -> bool:
    """Return whether an answer is the default that applies at a deadline. Such an answer has no actors."""
    return "actors" not in entry and any(
        all(entry.get(name) == value for name, value in answer.items()) for answer in _EXPIRED.values()
    )


_logger = logging.getLogger(__name__)

_ANSWER_FIELDS: Final = ("result", "error", "approved", "reason", "submitted_at", "actors")
_FIELDS_OF_ANSWERS: Final = (*_ANSWER_FIELDS, "approved_by", EDITED_FROM)
"""The fields that only answers add to a call."""
_SHARE_OF_COMPLETED: Final = 4
"""Completed calls take at most one fourth of ``max_state_bytes``; the oldest are reduced to a mark."""


def checked_calls(calls: Any, *, requested_at: int, limits: Limits) -> dict[str, dict[str, Any]]:
    """Check new calls, and return their entries in order. Raises `InvalidPayload` and `LimitExceeded`.

    An entry has all fields and can be up to ``max_message_bytes`` long. A call for a result keeps unknown
    keys.
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
    entry.update(requester_fields(entry.get("requester"), f"{path}/requester"))
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
    # An approval may be asked for with "reject" before anybody knows its deadline.
    if entry["deadline"] is None and (default != "reject" or entry["approval_id"] is None):
        raise InvalidPayload(path=path, reason="a default needs a deadline")
    if entry["approval_id"] is None:
        if default != "fail" and not (type(default) is dict and default.keys() == {"result"}):
            raise InvalidPayload(path=path, reason='expected "fail" or {"result": …}')
    elif default not in ("fail", "reject"):
        raise InvalidPayload(path=path, reason='an approval takes "fail" or "reject"')


class ToolCalls:
    """The pending and completed calls of one session by tool call id, and its live decisions.

    The live decisions are only needed to find the open calls, to answer a call, and to use an approval.
    """

    def __init__(self, pending: Mapping[str, Any], completed: Mapping[str, Any], live: Any = None) -> None:
        self.pending = dict(pending)
        self.completed = dict(completed)
        self.live = LiveDecisions(live)
        self.decision: StoredDecision | None = None
        """The decision to store with the answer that `answer` has added."""

    @classmethod
    def stored(cls, pending: str | None, completed: str | None, live: Any = None) -> ToolCalls:
        """Return the calls in the columns of a session. Raises `IntegrityFault`."""
        return cls(_stored(pending), _stored(completed), live)

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> ToolCalls:
        """Return the calls in these columns of a session, by name. Raises `IntegrityFault`."""
        names = ("pending_client_tool_calls", "completed_client_tool_calls", "live_decisions")
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
        """The calls for which the state holds no answer, so that the agent cannot continue with them."""
        return {
            tool_call_id: entry
            for tool_call_id, value in self.pending.items()
            if (entry := _entry(value)) and "submitted_at" not in entry
        }

    def is_answered(self, decisions: Iterable[StoredDecision]) -> bool:
        """Return whether there are answers to take and no call is `open`."""
        return any(map(_entry, self.pending.values())) and not self.open(decisions)

    @property
    def claimed(self) -> dict[str, dict[str, Any]]:
        """The approvals whose answers in the state may be the agent's own: they are not live approvals."""
        return {
            tool_call_id: entry
            for tool_call_id, value in self.pending.items()
            if "submitted_at" in (entry := _entry(value))
            and entry.get("approval_id") is not None
            and self.live.of_answered(tool_call_id, entry) is None
            and not _NOT_IN_IDS.search(tool_call_id)
        }

    @property
    def doubtful(self) -> dict[str, dict[str, Any]]:
        """The claimed approvals whose deadlines come before those of all unanswered calls."""
        deadline = earliest_deadline(self.unanswered)
        return {
            tool_call_id: entry
            for tool_call_id, entry in self.claimed.items()
            if (own := earliest_deadline({tool_call_id: entry})) and (deadline is None or own < deadline)
        }

    def open(self, decisions: Iterable[StoredDecision]) -> dict[str, dict[str, Any]]:
        """Return the calls that somebody still has to answer. ``decisions`` include those of `claimed` calls.

        An answer to an approval that only the state holds has no effect.
        """
        claimed = self.claimed
        for each in decisions if self.decision is None else (*decisions, self.decision):
            if each.tool_call_id in claimed and is_over(each, claimed[each.tool_call_id]):
                del claimed[each.tool_call_id]
        return {
            tool_call_id: entry
            for tool_call_id, value in self.pending.items()
            if (entry := _entry(value)) and ("submitted_at" not in entry or tool_call_id in claimed)
        }

    def add(self, entries: Mapping[str, dict[str, Any]]) -> list[str]:
        """Add calls and return the ids of the new ones.

        Raises `ConflictError` if an id has another call.
        """
        new = {}
        for tool_call_id, entry in entries.items():
            if tool_call_id in self.completed:
                raise _taken(tool_call_id, "was answered before")
            if tool_call_id not in self.pending:
                new[tool_call_id] = entry
            elif not _is_repeat(_entry(self.pending[tool_call_id]), entry):
                raise _taken(tool_call_id, "is another pending tool call")
        self.pending.update(new)
        return list(new)

    def answer(
        self,
        tool_call_id: str,
        answer: Answer,
        *,
        submitted_at: int,
        status: str,
        version: int,
        decisions: Sequence[StoredDecision],
    ) -> SubmissionOutcome:
        """Store an answer to an open call, unless the session has ended. The first final answer counts.

        ``version`` is the next version of the session. ``decisions`` are those of the `claimed` calls. Raises
        `NotPermitted` and `InvalidPayload`.
        """
        entry = _entry(self.pending.get(tool_call_id))
        if tool_call_id in self.completed:
            return SubmissionOutcome.ALREADY_COMPLETED
        if "submitted_at" in entry and tool_call_id not in self.open(decisions):
            return SubmissionOutcome.ALREADY_COMPLETED
        if not entry or status in TERMINAL_STATUSES:
            return SubmissionOutcome.UNKNOWN_TOOL_CALL
        call = answered(tool_call_id, entry, answer)
        if call is None:
            return SubmissionOutcome.CHANGED
        actor = answer.actor.id
        asking, earlier = self.live.of_open(tool_call_id, call)
        is_approval = answer.fields.get("approved") is True
        actors = [] if actor is None else [actor]
        if is_approval:
            if actor in earlier:
                return SubmissionOutcome.ALREADY_RECORDED
            actors = [*earlier, *actors]
        is_final = not is_approval or len(earlier) + 1 >= number_of_approvals(call)
        stored = dict(call)
        if is_final:
            stored |= answer.fields | {"submitted_at": submitted_at}
            stored |= {"actors": actors} if actors else {}
        self.pending[tool_call_id] = stored
        if call.get("approval_id") is not None:
            asking = version if asking is None else asking
            self.live.end([tool_call_id])
            if is_approval:
                self.live.record(tool_call_id, stored, asking, actors)
            self.decision = StoredDecision(
                asking=asking,
                version=version,
                tool_call_id=tool_call_id,
                outcome=decision_outcome(answer),
                is_final=is_final,
                actor=actor,
                digest=call["digest"],
                content=content_of(call) if is_approval and is_final else None,
                reason=answer.fields.get("reason"),
                decided_at=validation.milliseconds_to_datetime(submitted_at),
            )
        return SubmissionOutcome.ACCEPTED if is_final else SubmissionOutcome.RECORDED

    def approved_call(
        self, tool_call_id: str, decisions: Sequence[StoredDecision], *, is_own: bool
    ) -> tuple[int, ApprovedCall]:
        """Return the asking and the approved call. Raises `ApprovalUsed` and `NotApproved`."""
        is_pending = tool_call_id in self.pending
        entry = _entry((self.pending if is_pending else self.completed).get(tool_call_id))
        return approved_call(tool_call_id, entry, self.live, decisions, is_pending=is_pending, is_own=is_own)

    def approved_again(
        self, tool_call_id: str, decisions: Sequence[StoredDecision], *, is_own: bool
    ) -> ApprovedCall | None:
        """Return a call whose approval an effect has used, as it was approved in a newer asking.

        Return ``None`` if it was not asked again, or if the state has no such call. Raises `NotApproved`.
        """
        entry = _entry(self.pending.get(tool_call_id, self.completed.get(tool_call_id)))
        used = next((each.asking for each in decisions if each.used_by_effect is not None), None)
        if not entry or used is None or (decisions[-1].asking == used and is_answer(decisions[-1], entry)):
            return None
        newer = [each for each in decisions if each.asking != used]
        return self.approved_call(tool_call_id, newer, is_own=is_own)[1]

    def take(self, tool_call_ids: Container[str]) -> dict[str, Any]:
        """Move those of these calls that are answered to the completed ones, and return their answers."""
        taken = {key: answer for key, answer in self.answers.items() if key in tool_call_ids}
        for tool_call_id in taken:
            del self.pending[tool_call_id]
        self.completed.update(taken)
        return taken

    def take_given(self, decisions: Iterable[StoredDecision]) -> dict[str, Any]:
        """Take the answers that somebody has given. ``decisions`` include those of `claimed` calls."""
        return self.take(self.answers.keys() - self.open(decisions).keys())

    def kept(self, limits: Limits) -> dict[str, Any]:
        """Return the completed calls in their stored form."""
        return _within(self.completed, limits.max_state_bytes // _SHARE_OF_COMPLETED)

    def columns(self, limits: Limits, decisions: Iterable[StoredDecision]) -> dict[str, Any]:
        """Return the columns of the session's head. ``decisions`` include those of `doubtful` calls.

        Raises `LimitExceeded` if pending calls are too large.
        """
        completed = self.kept(limits)
        decided = {} if self.decision is None else {"live_decisions": self.live.column()}
        return {
            **decided,
            "pending_client_tool_calls": _column("pending_client_tool_calls", self.pending, limits),
            "pending_deadline": earliest_deadline(self.open(decisions)),
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
    ignored = {*_FIELDS_OF_ANSWERS, "requested_at", "digest", "requester_name"}
    if EDITED_FROM in asked:
        asked = {**asked, "input": asked[EDITED_FROM]}
    if asked.get("deadline") is entry["deadline"] is None:
        # A default has no effect without a deadline, and earlier versions did not store it.
        ignored.add("on_expiry")
    # Python finds 1 equal to 1.0 and to True.
    first, second = (
        canonical_json({name: value for name, value in call.items() if name not in ignored})
        for call in (asked, entry)
    )
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


def waiting_calls(columns: Mapping[str, Any]) -> ToolCalls:
    """Return the calls of a session that can still be answered, given its columns.

    The calls of a session that has ended are not open. A state that cannot be read has none.
    """
    if columns["status"] not in TERMINAL_STATUSES:
        with suppress(IntegrityFault):
            return ToolCalls.stored(columns["pending_client_tool_calls"], None, columns["live_decisions"])
    return ToolCalls({}, {})


def opened_calls(before: ToolCalls, after: ToolCalls, decisions: Sequence[StoredDecision]) -> list[str]:
    """Return the ids of the calls that a write of a whole state opens; both are `waiting_calls`.

    ``decisions`` include those of the `claimed` calls of both.
    """
    known = before.open(decisions)
    return [tool_call_id for tool_call_id in after.open(decisions) if tool_call_id not in known]


def approvals_in_branch(completed: dict[str, Any], decided: Container[str]) -> dict[str, Any]:
    """Return the completed calls of a branch, of which those that people have ``decided`` are approvals.

    A branch has no decisions, and an answer with an error, or one that was reduced to a mark, does not show
    whether the call has asked for an approval.
    """
    return {
        key: {**entry, "approval_id": key} if key in decided and not _shows_kind(entry) else entry
        for key, entry in completed.items()
    }


def are_kinds_shown(completed: Mapping[str, Any]) -> bool:
    """Return whether each completed call shows what it has asked for."""
    return all(map(_shows_kind, completed.values()))


def _shows_kind(entry: Any) -> bool:
    return type(entry) is not dict or not entry.keys().isdisjoint(("approved", "result", "approval_id"))


def earliest_deadline(calls: Mapping[str, Mapping[str, Any]]) -> datetime | None:
    """Return the earliest deadline of open calls; calls without a usable deadline wait forever."""
    deadlines = [call["deadline"] for call in calls.values() if type(call.get("deadline")) is int]
    usable = [deadline for deadline in deadlines if 0 <= deadline <= validation.MAX_EPOCH_MILLISECONDS]
    return validation.milliseconds_to_datetime(min(usable)) if usable else None


def overdue_in(pending: str | None, live: Any, now: int) -> ToolCalls:
    """Return the calls in a column of pending calls whose deadline has passed, answered or not.

    Raises `IntegrityFault`.
    """
    calls = {
        tool_call_id: entry
        for tool_call_id, value in _stored(pending).items()
        if type((entry := _entry(value)).get("deadline")) is int and entry["deadline"] <= now
    }
    return ToolCalls(calls, {}, live)


def due_calls(session_id: str, calls: Mapping[str, Mapping[str, Any]]) -> list[PendingToolCall]:
    """Return the values of open calls whose deadline has passed."""
    return [
        PendingToolCall(
            session_id=session_id,
            tool_call_id=tool_call_id,
            tool_name=_text(entry.get("tool_name")) or "",
            deadline=entry["deadline"],
            approval_id=_text(entry.get("approval_id")),
            on_expiry=entry.get("on_expiry"),
        )
        for tool_call_id, entry in calls.items()
    ]


def readable_overdue(session_id: str, pending: str | None, live: Any, now: int) -> ToolCalls:
    """Return `overdue_in`; for an unreadable row, log a warning instead, so that other sessions continue."""
    try:
        return overdue_in(pending, live, now)
    except IntegrityFault as fault:
        _logger.warning("The pending tool calls of session %r cannot be read: %s", session_id, fault)
        return ToolCalls({}, {})


def owner_of(ownership: str | None, tool_call_id: str) -> str | None:
    """Return the owner of a call, according to the root session's ownership column."""
    return _text(_stored(ownership).get(tool_call_id))


def may_be_own(columns: Mapping[str, Any], session_id: str, tool_call_id: str) -> bool:
    """Return whether a session, of which these are columns, may have asked for a call.

    A session of which a branch was made records its own calls, as every root does. Those of a child are
    recorded on its root, and the calls in its state are its own.
    """
    if columns["root_session_id"] not in (None, session_id):
        return True
    return owner_of(columns["client_tool_call_ownership"], tool_call_id) == session_id


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
