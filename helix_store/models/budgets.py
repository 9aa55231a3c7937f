"""Budgets, and the counters of the amounts spent."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from helix_store.conf import table_name
from helix_store.core.budgets import BudgetPeriod, BudgetScope
from helix_store.models.constraints import index, one_of, unique
from helix_store.models.fields import CostField, IdentifierField, MomentField


class Budget(models.Model):
    """A cap. ``value`` is empty for a tenant, and for a budget that applies to each user or agent type.

    Entries from before the period ``counted_from`` are not counted.
    """

    tenant = IdentifierField(default="", blank=True)
    name = IdentifierField()
    scope = models.CharField(max_length=16, choices=[(each.value, each.value) for each in BudgetScope])
    value = IdentifierField(default="", blank=True)
    period = models.CharField(max_length=8, choices=[(each.value, each.value) for each in BudgetPeriod])
    limit_usd = CostField(null=True, blank=True)
    limit_tokens = models.BigIntegerField(null=True, blank=True)
    counted_from = models.CharField(max_length=12, default="", blank=True)
    created_at = MomentField()
    updated_at = MomentField()

    objects: models.Manager[Budget] = models.Manager()

    class Meta:
        db_table = table_name("budget")
        verbose_name = _("budget")
        verbose_name_plural = _("budgets")
        constraints = [
            unique("budget_name_uniq", ["tenant", "name"]),
            one_of("budget_scope_ck", "scope", BudgetScope),
            one_of("budget_period_ck", "period", BudgetPeriod),
        ]
        indexes = [
            index("budget_scope_idx", ["tenant", "scope", "value"]),
        ]

    def __str__(self) -> str:
        return str(self.name)


class BudgetCounter(models.Model):
    """The ledger's sum for one value and one period of a budget, so that a check need not add up entries.

    ``period`` is a day, a month, or empty for a total. ``holds`` contains, by the key of its session, the
    fencing token, the dollars (in the smallest unit) and the tokens of each hold.
    """

    tenant = IdentifierField(default="", blank=True)
    name = IdentifierField()
    value = IdentifierField(default="", blank=True)
    period = models.CharField(max_length=12, default="", blank=True)
    spent_usd = CostField(default=0)
    spent_tokens = models.BigIntegerField(default=0)
    holds = models.JSONField(default=dict, blank=True, editable=False)

    objects: models.Manager[BudgetCounter] = models.Manager()

    class Meta:
        db_table = table_name("budget_counter")
        verbose_name = _("counter of a budget")
        verbose_name_plural = _("counters of budgets")
        constraints = [
            unique("budget_counter_uniq", ["tenant", "name", "period", "value"]),
        ]

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, self.value, self.period)))
