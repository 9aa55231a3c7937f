"""The tables of LangGraph's checkpoints."""

import django.db.models.deletion
from django.db import migrations, models

from helix_store.conf import constraint_name, table_name
from helix_store.migrations._operations import WholeMigration
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
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
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
                (
                    "session",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="langgraph_checkpoints",
                        to="helix_store.session",
                    ),
                ),
            ],
            options={
                "verbose_name": "LangGraph checkpoint",
                "verbose_name_plural": "LangGraph checkpoints",
                "db_table": table_name("lg_checkpoint"),
                "indexes": [
                    models.Index(
                        condition=models.Q(("run_id__isnull", False)),
                        fields=["run_id"],
                        name=constraint_name("lg_run_idx"),
                    )
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("session", "namespace", "checkpoint_id"),
                        name=constraint_name("lg_checkpoint_uniq"),
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="LangGraphValue",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("namespace", LongIdentifierField(blank=True, default="")),
                ("channel", LongIdentifierField()),
                ("version", LongIdentifierField()),
                ("type", models.CharField(max_length=255)),
                ("blob", models.BinaryField()),
                (
                    "session",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="langgraph_values",
                        to="helix_store.session",
                    ),
                ),
            ],
            options={
                "verbose_name": "LangGraph value",
                "verbose_name_plural": "LangGraph values",
                "db_table": table_name("lg_value"),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("session", "namespace", "channel", "version"),
                        name=constraint_name("lg_value_uniq"),
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="LangGraphWrite",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("namespace", LongIdentifierField(blank=True, default="")),
                ("checkpoint_id", LongIdentifierField()),
                ("task_id", LongIdentifierField()),
                ("position", models.IntegerField()),
                ("task_path", LongIdentifierField(blank=True, default="")),
                ("channel", LongIdentifierField()),
                ("type", models.CharField(max_length=255)),
                ("blob", models.BinaryField()),
                (
                    "session",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="langgraph_writes",
                        to="helix_store.session",
                    ),
                ),
            ],
            options={
                "verbose_name": "LangGraph write",
                "verbose_name_plural": "LangGraph writes",
                "db_table": table_name("lg_write"),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("session", "namespace", "checkpoint_id", "task_id", "position"),
                        name=constraint_name("lg_write_uniq"),
                    )
                ],
            },
        ),
    ]
