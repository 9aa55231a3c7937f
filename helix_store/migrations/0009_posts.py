"""Posts: messages on their way into a session."""

import django.db.models.deletion
from django.db import migrations, models
from django.db.models import Q

from helix_store.conf import constraint_name, table_name
from helix_store.migrations._operations import RefuseToLose, WholeMigration, compress_quickly
from helix_store.models.fields import IdentifierField, MomentField, PayloadField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0008_additions")]

    operations = [
        migrations.AddField(
            model_name="session",
            name="next_post_at",
            field=MomentField(blank=True, editable=False, null=True),
        ),
        migrations.AddIndex(
            model_name="session",
            index=models.Index(
                fields=["next_post_at", "id"],
                condition=Q(
                    status__in=["active", "running", "paused", "interrupted"], next_post_at__isnull=False
                ),
                name=constraint_name("session_post_idx"),
            ),
        ),
        migrations.CreateModel(
            name="Post",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        primary_key=True, serialize=False, verbose_name="ID", auto_created=True
                    ),
                ),
                ("post_id", IdentifierField()),
                ("sequence", models.BigIntegerField()),
                ("payload", PayloadField(blank=True, null=True)),
                ("author", IdentifierField(blank=True, null=True)),
                ("key", IdentifierField(blank=True, null=True)),
                ("digest", models.CharField(max_length=64)),
                ("not_before", MomentField(blank=True, null=True)),
                ("due_at", MomentField()),
                ("posted_at", MomentField()),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("waiting", "waiting"),
                            ("received", "received"),
                            ("withdrawn", "withdrawn"),
                        ],
                        default="waiting",
                        max_length=16,
                    ),
                ),
                ("received_at", MomentField(blank=True, null=True)),
                ("position", models.BigIntegerField(blank=True, null=True)),
                ("received_version", models.BigIntegerField(blank=True, editable=False, null=True)),
                (
                    "session",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="posts",
                        db_constraint=False,
                        db_index=False,
                        to="helix_store.session",
                    ),
                ),
            ],
            options={
                "db_table": table_name("post"),
                "verbose_name": "post",
                "verbose_name_plural": "posts",
                "constraints": [
                    models.UniqueConstraint(
                        fields=["session", "sequence"], name=constraint_name("post_seq_uniq")
                    ),
                    models.UniqueConstraint(
                        fields=["session", "key"],
                        condition=Q(key__isnull=False),
                        name=constraint_name("post_key_uniq"),
                    ),
                    models.CheckConstraint(
                        condition=Q(state__in=["waiting", "received", "withdrawn"]),
                        name=constraint_name("post_state_ck"),
                    ),
                ],
                "indexes": [
                    models.Index(
                        fields=["session", "due_at", "sequence"],
                        condition=Q(state="waiting"),
                        name=constraint_name("post_waiting_idx"),
                    ),
                    models.Index(
                        fields=["author", "id"],
                        condition=Q(author__isnull=False),
                        name=constraint_name("post_author_idx"),
                    ),
                ],
            },
        ),
        compress_quickly("post", "payload"),
        RefuseToLose("post"),
    ]
