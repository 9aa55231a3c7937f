"""Fences: triggers that keep writers out of what is being moved.

The fence around a tenant that is being moved: database triggers that refuse all writes to its rows.

Before the fence, in the phase ``copying``, other triggers let writers through and log their changes, in the
same transaction, so that the move copies them again. The log names sessions, streams and rows of tenants.

The triggers exist only while a tenant is moved; the statements of the stores know nothing about them.
Creating a trigger waits for the writers of its table, so that every write after the commit meets the trigger.
The tenant is part of the trigger, so a transaction with an older snapshot also meets the trigger.

On PostgreSQL, a fence is removed by disabling its triggers. This waits for the writers of a table, but not
for its readers: ``ALTER TABLE … DISABLE TRIGGER`` takes SHARE ROW EXCLUSIVE, while ``DROP TRIGGER`` takes
ACCESS EXCLUSIVE. A disabled trigger costs writers nothing. It is dropped when nobody is using its table.

Nothing else is left: functions are dropped with their fence, those that log changes as soon as writers are
refused, and the two tables with the last fence of the database. Meanwhile no role but their owner may execute
a function or see a row of the tables. The functions that log changes have the rights of their owner.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from django.db import DatabaseError
from django.db.models import CharField, IntegerField, Model, TextField

from helix_store.catalogue import MOVED_CHANGES, MOVED_TENANTS, TRANSIENT_TABLES, Table, declared, tables
from helix_store.catalogue.table import children_of_sessions
from helix_store.engine.database import Database, digest_of_names, trigger_name
from helix_store.engine.errors import TENANT_MOVED
from helix_store.engine.statement import Refusal, Statement, table
from helix_store.exceptions import InvalidQuery, StoreBusy
from helix_store.models import Session, Stream

_FENCES: Final = MOVED_TENANTS.quoted
_LOG: Final = MOVED_CHANGES.quoted

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
    def shared_functions(self) -> tuple[str, str]:
        """The functions that an earlier version shared between the tenants of a database, and left there."""
        name = f"helix_fence_{digest_of_names(self.table)}"
        return name, f"{name}_log"

    def trigger(self, tenant: str) -> str:
        """Return the name of the trigger that refuses changes, and of its function in PostgreSQL."""
        return trigger_name(self.table, tenant)

    def logger(self, tenant: str) -> str:
        """Return the name of the trigger that logs changes instead of refusing them, and of its function."""
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


def missing_rights_statement() -> Statement:
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
    names = _QualifiedNames.of(db) if db.is_postgresql else None
    for fenced in fenced_tables():
        if names is None:
            yield from _sqlite_triggers(fenced, db.tenant, phase)
        else:
            yield from _postgresql_trigger(fenced, db.tenant, phase, names)


class _QualifiedNames(NamedTuple):
    """The names include the schema: a writer may have temporary tables of the same names in its path."""

    schema: str
    fences: str
    log: str
    parents: dict[type[Model] | None, str]
    tables: dict[str, str]

    @classmethod
    def of(cls, db: Database) -> _QualifiedNames:
        fenced = [each.table for each in fenced_tables()]
        names = ", ".join(f"('{name}')" for name in {_FENCES, _LOG, table(Session), table(Stream), *fenced})
        rows = db.execute(Statement(_SCHEMAS_OF.format(names)), {})
        schemas = {name: schema.replace("%", "%%") for name, schema in rows}
        whole = {name: f"{schema}.{name}" for name, schema in schemas.items()}
        parents: dict[type[Model] | None, str] = {None: ""}
        for model in (Session, Stream):
            parents[model] = whole[table(model)]
        return cls(schemas[table(Session)], whole[_FENCES], whole[_LOG], parents, whole)


_SCHEMAS_OF: Final = """
    SELECT given.name, pg_catalog.quote_ident(n.nspname) FROM (VALUES {}) AS given (name)
    JOIN pg_catalog.pg_class AS c ON c.oid = given.name::pg_catalog.regclass
    JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"""


def _postgresql_trigger(
    fenced: Fenced, tenant: str, phase: str, names: _QualifiedNames
) -> Iterator[Statement]:
    parent = names.parents[fenced.parent]
    if phase == COPYING:
        name, guard, declarations = fenced.logger(tenant), _guard(fenced, names), ""
        # The writers' roles have no privileges on the log.
        security = "SECURITY DEFINER"
        body = fenced.log(("OLD", "NEW"), parent, "pg_catalog.json_build_array", names.log, "TG_ARGV[0]")
    else:
        name, guard, declarations = fenced.trigger(tenant), "", "DECLARE is_theirs boolean;"
        security = "SECURITY INVOKER"
        body = _refusal(fenced.tenant("OLD", parent), fenced.tenant("NEW", parent), names.fences)
    function = f"{names.schema}.{name}()"
    yield Statement(
        f"""
        CREATE OR REPLACE FUNCTION {function} RETURNS trigger LANGUAGE plpgsql {security}
        SET search_path = pg_catalog, pg_temp AS $fence$
        {declarations}
        BEGIN
            {guard}
            {body};
            IF TG_OP = 'DELETE' THEN RETURN OLD; END IF;
            RETURN NEW;
        END $fence$"""
    )
    # REPLACE keeps the owner of a function that another role has prepared under this name.
    yield Statement(f"ALTER FUNCTION {function} OWNER TO CURRENT_USER")
    yield Statement(f"REVOKE ALL ON FUNCTION {function} FROM PUBLIC")
    literal = tenant.replace("\\", "\\\\").replace("'", "''").replace("%", "%%")
    yield Statement(
        f"CREATE OR REPLACE TRIGGER {name} BEFORE INSERT OR UPDATE OR DELETE"
        f" ON {fenced.table} FOR EACH ROW EXECUTE FUNCTION {function[:-2]}(E'{literal}')"
    )
    if phase == FENCED:
        yield from retirement(fenced.table, fenced.logger(tenant))
        yield Statement(f"DROP FUNCTION IF EXISTS {names.schema}.{fenced.logger(tenant)}()")


def _guard(fenced: Fenced, names: _QualifiedNames) -> str:
    """Return PL/pgSQL that refuses to run on any other table.

    The function has the rights of its owner, and evaluates columns whose types belong to the table: a type
    of another role may have casts that are functions of that role.
    """
    literal = names.tables[fenced.table].replace("'", "''")
    return f"""
            IF TG_RELID <> '{literal}'::pg_catalog.regclass THEN
                IF '{literal}'::pg_catalog.regclass NOT IN (
                    SELECT a FROM pg_catalog.pg_partition_ancestors(TG_RELID) AS a
                ) THEN
                    RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege',
                        MESSAGE = 'helix_store: this function is a trigger of another table';
                END IF;
            END IF;"""


def retirement(name: str, trigger: str) -> Iterator[Statement]:
    """Yield the statements that disable a trigger of a fence and let go of its function.

    Dropping the trigger would wait for all readers of the table. Until it is dropped, it names a function of
    PostgreSQL itself, so that its own function can be dropped at once.
    """
    yield Statement(
        f"CREATE OR REPLACE TRIGGER {trigger} BEFORE UPDATE ON {name} FOR EACH ROW"
        " EXECUTE FUNCTION pg_catalog.suppress_redundant_updates_trigger()"
    )
    yield Statement(f"ALTER TABLE {name} DISABLE TRIGGER {trigger}")


def functions_of(tenant: str) -> str:
    """Return the names of the functions of a tenant's fence, separated by commas."""
    return ",".join(name for each in fenced_tables() for name in (each.trigger(tenant), each.logger(tenant)))


def shared_functions() -> str:
    """Return the names of the functions of earlier versions, separated by commas."""
    return ",".join(name for each in fenced_tables() for name in each.shared_functions)


_ARE_NAMED: Final = f"""
    p.pronamespace = (
        SELECT relnamespace FROM pg_catalog.pg_class WHERE oid = '{table(Session)}'::pg_catalog.regclass
    ) AND p.proname = ANY(pg_catalog.string_to_array(%(names)s, ',')::pg_catalog.name[]) AND p.pronargs = 0"""
_SHOWN: Final = "pg_catalog.replace(p.oid::pg_catalog.regprocedure::text, '%%', '%%%%')"

GRANTED: Final = Statement(
    f"""
    SELECT {_SHOWN}, CASE given.grantee WHEN 0 THEN 'PUBLIC' ELSE pg_catalog.replace(
        pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(given.grantee)), '%%', '%%%%') END
    FROM pg_catalog.pg_proc AS p CROSS JOIN LATERAL pg_catalog.aclexplode(
        COALESCE(p.proacl, pg_catalog.acldefault('f', p.proowner))) AS given
    WHERE given.grantee <> p.proowner AND {_ARE_NAMED}"""
)
"""The functions among ``names`` with each role that may execute them, except their owner."""

UNUSED: Final = Statement(
    f"""
    SELECT {_SHOWN} FROM pg_catalog.pg_proc AS p
    WHERE NOT EXISTS (SELECT 1 FROM pg_catalog.pg_trigger AS t WHERE t.tgfoid = p.oid) AND {_ARE_NAMED}"""
)
"""The functions among ``names`` that no trigger calls."""


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


# --- The tables of moves -------------------------------------------------------------------------------

EXISTS: Final = Statement(
    f"SELECT pg_catalog.to_regclass('{_FENCES}') IS NOT NULL",
    f"SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = '{MOVED_TENANTS.name}')",
)
CREATE: Final = tuple(Statement(each.creation()) for each in TRANSIENT_TABLES)
OPEN_TABLES: Final = Statement(
    "SELECT relname FROM pg_catalog.pg_class WHERE NOT relrowsecurity"
    f" AND oid IN (pg_catalog.to_regclass('{_FENCES}'), pg_catalog.to_regclass('{_LOG}'))"
)
LOCK_TABLES: Final = Statement(
    f"LOCK TABLE {', '.join(each.quoted for each in TRANSIENT_TABLES)} IN ACCESS EXCLUSIVE MODE NOWAIT"
)
HAS_FENCES: Final = Statement(f"SELECT EXISTS (SELECT 1 FROM {_FENCES})")
DROP_TABLES: Final = tuple(Statement(f"DROP TABLE IF EXISTS {each.quoted}") for each in TRANSIENT_TABLES)
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

LOGGED: Final = Statement(f"SELECT DISTINCT record, name FROM {_LOG} WHERE tenant = %(tenant)s")
MARK: Final = Statement(f"UPDATE {_LOG} SET is_marked = true WHERE tenant = %(tenant)s AND NOT is_marked")
FORGET: Final = Statement(f"DELETE FROM {_LOG} WHERE tenant = %(tenant)s")
FORGET_MARKED: Final = Statement(f"DELETE FROM {_LOG} WHERE tenant = %(tenant)s AND is_marked")


R = TypeVar("R")

ARRIVING: Final = "arriving"
"""The phase of a fence in the database to which the tenant is copied; ``target`` is its previous database."""

RETURNING: Final = "returning"
"""Like `ARRIVING`, but the tenant had left this database: it already had a fence in the phase ``moved``."""

_LOCK_TIMEOUT: Final = Statement("SELECT pg_catalog.set_config('lock_timeout', '2s', true)")


class Fence(NamedTuple):
    """A fence that exists in the database ``source``."""

    source: str
    target: str
    phase: str


def put_up(db: Database, target: str, phase: str) -> None:
    """Create the fence of the tenant in one transaction. A fence in the phase ``moved`` is replaced.

    In the phase ``copying``, changes are logged instead of refused. ``fenced`` replaces only that phase.
    Raises `StoreBusy` if a writer takes too long, and `InvalidQuery` if the tenant has another fence.
    """
    parameters = {"tenant": db.tenant, "target": target, "phase": phase, "before": COPYING}

    def create() -> None:
        if db.is_postgresql:
            db.execute(_LOCK_TIMEOUT, {})
            # This is the order in which writers lock rows, so that they wait and do not deadlock.
            tables = ", ".join(each.table for each in fenced_tables())
            db.execute(Statement(f"LOCK TABLE {tables} IN SHARE ROW EXCLUSIVE MODE"), {})
        _create_tables(db)
        if not db.execute(ADVANCE if phase == FENCED else ADD, parameters):
            raise InvalidQuery("Another process has changed the phase of the move.", path="tenant")
        _execute_all(db, creation(db, phase))
        if db.is_postgresql:
            # Default privileges may have given more than PUBLIC has by default.
            for function, role in db.execute(GRANTED, {"names": functions_of(db.tenant)}):
                db.execute(Statement(f"REVOKE ALL ON FUNCTION {function} FROM {role} CASCADE"), {})

    db.transaction(create)


def _execute_all(db: Database, statements: Iterable[Statement]) -> None:
    """Run statements without parameters, on PostgreSQL in one round trip: they hold locks."""
    if not db.is_postgresql:
        for statement in statements:
            db.execute(statement, {})
        return
    db.execute(Statement(";\n".join(statement.postgresql for statement in statements)), {})


def _create_tables(db: Database) -> None:
    for statement in CREATE:
        db.execute(statement, {})
    if db.is_postgresql:
        # An earlier version left tables without a policy.
        are_open = {name for (name,) in db.execute(OPEN_TABLES, {})}
        for each in TRANSIENT_TABLES:
            if each.name in are_open:
                for text in each.closing():
                    db.execute(Statement(text), {})


def take_down(db: Database) -> None:
    """Let writers through, and remove the fence of the tenant. Safe to repeat.

    Raises `StoreBusy` if a writer takes too long. It does not wait for readers.
    """
    if not db.is_postgresql:
        db.transaction(lambda: _remove_from_sqlite(db))
        return

    def disable(name: str, trigger: str) -> None:
        db.execute(_LOCK_TIMEOUT, {})
        _execute_all(db, retirement(name, trigger))

    theirs = {name for each in fenced_tables() for name in (each.trigger(db.tenant), each.logger(db.tenant))}
    # Handle one table at a time, so that writers of the other tables do not wait.
    for name, trigger in _triggers(db, is_disabled=False):
        if trigger in theirs:
            db.transaction(partial(disable, name, trigger))
    db.transaction(lambda: _forget(db))
    _drop_disabled(db)
    _drop_unused(db, shared_functions())
    _drop_tables(db)


def _remove_from_sqlite(db: Database) -> None:
    _execute_all(db, sqlite_removal(db))
    _forget(db)
    if _exists(db) and not db.execute(HAS_FENCES, {})[0][0]:
        for statement in DROP_TABLES:
            db.execute(statement, {})


def _forget(db: Database) -> None:
    """Delete the rows of a fence, and its functions in the same transaction.

    A new fence of the tenant waits for this transaction, because it inserts the same row.
    """
    if _exists(db):
        db.execute(FORGET, {"tenant": db.tenant})
        db.execute(REMOVE, {"tenant": db.tenant})
    if db.is_postgresql:
        _drop_unused(db, functions_of(db.tenant))


def _exists(db: Database) -> bool:
    return bool(db.execute(EXISTS, {})[0][0])


def _drop_unused(db: Database, names: str) -> None:
    def drop() -> None:
        if functions := [function for (function,) in db.execute(UNUSED, {"names": names})]:
            db.execute(Statement(f"DROP FUNCTION IF EXISTS {', '.join(functions)}"), {})

    db.transaction(drop)


def _drop_tables(db: Database) -> None:
    """Drop the tables of moves if this was the last fence, and nobody is using them."""

    def drop() -> None:
        db.execute(_LOCK_TIMEOUT, {})
        # `put_up` also takes this lock before it looks whether the tables exist.
        db.execute(Statement(f"LOCK TABLE {table(Session)} IN SHARE ROW EXCLUSIVE MODE"), {})
        if not _exists(db):
            return
        db.execute(LOCK_TABLES, {})
        if not db.execute(HAS_FENCES, {})[0][0]:
            for statement in DROP_TABLES:
                db.execute(statement, {})

    with suppress(StoreBusy):
        db.transaction(drop)


def _drop_disabled(db: Database) -> None:
    """Drop the triggers of removed fences, except those on tables that someone is using now."""

    def drop(name: str, trigger: str) -> None:
        # Never wait for this lock: later readers and writers would queue behind it.
        db.execute(Statement(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE NOWAIT"), {})
        # Another move may have created the fence again.
        if (name, trigger) in _triggers(db, is_disabled=True):
            db.execute(Statement(f"DROP TRIGGER {trigger} ON {name}"), {})

    for name, trigger in _triggers(db, is_disabled=True):
        try:
            db.transaction(partial(drop, name, trigger))
        except StoreBusy:
            return


def set_phase(db: Database, phase: str, *, after: tuple[str, ...]) -> bool:
    """Compare and set the phase; return ``False`` if the fence is in none of these phases."""
    advances = [{"tenant": db.tenant, "phase": phase, "before": each} for each in after]
    return bool(_unless_removed(db, lambda: any(db.write(ADVANCE, advance) for advance in advances)))


def fence_of(db: Database) -> Fence | None:
    """Return the fence of the tenant in one database."""
    if not db.read(EXISTS, {})[0][0]:
        return None
    fences = _unless_removed(db, lambda: db.read(FENCE, {"tenant": db.tenant}))
    return next((Fence(db.alias, target, phase) for target, phase in fences or ()), None)


def _unless_removed(db: Database, body: Callable[[], R]) -> R | None:
    """Return the result of ``body``, or ``None`` if the last fence was removed, and the table with it."""
    try:
        return body()
    except DatabaseError:
        if db.read(EXISTS, {})[0][0]:
            raise
        return None


def through_the_fence(db: Database, body: Callable[[], R]) -> R:
    """Run ``body`` in one transaction that the tenant's fence lets through.

    Raises `InvalidQuery` if another process has ended the move, and removed the last fence of the database.
    """

    def opened() -> R:
        db.execute(OPEN, {"tenant": db.tenant, "is_open": True})
        result = body()
        db.execute(OPEN, {"tenant": db.tenant, "is_open": False})
        return result

    try:
        return db.transaction(opened)
    except DatabaseError:
        _require_fences(db)
        raise


def changes_of(db: Database) -> dict[str, list[list[Any]]]:
    """Return the names of all logged changes by their record, marked or not."""
    changes = defaultdict(list)
    logged = _unless_removed(db, lambda: db.read(LOGGED, {"tenant": db.tenant}))
    for record, name in logged or ():
        changes[record].append(json.loads(name))
    return changes


def write_log(db: Database, statement: Statement) -> None:
    """Change the log of a tenant's changes. Raises `InvalidQuery` if another process has ended the move."""
    try:
        db.write(statement, {"tenant": db.tenant})
    except DatabaseError:
        _require_fences(db)
        raise


def _require_fences(db: Database) -> None:
    if not db.read(EXISTS, {})[0][0]:
        raise InvalidQuery(f"Another process has ended the move in {db.alias!r}.", path="tenant")


def _triggers(db: Database, *, is_disabled: bool) -> list[tuple[str, str]]:
    """List the fences' triggers in PostgreSQL as pairs of table and name."""
    statement = Statement(
        "SELECT pg_catalog.replace(tgrelid::pg_catalog.regclass::text, '%%', '%%%%'), tgname"
        f" FROM pg_catalog.pg_trigger WHERE tgrelid IN ({fenced_oids()})"
        " AND tgname LIKE 'helix\\_fence\\_%%' AND (tgenabled = 'D') = %(is_disabled)s"
    )
    return [(str(name), str(trigger)) for name, trigger in db.read(statement, {"is_disabled": is_disabled})]


ENABLED: Final = Statement(
    f"""
    SELECT c.relname, t.tgname
    FROM pg_catalog.pg_trigger AS t JOIN pg_catalog.pg_class AS c ON c.oid = t.tgrelid
    WHERE t.tgname LIKE 'helix\\_fence\\_%%' AND t.tgenabled <> 'D' AND c.relnamespace = (
        SELECT relnamespace FROM pg_catalog.pg_class WHERE oid = '{table(Session)}'::pg_catalog.regclass)""",
    "SELECT tbl_name, name FROM sqlite_master WHERE type = 'trigger' AND name LIKE 'helix\\_fence\\_%%'"
    " ESCAPE '\\'",
)
"""Each trigger of a fence, after its table. SQLite has one for each event, and the event ends its name."""


def unknown_tables(db: Database) -> list[str]:
    """List the tables under the tenant's fence that no installed app has.

    A process without an app whose table is fenced cannot take the fence down: the table would keep its
    triggers, and these would refuse every write, because they read a table that has been dropped.
    """
    known = {fenced.table for fenced in fenced_tables()}
    found = set()
    for name, trigger in db.read(ENABLED, {}):
        quoted = f'"{name}"'
        theirs = (trigger_name(quoted, db.tenant), trigger_name(f"log of {quoted}", db.tenant))
        if quoted not in known and trigger.startswith(theirs):
            found.add(str(name))
    return sorted(found)


def missing_rights(db: Database) -> list[str]:
    """List the privileges that the connection's role lacks to create a fence in the database.

    Raises `NotSupportedOnBackend` on Citus.
    """
    if not db.is_postgresql:
        return []
    rows = db.read(missing_rights_statement(), {})
    return [f"the role {role} needs {right} in {db.alias!r}" for role, right in rows]
