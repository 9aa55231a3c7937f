"""The budgets that apply to the session: its tree, its user, its agent type and its tenant."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext_lazy as _

from helix_store.admin.budgets import bars, capped, renewal
from helix_store.admin.elements import link, printable
from helix_store.admin.sections.section import Section, SessionView
from helix_store.models import Budget


class Budgets(Section):
    name = "budgets"
    label = _("Budgets")
    needs = (Budget,)

    def context(self, view: SessionView) -> dict[str, Any]:
        reports = view.budgets
        names = [report.status.name for report in reports]
        rows = Budget.objects.using(view.alias).filter(tenant=view.session.tenant, name__in=names)
        keys = dict(rows.values_list("name", "pk")) if names else {}
        return {
            "budgets": [
                {
                    "name": link(
                        view.page.page_url(Budget, keys.get(report.status.name, 0)),
                        printable(report.status.name),
                    ),
                    "caps": capped(report.scope, "" if report.is_for_each else report.status.value or ""),
                    "renewal": renewal(report.period, report.status),
                    "bars": bars(report),
                }
                for report in reports
            ]
        }
