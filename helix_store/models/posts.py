"""Posts: messages on their way into a session."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from helix_store.conf import constraint_name, table_name
from helix_store.models.fields import IdentifierField, MomentField, PayloadField
from helix_store.models.sessions import Session

__all__ = ["Post", "PostState"]


class PostState(models.TextChoices):
    WAITING = "waiting", _("waiting")
    RECEIVED = "received", _("received")
    WITHDRAWN = "withdrawn", _("withdrawn")


class Post(models.Model):
    """A message that waits to be received, or the remaining record of one that was received or withdrawn.

    ``received_version`` is the version of the session that the reception wrote.
    """

    # The unique constraint begins with the session, and the session row's lock protects the reference.
    session = models.ForeignKey(
        Session, on_delete=models.CASCADE, related_name="posts", db_constraint=False, db_index=False
    )
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
            models.UniqueConstraint(fields=["session", "sequence"], name=constraint_name("post_seq_uniq")),
            models.UniqueConstraint(
                fields=["session", "key"],
                condition=Q(key__isnull=False),
                name=constraint_name("post_key_uniq"),
            ),
            models.CheckConstraint(
                condition=Q(state__in=PostState.values), name=constraint_name("post_state_ck")
            ),
        ]
        indexes = [
            models.Index(
                fields=["session", "due_at", "sequence"],
                condition=Q(state=PostState.WAITING),
                name=constraint_name("post_waiting_idx"),
            ),
            models.Index(
                fields=["author", "id"],
                condition=Q(author__isnull=False),
                name=constraint_name("post_author_idx"),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.sequence} {self.state}"
