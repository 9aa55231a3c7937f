"""What a session waits for: calls to answer, sub-agents, staged changes, and a request to stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from helix_store.admin.documents import tree
from helix_store.admin.elements import NOTHING, json_block, printable
from helix_store.admin.names import name_of_status
from helix_store.admin.operating import Button
from helix_store.admin.payloads import payload_of, with_payloads
from helix_store.admin.sections.section import Section, SessionView
from helix_store.admin.session_operations import ANSWER
from helix_store.admin.times import distance, moment_of_epoch
from helix_store.core import moments
from helix_store.exceptions import shown_id
from helix_store.models import Session, StagedChange

__all__ = ["Waits", "open_calls"]

_CALLS: Final = 50
_STAGED: Final = 20
_LOGGED: Final = 200
_ANSWER_FIELDS: Final = ("result", "error", "approved", "reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that was or is to be answered. ``approval`` is the raw approval id, for the form."""

    id: str
    shown_id: str
    tool: str
    input: SafeString | str
    requested: SafeString | str
    deadline: SafeString | str
    is_overdue: bool
    default: str
    approval: str | None
    answer: str
    answer_value: SafeString | str
    answered: SafeString | str
    answered_by: str
    button: Button | None


def open_calls(document: Any) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a column that have no answer yet."""
    calls = document if isinstance(document, dict) else {}
    waiting = ((key, call) for key, call in calls.items() if isinstance(call, dict))
    return [(key, call) for key, call in waiting if "submitted_at" not in call]


class Waits(Section):
    name = "waits"
    label = _("Waiting")

    def context(self, view: SessionView) -> dict[str, Any]:
        view.read(
            "pending_client_tool_calls",
            "completed_client_tool_calls",
            "client_tool_call_ownership",
            "suspension_context",
            "suspended_awaiting_children",
        )
        pending = view.document("pending_client_tool_calls")
        completed = view.document("completed_client_tool_calls")
        logged = self._who(view) if pending or completed else {}
        buttons = view.buttons(ANSWER)
        button = buttons[0] if buttons else None
        answered = completed.items() if isinstance(completed, dict) else ()
        return {
            "pending": [_call(key, call, button, logged) for key, call in _items(pending)],
            "pending_text": json_block(view.texts["pending_client_tool_calls"])
            if _is_damaged(pending)
            else "",
            "completed": [_call(key, call, None, logged) for key, call in list(answered)[-_CALLS:][::-1]],
            "completed_count": len(answered),
            "completed_text": json_block(view.texts["completed_client_tool_calls"])
            if _is_damaged(completed)
            else "",
            "elsewhere": self._elsewhere(view),
            "suspension_kind": printable(name_of_status(view.session.suspension_kind or "")),
            "suspended_step": printable(view.session.suspended_step_id or ""),
            "suspension": _shown(view, "suspension_context"),
            "awaited": _shown(view, "suspended_awaiting_children"),
            "may_answer": view.may(ANSWER),
            "staged": self._staged(view) if view.may_view(StagedChange) else None,
            "next": view.url(),
        }

    def _who(self, view: SessionView) -> dict[str, str]:
        """Who answered a call in the admin, by the id of the call as the log shows it."""
        entries = LogEntry.objects.filter(
            content_type=ContentType.objects.get_for_model(Session), object_id=str(view.session.pk)
        ).order_by("-pk")
        found: dict[str, str] = {}
        for message, name in entries.values_list("change_message", "user__username")[:_LOGGED]:
            call_id, separator, _answer = message.rpartition(": ")
            if separator:
                found.setdefault(call_id, printable(name or ""))
        return found

    def _elsewhere(self, view: SessionView) -> list[Any]:
        """Links to the sessions below that own calls of this tree."""
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
        rows = StagedChange.objects.using(view.alias).filter(session=view.session.pk).order_by("pk")
        found = list(with_payloads(rows)[: _STAGED + 1])
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


def _items(document: Any) -> list[tuple[str, Any]]:
    return list(document.items())[:_CALLS] if isinstance(document, dict) else []


def _is_damaged(document: Any) -> bool:
    return document is not None and not isinstance(document, dict)


def _shown(view: SessionView, column: str) -> SafeString | str:
    return "" if view.texts[column] is None else json_block(view.texts[column])


def _call(key: str, call: Any, button: Button | None, logged: dict[str, str]) -> Call:
    entry = call if isinstance(call, dict) else {"input": call}
    deadline, approval = moment_of_epoch(entry.get("deadline")), entry.get("approval_id")
    is_answered = "submitted_at" in entry
    answer = next((name for name in ("approved", "error", "result") if name in entry), "")
    return Call(
        id=key,
        shown_id=printable(key),
        tool=_text(entry.get("tool_name")),
        input=tree(entry["input"]) if entry.get("input") is not None else "",
        requested=_time(entry.get("requested_at")),
        deadline="" if deadline is None else distance(deadline),
        is_overdue=not is_answered and deadline is not None and deadline < moments.now(),
        default=_default(entry.get("on_expiry")),
        approval=approval if isinstance(approval, str) else None,
        answer=_answer_word(answer, entry) if is_answered else "",
        answer_value=_answer_value(answer, entry) if is_answered else "",
        answered=_time(entry.get("submitted_at")),
        answered_by=logged.get(shown_id(key), "") if is_answered else "",
        button=None if is_answered else button,
    )


def _text(value: Any) -> str:
    return printable(value) if isinstance(value, str) else NOTHING


def _time(milliseconds: Any) -> SafeString | str:
    at = moment_of_epoch(milliseconds)
    return "" if at is None else distance(at)


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
    return "" if not answer or entry[answer] is None else tree(entry[answer])
