"""Schema version 6: the write-once mode of a session, and the reason why a run ended."""

from django.db import models

from helix_store.conf import constraint_name
from helix_store.migrations._operations import (
    RefuseToLose,
    WholeMigration,
    add_constraints,
    add_fields,
    choices,
)


class Migration(WholeMigration):
    dependencies = [("helix_store", "0005_completed_client_tool_calls")]

    operations = [
        *add_fields(
            "session",
            mode=models.CharField(
                blank=True, choices=choices("standard", "persistent"), max_length=16, null=True
            ),
        ),
        *add_fields("run", completion_reason=models.TextField(blank=True, null=True)),
        *add_constraints(
            "session",
            models.CheckConstraint(
                condition=models.Q(
                    ("mode__isnull", True), ("mode__in", ["standard", "persistent"]), _connector="OR"
                ),
                name=constraint_name("session_mode_ck"),
            ),
        ),
        RefuseToLose("session", "mode"),
        RefuseToLose("run", "completion_reason"),
    ]
