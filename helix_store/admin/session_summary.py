"""The top of the session page: what the session is, why it is waiting or has failed, and what it costs."""

from __future__ import annotations

from typing import Any, Final

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from helix_store.actions.sessions import CLEAR_INTERRUPT
from helix_store.admin.budgets import limit_words
from helix_store.admin.elements import (
    badge,
    identifier,
    json_block,
    one_line,
    printable,
    progress,
    value_block,
)
from helix_store.admin.labels import name_of_status
from helix_store.admin.sections.section import ENVELOPE, SessionView
from helix_store.admin.sections.waits import open_calls
from helix_store.admin.times import distance
from helix_store.core import moments
from helix_store.core.types import NON_TERMINAL_STATUSES, RunStatus, SessionStatus
from helix_store.core.usage import rounded_cost
from helix_store.exceptions import HelixStoreError
from helix_store.models import Budget, InterruptRequest, Lock, Run, UsageEntry
from helix_store.reports.budgets import budget_that_stopped
from helix_store.reports.conversations import outlines
from helix_store.reports.payloads import document_start, payload_of, start_of, with_payloads

_TITLE: Final = 160
_REASON: Final = 2_000
_TOOLS: Final = 3
_TOOL: Final = 60


def summary(view: SessionView) -> dict[str, Any]:
    """Return the context for the top of the page: shortened texts, read in a constant number of queries."""
    session = view.session
    view.read("title", "failure_reason", "pending_client_tool_calls", "suspended_awaiting_children")
    run = _newest_run(view) if view.may_view(Run) else None
    return {
        "heading": one_line(view.texts["title"] or "", _TITLE) or str(_("Untitled session")),
        "id": printable(session.session_id),
        "status": badge(session.status),
        "words": _words(view),
        "facts": list(_facts(view, run)),
        "failure": _failure(view, run) if session.status == SessionStatus.FAILED else None,
        "stopped": _stopped(view, run),
        "interrupt": _interrupt(view) if view.may_view(InterruptRequest) else None,
        "buttons": view.buttons(*(each for each in view.page.row_operations if not each.has_own_place)),
        "waits_url": view.url("waits"),
        "open_calls": len(open_calls(view.document("pending_client_tool_calls"))),
    }


def _words(view: SessionView) -> Any:
    """Return the reason for the session's status."""
    session = view.session
    if session.status not in NON_TERMINAL_STATUSES:
        return ""
    calls = open_calls(view.document("pending_client_tool_calls"))
    if calls:
        names = dict.fromkeys(
            one_line(str(call.get("tool_name") or "?"), _TOOL) for _key, call in calls[: 10 * _TOOLS]
        )
        shown = ", ".join(list(names)[:_TOOLS]) + (", …" if len(names) > _TOOLS else "")
        approvals = sum(1 for _key, call in calls if call.get("approval_id") is not None)
        words = (
            ngettext("waits for an approval: %s", "waits for approvals: %s", len(calls))
            if approvals == len(calls)
            else ngettext("waits for an answer: %s", "waits for answers: %s", len(calls))
        )
        return words % shown
    if session.suspension_kind == RunStatus.SUSPENDED_AWAITING_CHILDREN:
        awaited = view.document("suspended_awaiting_children")
        count = len(awaited) if isinstance(awaited, list) else 0
        return ngettext("waits for %d sub-agent", "waits for %d sub-agents", count) % count
    if session.suspension_kind is not None:
        return _("everything it waited for is answered; the agent has not continued yet")
    if session.status == SessionStatus.INTERRUPTED:
        return _("was interrupted")
    return ""


def _facts(view: SessionView, run: dict[str, Any] | None) -> Any:
    session = view.session
    yield _("Agent"), printable(session.agent_type)
    if session.user_id:
        yield _("User"), printable(session.user_id)
    if session.tenant:
        yield _("Tenant"), printable(session.tenant)
    yield _("Progress"), progress(session.step_count, _message_count(view))
    if view.may_view(UsageEntry):
        yield from _spent(view)
    if run is not None:
        yield _("Run"), _run_words(run)
    if view.may_view(Lock):
        yield from _lock(view)
    yield _("Updated"), distance(session.updated_at)
    if session.expires_at is not None and session.status in NON_TERMINAL_STATUSES:
        is_past = session.expires_at <= moments.now()
        yield (_("Expired") if is_past else _("Expires")), distance(session.expires_at)
    if session.parent_session_id is not None:
        above = view.session_links([session.parent_session_id])
        yield _("Sub-session of"), above[session.parent_session_id]


def _message_count(view: SessionView) -> int:
    """Return the number of messages: of the store's own, or if there are none, of an adapter's."""
    key, count = view.session.pk, view.session.message_count
    found = {} if count else outlines(view.db, [key], view.may_view)
    return found[key][1].count if key in found else count


def _spent(view: SessionView) -> Any:
    try:
        rollup = view.usage.get_rollup(view.session.session_id)
    except HelixStoreError:
        return
    if rollup is not None and rollup.entry_count:
        total = rollup.tokens.total
        yield _("Spent"), f"${rounded_cost(rollup.cost_usd)} · {total:,} " + str(_("tokens"))


def _lock(view: SessionView) -> Any:
    lock = Lock.objects.using(view.alias).filter(tenant=view.session.tenant, name=view.session.session_id)
    held = lock.filter(expires_at__gt=moments.now()).first()
    if held is not None:
        yield (
            _("Lock"),
            format_html(str(_("held by {owner}")), owner=identifier(held.owner or "?")),
        )


def _newest_run(view: SessionView) -> Any:
    runs = view.rows(Run).order_by("-turn")
    return runs.values(
        "turn",
        "status",
        "started_at",
        "ended_at",
        reason=start_of("completion_reason", _TITLE),
        error_start=document_start("error"),
    ).first()


def _run_words(run: dict[str, Any]) -> Any:
    if run["ended_at"] is None:
        return format_html(
            str(_("{turn}, started {when}")), turn=run["turn"], when=distance(run["started_at"])
        )
    return format_html(
        str(_("{turn}, {status} {when}")),
        turn=run["turn"],
        status=printable(name_of_status(run["status"])),
        when=distance(run["ended_at"]),
    )


def _failure(view: SessionView, run: dict[str, Any] | None) -> dict[str, Any]:
    """Return the reason and the errors of a session that failed."""
    errors: list[tuple[Any, SafeString | str]] = []
    view.read(ENVELOPE)
    rest = view.whole_document(ENVELOPE)
    if isinstance(rest, dict) and rest.get("error") is not None:
        errors.append((_("Error of the session"), value_block(rest["error"])))
    if run is not None and run["error_start"] is not None:
        errors.append((_("Error of the run"), json_block(run["error_start"])))
    reason = printable(view.texts["failure_reason"] or "")
    return {
        "reason": reason[:_REASON],
        "rest": reason[_REASON : 10 * _REASON],
        "errors": errors[:1] if len({block for _label, block in errors}) == 1 else errors,
    }


def _stopped(view: SessionView, run: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the budget that ended the newest run, and the amounts left in it now."""
    name = None if run is None else budget_that_stopped(run["reason"])
    if name is None or view.session.status not in NON_TERMINAL_STATUSES:
        return None
    stopped: dict[str, Any] = {"name": one_line(name, _TITLE), "limits": "", "resets": ""}
    if not view.may_view(Budget):
        return stopped
    try:
        found = next((each for each in view.budgets if each.status.name == name), None)
    except HelixStoreError:
        return stopped
    stopped["url"] = view.url("budgets")
    if found is None:
        return {**stopped, "is_gone": True}
    limits = ", ".join(map(limit_words, found.limits))
    return {**stopped, "limits": limits, "resets": distance(found.status.resets_at)}


def _interrupt(view: SessionView) -> dict[str, Any] | None:
    asked = with_payloads(view.rows(InterruptRequest)).first()
    if asked is None:
        return None
    return {
        "kind": printable(asked.kind),
        "reason": printable(payload_of(asked, "reason") or "")[:_REASON],
        "at": distance(asked.requested_at),
        "button": view.button(CLEAR_INTERRUPT),
    }
