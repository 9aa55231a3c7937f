"""Tags for the templates of the admin."""

from __future__ import annotations

from typing import Any

from django import template
from django.contrib.admin.sites import all_sites, site

from helix_store.admin.databases import database_links
from helix_store.admin.start import Tile, start_tiles

register = template.Library()


@register.simple_tag(takes_context=True)
def helix_start_tiles(context: Any) -> list[Tile]:
    """Return the tiles of the start page, for the admin site that shows it."""
    request = context["request"]
    current = getattr(request, "current_app", site.name)
    shown = next((each for each in all_sites if each.name == current), site)
    return list(start_tiles(request, shown))


@register.simple_tag(takes_context=True)
def helix_databases(context: Any) -> list[dict[str, Any]]:
    """Return links to this page in each database."""
    return database_links(context["request"])
