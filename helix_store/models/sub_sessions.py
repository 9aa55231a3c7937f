"""Sub-agents that a session started, here or on another system."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from helix_store.conf import constraint_name, table_name
from helix_store.models.fields import IdentifierField, PayloadField
from helix_store.models.sessions import Session

__all__ = ["SubSessionRef"]

LOCATIONS = ["local", "remote"]


class SubSessionRef(models.Model):
    session = models.ForeignKey(
        Session, on_delete=models.CASCADE, related_name="sub_session_refs", db_index=False
    )
    sub_session_id = IdentifierField()
    agent_type = IdentifierField()
    parent_tool_call_id = IdentifierField(null=True, blank=True)
    status = IdentifierField()
    location = models.CharField(max_length=8, default="local", choices=[(name, name) for name in LOCATIONS])
    remote = PayloadField(null=True, blank=True)
    output = PayloadField(null=True, blank=True)
    error = PayloadField(null=True, blank=True)
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()

    class Meta:
        db_table = table_name("sub_session_ref")
        constraints = [
            models.UniqueConstraint(
                fields=["session", "sub_session_id"], name=constraint_name("sub_ref_uniq")
            ),
            models.CheckConstraint(
                condition=Q(location__in=LOCATIONS), name=constraint_name("sub_ref_location_ck")
            ),
        ]

    def __str__(self) -> str:
        return str(self.sub_session_id)
