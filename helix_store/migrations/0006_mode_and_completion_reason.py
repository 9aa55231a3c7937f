"""Schema version 6: the write-once mode of a session, and the reason why a run ended."""

from django.db import migrations, models

from helix_store.conf import constraint_name
from helix_store.migrations._operations import RefuseToLose, WholeMigration


class Migration(WholeMigration):
    dependencies = [("helix_store", "0005_completed_client_tool_calls")]

    operations = [
        migrations.AddField(
            model_name="session",
            name="mode",
            field=models.CharField(
                blank=True,
                choices=[("standard", "standard"), ("persistent", "persistent")],
                max_length=16,
                null=True,
            ),
        ),
        migrations.AddField(
            model_name="run", name="completion_reason", field=models.TextField(blank=True, null=True)
        ),
        migrations.AddConstraint(
            model_name="session",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ("mode__isnull", True), ("mode__in", ["standard", "persistent"]), _connector="OR"
                ),
                name=constraint_name("session_mode_ck"),
            ),
        ),
        RefuseToLose("session", "mode"),
        RefuseToLose("run", "completion_reason"),
    ]
