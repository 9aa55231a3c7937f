"""The admin of usage and budgets."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from django import forms
from django.contrib import admin
from django.core.exceptions import PermissionDenied, SuspiciousOperation
from django.db.models import Count, F, Max, Q, Sum
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from helix_store.actions.upkeep import ADD_BUDGET, CHANGE_BUDGET, DELETE_BUDGET, PERIODS
from helix_store.admin.base import BoundedPaginator, ReadOnlyAdmin, Scope, refuse_surrogates
from helix_store.admin.elements import (
    NOTHING,
    badge,
    bar,
    column,
    distance,
    dollars,
    duration_of,
    format_time,
    grouped,
    link,
    meter,
    money,
    names_of_users,
    narrow,
    note,
    number,
    one_line,
    printable,
    scale_of_days,
    short_date,
    short_id,
    stacked,
    stacked_columns,
    under,
    user_link,
)
from helix_store.admin.filters import EntryTenantFilter, NamedChoicesFilter, start_of_day
from helix_store.admin.operating import OperatedAdmin, list_action
from helix_store.budgets import MOST_COUNTERS
from helix_store.core import validation
from helix_store.core.payloads import exact_cost
from helix_store.core.types import UsageKind
from helix_store.core.usage import BudgetScope, BudgetStatus, UsageGroup, UsageReport
from helix_store.exceptions import InvalidPayload
from helix_store.models import Budget, Session, UsageEntry
from helix_store.reports.payloads import project_zone
from helix_store.reports.session import BudgetReport, LimitReport, reports_of_budgets, reports_of_values
from helix_store.usage.store import csv_rows, report_of_tenants

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise


_GROUPS_SHOWN: Final = 20
_MOST_BEFORE: Final = 1_000
_GROUPS_OF_CSV: Final = 100_000
_FIRST_YEAR: Final = 2
_LAST_YEAR: Final = 9998
_LONGEST_PERIOD: Final = timedelta(days=366)
_DEFAULT_DAYS: Final = 7
_PERIODS: Final = ((1, _("Today")), (7, _("7 days")), (30, _("30 days")), (90, _("90 days")))
_NAME_LENGTH: Final = 60
_LONGEST_NAME: Final = 255

GROUPINGS: Final = {
    "day": _("By day"),
    "model": _("By model"),
    "agent_type": _("By agent type"),
    "user": _("By user"),
}


def _is_name(value: str) -> None:
    """Raise `ValidationError` if the store refuses the string as a name."""
    try:
        validation.identifier(value, "")
    except InvalidPayload as error:
        raise forms.ValidationError(error.reason) from None


def _name_field(label: StrOrPromise) -> forms.CharField:
    return forms.CharField(label=label, required=False, max_length=_LONGEST_NAME, validators=[_is_name])


class PeriodForm(forms.Form):
    """The period and filters of the report. A day begins in the time zone of the project."""

    since = forms.DateField(label=_("From"), widget=forms.DateInput({"type": "date"}))
    until = forms.DateField(label=_("To"), widget=forms.DateInput({"type": "date"}))
    model = _name_field(_("Model"))
    agent_type = _name_field(_("Agent type"))
    user = _name_field(_("User"))
    tenant = _name_field(_("Tenant"))

    def clean(self) -> dict[str, Any]:
        given: dict[str, Any] = super().clean() or {}
        since, until = given.get("since"), given.get("until")
        if since is not None and until is not None:
            if not _FIRST_YEAR <= since.year <= until.year <= _LAST_YEAR and since <= until:
                raise forms.ValidationError(_("This period is outside the calendar."))
            if since > until:
                raise forms.ValidationError(_("The period ends before it begins."))
            if until - since > _LONGEST_PERIOD:
                raise forms.ValidationError(_("A period is at most a year long."))
        return given


def report_response(page: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Return the page. It takes six statements: one for each grouping of the period's entries, one for the
    agent types of the period before, and one for tools.
    """
    form = _form_of(page, request)
    context = {
        "title": _("Usage"),
        "form": form,
        "list_url": page.list_url(UsageEntry),
        "periods": [(label, f"?{urlencode(_period(days))}") for days, label in _PERIODS],
    }
    if form.is_valid():
        scope = page.scope(request)
        reports = {by: _report(scope, by, form.cleaned_data, limit=_limit(by)) for by in GROUPINGS}
        total = reports["day"].total
        sections = {by: _section(page, request, by, each, form.cleaned_data) for by, each in reports.items()}
        _add_costs_before(sections["agent_type"], scope, reports["agent_type"], form.cleaned_data)
        context |= {
            "sections": list(sections.values()),
            "tools": _tools(scope, form.cleaned_data),
            "unpriced": total.unpriced,
            "total_words": _("{tokens} tokens, {entries} entries").format(
                tokens=grouped(total.tokens.total), entries=grouped(total.entry_count)
            ),
            "total_cost": dollars(total.known_cost),
        }
    return page.rendered(request, "admin/helix_store/usage_report.html", context)


def csv_response(page: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Return the groups of one grouping with exact costs, as a file."""
    form = _form_of(page, request)
    by = request.GET.get("by", "day")
    if by not in GROUPINGS or not form.is_valid():
        raise SuspiciousOperation("The parameters of this report are not valid.")
    report = _report(page.scope(request), by, form.cleaned_data, limit=_GROUPS_OF_CSV)
    response = HttpResponse(content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="usage-by-{by}.csv"'
    csv.writer(response).writerows(csv_rows(report))
    return response


def _form_of(page: ReadOnlyAdmin, request: HttpRequest) -> PeriodForm:
    refuse_surrogates(request)
    if not page.has_view_permission(request):
        raise PermissionDenied
    return PeriodForm(_period(_DEFAULT_DAYS) | request.GET.dict())


def _period(days: int) -> dict[str, str]:
    first, last = start_of_day(days_ago=days - 1), start_of_day()
    return {"since": str(first.date()), "until": str(last.date())}


def _report(scope: Scope, by: str, given: Mapping[str, Any], *, limit: int) -> UsageReport:
    zone = project_zone()
    tenants: Sequence[str] | None = scope.tenants
    if given["tenant"]:
        tenants = [given["tenant"]] if tenants is None or given["tenant"] in tenants else []
    return report_of_tenants(
        tenants,
        by=by,
        using=scope.using,
        agent_type=given["agent_type"] or None,
        user_id=given["user"] or None,
        model=given["model"] or None,
        date_from=_midnight(given["since"], zone),
        date_to=_midnight(given["until"] + timedelta(days=1), zone),
        zone=zone,
        limit=limit,
    )


def _midnight(day: date, zone: ZoneInfo) -> datetime:
    return datetime.combine(day, time(), zone).astimezone(UTC)


def _limit(by: str) -> int:
    return _LONGEST_PERIOD.days + 1 if by == "day" else _GROUPS_SHOWN


def _section(
    page: ReadOnlyAdmin, request: HttpRequest, by: str, report: UsageReport, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a grouping on the page."""
    in_dollars = bool(report.total.cost_usd)
    users = names_of_users(group.group for group in report.groups) if by == "user" else {}
    may_link = by == "user" and page.may_view(request, Session)
    highest = max((_size(group, in_dollars) for group in report.groups), default=0)
    asked = {name: value for name, value in given.items() if value}
    return {
        "heading": GROUPINGS[by],
        "by": by,
        "rows": [
            {
                "name": _name_of(group, users, page.list_url(Session) if may_link else ""),
                "chart": bar(_size(group, in_dollars), maximum=highest),
                "cost": dollars(group.known_cost),
                "tokens": number(group.tokens.total),
                "entries": number(group.entry_count),
            }
            for group in report.groups
        ],
        "chart": _chart(report, given, in_dollars) if by == "day" else None,
        "csv_url": f"{page.view_url(UsageEntry, 'csv')}?{urlencode({**asked, 'by': by})}",
        "left_out": report.group_count - len(report.groups),
    }


def _add_costs_before(
    section: dict[str, Any], scope: Scope, report: UsageReport, given: Mapping[str, Any]
) -> None:
    """Add the costs of the agent types in the period before, which is as long."""
    length = given["until"] - given["since"] + timedelta(days=1)
    if given["since"] - date.min <= length + timedelta(days=1):
        return
    before = {**given, "since": given["since"] - length, "until": given["since"] - timedelta(days=1)}
    costs = {
        (group.tenant, group.group): group.known_cost
        for group in _report(scope, "agent_type", before, limit=_MOST_BEFORE).groups
    }
    section["has_before"] = True
    for row, group in zip(section["rows"], report.groups, strict=True):
        row["before"] = dollars(costs.get((group.tenant, group.group)))


def _tools(scope: Scope, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools on which the period's calls have spent most of their time, with their failures."""
    zone = project_zone()
    calls = scope.rows(UsageEntry).filter(
        kind=UsageKind.TOOL.value,
        timestamp__gte=_midnight(given["since"], zone),
        timestamp__lt=_midnight(given["until"] + timedelta(days=1), zone),
    )
    columns = {"tenant": "tenant", "agent_type": "session_agent_type", "user": "user_id"}
    asked = {column: given[name] for name, column in columns.items() if given[name]}
    if given["model"]:  # The call of a tool has no model.
        return []
    found = (
        calls.filter(**asked)
        .order_by()
        .values("tool_name")
        .annotate(
            calls=Count("pk"),
            failed=Count("pk", filter=Q(success=False)),
            took=Sum("duration_ms"),
            longest=Max("duration_ms"),
        )
        .order_by(F("took").desc(nulls_last=True), "tool_name")
    )
    return [
        {
            "name": one_line(row["tool_name"] or "", _NAME_LENGTH) or str(_("none")),
            "calls": number(row["calls"]),
            "failed": number(row["failed"]),
            "mean": NOTHING if row["took"] is None else duration_of(row["took"] / row["calls"]),
            "longest": NOTHING if row["longest"] is None else duration_of(row["longest"]),
        }
        for row in found[:_GROUPS_SHOWN]
    ]


def _size(group: UsageGroup, in_dollars: bool) -> float:
    return float(group.cost_usd if in_dollars else group.tokens.total)


def _shown_size(group: UsageGroup, in_dollars: bool) -> str:
    return money(group.cost_usd) if in_dollars else grouped(group.tokens.total)


def _name_of(group: UsageGroup, users: Mapping[str, str], sessions_url: str) -> SafeString | str:
    """Return the name of a group. That of a user is a link to their sessions, unless its address is empty."""
    if not group.group:
        name: SafeString | str = str(_("none"))
    elif sessions_url:
        name = user_link(sessions_url, group.group, users)
    else:
        name = users.get(group.group) or one_line(group.group, _NAME_LENGTH)
    return format_html("{} ({})", name, one_line(group.tenant, _NAME_LENGTH)) if group.tenant else name


def _chart(report: UsageReport, given: Mapping[str, Any], in_dollars: bool) -> dict[str, Any]:
    """Return a column for each day of the period, whether or not it has usage, and the scale below them."""
    found = {group.group: group for group in report.groups}
    drawn = []
    for days in range((given["until"] - given["since"]).days + 1):
        day = given["since"] + timedelta(days=days)
        size, text = 0.0, short_date(day)
        if (group := found.get(str(day))) is not None:
            size, text = _size(group, in_dollars), f"{text}: {_shown_size(group, in_dollars)}"
        drawn.append([(size, text)])
    highest = max(report.groups, key=lambda group: _size(group, in_dollars), default=None)
    shown = "" if highest is None else _shown_size(highest, in_dollars)
    return {"columns": stacked_columns(drawn), "scale": scale_of_days(given["since"], given["until"], shown)}


_LONGEST_SHOWN_NAME = 120


@admin.register(UsageEntry)
class UsageEntryAdmin(ReadOnlyAdmin):
    list_display = (
        "at",
        "kind_badge",
        "session_name",
        "of_session",
        "spent_on",
        "tokens",
        "cost",
        "quantity",
    )
    list_filter = (("kind", NamedChoicesFilter), EntryTenantFilter)
    ordering = ("-tenant", "-timestamp", "-id")
    of_other_models = {"of_session": Session}
    fieldsets = (
        (None, {"fields": ("at", "kind_badge", "cost", "session_name", "of_session", "success")}),
        (
            _("Spent on"),
            {"fields": ("model", "tool_name", "agent_type", "custom_type", "custom_name", "quantity")},
        ),
        (
            _("Tokens"),
            {
                "fields": (
                    "total_tokens",
                    "prompt_tokens",
                    "completion_tokens",
                    "reasoning_tokens",
                    "cached_tokens",
                    "cache_write_tokens",
                    "audio_prompt_tokens",
                    "audio_completion_tokens",
                    "duration_ms",
                )
            },
        ),
        (
            _("Recorded by"),
            {
                "fields": (
                    "tenant",
                    "user_id",
                    "session_agent_type",
                    "run_id",
                    "step_count",
                    "source_type",
                    "source_name",
                    "sub_session_id",
                    "entry_id",
                )
            },
        ),
    )
    change_list_template = "admin/helix_store/usage_list.html"

    at = column("timestamp", _("time"), format_time)
    kind_badge = column("kind", _("kind"), badge)
    session_name = column("recorded_for", _("session"), short_id)
    tokens = column("total_tokens", _("tokens"), number)

    def get_urls(self) -> list[URLPattern]:
        wrapped = self.admin_site.admin_view
        report, rows = wrapped(partial(report_response, self)), wrapped(partial(csv_response, self))
        return [
            path("report/", report, name="helix_store_usageentry_report"),
            path("csv/", rows, name="helix_store_usageentry_csv"),
            *super().get_urls(),
        ]

    @admin.display(description=_("session page"))
    def of_session(self, entry: UsageEntry) -> SafeString | str:
        # This needs no lookup: the key refers to a session, or is null if the session has been deleted.
        if entry.session_id is None:
            return NOTHING
        return link(self.page_url(Session, entry.session_id), gettext("open"))

    @admin.display(description=_("spent on"))
    def spent_on(self, entry: UsageEntry) -> SafeString | str:
        named = entry.model or entry.tool_name or entry.agent_type
        named = named or " ".join(filter(None, (entry.custom_type, entry.custom_name)))
        return narrow(one_line(named, _LONGEST_SHOWN_NAME)) if named else NOTHING

    @admin.display(description=_("cost, USD"))
    def cost(self, entry: UsageEntry) -> SafeString:
        return dollars(entry.cost_usd)

    @admin.display(description=_("amount"))
    def quantity(self, entry: UsageEntry) -> str:
        if entry.amount is None:
            return NOTHING
        return f"{grouped(Decimal(f'{entry.amount:g}'))} {one_line(entry.custom_unit or '', 20)}".strip()


_BUDGET_NAME_LENGTH: Final = 80
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
        """Set the reports of the budgets and the names of their users, which take a statement each."""
        reports = reports_of_budgets(rows, using=self.alias)
        of_users = [budget for budget in rows if budget.scope == BudgetScope.USER]
        spenders = [reports[budget.pk].status.value for budget in of_users if budget.pk in reports]
        names = names_of_users([*(budget.value for budget in of_users), *spenders])
        for budget in rows:
            budget.report = reports.get(budget.pk)
            budget.names = names if budget.scope == BudgetScope.USER else {}

    @admin.display(description=_("budget"))
    def title(self, budget: Budget) -> SafeString:
        return stacked(narrow(one_line(budget.name, _BUDGET_NAME_LENGTH)), budget.tenant)

    @admin.display(description=_("caps"))
    def caps(self, budget: Any) -> SafeString:
        count = None if budget.report is None else budget.report.value_count
        caps = capped(budget.scope, budget.value, budget.names)
        return stacked(caps, "" if count is None else _counted(count))

    @admin.display(description=_("period"))
    def renewed(self, budget: Any) -> SafeString:
        return renewal(budget.period, None if budget.report is None else budget.report.status)

    @admin.display(description=_("spent and held"))
    def used(self, budget: Any) -> SafeString:
        report: BudgetReport | None = budget.report
        if report is None:
            return note(gettext("The held amounts cannot be read."))
        is_shown = report.is_for_each and report.status.value is not None
        highest = _highest(report, budget.names) if is_shown else ""
        return format_html('<div class="helix-used">{}{}</div>', highest, bars(report))

    # --- The page of a budget

    def page_context(self, request: HttpRequest, row: Budget) -> dict[str, Any]:
        report = reports_of_budgets([row], using=self.alias).get(row.pk)
        change, delete = (
            next(iter(self.buttons(request, row, [each])), None) for each in self.row_operations
        )
        return {
            "title": one_line(row.name, _BUDGET_NAME_LENGTH),
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
        is_of_user = budget.scope == BudgetScope.USER
        words = capped(budget.scope, budget.value, names_of_users([budget.value] if is_of_user else []))
        if budget.scope != BudgetScope.TREE or not self.may_view(request, Session):
            return words
        root = (
            self.rows(request, Session)
            .filter(tenant=budget.tenant, session_id=budget.value)
            .only("pk")
            .first()
        )
        return words if root is None else link(self.page_url(Session, root.pk), words)

    def _values(self, request: HttpRequest, budget: Budget) -> dict[str, Any]:
        """Return a page of the values, the highest first."""
        asked = request.GET.get("first", "")
        number = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 6 else 0
        first = min(number, BoundedPaginator.max_rows)
        found = reports_of_values(budget, using=self.alias, first=first, limit=_PAGE + 1)
        url = self.page_url(Budget, budget.pk)
        values = [(each.status.value or "", bars(each)) for each in found[:_PAGE]]
        users = names_of_users(value for value, _bars in values) if budget.scope == BudgetScope.USER else {}
        return {
            "values": [(users.get(value) or printable(value), bars) for value, bars in values],
            "is_later": first > 0,
            "first_url": url,
            "next_url": f"{url}?first={first + _PAGE}" if len(found) > _PAGE else "",
        }


def _counted(count: int) -> str:
    if count > MOST_COUNTERS:
        return gettext("more than {count} have spent").format(count=grouped(MOST_COUNTERS))
    return ngettext("%d has spent", "%d have spent", count) % count


def _highest(report: BudgetReport, names: Mapping[str, str]) -> SafeString:
    words = (
        gettext("highest of {count}: {value}")
        if report.value_count is not None and report.value_count > MOST_COUNTERS
        else gettext("highest: {value}")
    )
    value = report.status.value or ""
    shown = names.get(value) or one_line(value, _BUDGET_NAME_LENGTH)
    return under(words.format(count=grouped(MOST_COUNTERS), value=shown))


# --- Cells: the scope that a budget limits, its period, and a bar with a caption for each limit


def capped(scope: str, value: str, names: Mapping[str, str] | None = None) -> SafeString:
    """Return the name of a budget's scope; ``value`` is the value that the budget applies to.

    ``names`` are those of users by their ids.
    """
    kind = BudgetScope(scope)
    if not value:
        return format_html("{}", _EACH.get(kind, _ONE[kind]))
    title = printable(value)
    shown = (names or {}).get(value) or title
    return format_html('<span class="helix-caps" title="{}">{} {}</span>', title, _ONE[kind], shown)


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
    given = {"spent": _amount(limit.spent), "limit": _amount(limit.limit)}
    if limit.unit == "usd":
        return gettext("{spent} of {limit}").format(**given)
    return gettext("{spent} of {limit} tokens").format(**given)


def _amount(value: Decimal | int) -> str:
    return money(value) if isinstance(value, Decimal) else grouped(value)


def _rest(limit: LimitReport) -> str:
    given = {"held": _amount(limit.held), "left": _amount(limit.remaining)}
    if limit.unit == "usd":
        words = gettext("{held} held, {left} left") if limit.held else gettext("{left} left")
    else:
        words = gettext("{held} held, {left} tokens left") if limit.held else gettext("{left} tokens left")
    return words.format(**given)


def _exact(value: Any) -> str:
    return f"{exact_cost(value)} USD" if isinstance(value, Decimal) else grouped(value)
