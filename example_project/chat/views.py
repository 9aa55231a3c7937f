"""The pages of the chat: its forms, and a page that shows the session and follows its stream."""

from __future__ import annotations

from datetime import timedelta
from http import HTTPStatus
from typing import Any, Final

from django import forms
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from example_project.agent import answer_approval
from example_project.chat.allowance import address_to_raise, used_up
from example_project.chat.driver import POSITION, TERM, drive, say, show
from example_project.chat.transcript import BLANK, entries, is_answered, question, waiting
from example_project.pages import page
from example_project.visitors import is_own, remember
from helix_store import (
    ConflictError,
    IdempotencyConflict,
    LimitExceeded,
    SessionEnded,
    SessionNotFound,
    Store,
)
from helix_store.core.ids import new_id

__all__ = ["begin", "chat", "decide", "go_on", "stop", "withdraw"]

_LENGTH: Final = "Write a message of 1 to 2,000 characters."
_REFUSED: Final[dict[type[Exception], str]] = {
    SessionEnded: "This chat has ended. Your message was not sent: start a new chat.",
    LimitExceeded: "Too many messages wait already. Your message was not sent: send it again later.",
    IdempotencyConflict: "An earlier version of this message was sent. Send this one as well, or delete it.",
}
_RECEIVED: Final = "The agent has received this message already."
_DECIDED: Final = "This was decided already, perhaps in another tab."
_STOPPED: Final = "The agent had stopped already."


class _MessageForm(forms.Form):
    text = forms.CharField(max_length=2000)
    key = forms.UUIDField()


@require_GET
def begin(request: HttpRequest) -> HttpResponse:
    """Return an empty chat; its first message creates the session."""
    session_id = f"chat-{new_id()}"
    remember(request, session_id)
    return _shown(request, {"session_id": session_id})


@require_http_methods(["GET", "POST"])
def chat(request: HttpRequest, session_id: str) -> HttpResponse:
    """Return the page of the stored chat, which follows its stream; a POST sends a message at any time."""
    _require_own(request, session_id)
    if request.method == "GET":
        return _page(request, session_id)
    form, draft = _MessageForm(request.POST), request.POST.get("text", "")
    if not form.is_valid():
        return _page(request, session_id, problem=_LENGTH, draft=draft)
    try:
        say(Store(), session_id, form.cleaned_data["text"], key=str(form.cleaned_data["key"]))
    except tuple(_REFUSED) as exc:
        return _page(request, session_id, problem=_REFUSED[type(exc)], draft=draft)
    return redirect("chat", session_id=session_id)


@require_POST
def withdraw(request: HttpRequest, session_id: str) -> HttpResponse:
    """Take back a message that the agent has not received."""
    _require_own(request, session_id)
    store = Store()
    if not store.sessions.withdraw_post(session_id, request.POST["post_id"]):
        return _page(request, session_id, problem=_RECEIVED)
    show(store, session_id)
    return redirect("chat", session_id=session_id)


@require_POST
def stop(request: HttpRequest, session_id: str) -> HttpResponse:
    """Stop the agent, in whichever process it runs. Messages that wait stay for the next turn."""
    _require_own(request, session_id)
    try:
        Store().sessions.request_interrupt(
            session_id, reason="stopped in the chat", run_id=request.POST["run_id"]
        )
    except ConflictError:
        return _page(request, session_id, problem=_STOPPED)
    return redirect("chat", session_id=session_id)


@require_POST
def decide(request: HttpRequest, session_id: str) -> HttpResponse:
    """Store a person's decision. The signal of the answer begins the next turn."""
    _require_own(request, session_id)
    approved = request.POST.get("decision") == "approve"
    try:
        answered = answer_approval(Store().sessions, session_id, approved=approved)
    except ConflictError:
        answered = []
    if not answered:
        return _page(request, session_id, problem=_DECIDED)
    return redirect("chat", session_id=session_id)


@require_POST
def go_on(request: HttpRequest, session_id: str) -> HttpResponse:
    """Continue after a stop, or after the death of a worker."""
    _require_own(request, session_id)
    drive(session_id=session_id, using=None, tenant="")
    return redirect("chat", session_id=session_id)


def _require_own(request: HttpRequest, session_id: str) -> None:
    if not is_own(request, session_id):
        raise Http404("This chat does not exist, or it belongs to another visitor.")


def _page(request: HttpRequest, session_id: str, *, problem: str = "", draft: str = "") -> HttpResponse:
    store = Store()
    session = store.session(session_id)
    try:
        # In this order: the stream has what changes after the first line.
        state, posts, messages = session.load(), session.posts().items, session.messages()
    except SessionNotFound as exc:
        raise Http404("This chat was deleted.") from exc
    is_driven, asked = store.locks.is_locked(session_id), question(state)
    is_open = bool(posts) or not is_answered(messages)
    may_go_on = is_open and not (is_driven or asked or state.status.is_terminal)
    budget_words = used_up(store, session_id) if may_go_on else ""
    may_raise = budget_words and request.user.has_perm("helix_store.change_budget")
    context = {
        "session_id": session_id,
        "title": state.title,
        "entries": entries(messages),
        "waiting": waiting(posts),
        "question": asked,
        "has_begun": True,
        "position": state.custom_state.get(POSITION, 0),
        "term_ms": TERM // timedelta(milliseconds=1),
        "run": store.sessions.get_current_run(session_id) if is_driven else None,
        "may_go_on": may_go_on,
        "used_up": budget_words,
        "raise_url": address_to_raise(session_id) if may_raise else "",
        "problem": problem,
        "draft": draft,
    }
    return _shown(request, context)


def _shown(request: HttpRequest, context: dict[str, Any]) -> HttpResponse:
    status = HTTPStatus.CONFLICT if context.get("problem") else HTTPStatus.OK
    return page(request, "example/chat.html", {"blank": BLANK, "key": new_id(), **context}, status=status)
