"""Messages of a session, numbered 1, 2, 3… without gaps, and posts: messages on their way into a session."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from helix_store.conf import table_name
from helix_store.models.constraints import index, one_of, unique
from helix_store.models.fields import IdentifierField, MomentField, PayloadField
from helix_store.models.sessions import session_key


class Message(models.Model):
    # The unique constraint serves every lookup by session, and the lock on the session's row protects the
    # reference: a foreign key constraint and a separate index would cost a tenth of a step (measured).
    session = session_key("messages")
    sequence = models.BigIntegerField()
    role = IdentifierField()
    payload = PayloadField()
    created_at = MomentField()

    class Meta:
        db_table = table_name("message")
        verbose_name = _("message")
        verbose_name_plural = _("messages")
        constraints = [
            unique("message_seq_uniq", ["session", "sequence"]),
        ]

    def __str__(self) -> str:
        return f"{self.sequence} {self.role}"


class PostState(models.TextChoices):
    WAITING = "waiting", _("waiting")
    RECEIVED = "received", _("received")
    WITHDRAWN = "withdrawn", _("withdrawn")


class Post(models.Model):
    """A message that is waiting to be received, or what remains of one that was received or withdrawn.

    ``received_version`` is the session's version after the commit that received the post.
    """

    # The unique constraint begins with the session, and the lock on the session's row protects the reference.
    session = session_key("posts")
    post_id = IdentifierField()
    sequence = models.BigIntegerField()
    payload = PayloadField(null=True, blank=True)
    author = IdentifierField(null=True, blank=True)
    key = IdentifierField(null=True, blank=True)
    digest = models.CharField(max_length=64)
    not_before = MomentField(null=True, blank=True)
    due_at = MomentField()
    posted_at = MomentField()
    state = models.CharField(max_length=16, choices=PostState.choices, default=PostState.WAITING)
    received_at = MomentField(null=True, blank=True)
    position = models.BigIntegerField(null=True, blank=True)
    received_version = models.BigIntegerField(null=True, blank=True, editable=False)

    objects: models.Manager[Post] = models.Manager()

    class Meta:
        db_table = table_name("post")
        verbose_name = _("post")
        verbose_name_plural = _("posts")
        constraints = [
            unique("post_seq_uniq", ["session", "sequence"]),
            unique("post_key_uniq", ["session", "key"], where=Q(key__isnull=False)),
            one_of("post_state_ck", "state", PostState),
        ]
        indexes = [
            index("post_waiting_idx", ["session", "due_at", "sequence"], where=Q(state=PostState.WAITING)),
            index("post_author_idx", ["author", "id"], where=Q(author__isnull=False)),
        ]

    def __str__(self) -> str:
        return f"{self.sequence} {self.state}"
