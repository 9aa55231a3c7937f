"""An index for lists of one agent type, in the place of the one for graph sessions alone."""

from django.db import migrations, models

from helix_store.conf import constraint_name
from helix_store.migrations._whole import WholeMigration


class Migration(WholeMigration):
    dependencies = [("helix_store", "0013_list_indexes")]

    operations = [
        migrations.AddIndex(
            model_name="session",
            index=models.Index(
                fields=["tenant", "agent_type", "updated_at", "session_id"],
                name=constraint_name("session_agent_idx"),
            ),
        ),
        migrations.RemoveIndex(model_name="session", name=constraint_name("session_graph_idx")),
    ]
