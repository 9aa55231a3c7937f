"""The catalogue of all tables: their declarations, the registry, their rows, and the conversations of
adapters.

Tables without a model, which exist only while an operation runs: the fences and the log of moves.

`transfer.fences` creates them with the first move in a database and drops them with the last one. They hold
no data of a session, so no export, branch or erasure includes them, but everything that is about *all*
tables, such as row-level security and its check, includes them by this declaration.

Conversations of adapters: functions that read an adapter's rows as messages.

With its tables, an adapter registers a `Conversation` in ``AppConfig.ready()``::

    register_conversation(MyConversation())

The admin's list and page of sessions and ``helix_sessions show`` then show its messages. If the adapter keeps
them in an item log, `helix_store.reports.ItemConversation` is all it needs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from functools import cache, partial
from typing import Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

from django.core.exceptions import FieldDoesNotExist, ImproperlyConfigured
from django.db import router
from django.db.models import (
    CASCADE,
    DO_NOTHING,
    PROTECT,
    RESTRICT,
    AutoField,
    ForeignKey,
    Model,
    QuerySet,
    UniqueConstraint,
)
from django.db.models.deletion import Collector

from helix_store.conf import TENANT_POLICY, table_name
from helix_store.core.payloads import decode
from helix_store.core.transcript import ConversationMessage
from helix_store.engine.database import Database
from helix_store.engine.expressions import distinct_values, for_keys, list_parameter, with_keys
from helix_store.engine.statement import Statement
from helix_store.engine.statement import table as sql_name
from helix_store.exceptions import ConflictError
from helix_store.models import Session, Stream
from helix_store.models.fields import CallIdField, CallIdsField

__all__ = ["MOVED_CHANGES", "MOVED_TENANTS", "TRANSIENT_TABLES", "TransientTable"]


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
    raises `InvalidPayload` or `IntegrityFault` if the app could not read the row. The session of such a row
    is not imported. It is for what ``reads`` and the rules of single columns do not find.

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


@dataclass(frozen=True, slots=True)
class TransientTable:
    """A table that one operation creates and drops. ``columns`` is its SQL definition."""

    name: str
    columns: str

    @property
    def quoted(self) -> str:
        return f'"{self.name}"'

    def creation(self) -> str:
        return f"CREATE TABLE IF NOT EXISTS {self.quoted} ({self.columns})"

    def closing(self) -> Iterator[str]:
        """Yield statements that hide all rows from every role of PostgreSQL to which policies apply.

        They do not depend on whether the project uses row-level security: a role that was granted privileges
        on all tables must not open the fence of a tenant. The owner of the table is not bound by them.
        """
        yield f"ALTER TABLE {self.quoted} ENABLE ROW LEVEL SECURITY"
        yield f"DROP POLICY IF EXISTS {TENANT_POLICY} ON {self.quoted}"
        yield f"CREATE POLICY {TENANT_POLICY} ON {self.quoted} USING (false) WITH CHECK (false)"


MOVED_TENANTS: Final = TransientTable(
    table_name("moved_tenant"),
    "tenant text PRIMARY KEY, target text NOT NULL, phase text NOT NULL, is_open boolean NOT NULL",
)
MOVED_CHANGES: Final = TransientTable(
    table_name("moved_change"),
    "tenant text NOT NULL, record text NOT NULL, name text NOT NULL, is_marked boolean NOT NULL",
)
TRANSIENT_TABLES: Final = (MOVED_TENANTS, MOVED_CHANGES)


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


def other_references(table: Table) -> list[Any]:
    """Return the columns, besides the owner of a row, that name a tenant or refer to a row of one."""
    models = {each.model for each in _tables.values()}
    return [
        each
        for each in table.model._meta.concrete_fields
        if table.parent not in (each.name, each.attname)
        and ((each.name == "tenant" and not table.names_tenant) or each.related_model in models)
    ]


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


def branch_rows(branch: Branch) -> None:
    """Create the rows that each table needs in the new session for a branch. Call this in its transaction."""
    filled = {child.related_model for child in children_with_rows(branch.db, [branch.source])}
    for table in tables("session"):
        if table.branch is not None and table.model in filled:
            table.branch(table.model, branch)


def let_go(db: Database, keys: Collection[int], models: Collection[type[Model]]) -> Counter[type[Model]]:
    """Call the tables' ``before_delete`` for rows of these sessions in the tables of ``models``.

    Return how many rows these calls deleted. Call in the transaction of the deletion.
    """
    deleted: Counter[type[Model]] = Counter()
    for table in tables("session"):
        if table.before_delete is not None and table.model in models:
            deleted.update(table.before_delete(db, keys) or {})
    return deleted


class Sweep(NamedTuple):
    """A cleanup of one tenant: ``delete`` deletes the expired rows in the table of ``record``."""

    record: str
    tenant: str
    delete: Callable[[datetime], int]


def sweeps(alias: str, tenant: str | None) -> Iterator[Sweep]:
    """Yield the sweeps of one tenant, or of all tenants that have rows."""
    for table in tables("tenant"):
        if table.sweep is not None:
            for each in tenants_with_rows(table.model, alias) if tenant is None else [tenant]:
                yield Sweep(table.record, each, partial(table.sweep, Database(alias, each)))


def tenants_with_rows(model: type[Model], alias: str) -> Iterator[str]:
    """Yield a table's tenants in order, each by one lookup in the unique index that begins with them."""
    rows = model._base_manager.using(alias)
    return (tenant for (tenant,) in distinct_values(Database(alias, ""), rows, "tenant"))


# --- Cascades ----------------------------------------------------------------------------------------


def children_of_sessions() -> list[Any]:
    """Return every table whose rows are deleted with their session, by searching all models."""
    return cascades_of(Session)


def cascades_of(model: type[Model]) -> list[Any]:
    """Return the relations to a model whose rows are deleted with its rows."""
    return [relation for relation in _relations_to(model) if relation.on_delete is CASCADE]


def _relations_to(model: type[Model]) -> Iterator[Any]:
    # Hidden fields also count: with related_name="+", no attribute of the model leads to the rows. A
    # ForeignObject does not: it has neither a column nor a constraint of its own.
    fields: list[Any] = model._meta.get_fields(include_hidden=True)
    relations = (field for field in fields if field.auto_created and not field.concrete)
    return (relation for relation in relations if isinstance(relation.field, ForeignKey))


def children_with_rows(db: Database, keys: Collection[int]) -> list[Any]:
    """Return the tables of `children_of_sessions` that have a row of one of these sessions.

    This takes one statement: most tables have no such rows, and each installed app may add tables.
    """
    (found,) = db.execute(_children_with_rows(), {"keys": list_parameter(db, list(keys))})
    return [child for child, key in zip(children_of_sessions(), found, strict=True) if key is not None]


@cache
def _children_with_rows() -> Statement:
    """The statement is built when it is first needed, because only then are all models known."""

    # EXISTS would be slow: for sessions with many rows, PostgreSQL expects an early hit in a table scan.
    firsts = (
        f"(SELECT {column} FROM {model} WHERE {column} IN %(keys)s ORDER BY {column} LIMIT 1)"
        for column, model in (
            (child.field.column, sql_name(child.related_model)) for child in children_of_sessions()
        )
    )
    return for_keys(f"SELECT {', '.join(firsts)}")


# --- Foreign keys of other apps ----------------------------------------------------------------------

_PACKAGE: Final = __name__.partition(".")[0]
_REFUSING: Final = (PROTECT, RESTRICT)


def is_of_package(model: type[Model]) -> bool:
    """Return whether the model is one of helix_store or of its adapters."""
    return model.__module__.partition(".")[0] == _PACKAGE


def references_to(model: type[Model]) -> list[Any]:
    """Return the foreign keys of other apps to a model on which somebody must act when its rows are deleted.

    Nobody has to if the database acts by itself, as with ``DB_SET_NULL``, or does not notice the deletion.
    """
    return [
        relation
        for relation in _relations_to(model)
        if relation.on_delete is not None
        and not hasattr(relation.on_delete, "on_delete_sql")
        and not (relation.on_delete is DO_NOTHING and not has_constraint(relation))
        and not is_of_package(relation.related_model)
    ]


def has_constraint(relation: Any) -> bool:
    """Return whether Django's migrations created a constraint in the database for a foreign key."""
    managed: bool = relation.related_model._meta.managed
    return managed and relation.field.db_constraint


def references_to_sessions() -> list[Any]:
    """Return the foreign keys to sessions without ``CASCADE``: deleting a session leaves their rows."""
    return [relation for relation in references_to(Session) if relation.on_delete is not CASCADE]


def references_in(db: Database) -> list[Any]:
    """Return the `references_to_sessions` whose tables are in this database."""
    references = references_to_sessions()
    if not references:
        return []
    if router.allow_migrate_model(db.alias, Session):
        return [each for each in references if router.allow_migrate_model(db.alias, each.related_model)]
    # The routers say nothing about an alias that nobody may migrate, such as one of a pool.
    names = set(db.connection.introspection.table_names(include_views=True))
    return [each for each in references if each.related_model._meta.db_table in names]


def is_refusing(relation: Any) -> bool:
    """Return whether a foreign key protects the rows that it refers to."""
    return relation.on_delete in _REFUSING


def refuse_protected(db: Database, keys: Collection[int]) -> None:
    """Raise `ConflictError` if a foreign key of another app protects one of these sessions."""
    _refuse_protected(db, references_in(db), keys)


def protected_sessions(db: Database, keys: Collection[int]) -> set[int]:
    """Return those of these sessions that foreign keys of other apps protect.

    This takes one statement for each such key.
    """
    found: set[int] = set()
    for relation in references_in(db) if keys else []:
        if is_refusing(relation):
            rows = relation.related_model._base_manager.using(db.alias)
            name = relation.field.attname
            referring = with_keys(db, rows, relation.field.name, list(keys))
            found.update(referring.order_by().values_list(name, flat=True).distinct())
    return found


def _refuse_protected(db: Database, references: Iterable[Any], keys: Collection[int]) -> None:
    for relation in references:
        if is_refusing(relation) and _referring(db, relation, keys).exists():
            raise ConflictError(
                f"Rows of {relation.related_model._meta.label} protect the session by their foreign key "
                f"{relation.field.name}; delete or change these rows first."
            )


def release_sessions(db: Database, keys: Collection[int]) -> None:
    """Do what foreign keys of other apps declare in ``on_delete``, such as ``SET_NULL``.

    Call in the transaction that deletes the sessions, before they are deleted. Raises `ConflictError`.
    """
    references = [each for each in references_in(db) if each.on_delete is not DO_NOTHING]
    if not references:
        return
    _refuse_protected(db, references, keys)
    collector = Collector(using=db.alias)
    for relation in references:
        rows = _referring(db, relation, keys)
        # Django also asks first whether there are rows, unless the function declares that it need not.
        if getattr(relation.on_delete, "lazy_sub_objs", False) or rows.exists():
            relation.on_delete(collector, relation.field, rows, db.alias)
    collector.delete()


def _referring(db: Database, relation: Any, keys: Collection[int]) -> QuerySet[Any]:
    rows = relation.related_model._base_manager.using(db.alias)
    found: QuerySet[Any] = rows.filter(**{f"{relation.field.name}__in": keys})
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The part of a conversation that a list shows: the number of its messages, and the newest one.

    ``is_partial`` means that the session has more than ``count`` messages. ``last`` is ``None`` if a list
    would have to read too much to find it.
    """

    count: int
    is_partial: bool = False
    last: ConversationMessage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationStep:
    """A step that led to the newest message. ``count`` is the number of messages after this step."""

    step_id: str
    name: str = ""
    step: int | None = None
    count: int | None = None
    at: datetime | None = None
    row: tuple[type[Any], int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationPage:
    """A page of a conversation's messages in order, and the number of all messages.

    ``is_partial`` means that there are older messages than the first of the ``total`` that an adapter counts.
    ``thread`` is the shown thread, one of the session's ``threads``, for frameworks that keep several in one
    session, such as branches and sub-agents. If there are many, ``threads`` holds only some of them, always
    with the main and the shown thread, and ``thread_count`` is the number of all. ``path`` lists the last
    steps that led to the newest message, newest first, for frameworks that store steps.
    """

    messages: tuple[ConversationMessage, ...]
    total: int
    is_partial: bool = False
    thread: str = ""
    threads: tuple[str, ...] = ()
    thread_count: int | None = None
    path: tuple[ConversationStep, ...] = ()


class Conversation(Protocol):
    """The functions that read one adapter's rows as messages. Both methods only read, but never all rows.

    ``name`` is the name of the framework, which is shown and must be unique. ``needs`` are the models whose
    rows are shown: people who may not view all of these models do not see the conversation.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> tuple[type[Model], ...]: ...

    def outlines(self, db: Database, keys: Collection[int]) -> Mapping[int, Outline]:
        """Return the conversations among the sessions with these keys, which may belong to several tenants.

        The number of statements must not depend on the number of keys. Count at most a few hundred messages.
        """

    def page(
        self, db: Database, key: int, *, first: int | None, limit: int, thread: str | None = None
    ) -> ConversationPage | None:
        """Return up to ``limit`` messages from the number ``first``, or the newest ones if it is ``None``.

        Return ``None`` if the session has no conversation of this adapter. Without ``thread``, or with an
        unknown one, show the main thread. If ``first`` is after the end, ``messages`` is empty.
        """


@runtime_checkable
class WholeConversation(Conversation, Protocol):
    """A conversation that commands and exports can read as a whole.

    The methods are optional: without them, exports read pages, and say so where a page has cut a message.
    """

    def messages(
        self, db: Database, key: int, *, thread: str | None = None, first: int = 1
    ) -> Iterator[ConversationMessage]:
        """Yield the messages of a thread from the number ``first``, each as a whole and with ``stored``.

        A negative number counts from the end: -10 begins with the tenth message from the end.
        Read a few rows at a time, so that a long conversation takes no more memory than a short one.
        """

    def threads(self, db: Database, key: int, *, after: str | None = None) -> Iterator[str]:
        """Yield the names of all threads, or of those that follow one of them."""


_conversations: Final[dict[str, Conversation]] = {}


def register_conversation(conversation: Conversation) -> None:
    """Register the functions that read an adapter's rows as messages.

    Call it in ``AppConfig.ready()``; safe to repeat.
    """
    _conversations[conversation.name] = conversation


def conversations() -> tuple[Conversation, ...]:
    """Return the registered conversations by name."""
    return tuple(_conversations[name] for name in sorted(_conversations))
