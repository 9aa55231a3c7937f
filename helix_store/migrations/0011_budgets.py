"""Budgets, and the counters of the amounts spent."""

from django.db import migrations, models
from django.db.models import Q

from helix_store.conf import constraint_name, table_name
from helix_store.migrations._operations import RefuseToLose, WholeMigration
from helix_store.models.fields import CostField, IdentifierField, MomentField


class Migration(WholeMigration):
    dependencies = [("helix_store", "0010_approvals")]

    operations = [
        migrations.AddField(
            model_name="usageentry",
            name="tree_id",
            field=IdentifierField(blank=True, editable=False, null=True),
        ),
        migrations.AddIndex(
            model_name="usageentry",
            index=models.Index(
                fields=["tenant", "tree_id", "timestamp", "id"],
                condition=Q(tree_id__isnull=False),
                name=constraint_name("usage_tree_idx"),
            ),
        ),
        migrations.CreateModel(
            name="Budget",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        primary_key=True, serialize=False, verbose_name="ID", auto_created=True
                    ),
                ),
                ("tenant", IdentifierField(blank=True, default="")),
                ("name", IdentifierField()),
                (
                    "scope",
                    models.CharField(
                        choices=[
                            ("tree", "tree"),
                            ("user", "user"),
                            ("agent_type", "agent_type"),
                            ("tenant", "tenant"),
                        ],
                        max_length=16,
                    ),
                ),
                ("value", IdentifierField(blank=True, default="")),
                (
                    "period",
                    models.CharField(
                        choices=[("total", "total"), ("day", "day"), ("month", "month")], max_length=8
                    ),
                ),
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
                    models.UniqueConstraint(
                        fields=["tenant", "name"], name=constraint_name("budget_name_uniq")
                    ),
                    models.CheckConstraint(
                        condition=Q(scope__in=["tree", "user", "agent_type", "tenant"]),
                        name=constraint_name("budget_scope_ck"),
                    ),
                    models.CheckConstraint(
                        condition=Q(period__in=["total", "day", "month"]),
                        name=constraint_name("budget_period_ck"),
                    ),
                ],
                "indexes": [
                    models.Index(
                        fields=["tenant", "scope", "value"], name=constraint_name("budget_scope_idx")
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="BudgetCounter",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        primary_key=True, serialize=False, verbose_name="ID", auto_created=True
                    ),
                ),
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
                    models.UniqueConstraint(
                        fields=["tenant", "name", "period", "value"],
                        name=constraint_name("budget_counter_uniq"),
                    ),
                ],
            },
        ),
        RefuseToLose("budget"),
    ]
