"""The number of a session's rows in the tables that have no section of their own on the session page."""

from __future__ import annotations

from typing import Any, Final

from django.db.models import Count, IntegerField, Model, Value
from django.utils.safestring import SafeString
from django.utils.text import capfirst

from helix_store.admin.base import SessionChildAdmin
from helix_store.admin.elements import link
from helix_store.admin.sections.section import SessionView
from helix_store.catalogue import Table, tables

__all__ = ["app_rows", "counted_tables"]

_WITH_SECTION: Final = frozenset(
    {
        "checkpoint",
        "interrupt_request",
        "message",
        "operation",
        "post",
        "run",
        "staged_change",
        "sub_session_ref",
    }
)
"""The records that other sections of the page show, and operations, which no page shows."""


def app_rows(view: SessionView) -> list[tuple[str, str | SafeString]]:
    """Return the name and number of rows of each table that the user may view, with a link to the list."""
    counting = counted_tables(view)
    if not counting:
        return []
    first, *others = (_counted(view, number, table) for number, table in enumerate(counting))
    counted = sorted(first.union(*others, all=True))
    found = [(counting[number].model, rows) for number, rows in counted if rows]
    return [
        (capfirst(str(model._meta.verbose_name_plural)), _linked(view, model, rows)) for model, rows in found
    ]


def counted_tables(view: SessionView) -> list[Table]:
    """Return the tables that the user may view and that have no section of their own. Usage has one."""
    return [
        table
        for table in tables("session")
        if not (table.names_tenant or table.record in _WITH_SECTION) and view.may_view(table.model)
    ]


def _counted(view: SessionView, number: int, table: Table) -> Any:
    """Return the number of rows together with the index of the table."""
    rows = table.model._base_manager.using(view.alias).filter(**{table.parent: view.session.pk}).order_by()
    numbered = rows.annotate(app_table=Value(number, output_field=IntegerField())).values("app_table")
    return numbered.annotate(app_rows=Count("pk")).values_list("app_table", "app_rows")


def _linked(view: SessionView, model: type[Model], rows: int) -> str | SafeString:
    site = view.page.admin_site
    if site.is_registered(model) and isinstance(site.get_model_admin(model), SessionChildAdmin):
        return link(view.list_url(model), f"{rows:,}")
    return f"{rows:,}"
