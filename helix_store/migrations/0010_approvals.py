"""The approved and used calls, by tool call id, outside the state."""

from __future__ import annotations

from helix_store.migrations._operations import RefuseToLose, WholeMigration, add_fields
from helix_store.models.fields import PayloadField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0009_posts")]

    operations = [
        *add_fields("session", approved_tool_calls=PayloadField(blank=True, null=True)),
        RefuseToLose("session", "approved_tool_calls", remove="Delete these sessions with delete_session()."),
    ]
