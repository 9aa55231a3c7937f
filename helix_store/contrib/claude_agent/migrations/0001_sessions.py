"""The table of Claude Agent SDK's sessions."""

import django.db.models.deletion
from django.db import migrations, models

from helix_store.conf import constraint_name, table_name
from helix_store.migrations._operations import WholeMigration
from helix_store.models.fields import IdentifierField, PayloadField


class Migration(WholeMigration):
    initial = True

    dependencies = [("helix_store", "0008_additions")]

    operations = [
        migrations.CreateModel(
            name="ClaudeSession",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        primary_key=True, serialize=False, verbose_name="ID", auto_created=True
                    ),
                ),
                ("tenant", IdentifierField(blank=True, default="")),
                ("project_key", IdentifierField(max_length=1000)),
                ("claude_session_id", IdentifierField(max_length=1000)),
                ("mtime_ms", models.BigIntegerField(blank=True, null=True)),
                ("summary", PayloadField(blank=True, null=True)),
                (
                    "session",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="claude_sessions",
                        db_constraint=False,
                        db_index=False,
                        to="helix_store.session",
                    ),
                ),
            ],
            options={
                "db_table": table_name("claude_session"),
                "verbose_name": "Claude session",
                "verbose_name_plural": "Claude sessions",
                "constraints": [
                    models.UniqueConstraint(fields=["session"], name=constraint_name("claude_session_uniq")),
                ],
                "indexes": [
                    models.Index(
                        fields=["tenant", "project_key", "mtime_ms"],
                        name=constraint_name("claude_project_idx"),
                    ),
                ],
            },
        ),
    ]
