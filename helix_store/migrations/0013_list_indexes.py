"""Indexes for lists by model, agent type, tags and metadata, and for the checkpoints of all namespaces."""

from django.db import migrations, models
from django.db.models import Q

from helix_store.conf import constraint_name
from helix_store.migrations._operations import index_documents
from helix_store.migrations._whole import WholeMigration


class Migration(WholeMigration):
    dependencies = [("helix_store", "0012_payload_compression")]

    operations = [
        migrations.AddIndex(
            model_name="checkpoint",
            index=models.Index(
                condition=Q(kind="graph"),
                fields=["session", "version", "id"],
                name=constraint_name("checkpoint_order_idx"),
            ),
        ),
        migrations.AddIndex(
            model_name="usageentry",
            index=models.Index(
                condition=Q(model__isnull=False),
                fields=["tenant", "model", "timestamp", "id"],
                name=constraint_name("usage_model_idx"),
            ),
        ),
        migrations.AddIndex(
            model_name="usageentry",
            index=models.Index(
                fields=["tenant", "session_agent_type", "timestamp", "id"],
                name=constraint_name("usage_agent_idx"),
            ),
        ),
        index_documents("session", "tags", name=constraint_name("session_tags_idx"), empty="[]"),
        index_documents("session", "metadata", name=constraint_name("session_meta_idx"), empty="{}"),
    ]
