"""Items of sessions in lanes."""

import django.db.models.deletion
from django.db import migrations, models
from django.db.models import Q

from helix_store.conf import constraint_name, table_name
from helix_store.migrations._operations import RefuseToLose, compress_quickly
from helix_store.migrations._whole import WholeMigration
from helix_store.models.fields import IdentifierField, MomentField, PayloadField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0018_model_names")]

    operations = [
        migrations.CreateModel(
            name="Item",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        primary_key=True, serialize=False, verbose_name="ID", auto_created=True
                    ),
                ),
                ("lane", IdentifierField(blank=True, default="", max_length=1000)),
                ("key", IdentifierField(blank=True, max_length=1000, null=True)),
                ("payload", PayloadField()),
                ("created_at", MomentField()),
                (
                    "session",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="items",
                        db_constraint=False,
                        db_index=False,
                        to="helix_store.session",
                    ),
                ),
            ],
            options={
                "db_table": table_name("item"),
                "verbose_name": "item",
                "verbose_name_plural": "items",
                "constraints": [
                    models.UniqueConstraint(
                        fields=["session", "lane", "key"],
                        condition=Q(key__isnull=False),
                        name=constraint_name("item_key_uniq"),
                    ),
                ],
                "indexes": [
                    models.Index(fields=["session", "lane", "id"], name=constraint_name("item_lane_idx")),
                ],
            },
        ),
        compress_quickly("item", "payload"),
        RefuseToLose("item"),
    ]
