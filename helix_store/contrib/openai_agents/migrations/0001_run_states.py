"""Runs that wait for an approval."""

from django.db import migrations, models

from helix_store.conf import table_name
from helix_store.migrations._operations import WholeMigration, parent, surrogate_key
from helix_store.models.constraints import unique
from helix_store.models.fields import IdentifierField, MomentField, PayloadField


class Migration(WholeMigration):
    initial = True

    dependencies = [("helix_store", "0008_additions")]

    operations = [
        migrations.CreateModel(
            name="OpenAIRunState",
            fields=[
                ("id", surrogate_key()),
                ("state_id", IdentifierField(max_length=255)),
                ("payload", PayloadField()),
                ("size_bytes", models.BigIntegerField()),
                ("owner", IdentifierField(blank=True, max_length=255, null=True)),
                ("deadline", MomentField(blank=True, null=True)),
                ("claim_owner", IdentifierField(blank=True, max_length=255, null=True)),
                ("claim_token", models.BigIntegerField(default=0)),
                ("claim_expires_at", MomentField(blank=True, null=True)),
                ("resumed_at", MomentField(blank=True, null=True)),
                ("created_at", MomentField()),
                ("session", parent("session", "openai_run_states")),
            ],
            options={
                "db_table": table_name("openai_run_state"),
                "verbose_name": "run state",
                "verbose_name_plural": "run states",
                "constraints": [
                    unique("openai_state_uniq", ["session", "state_id"]),
                ],
            },
        ),
    ]
