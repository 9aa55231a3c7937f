"""Streams and their chunks, and an index that finds the sessions that write to a stream of another name."""

import django.db.models.deletion
from django.db import migrations, models
from django.db.models import F, Q

from helix_store.conf import constraint_name, table_name
from helix_store.migrations._operations import RefuseToLose
from helix_store.migrations._whole import WholeMigration
from helix_store.models.fields import IdentifierField, PayloadField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0009_graph_checkpoints_and_snapshots")]

    operations = [
        migrations.CreateModel(
            name="Stream",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("tenant", IdentifierField(blank=True, default="", max_length=255)),
                ("stream_id", IdentifierField(max_length=255)),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("active", "active"),
                            ("paused", "paused"),
                            ("ended", "ended"),
                            ("failed", "failed"),
                        ],
                        max_length=16,
                    ),
                ),
                ("last_sequence", models.BigIntegerField(default=0)),
                ("floor", models.BigIntegerField(default=0)),
                ("generation", models.BigIntegerField(default=0)),
                ("run_id", IdentifierField(max_length=255)),
                ("agent_name", IdentifierField(max_length=255)),
                ("writer_id", IdentifierField(blank=True, max_length=255, null=True)),
                ("lease_expires_at", models.DateTimeField(blank=True, null=True)),
                ("output", PayloadField(blank=True, null=True)),
                ("error", PayloadField(blank=True, null=True)),
                ("created_at", models.DateTimeField()),
                ("updated_at", models.DateTimeField()),
                ("ended_at", models.DateTimeField(blank=True, null=True)),
                ("keep_until", models.DateTimeField(blank=True, null=True)),
                ("is_emptied", models.BooleanField(default=False)),
            ],
            options={
                "db_table": table_name("stream"),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant", "stream_id"), name=constraint_name("stream_id_uniq")
                    ),
                    models.CheckConstraint(
                        condition=Q(status__in=["active", "paused", "ended", "failed"]),
                        name=constraint_name("stream_status_ck"),
                    ),
                    models.CheckConstraint(
                        condition=Q(floor__gte=0, floor__lte=F("last_sequence")),
                        name=constraint_name("stream_floor_ck"),
                    ),
                ],
                "indexes": [
                    models.Index(
                        condition=Q(status="active"), fields=["id"], name=constraint_name("stream_active_idx")
                    ),
                    models.Index(
                        condition=Q(ended_at__isnull=False, is_emptied=False),
                        fields=["ended_at"],
                        name=constraint_name("stream_ended_idx"),
                    ),
                    models.Index(
                        condition=Q(keep_until__isnull=False, is_emptied=False),
                        fields=["keep_until"],
                        name=constraint_name("stream_keep_idx"),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="StreamChunk",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("sequence", models.BigIntegerField()),
                ("payload", PayloadField()),
                (
                    "stream",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="chunks",
                        to="helix_store.stream",
                    ),
                ),
            ],
            options={
                "db_table": table_name("stream_chunk"),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("stream", "sequence"), name=constraint_name("chunk_seq_uniq")
                    ),
                ],
            },
        ),
        migrations.AddIndex(
            model_name="session",
            index=models.Index(
                condition=Q(stream_id__lt=F("session_id")) | Q(stream_id__gt=F("session_id")),
                fields=["tenant", "stream_id"],
                name=constraint_name("session_stream_idx"),
            ),
        ),
        RefuseToLose("stream"),
    ]
