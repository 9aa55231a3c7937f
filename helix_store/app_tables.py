"""Tables of other apps whose rows belong to a session or a tenant, and what the store must know of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from django.core.exceptions import FieldDoesNotExist, ImproperlyConfigured
from django.db.models import CASCADE, AutoField, ForeignKey, Model, QuerySet, UniqueConstraint

if TYPE_CHECKING:
    from helix_store.engine.database import Database

__all__ = ["RECORD_KEY", "RESERVED_RECORDS", "AppTable", "Branch", "register_table", "registered_tables"]


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch of a session, in the transaction that makes it. The row of its source is locked.

    ``source`` and ``target`` are the keys of the session rows. ``message_count`` is the number of messages
    that the branch copies. ``checkpoint_id`` is where it begins, if the caller named a checkpoint.
    """

    db: Database
    source: int
    target: int
    source_id: str
    target_id: str
    message_count: int
    checkpoint_id: str | None


Counts = Mapping[type[Model], int]


@dataclass(frozen=True, slots=True)
class AppTable:
    """A table of another app: each row belongs to a session, or to a tenant.

    ``parent`` is the column of the key of the session, a foreign key with ``on_delete=CASCADE``. It is
    ``"tenant"`` where rows belong to a tenant and to no session.

    ``record`` is the name of a row in an export, and ``order`` the columns that put the rows of a parent in
    one order: unique within it, or ending with the key, where the order of insertion is data. For a table of
    a tenant they are what tells a row from the others of its tenant, in every database. ``not_exported``
    names the columns that an export leaves out, with the reason. The key and ``parent`` are left out always.

    ``branch`` gives a branch of a session its rows, in the transaction of the branch; without it a branch
    has none. ``before_delete`` is called with the keys of sessions in the transaction that deletes their
    rows, while the rows are there: for what several sessions share. It returns how many rows of which model
    it deleted. ``foresee`` returns what it would delete, for a dry run, and only reads. All three are called
    only for sessions with rows in this table.

    ``of_sessions`` gets the rows of a table of a tenant and the sessions that an export is limited to, and
    returns the rows that these sessions need; without it such an export has none of them.

    ``sweep`` deletes the rows of one tenant that have expired at a time, and returns their number. A cleanup
    calls it for each tenant with rows in a table of tenants, outside of a transaction.

    ``check`` is for ``helix_doctor``. It gets keys of sessions, or of rows of a table of a tenant, and yields
    the key and what is wrong.
    """

    model: type[Model]
    _: KW_ONLY
    record: str
    order: tuple[str, ...] = ("id",)
    parent: str = "session_id"
    not_exported: Mapping[str, str] = field(default_factory=dict, hash=False)
    branch: Callable[[type[Model], Branch], object] | None = None
    before_delete: Callable[[Database, Collection[int]], Counts | None] | None = None
    foresee: Callable[[Database, Collection[int]], Counts | None] | None = None
    of_sessions: Callable[[QuerySet[Any], QuerySet[Any]], QuerySet[Any]] | None = None
    sweep: Callable[[Database, datetime], int] | None = None
    check: Callable[[Database, Collection[int]], Iterable[tuple[int, str]]] | None = None

    @property
    def is_of_tenant(self) -> bool:
        return self.parent == "tenant"

    @property
    def implied(self) -> frozenset[str]:
        """The names of the fields that a record has not, because its place in the export stands for them."""
        fields = self.model._meta.concrete_fields
        return frozenset(each.name for each in fields if each.primary_key or each.attname == self.parent)


RECORD_KEY: Final = "record"
"""The key of a line of an export that names its record."""

RESERVED_RECORDS: Final = frozenset(
    {
        *("header", "end", "failed", "trailer", "locks", "kept_usage", "tenant_rows"),
        *("checkpoint", "interrupt_request", "item", "lock", "message", "operation", "run", "session"),
        *("staged_change", "stream", "stream_chunk", "sub_session_ref", "usage_entry"),
    }
)
"""The names that lines of an export have without any app."""

_RECORD: Final = re.compile("[a-z][a-z0-9_]{0,62}")
_tables: Final[dict[type[Model], AppTable]] = {}


def register_table(table: AppTable) -> None:
    """Make a table known to export, import, branches, erasure, the doctor and the admin.

    Call it in ``AppConfig.ready()``. A repeat with the same table changes nothing. Raises
    `ImproperlyConfigured` for a table that cannot be exported and imported without loss.
    """
    if _tables.get(table.model) == table:
        return
    for problem in _problems(table):
        raise ImproperlyConfigured(f"The table of {table.model.__name__} cannot be registered: {problem}.")
    _tables[table.model] = table


def registered_tables(of: Literal["session", "tenant"] | None = None) -> tuple[AppTable, ...]:
    """The tables of other apps by the name of their records, or those ``of`` sessions or tenants."""
    tables = sorted(_tables.values(), key=lambda table: table.record)
    return tuple(table for table in tables if of is None or table.is_of_tenant == (of == "tenant"))


# --- What a table must be ----------------------------------------------------------------------------


def _problems(table: AppTable) -> Iterable[str]:
    options = table.model._meta
    if options.abstract or options.proxy:
        yield "it has no table of its own"
        return
    if table.model in _tables:
        yield "it is registered already, with other values"
    if not _RECORD.fullmatch(table.record):
        yield "the record must be a name in lower case with at most 63 characters, like my_app_item"
    if table.record in RESERVED_RECORDS or any(table.record == other.record for other in registered_tables()):
        yield f"the record {table.record} is taken"
    parent = next((each for each in options.concrete_fields if each.attname == table.parent), None)
    if parent is None:
        yield f"it has no column {table.parent}"
        return
    if not table.is_of_tenant and not _is_to_session(parent):
        yield f"{table.parent} is not a foreign key to the session with on_delete=CASCADE"
    if table.is_of_tenant and (table.branch or table.before_delete or table.foresee):
        yield "branch, before_delete and foresee are for rows of sessions"
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
        yield "no unique constraint covers its order, so that rows of one parent could change places"
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


def _is_unique(table: AppTable, parent: str) -> bool:
    """Whether the parent and the order tell each row from the others."""
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
