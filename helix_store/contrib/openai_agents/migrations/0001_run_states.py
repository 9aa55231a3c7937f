"""Runs that wait for an approval."""

from django.db import migrations, models

from helix_store.conf import constraint_name, table_name
from helix_store.migrations._operations import WholeMigration
from helix_store.models.fields import IdentifierField, MomentField, PayloadField


class Migration(WholeMigration):
    initial = True

    dependencies = [("helix_store", "0008_additions")]

    operations = [
        migrations.CreateModel(
            name="OpenAIRunState",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
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
                (
                    "session",
                    models.ForeignKey(
                        on_delete=models.CASCADE,
                        related_name="openai_run_states",
                        db_constraint=False,
                        db_index=False,
                        to="helix_store.session",
                    ),
                ),
            ],
            options={
                "db_table": table_name("openai_run_state"),
                "verbose_name": "run state",
                "verbose_name_plural": "run states",
                "constraints": [
                    models.UniqueConstraint(
                        fields=["session", "state_id"], name=constraint_name("openai_state_uniq")
                    ),
                ],
            },
        ),
    ]
