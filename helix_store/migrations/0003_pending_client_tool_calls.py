"""Schema version 3: tool calls that wait for a client, found by deadline."""

from django.db import migrations, models

from helix_store.conf import constraint_name
from helix_store.migrations._operations import RefuseToLose, WholeMigration
from helix_store.models.fields import PayloadField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0002_remote_sub_sessions")]

    operations = [
        migrations.AddField(
            model_name="session", name="pending_client_tool_calls", field=PayloadField(blank=True, null=True)
        ),
        migrations.AddField(
            model_name="session", name="pending_deadline", field=models.DateTimeField(blank=True, null=True)
        ),
        migrations.AddIndex(
            model_name="session",
            index=models.Index(
                condition=models.Q(
                    ("pending_deadline__isnull", False),
                    ("status__in", ["active", "running", "paused", "interrupted"]),
                ),
                fields=["pending_deadline", "id"],
                name=constraint_name("session_pending_idx"),
            ),
        ),
        RefuseToLose("session", "pending_client_tool_calls"),
    ]
