"""The pages of the chat: forms that are sent, and a page that shows the session and follows its turn."""

from __future__ import annotations

from datetime import timedelta
from http import HTTPStatus
from typing import Any, Final

from django import forms
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_http_methods, require_POST

from example_project.agent import answer_approval
from example_project.chat.driver import TERM, NotNow, drive, new_chat, stream_of
from example_project.chat.transcript import BLANK, entries, is_answered, question
from example_project.pages import page
from example_project.visitors import is_own, remember
from helix_store import ConflictError, DatabaseLockManager, DatabaseStateStore, SessionBusy, SessionNotFound

__all__ = ["begin", "chat", "decide", "go_on"]

_BUSY: Final = (
    "The agent is still answering, perhaps to another tab. Your message was not sent: send it again when the "
    "answer is complete."
)
_STILL_BUSY: Final = "The agent is still at work, perhaps for another tab. Its answer appears here."
_LENGTH: Final = "Write a message of 1 to 2,000 characters."
_DECIDED: Final = "This was decided already, perhaps in another tab."


class _MessageForm(forms.Form):
    text = forms.CharField(max_length=2000)


@require_http_methods(["GET", "POST"])
def begin(request: HttpRequest) -> HttpResponse:
    """The empty chat; its first message creates the session."""
    if request.method == "GET":
        return _empty_page(request)
    form = _MessageForm(request.POST)
    if not form.is_valid():
        return _empty_page(request, problem=_LENGTH)
    session_id = new_chat(form.cleaned_data["text"])
    remember(request, session_id)
    drive(session_id, form.cleaned_data["text"])
    return redirect("chat", session_id=session_id)


@require_http_methods(["GET", "POST"])
def chat(request: HttpRequest, session_id: str) -> HttpResponse:
    """The chat as it is stored, and what follows; a POST sends a message."""
    _require_own(request, session_id)
    if request.method == "GET":
        return _page(request, session_id)
    form = _MessageForm(request.POST)
    if not form.is_valid():
        return _page(request, session_id, problem=_LENGTH)
    text = form.cleaned_data["text"]
    try:
        drive(session_id, text)
    except SessionBusy:
        return _page(request, session_id, problem=_BUSY, draft=text)
    except NotNow as exc:
        return _page(request, session_id, problem=str(exc), draft=text)
    return redirect("chat", session_id=session_id)


@require_POST
def decide(request: HttpRequest, session_id: str) -> HttpResponse:
    """Store the decision of a person, and go on."""
    _require_own(request, session_id)
    approved = request.POST.get("decision") == "approve"
    try:
        answered = answer_approval(DatabaseStateStore(), session_id, approved=approved)
    except ConflictError:
        answered = []
    if not answered:
        return _page(request, session_id, problem=_DECIDED)
    return _driven(request, session_id)


@require_POST
def go_on(request: HttpRequest, session_id: str) -> HttpResponse:
    """Continue a turn whose worker died."""
    _require_own(request, session_id)
    return _driven(request, session_id)


def _driven(request: HttpRequest, session_id: str) -> HttpResponse:
    try:
        drive(session_id)
    except SessionBusy:
        return _page(request, session_id, problem=_STILL_BUSY)
    return redirect("chat", session_id=session_id)


def _require_own(request: HttpRequest, session_id: str) -> None:
    if not is_own(request, session_id):
        raise Http404("This chat does not exist, or it belongs to another visitor.")


def _empty_page(request: HttpRequest, *, problem: str = "") -> HttpResponse:
    return _shown(request, {"problem": problem})


def _page(request: HttpRequest, session_id: str, *, problem: str = "", draft: str = "") -> HttpResponse:
    store = DatabaseStateStore()
    session = store.session(session_id)
    try:
        # In this order: what a turn commits after the first line is in its stream.
        run = store.get_current_run(session_id)
        state, messages = session.load(), session.messages()
    except SessionNotFound as exc:
        raise Http404("This chat was deleted.") from exc
    asked = question(state)
    is_open = not (asked or is_answered(messages) or state.status.is_terminal)
    context = {
        "session_id": session_id,
        "title": state.title,
        "entries": entries(messages),
        "question": asked,
        "stream_id": stream_of(session_id, run.run_id) if run is not None else None,
        "term_ms": TERM // timedelta(milliseconds=1),
        "is_abandoned": is_open and not DatabaseLockManager().is_locked(session_id),
        "problem": problem,
        "draft": draft,
    }
    return _shown(request, context)


def _shown(request: HttpRequest, context: dict[str, Any]) -> HttpResponse:
    status = HTTPStatus.CONFLICT if context["problem"] else HTTPStatus.OK
    return page(request, "example/chat.html", {"blank": BLANK, **context}, status=status)
