"""Schema version 3: tool calls that wait for a client, found by deadline."""

from django.db import models
from django.db.models import Q

from helix_store.migrations._operations import RefuseToLose, WholeMigration, add_constraints, add_fields
from helix_store.models.constraints import index
from helix_store.models.fields import PayloadField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0002_remote_sub_sessions")]

    operations = [
        *add_fields(
            "session",
            pending_client_tool_calls=PayloadField(blank=True, null=True),
            pending_deadline=models.DateTimeField(blank=True, null=True),
        ),
        *add_constraints(
            "session",
            index(
                "session_pending_idx",
                ["pending_deadline", "id"],
                where=Q(
                    pending_deadline__isnull=False, status__in=["active", "running", "paused", "interrupted"]
                ),
            ),
        ),
        RefuseToLose("session", "pending_client_tool_calls"),
    ]
