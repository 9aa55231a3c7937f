"""The items in the session's lanes, and the number of rows that other apps keep with the session."""

from __future__ import annotations

from typing import Any, Final

from django.db.models import Count, IntegerField, Model, Value
from django.db.models.functions import Length
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _

from helix_store.admin.base import SessionChildAdmin
from helix_store.admin.elements import identifier, link, printable
from helix_store.admin.messages import item_preview
from helix_store.admin.sections.section import Section, SessionView
from helix_store.admin.times import stamp
from helix_store.catalogue import Table, tables
from helix_store.core.limits import MAX_BIGINT
from helix_store.exceptions import InvalidPayload, LimitExceeded
from helix_store.items.rules import lane_name
from helix_store.models import Item
from helix_store.reports.payloads import payload_start, read_start

_PAGE: Final = 25
_LANES: Final = 50
_LONGEST_NAME: Final = 60
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
"""The records that other sections of the page show, and operations, which are never shown."""


class Items(Section):
    name = "items"
    label = _("Items")

    def is_visible(self, view: SessionView) -> bool:
        return bool(_counted_tables(view))

    def context(self, view: SessionView) -> dict[str, Any]:
        found: dict[str, Any] = {"tables": _app_rows(view)}
        return found | self._lanes(view) if view.may_view(Item) else found

    def _lanes(self, view: SessionView) -> dict[str, Any]:
        """Return the lanes, and a page of the newest items of the chosen lane, by default the first."""
        rows = view.rows(Item)
        lanes = list(rows.values_list("lane").annotate(number=Count("pk")).order_by("lane")[: _LANES + 1])
        if not lanes:
            return {}
        lane = _chosen(view, lanes[0][0])
        items = self._page(rows.filter(lane=lane), view.number("before"))
        return {
            "lanes": [
                {"name": _shown(name), "number": number, "url": "" if name == lane else view.url(lane=name)}
                for name, number in lanes[:_LANES]
            ],
            "has_more_lanes": len(lanes) > _LANES,
            "items": [{**item, "url": view.page.page_url(Item, item["id"])} for item in items[:_PAGE]],
            "list_url": view.list_url(Item),
            "newest_url": view.url(lane=lane) if view.number("before") is not None else "",
            "older_url": view.url(lane=lane, before=items[_PAGE - 1]["id"]) if len(items) > _PAGE else "",
        }

    def _page(self, rows: Any, before: int | None) -> list[dict[str, Any]]:
        newest = rows.filter(pk__lt=MAX_BIGINT if before is None else before).order_by("-pk")
        columns = ("pk", "key", "created_at", Length("payload"), payload_start())
        found = newest.values_list(*columns)[: _PAGE + 1]
        return [
            {
                "id": key,
                "key": identifier(_shown(name)) if name else "",
                "at": stamp(at),
                "size": size,
                "kind": _kind(text),
                "preview": item_preview(text),
            }
            for key, name, at, size, text in found
        ]


def _chosen(view: SessionView, first: str) -> str:
    """Return the lane that the URL names, or the first one. The default lane has an empty name."""
    try:
        return lane_name(view.request.GET.get("lane", first))
    except (InvalidPayload, LimitExceeded):
        return first


def _shown(name: str) -> str:
    text = printable(name)
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}…"


def _kind(start: str) -> str:
    """Return the type or role that an item specifies."""
    item, _is_cut = read_start(start)
    said = [] if item is None else [item.get(name) for name in ("type", "role")]
    return next((printable(word)[:_LONGEST_NAME] for word in said if isinstance(word, str) and word), "")


# --- Rows in the tables without a section


def _app_rows(view: SessionView) -> list[tuple[str, str | SafeString]]:
    """Return the name and number of rows of each table that the user may view, with a link to the list."""
    counting = _counted_tables(view)
    if not counting:
        return []
    first, *others = (_counted(view, number, table) for number, table in enumerate(counting))
    counted = sorted(first.union(*others, all=True))
    found = [(counting[number].model, rows) for number, rows in counted if rows]
    return [
        (capfirst(str(model._meta.verbose_name_plural)), _linked(view, model, rows)) for model, rows in found
    ]


def _counted_tables(view: SessionView) -> list[Table]:
    """Return the tables that the user may view and that have no section of their own. Usage has one."""
    return [
        table
        for table in tables("session")
        if not (table.names_tenant or table.record in _WITH_SECTION) and view.may_view(table.model)
    ]


def _counted(view: SessionView, number: int, table: Table) -> Any:
    """Return the number of rows, and the index of the table."""
    rows = table.model._base_manager.using(view.alias).filter(**{table.parent: view.session.pk}).order_by()
    numbered = rows.annotate(app_table=Value(number, output_field=IntegerField())).values("app_table")
    return numbered.annotate(app_rows=Count("pk")).values_list("app_table", "app_rows")


def _linked(view: SessionView, model: type[Model], rows: int) -> str | SafeString:
    site = view.page.admin_site
    if site.is_registered(model) and isinstance(site.get_model_admin(model), SessionChildAdmin):
        return link(view.list_url(model), f"{rows:,}")
    return f"{rows:,}"
