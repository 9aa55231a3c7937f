"""An admin site for each of the app's databases, so that every link stays within its site."""

from __future__ import annotations

from django.contrib.admin import AdminSite
from django.contrib.admin.sites import site
from django.urls import URLResolver, path
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
