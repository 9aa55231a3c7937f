"""An index for the search in the Django admin, over words of titles, users, tags and ids."""

from __future__ import annotations

from typing import Any

from django.db import router
from django.db.migrations.operations.base import Operation

from helix_store.exceptions import NotSupportedOnBackend
from helix_store.sessions.lists import INDEX_NAME, SEARCHED_TEXT

__all__ = ["IndexSessionSearch"]


class IndexSessionSearch(Operation):
    """A trigram index on the table of sessions, for a migration of the project with ``atomic = False``. It
    needs the extension ``pg_trgm``, which it creates if the role has permission. Writers do not wait for it.
    Every step adds entries to it; see docs/admin.md for the cost. Safe to apply again, even after a failure.
    Raises `NotSupportedOnBackend` on other databases.
    """

    reversible = True
    reduces_to_sql = True
    atomic = False

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Do nothing: the models do not change."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        model = to_state.apps.get_model("helix_store", "session")
        if not router.allow_migrate_model(schema_editor.connection.alias, model):
            return
        if schema_editor.connection.vendor != "postgresql":
            raise NotSupportedOnBackend("The index for searching sessions needs PostgreSQL.")
        text = SEARCHED_TEXT.format(title="title", session_id="session_id", user_id="user_id", tags="tags")
        table = schema_editor.quote_name(model._meta.db_table)
        schema_editor.execute("CREATE EXTENSION IF NOT EXISTS pg_trgm")
        # An interrupted attempt leaves an invalid index behind.
        schema_editor.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {INDEX_NAME}")
        schema_editor.execute(
            f"CREATE INDEX CONCURRENTLY {INDEX_NAME} ON {table} USING gin ({text} gin_trgm_ops)"
        )

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        schema_editor.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {INDEX_NAME}")

    def describe(self) -> str:
        return "Index the words of sessions for the search in the admin"
