"""The message history of a session, numbered 1, 2, 3… without gaps."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from helix_store.conf import table_name
from helix_store.models.constraints import unique
from helix_store.models.fields import IdentifierField, MomentField, PayloadField
from helix_store.models.sessions import Session


class Message(models.Model):
    # The unique constraint serves each look-up by session, and the session row's lock protects the reference:
    # a foreign key constraint and a separate index cost a tenth of a step (measured).
    session = models.ForeignKey(
        Session, on_delete=models.CASCADE, related_name="messages", db_constraint=False, db_index=False
    )
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
