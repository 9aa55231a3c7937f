"""Graph sessions with typed metadata, graph checkpoints by their id alone, and claims of snapshots."""

from django.db import migrations, models

from helix_store.conf import constraint_name
from helix_store.migrations._operations import RefuseToLose
from helix_store.migrations._whole import WholeMigration
from helix_store.models.fields import IdentifierField, PayloadField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0008_operations")]

    operations = [
        migrations.AddField(
            model_name="session", name="typed_metadata", field=PayloadField(blank=True, null=True)
        ),
        migrations.AddIndex(
            model_name="session",
            index=models.Index(
                condition=models.Q(("agent_type", "graph")),
                fields=["tenant", "updated_at", "session_id"],
                name=constraint_name("session_graph_idx"),
            ),
        ),
        migrations.AddIndex(
            model_name="checkpoint",
            index=models.Index(
                condition=models.Q(("kind", "graph")),
                fields=["checkpoint_id"],
                name=constraint_name("checkpoint_graph_idx"),
            ),
        ),
        migrations.AddField(
            model_name="checkpoint",
            name="snapshot_version",
            field=models.BigIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="checkpoint",
            name="claim_owner",
            field=IdentifierField(blank=True, max_length=255, null=True),
        ),
        migrations.AddField(
            model_name="checkpoint", name="claim_token", field=models.BigIntegerField(blank=True, null=True)
        ),
        migrations.AddField(
            model_name="checkpoint",
            name="claim_expires_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="checkpoint", name="claim_done_at", field=models.DateTimeField(blank=True, null=True)
        ),
        RefuseToLose("session", "typed_metadata"),
        RefuseToLose("checkpoint", "snapshot_version"),
    ]
