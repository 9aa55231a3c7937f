"""The ledger of usage, and budgets."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from helix_store.conf import table_name
from helix_store.core.types import UsageKind
from helix_store.core.usage import BudgetPeriod, BudgetScope
from helix_store.models.constraints import index, one_of, unique
from helix_store.models.fields import CostField, IdentifierField, MomentField
from helix_store.models.sessions import Session


class UsageEntry(models.Model):
    """An event. ``session`` is null after a deletion with ``keep_usage``; ``recorded_for`` keeps its id."""

    # Columns that are summed come first: PostgreSQL reads a row only up to the last column that it needs.
    session = models.ForeignKey(
        Session,
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        related_name="usage_entries",
        # Recording takes a lock that prevents the deletion of the session.
        db_constraint=False,
        db_index=False,
    )
    timestamp = MomentField()
    prompt_tokens = models.BigIntegerField(null=True, blank=True)
    completion_tokens = models.BigIntegerField(null=True, blank=True)
    reasoning_tokens = models.BigIntegerField(null=True, blank=True)
    cached_tokens = models.BigIntegerField(null=True, blank=True)
    cache_write_tokens = models.BigIntegerField(null=True, blank=True)
    audio_prompt_tokens = models.BigIntegerField(null=True, blank=True)
    audio_completion_tokens = models.BigIntegerField(null=True, blank=True)
    total_tokens = models.BigIntegerField(null=True, blank=True)
    duration_ms = models.BigIntegerField(null=True, blank=True)
    cost_usd = CostField(null=True, blank=True)
    amount = models.FloatField(null=True, blank=True)
    success = models.BooleanField(null=True, blank=True)
    kind = models.CharField(max_length=16, choices=[(k.value, k.value) for k in UsageKind])
    model = IdentifierField(null=True, blank=True)
    tool_name = IdentifierField(null=True, blank=True)
    agent_type = IdentifierField(null=True, blank=True)
    custom_type = IdentifierField(null=True, blank=True)
    custom_name = IdentifierField(null=True, blank=True)
    tenant = IdentifierField(default="", blank=True)
    entry_id = IdentifierField()
    recorded_for = IdentifierField()
    session_agent_type = IdentifierField()
    user_id = IdentifierField(null=True, blank=True)
    run_id = IdentifierField(null=True, blank=True)
    step_count = models.BigIntegerField(default=0)
    source_type = IdentifierField()
    source_name = IdentifierField()
    sub_session_id = IdentifierField(null=True, blank=True)
    custom_unit = IdentifierField(null=True, blank=True)
    # The root of the deleted session's tree, whose budget still counts it; null while the session exists.
    tree_id = IdentifierField(null=True, blank=True, editable=False)

    class Meta:
        db_table = table_name("usage_entry")
        verbose_name = _("usage entry")
        verbose_name_plural = _("usage entries")
        constraints = [
            unique("usage_entry_uniq", ["tenant", "entry_id"]),
            one_of("usage_kind_ck", "kind", UsageKind),
        ]
        indexes = [
            index("usage_session_idx", ["session", "timestamp", "id"]),
            # Only entries of deleted sessions are looked up by session id.
            index(
                "usage_kept_idx", ["tenant", "recorded_for", "timestamp", "id"], where=Q(session__isnull=True)
            ),
            index("usage_time_idx", ["tenant", "timestamp", "id"]),
            index("usage_user_idx", ["tenant", "user_id", "timestamp", "id"], where=Q(user_id__isnull=False)),
            index("usage_model_idx", ["tenant", "model", "timestamp", "id"], where=Q(model__isnull=False)),
            index("usage_agent_idx", ["tenant", "session_agent_type", "timestamp", "id"]),
            index("usage_sub_idx", ["tenant", "sub_session_id"], where=Q(sub_session_id__isnull=False)),
            index("usage_tree_idx", ["tenant", "tree_id", "timestamp", "id"], where=Q(tree_id__isnull=False)),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.entry_id}"


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
