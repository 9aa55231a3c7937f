"""A database of this app as a source of an export."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, Literal

from django.db.models import Exists, Model, OuterRef, Q, QuerySet

from helix_store.catalogue import Table, declared, tables
from helix_store.engine.database import Database
from helix_store.engine.paging import Pace, distinct_values, keyset_pages
from helix_store.exceptions import shown_id
from helix_store.models import Lock, Session, Stream, UsageEntry
from helix_store.sessions.database.trees import forest_keys
from helix_store.transfer.columns import RecordFormat
from helix_store.transfer.layout import ExportedPart, formats, parts_of
from helix_store.transfer.records import Counts, Problem, Record, Unit
from helix_store.transfer.sql import filled_parts

_MOST_UNITS: Final = 100
_MOST_ROWS: Final = 1_000

_Values = tuple[Any, ...]
_Found = dict[Any, list[_Values]] | None
"""The rows of a part by their parent, or ``None`` if they must be read page by page."""


class DatabaseSource:
    """The sessions of a tenant, or of all tenants for ``None``; with ``session_ids``, only these sessions.

    A session includes its stream, its lock, and the usage of a deleted session with the same id;
    ``with_trees`` also includes its sub-sessions with their data.
    """

    def __init__(
        self,
        using: str | None = None,
        *,
        tenant: str | None = None,
        session_ids: Collection[str] | None = None,
        with_trees: bool = False,
    ) -> None:
        self._db = Database(using, tenant or "")
        self._tenant = tenant
        self._session_ids = None if session_ids is None else sorted(set(session_ids))
        self._with_trees = with_trees
        self._trees: dict[str, list[str]] | None = None
        self._paces: defaultdict[ExportedPart, Pace] = defaultdict(partial(Pace, _MOST_ROWS))

    @property
    def session_count(self) -> int:
        return self._db.query(self._chosen(Session).count)

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._db.snapshot():
            # A tree that has already been walked may have grown since.
            self._trees = None
            yield

    def units(self) -> Iterator[Unit]:
        locks = self._chosen(Lock)
        for (tenant,) in distinct_values(self._db, locks, "tenant"):
            yield self._unit_of_rows(tenant, declared(Lock), locks.filter(tenant=tenant))
        for table in tables("tenant"):
            yield from self._rows_of_tenants(table)
        yield from self._heads_with_parts("session", self._chosen(Session))
        yield from self._heads_with_parts("stream", self._streams())
        yield from self._kept_usage(self._chosen(UsageEntry))

    def unit(self, kind: Any, tenant: str, name: str) -> Unit | None:
        """Return the unit that is stored under this name, or ``None``."""
        if kind == "kept_usage":
            kept = self._rows(UsageEntry).filter(tenant=tenant, recorded_for=name, session=None)
            return self._kept_usage_of(tenant, name) if self._db.query(kept.exists) else None
        heads = self._rows(formats()[kind].model).filter(**{"tenant": tenant, f"{kind}_id": name})
        return next(self._heads_with_parts(kind, heads, at_once=1), None)

    def units_of(self, table: Table, chosen: Q) -> Iterator[Unit]:
        """Yield the units with these rows of a table that names the tenant; for usage, only kept entries."""
        rows = self._rows(table.model).filter(chosen)
        if table.model is Session:
            yield from self._heads_with_parts("session", rows)
        elif table.model is Stream:
            yield from self._heads_with_parts("stream", rows)
        elif table.model is UsageEntry:
            yield from self._kept_usage(rows)
        else:
            yield self._unit_of_rows(self._db.tenant, table, rows)

    def left_out(self, exported: Counts) -> Iterator[Problem]:
        """Report unknown ids, and rows that belong to no session or stream."""
        if self._session_ids is not None:
            found: set[str] = set()
            kept = self._chosen(UsageEntry).filter(session=None)
            for rows, name in ((self._chosen(Session), "session_id"), (kept, "recorded_for")):
                found.update(self._db.query(partial(list, rows.values_list(name, flat=True))))
            for session_id in self._session_ids:
                if session_id not in found:
                    yield Problem(text=f"There is no session with the id {shown_id(session_id)}.")
        elif self._tenant is None:
            for table in tables():
                stored = self._db.query(self._rows(table.model).count)
                if stored > exported[table.record]:
                    text = f"{stored - exported[table.record]} rows of {table.model.__name__} are not in it:"
                    yield Problem(text=f"{text} they belong to nothing, or to unreadable rows.")

    # --- Units -------------------------------------------------------------------------------------

    def _kept_usage(self, rows: QuerySet[Any]) -> Iterator[Unit]:
        kept = rows.filter(session=None)
        for tenant, session_id in distinct_values(self._db, kept, "tenant", "recorded_for"):
            yield self._kept_usage_of(tenant, session_id)

    def _kept_usage_of(self, tenant: str, session_id: str) -> Unit:
        rows = self._rows(UsageEntry).filter(tenant=tenant, recorded_for=session_id, session=None)
        table = declared(UsageEntry)
        return self._unit_of("kept_usage", tenant, session_id, table, rows, session_id=session_id)

    def _rows_of_tenants(self, table: Table) -> Iterator[Unit]:
        rows = self._of_tenant(table.model)
        if self._session_ids is not None:
            if table.of_sessions is None:
                return
            rows = table.of_sessions(rows, self._chosen(Session))
        for (tenant,) in distinct_values(self._db, rows, "tenant"):
            yield self._unit_of_rows(tenant, table, rows.filter(tenant=tenant))

    def _unit_of_rows(self, tenant: str, table: Table, rows: QuerySet[Any]) -> Unit:
        if table.model is Lock:
            return self._unit_of("locks", tenant, "", table, rows)
        return self._unit_of("tenant_rows", tenant, table.record, table, rows, of=table.record)

    def _unit_of(
        self, kind: str, tenant: str, name: str, table: Table, rows: QuerySet[Any], **identity: str
    ) -> Unit:
        """Return a unit with rows of one table, but without a row that begins the unit."""
        (part,) = parts_of(table)

        def records() -> Iterator[Record]:
            yield {"record": kind, "tenant": tenant, **identity}
            yield from self._pages(part, rows)

        return Unit(kind, tenant, name, records)

    def _heads_with_parts(
        self, kind: Literal["session", "stream"], heads: QuerySet[Any], *, at_once: int | None = None
    ) -> Iterator[Unit]:
        """Yield units in the order of their ids, reading the parts of many at once while they are small."""
        head, parts = formats()[kind], parts_of(*tables(kind))
        order, size = ("tenant", f"{kind}_id"), at_once or _MOST_UNITS
        sizes = iter(lambda: size, 0)
        for batch in keyset_pages(self._db, heads, order, "pk", *head.selected, sizes=sizes):
            keys = [row[0] for row in batch]
            found = [self._found(part, keys) for part in parts] if keys[1:] else self._of_one(parts, *keys)
            for key, *values, tenant, name in batch:
                records = partial(self._records, head, key, tuple(values), parts, found)
                yield Unit(kind, tenant, name, records)
            size = max(1, size // 2) if None in found else min(_MOST_UNITS, size * 2)

    def _records(
        self,
        head: RecordFormat,
        key: int,
        values: _Values,
        parts: Sequence[ExportedPart],
        found: Sequence[_Found],
    ) -> Iterator[Record]:
        yield head.record_of(values, key)
        for part, of_all in zip(parts, found, strict=True):
            if of_all is None:
                rows = self._rows(part.format.model).filter(**{part.format.parent: key})
                yield from self._pages(part, rows, key)
            else:
                for row in of_all.get(key, ()):
                    yield part.format.record_of(row, key)

    # --- Parts -------------------------------------------------------------------------------------

    def _of_one(self, parts: tuple[ExportedPart, ...], key: int) -> list[_Found]:
        (filled,) = self._db.read(filled_parts(parts), {"key": key})
        return [None if is_filled else {} for is_filled in filled]

    def _found(self, part: ExportedPart, keys: Sequence[int]) -> _Found:
        pace, parent = self._paces[part], part.format.parent
        rows = self._rows(part.format.model).filter(**{f"{parent}__in": keys}, **part.only)
        page = rows.order_by(parent, *part.order).values_list(parent, *part.format.selected)
        values = self._db.query(lambda: list(page[: pace.rows]))
        is_all = len(values) < pace.rows
        pace.measure(values)
        if not is_all:
            return None
        return {parent: [row[1:] for row in group] for parent, group in groupby(values, key=itemgetter(0))}

    def _pages(self, part: ExportedPart, rows: QuerySet[Any], key: int | None = None) -> Iterator[Record]:
        """Yield the rows of one parent, page by page."""
        pace, selected = self._paces[part], part.format.selected
        rows = rows.filter(**part.only)
        for page in keyset_pages(self._db, rows, part.order, *selected, sizes=iter(lambda: pace.rows, 0)):
            for row in page:
                yield part.format.record_of(row[: len(selected)], key)
            pace.measure(page)

    # --- Rows --------------------------------------------------------------------------------------

    def _rows(self, model: type[Model]) -> QuerySet[Any]:
        return model._base_manager.using(self._db.alias)

    def _of_tenant(self, model: type[Model]) -> QuerySet[Any]:
        rows = self._rows(model)
        return rows if self._tenant is None else rows.filter(tenant=self._tenant)

    def _chosen(self, model: type[Model]) -> QuerySet[Any]:
        rows = self._of_tenant(model)
        if self._session_ids is not None:
            rows = rows.filter(self._is_chosen(declared(model).session_id, self._session_ids))
        return rows

    def _is_chosen(self, id_column: str | None, session_ids: list[str]) -> Q:
        if not self._with_trees:
            return Q(**{f"{id_column}__in": session_ids})
        if self._trees is None:
            self._trees = self._db.query(partial(self._walked, session_ids))
        is_chosen = Q(**{f"{id_column}__in": session_ids})
        for tenant, ids in self._trees.items():
            is_chosen |= Q(**{"tenant": tenant, f"{id_column}__in": ids})
        return is_chosen

    def _walked(self, session_ids: list[str]) -> dict[str, list[str]]:
        """Return the ids of these sessions' trees, by tenant."""
        tops = self._of_tenant(Session).filter(session_id__in=session_ids)
        trees: dict[str, list[str]] = {}
        for tenant, rows in groupby(tops.order_by("tenant").values_list("tenant", "pk"), key=itemgetter(0)):
            found = forest_keys(Database(self._db.alias, tenant), [key for _, key in rows])
            sessions = self._rows(Session).filter(pk__in=set().union(*found.values()))
            trees[tenant] = sorted(sessions.values_list("session_id", flat=True))
        return trees

    def _streams(self) -> QuerySet[Any]:
        streams = self._of_tenant(Stream)
        if self._session_ids is not None:
            of_stream = {"tenant": OuterRef("tenant"), "stream_id": OuterRef("stream_id")}
            streams = streams.filter(Exists(self._chosen(Session).filter(**of_stream)))
        return streams
