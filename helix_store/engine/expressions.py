"""Expressions, rows and pages of statements.

Statements that write or lock single rows, built once per set of columns.

Django's ORM takes several times as long to build the statement of a hot write as the database takes to run
it.

Query expressions and parameters that PostgreSQL and SQLite write differently.

A pair of strings is the SQL for PostgreSQL and for SQLite, as `Statement` takes them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from itertools import chain, repeat
from typing import Any, Final

from django.core import signing
from django.db.models import (
    Aggregate,
    BigIntegerField,
    BooleanField,
    CharField,
    F,
    Func,
    JSONField,
    Lookup,
    Model,
    QuerySet,
    Value,
)
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now
from django.db.models.lookups import GreaterThan, LessThan

from helix_store.core.limits import MAX_BIGINT
from helix_store.engine.database import Database
from helix_store.engine.statement import SQLITE, Statement, table
from helix_store.exceptions import InvalidCursor, UnsupportedIsolation

_DOCUMENTS: Final = frozenset({dict, list})
_STATEMENTS: Final = 512
"""The number of statements that are kept, one for each set of columns that is written together."""


def insert_row(db: Database, model: type[Model], columns: Mapping[str, Any]) -> int:
    """Insert one row and return its key. Columns are named as in the table."""
    ((key,),) = db.execute(_insertion(model, tuple(columns)), _stored(columns))
    return int(key)


def insert_rows(
    db: Database, model: type[Model], names: tuple[str, ...], rows: Sequence[Sequence[Any]]
) -> None:
    """Insert rows with the same columns. The caller limits the number of rows in one statement."""
    parameters = [value for row in rows for value in row]
    db.execute(
        _insertions(model, names, len(rows)), dict(zip(_numbered(len(parameters)), parameters, strict=True))
    )


def update_row(db: Database, model: type[Model], key: int, columns: Mapping[str, Any]) -> None:
    """Write columns of the row with this key."""
    db.execute(_update(model, tuple(columns)), {"key": key, **_stored(columns)})


def lock_row(
    db: Database, model: type[Model], names: tuple[str, ...], condition: str, parameters: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """Read columns of the one row that meets a condition, locked as by ``select_for_update(no_key=True)``.

    SQLite has no row locks: there the immediate write transaction is the lock.
    """
    rows = db.execute(_locking_read(model, names, condition), parameters)
    return rows[0] if rows else None


def touch_row(
    db: Database, model: type[Model], names: tuple[str, ...], condition: str, parameters: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """Lock a row as `lock_row` does, and write it again with the same values, including its ``version``.

    A write that waits for the row then checks its conditions again, and a transaction with an older snapshot
    cannot lock the row.
    """
    rows = db.execute(_touching_read(model, names, condition), parameters)
    return rows[0] if rows else None


def _stored(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns as they are sent, with documents as JSON text."""
    return {
        name: json.dumps(value) if type(value) in _DOCUMENTS else value for name, value in columns.items()
    }


@lru_cache(_STATEMENTS)
def _insertion(model: type[Model], names: tuple[str, ...]) -> Statement:
    head = f"INSERT INTO {table(model)} ({_quoted(names)}) VALUES"
    typed = ", ".join(_typed_placeholder(model, name) for name in names)
    plain = ", ".join(f"%({name})s" for name in names)
    return Statement(postgresql=f"{head} ({typed}) RETURNING id", sqlite=f"{head} ({plain}) RETURNING id")


@lru_cache(_STATEMENTS)
def _insertions(model: type[Model], names: tuple[str, ...], rows: int) -> Statement:
    placeholders = iter(_numbered(rows * len(names)))
    values = ", ".join(f"({', '.join(f'%({next(placeholders)})s' for _ in names)})" for _ in range(rows))
    return Statement(f"INSERT INTO {table(model)} ({_quoted(names)}) VALUES {values}")


@lru_cache(_STATEMENTS)
def _numbered(count: int) -> list[str]:
    """Return numbered parameter names; Django handles named placeholders faster than others."""
    return [f"p{number}" for number in range(count)]


@lru_cache(_STATEMENTS)
def _update(model: type[Model], names: tuple[str, ...]) -> Statement:
    typed = ", ".join(f'"{name}" = {_typed_placeholder(model, name)}' for name in names)
    plain = ", ".join(f'"{name}" = %({name})s' for name in names)
    update = f"UPDATE {table(model)} SET {{}} WHERE id = %(key)s"
    return Statement(postgresql=update.format(typed), sqlite=update.format(plain))


@lru_cache(_STATEMENTS)
def _locking_read(model: type[Model], names: tuple[str, ...], condition: str) -> Statement:
    read = f"SELECT {_quoted(names)} FROM {table(model)} WHERE {condition}"
    return Statement(postgresql=f"{read} FOR NO KEY UPDATE", sqlite=read)


@lru_cache(_STATEMENTS)
def _touching_read(model: type[Model], names: tuple[str, ...], condition: str) -> Statement:
    touch = f"UPDATE {table(model)} SET version = version WHERE {condition} RETURNING {_quoted(names)}"
    return Statement(postgresql=touch, sqlite=_locking_read(model, names, condition).sqlite)


def _typed_placeholder(model: type[Model], name: str) -> str:
    return f"%({name})s::jsonb" if name in _json_columns(model) else f"%({name})s"


@cache
def _json_columns(model: type[Model]) -> frozenset[str]:
    return frozenset(field.attname for field in model._meta.concrete_fields if isinstance(field, JSONField))


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names)


ISOLATION: Final = "pg_catalog.current_setting('transaction_isolation')"
"""The isolation level of the transaction, on PostgreSQL."""
SEES_COMMITS: Final = f"{ISOLATION} LIKE 'read %%'"
"""True on PostgreSQL if each statement sees what others have committed."""

_IN_KEYS: Final = re.compile(r"([\w.]+) IN %\(keys\)s")


def tenant_parameter(tenant: str) -> Func:
    """Return the value of a tenant in a form that is hidden from PostgreSQL's planner. ``(SELECT …)``.

    The statistics do not contain a new tenant, so PostgreSQL expects it to have no rows. Every index that
    begins with the tenant then looks equally good, and a lookup by key may read all rows of the tenant. For a
    hidden value, PostgreSQL plans for an average tenant.
    """
    return _HiddenValue(Value(tenant), output_field=CharField())


class _HiddenValue(Func):
    template = "(SELECT %(expressions)s)"

    def as_sqlite(self, compiler: Any, connection: Any, **extra_context: Any) -> Any:
        return self.as_sql(compiler, connection, template="%(expressions)s", **extra_context)


class Isolation(Func):
    """The isolation level of the transaction, for `require_read_committed`."""

    arity = 0
    output_field = CharField()
    template = ISOLATION

    def as_sqlite(self, compiler: Any, connection: Any, **extra_context: Any) -> Any:
        return self.as_sql(compiler, connection, template="'serializable, one writer at a time'")


_READ_ISOLATION: Final = Statement(f"SELECT {ISOLATION}", "SELECT ''")


def require_current_reads(db: Database) -> None:
    """Call `require_read_committed` for the open transaction. One statement on PostgreSQL, none on SQLite."""
    if db.is_postgresql:
        ((isolation,),) = db.execute(_READ_ISOLATION, {})
        require_read_committed(isolation)


def require_read_committed(isolation: str) -> None:
    """Raise `UnsupportedIsolation` if a caller's transaction does not see what others have committed."""
    if isolation in ("repeatable read", "serializable"):
        raise UnsupportedIsolation


class NoIndexHint(Func):
    """A column whose index SQLite must not use.

    SQLite prefers an index on an equality column to one with the right order, and sorts the rows afterwards.
    """

    arity = 1
    template = "%(expressions)s"

    def as_sqlite(self, compiler: Any, connection: Any, **extra_context: Any) -> Any:
        return self.as_sql(compiler, connection, template="+%(expressions)s", **extra_context)


class InDefaultCollation(Func):
    """An id that is compared without case. In its own collation C, only ASCII letters have two cases."""

    arity = 1
    template = '(%(expressions)s COLLATE pg_catalog."default")'

    def as_sqlite(self, compiler: Any, connection: Any, **extra_context: Any) -> Any:
        return self.as_sql(compiler, connection, template="%(expressions)s", **extra_context)


class StartInUTC(Func):
    """The start of the hour, day, week or month around the moment in a column, whose own field reads it.

    Django's ``Trunc`` depends on ``USE_TZ``.
    """

    template = "pg_catalog.date_trunc('%(unit)s', %(expressions)s, 'UTC')"

    def __init__(self, column: str, unit: str) -> None:
        super().__init__(column, unit=unit)

    def as_sqlite(self, compiler: Any, connection: Any, **extra_context: Any) -> Any:
        column, params = compiler.compile(self.get_source_expressions()[0])
        return connection.ops.datetime_trunc_sql(self.extra["unit"], column, tuple(params), None)


class _Row(Func):
    template = "(%(expressions)s)"


def after_keyset(model: type[Model], last: Mapping[str, Any], *, descending: bool = False) -> Lookup[Any]:
    """Return the rows that follow the last row of a page, in the order of these columns: ``(a, b) > (1, 2)``.

    This is one range of an index. The same condition with OR would read again all rows that have the ``a`` of
    the last row. All columns must have the same direction.
    """
    fields: Any = model._meta.get_field
    values = [Value(value, output_field=fields(name)) for name, value in last.items()]
    # A lookup is a condition without a comparison; Django compares any other expression with true.
    follows = LessThan if descending else GreaterThan
    return follows(
        _Row(*map(F, last), output_field=BooleanField()), _Row(*values, output_field=BooleanField())
    )


class DatabaseNow(Now):
    """The database's time, on SQLite as the text that a `MomentField` stores."""

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return self.as_sql(compiler, connection, template=SQLITE.now.replace("%%", "%%%%"), **context)


class ContainsDocument(Func):
    """The condition that a jsonb column contains a document, which SQLite checks with ``json_each``."""

    def __init__(self, column: str, document: Any, sqlite_condition: str, sqlite_params: list[str]) -> None:
        super().__init__(column, output_field=BooleanField())
        self.column = column
        self.value = document
        self.document = json.dumps(document)
        self.sqlite_condition = sqlite_condition
        self.sqlite_params = sqlite_params

    def as_postgresql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        column, params = compiler.compile(self.source_expressions[0])
        return self._on_postgresql(column), (*params, self.document, *params)

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> tuple[str, tuple[Any, ...]]:
        column, params = compiler.compile(self.source_expressions[0])
        return self._on_sqlite(column), (*params, *self.sqlite_params)

    def written(self, name: str, *, is_postgresql: bool) -> tuple[str, dict[str, str]]:
        """Return the condition for a `Statement`, with parameters whose names begin with ``name``."""
        text = (self._on_postgresql if is_postgresql else self._on_sqlite)(self.column)
        values = [self.document] if is_postgresql else self.sqlite_params
        parameters = {f"{name}_{number}": value for number, value in enumerate(values)}
        return text % tuple(f"%({each})s" for each in parameters), parameters

    def _on_postgresql(self, column: str) -> str:
        # The second half is the condition of the partial index, which omits empty documents.
        empty = "[]" if isinstance(self.value, list) else "{}"
        return f"({column} @> %s::jsonb AND {column} <> '{empty}'::jsonb)"

    def _on_sqlite(self, column: str) -> str:
        return f"EXISTS (SELECT 1 FROM json_each({column}) WHERE {self.sqlite_condition})"


def has_tag(tag: str) -> ContainsDocument:
    return ContainsDocument("tags", [tag], "json_each.value = %s", [tag])


def has_metadata(key: str, value: str) -> ContainsDocument:
    return ContainsDocument(
        "metadata", {key: value}, "json_each.key = %s AND json_each.value = %s", [key, value]
    )


class ExactSum(Aggregate):
    """SUM of a column of whole numbers from 0, as an ``int``; 0 if there are no rows. See `exact_sum`."""

    function = "SUM"
    name = "ExactSum"

    def __init__(self, column: str) -> None:
        super().__init__(column, output_field=BigIntegerField())

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> tuple[str, tuple[Any, ...]]:
        column, params = compiler.compile(self.get_source_expressions()[0])
        _, sqlite = exact_sum(column)
        return sqlite, (*params, *params)

    def convert_value(self, value: Any, expression: Any, connection: Any) -> int:
        return summed(value)


def exact_sum(column: str) -> tuple[str, str]:
    """Return the SQL of `ExactSum`; `summed` reads the result.

    PostgreSQL adds up bigints as numeric. SQLite fails if a sum exceeds 64 bits, so there the upper and the
    lower 32 bits are summed separately.
    """
    return f"SUM({column})", f"(SUM({column} >> 32) || ' ' || SUM({column} & 4294967295))"


def summed(value: Any) -> int:
    """Return the result of an `exact_sum` as an ``int``; 0 if there were no rows."""
    if isinstance(value, str):
        upper, lower = value.split()
        return (int(upper) << 32) + int(lower)
    return int(value or 0)


def local_day(column: str, parameter: str) -> tuple[str, str]:
    """Return the SQL for the day of a moment, as ``2026-11-20``, in the time zone of the named parameter.
    Days after the year 9999 become its last day, because Python has no later ones.
    """
    return (
        f"to_char(LEAST({column} AT TIME ZONE %({parameter})s::text, timestamp '9999-12-31'), 'YYYY-MM-DD')",
        # Django adds this function to SQLite, which has no time zones.
        f"""CASE WHEN {column} >= '9999-12-30' THEN '9999-12-31'
            ELSE django_datetime_cast_date({column}, %({parameter})s, 'UTC') END""",
    )


def is_in_list(column: str, parameter: str, column_type: str) -> tuple[str, str]:
    """Return the condition that a column has one of the values of a `list_parameter`."""
    return (
        f"{column} = ANY(%({parameter})s::{column_type}[])",
        f"{column} IN (SELECT value FROM json_each(%({parameter})s))",
    )


def with_keys(
    db: Database, rows: QuerySet[Any], column: str, keys: Sequence[Any], *, column_type: str = "bigint"
) -> QuerySet[Any]:
    """Filter rows by the values of a column, by default of numbers. The values are one parameter.

    ``column__in`` has a placeholder for each value, and Django and the driver handle each of them.
    """
    name = f'{table(rows.model)}."{rows.model._meta.get_field(column).column}"'
    condition = is_in_list(name, "keys", column_type)[0 if db.is_postgresql else 1].replace("%(keys)s", "%s")
    is_one_of_them = RawSQL(condition, [list_parameter(db, keys)], output_field=BooleanField())  # noqa: S611  names of the model
    return rows.filter(is_one_of_them)


def looked_up(model: type[Model], alias: str, condition: str, *, end: str = "LIMIT 1") -> tuple[str, str]:
    """Return a join that finds by an index the row that meets a condition on the preceding tables.

    ``LIMIT 1`` prevents PostgreSQL from joining the whole table. If several rows match, pass ``OFFSET 0``.
    """
    source = f"{table(model)} AS {alias}"
    return (
        f"CROSS JOIN LATERAL (SELECT * FROM {source} WHERE {condition} {end}) AS {alias}",
        f"CROSS JOIN {source} ON {condition}",
    )


def for_keys(statement: Statement | str) -> Statement:
    """Return a statement in which ``column IN %(keys)s`` works; ``keys`` is a `list_parameter` of numbers."""
    if isinstance(statement, str):
        statement = Statement(statement)
    postgresql, sqlite = is_in_list(r"\1", "keys", "bigint")
    return Statement(
        _IN_KEYS.sub(postgresql, statement.postgresql),
        _IN_KEYS.sub(sqlite, statement.sqlite),
        citus=[_IN_KEYS.sub(postgresql, text) for text in statement.citus],
    )


def list_parameter(db: Database, values: Sequence[Any]) -> Sequence[Any] | str:
    """Return values as one parameter: an array on PostgreSQL, a JSON array on SQLite."""
    return list(values) if db.is_postgresql else json.dumps(values, ensure_ascii=False)


def rows_parameter(db: Database, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the values of these columns: an array for each column on PostgreSQL, row after row on SQLite.

    A column that a row does not have becomes null.
    """
    if db.is_postgresql:
        return [[row.get(name) for row in rows] for name in names]
    return [row.get(name) for row in rows for name in names]


def all_tenants(rows: str, *, most: int = MAX_BIGINT) -> str:
    """Return a query for the tenants of a table, at most one more than ``most``. It is a skip scan, which
    takes one lookup for each of them, in an index that begins with the tenant.
    """
    return f"""
        WITH RECURSIVE known(tenant, place) AS (
            SELECT min(tenant), CAST(1 AS bigint) FROM {rows}
          UNION ALL
            SELECT (SELECT min(t.tenant) FROM {rows} AS t WHERE t.tenant > known.tenant), place + 1
            FROM known WHERE known.tenant IS NOT NULL AND place <= {most}
        )
        SELECT tenant FROM known WHERE tenant IS NOT NULL"""


def tenants_with(rows: str, column: str) -> Statement:
    """Select the tenants of a table that have a row with this id, in order: no index begins with the id."""
    return Statement(f"""
        SELECT tenant FROM ({all_tenants(rows)}) AS known WHERE EXISTS (
            SELECT 1 FROM {rows} AS own WHERE own.tenant = known.tenant AND own.{column} = %({column})s
        ) ORDER BY tenant""")


_SALT = "helix_store.cursor"
_LONGEST = 4_096


def _fingerprint(query: object) -> str:
    text = json.dumps(query, sort_keys=True, default=lambda value: [type(value).__name__, str(value)])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def write_cursor(position: list[Any], *, query: object) -> str:
    """Return a cursor for the page after ``position``. The next call must repeat ``query``."""
    return signing.dumps([_fingerprint(query), *position], salt=_SALT)


def read_cursor(cursor: str, *, query: object) -> list[Any]:
    """Return the position in a cursor. Raises `InvalidCursor` if it is forged or belongs to another query."""
    if not isinstance(cursor, str) or len(cursor) > _LONGEST:
        raise InvalidCursor
    try:
        fingerprint, *position = signing.loads(cursor, salt=_SALT)
    except (signing.BadSignature, ValueError, TypeError) as exc:
        raise InvalidCursor from exc
    if fingerprint != _fingerprint(query):
        raise InvalidCursor("The cursor belongs to another query; start from the first page.")
    return list(position)


_CHARACTERS: Final = 4_000_000
_FIRST_AVERAGE: Final = 32_000
_LONG: Final = (str, bytes, memoryview)


def keyset_pages(
    db: Database, rows: QuerySet[Any], order: tuple[str, ...], *columns: str, sizes: Iterable[int]
) -> Iterator[list[tuple[Any, ...]]]:
    """Yield rows in pages, each read as one range of the index that begins with the columns of ``order``.

    ``order`` has no ties and no nullable column. A row is a tuple of its ``columns``, followed by those of
    ``order``. Each page has the next of ``sizes``. Rows may change between two pages.
    """
    order = tuple(rows.model._meta.pk.name if name == "pk" else name for name in order)
    ordered = rows.order_by(*order).values_list(*columns, *order)
    following = ordered
    for size in sizes:
        page: list[tuple[Any, ...]] = db.query(partial(list, following[:size]))
        if page:
            yield page
        if len(page) < size:
            return
        last = dict(zip(order, page[-1][len(columns) :], strict=True))
        following = ordered.filter(after_keyset(rows.model, last))


def distinct_values(db: Database, rows: QuerySet[Any], *names: str) -> Iterator[tuple[Any, ...]]:
    """Yield distinct values of columns in order, each by one lookup in the index that begins with them."""
    return chain.from_iterable(keyset_pages(db, rows, names, sizes=repeat(1)))


class Pace:
    """The size of the next page, based on the lengths of the rows read so far.

    A page of large rows then takes no more memory than a page of small rows.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._average: float = _FIRST_AVERAGE

    @property
    def rows(self) -> int:
        return max(1, min(self._most, int(_CHARACTERS / self._average)))

    def measure(self, rows: Iterable[tuple[Any, ...]]) -> None:
        lengths = [sum(len(value) for value in row if isinstance(value, _LONG)) for row in rows]
        if lengths:
            self._average = max(1.0, sum(lengths) / len(lengths))


def paced_pages(
    db: Database, rows: QuerySet[Any], order: tuple[str, ...], *columns: str, most: int = 200
) -> Iterator[list[tuple[Any, ...]]]:
    """Yield `keyset_pages` of up to ``most`` rows, fewer if the rows are large."""
    pace = Pace(most)
    sizes = iter(lambda: pace.rows, None)
    for page in keyset_pages(db, rows, order, *columns, sizes=sizes):
        pace.measure(page)
        yield page
