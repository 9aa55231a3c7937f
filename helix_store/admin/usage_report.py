"""The usage page: the totals of a period by day, model, agent type and user, as charts, tables and CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from django import forms
from django.core.exceptions import PermissionDenied, SuspiciousOperation
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from helix_store.admin.base import ReadOnlyAdmin, refuse_surrogates
from helix_store.admin.charts import bar, columns
from helix_store.admin.columns import dollars, number
from helix_store.admin.elements import one_line
from helix_store.admin.filters import start_of_day
from helix_store.core import validation
from helix_store.core.usage import UsageGroup, UsageReport, rounded_cost
from helix_store.exceptions import InvalidPayload
from helix_store.models import UsageEntry
from helix_store.reports.times import project_zone
from helix_store.usage.reports import csv_rows, usage_report

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise

_GROUPS_SHOWN: Final = 20
_GROUPS_OF_CSV: Final = 100_000
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
            if since > until:
                raise forms.ValidationError(_("The period ends before it begins."))
            if until - since > _LONGEST_PERIOD:
                raise forms.ValidationError(_("A period is at most a year long."))
        return given


def report_response(page: ReadOnlyAdmin, request: HttpRequest) -> HttpResponse:
    """Return the page. It takes four statements, one for each grouping of the period's entries."""
    form = _form_of(page, request)
    context = {
        "title": _("Usage"),
        "form": form,
        "list_url": page.list_url(UsageEntry),
        "periods": [(label, f"?{urlencode(_period(days))}") for days, label in _PERIODS],
    }
    if form.is_valid():
        reports = {by: _report(page.alias, by, form.cleaned_data, limit=_limit(by)) for by in GROUPINGS}
        total = reports["day"].total
        context |= {
            "sections": [_section(page, by, report, form.cleaned_data) for by, report in reports.items()],
            "unpriced": total.unpriced,
            "total_words": _("{tokens} tokens, {entries} entries").format(
                tokens=f"{total.tokens.total:,}", entries=f"{total.entry_count:,}"
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
    report = _report(page.alias, by, form.cleaned_data, limit=_GROUPS_OF_CSV)
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


def _report(using: str, by: str, given: Mapping[str, Any], *, limit: int) -> UsageReport:
    zone = project_zone()
    return usage_report(
        by=by,
        using=using,
        tenant=given["tenant"] or None,
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


def _section(page: ReadOnlyAdmin, by: str, report: UsageReport, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a grouping on the page."""
    in_dollars = bool(report.total.cost_usd)
    highest = max((_size(group, in_dollars) for group in report.groups), default=0)
    asked = {name: value for name, value in given.items() if value}
    return {
        "heading": GROUPINGS[by],
        "by": by,
        "rows": [
            {
                "name": _name_of(group),
                "chart": bar(_size(group, in_dollars), maximum=highest),
                "cost": dollars(group.known_cost),
                "tokens": number(group.tokens.total),
                "entries": number(group.entry_count),
            }
            for group in report.groups
        ],
        "chart": _chart(report, given, in_dollars) if by == "day" else "",
        "csv_url": f"{page.view_url(UsageEntry, 'csv')}?{urlencode({**asked, 'by': by})}",
        "left_out": report.group_count - len(report.groups),
    }


def _size(group: UsageGroup, in_dollars: bool) -> float:
    return float(group.cost_usd if in_dollars else group.tokens.total)


def _name_of(group: UsageGroup) -> str:
    name = one_line(group.group, _NAME_LENGTH) if group.group else str(_("none"))
    return f"{name} ({one_line(group.tenant, _NAME_LENGTH)})" if group.tenant else name


def _chart(report: UsageReport, given: Mapping[str, Any], in_dollars: bool) -> SafeString:
    """Return a column for each day of the period, whether or not it has usage."""
    found = {group.group: group for group in report.groups}
    drawn = []
    for days in range((given["until"] - given["since"]).days + 1):
        day = str(given["since"] + timedelta(days=days))
        size, text = 0.0, day
        if (group := found.get(day)) is not None:
            shown = f"${rounded_cost(group.cost_usd)}" if in_dollars else f"{group.tokens.total:,}"
            size, text = _size(group, in_dollars), f"{day}: {shown}"
        drawn.append((day, size, text))
    return columns(drawn)
