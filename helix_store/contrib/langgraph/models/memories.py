"""The long-term memory of LangGraph's agents: values by namespace and key."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from helix_store.conf import constraint_name, table_name
from helix_store.core.limits import MAX_ID_BYTES, MAX_NAMESPACE_BYTES
from helix_store.models.fields import IdentifierField, MomentField, PayloadField


class LangGraphMemory(models.Model):
    """A value that a graph has put into `DjangoStore`. It belongs to a tenant, not to a session.

    ``namespace`` has a dot after each label: ``users.alice.``.
    """

    tenant = IdentifierField(default="", blank=True)
    namespace = IdentifierField(max_length=MAX_NAMESPACE_BYTES)
    key = IdentifierField(max_length=MAX_ID_BYTES, blank=True)
    size_bytes = models.BigIntegerField()
    ttl_ms = models.BigIntegerField(null=True, blank=True)
    expires_at = MomentField(null=True, blank=True)
    created_at = MomentField()
    updated_at = MomentField()
    value = PayloadField()

    class Meta:
        db_table = table_name("lg_memory")
        verbose_name = _("LangGraph memory")
        verbose_name_plural = _("LangGraph memories")
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "namespace", "key"], name=constraint_name("lg_memory_uniq")
            ),
        ]
        indexes = [
            models.Index(
                fields=["tenant", "expires_at"],
                condition=Q(expires_at__isnull=False),
                name=constraint_name("lg_memory_expiry_idx"),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.namespace}{self.key}"
