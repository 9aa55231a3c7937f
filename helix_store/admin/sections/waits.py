"""The reasons why a session waits: calls to answer, sub-agents, staged changes, and a request to stop."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from helix_store.actions.answers import ANSWER, WHOLE, mark_of_end
from helix_store.admin.documents import difference
from helix_store.admin.elements import NOTHING, json_block, printable, value_block
from helix_store.admin.labels import name_of_status
from helix_store.admin.operating import Button
from helix_store.admin.sections.section import UNREADABLE, Section, SessionView
from helix_store.admin.times import distance, moment_of_epoch
from helix_store.core import moments
from helix_store.core.limits import MAX_BIGINT
from helix_store.exceptions import NotPermitted
from helix_store.models import StagedChange
from helix_store.reports.comparison import changes_between
from helix_store.reports.payloads import json_start, payload_of, with_payloads
from helix_store.sessions.approvals import (
    EDITED_FROM,
    checked_actor,
    current_call,
    number_of_approvals,
    require_permitted,
)
from helix_store.sessions.tool_calls import ToolCalls

_CALLS: Final = 50
_STAGED: Final = 20
_PART: Final = 100_000
_SHOWN: Final = 60_000
"""The maximum number of characters of the inputs of open calls on one page."""
_USER: Final = "user:"
_REFUSALS: Final = {
    "permission": _("You may not answer it: it needs an active user with its permission."),
    "requester": _("You may not answer it: somebody other than the requester must answer it."),
}


def open_calls(document: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls of a column that have no answer yet."""
    return list(ToolCalls(document if isinstance(document, dict) else {}, {}).unanswered.items())


class Waits(Section):
    name = "waits"
    label = _("Waiting")

    def context(self, view: SessionView) -> dict[str, Any]:
        view.read(
            "pending_client_tool_calls",
            "completed_client_tool_calls",
            "approved_tool_calls",
            "client_tool_call_ownership",
            "suspension_context",
            "suspended_awaiting_children",
        )
        # A person reads a call's input to its end.
        pending = view.whole_document("pending_client_tool_calls")
        is_cut = view.is_cut("completed_client_tool_calls")
        completed = UNREADABLE if is_cut else view.document("completed_client_tool_calls")
        button = view.button(ANSWER)
        answered = completed.items() if isinstance(completed, dict) else ()
        newest = list(answered)[-_CALLS:][::-1]
        people = _People.of([*_items(pending), *newest])
        approved = view.document("approved_tool_calls")
        used = approved if isinstance(approved, dict) else {}
        return {
            "pending": _open(view, pending, button, people, used),
            "pending_text": _damaged_text(view, "pending_client_tool_calls", pending),
            "completed": [_call(key, call, None, people, used.get(key)) for key, call in newest],
            "completed_count": len(answered),
            "completed_text": _damaged_text(view, "completed_client_tool_calls", completed),
            "elsewhere": self._elsewhere(view),
            "suspension_kind": printable(name_of_status(view.session.suspension_kind or "")),
            "suspended_step": printable(view.session.suspended_step_id or ""),
            "suspension": _shown(view, "suspension_context"),
            "awaited": _shown(view, "suspended_awaiting_children"),
            "may_answer": ANSWER.is_permitted(view.request.user),
            "staged": self._staged(view) if view.may_view(StagedChange) else None,
            "next": view.url(),
        }

    def _elsewhere(self, view: SessionView) -> list[Any]:
        """Return links to the sub-sessions that own calls of this tree."""
        owners = view.document("client_tool_call_ownership")
        if not isinstance(owners, dict):
            return []
        others = [
            owner
            for owner in dict.fromkeys(str(each) for each in list(owners.values())[-_CALLS:])
            if owner != view.session.session_id
        ]
        links = view.session_links(others)
        return [links[owner] for owner in others]

    def _staged(self, view: SessionView) -> dict[str, Any]:
        found = list(with_payloads(view.rows(StagedChange).order_by("pk"))[: _STAGED + 1])
        return {
            "has_more": len(found) > _STAGED,
            "rows": [
                {
                    "step": printable(row.step_id),
                    "call": printable(row.tool_call_id),
                    "at": distance(row.created_at),
                    "changes": json_block(payload_of(row, "payload")),
                }
                for row in found[:_STAGED]
            ],
        }


def _open(
    view: SessionView, document: Any, button: Button | None, people: _People, used: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the pending calls, or only the one that the URL names."""
    calls = dict(_items(document))
    named = view.text("call")
    if isinstance(document, dict) and named in document:
        calls = {named: document[named]}
    room = _SHOWN
    found = []
    for key, call in calls.items():
        entry = call if isinstance(call, dict) else {"input": call}
        text, is_cut = json_start(entry.get("input"), min(room, WHOLE))
        shown = _call(key, call, button, people, used.get(key))
        found.append(shown)
        if "answer" in shown:
            continue
        shown["demands"] = _demands(view, key, entry, people)
        if not is_cut:
            room -= len(text)
            changes = changes_between(entry[EDITED_FROM], entry.get("input")) if EDITED_FROM in entry else ()
            shown["whole"] = "" if entry.get("input") is None else printable(text)
            shown |= {"may_approve": True, "editor": _editable_text(entry), "changes": difference(changes)}
        elif key == named:
            shown |= _part(view, key, entry)
        else:
            shown["read_url"] = view.url(call=key)
    return found


def _part(view: SessionView, key: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a long input. Only the last part can be approved."""
    text = json.dumps(entry.get("input"), indent=2, ensure_ascii=False)
    count = -(-len(text) // _PART)
    number = min(max(view.number("part") or 1, 1), count)
    is_last = number == count
    return {
        "part": {
            "text": printable(text[(number - 1) * _PART : number * _PART]),
            "number": number,
            "count": count,
            "mark": mark_of_end(view.request.user, current_call(entry)["digest"]) if is_last else "",
        },
        "previous_url": view.url(call=key, part=number - 1) if number > 1 else "",
        "next_url": "" if is_last else view.url(call=key, part=number + 1),
        "may_approve": is_last,
    }


def _items(document: Any) -> list[tuple[str, Any]]:
    return list(document.items())[:_CALLS] if isinstance(document, dict) else []


def _damaged_text(view: SessionView, column: str, document: Any) -> SafeString | str:
    return "" if document is None or isinstance(document, dict) else json_block(view.texts[column])


def _shown(view: SessionView, column: str) -> SafeString | str:
    return "" if view.texts[column] is None else json_block(view.texts[column])


def _demands(view: SessionView, key: str, entry: dict[str, Any], people: _People) -> dict[str, Any]:
    """Return who may answer a call, who has approved it, and why this user may not answer it."""
    call, user = current_call(entry), checked_actor(view.request.user)
    refusal = ""
    try:
        require_permitted(key, call, user)
    except NotPermitted as exc:
        refusal = str(_REFUSALS[exc.reason])
    approved_by = call.get("approved_by", [])
    return {
        "requester": people.named(call.get("requester")),
        "permission": printable(str(call.get("permission") or "")),
        "approvals": number_of_approvals(call),
        "approved": len(approved_by),
        "approved_by": people.names(approved_by),
        "refusal": refusal,
        "has_approved": user.id in approved_by,
    }


def _editable_text(entry: dict[str, Any]) -> str:
    """Return the input to edit, with invisible characters escaped; empty if it is not editable."""
    if entry.get("editable") is not True:
        return ""
    value = entry.get("input")
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return text if printable(text) == text else json.dumps(value, indent=2)


@dataclass(frozen=True, slots=True)
class _People:
    """The names of the Django users among the actors of some of the calls."""

    users: dict[str, str]

    @classmethod
    def of(cls, calls: list[tuple[str, Any]]) -> _People:
        actors = {
            actor
            for _key, call in calls
            if isinstance(call, dict)
            for actor in (*_list(call.get("actors")), *_list(call.get("approved_by")), call.get("requester"))
            if isinstance(actor, str) and actor.startswith(_USER)
        }
        model = get_user_model()
        keys = {}
        for actor in actors:
            with suppress(ValidationError):
                key = model._meta.pk.to_python(actor.removeprefix(_USER))
                if not isinstance(key, int) or 0 < key <= MAX_BIGINT:
                    keys[key] = actor
        found = model._default_manager.in_bulk(keys) if keys else {}
        return cls({keys[key]: user.get_username() for key, user in found.items()})

    def named(self, actor: Any) -> str:
        """Return the name of a user, or any other text in quotes, so it is not mistaken for a name."""
        if not isinstance(actor, str):
            return ""
        if actor in self.users:
            return printable(self.users[actor])
        return printable(actor if actor.startswith(_USER) else f"“{actor}”")

    def names(self, actors: Any) -> str:
        return ", ".join(filter(None, map(self.named, _list(actors))))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _call(
    key: str, call: Any, button: Button | None, people: _People, approved: Any = None
) -> dict[str, Any]:
    """Return a call, answered or not. ``approval`` is the approval id as stored, for the form."""
    entry = call if isinstance(call, dict) else {"input": call}
    deadline, approval = moment_of_epoch(entry.get("deadline")), entry.get("approval_id")
    shown = {
        "id": key,
        "shown_id": printable(key),
        "tool": _text(entry.get("tool_name")),
        "requested": distance(moment_of_epoch(entry.get("requested_at"))),
        "deadline": distance(deadline),
        "default": _default(entry.get("on_expiry")),
        "approval": approval if isinstance(approval, str) else None,
        "used_by": _text(approved["used_by"]) if isinstance(approved, dict) and "used_by" in approved else "",
    }
    if "submitted_at" not in entry:
        is_overdue = deadline is not None and deadline < moments.now()
        return {**shown, "is_overdue": is_overdue, "digest": current_call(entry)["digest"], "button": button}
    answer = next((name for name in ("approved", "error", "result") if name in entry), "")
    return {
        **shown,
        "input": _block(entry.get("input")),
        "answer": _answer_word(answer, entry),
        "answer_value": _answer_value(answer, entry),
        "answered": distance(moment_of_epoch(entry["submitted_at"])),
        "answered_by": people.names(entry.get("actors")),
    }


def _text(value: Any) -> str:
    return printable(value) if isinstance(value, str) else NOTHING


def _default(default: Any) -> str:
    if default == "fail":
        return str(_("fails with an error"))
    if default == "reject":
        return str(_("is rejected"))
    return "" if default is None else str(_("gets its default result"))


def _answer_word(answer: str, entry: dict[str, Any]) -> str:
    if answer == "approved":
        return str(_("approved") if entry["approved"] is True else _("rejected"))
    return str({"error": _("answered with an error"), "result": _("answered")}.get(answer, _("answered")))


def _answer_value(answer: str, entry: dict[str, Any]) -> SafeString | str:
    if answer == "approved":
        return _text(entry["reason"]) if entry.get("reason") else ""
    return _block(entry.get(answer))


def _block(value: Any) -> SafeString | str:
    return "" if value is None else value_block(value)
