"""Actions on the posts of a session: post a message, withdraw a waiting post."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from django import forms
from django.contrib.messages import constants as levels
from django.db import router
from django.utils import timezone
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from helix_store.actions.action import Outcome, SessionAction
from helix_store.core.ids import new_id
from helix_store.models import Post, Session
from helix_store.reports.times import time_argument
from helix_store.stores import DatabaseStateStore

_LONGEST_POST: Final = 100_000
_LONGEST_ID: Final = 320


class PostForm(forms.Form):
    text = forms.CharField(
        label=_("Message"), max_length=_LONGEST_POST, widget=forms.Textarea(attrs={"rows": 3})
    )
    not_before = forms.DateTimeField(
        label=_("Not before"),
        required=False,
        widget=forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M"),
    )

    # Sending a form twice posts only once.
    key = forms.CharField(
        widget=forms.HiddenInput, max_length=_LONGEST_ID, required=False, empty_value=None, initial=new_id
    )

    not_named = ("key",)

    def clean_not_before(self) -> datetime | None:
        """Return an aware time, even in projects without time zones."""
        at: datetime | None = self.cleaned_data["not_before"]
        return at if at is None or timezone.is_aware(at) else timezone.make_aware(at)


class WithdrawForm(forms.Form):
    post_id = forms.CharField(widget=forms.HiddenInput, max_length=_LONGEST_ID, strip=False)


class PostMessage(SessionAction):
    """A post from a user in the admin, or from the given ``author``."""

    name = "post"
    label = _("Post a message")
    model = Post
    permission = "add"
    needs_open_session = True
    has_own_place = True
    form = PostForm
    help = "Post a message of a user to a session, even while an agent is working on it."
    example = "trip-1 'And vegetarian, please.' --author ada"
    options = {
        "text": {"metavar": "TEXT", "help": "The content of the message."},
        "--author": {"help": "Who posts it: text, for example a user id."},
        "--key": {"help": "Makes the post idempotent: a repeat under this key stores nothing."},
        "--not-before": {
            "type": time_argument,
            "metavar": "TIME",
            "help": "When the post is due (default: now).",
        },
    }

    def call(self, row: Any, given: Mapping[str, Any]) -> Outcome:
        alias, key = router.db_for_write(Session, instance=row), given.get("key")
        # If a form is sent twice at once, the second waits here, and then finds the post of the first.
        locked = Session._base_manager.using(alias).filter(pk=row.pk).select_for_update(no_key=True)
        locked.values("pk").first()
        posts = Post._base_manager.using(alias).filter(session_id=row.pk, key=key)
        is_repeat = key is not None and posts.exists()
        return replace(super().call(row, given), is_done=not is_repeat)

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        user = given.get("actor")
        post = store.post_message(
            session_id,
            {"role": "user", "content": given["text"]},
            key=given.get("key"),
            author=given.get("author") if user is None else f"user:{user.pk}",
            not_before=given.get("not_before"),
        )
        message = format_lazy(_("Posted the message as number {number}."), number=post.sequence)
        return Outcome(message=message, data=post.to_dict())


class WithdrawPost(SessionAction):
    name = "withdraw-post"
    label = _("Withdraw")
    model = Post
    has_own_place = True
    form = WithdrawForm
    help = "Withdraw a waiting post of a session."
    example = "trip-1 POST_ID"
    options = {"post_id": {"metavar": "POST", "help": "The id of the post."}}

    def run(self, store: DatabaseStateStore, session_id: str, given: Mapping[str, Any]) -> Outcome:
        post_id = given["post_id"]
        is_withdrawn = store.withdraw_post(session_id, post_id)
        return Outcome(
            message=_("Withdrew the post.") if is_withdrawn else _("The post is no longer waiting."),
            is_done=is_withdrawn,
            level=levels.SUCCESS if is_withdrawn else levels.WARNING,
            data={"session_id": session_id, "post_id": post_id, "withdrawn": is_withdrawn},
            problem=f"No post {post_id} is waiting in this session; nothing was changed.",
        )


POST: Final = PostMessage()
WITHDRAW_POST: Final = WithdrawPost()
