"""The pages on which people answer approvals without the admin. `answering.answer_url` makes their links."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from django.contrib import messages
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
from helix_store.actions.sessions import Outcome, in_words
from helix_store.answering import Link, link_of
from helix_store.core.approvals import canonical_json
from helix_store.core.transcript import visible, visible_json
from helix_store.engine.database import Database
from helix_store.exceptions import HelixStoreError
from helix_store.models import Decision, Session
from helix_store.reports.payloads import (
    difference_pages,
    few_changes,
    has_levels,
    json_start,
    laid_out,
    payload_of,
    without_payloads,
)
from helix_store.sessions.locking import first_row
from helix_store.sessions.tool_calls import EDITED_FROM, ToolCalls, current_call
from helix_store.sessions.waiting import open_calls

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise

__all__ = ["answer_page"]

_COLUMNS: Final = ("pending_client_tool_calls", "completed_client_tool_calls", "live_decisions")
_INVALID: Final = _("This link is not valid. It may be incomplete: copy all of it from your message.")
_EXPIRED: Final = _("This link has expired. Ask for a new one.")
_FOREIGN: Final = _("This link is for somebody else. Sign in as the person to whom it was sent.")
_GONE: Final = _("The session has been deleted, or no longer waits for this call.")
_ANSWERED: Final = _("This call has been answered.")
_CHANGED: Final = _("The call has changed since this link was sent. Ask for a new link.")
_APPROVED: Final = _("You have approved it. It also needs somebody else.")
_USED: Final = _("You have used this link. Ask for a new one.")
_SEEN: Final = _("Look at the changes, then approve them.")
_BACK: Final = "back"
"""The parameter of the address to which the login page leads back. Without it, a login page that sends people
who are signed in back at once would do so without end."""


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
        return _to_login(request)
    if link.has_expired:
        return _page(request, {"problem": _EXPIRED}, status=410)
    row, calls = _read(link)
    problem = _problem(row, calls, link)
    if problem is not None:
        return _page(request, {"problem": problem}, status=410)
    shown = _shown(calls, link, user)
    if request.method == "POST":
        return _answer(request, link, row, shown)
    return _page(request, shown)


def _to_login(request: HttpRequest) -> HttpResponse:
    """Let somebody else sign in, unless the login page has sent the same person back."""
    if _BACK in request.GET:
        return _page(request, {"problem": _FOREIGN}, status=403)
    messages.warning(request, _FOREIGN, fail_silently=True)
    return redirect_to_login(f"{request.path}?{_BACK}")


def _page(request: HttpRequest, shown: dict[str, Any], *, status: int = 200) -> HttpResponse:
    response = render(request, "helix_store/answer.html", shown, status=status)
    # The address is the right to answer.
    response["Referrer-Policy"] = "same-origin"
    return response


def _rows(link: Link) -> Any:
    return Session._base_manager.using(link.using).filter(tenant=link.tenant, session_id=link.session_id)


def _read(link: Link) -> tuple[Any, ToolCalls]:
    """Return the session's row without payloads, and its calls."""

    def read() -> tuple[Any, ToolCalls]:
        row = without_payloads(_rows(link)).first()
        texts = () if row is None else tuple(payload_of(row, column) for column in _COLUMNS)
        return row, ToolCalls.stored(*texts or (None, None))

    return Database(link.using, link.tenant, None).query(read)


def _problem(row: Any, calls: ToolCalls, link: Link) -> StrOrPromise | None:
    """Return why the call of a link cannot be answered with it."""
    stored = calls.pending.get(link.tool_call_id)
    is_completed = link.tool_call_id in calls.completed
    if row is None or not (is_completed or isinstance(stored, dict)):
        return _GONE
    db = Database(link.using, link.tenant, None)
    if stored is None or is_completed or link.tool_call_id not in open_calls(db, {row.pk: calls})[row.pk]:
        return _ANSWERED
    answers = Decision._base_manager.using(link.using).filter(
        session_id=row.pk, tool_call_id=link.tool_call_id, version__gt=link.version
    )
    since = db.query(lambda: list(answers.values_list("is_final", "actor")))
    if any(is_final for is_final, _ in since):
        # A rewind, or the agent, has made it open again.
        return _ANSWERED
    call = current_call(stored)
    if not link.is_about(call):
        return _CHANGED
    if link.has_answered(calls.live.approved_by(link.tool_call_id, call)):
        return _APPROVED
    return _USED if link.has_answered(actor for _, actor in since) else None


def _shown(calls: ToolCalls, link: Link, user: Any) -> dict[str, Any]:
    """Return what the page shows of an open call."""
    stored = calls.pending[link.tool_call_id]
    call = current_call(stored)
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
        "message": "",
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
        outcome = db.transaction(partial(_answered_once, link, row, given))
    except HelixStoreError as exc:
        return _page(request, {**shown, "message": in_words(exc)}, status=409)
    if not isinstance(outcome, Outcome):
        return _page(request, {"problem": outcome}, status=410)
    if not outcome.is_done:
        return _page(request, {**shown, "message": outcome.message}, status=409)
    return _page(request, {"done": outcome.message})


def _answered_once(link: Link, row: Any, given: Mapping[str, Any]) -> Outcome | StrOrPromise:
    """Store an answer under the lock of the session, or return why the link does not work any more.

    Otherwise, two answers that arrive at the same moment could both use the link.
    """
    first_row(_rows(link).order_by().select_for_update(no_key=True).values_list("pk"))
    problem = _problem(*_read(link), link)
    return ANSWER.call(row, given) if problem is None else problem
