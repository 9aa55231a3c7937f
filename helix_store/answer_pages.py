"""The pages on which people answer approvals without the admin. `answering.answer_url` makes their links."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from django.contrib.auth.views import redirect_to_login
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext_lazy as _
from django.views.decorators.cache import never_cache
from django.views.decorators.clickjacking import xframe_options_deny
from django.views.decorators.csrf import csrf_protect
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_http_methods

from helix_store import conf
from helix_store.actions.answers import (
    ANSWER,
    APPROVE,
    REJECT,
    WHOLE,
    People,
    demands_of,
    editable_text,
    mark_of_end,
)
from helix_store.actions.sessions import in_words
from helix_store.answering import Link, link_of
from helix_store.core.approvals import canonical_json
from helix_store.core.transcript import visible, visible_json
from helix_store.engine.database import Database
from helix_store.exceptions import HelixStoreError
from helix_store.models import Session
from helix_store.reports.payloads import (
    difference_pages,
    few_changes,
    has_levels,
    json_start,
    laid_out,
    payload_of,
    without_payloads,
)
from helix_store.sessions.tool_calls import EDITED_FROM, ToolCalls, current_call
from helix_store.sessions.waiting import open_calls

__all__ = ["answer_page"]

_COLUMNS: Final = ("pending_client_tool_calls", "completed_client_tool_calls", "live_decisions")
_INVALID: Final = _("This link is not valid. It may be incomplete: copy all of it from your message.")
_EXPIRED: Final = _("This link has expired. Ask for a new one.")
_FOREIGN: Final = _("This link is for somebody else. Sign in as the person to whom it was sent.")
_GONE: Final = _("The session has been deleted, or no longer waits for this call.")
_ANSWERED: Final = _("This call has been answered.")
_CHANGED: Final = _("The call has changed since this link was sent. Ask for a new link.")
_APPROVED: Final = _("You have approved it. It also needs somebody else.")
_SEEN: Final = _("Look at the changes, then approve them.")


@never_cache
@xframe_options_deny
@csrf_protect
@require_http_methods(["GET", "POST"])
@sensitive_variables("token")
def answer_page(request: HttpRequest, token: str) -> HttpResponse:
    """Show a call to the user whom a link names, and take the answer."""
    if not conf.answer_pages():
        raise Http404
    user: Any = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        return redirect_to_login(request.get_full_path())
    link = link_of(token)
    if link is None:
        return _page(request, {"problem": _INVALID}, status=404)
    if str(user.pk) != link.user_key:
        return _page(request, {"problem": _FOREIGN}, status=403)
    if link.has_expired:
        return _page(request, {"problem": _EXPIRED}, status=410)
    row, texts = _read(link)
    shown = {"problem": _GONE} if row is None else _shown(row.pk, texts, link, user)
    if row is None or "problem" in shown:
        return _page(request, shown, status=410)
    if request.method == "POST":
        return _answer(request, link, row, shown)
    return _page(request, shown)


def _page(request: HttpRequest, shown: dict[str, Any], *, status: int = 200) -> HttpResponse:
    response = render(request, "helix_store/answer.html", shown, status=status)
    # The address is the right to answer.
    response["Referrer-Policy"] = "same-origin"
    return response


def _read(link: Link) -> tuple[Any, tuple[str | None, ...]]:
    """Return the session's row without payloads, and the texts of its calls."""
    rows = Session._base_manager.using(link.using).filter(tenant=link.tenant, session_id=link.session_id)

    def read() -> tuple[Any, tuple[str | None, ...]]:
        row = without_payloads(rows).first()
        return row, () if row is None else tuple(payload_of(row, column) for column in _COLUMNS)

    return Database(link.using, link.tenant, None).query(read)


def _shown(key: int, texts: tuple[str | None, ...], link: Link, user: Any) -> dict[str, Any]:
    """Return what the page shows of an open call, or the problem because of which it cannot be answered."""
    calls = ToolCalls.stored(*texts)
    stored = calls.pending.get(link.tool_call_id)
    is_completed = link.tool_call_id in calls.completed
    if not is_completed and not isinstance(stored, dict):
        return {"problem": _GONE}
    db = Database(link.using, link.tenant, None)
    if stored is None or is_completed or link.tool_call_id not in open_calls(db, {key: calls})[key]:
        return {"problem": _ANSWERED}
    call = current_call(stored)
    if call["digest"] != link.digest:
        return {"problem": _CHANGED}
    people = People.of([(link.tool_call_id, call)], calls.live)
    whole = _whole(call.get("input"))
    changes = few_changes(stored[EDITED_FROM], call.get("input")) if EDITED_FROM in stored else []
    demands = demands_of(user, link.tool_call_id, call, people, calls.live)
    return {
        "call": call,
        "tool": visible(str(call.get("tool_name") or "")),
        "session_id": visible(link.session_id),
        "whole": whole,
        "has_levels": has_levels(whole),
        "lines": _lines(changes or ()),
        "requested": _whole(stored[EDITED_FROM]) if changes is None else "",
        "demands": demands,
        "editor": editable_text(call),
        "message": _APPROVED if demands["has_approved"] else "",
    }


def _whole(value: Any) -> str:
    """Return a whole value in lines. The lines of a long one are indented less, because it may be deep."""
    text, is_cut = json_start(value, WHOLE)
    if not is_cut:
        return visible_json(text)
    text = canonical_json(value)
    return laid_out(text, 0, len(text))


def _lines(changes: Any) -> list[dict[str, Any]]:
    return [line for page in difference_pages(changes) for line in page]


def _answer(request: HttpRequest, link: Link, row: Any, shown: dict[str, Any]) -> HttpResponse:
    # What is answered is what the signed link names, whatever the form says.
    call = shown["call"]
    named = {"call": link.tool_call_id, "approval": call["approval_id"], "digest": link.digest}
    form: Any = ANSWER.form({**request.POST.dict(), **named})
    if not form.is_valid() or form.cleaned_data["answer"] not in (APPROVE, REJECT):
        problems = [str(each) for errors in form.errors.values() for each in errors]
        editor = request.POST.get("edit", shown["editor"])
        return _page(request, {**shown, "message": " ".join(problems), "editor": editor}, status=400)
    given = {
        **form.cleaned_data,
        **named,
        "actor": request.user,
        "shown": mark_of_end(request.user, link.digest),
    }
    if not form.is_seen:
        edit = {"seen": form.data["seen"], "text": request.POST["edit"], "reason": given["reason"] or ""}
        changes = _lines(ANSWER.changes(row, given))
        return _page(request, {**shown, "message": _SEEN, "edit": edit, "edited_lines": changes})
    db = Database(link.using, link.tenant, None)
    try:
        outcome = db.transaction(partial(ANSWER.call, row, given))
    except HelixStoreError as exc:
        return _page(request, {**shown, "message": in_words(exc)}, status=409)
    if not outcome.is_done:
        return _page(request, {**shown, "message": outcome.message}, status=409)
    return _page(request, {"done": outcome.message})
