"""The tables of LangGraph's checkpoints."""

from django.db import migrations, models
from django.db.models import Q

from helix_store.conf import table_name
from helix_store.migrations._operations import WholeMigration, parent, surrogate_key
from helix_store.models.constraints import index, unique
from helix_store.models.fields import LongIdentifierField


class Migration(WholeMigration):
    initial = True

    dependencies = [
        ("helix_store", "0008_additions"),
    ]

    operations = [
        migrations.CreateModel(
            name="LangGraphCheckpoint",
            fields=[
                ("id", surrogate_key()),
                ("thread_id", models.TextField(blank=True, null=True)),
                ("namespace", LongIdentifierField(blank=True, default="")),
                ("checkpoint_id", LongIdentifierField()),
                ("parent_id", LongIdentifierField(blank=True, null=True)),
                ("run_id", LongIdentifierField(blank=True, null=True)),
                ("source", models.CharField(blank=True, default="", max_length=32)),
                ("step", models.BigIntegerField(blank=True, null=True)),
                ("metadata", models.JSONField(blank=True, default=dict)),
                ("versions", models.TextField(default="{}")),
                ("has_deltas", models.BooleanField(default=False)),
                ("type", models.CharField(max_length=255)),
                ("body", models.BinaryField()),
                ("size_bytes", models.BigIntegerField(default=0)),
                ("created_at", models.DateTimeField()),
                ("session", parent("session", "langgraph_checkpoints")),
            ],
            options={
                "verbose_name": "LangGraph checkpoint",
                "verbose_name_plural": "LangGraph checkpoints",
                "db_table": table_name("lg_checkpoint"),
                "indexes": [index("lg_run_idx", ["run_id"], where=Q(run_id__isnull=False))],
                "constraints": [unique("lg_checkpoint_uniq", ["session", "namespace", "checkpoint_id"])],
            },
        ),
        migrations.CreateModel(
            name="LangGraphValue",
            fields=[
                ("id", surrogate_key()),
                ("namespace", LongIdentifierField(blank=True, default="")),
                ("channel", LongIdentifierField()),
                ("version", LongIdentifierField()),
                ("type", models.CharField(max_length=255)),
                ("blob", models.BinaryField()),
                ("session", parent("session", "langgraph_values")),
            ],
            options={
                "verbose_name": "LangGraph value",
                "verbose_name_plural": "LangGraph values",
                "db_table": table_name("lg_value"),
                "constraints": [unique("lg_value_uniq", ["session", "namespace", "channel", "version"])],
            },
        ),
        migrations.CreateModel(
            name="LangGraphWrite",
            fields=[
                ("id", surrogate_key()),
                ("namespace", LongIdentifierField(blank=True, default="")),
                ("checkpoint_id", LongIdentifierField()),
                ("task_id", LongIdentifierField()),
                ("position", models.IntegerField()),
                ("task_path", LongIdentifierField(blank=True, default="")),
                ("channel", LongIdentifierField()),
                ("type", models.CharField(max_length=255)),
                ("blob", models.BinaryField()),
                ("session", parent("session", "langgraph_writes")),
            ],
            options={
                "verbose_name": "LangGraph write",
                "verbose_name_plural": "LangGraph writes",
                "db_table": table_name("lg_write"),
                "constraints": [
                    unique("lg_write_uniq", ["session", "namespace", "checkpoint_id", "task_id", "position"])
                ],
            },
        ),
    ]
