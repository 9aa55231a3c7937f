"""The SQL of fences: the tables that get triggers, the triggers, and the two tables of moves.

Neither table is a model, so a database in which no tenant was ever moved does not have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from django.db.models import CharField, IntegerField, Model, TextField

from helix_store.catalogue import Table, declared, tables
from helix_store.catalogue.rows import children_of_sessions
from helix_store.conf import table_name
from helix_store.engine.database import Database
from helix_store.engine.errors import TENANT_MOVED
from helix_store.engine.moved_tenants import digest_of_names, trigger_name
from helix_store.engine.statement import Refusal, Statement, table
from helix_store.models import Session, Stream

FENCES: Final = table_name("moved_tenant")
_FENCES: Final = f'"{FENCES}"'
_LOG: Final = f'"{table_name("moved_change")}"'

COPYING: Final = "copying"
"""The phase before the fence is up: writers continue, and their changes are logged."""

FENCED: Final = "fenced"
"""The phase in which the fence is up, until the last changes have been copied."""

_TEXT: Final = "helix_store: the tenant is moved to another database"


class Fenced(NamedTuple):
    """A table and the way to find the tenant of a row: a column of its own, or one that refers to a parent.

    A change is logged as the ``record`` and ``names`` of the row to copy again: the row itself, or the one to
    which it belongs. ``names`` are the columns that identify the row, or none for all rows of the table.
    """

    table: str
    record: str
    names: tuple[str, ...]
    parent: type[Model] | None = None
    column: str = "tenant"

    @property
    def function(self) -> str:
        return f"helix_fence_{digest_of_names(self.table)}"

    def trigger(self, tenant: str) -> str:
        return trigger_name(self.table, tenant)

    def logger(self, tenant: str) -> str:
        """Return the name of the trigger that logs changes instead of refusing them."""
        return trigger_name(f"log of {self.table}", tenant)

    def tenant(self, row: str, parent: str) -> str:
        """Return SQL for the tenant of the row ``NEW`` or ``OLD``; ``parent`` is the table of its parent."""
        if self.parent is None:
            return f'{row}."{self.column}"'
        return f'(SELECT p.tenant FROM {parent} AS p WHERE p.id = {row}."{self.column}")'

    def log(self, rows: Sequence[str], parent: str, array: str, log: str, tenant: str) -> str:
        """Return SQL that logs the change of ``rows`` (``NEW`` and ``OLD``) if they belong to the tenant."""

        def named(row: str) -> str:
            columns = ", ".join(f'{row}."{name}"' for name in self.names)
            return f"SELECT {row}.tenant, CAST({array}({columns}) AS text) AS name"

        if self.parent is None:
            changed = " UNION ".join(map(named, rows))
        else:
            keys = ", ".join(f'{row}."{self.column}"' for row in rows)
            changed = f"{named('p')} FROM {parent} AS p WHERE p.id IN ({keys})"
        return (
            f"INSERT INTO {log} (tenant, record, name, is_marked)"
            f" SELECT tenant, '{self.record}', name, false FROM ({changed}) AS c WHERE tenant = {tenant}"
        )


def unfenced() -> list[Any]:
    """Return relations that cascade from a session but are not registered, so no export includes them."""
    known = {table.model for table in tables()}
    return [child for child in children_of_sessions() if child.related_model not in known]


# --- Tables ------------------------------------------------------------------------------------------


def fenced_tables() -> Iterator[Fenced]:
    """Yield every table with rows of tenants, in the order in which writers lock rows."""
    for each in tables():
        if each.is_of_tenant:
            yield Fenced(table(each.model), each.record, _distinguishing(each))
        elif each.names_tenant:
            yield Fenced(table(each.model), declared(Session).record, (str(each.session_id),))
    for each in tables():
        if each.owner is not None and not each.names_tenant:
            owner = declared(each.owner)
            yield Fenced(table(each.model), owner.record, owner.order, each.owner, each.parent_field.column)
    for child in unfenced():
        owner = declared(Session)
        yield Fenced(table(child.related_model), owner.record, owner.order, Session, child.field.column)


def fenced_oids() -> str:
    """Return SQL for the list of these tables."""
    return ", ".join(f"pg_catalog.to_regclass('{fenced.table}')" for fenced in fenced_tables())


def missing_rights() -> Statement:
    """Return a PostgreSQL statement that returns the role and each privilege that it lacks.

    Creating and disabling a trigger requires the rights of the table's owner; the functions and the table of
    the fences require CREATE.
    """
    tables = fenced_oids()
    return Statement(
        f"""
        SELECT current_user::text, 'the rights of the owner of ' || c.oid::pg_catalog.regclass::text
        FROM pg_catalog.pg_class AS c
        WHERE c.oid IN ({tables}) AND NOT pg_catalog.pg_has_role(c.relowner, 'USAGE')
      UNION
        SELECT current_user::text, 'CREATE on the schema ' || pg_catalog.quote_ident(n.nspname)
        FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
        WHERE c.oid IN ({tables}) AND NOT pg_catalog.has_schema_privilege(n.oid, 'CREATE')
        ORDER BY 2""",
        citus=(
            Refusal(
                "which refuses the triggers of a move; nothing was changed. Move the schema of the alias with"
                " citus_schema_move."
            ),
        ),
    )


def _distinguishing(rows: Table) -> tuple[str, ...]:
    """Return the columns that identify a row, or none if a filter or JSON might change their values."""
    fields: list[Any] = [rows.model._meta.get_field(name) for name in rows.order]
    is_exact = all(
        isinstance(each, CharField | TextField | IntegerField) and not hasattr(each, "from_db_value")
        for each in fields
    )
    return tuple(str(each.column) for each in fields) if is_exact else ()


# --- Triggers ----------------------------------------------------------------------------------------


def creation(db: Database, phase: str) -> Iterator[Statement]:
    place = _Place.of(db) if db.is_postgresql else None
    for fenced in fenced_tables():
        if place is None:
            yield from _sqlite_triggers(fenced, db.tenant, phase)
        else:
            yield from _postgresql_trigger(fenced, db.tenant, phase, place)


class _Place(NamedTuple):
    """The names include the schema: a writer may have temporary tables of the same names in its path."""

    schema: str
    fences: str
    log: str
    parents: dict[type[Model] | None, str]

    @classmethod
    def of(cls, db: Database) -> _Place:
        schemas = {}
        for name in (_FENCES, _LOG, table(Session), table(Stream)):
            ((schema,),) = db.execute(_SCHEMA_OF, {"table": name})
            schemas[name] = schema.replace("%", "%%")
        whole = {name: f"{schema}.{name}" for name, schema in schemas.items()}
        parents: dict[type[Model] | None, str] = {None: ""}
        for model in (Session, Stream):
            parents[model] = whole[table(model)]
        return cls(schemas[table(Session)], whole[_FENCES], whole[_LOG], parents)


_SCHEMA_OF: Final = Statement(
    "SELECT pg_catalog.quote_ident(n.nspname) FROM pg_catalog.pg_class AS c"
    " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = %(table)s::regclass"
)


def _postgresql_trigger(fenced: Fenced, tenant: str, phase: str, place: _Place) -> Iterator[Statement]:
    parent = place.parents[fenced.parent]
    if phase == COPYING:
        name, function = fenced.logger(tenant), f"{place.schema}.{fenced.function}_log"
        # The writers' roles have no privileges on the log.
        security, declarations = "SECURITY DEFINER", ""
        body = fenced.log(("OLD", "NEW"), parent, "pg_catalog.json_build_array", place.log, "TG_ARGV[0]")
    else:
        name, function = fenced.trigger(tenant), f"{place.schema}.{fenced.function}"
        security, declarations = "SECURITY INVOKER", "DECLARE is_theirs boolean;"
        body = _refusal(fenced.tenant("OLD", parent), fenced.tenant("NEW", parent), place.fences)
    yield Statement(
        f"""
        CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql {security}
        SET search_path = pg_catalog, pg_temp AS $fence$
        {declarations}
        BEGIN
            {body};
            IF TG_OP = 'DELETE' THEN RETURN OLD; END IF;
            RETURN NEW;
        END $fence$"""
    )
    literal = tenant.replace("\\", "\\\\").replace("'", "''").replace("%", "%%")
    yield Statement(
        f"CREATE OR REPLACE TRIGGER {name} BEFORE INSERT OR UPDATE OR DELETE"
        f" ON {fenced.table} FOR EACH ROW EXECUTE FUNCTION {function}(E'{literal}')"
    )
    if phase == FENCED:
        yield Statement(f"ALTER TABLE {fenced.table} DISABLE TRIGGER {fenced.logger(tenant)}")


def _refusal(old: str, new: str, fences: str) -> str:
    literal = fences.replace("'", "''")
    return f"""
            IF TG_OP = 'INSERT' THEN is_theirs := {new} = TG_ARGV[0];
            ELSE is_theirs := {old} = TG_ARGV[0];
            END IF;
            -- The role of the writers may be another one, without privileges on this table.
            IF is_theirs AND pg_catalog.has_table_privilege('{literal}', 'SELECT') THEN
                is_theirs := NOT EXISTS (SELECT 1 FROM {fences} WHERE tenant = TG_ARGV[0] AND is_open);
            END IF;
            IF is_theirs THEN
                RAISE EXCEPTION USING ERRCODE = '{TENANT_MOVED}', MESSAGE = '{_TEXT}';
            END IF"""


_ROWS_OF: Final = {"INSERT": ("NEW",), "UPDATE": ("OLD", "NEW"), "DELETE": ("OLD",)}


def _sqlite_triggers(fenced: Fenced, tenant: str, phase: str) -> Iterator[Statement]:
    literal = "'" + tenant.replace("'", "''").replace("%", "%%") + "'"
    parent = "" if fenced.parent is None else table(fenced.parent)
    # On SQLite, names in a trigger refer to the database file, never to temporary tables.
    for event, rows in _ROWS_OF.items():
        logger = f"{fenced.logger(tenant)}_{event}"
        if phase == COPYING:
            body = fenced.log(rows, parent, "json_array", _LOG, literal)
            yield Statement(
                f"CREATE TRIGGER IF NOT EXISTS {logger} BEFORE {event} ON {fenced.table} BEGIN {body}; END"
            )
            continue
        yield Statement(
            f"CREATE TRIGGER IF NOT EXISTS {fenced.trigger(tenant)}_{event} BEFORE {event} ON {fenced.table}"
            f" WHEN {fenced.tenant(rows[0], parent)} = {literal} AND NOT EXISTS"
            f" (SELECT 1 FROM {_FENCES} WHERE tenant = {literal} AND is_open)"
            f" BEGIN SELECT RAISE(ABORT, '{TENANT_MOVED} {_TEXT}'); END"
        )
        if phase == FENCED:
            yield Statement(f"DROP TRIGGER IF EXISTS {logger}")


def sqlite_removal(db: Database) -> Iterator[Statement]:
    for fenced in fenced_tables():
        for name in (fenced.trigger(db.tenant), fenced.logger(db.tenant)):
            for event in _ROWS_OF:
                yield Statement(f"DROP TRIGGER IF EXISTS {name}_{event}")
    yield FORGET
    yield REMOVE


# --- The tables of moves -------------------------------------------------------------------------------

CREATE_FENCES: Final = Statement(
    f"CREATE TABLE IF NOT EXISTS {_FENCES} (tenant text PRIMARY KEY, target text NOT NULL,"
    " phase text NOT NULL, is_open boolean NOT NULL)"
)
FENCE: Final = Statement(f"SELECT target, phase FROM {_FENCES} WHERE tenant = %(tenant)s")
ADD: Final = Statement(
    f"INSERT INTO {_FENCES} (tenant, target, phase, is_open)"
    " VALUES (%(tenant)s, %(target)s, %(phase)s, false) ON CONFLICT (tenant)"
    f" DO UPDATE SET target = excluded.target, phase = excluded.phase WHERE {_FENCES}.phase = 'moved'"
    " RETURNING tenant"
)
ADVANCE: Final = Statement(
    f"UPDATE {_FENCES} SET phase = %(phase)s WHERE tenant = %(tenant)s AND phase = %(before)s"
    " RETURNING tenant"
)
OPEN: Final = Statement(f"UPDATE {_FENCES} SET is_open = %(is_open)s WHERE tenant = %(tenant)s")
REMOVE: Final = Statement(f"DELETE FROM {_FENCES} WHERE tenant = %(tenant)s")

CREATE_LOG: Final = Statement(
    f"CREATE TABLE IF NOT EXISTS {_LOG}"
    " (tenant text NOT NULL, record text NOT NULL, name text NOT NULL, is_marked boolean NOT NULL)"
)
LOGGED: Final = Statement(f"SELECT DISTINCT record, name FROM {_LOG} WHERE tenant = %(tenant)s")
MARK: Final = Statement(f"UPDATE {_LOG} SET is_marked = true WHERE tenant = %(tenant)s AND NOT is_marked")
FORGET: Final = Statement(f"DELETE FROM {_LOG} WHERE tenant = %(tenant)s")
FORGET_MARKED: Final = Statement(f"DELETE FROM {_LOG} WHERE tenant = %(tenant)s AND is_marked")
