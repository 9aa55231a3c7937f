"""The records of conversations, their entries, and the families that share entries."""

from django.db import migrations, models

from helix_store.conf import constraint_name, table_name
from helix_store.migrations._operations import WholeMigration
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
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
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
                "indexes": [
                    models.Index(fields=["tenant", "family"], name=constraint_name("pydantic_entry_idx"))
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant", "entry_id"), name=constraint_name("pydantic_entry_uniq")
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="ConversationFamily",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("tenant", IdentifierField(blank=True, default="", max_length=255)),
                ("family", IdentifierField(max_length=255)),
            ],
            options={
                "verbose_name": "conversation family",
                "verbose_name_plural": "conversation families",
                "db_table": table_name("pydantic_family"),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant", "family"), name=constraint_name("pydantic_family_uniq")
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Conversation",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
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
                    models.Index(fields=["tenant", "family"], name=constraint_name("pydantic_family_idx")),
                    models.Index(
                        fields=["tenant", "scope", "-updated_at", "id"],
                        name=constraint_name("pydantic_scope_idx"),
                    ),
                    models.Index(
                        fields=["tenant", "-updated_at", "id"], name=constraint_name("pydantic_newest_idx")
                    ),
                ],
            },
        ),
    ]
