"""The declaration of a table: the owner of its rows, and how each operation treats them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Any, Final

from django.db.models import Model, QuerySet

from helix_store.core.payloads import decode
from helix_store.engine.database import Database
from helix_store.engine.statement import Statement
from helix_store.models import Session
from helix_store.models.fields import CallIdField, CallIdsField

APP: Final = Session._meta.app_label

Counts = Mapping[type[Model], int]


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch of a session, in the transaction that creates it. The row of its source is locked.

    ``source`` and ``target`` are the keys of their session rows. ``message_count`` is the number of messages
    that the branch copies. ``checkpoint_id`` is its starting point, if the caller named one. A row existed at
    that checkpoint if it was stored before the session's ``version`` and no later than ``until``.
    """

    db: Database
    source: int
    target: int
    source_id: str
    target_id: str
    message_count: int
    checkpoint_id: str | None
    version: int
    until: datetime | None


def copied_by(statement: Statement) -> Callable[[type[Model], Branch], object]:
    """Return a `Table.branch` that runs a statement whose parameters are named after fields of `Branch`."""
    names = ("source", "target", "message_count", "version", "until")
    return lambda model, branch: branch.db.execute(statement, {each: getattr(branch, each) for each in names})


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some rows of an owner, in the order in which they are exported.

    ``order`` has no ties. It ends with ``id`` if the order of insertion matters. ``only`` selects the rows.
    """

    order: tuple[str, ...]
    only: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Table:
    """A table: each row belongs to a session, a stream or a tenant.

    ``parent`` is the column with the key of the session, a foreign key with ``on_delete=CASCADE``. Set it to
    ``"tenant"`` if rows belong to a tenant and to no session.

    ``record`` is the name of a row in an export. ``order`` lists the columns that sort the rows of a parent:
    they are unique within the parent, or end with the key if the order of insertion matters. For a table of a
    tenant, they distinguish each row from the others of its tenant, in every database. ``not_exported`` maps
    the columns that an export omits to the reason. The key and ``parent`` are always omitted.

    ``branch`` creates the rows of a branched session, in the transaction of the branch; without it, a branch
    has no rows in this table. ``before_delete`` is called with the keys of sessions in the transaction that
    deletes their rows, while the rows still exist: use it for data that several sessions share. It returns
    how many rows of each model it deleted. A dry run rolls it back, so use ``transaction.on_commit`` for
    changes outside the database. Both are called only for sessions with rows in this table.

    ``of_sessions`` takes the rows of a tenant's table and the sessions to which an export is limited, and
    returns the rows that these sessions need; without it, such an export includes no rows of the table.

    ``sweep`` deletes the rows of one tenant that have expired at a given time, and returns their number. A
    cleanup calls it outside a transaction, for each tenant that has rows in the table.

    ``check`` is for ``helix_doctor``. It takes keys of sessions, or of rows of a tenant's table, and yields
    each faulty key with a description of the fault.

    ``check_import`` takes the columns of each row that an import is about to store, without its parent, and
    raises `InvalidPayload` if the app could not read the row. The session of such a row is not imported.

    ``reads`` reads the text of a `PayloadField`, and raises `IntegrityFault` if the text is damaged.

    The remaining fields are only for the tables of helix_store. ``parts`` replaces ``order`` in an export.
    ``follows`` names the record after which this one is exported. ``reference`` is a foreign key to a
    checkpoint of the same session. ``unit`` is the kind of unit that begins with the row or contains it, if
    it is not ``tenant_rows``. ``session_id`` is the column of a tenant's table that holds the id of a
    session, or of a stream with the same name as its session.
    """

    model: type[Model]
    _: KW_ONLY
    record: str
    order: tuple[str, ...] = ("id",)
    parent: str = "session_id"
    not_exported: Mapping[str, str] = field(default_factory=dict, hash=False)
    branch: Callable[[type[Model], Branch], object] | None = None
    before_delete: Callable[[Database, Collection[int]], Counts | None] | None = None
    of_sessions: Callable[[QuerySet[Any], QuerySet[Any]], QuerySet[Any]] | None = None
    sweep: Callable[[Database, datetime], int] | None = None
    check: Callable[[Database, Collection[int]], Iterable[tuple[int, str]]] | None = None
    check_import: Callable[[Mapping[str, Any]], object] | None = None
    reads: Callable[[str], object] | None = decode
    parts: tuple[Part, ...] = ()
    follows: str | None = None
    reference: str | None = None
    unit: str | None = None
    session_id: str | None = None

    @property
    def is_own(self) -> bool:
        """True if this is a table of helix_store, not of another app."""
        return self.model._meta.app_label == APP

    @property
    def is_of_tenant(self) -> bool:
        return self.parent == "tenant"

    @property
    def names_tenant(self) -> bool:
        """True if a row stores the tenant itself: it belongs to a tenant, or outlives its session."""
        return self.is_of_tenant or self.parent_field.null

    @property
    def parent_field(self) -> Any:
        return next(each for each in self.model._meta.concrete_fields if each.attname == self.parent)

    @property
    def owner(self) -> type[Model] | None:
        """The model that the rows belong to; ``None`` for rows of a tenant."""
        return None if self.is_of_tenant else self.parent_field.related_model

    @property
    def implied(self) -> frozenset[str]:
        """The fields that a record never contains.

        The position of a record in the export implies its key and its parent. A call id lets a call whose
        reply was lost recognise its own write, and no process of the other database waits for such a reply.
        """
        parent = None if self.unit == self.record else self.parent
        return frozenset(
            each.name
            for each in self.model._meta.concrete_fields
            if each.primary_key or each.attname == parent or isinstance(each, CallIdField | CallIdsField)
        )


AppTable = Table
"""The name of `Table` for other apps."""
