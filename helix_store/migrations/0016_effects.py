"""Effects; what a budget refused to a run, and what a session waits for and when it was last announced."""

from django.db import migrations, models
from django.db.models import Q

from helix_store.conf import table_name
from helix_store.migrations._operations import (
    RefuseToLose,
    WholeMigration,
    add_fields,
    parent,
    surrogate_key,
)
from helix_store.models.constraints import index, one_of, unique
from helix_store.models.fields import CallIdsField, CostField, IdentifierField, MomentField, PayloadField

_STATES = {"started": "started", "done": "done", "not_done": "not done", "unknown": "unknown"}


class Migration(WholeMigration):
    dependencies = [("helix_store", "0015_token_kinds")]

    operations = [
        migrations.CreateModel(
            name="Effect",
            fields=[
                ("id", surrogate_key()),
                ("session", parent("session", "effects")),
                ("effect_id", IdentifierField()),
                ("sequence", models.BigIntegerField()),
                ("state", models.CharField(choices=list(_STATES.items()), max_length=16)),
                ("tool_name", IdentifierField(blank=True, default="")),
                ("input", PayloadField()),
                ("digest", models.CharField(max_length=64)),
                ("needs_approval", models.BooleanField(default=False)),
                ("attempt", models.BigIntegerField(default=1)),
                ("run_id", IdentifierField(blank=True, null=True)),
                ("step_count", models.BigIntegerField(blank=True, null=True)),
                ("fencing_token", models.BigIntegerField(blank=True, null=True)),
                ("result", PayloadField(blank=True, null=True)),
                ("error", PayloadField(blank=True, null=True)),
                ("actors", PayloadField(default="[]")),
                ("started_at", MomentField()),
                ("ended_at", MomentField(blank=True, null=True)),
                ("call_ids", CallIdsField()),
            ],
            options={
                "db_table": table_name("effect"),
                "verbose_name": "effect",
                "verbose_name_plural": "effects",
                "permissions": [("settle_effect", "Can settle effects")],
                "constraints": [
                    unique("effect_id_uniq", ["session", "effect_id"]),
                    unique("effect_seq_uniq", ["session", "sequence"]),
                    one_of("effect_state_ck", "state", list(_STATES)),
                ],
                "indexes": [
                    index("effect_open_idx", ["started_at", "id"], where=Q(state__in=["started", "unknown"])),
                ],
            },
        ),
        *add_fields(
            "run",
            refused_usd=CostField(blank=True, editable=False, null=True),
            refused_tokens=models.BigIntegerField(blank=True, editable=False, null=True),
        ),
        *add_fields(
            "session",
            waiting_kind=IdentifierField(blank=True, editable=False, null=True),
            announced_at=MomentField(blank=True, editable=False, null=True),
        ),
        RefuseToLose("effect"),
    ]
