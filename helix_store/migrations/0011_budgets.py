"""Budgets, and the counters of the amounts spent."""

from django.db import migrations, models
from django.db.models import Q

from helix_store.conf import table_name
from helix_store.migrations._operations import (
    RefuseToLose,
    WholeMigration,
    add_constraints,
    add_fields,
    choices,
    surrogate_key,
)
from helix_store.models.constraints import index, one_of, unique
from helix_store.models.fields import CostField, IdentifierField, MomentField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0010_approvals")]

    operations = [
        *add_fields("usageentry", tree_id=IdentifierField(blank=True, editable=False, null=True)),
        *add_constraints(
            "usageentry",
            index("usage_tree_idx", ["tenant", "tree_id", "timestamp", "id"], where=Q(tree_id__isnull=False)),
        ),
        migrations.CreateModel(
            name="Budget",
            fields=[
                ("id", surrogate_key()),
                ("tenant", IdentifierField(blank=True, default="")),
                ("name", IdentifierField()),
                (
                    "scope",
                    models.CharField(choices=choices("tree", "user", "agent_type", "tenant"), max_length=16),
                ),
                ("value", IdentifierField(blank=True, default="")),
                ("period", models.CharField(choices=choices("total", "day", "month"), max_length=8)),
                ("limit_usd", CostField(blank=True, null=True)),
                ("limit_tokens", models.BigIntegerField(blank=True, null=True)),
                ("counted_from", models.CharField(blank=True, default="", max_length=12)),
                ("created_at", MomentField()),
                ("updated_at", MomentField()),
            ],
            options={
                "db_table": table_name("budget"),
                "verbose_name": "budget",
                "verbose_name_plural": "budgets",
                "constraints": [
                    unique("budget_name_uniq", ["tenant", "name"]),
                    one_of("budget_scope_ck", "scope", ["tree", "user", "agent_type", "tenant"]),
                    one_of("budget_period_ck", "period", ["total", "day", "month"]),
                ],
                "indexes": [
                    index("budget_scope_idx", ["tenant", "scope", "value"]),
                ],
            },
        ),
        migrations.CreateModel(
            name="BudgetCounter",
            fields=[
                ("id", surrogate_key()),
                ("tenant", IdentifierField(blank=True, default="")),
                ("name", IdentifierField()),
                ("value", IdentifierField(blank=True, default="")),
                ("period", models.CharField(blank=True, default="", max_length=12)),
                ("spent_usd", CostField(default=0)),
                ("spent_tokens", models.BigIntegerField(default=0)),
                ("holds", models.JSONField(blank=True, default=dict, editable=False)),
            ],
            options={
                "db_table": table_name("budget_counter"),
                "verbose_name": "counter of a budget",
                "verbose_name_plural": "counters of budgets",
                "constraints": [
                    unique("budget_counter_uniq", ["tenant", "name", "period", "value"]),
                ],
            },
        ),
        RefuseToLose("budget"),
    ]
