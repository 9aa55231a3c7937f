"""The table of Claude Agent SDK's sessions."""

from django.db import migrations, models

from helix_store.conf import table_name
from helix_store.migrations._operations import WholeMigration, parent, surrogate_key
from helix_store.models.constraints import index, unique
from helix_store.models.fields import IdentifierField, PayloadField


class Migration(WholeMigration):
    initial = True

    dependencies = [("helix_store", "0008_additions")]

    operations = [
        migrations.CreateModel(
            name="ClaudeSession",
            fields=[
                ("id", surrogate_key()),
                ("tenant", IdentifierField(blank=True, default="")),
                ("project_key", IdentifierField(max_length=1000)),
                ("claude_session_id", IdentifierField(max_length=1000)),
                ("mtime_ms", models.BigIntegerField(blank=True, null=True)),
                ("summary", PayloadField(blank=True, null=True)),
                ("session", parent("session", "claude_sessions")),
            ],
            options={
                "db_table": table_name("claude_session"),
                "verbose_name": "Claude session",
                "verbose_name_plural": "Claude sessions",
                "constraints": [
                    unique("claude_session_uniq", ["session"]),
                ],
                "indexes": [
                    index("claude_project_idx", ["tenant", "project_key", "mtime_ms"]),
                ],
            },
        ),
    ]
