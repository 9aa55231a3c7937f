from django.db import migrations, models

import helix_store.models.fields
from helix_store.conf import constraint_name, table_name
from helix_store.migrations._operations import WholeMigration


class Migration(WholeMigration):
    dependencies = [("helix_store_langgraph", "0001_checkpoints")]

    operations = [
        migrations.CreateModel(
            name="LangGraphMemory",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "tenant",
                    helix_store.models.fields.IdentifierField(blank=True, default="", max_length=255),
                ),
                ("namespace", helix_store.models.fields.IdentifierField(max_length=1024)),
                ("key", helix_store.models.fields.IdentifierField(blank=True, max_length=765)),
                ("size_bytes", models.BigIntegerField()),
                ("ttl_ms", models.BigIntegerField(blank=True, null=True)),
                ("expires_at", models.DateTimeField(blank=True, null=True)),
                ("created_at", models.DateTimeField()),
                ("updated_at", models.DateTimeField()),
                ("value", helix_store.models.fields.PayloadField()),
            ],
            options={
                "verbose_name": "LangGraph memory",
                "verbose_name_plural": "LangGraph memories",
                "db_table": table_name("lg_memory"),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant", "namespace", "key"), name=constraint_name("lg_memory_uniq")
                    ),
                ],
                "indexes": [
                    models.Index(
                        condition=models.Q(("expires_at__isnull", False)),
                        fields=["tenant", "expires_at"],
                        name=constraint_name("lg_memory_expiry_idx"),
                    ),
                ],
            },
        ),
    ]
