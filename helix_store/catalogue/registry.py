"""All tables with rows of sessions, streams and tenants, from helix_store and other apps."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, Literal

from django.core.exceptions import FieldDoesNotExist, ImproperlyConfigured
from django.db.models import CASCADE, AutoField, ForeignKey, Model, UniqueConstraint

from helix_store.catalogue.table import Table
from helix_store.models import Session, Stream

Owner = Literal["session", "stream", "tenant"]

RECORD_KEY: Final = "record"
"""The key in a line of an export whose value names its record."""

UNIT_RECORDS: Final = frozenset({"header", "end", "failed", "trailer", "locks", "kept_usage", "tenant_rows"})
"""The names of lines of an export that are not rows of a table."""

_RECORD: Final = re.compile("[a-z][a-z0-9_]{0,62}")
_tables: Final[dict[type[Model], Table]] = {}


def register_table(table: Table) -> None:
    """Register a table for export, import, branches, erasure, cleanup, the doctor and the admin.

    Call this function in ``AppConfig.ready()``. A repeated call with the same table changes nothing. Raises
    `ImproperlyConfigured` if the table cannot be exported and imported without loss.
    """
    if _tables.get(table.model) == table:
        return
    for problem in _problems(table):
        raise ImproperlyConfigured(f"The table of {table.model.__name__} cannot be registered: {problem}.")
    _tables[table.model] = table


def tables(of: Owner | None = None) -> tuple[Table, ...]:
    """Return all tables, or only those whose rows belong to sessions, to streams, or directly to a tenant.

    Tables of helix_store come first, in the order of an export; tables of other apps follow by record. Tables
    with their own unit in an export, such as sessions, are not in any of the three groups.
    """
    found: list[Table] = []
    for table in _tables.values():
        if table.is_own:
            before = [number for number, each in enumerate(found, 1) if each.record == table.follows]
            found.insert(before[0] if before else len(found), table)
    return tuple(table for table in (*found, *registered_tables()) if of is None or _belongs(table, of))


def _belongs(table: Table, of: Owner) -> bool:
    if of == "tenant":
        return table.is_of_tenant and table.unit is None
    return table.owner is (Session if of == "session" else Stream)


def declared(model: type[Model]) -> Table:
    """Return the declaration of a model's table. Raises `KeyError`."""
    return _tables[model]


def registered_tables(of: Literal["session", "tenant"] | None = None) -> tuple[Table, ...]:
    """Return other apps' tables by the names of their records, or those ``of`` sessions or tenants."""
    others = sorted((each for each in _tables.values() if not each.is_own), key=lambda table: table.record)
    return tuple(table for table in others if of is None or table.is_of_tenant == (of == "tenant"))


# --- What a table must be ----------------------------------------------------------------------------


def _problems(table: Table) -> Iterable[str]:
    options = table.model._meta
    if options.abstract or options.proxy:
        yield "it has no table of its own"
        return
    if table.model in _tables:
        yield "it is registered already, with other values"
    if not _RECORD.fullmatch(table.record):
        yield "the record must be a name in lower case with at most 63 characters, like my_app_item"
    if table.record in UNIT_RECORDS or any(table.record == other.record for other in tables()):
        yield f"the record {table.record} is taken"
    if table.is_own:
        # A test compares each of our tables with its model.
        return
    parent = next((each for each in options.concrete_fields if each.attname == table.parent), None)
    if parent is None:
        yield f"it has no column {table.parent}"
        return
    if not table.is_of_tenant and not _is_to_session(parent):
        yield f"{table.parent} is not a foreign key to the session with on_delete=CASCADE"
    if table.is_of_tenant and (table.branch or table.before_delete):
        yield "branch and before_delete are for rows of sessions"
    if not table.is_of_tenant and table.sweep is not None:
        yield "sweep is for rows of a tenant"
    if not isinstance(options.pk, AutoField):
        yield "its primary key is not a BigAutoField"
    if parent.null:
        yield f"{table.parent} is nullable: a row without it belongs to nothing"
    for name in (*table.order, *table.not_exported):
        try:
            options.get_field(name)
        except FieldDoesNotExist:
            yield f"it has no column {name}"
            return
    if any(options.get_field(name).null for name in table.order):
        yield "a column of the order is nullable"
    if not _is_unique(table, parent.name):
        yield "no unique constraint covers its order, so the rows of one parent could be reordered"
    for each in options.concrete_fields:
        if isinstance(each, ForeignKey) and each is not parent and each.name not in table.not_exported:
            yield f"{each.name} is a key of one database; name it in not_exported, or refer to a column"
    for each in options.concrete_fields:
        if each.name == RECORD_KEY and each.name not in (*table.implied, *table.not_exported):
            yield f"an export names the record under {RECORD_KEY}; give the column another name"
    for each in options.concrete_fields:
        is_stored = each.null or each.has_default() or each.name in table.implied
        if each.name in table.not_exported and not is_stored:
            yield f"{each.name} is not exported, and has no default that an import could store"


def _is_to_session(column: Any) -> bool:
    return (
        isinstance(column, ForeignKey)
        and column.remote_field.on_delete is CASCADE
        and getattr(column.related_model, "_meta", None) is not None
        and column.related_model._meta.label == "helix_store.Session"
    )


def _is_unique(table: Table, parent: str) -> bool:
    """Return whether the parent and the order together identify every row."""
    options = table.model._meta
    names = {parent, *table.order}
    keys = [set(each) for each in options.unique_together]
    keys += [
        set(each.fields)
        for each in options.constraints
        if isinstance(each, UniqueConstraint) and each.fields and each.condition is None
    ]
    keys += [{each.name} for each in options.concrete_fields if each.unique and not each.primary_key]
    if not table.is_of_tenant and options.pk is not None:
        keys.append({options.pk.name})
    return any(key <= names for key in keys)
