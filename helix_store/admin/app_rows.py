"""How many rows other apps keep with a session, as the session page shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db.models import Count, IntegerField, Value
from django.utils.safestring import SafeString
from django.utils.text import capfirst

from helix_store.admin.base import SessionChildAdmin
from helix_store.admin.elements import link
from helix_store.app_tables import AppTable, registered_tables

if TYPE_CHECKING:
    from helix_store.admin.sections.section import SessionView

__all__ = ["app_rows"]


def app_rows(view: SessionView) -> list[tuple[str, str | SafeString]]:
    """The name of each table with rows that the user may view, and their number, with a link to the list."""
    tables = [each for each in registered_tables("session") if view.may_view(each.model)]
    if not tables:
        return []
    first, *others = (_counted(view, number, table) for number, table in enumerate(tables))
    return [
        (capfirst(str(tables[number].model._meta.verbose_name_plural)), _linked(view, tables[number], rows))
        for number, rows in sorted(first.union(*others, all=True))
    ]


def _counted(view: SessionView, number: int, table: AppTable) -> Any:
    """One row with the number of rows, or none without any."""
    rows = table.model._base_manager.using(view.alias).filter(**{table.parent: view.session.pk}).order_by()
    numbered = rows.annotate(app_table=Value(number, output_field=IntegerField())).values("app_table")
    return numbered.annotate(app_rows=Count("pk")).values_list("app_table", "app_rows")


def _linked(view: SessionView, table: AppTable, rows: int) -> str | SafeString:
    site = view.page.admin_site
    if site.is_registered(table.model) and isinstance(site.get_model_admin(table.model), SessionChildAdmin):
        return link(view.list_url(table.model), f"{rows:,}")
    return f"{rows:,}"
