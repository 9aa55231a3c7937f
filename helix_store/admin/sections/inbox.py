"""The posts of a session: first the waiting ones, in the order of their receipt, then all others."""

from __future__ import annotations

from typing import Any, Final

from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from helix_store.actions.posts import POST, WITHDRAW_POST
from helix_store.admin.elements import NOTHING, identifier, narrow, one_line
from helix_store.admin.messages import PREVIEW_LENGTH
from helix_store.admin.sections.section import Section, SessionView
from helix_store.admin.times import distance
from helix_store.core.limits import MAX_BIGINT
from helix_store.models import Post
from helix_store.models.messages import PostState
from helix_store.reports.payloads import without_payloads
from helix_store.reports.session import WaitingPost, waiting_posts

_PAGE: Final = 25


class Inbox(Section):
    name = "inbox"
    label = _("Inbox")
    needs = (Post,)

    def context(self, view: SessionView) -> dict[str, Any]:
        posts = without_payloads(view.rows(Post))
        first = view.number("waiting") or 0
        before = view.number("before")
        waiting = waiting_posts(posts, first=first, limit=_PAGE)
        others = posts.exclude(state=PostState.WAITING).order_by("-sequence")
        past = list(others.filter(sequence__lte=MAX_BIGINT if before is None else before)[: _PAGE + 1])
        return {
            "waiting": [_waiting(post) for post in waiting.items],
            "total": waiting.total,
            "first_url": view.url() if first else "",
            "next_url": view.url(waiting=first + _PAGE) if first + _PAGE < waiting.total else "",
            "past": [_past(row) for row in past[:_PAGE]],
            "newest_url": view.url() if before is not None else "",
            "older_url": view.url(before=past[_PAGE].sequence) if len(past) > _PAGE else "",
            "post": view.button(POST),
            "withdraw": view.button(WITHDRAW_POST),
            "form": POST.form(),
            "zone": timezone.get_current_timezone_name(),
            "next": view.url(),
        }


def _waiting(post: WaitingPost) -> dict[str, Any]:
    text = None if post.text is None else one_line(post.text, PREVIEW_LENGTH)
    return {**_named(post), "id": post.post_id, "text": text, "due": distance(post.due_at)}


def _past(row: Any) -> dict[str, Any]:
    state = row.get_state_display()
    if row.received_at is not None:
        state = format_html("<span>{} {}</span>", state, distance(row.received_at))
    return {
        **_named(row),
        "state": state,
        "position": NOTHING if row.position is None else f"{row.position:,}",
    }


def _named(row: Any) -> dict[str, Any]:
    return {
        "author": narrow(row.author) if row.author else NOTHING,
        "key": identifier(row.key) if row.key else NOTHING,
        "posted": distance(row.posted_at),
    }
