"""The records of conversations, their entries, and the families that share entries."""

from django.db import migrations, models

from helix_store.conf import table_name
from helix_store.migrations._operations import WholeMigration, surrogate_key
from helix_store.models.constraints import index, unique
from helix_store.models.fields import IdentifierField, PayloadField


class Migration(WholeMigration):
    initial = True

    dependencies = [
        ("helix_store", "0008_additions"),
    ]

    operations = [
        migrations.CreateModel(
            name="ConversationEntry",
            fields=[
                ("id", surrogate_key()),
                ("tenant", IdentifierField(blank=True, default="", max_length=255)),
                ("entry_id", IdentifierField(max_length=255)),
                ("family", IdentifierField(max_length=255)),
                ("parent_id", IdentifierField(blank=True, max_length=255, null=True)),
                ("kind", IdentifierField(max_length=255)),
                ("payload", PayloadField()),
                ("size_bytes", models.BigIntegerField()),
                ("created_at", models.DateTimeField()),
            ],
            options={
                "verbose_name": "conversation entry",
                "verbose_name_plural": "conversation entries",
                "db_table": table_name("pydantic_entry"),
                "indexes": [index("pydantic_entry_idx", ["tenant", "family"])],
                "constraints": [unique("pydantic_entry_uniq", ["tenant", "entry_id"])],
            },
        ),
        migrations.CreateModel(
            name="ConversationFamily",
            fields=[
                ("id", surrogate_key()),
                ("tenant", IdentifierField(blank=True, default="", max_length=255)),
                ("family", IdentifierField(max_length=255)),
            ],
            options={
                "verbose_name": "conversation family",
                "verbose_name_plural": "conversation families",
                "db_table": table_name("pydantic_family"),
                "constraints": [unique("pydantic_family_uniq", ["tenant", "family"])],
            },
        ),
        migrations.CreateModel(
            name="Conversation",
            fields=[
                ("id", surrogate_key()),
                ("tenant", IdentifierField(blank=True, default="", max_length=255)),
                ("family", IdentifierField(max_length=255)),
                ("head_id", IdentifierField(blank=True, max_length=255, null=True)),
                ("branches", models.JSONField(blank=True, default=list)),
                ("revision", IdentifierField(max_length=255)),
                ("scope", IdentifierField(blank=True, max_length=255, null=True)),
                ("updated_at", models.DateTimeField()),
                ("document", PayloadField()),
                (
                    "session",
                    models.OneToOneField(
                        db_constraint=False,
                        on_delete=models.CASCADE,
                        related_name="pydantic_conversation",
                        to="helix_store.session",
                    ),
                ),
            ],
            options={
                "verbose_name": "conversation",
                "verbose_name_plural": "conversations",
                "db_table": table_name("pydantic_record"),
                "indexes": [
                    index("pydantic_family_idx", ["tenant", "family"]),
                    index("pydantic_scope_idx", ["tenant", "scope", "-updated_at", "id"]),
                    index("pydantic_newest_idx", ["tenant", "-updated_at", "id"]),
                ],
            },
        ),
    ]
