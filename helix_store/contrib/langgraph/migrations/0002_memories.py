from django.db import migrations, models
from django.db.models import Q

from helix_store.conf import table_name
from helix_store.migrations._operations import WholeMigration, surrogate_key
from helix_store.models.constraints import index, unique
from helix_store.models.fields import IdentifierField, PayloadField


class Migration(WholeMigration):
    dependencies = [("helix_store_langgraph", "0001_checkpoints")]

    operations = [
        migrations.CreateModel(
            name="LangGraphMemory",
            fields=[
                ("id", surrogate_key()),
                ("tenant", IdentifierField(blank=True, default="", max_length=255)),
                ("namespace", IdentifierField(max_length=1024)),
                ("key", IdentifierField(blank=True, max_length=765)),
                ("size_bytes", models.BigIntegerField()),
                ("ttl_ms", models.BigIntegerField(blank=True, null=True)),
                ("expires_at", models.DateTimeField(blank=True, null=True)),
                ("created_at", models.DateTimeField()),
                ("updated_at", models.DateTimeField()),
                ("value", PayloadField()),
            ],
            options={
                "verbose_name": "LangGraph memory",
                "verbose_name_plural": "LangGraph memories",
                "db_table": table_name("lg_memory"),
                "constraints": [
                    unique("lg_memory_uniq", ["tenant", "namespace", "key"]),
                ],
                "indexes": [
                    index(
                        "lg_memory_expiry_idx", ["tenant", "expires_at"], where=Q(expires_at__isnull=False)
                    ),
                ],
            },
        ),
    ]
