"""Locks: leases with fencing tokens."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from helix_store.conf import table_name
from helix_store.models.constraints import unique
from helix_store.models.fields import CallIdField, IdentifierField, MomentField


class Lock(models.Model):
    """One row for each lock name. It is never deleted, because its token must never decrease. A lock without
    an expiry is free.
    """

    tenant = IdentifierField(default="", blank=True)
    name = IdentifierField()
    owner = IdentifierField(null=True, blank=True)
    token = models.BigIntegerField(default=0)
    acquired_at = MomentField(null=True, blank=True)
    expires_at = MomentField(null=True, blank=True)
    call_id = CallIdField()

    class Meta:
        db_table = table_name("lock")
        verbose_name = _("lock")
        verbose_name_plural = _("locks")
        constraints = [
            unique("lock_name_uniq", ["tenant", "name"]),
        ]

    def __str__(self) -> str:
        return str(self.name)
