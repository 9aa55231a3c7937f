"""Schema version 7: everything a suspended session needs to be resumed anywhere, and its expiry."""

from django.db import models
from django.db.models import Q

from helix_store.conf import constraint_name
from helix_store.migrations._operations import (
    RefuseToLose,
    WholeMigration,
    add_constraints,
    add_fields,
    choices,
)
from helix_store.models.constraints import index
from helix_store.models.fields import IdentifierField, PayloadField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0006_mode_and_completion_reason")]

    operations = [
        *add_fields(
            "session",
            suspension_kind=models.CharField(
                blank=True,
                choices=choices(
                    "suspended_client_tool", "suspended_awaiting_children", "suspended_step_partial"
                ),
                max_length=32,
                null=True,
            ),
            suspension_context=PayloadField(blank=True, null=True),
            suspended_awaiting_children=PayloadField(blank=True, null=True),
            suspended_step_id=IdentifierField(blank=True, max_length=255, null=True),
            tracing_context=PayloadField(blank=True, null=True),
            expires_at=models.DateTimeField(blank=True, null=True),
        ),
        *add_constraints(
            "session",
            index(
                "session_expiry_idx",
                ["expires_at", "id"],
                where=Q(expires_at__isnull=False, status__in=["active", "running", "paused", "interrupted"]),
            ),
            index(
                "session_expired_idx",
                ["expires_at", "id"],
                where=Q(expires_at__isnull=False, failure_reason="session_expired"),
            ),
            models.CheckConstraint(
                condition=models.Q(
                    ("suspension_kind__isnull", True),
                    (
                        "suspension_kind__in",
                        ["suspended_client_tool", "suspended_awaiting_children", "suspended_step_partial"],
                    ),
                    _connector="OR",
                ),
                name=constraint_name("session_kind_ck"),
            ),
        ),
        RefuseToLose(
            "session",
            "suspension_kind",
            "suspension_context",
            "suspended_awaiting_children",
            "suspended_step_id",
            "tracing_context",
            "expires_at",
        ),
    ]
