"""Exports: reading a database, and writing a file.

The file of an export: a header, units with the count and hash of each, and a trailer with the totals.

The reader checks each unit against its count and hash before it returns it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import groupby, repeat
from operator import itemgetter
from typing import IO, Any, Final, Literal, Protocol

from django.db.models import Exists, Model, OuterRef, Q, QuerySet

from helix_store import conf
from helix_store.catalogue import Table, declared, tables
from helix_store.core import validation
from helix_store.core.limits import MAX_CALL_BYTES
from helix_store.engine.database import Database
from helix_store.engine.expressions import Pace, after_keyset, distinct_values, keyset_pages, with_keys
from helix_store.exceptions import (
    HelixStoreError,
    IntegrityFault,
    InvalidPayload,
    InvalidQuery,
    shown_id,
)
from helix_store.models import Lock, Session, Stream, UsageEntry
from helix_store.sessions.heads import forest_keys
from helix_store.transfer.records import (
    Counts,
    ExportedPart,
    ExportSummary,
    Problem,
    Record,
    RecordFormat,
    Source,
    Unit,
    filled_parts,
    formats,
    line_of,
    lines_from,
    named,
    parts_of,
    spool,
    units,
)

_MOST_UNITS: Final = 500
_MOST_ROWS: Final = 5_000

_Values = tuple[Any, ...]
_Found = dict[Any, list[_Values]] | None
"""The rows of a part by their parent, or ``None`` if they must be read page by page."""


class DatabaseSource:
    """The sessions of a tenant, or of all tenants for ``None``; with ``session_ids``, only these sessions.

    A session includes its stream, its lock, and the usage of a deleted session with the same id;
    ``with_trees`` also includes its sub-sessions with their data. Raises `InvalidQuery` and `InvalidPayload`
    for arguments that make no sense; without any ids, the export is empty.
    """

    def __init__(
        self,
        using: str | None = None,
        *,
        tenant: str | None = None,
        session_ids: Collection[str] | None = None,
        with_trees: bool = False,
    ) -> None:
        self._tenant = None if tenant is None else validation.tenant(tenant)
        self._db = Database(using, tenant or "")
        self._session_ids = None if session_ids is None else _checked_ids(session_ids)
        self._with_trees = validation.query_flag(with_trees, "with_trees")
        self._trees: dict[str, list[str]] | None = None
        self._paces: defaultdict[ExportedPart, Pace] = defaultdict(partial(Pace, _MOST_ROWS))

    @property
    def session_count(self) -> int:
        return self._db.query(self._chosen(Session).count)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to export."""
        return next(self.units(), None) is None

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

    def units_named(self, kind: Any, tenant: str, names: Collection[str]) -> Iterator[Unit]:
        """Yield the units that are stored under these names."""
        if kind == "kept_usage":
            yield from self._kept_usage(self._rows(UsageEntry).filter(tenant=tenant, recorded_for__in=names))
        else:
            of_names = {"tenant": tenant, f"{kind}_id__in": names}
            yield from self._heads_with_parts(kind, self._rows(formats()[kind].model).filter(**of_names))

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
            if table.of_sessions is None or not self._session_ids:
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

    def _heads_with_parts(self, kind: Literal["session", "stream"], heads: QuerySet[Any]) -> Iterator[Unit]:
        """Yield units in the order of their ids, reading the parts of many at once while they are small."""
        head, parts = formats()[kind], parts_of(*tables(kind))
        order, size = ("tenant", f"{kind}_id"), _MOST_UNITS
        sizes = iter(lambda: size, 0)
        for batch in self._batches(heads, order, head.selected, sizes):
            keys = [row[0] for row in batch]
            found = [self._found(part, keys) for part in parts] if keys[1:] else self._of_one(parts, *keys)
            for key, *values, tenant, name in batch:
                records = partial(self._records, head, key, tuple(values), parts, found)
                yield Unit(kind, tenant, name, records)
            size = max(1, size // 2) if None in found else min(_MOST_UNITS, size * 2)

    def _batches(
        self, heads: QuerySet[Any], order: tuple[str, ...], selected: tuple[str, ...], sizes: Iterator[int]
    ) -> Iterator[list[_Values]]:
        """Yield pages of heads with their columns. From a page with a head that cannot be read, yield each
        head alone and without its columns, so that only its own unit fails.
        """
        rest = heads
        try:
            for page in keyset_pages(self._db, heads, order, "pk", *selected, sizes=sizes):
                yield page
                last = dict(zip(order, page[-1][-len(order) :], strict=True))
                rest = heads.filter(after_keyset(heads.model, last))
        except _UNREADABLE:
            yield from keyset_pages(self._db, rest, order, "pk", sizes=repeat(1))

    def _columns(self, head: RecordFormat, key: int) -> _Values:
        """Return the columns of one head. Raises one of `_UNREADABLE`."""
        rows = self._rows(head.model).filter(pk=key).values_list(*head.selected)
        found: list[_Values] = self._db.query(partial(list, rows))
        return found[0]

    def _records(
        self,
        head: RecordFormat,
        key: int,
        values: _Values,
        parts: Sequence[ExportedPart],
        found: Sequence[_Found],
    ) -> Iterator[Record]:
        yield head.record_of(values or self._columns(head, key), key)
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
        rows = with_keys(self._db, self._rows(part.format.model), parent, keys).filter(**part.only)
        page = rows.order_by(parent, *part.order).values_list(parent, *part.format.selected)
        read = 0
        while read < (most := pace.rows):  # Once more if the rows are smaller than those before them.
            try:
                values: list[_Values] = self._db.query(partial(list, page[:most]))
            except _UNREADABLE:
                return None  # Each unit reads its own rows, and only the one with the fault fails.
            pace.measure(values)
            if len(values) < most:
                return {
                    parent: [row[1:] for row in group] for parent, group in groupby(values, key=itemgetter(0))
                }
            read = most
        return None

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


def _checked_ids(session_ids: Any) -> list[str]:
    # A text is a collection of texts too.
    if not isinstance(session_ids, Iterable) or isinstance(session_ids, str | bytes | Mapping):
        raise InvalidQuery("session_ids must be a collection of ids.", path="session_ids")
    return sorted({validation.identifier(each, "session_ids") for each in session_ids})


_FORMAT: Final = "helix_store.export"
_VERSION: Final = 1
_LONGEST_SHOWN: Final = 200
_RECORD: Final = re.compile(rb'\{"record":"(\w+)"[,}]')
_UNREADABLE: Final = (IntegrityFault, TypeError, ValueError, ArithmeticError, RecursionError)
"""The errors that are raised for a stored value that does not have its column's type."""


# --- Writing -----------------------------------------------------------------------------------------


class _Writable(Protocol):
    def write(self, data: bytes, /) -> Any: ...


def write_export(
    source: Source,
    file: _Writable,
    *,
    progress: Callable[[ExportSummary], object] | None = None,
    is_stopped: Callable[[], bool] | None = None,
) -> ExportSummary:
    """Write all units of a source to a binary file, in constant memory.

    All reads see the database at the same moment, and lock nothing. A unit with an unreadable row ends with a
    record ``failed``, is listed as a problem in the summary, and does not stop the export. ``progress`` is
    called after each unit. ``is_stopped`` is called between units; a stopped export has no trailer, and
    importing it reports that.
    """
    writer = _Writer(file)
    with source.reading():
        writer.write({"record": "header", "format": _FORMAT, "version": _VERSION})
        for unit in source.units():
            if is_stopped is not None and is_stopped():
                return writer.summary
            writer.write_unit(unit)
            if progress is not None:
                progress(writer.summary)
        writer.summary.problems.extend(source.left_out(writer.summary.counts))
    writer.write_trailer()
    return writer.summary


class _Writer:
    def __init__(self, file: _Writable) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.summary = ExportSummary()

    def write(self, record: Record) -> bytes:
        line = line_of(record)
        self._digest.update(line)
        self._file.write(line)
        return line

    def write_unit(self, unit: Unit) -> None:
        digest, counts = hashlib.sha256(), Counts()
        try:
            for record in unit.records():
                digest.update(self.write(record))
                counts[record["record"]] += 1
        except _UNREADABLE as exc:
            reason = str(exc) if isinstance(exc, IntegrityFault) else "A stored value cannot be read."
            # If the first row is the unreadable one, no other record names the unit.
            identity = {"tenant": unit.tenant, "name": unit.name}
            self.write({"record": "failed", "of": unit.kind, **identity, "problem": reason})
            self.summary.failed += 1
            self.summary.problems.append(Problem(text=f"The {unit} is incomplete: {reason}"))
            return
        self.write(
            {"record": "end", "of": unit.kind, "counts": _sorted(counts), "sha256": digest.hexdigest()}
        )
        self.summary.counts.update(counts)

    def write_trailer(self) -> None:
        counts, sha256 = self.summary.counts, self._digest.hexdigest()
        trailer = {"record": "trailer", "counts": _sorted(counts), "failed": self.summary.failed}
        self.write({**trailer, "sha256": sha256})
        self.summary.sha256 = sha256


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items()))


# --- Reading -----------------------------------------------------------------------------------------


class NotAnExport(HelixStoreError):
    """The file is not an export of helix_store, or one of a newer version."""

    code = "not_an_export"


class ExportFile:
    """An export in a binary file, which is read once from its start.

    After `units` has ended, ``problems`` lists missing or altered data, ``counts`` counts the records of the
    units that were yielded, and ``is_complete`` is true if the trailer was found and matches all lines.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._whole = hashlib.sha256()
        self._layouts = units()
        self._number = 0
        self._unit: _OpenUnit | None = None
        self._is_skipping = False
        self._failed = 0
        self._ended: Counts = Counter()
        self.counts: Counts = Counter()
        self.problems: list[Problem] = []
        self.is_complete = False

    def units(self) -> Iterator[Unit]:
        """Yield the units that are unaltered. Raises `NotAnExport` if the file is not an export."""
        self._read_header()
        try:
            yield from self._units()
        finally:
            self._drop_unit()

    def _units(self) -> Iterator[Unit]:
        has_ended = False
        longest = _longest_line()
        while line := self._file.readline(longest + 1):
            self._number += 1
            if len(line) > longest:
                self._drop_unit()
                self._problem(f"the line has more than {longest:,} bytes; the rest was not read")
                return
            if has_ended:
                self._problem("there is more after the trailer")
                self.is_complete = False
                return
            name = _name_of(line)
            if name == "trailer":
                self._close_unit()
                self._check_trailer(line)
                has_ended = True
                continue
            self._whole.update(line)
            if name in self._layouts:
                self._open_unit(name, line)
            elif name == "end":
                yield from self._ended_unit(line)
            elif name == "failed":
                self._failed_unit(line)
            else:
                self._part(name, line)
        if not has_ended:
            self._close_unit()
            self._problem("the file ends here, without a trailer: its end is missing")

    # --- Lines -------------------------------------------------------------------------------------

    def _read_header(self) -> None:
        line = self._file.readline(1_000)
        self._number = 1
        self._whole.update(line)
        header = _record(line)
        if header is None or header.get("record") != "header" or header.get("format") != _FORMAT:
            raise NotAnExport("Line 1 is not the header of an export of helix_store.")
        if header.get("version") != _VERSION:
            raise NotAnExport(
                f"The export has the format {header.get('version')!r}; this release reads {_VERSION}. "
                "Import it with the release that wrote it, or a newer one."
            )

    def _open_unit(self, kind: str, line: bytes) -> None:
        self._close_unit()
        self._is_skipping = False
        head = _record(line) or {}
        tenant, name = ("" if column is None else head.get(column) for column in self._layouts[kind].identity)
        if not isinstance(tenant, str) or not isinstance(name, str):
            self._problem(f"it lacks the columns that name a {kind.replace('_', ' ')}")
            self._is_skipping = True
            return
        self._unit = _OpenUnit(kind, tenant, name, line=self._number)
        self._unit.add(kind, line)

    def _part(self, name: str, line: bytes) -> None:
        unit = self._unit
        if unit is None:
            if not self._is_skipping:
                self._problem("the record belongs to no unit: lines before it are missing")
                self._is_skipping = True
        elif name not in self._layouts[unit.kind].records:
            self._problem(f"the line is {_kind_of(name)}, in the {unit}; no part of it is imported")
            self._drop_unit()
        else:
            unit.add(name, line)

    def _ended_unit(self, line: bytes) -> Iterator[Unit]:
        unit = self._unit
        end = _record(line) or {}
        # The trailer also counts units that are skipped, such as those with rows of an app that is missing.
        self._ended.update(_counts_in(end))
        if unit is None:
            if not self._is_skipping:
                self._problem("the end belongs to no unit: lines before it are missing")
            self._is_skipping = False
            return
        if end.get("of") != unit.kind or end.get("counts") != unit.counts:
            self._problem(f"the {unit}, from line {unit.line}, does not have the records that its end counts")
        elif end.get("sha256") != unit.digest.hexdigest():
            self._problem(f"the {unit}, from line {unit.line}, does not have the sha256 of the export")
        else:
            self.counts.update(unit.counts)
            yield unit.checked()
        self._drop_unit()
        self._is_skipping = False

    def _failed_unit(self, line: bytes) -> None:
        record = _record(line) or {}
        name = self._name_of_failed(record) if self._unit is None else f"the {self._unit}"
        if not self._is_skipping:
            self._problem(f"{name} could not be exported: {_shown(record.get('problem'))}")
        self._failed += 1
        self._drop_unit()
        self._is_skipping = False

    def _name_of_failed(self, record: Record) -> str:
        """Return the name of a unit without any other record. Older exports have only its kind."""
        kind, tenant, name = (record.get(key) for key in ("of", "tenant", "name"))
        if not isinstance(kind, str) or kind not in self._layouts:
            return "a unit"
        if isinstance(tenant, str) and isinstance(name, str):
            return f"the {named(kind, tenant, name)}"
        return f"a {kind.replace('_', ' ')}"

    def _check_trailer(self, line: bytes) -> None:
        trailer = _record(line) or {}
        if trailer.get("counts") != dict(self._ended) or trailer.get("failed") != self._failed:
            self._problem("the file does not have the records that the trailer counts")
        elif trailer.get("sha256") != self._whole.hexdigest():
            self._problem("the file differs from the export: its sha256 is not that of the trailer")
        else:
            self.is_complete = True

    def _close_unit(self) -> None:
        """Close a unit without an end, if one is open."""
        if self._unit is not None:
            self._problem(f"the {self._unit}, from line {self._unit.line}, has no end before this line")
        self._drop_unit()

    def _drop_unit(self) -> None:
        if self._unit is not None:
            self._unit.spool.close()
            self._unit = None
            self._is_skipping = True

    def _problem(self, text: str) -> None:
        self.problems.append(Problem(text=text, line=self._number))


@dataclass(eq=False)
class _OpenUnit:
    """The lines of a unit so far."""

    kind: str
    tenant: str
    name: str
    line: int
    counts: Counts = field(default_factory=Counter)
    digest: Any = field(default_factory=hashlib.sha256)
    spool: IO[bytes] = field(default_factory=spool)

    def __str__(self) -> str:
        return named(self.kind, self.tenant, self.name)

    def add(self, name: str, line: bytes) -> None:
        self.counts[name] += 1
        self.digest.update(line)
        self.spool.write(line)

    def checked(self) -> Unit:
        sha256 = self.digest.hexdigest()
        return Unit(self.kind, self.tenant, self.name, self._records, sha256, self.line)

    def _records(self) -> Iterator[Record]:
        for line in lines_from(self.spool):
            record = _record(line)
            if record is None or record.get("record") != _name_of(line):
                raise InvalidPayload(path="", reason="the line is not a JSON object with distinct names")
            yield record


def _counts_in(end: Record) -> dict[str, int]:
    """Return the counts that the end of a unit has, if they are numbers."""
    counts = end.get("counts")
    if not isinstance(counts, dict) or not all(type(number) is int for number in counts.values()):
        return {}
    return counts


def _longest_line() -> int:
    """Return more bytes than any record has; JSON can triple the length of the text in its columns."""
    limits = conf.limits()
    return MAX_CALL_BYTES + 24 * max(int(getattr(limits, each.name)) for each in fields(limits))


def _kind_of(name: str) -> str:
    if name and name not in formats():
        return f"a record {shown_id(name)}, and no app in INSTALLED_APPS has registered a table of that name"
    return f"a {name.replace('_', ' ')}" if name else "no record"


def _shown(text: Any) -> str:
    """Return text from the file without characters that control a terminal."""
    text = str(text)[:_LONGEST_SHOWN]
    return text if text.isprintable() else ascii(text)


def _name_of(line: bytes) -> str:
    """Return the name of the record, or ``""`` if the line is not a record."""
    match = _RECORD.match(line)
    return match[1].decode() if match and line.endswith(b"}\n") else ""


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
