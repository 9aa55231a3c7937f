"""How many items a session has, and how many rows other apps keep with it, as the session page shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db.models import Count, IntegerField, Model, Value
from django.utils.safestring import SafeString
from django.utils.text import capfirst

from helix_store.admin.base import SessionChildAdmin
from helix_store.admin.elements import link
from helix_store.app_tables import registered_tables
from helix_store.models import Item

if TYPE_CHECKING:
    from helix_store.admin.sections.section import SessionView

__all__ = ["app_rows"]


def app_rows(view: SessionView) -> list[tuple[str, str | SafeString]]:
    """The name of each table with rows that the user may view, and their number, with a link to the list."""
    known: list[tuple[type[Model], str]] = [(Item, "session_id")]
    known.extend((table.model, table.parent) for table in registered_tables("session"))
    tables = [(model, parent) for model, parent in known if view.may_view(model)]
    if not tables:
        return []
    first, *others = (_counted(view, number, model, parent) for number, (model, parent) in enumerate(tables))
    counted = sorted(first.union(*others, all=True))
    found = [(tables[number][0], rows) for number, rows in counted if rows]
    return [
        (capfirst(str(model._meta.verbose_name_plural)), _linked(view, model, rows)) for model, rows in found
    ]


def _counted(view: SessionView, number: int, model: type[Model], parent: str) -> Any:
    """The number of rows, with the number of the table."""
    rows = model._base_manager.using(view.alias).filter(**{parent: view.session.pk}).order_by()
    numbered = rows.annotate(app_table=Value(number, output_field=IntegerField())).values("app_table")
    return numbered.annotate(app_rows=Count("pk")).values_list("app_table", "app_rows")


def _linked(view: SessionView, model: type[Model], rows: int) -> str | SafeString:
    site = view.page.admin_site
    if site.is_registered(model) and isinstance(site.get_model_admin(model), SessionChildAdmin):
        return link(view.list_url(model), f"{rows:,}")
    return f"{rows:,}"
