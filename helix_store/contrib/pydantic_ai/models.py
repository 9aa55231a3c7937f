"""The tables of conversations: a record names the newest entry of its history, and forks share entries."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from helix_store.conf import table_name
from helix_store.models import Session
from helix_store.models.constraints import index, unique
from helix_store.models.fields import IdentifierField, MomentField, PayloadField


class ConversationFamily(models.Model):
    """The conversations that may share entries: an original and its forks.

    Every write holds a share lock on this row. A deletion of conversations locks it exclusively, so that an
    entry cannot be deleted while a fork starts to refer to it.
    """

    tenant = IdentifierField(default="", blank=True)
    family = IdentifierField()

    class Meta:
        db_table = table_name("pydantic_family")
        verbose_name = _("conversation family")
        verbose_name_plural = _("conversation families")
        constraints = [
            unique("pydantic_family_uniq", ["tenant", "family"]),
        ]

    def __str__(self) -> str:
        return str(self.family)


class Conversation(models.Model):
    """The record of a conversation: its exact text, and copies of the values that are looked up. ``head_id``
    and ``branches`` are the entries through which it reaches its history.
    """

    session = models.OneToOneField(
        Session, on_delete=models.CASCADE, related_name="pydantic_conversation", db_constraint=False
    )
    tenant = IdentifierField(default="", blank=True)
    family = IdentifierField()
    head_id = IdentifierField(null=True, blank=True)
    branches = models.JSONField(default=list, blank=True)
    revision = IdentifierField()
    # The scope, or the name from `scope_name` if the scope is not an identifier.
    scope = IdentifierField(null=True, blank=True)
    updated_at = MomentField()
    document = PayloadField()

    class Meta:
        db_table = table_name("pydantic_record")
        verbose_name = _("conversation")
        verbose_name_plural = _("conversations")
        indexes = [
            index("pydantic_family_idx", ["tenant", "family"]),
            index("pydantic_scope_idx", ["tenant", "scope", "-updated_at", "id"]),
            index("pydantic_newest_idx", ["tenant", "-updated_at", "id"]),
        ]

    def __str__(self) -> str:
        return str(self.revision)


class ConversationEntry(models.Model):
    """One message, and the entry before it. An entry never changes."""

    tenant = IdentifierField(default="", blank=True)
    entry_id = IdentifierField()
    family = IdentifierField()
    parent_id = IdentifierField(null=True, blank=True)
    kind = IdentifierField()
    payload = PayloadField()
    size_bytes = models.BigIntegerField()
    created_at = MomentField()

    class Meta:
        db_table = table_name("pydantic_entry")
        verbose_name = _("conversation entry")
        verbose_name_plural = _("conversation entries")
        constraints = [
            unique("pydantic_entry_uniq", ["tenant", "entry_id"]),
        ]
        indexes = [
            index("pydantic_entry_idx", ["tenant", "family"]),
        ]

    def __str__(self) -> str:
        return str(self.entry_id)
