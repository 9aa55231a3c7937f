"""Schema version 5: the durable mark of a client tool call that was answered."""

from helix_store.migrations._operations import RefuseToLose, WholeMigration, add_fields
from helix_store.models.fields import PayloadField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0004_root_session_and_call_ownership")]

    operations = [
        *add_fields("session", completed_client_tool_calls=PayloadField(blank=True, null=True)),
        RefuseToLose("session", "completed_client_tool_calls"),
    ]
