"""Close what moves of tenants left in a database before they cleaned up after themselves."""

from __future__ import annotations

from typing import Any, Final

from django.db import migrations

from helix_store.conf import table_name
from helix_store.migrations._operations import WholeMigration

# A role that does not own an object cannot close it; the system check E018 then names it.
FUNCTIONS: Final = """
    SELECT p.oid::pg_catalog.regprocedure::text,
        EXISTS (SELECT 1 FROM pg_catalog.pg_trigger AS t WHERE t.tgfoid = p.oid)
    FROM pg_catalog.pg_proc AS p
    WHERE p.pronamespace = (
            SELECT relnamespace FROM pg_catalog.pg_class WHERE oid = pg_catalog.to_regclass(%s)
        )
        AND p.proname ~ '^helix_fence_[0-9a-f]{24}(_log)?$' AND p.pronargs = 0
        AND p.prorettype = 'pg_catalog.trigger'::pg_catalog.regtype
        AND pg_catalog.pg_has_role(p.proowner, 'USAGE')"""
TABLES: Final = """
    SELECT c.oid::pg_catalog.regclass::text FROM pg_catalog.pg_class AS c
    WHERE c.oid IN (pg_catalog.to_regclass(%s), pg_catalog.to_regclass(%s)) AND NOT c.relrowsecurity
        AND pg_catalog.pg_has_role(c.relowner, 'USAGE')"""


def close_leftovers(apps: Any, schema_editor: Any) -> None:
    """Drop the functions that no trigger calls, and let no role but their owner use the rest."""
    connection = schema_editor.connection
    if connection.vendor != "postgresql":
        return
    quote = schema_editor.quote_name
    with connection.cursor() as cursor:
        cursor.execute(FUNCTIONS, [quote(table_name("session"))])
        functions = cursor.fetchall()
        cursor.execute(TABLES, [quote(table_name("moved_tenant")), quote(table_name("moved_change"))])
        tables = cursor.fetchall()
    for function, is_used in functions:
        if is_used:
            schema_editor.execute(f"REVOKE ALL ON FUNCTION {function} FROM PUBLIC", None)
        else:
            schema_editor.execute(f"DROP FUNCTION {function}", None)
    for (table,) in tables:
        schema_editor.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY", None)
        schema_editor.execute(
            f"CREATE POLICY helix_store_tenant ON {table} USING (false) WITH CHECK (false)", None
        )


class Migration(WholeMigration):
    dependencies = [("helix_store", "0013_tombstones")]

    operations = [migrations.RunPython(close_leftovers, migrations.RunPython.noop, elidable=True)]
