"""Tags for the templates of the admin."""

from __future__ import annotations

from typing import Any

import django
from django import template
from django.contrib.admin.sites import all_sites, site
from django.urls import NoReverseMatch, reverse

from helix_store.admin.base import DatabaseSite
from helix_store.admin.start import start_page

register = template.Library()


@register.simple_tag(takes_context=True)
def helix_start_page(context: Any) -> dict[str, Any]:
    """Return the parts of the start page, for the admin site that shows it."""
    request = context["request"]
    current = getattr(request, "current_app", site.name)
    shown = next((each for each in all_sites if each.name == current), site)
    return start_page(request, shown)


@register.simple_tag
def helix_has_listed_breadcrumbs() -> bool:
    """Return whether this version of Django writes breadcrumbs as a list."""
    return django.VERSION >= (6, 1)


@register.simple_tag(takes_context=True)
def helix_databases(context: Any) -> list[dict[str, Any]]:
    """Return links to this page in the sites of all databases, or none if there is only one such site."""
    request = context["request"]
    match = request.resolver_match
    if match is None:
        return []
    links = []
    for each in sorted((each for each in all_sites if isinstance(each, DatabaseSite)), key=lambda s: s.name):
        try:
            url = reverse(f"{each.name}:{match.url_name}", args=match.args, kwargs=match.kwargs)
        except NoReverseMatch:
            continue
        is_current = getattr(request, "current_app", None) == each.name
        links.append({"database": each.database, "url": url, "is_current": is_current})
    return links if len(links) > 1 else []
