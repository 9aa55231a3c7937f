"""The cells of a list of budgets: what they cap, their period, and a bar with a text for each limit."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Final

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from helix_store.actions.budgets import PERIODS
from helix_store.admin.charts import meter
from helix_store.admin.elements import badge, printable, under
from helix_store.admin.times import distance
from helix_store.core.budgets import BudgetScope, BudgetStatus
from helix_store.core.serialization import exact_cost
from helix_store.reports.budgets import BudgetReport, LimitReport

_ONE: Final = {
    BudgetScope.TREE: _("tree"),
    BudgetScope.USER: _("user"),
    BudgetScope.AGENT_TYPE: _("agent type"),
    BudgetScope.TENANT: _("the whole tenant"),
}
_EACH: Final = {BudgetScope.USER: _("each user"), BudgetScope.AGENT_TYPE: _("each agent type")}


def capped(scope: str, value: str) -> SafeString:
    """Return the name of a budget's scope; ``value`` is the budget's value."""
    kind = BudgetScope(scope)
    if not value:
        return format_html("{}", _EACH.get(kind, _ONE[kind]))
    return format_html('<span class="helix-caps">{} {}</span>', _ONE[kind], printable(value))


def renewal(period: str, status: BudgetStatus | None) -> SafeString:
    """Return the period, and when it ends."""
    if status is None or status.resets_at is None:
        return format_html("{}", PERIODS[period])
    resets = format_html(gettext("resets {when}"), when=distance(status.resets_at))
    return format_html('{}<span class="helix-under">{}</span>', PERIODS[period], resets)


def bars(report: BudgetReport) -> SafeString:
    """Return each limit of a budget, in words for screen readers and as a bar."""
    return format_html_join("", "{}", ((_bar(limit),) for limit in report.limits))


def _bar(limit: LimitReport) -> SafeString:
    return format_html(
        '<div class="helix-limit"><span class="helix-number" title="{}">{}</span>{}{}{}</div>',
        gettext("exactly {spent} of {limit}").format(spent=_exact(limit.spent), limit=_exact(limit.limit)),
        limit_words(limit),
        badge("reached") if limit.is_reached else "",
        meter(float(limit.spent), float(limit.held), limit=float(limit.limit)),
        under(_rest(limit)),
    )


def limit_words(limit: LimitReport) -> str:
    """Return how much of a limit was spent."""
    given = {"spent": limit.amount(limit.spent), "limit": limit.amount(limit.limit)}
    if limit.unit == "usd":
        return gettext("{spent} of {limit}").format(**given)
    return gettext("{spent} of {limit} tokens").format(**given)


def _rest(limit: LimitReport) -> str:
    held, left = limit.amount(limit.held), limit.amount(limit.remaining)
    if not limit.held:
        return gettext("{left} left").format(left=left)
    return gettext("{held} held, {left} left").format(held=held, left=left)


def _exact(value: Any) -> str:
    return f"{exact_cost(value)} USD" if isinstance(value, Decimal) else f"{value:,}"
