"""Operations that several migrations use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import migrations
from django.db.migrations.exceptions import IrreversibleError
from django.db.models import Q

__all__ = ["compress_quickly", "index_documents", "keep_pages", "refuse_to_lose"]


def refuse_to_lose(model_name: str, *columns: str) -> migrations.RunPython:
    """An operation without effect forwards. Backwards it refuses while a column has a value."""

    def check(apps: Any, schema_editor: Any) -> None:
        model = apps.get_model("helix_store", model_name)
        holds_a_value = Q()
        for column in columns:
            holds_a_value |= Q(**{f"{column}__isnull": False})
        kept = model._base_manager.using(schema_editor.connection.alias).filter(holds_a_value).count()
        if kept:
            raise IrreversibleError(
                f"{kept} rows of {model_name} have {', '.join(columns)}, which going back deletes. "
                "Resume, finish or delete them first."
            )

    return migrations.RunPython(migrations.RunPython.noop, check, elidable=False)


def compress_quickly(model_name: str, *columns: str) -> migrations.RunPython:
    """An operation that sets lz4 compression for text columns, if the PostgreSQL server supports it.

    It applies to values written later. Backwards it sets the default of the server.
    """

    def compress(method: str) -> Callable[[Any, Any], None]:
        def alter(apps: Any, schema_editor: Any) -> None:
            if not _has_lz4(schema_editor.connection):
                return
            table = _quoted_table(apps, schema_editor, model_name)
            for column in map(schema_editor.quote_name, columns):
                schema_editor.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET COMPRESSION {method}")

        return alter

    return migrations.RunPython(compress("lz4"), compress("DEFAULT"), elidable=False)


def index_documents(model_name: str, column: str, *, name: str, empty: str) -> migrations.RunPython:
    """An operation that creates a GIN index for JSON containment on PostgreSQL. No model names this index.

    Documents equal to ``empty`` are left out, so they cost no write. Each search reads the pending list of
    new entries, so the list is small.
    """

    def create(apps: Any, schema_editor: Any) -> None:
        if schema_editor.connection.vendor != "postgresql":
            return
        quote = schema_editor.quote_name
        table = _quoted_table(apps, schema_editor, model_name)
        schema_editor.execute(
            f"CREATE INDEX {quote(name)} ON {table} USING gin ({quote(column)} jsonb_path_ops) "
            f"WITH (gin_pending_list_limit = 64) WHERE {quote(column)} <> '{empty}'::jsonb"
        )

    def drop(apps: Any, schema_editor: Any) -> None:
        if schema_editor.connection.vendor == "postgresql":
            schema_editor.execute(f"DROP INDEX {schema_editor.quote_name(name)}")

    return migrations.RunPython(create, drop, elidable=False)


def keep_pages(model_name: str) -> migrations.RunPython:
    """An operation that stops PostgreSQL from truncating the empty pages of a table, which locks the table.

    After a truncation PostgreSQL plans sequential scans, as for a small table, until the next vacuum, even
    if the table has grown.
    """

    def alter(change: str) -> Callable[[Any, Any], None]:
        def run(apps: Any, schema_editor: Any) -> None:
            if schema_editor.connection.vendor == "postgresql":
                table = _quoted_table(apps, schema_editor, model_name)
                schema_editor.execute(f"ALTER TABLE {table} {change}")

        return run

    return migrations.RunPython(
        alter("SET (vacuum_truncate = false)"), alter("RESET (vacuum_truncate)"), elidable=False
    )


def _quoted_table(apps: Any, schema_editor: Any, model_name: str) -> Any:
    return schema_editor.quote_name(apps.get_model("helix_store", model_name)._meta.db_table)


def _has_lz4(connection: Any) -> bool:
    if connection.vendor != "postgresql":
        return False
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT 1 FROM pg_settings "
            "WHERE name = 'default_toast_compression' AND 'lz4' = ANY(enumvals))"
        )
        (has_lz4,) = cursor.fetchone()
    return bool(has_lz4)
