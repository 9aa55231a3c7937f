"""A database of this app as a source of an export."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from django.db.models import Exists, Model, OuterRef, Q, QuerySet

from helix_store.app_tables import AppTable, registered_tables
from helix_store.engine.database import Database
from helix_store.engine.expressions import after_keyset
from helix_store.exceptions import shown_id
from helix_store.models import Lock, Session, Stream, UsageEntry
from helix_store.sessions.database.trees import forest_keys
from helix_store.transfer.layout import (
    LOCKS,
    SESSIONS,
    STREAM_PARTS,
    STREAMS,
    USAGE_ENTRIES,
    Part,
    app_part,
    parts_of_sessions,
    tables,
)
from helix_store.transfer.pages import Pace
from helix_store.transfer.records import Counts, Problem, Record, Unit
from helix_store.transfer.sql import filled_parts

__all__ = ["DatabaseSource"]

_MOST_UNITS: Final = 100
_MOST_ROWS: Final = 1_000

_Values = tuple[Any, ...]
_Found = dict[Any, list[_Values]] | None
"""The rows of a part by their parent; ``None`` when they are to be read page by page."""

_LOCK_PART: Final = Part(LOCKS, "tenant", ("name",))
_KEPT_PART: Final = Part(USAGE_ENTRIES, "recorded_for", ("timestamp", "id"), {"session": None})


class DatabaseSource:
    """The sessions of a tenant, or of all tenants for ``None``; with ``session_ids`` those alone.

    With a session come its stream, its lock, and the usage of a deleted session of that id; ``with_trees``
    its sub-sessions too, and theirs.
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
        self._paces: defaultdict[Part, Pace] = defaultdict(partial(Pace, _MOST_ROWS))

    @property
    def session_count(self) -> int:
        return self._db.query(self._sessions().count)

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._db.snapshot():
            # A tree that was walked before may have grown.
            self._trees = None
            yield

    def units(self) -> Iterator[Unit]:
        for tenant in self._tenants_with_locks():
            yield self._locks_of(tenant)
        for table in registered_tables("tenant"):
            yield from self._rows_of_tenants(table)
        yield from self._heads_with_parts(SESSIONS, self._sessions(), parts_of_sessions())
        yield from self._heads_with_parts(STREAMS, self._streams(), STREAM_PARTS)
        for tenant, session_id in self._deleted_sessions():
            yield self._kept_usage_of(tenant, session_id)

    def unit(self, kind: str, tenant: str, name: str) -> Unit | None:
        """The unit that is stored under this name, or ``None``."""
        if kind == "kept_usage":
            kept = self._rows(UsageEntry).filter(tenant=tenant, recorded_for=name, session=None)
            return self._kept_usage_of(tenant, name) if self._db.query(kept.exists) else None
        table, parts = (SESSIONS, parts_of_sessions()) if kind == "session" else (STREAMS, STREAM_PARTS)
        heads = self._rows(table.model).filter(**{"tenant": tenant, f"{kind}_id": name})
        return next(self._heads_with_parts(table, heads, parts, at_once=1), None)

    def left_out(self, exported: Counts) -> Iterator[Problem]:
        """Unknown ids, and rows that no session or stream has."""
        if self._session_ids is not None:
            found = set(self._db.query(lambda: list(self._sessions().values_list("session_id", flat=True))))
            found |= set(
                self._db.query(lambda: list(self._kept_usage().values_list("recorded_for", flat=True)))
            )
            for session_id in self._session_ids:
                if session_id not in found:
                    yield Problem(text=f"There is no session with the id {shown_id(session_id)}.")
        elif self._tenant is None:
            for table in tables().values():
                stored = self._db.query(self._rows(table.model).count)
                if stored > exported[table.record]:
                    text = f"{stored - exported[table.record]} rows of {table.model.__name__} are not in it:"
                    yield Problem(text=f"{text} they belong to nothing, or to what could not be read.")

    # --- Units -------------------------------------------------------------------------------------

    def _locks_of(self, tenant: str) -> Unit:
        rows = partial(self._pages, _LOCK_PART, self._locks().filter(tenant=tenant))
        return Unit("locks", tenant, "", lambda: _with_head({"record": "locks", "tenant": tenant}, rows))

    def _kept_usage_of(self, tenant: str, session_id: str) -> Unit:
        rows = self._rows(UsageEntry).filter(tenant=tenant, recorded_for=session_id)
        head = {"record": "kept_usage", "tenant": tenant, "session_id": session_id}
        pages = partial(self._pages, _KEPT_PART, rows)
        return Unit("kept_usage", tenant, session_id, lambda: _with_head(head, pages))

    def _rows_of_tenants(self, table: AppTable) -> Iterator[Unit]:
        rows = self._rows(table.model)
        if self._tenant is not None:
            rows = rows.filter(tenant=self._tenant)
        if self._session_ids is not None:
            if table.of_sessions is None:
                return
            rows = table.of_sessions(rows, self._sessions())
        for (tenant,) in self._distinct(rows, "tenant"):
            head = {"record": "tenant_rows", "tenant": tenant, "of": table.record}
            pages = partial(self._pages, app_part(table), rows.filter(tenant=tenant))
            yield Unit("tenant_rows", tenant, table.record, partial(_with_head, head, pages))

    def _heads_with_parts(
        self, table: Any, heads: QuerySet[Any], parts: tuple[Part, ...], *, at_once: int | None = None
    ) -> Iterator[Unit]:
        """Units in the order of their ids. The parts of many are read together while they are few."""
        identity = f"{table.record}_id"
        last: tuple[str, str] | None = None
        size = at_once or _MOST_UNITS
        while batch := self._db.query(partial(self._batch, table, heads, identity, last, size)):
            keys = [row[0] for row in batch]
            found = self._of_one(parts, keys[0]) if len(keys) == 1 else self._of_all(parts, keys)
            for key, tenant, name, *values in batch:
                records = partial(self._records, table, key, tuple(values), parts, found)
                yield Unit(table.record, tenant, name, records)
            if len(batch) < size:
                return
            last = batch[-1][1:3]
            size = max(1, size // 2) if None in found else min(_MOST_UNITS, size * 2)

    def _batch(
        self, table: Any, heads: QuerySet[Any], identity: str, last: tuple[str, str] | None, size: int
    ) -> list[_Values]:
        if last is not None:
            heads = heads.filter(after_keyset(table.model, {"tenant": last[0], identity: last[1]}))
        rows = heads.order_by("tenant", identity).values_list("pk", "tenant", identity, *table.selected)
        return list(rows[:size])

    def _records(
        self,
        table: Any,
        key: int,
        values: _Values,
        parts: Sequence[Part],
        found: Sequence[_Found],
    ) -> Iterator[Record]:
        yield table.record_of(values, key)
        for part, of_all in zip(parts, found, strict=True):
            if of_all is None:
                rows = self._rows(part.table.model).filter(**{part.parent: key})
                yield from self._pages(part, rows, key)
            else:
                for row in of_all.get(key, ()):
                    yield part.table.record_of(row, key)

    # --- Parts -------------------------------------------------------------------------------------

    def _of_one(self, parts: tuple[Part, ...], key: int) -> list[_Found]:
        (filled,) = self._db.read(filled_parts(parts), {"key": key})
        return [None if is_filled else {} for is_filled in filled]

    def _of_all(self, parts: Sequence[Part], keys: Sequence[int]) -> list[_Found]:
        return [self._found(part, keys) for part in parts]

    def _found(self, part: Part, keys: Sequence[int]) -> _Found:
        pace = self._paces[part]
        rows = self._rows(part.table.model).filter(**{f"{part.parent}__in": keys}, **part.only)
        page = rows.order_by(part.parent, *part.order).values_list(part.parent, *part.table.selected)
        values = self._db.query(lambda: list(page[: pace.rows]))
        is_all = len(values) < pace.rows
        pace.measure(values)
        if not is_all:
            return None
        return {parent: [row[1:] for row in group] for parent, group in groupby(values, key=itemgetter(0))}

    def _pages(self, part: Part, rows: QuerySet[Any], key: int | None = None) -> Iterator[Record]:
        """The rows of one parent, in pages."""
        pace, width = self._paces[part], len(part.order)
        rows = rows.filter(**part.only).order_by(*part.order)
        selected = rows.values_list(*part.order, *part.table.selected)
        last: _Values | None = None
        while True:
            page = selected
            if last is not None:
                page = page.filter(
                    after_keyset(part.table.model, dict(zip(part.order, last[:width], strict=True)))
                )
            size = pace.rows
            values = self._db.query(partial(_listed, page, size))
            for row in values:
                yield part.table.record_of(row[width:], key)
            if len(values) < size:
                return
            last = values[-1]
            pace.measure(values)

    # --- Rows --------------------------------------------------------------------------------------

    def _rows(self, model: type[Model]) -> QuerySet[Any]:
        return model._base_manager.using(self._db.alias)

    def _chosen(self, model: type[Model], id_column: str) -> QuerySet[Any]:
        rows = self._rows(model)
        if self._tenant is not None:
            rows = rows.filter(tenant=self._tenant)
        if self._session_ids is not None:
            rows = rows.filter(self._is_chosen(id_column, self._session_ids))
        return rows

    def _is_chosen(self, id_column: str, session_ids: list[str]) -> Q:
        if not self._with_trees:
            return Q(**{f"{id_column}__in": session_ids})
        if self._trees is None:
            self._trees = self._db.query(partial(self._walked, session_ids))
        is_chosen = Q(**{f"{id_column}__in": session_ids})
        for tenant, ids in self._trees.items():
            is_chosen |= Q(**{"tenant": tenant, f"{id_column}__in": ids})
        return is_chosen

    def _walked(self, session_ids: list[str]) -> dict[str, list[str]]:
        """The ids of the trees of these sessions, by tenant."""
        tops = self._rows(Session).filter(session_id__in=session_ids)
        if self._tenant is not None:
            tops = tops.filter(tenant=self._tenant)
        trees: dict[str, list[str]] = {}
        for tenant, rows in groupby(tops.order_by("tenant").values_list("tenant", "pk"), key=itemgetter(0)):
            found = forest_keys(Database(self._db.alias, tenant), [key for _, key in rows])
            sessions = self._rows(Session).filter(pk__in=set().union(*found.values()))
            trees[tenant] = sorted(sessions.values_list("session_id", flat=True))
        return trees

    def _sessions(self) -> QuerySet[Any]:
        return self._chosen(Session, "session_id")

    def _locks(self) -> QuerySet[Any]:
        return self._chosen(Lock, "name")

    def _kept_usage(self) -> QuerySet[Any]:
        return self._chosen(UsageEntry, "recorded_for").filter(session=None)

    def _streams(self) -> QuerySet[Any]:
        streams = self._rows(Stream)
        if self._tenant is not None:
            streams = streams.filter(tenant=self._tenant)
        if self._session_ids is not None:
            of_stream = {"tenant": OuterRef("tenant"), "stream_id": OuterRef("stream_id")}
            streams = streams.filter(Exists(self._sessions().filter(**of_stream)))
        return streams

    def _tenants_with_locks(self) -> Iterator[str]:
        return (tenant for (tenant,) in self._distinct(self._locks(), "tenant"))

    def _deleted_sessions(self) -> Iterator[_Values]:
        return self._distinct(self._kept_usage(), "tenant", "recorded_for")

    def _distinct(self, rows: QuerySet[Any], *names: str) -> Iterator[_Values]:
        """The different values of columns, each found by a look-up from the one before."""
        last: _Values | None = None
        while True:
            following = rows.order_by(*names).values_list(*names)
            if last is not None:
                following = following.filter(after_keyset(rows.model, dict(zip(names, last, strict=True))))
            values = self._db.query(partial(_listed, following, 1))
            if not values:
                return
            (last,) = values
            yield last


def _listed(rows: QuerySet[Any, Any], size: int) -> list[_Values]:
    return list(rows[:size])


def _with_head(head: Record, rows: Callable[[], Iterator[Record]]) -> Iterator[Record]:
    yield head
    yield from rows()
