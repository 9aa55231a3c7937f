"""Checks of the database itself: its schema, settings, search path and connection pooler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from django.core.checks import CheckMessage
from django.core.checks import messages as levels
from django.db.migrations.loader import MigrationLoader

from helix_store import conf
from helix_store.catalogue import tables
from helix_store.catalogue.table import APP
from helix_store.checks import check_database
from helix_store.doctor.checks import Scope, fault, over, table_of
from helix_store.doctor.findings import Fault, Finding, Severity, TableSize
from helix_store.engine.database import Database
from helix_store.engine.expressions import list_parameter
from helix_store.engine.poolers import loses_prepared_statements
from helix_store.engine.statement import Statement

# --- Schema and settings -----------------------------------------------------------------------------


def schema_faults(db: Database) -> list[Fault]:
    """Return the migrations of the app and of registered tables that the database or this version lacks."""
    loader = db.query(lambda: MigrationLoader(db.connection))
    apps_ = {table.model._meta.app_label for table in tables()}
    known = {each for each in loader.disk_migrations if each[0] in apps_}
    applied = {each for each in loader.applied_migrations if each[0] in apps_}
    # A squashed migration counts as the migrations that it replaces.
    known |= {
        each for migration in loader.replacements.values() for each in migration.replaces if each[0] in apps_
    }
    behind = sorted(each for each in known - applied if each in loader.graph.nodes)
    return [fault("schema-behind", "django_migrations", None, _migration(*each)) for each in behind] + [
        fault("schema-ahead", "django_migrations", None, _migration(*each))
        for each in sorted(applied - known)
    ]


def _migration(app: str, name: str) -> str:
    return name if app == APP else f"{app}.{name}"


def check_findings(alias: str, *, deploy: bool) -> list[Finding]:
    """Return the system check messages about one database, with messages of the same id merged."""
    by_id: dict[str, list[CheckMessage]] = {}
    for message in check_database(alias, deploy=deploy):
        by_id.setdefault(message.id or "", []).append(message)
    return [_finding(id_, messages) for id_, messages in by_id.items()]


def _finding(id_: str, messages: list[CheckMessage]) -> Finding:
    level = max(message.level for message in messages)
    return Finding(
        id=id_,
        severity=(
            Severity.ERROR
            if level >= levels.ERROR
            else Severity.WARNING
            if level >= levels.WARNING
            else Severity.INFO
        ),
        table=None,
        count=len(messages),
        what=" ".join(str(message.msg) for message in messages),
        advice=str(messages[0].hint or ""),
    )


# --- Search path and poolers -------------------------------------------------------------------------

_VISIBLE: Final = Statement(
    postgresql="""
        SELECT c.relname, n.nspname, n.nspname = pg_catalog.current_schema()
        FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
        WHERE c.relname = ANY(%(names)s::text[]) AND c.relkind IN ('r', 'p')
            AND pg_catalog.pg_table_is_visible(c.oid)
        ORDER BY c.relname""",
    sqlite="SELECT NULL, NULL, NULL WHERE FALSE",
)
"""The app's tables that an unqualified name refers to, their schema, and whether that schema is first."""


@over("search-path-splits", "search-path-elsewhere")
def search_path(scope: Scope) -> Iterator[Fault]:
    if not scope.db.is_postgresql:
        return
    rows = scope.db.read(_VISIBLE, {"names": _table_names()})
    schemas = {schema for _, schema, _ in rows}
    if len(schemas) > 1:
        for name, schema, _ in rows:
            yield fault("search-path-splits", None, None, f"{schema}.{name}")
    elif rows and not rows[0][2]:
        yield fault("search-path-elsewhere", None, None, rows[0][1])


@over("pooler-without-prepared-statements")
def pooler(scope: Scope) -> Iterator[Fault]:
    connection = scope.db.connection
    if not conf.fast_paths() or connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS"):
        return
    if scope.db.query(lambda: loses_prepared_statements(connection)):
        host, port = connection.settings_dict["HOST"], connection.settings_dict["PORT"]
        yield fault("pooler-without-prepared-statements", None, None, f"{host}:{port}")


ENVIRONMENT: Final = (search_path, pooler)


# --- Sizes -------------------------------------------------------------------------------------------

_SIZES: Final = Statement(
    postgresql="""
        SELECT c.relname, CASE WHEN c.reltuples >= 0 THEN c.reltuples::bigint END,
            pg_catalog.pg_table_size(c.oid), pg_catalog.pg_indexes_size(c.oid)
        FROM pg_catalog.pg_class AS c
        WHERE c.relname = ANY(%(names)s::text[]) AND c.relkind IN ('r', 'p')
            AND pg_catalog.pg_table_is_visible(c.oid)""",
    sqlite="""
        SELECT m.tbl_name, NULL, SUM(CASE WHEN m.type = 'table' THEN d.pgsize END),
            SUM(CASE WHEN m.type = 'index' THEN d.pgsize END)
        FROM sqlite_schema AS m JOIN dbstat AS d ON d.name = m.name AND d.aggregate = TRUE
        WHERE m.tbl_name IN (SELECT value FROM json_each(%(names)s)) GROUP BY m.tbl_name""",
)
_HAS_SIZES: Final = Statement(
    postgresql="SELECT 1", sqlite="SELECT 1 FROM pragma_module_list WHERE name = 'dbstat'"
)


def table_sizes(db: Database) -> list[TableSize]:
    """Return the size of each of the app's tables and its indexes, as far as the database reports it."""
    parameters = {"names": list_parameter(db, _table_names())}
    rows: Iterable[Any] = db.read(_SIZES, parameters) if db.read(_HAS_SIZES, {}) else ()
    known = {name: sizes for name, *sizes in rows}
    return [
        TableSize(
            table=table_of(model),
            rows=rows_,
            table_bytes=None if of_table is None else int(of_table),
            index_bytes=None if of_indexes is None else int(of_indexes),
        )
        for model in (table.model for table in tables())
        for rows_, of_table, of_indexes in [known.get(model._meta.db_table, (None, None, None))]
    ]


def _table_names() -> list[str]:
    return [table.model._meta.db_table for table in tables()]
