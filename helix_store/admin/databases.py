"""An admin site for each database of the app, so that every link stays within its site."""

from __future__ import annotations

from typing import Any

from django.contrib.admin import AdminSite
from django.contrib.admin.sites import all_sites, site
from django.http import HttpRequest
from django.urls import NoReverseMatch, URLResolver, path, reverse
from django.utils.text import format_lazy

from helix_store.admin.base import ReadOnlyAdmin
from helix_store.engine.aliases import app_aliases


class DatabaseSite(AdminSite):
    """The app's pages for one database. Users, permissions and the log are those of the project."""

    index_template = "admin/helix_store/site_index.html"

    def __init__(self, database: str) -> None:
        super().__init__(name=f"helix_store_{database}")
        self.database = database
        self.site_header = format_lazy("{} · {}", site.site_header, database)
        for model, page in site._registry.items():
            if isinstance(page, ReadOnlyAdmin):
                self.register(model, type(page))


def database_sites() -> list[URLResolver]:
    """Return URL patterns, for ``include``, of a site for each database that the app is migrated to."""
    return [path(f"{alias}/", DatabaseSite(alias).urls) for alias in app_aliases()]


def database_links(request: HttpRequest) -> list[dict[str, Any]]:
    """Return links to this page in the sites of all databases, or none without several such sites."""
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
