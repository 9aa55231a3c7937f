"""Posts: messages on their way into a session."""

from django.db import migrations, models
from django.db.models import Q

from helix_store.conf import table_name
from helix_store.migrations._operations import (
    RefuseToLose,
    WholeMigration,
    add_constraints,
    add_fields,
    choices,
    compress_quickly,
    parent,
    surrogate_key,
)
from helix_store.models.constraints import index, one_of, unique
from helix_store.models.fields import IdentifierField, MomentField, PayloadField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0008_additions")]

    operations = [
        *add_fields("session", next_post_at=MomentField(blank=True, editable=False, null=True)),
        *add_constraints(
            "session",
            index(
                "session_post_idx",
                ["next_post_at", "id"],
                where=Q(
                    status__in=["active", "running", "paused", "interrupted"], next_post_at__isnull=False
                ),
            ),
        ),
        migrations.CreateModel(
            name="Post",
            fields=[
                ("id", surrogate_key()),
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
                        choices=choices("waiting", "received", "withdrawn"), default="waiting", max_length=16
                    ),
                ),
                ("received_at", MomentField(blank=True, null=True)),
                ("position", models.BigIntegerField(blank=True, null=True)),
                ("received_version", models.BigIntegerField(blank=True, editable=False, null=True)),
                ("session", parent("session", "posts")),
            ],
            options={
                "db_table": table_name("post"),
                "verbose_name": "post",
                "verbose_name_plural": "posts",
                "constraints": [
                    unique("post_seq_uniq", ["session", "sequence"]),
                    unique("post_key_uniq", ["session", "key"], where=Q(key__isnull=False)),
                    one_of("post_state_ck", "state", ["waiting", "received", "withdrawn"]),
                ],
                "indexes": [
                    index("post_waiting_idx", ["session", "due_at", "sequence"], where=Q(state="waiting")),
                    index("post_author_idx", ["author", "id"], where=Q(author__isnull=False)),
                ],
            },
        ),
        compress_quickly("post", "payload"),
        RefuseToLose("post"),
    ]
