"""The admin of budgets: bars for the amounts spent and held, and a budget's spenders by user or type."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Final

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from helix_store.actions.budgets import ADD_BUDGET, CHANGE_BUDGET, DELETE_BUDGET, PERIODS
from helix_store.admin.base import BoundedPaginator
from helix_store.admin.charts import meter
from helix_store.admin.elements import badge, link, narrow, note, one_line, printable, stacked, under
from helix_store.admin.filters import EntryTenantFilter
from helix_store.admin.operating import OperatedAdmin, list_action
from helix_store.admin.times import distance
from helix_store.core.budgets import BudgetScope, BudgetStatus
from helix_store.core.serialization import exact_cost
from helix_store.models import Budget, Session
from helix_store.reports.budgets import (
    MOST_COUNTERS,
    BudgetReport,
    LimitReport,
    reports_of_budgets,
    reports_of_values,
)

_NAME_LENGTH: Final = 80
_PAGE: Final = 50
_ONE: Final = {
    BudgetScope.TREE: _("tree"),
    BudgetScope.USER: _("user"),
    BudgetScope.AGENT_TYPE: _("agent type"),
    BudgetScope.TENANT: _("the whole tenant"),
}
_EACH: Final = {BudgetScope.USER: _("each user"), BudgetScope.AGENT_TYPE: _("each agent type")}


@admin.register(Budget)
class BudgetAdmin(OperatedAdmin):
    list_display = ("title", "caps", "renewed", "used")
    list_filter = (EntryTenantFilter,)
    ordering = ("tenant", "name")
    row_operations = (CHANGE_BUDGET, DELETE_BUDGET)
    table_operations = (ADD_BUDGET,)
    actions = (list_action(DELETE_BUDGET),)
    page_template = "admin/helix_store/budget.html"

    class Media:
        css = {"all": ["helix_store/admin.css", "helix_store/session.css"]}

    def complete_rows(self, request: HttpRequest, rows: list[Any]) -> None:
        """Set the reports of the budgets, which take one statement."""
        reports = reports_of_budgets(rows, using=self.alias)
        for budget in rows:
            budget.report = reports.get(budget.pk)

    @admin.display(description=_("budget"))
    def title(self, budget: Budget) -> SafeString:
        return stacked(narrow(one_line(budget.name, _NAME_LENGTH)), budget.tenant)

    @admin.display(description=_("caps"))
    def caps(self, budget: Any) -> SafeString:
        count = None if budget.report is None else budget.report.value_count
        return stacked(capped(budget.scope, budget.value), "" if count is None else _counted(count))

    @admin.display(description=_("period"))
    def renewed(self, budget: Any) -> SafeString:
        return renewal(budget.period, None if budget.report is None else budget.report.status)

    @admin.display(description=_("spent and held"))
    def used(self, budget: Any) -> SafeString:
        report: BudgetReport | None = budget.report
        if report is None:
            return note(gettext("The held amounts cannot be read."))
        highest = _highest(report) if report.is_for_each and report.status.value is not None else ""
        return format_html('<div class="helix-used">{}{}</div>', highest, bars(report))

    # --- The page of a budget

    def page_context(self, request: HttpRequest, row: Budget) -> dict[str, Any]:
        report = reports_of_budgets([row], using=self.alias).get(row.pk)
        change, delete = (
            next(iter(self.buttons(request, row, [each])), None) for each in self.row_operations
        )
        return {
            "title": one_line(row.name, _NAME_LENGTH),
            "name": printable(row.name),
            "tenant": printable(row.tenant),
            "caps": self._capped(request, row),
            "renewal": renewal(row.period, None if report is None else report.status),
            "updated": distance(row.updated_at),
            "created": distance(row.created_at),
            "report": report,
            "bars": "" if report is None or report.is_for_each else bars(report),
            "change": change,
            "delete": delete,
            **(self._values(request, row) if report is not None and report.is_for_each else {}),
        }

    def _capped(self, request: HttpRequest, budget: Budget) -> SafeString:
        words = capped(budget.scope, budget.value)
        if budget.scope != BudgetScope.TREE or not self.may_view(request, Session):
            return words
        root = self.rows(Session).filter(tenant=budget.tenant, session_id=budget.value).only("pk").first()
        return words if root is None else link(self.page_url(Session, root.pk), words)

    def _values(self, request: HttpRequest, budget: Budget) -> dict[str, Any]:
        """Return a page of the values, the highest first."""
        asked = request.GET.get("first", "")
        number = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 6 else 0
        first = min(number, BoundedPaginator.max_rows)
        found = reports_of_values(budget, using=self.alias, first=first, limit=_PAGE + 1)
        url = self.page_url(Budget, budget.pk)
        return {
            "values": [(printable(each.status.value or ""), bars(each)) for each in found[:_PAGE]],
            "is_later": first > 0,
            "first_url": url,
            "next_url": f"{url}?first={first + _PAGE}" if len(found) > _PAGE else "",
        }


def _counted(count: int) -> str:
    if count > MOST_COUNTERS:
        return gettext("more than {count} have spent").format(count=f"{MOST_COUNTERS:,}")
    return ngettext("%d has spent", "%d have spent", count) % count


def _highest(report: BudgetReport) -> SafeString:
    words = (
        gettext("highest of {count}: {value}")
        if report.value_count is not None and report.value_count > MOST_COUNTERS
        else gettext("highest: {value}")
    )
    shown = one_line(report.status.value or "", _NAME_LENGTH)
    return under(words.format(count=f"{MOST_COUNTERS:,}", value=shown))


# --- Cells: the scope that a budget limits, its period, and a bar with a caption for each limit


def capped(scope: str, value: str) -> SafeString:
    """Return the name of a budget's scope; ``value`` is the value that the budget applies to."""
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
    """Return how much of a limit has been spent."""
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
