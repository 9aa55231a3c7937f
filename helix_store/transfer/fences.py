"""The fence around a tenant that is being moved: database triggers that refuse all writes to its rows.

Before the fence, in the phase ``copying``, other triggers let writers through and log their changes, in the
same transaction, so that the move copies them again. The log names sessions, streams and rows of tenants.

The triggers exist only while a tenant is moved; the statements of the stores know nothing about them.
Creating a trigger waits for the writers of its table, so that every write after the commit meets the trigger.
The tenant is part of the trigger, so a transaction with an older snapshot also meets the trigger.

On PostgreSQL, a fence is removed by disabling its triggers. This waits for the writers of a table, but not
for its readers: ``ALTER TABLE … DISABLE TRIGGER`` takes SHARE ROW EXCLUSIVE, while ``DROP TRIGGER`` takes
ACCESS EXCLUSIVE. A disabled trigger costs writers nothing. It is dropped when nobody is using its table.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from helix_store.engine.database import Database
from helix_store.engine.statement import Statement
from helix_store.exceptions import InvalidQuery, StoreBusy
from helix_store.transfer import fence_sql as sql
from helix_store.transfer.fence_sql import COPYING, FENCED

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
            tables = ", ".join(each.table for each in sql.fenced_tables())
            db.execute(Statement(f"LOCK TABLE {tables} IN SHARE ROW EXCLUSIVE MODE"), {})
        db.execute(sql.CREATE_FENCES, {})
        db.execute(sql.CREATE_LOG, {})
        if not db.execute(sql.ADVANCE if phase == FENCED else sql.ADD, parameters):
            raise InvalidQuery("Another process has changed the phase of the move.", path="tenant")
        for statement in sql.creation(db, phase):
            db.execute(statement, {})

    db.transaction(create)


def take_down(db: Database) -> None:
    """Let writers through, and remove the fence of the tenant. Safe to repeat.

    Raises `StoreBusy` if a writer takes too long. It does not wait for readers.
    """
    if not db.is_postgresql:
        db.transaction(
            lambda: [db.execute(statement, {"tenant": db.tenant}) for statement in sql.sqlite_removal(db)]
        )
        return

    def disable(name: str, trigger: str) -> None:
        db.execute(_LOCK_TIMEOUT, {})
        db.execute(Statement(f"ALTER TABLE {name} DISABLE TRIGGER {trigger}"), {})

    theirs = {
        name for each in sql.fenced_tables() for name in (each.trigger(db.tenant), each.logger(db.tenant))
    }
    # Handle one table at a time, so that writers of the other tables do not wait.
    for name, trigger in _triggers(db, is_disabled=False):
        if trigger in theirs:
            db.transaction(partial(disable, name, trigger))
    db.write(sql.FORGET, {"tenant": db.tenant})
    db.write(sql.REMOVE, {"tenant": db.tenant})
    _drop_disabled(db)


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
    return any(db.write(sql.ADVANCE, {"tenant": db.tenant, "phase": phase, "before": each}) for each in after)


def fence_of(db: Database) -> Fence | None:
    """Return the fence of the tenant in one database."""
    if not db.query(lambda: sql.FENCES in db.connection.introspection.table_names()):
        return None
    fences = db.read(sql.FENCE, {"tenant": db.tenant})
    return next((Fence(db.alias, target, phase) for target, phase in fences), None)


def through_the_fence(db: Database, body: Callable[[], R]) -> R:
    """Run ``body`` in one transaction that the tenant's fence lets through."""

    def opened() -> R:
        db.execute(sql.OPEN, {"tenant": db.tenant, "is_open": True})
        result = body()
        db.execute(sql.OPEN, {"tenant": db.tenant, "is_open": False})
        return result

    return db.transaction(opened)


def changes_of(db: Database) -> dict[str, list[list[Any]]]:
    """Return the names of all logged changes by their record, marked or not."""
    changes = defaultdict(list)
    for record, name in db.read(sql.LOGGED, {"tenant": db.tenant}):
        changes[record].append(json.loads(name))
    return changes


def _triggers(db: Database, *, is_disabled: bool) -> list[tuple[str, str]]:
    """List the fences' triggers in PostgreSQL as pairs of table and name."""
    statement = Statement(
        "SELECT pg_catalog.replace(tgrelid::pg_catalog.regclass::text, '%%', '%%%%'), tgname"
        f" FROM pg_catalog.pg_trigger WHERE tgrelid IN ({sql.fenced_oids()})"
        " AND tgname LIKE 'helix\\_fence\\_%%' AND (tgenabled = 'D') = %(is_disabled)s"
    )
    return [(str(name), str(trigger)) for name, trigger in db.read(statement, {"is_disabled": is_disabled})]


def missing_rights(db: Database) -> list[str]:
    """List the privileges that the connection's role lacks to create a fence in the database.

    Raises `NotSupportedOnBackend` on Citus.
    """
    if not db.is_postgresql:
        return []
    rows = db.read(sql.missing_rights(), {})
    return [f"the role {role} needs {right} in {db.alias!r}" for role, right in rows]
