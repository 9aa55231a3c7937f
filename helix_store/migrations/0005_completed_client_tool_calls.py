"""Schema version 5: the durable mark of a client tool call that was answered."""

from django.db import migrations

from helix_store.migrations._operations import RefuseToLose, WholeMigration
from helix_store.models.fields import PayloadField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0004_root_session_and_call_ownership")]

    operations = [
        migrations.AddField(
            model_name="session",
            name="completed_client_tool_calls",
            field=PayloadField(blank=True, null=True),
        ),
        RefuseToLose("session", "completed_client_tool_calls"),
    ]
