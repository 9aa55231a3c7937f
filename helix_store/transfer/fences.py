"""The fence around a tenant that is moved: triggers of the database, which refuse every write to its rows.

They are there only while a tenant is moved: the statements of the stores have no part in it. To create one
waits for the writers of its table, so that after the commit every write meets the fence. The tenant is a part
of the trigger: a transaction with an older snapshot meets it too.

To write through the fence, a transaction sets ``is_open``, and resets it before its commit. No other
transaction can see it set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from django.db.models import Model

from helix_store.app_tables import registered_tables
from helix_store.conf import table_name
from helix_store.engine.database import Database
from helix_store.engine.errors import TENANT_MOVED
from helix_store.engine.statement import Statement, table
from helix_store.exceptions import InvalidQuery
from helix_store.models import Lock, Session, Stream, StreamChunk, UsageEntry
from helix_store.sessions.database.children import children_of_sessions

__all__ = [
    "ARRIVING",
    "Fence",
    "fence_of",
    "fences_of",
    "put_up",
    "set_phase",
    "take_down",
    "through_the_fence",
    "unfenced",
]

R = TypeVar("R")

ARRIVING: Final = "arriving"
"""The phase of the fence where the tenant is copied to; its ``target`` is where the tenant was."""

_LOCK_TIMEOUT: Final = Statement("SELECT pg_catalog.set_config('lock_timeout', '2s', true)")
_TEXT: Final = "helix_store: the tenant is moved to another database"


class Fence(NamedTuple):
    """A fence that is up, in the database ``source``."""

    tenant: str
    source: str
    target: str
    phase: str


class _Fenced(NamedTuple):
    """A table, and the tenant of its row ``{row}`` as SQL."""

    table: str
    tenant: str

    @property
    def function(self) -> str:
        return f"helix_fence_{_digest(self.table)}"

    def trigger(self, tenant: str) -> str:
        return f"helix_fence_{_digest(self.table, tenant)}"


def put_up(db: Database, target: str, phase: str) -> None:
    """Put the fence of the tenant up, in one transaction.

    Raises `StoreBusy` if a writer takes too long, and `InvalidQuery` if the tenant has a fence.
    """

    def create() -> None:
        if db.is_postgresql:
            db.execute(_LOCK_TIMEOUT, {})
            # In the order in which writers lock rows, so that they wait and do not block each other.
            tables = ", ".join(each.table for each in _fenced())
            db.execute(Statement(f"LOCK TABLE {tables} IN SHARE ROW EXCLUSIVE MODE"), {})
        db.execute(_create_table(), {})
        for statement in _creation(db):
            db.execute(statement, {})
        if not db.execute(_add(), {"tenant": db.tenant, "target": target, "phase": phase}):
            raise InvalidQuery("Another process has begun to move the tenant.", path="tenant")

    db.transaction(create)


def take_down(db: Database) -> None:
    """Remove the fence of the tenant. Safe to repeat."""

    def remove(fenced: _Fenced) -> None:
        if db.is_postgresql:
            db.execute(_LOCK_TIMEOUT, {})
        for statement in _removal(db, fenced):
            db.execute(statement, {})

    # One table at a time: to drop a trigger waits for the readers of its table too.
    for fenced in _fenced():
        db.transaction(partial(remove, fenced))
    db.write(_remove(), {"tenant": db.tenant})


def set_phase(db: Database, phase: str, *, after: tuple[str, ...]) -> bool:
    """Compare-and-set the phase; ``False`` when the fence is in none of these phases."""
    return any(db.write(_advance(), {"tenant": db.tenant, "phase": phase, "before": each}) for each in after)


def fence_of(db: Database) -> Fence | None:
    """The fence of the tenant in one database."""
    return next((fence for fence in fences_of(db) if fence.tenant == db.tenant), None)


def fences_of(db: Database) -> list[Fence]:
    """The fences of all tenants in one database."""
    connection = db.connection
    if not db.query(lambda: _table_name() in connection.introspection.table_names()):
        return []
    return [Fence(tenant, db.alias, target, phase) for tenant, target, phase in db.read(_all(), {})]


def through_the_fence(db: Database, body: Callable[[], R]) -> R:
    """Run ``body`` in one transaction to which the fence of the tenant is open."""

    def opened() -> R:
        db.execute(_open(), {"tenant": db.tenant, "is_open": True})
        result = body()
        db.execute(_open(), {"tenant": db.tenant, "is_open": False})
        return result

    return db.transaction(opened)


def unfenced() -> list[Any]:
    """Relations whose rows go with their session, but which no export has, because nobody registered them."""
    known = {table.model for table in registered_tables()}
    return [
        child
        for child in children_of_sessions()
        if child.related_model._meta.app_label != "helix_store" and child.related_model not in known
    ]


# --- Tables ------------------------------------------------------------------------------------------


def _fenced() -> Iterator[_Fenced]:
    """Every table with rows of tenants, in the order in which writers lock rows."""
    of_tenants: list[type[Model]] = [Session, Lock, Stream, UsageEntry]
    of_tenants += [each.model for each in registered_tables("tenant")]
    for model in of_tenants:
        yield _Fenced(table(model), "{row}.tenant")
    yield _Fenced(table(StreamChunk), _tenant_of(Stream, "stream_id"))
    for child in children_of_sessions():
        if child.related_model not in of_tenants:
            yield _Fenced(table(child.related_model), _tenant_of(Session, child.field.column))


def _tenant_of(model: type[Model], column: str) -> str:
    return f'(SELECT p.tenant FROM {table(model)} AS p WHERE p.id = {{row}}."{column}")'


def _digest(*names: str) -> str:
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:24]


# --- Triggers ----------------------------------------------------------------------------------------


def _creation(db: Database) -> Iterator[Statement]:
    for fenced in _fenced():
        yield from (_postgresql_trigger if db.is_postgresql else _sqlite_triggers)(fenced, db.tenant)


def _postgresql_trigger(fenced: _Fenced, tenant: str) -> Iterator[Statement]:
    old, new = fenced.tenant.format(row="OLD"), fenced.tenant.format(row="NEW")
    yield Statement(
        f"""
        CREATE OR REPLACE FUNCTION {fenced.function}() RETURNS trigger LANGUAGE plpgsql AS $fence$
        DECLARE is_theirs boolean;
        BEGIN
            IF TG_OP = 'INSERT' THEN is_theirs := {new} = TG_ARGV[0];
            ELSE is_theirs := {old} = TG_ARGV[0];
            END IF;
            -- The role of the writers may be another one, without rights on this table.
            IF is_theirs AND pg_catalog.has_table_privilege('{_table()}', 'SELECT') THEN
                is_theirs := NOT EXISTS (SELECT 1 FROM {_table()} WHERE tenant = TG_ARGV[0] AND is_open);
            END IF;
            IF is_theirs THEN
                RAISE EXCEPTION USING ERRCODE = '{TENANT_MOVED}', MESSAGE = '{_TEXT}';
            END IF;
            IF TG_OP = 'DELETE' THEN RETURN OLD; END IF;
            RETURN NEW;
        END $fence$"""
    )
    literal = tenant.replace("\\", "\\\\").replace("'", "''").replace("%", "%%")
    yield Statement(
        f"CREATE OR REPLACE TRIGGER {fenced.trigger(tenant)} BEFORE INSERT OR UPDATE OR DELETE"
        f" ON {fenced.table} FOR EACH ROW EXECUTE FUNCTION {fenced.function}(E'{literal}')"
    )


def _sqlite_triggers(fenced: _Fenced, tenant: str) -> Iterator[Statement]:
    literal = "'" + tenant.replace("'", "''").replace("%", "%%") + "'"
    for event, row in (("INSERT", "NEW"), ("UPDATE", "OLD"), ("DELETE", "OLD")):
        yield Statement(
            f"CREATE TRIGGER IF NOT EXISTS {fenced.trigger(tenant)}_{event} BEFORE {event} ON {fenced.table}"
            f" WHEN {fenced.tenant.format(row=row)} = {literal} AND NOT EXISTS"
            f" (SELECT 1 FROM {_table()} WHERE tenant = {literal} AND is_open)"
            f" BEGIN SELECT RAISE(ABORT, '{TENANT_MOVED} {_TEXT}'); END"
        )


def _removal(db: Database, fenced: _Fenced) -> Iterator[Statement]:
    name = fenced.trigger(db.tenant)
    if db.is_postgresql:
        yield Statement(f"DROP TRIGGER IF EXISTS {name} ON {fenced.table}")
        return
    for event in ("INSERT", "UPDATE", "DELETE"):
        yield Statement(f"DROP TRIGGER IF EXISTS {name}_{event}")


# --- The table of the fences ---------------------------------------------------------------------------


def _table_name() -> str:
    return table_name("moved_tenant")


def _table() -> str:
    return f'"{_table_name()}"'


def _create_table() -> Statement:
    # No model: a database in which no tenant was ever moved has no such table.
    return Statement(
        f"CREATE TABLE IF NOT EXISTS {_table()} (tenant text PRIMARY KEY, target text NOT NULL,"
        " phase text NOT NULL, is_open boolean NOT NULL)"
    )


def _add() -> Statement:
    return Statement(
        f"INSERT INTO {_table()} (tenant, target, phase, is_open)"
        " VALUES (%(tenant)s, %(target)s, %(phase)s, false) ON CONFLICT DO NOTHING RETURNING tenant"
    )


def _all() -> Statement:
    return Statement(f"SELECT tenant, target, phase FROM {_table()} ORDER BY tenant")


def _advance() -> Statement:
    return Statement(
        f"UPDATE {_table()} SET phase = %(phase)s WHERE tenant = %(tenant)s AND phase = %(before)s"
        " RETURNING tenant"
    )


def _open() -> Statement:
    return Statement(f"UPDATE {_table()} SET is_open = %(is_open)s WHERE tenant = %(tenant)s")


def _remove() -> Statement:
    return Statement(f"DELETE FROM {_table()} WHERE tenant = %(tenant)s")
