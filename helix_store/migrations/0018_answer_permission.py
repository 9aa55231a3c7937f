"""The permission to answer calls, without the permission to change sessions."""

from django.db import migrations

from helix_store.migrations._operations import WholeMigration


class Migration(WholeMigration):
    dependencies = [("helix_store", "0017_stuck_sessions")]

    operations = [
        migrations.AlterModelOptions(
            name="session",
            options={
                "permissions": [("answer_call", "Can answer calls")],
                "verbose_name": "session",
                "verbose_name_plural": "sessions",
            },
        ),
    ]
