"""Schema version 4: the root of each session tree, and the session that owns each client tool call."""

from typing import Any

from django.db import migrations, models

from helix_store.migrations._operations import RefuseToLose, WholeMigration, add_constraints, add_fields
from helix_store.models.constraints import index
from helix_store.models.fields import IdentifierField, PayloadField


def fill_in_roots(apps: Any, schema_editor: Any) -> None:
    """Give sessions from before this version their root: their own id at the top, the parent's root below."""
    sessions = apps.get_model("helix_store", "Session")._base_manager.using(schema_editor.connection.alias)
    rootless = sessions.filter(root_session_id__isnull=True)
    rootless.filter(parent_session_id__isnull=True).update(root_session_id=models.F("session_id"))
    parents = sessions.filter(
        tenant=models.OuterRef("tenant"),
        session_id=models.OuterRef("parent_session_id"),
        root_session_id__isnull=False,
    )
    while rootless.filter(models.Exists(parents)).update(
        root_session_id=models.Subquery(parents.values("root_session_id")[:1])
    ):
        continue
    rootless.update(root_session_id=models.F("session_id"))


class Migration(WholeMigration):
    dependencies = [("helix_store", "0003_pending_client_tool_calls")]

    operations = [
        *add_fields(
            "session",
            root_session_id=IdentifierField(blank=True, max_length=255, null=True),
            client_tool_call_ownership=PayloadField(blank=True, null=True),
        ),
        *add_constraints("session", index("session_root_idx", ["tenant", "root_session_id"])),
        migrations.RunPython(fill_in_roots, migrations.RunPython.noop),
        RefuseToLose("session", "client_tool_call_ownership"),
    ]
