"""Import of units into a database, without ever overwriting stored data.

A unit is stored whole or not at all. Small units share a transaction. If one of them is refused, each
is stored in a transaction of its own, so that only that one is a problem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any, Final

from django.core.exceptions import ObjectDoesNotExist
from django.db import DataError, IntegrityError
from django.db.models import Model, Q

from helix_store.budgets import count_again
from helix_store.catalogue import declared, tables
from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.counters import add_usage
from helix_store.engine.database import Database
from helix_store.engine.errors import violated_constraint
from helix_store.exceptions import IntegrityFault, InvalidPayload, LimitExceeded, shown_id
from helix_store.models import Checkpoint, CheckpointKind, Lock, Session, UsageEntry
from helix_store.transfer.export_source import DatabaseSource
from helix_store.transfer.records import (
    RAISE_TOKEN,
    TOKEN,
    Counts,
    ImportSummary,
    Problem,
    Record,
    RecordFormat,
    Reference,
    Unit,
    digest_of,
    format_of,
    formats,
)

_BASE_KINDS: Final = frozenset({CheckpointKind.BASE.value, CheckpointKind.STEP.value})
_BUDGETS: Final = "budget"
_COUNTERS: Final = "budget_counter"
_NOTHING: Final = {"spent_usd": "0.000000000000", "spent_tokens": 0}
_ROWS: Final = 200
_CHARACTERS: Final = 4_000_000
_UNITS_TOGETHER: Final = 100
_RECORDS_TOGETHER: Final = 2_000

_TOGETHER: Final = frozenset({"session", "stream", "kept_usage"})

_OrderKey = tuple[Any, ...]
_Values = dict[str, Any]

_CAUSED_BY_DATA: Final = (
    DataError,
    ObjectDoesNotExist,
    ArithmeticError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors of Python and Django that a value of a record may cause. Those of the connection end an import."""

_REFUSED: Final = (InvalidPayload, LimitExceeded, IntegrityFault, IntegrityError, *_CAUSED_BY_DATA)


def import_units(
    units: Iterable[Unit],
    using: str | None = None,
    *,
    tenant: str | None = None,
    progress: Callable[[ImportSummary], object] | None = None,
    is_stopped: Callable[[], bool] | None = None,
    reads_back: bool = False,
    transact: Callable[[Database, Callable[[], Any]], Any] = Database.transaction,
    is_trusted: bool = False,
) -> ImportSummary:
    """Store units, each whole or not at all, and return a summary. A repeat stores nothing twice.

    Units that are already stored are compared: an identical unit is skipped; a different one is a problem,
    and nothing changes. Only the token of a free lock is raised to the unit's token. A unit that the database
    refuses is also a problem, but does not stop the import. With a ``tenant``, units of other tenants are
    left out. ``progress`` is called after each unit, and ``is_stopped`` before each; units that were read but
    not stored by then are left for a repeat. With ``reads_back``, a unit is stored only if it can be read
    back as it was written. ``transact`` runs the transactions. Budgets count the usage that is stored.

    Without ``using``, each unit is stored where the project's routers place its tenant, so that the stores
    find it: a file may have tenants of several databases.

    Ids, strings and payloads must be values that the stores currently accept. Units that are ``is_trusted``
    come from another database of the project, where limits may have been larger when they were stored. They
    are all of the tenant's data, so the counters of its budgets are stored unchanged.
    """
    summary = ImportSummary()
    make = partial(
        _Importer, summary, transact, progress, reads_back=reads_back, is_trusted=is_trusted, tenant=tenant
    )
    importers = _Importers(make, Database(using, tenant or ""), is_routed=not using and tenant is None)
    for unit in units:
        if is_stopped is not None and is_stopped():
            return summary
        importer = importers.of(unit)
        if tenant is not None and unit.tenant != tenant:
            importer.leave_out()
        else:
            importer.take(unit)
    for importer in importers.all:
        importer.store_taken()
        importer.note_missing_roots()
    summary.is_complete = True
    return summary


class _Importers:
    """The importer of each database. ``is_routed`` asks the routers about the tenant of each unit."""

    def __init__(self, make: Callable[[str], _Importer], db: Database, *, is_routed: bool) -> None:
        self._make = make
        self._is_routed = is_routed
        self._first = make(db.alias)
        self._by_alias = {db.alias: self._first}
        self._by_tenant: dict[str, _Importer] = {}

    @property
    def all(self) -> Iterable[_Importer]:
        return self._by_alias.values()

    def of(self, unit: Unit) -> _Importer:
        if not self._is_routed:
            return self._first
        if unit.tenant not in self._by_tenant:
            self._by_tenant[unit.tenant] = self._placed(unit.tenant)
        return self._by_tenant[unit.tenant]

    def _placed(self, tenant: str) -> _Importer:
        try:
            alias = Database(None, validation.tenant(tenant)).alias
        except InvalidPayload:
            # No router is asked about a tenant that no store has. Any importer refuses its units.
            return self._first
        if alias not in self._by_alias:
            self._by_alias[alias] = self._make(alias)
        return self._by_alias[alias]


class _Importer:
    def __init__(
        self,
        summary: ImportSummary,
        transact: Callable[[Database, Callable[[], Any]], Any],
        progress: Callable[[ImportSummary], object] | None,
        alias: str,
        *,
        tenant: str | None,
        reads_back: bool,
        is_trusted: bool,
    ) -> None:
        self.summary = summary
        self._db = db = Database(alias, tenant or "")
        self._transact = partial(transact, db)
        self._progress = progress
        self._reads_back = reads_back
        self._is_trusted = is_trusted
        self._limits = None if is_trusted else db.limits
        self._roots: dict[tuple[str, str], Unit] = {}
        self._stored = DatabaseSource(db.alias, tenant=db.tenant or None)
        self._position = 0
        self._taken = _Taken()

    def leave_out(self) -> None:
        """Count a unit of another tenant."""
        self.summary.other_tenants += 1
        self._tell()

    def take(self, unit: Unit) -> None:
        """Store a unit, at once or together with the next ones."""
        if not self._taken.add(unit):
            self.store_taken()
            if not self._taken.add(unit):
                self._store_alone(unit)

    def store_taken(self) -> None:
        """Store the units that wait for others."""
        units, self._taken = self._taken.units, _Taken()
        if not units[1:] or not self._store_together(units):
            for unit in units:
                self._store_alone(unit)

    def _store_together(self, units: Sequence[Unit]) -> bool:
        """Store units of one kind and tenant; return ``False``, and store none, if one of them is refused."""
        try:
            stored = self._digests_of(units)
            is_same = {
                unit.name: stored[unit.name] == digest_of(unit) for unit in units if unit.name in stored
            }
            new = [unit for unit in units if unit.name not in stored]
            counts = self._transact(partial(self._insert_checked, new)) if new else Counter()
        except _REFUSED:
            return False
        self.summary.records.update(counts)
        for unit in units:
            self._settle(unit, is_same.get(unit.name))
        return True

    def _digests_of(self, units: Sequence[Unit]) -> dict[str, str]:
        """Return the digests of the stored units that have the names of these."""
        names = [unit.name for unit in units]
        stored = self._stored.units_named(units[0].kind, units[0].tenant, names)
        return {unit.name: digest_of(unit) for unit in stored}

    def _store_alone(self, unit: Unit) -> None:
        try:
            stored = self._store(unit)
        except (InvalidPayload, LimitExceeded) as exc:
            self._refuse(unit, f"cannot be imported: {exc}", at=self._position)
        except IntegrityFault as exc:
            self._refuse(unit, f"cannot be imported: {exc}")
        except _CAUSED_BY_DATA as exc:
            # A rule of this module is missing, but the other units can be imported.
            self._refuse(unit, f"cannot be imported: {type(exc).__name__} for one of its values")
        except IntegrityError as exc:
            # Another import may have stored the same unit since it was looked up.
            is_identical = self._is_identical(unit)
            if is_identical is None:
                self._refuse(unit, f"cannot be imported: {_refusal(exc)}")
            else:
                self._settle(unit, is_identical)
        else:
            self.summary.records.update(stored or ())
            self._settle(unit, None if stored else stored is not None)

    def _settle(self, unit: Unit, is_identical: bool | None) -> None:
        """Count a unit that is stored now, or report one that differs from the stored one.

        ``is_identical`` compares it with the one that was stored before, and is ``None`` if there was none.
        """
        if is_identical is False:
            self._refuse(unit, "is stored already, and differs; it was not changed")
            return
        (self.summary.identical if is_identical else self.summary.imported)[unit.kind] += 1
        self._tell()

    def _refuse(self, unit: Unit, text: str, *, at: int = 0) -> None:
        self._problem(unit, text, at=at)
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.summary)

    def _store(self, unit: Unit) -> Counts | None:
        """Return the written rows: none if the unit is already stored, or ``None`` if a different one is."""
        if unit.kind == "locks":
            return self._raise_tokens(unit)
        if unit.kind == "tenant_rows":
            return self._merge(unit)
        is_identical = self._is_identical(unit)
        if is_identical is None:
            written: Counts = self._transact(partial(self._insert_checked, [unit]))
            return written
        return Counter() if is_identical else None

    def _is_identical(self, unit: Unit) -> bool | None:
        """Return whether the stored unit of the same name is identical; ``None`` if there is none."""
        if unit.kind == "tenant_rows":
            return None
        stored = self._digests_of([unit]).get(unit.name)
        return None if stored is None else stored == digest_of(unit)

    def _insert_checked(self, units: Sequence[Unit]) -> Counts:
        written = self._insert(units)
        if self._reads_back:
            read = self._digests_of(units)
            if any(read.get(unit.name) != digest_of(unit) for unit in units):
                raise IntegrityFault("The data that was read back differs from the data that was written.")
        return written

    def _insert(self, units: Sequence[Unit]) -> Counts:
        """Insert units of one kind and tenant, and return the number of rows by their record."""
        counts: Counts = Counter()
        known = formats()
        parts = [_Parts(unit, self._counted(unit), known, self._limits) for unit in units]
        heads = [each.read_head() for each in parts]
        if (kind := units[0].kind) != "kept_usage":
            for each, row in zip(parts, _create(self._db.alias, known[kind].model, heads), strict=True):
                each.key = row.pk
                if kind == "session" and row.root_session_id not in (None, each.unit.name):
                    named_only = replace(each.unit, records=lambda: iter(()))
                    self._roots.setdefault((each.unit.tenant, row.root_session_id), named_only)
            counts[kind] = len(heads)
        counts.update(self._insert_parts(parts, list(known.values())))
        self._position = 0
        current = [Session(pk=each.key, current_id=each.current_key()) for each in parts if each.current]
        Session.objects.using(self._db.alias).bulk_update(current, ["current"], batch_size=_ROWS)
        return counts

    def _insert_parts(self, parts: Sequence[_Parts], order: Sequence[RecordFormat]) -> Counts:
        """Insert the rows of each unit in their order, and those of one table for several units at once."""
        counts: Counts = Counter()
        batches = {each: each.batches() for each in parts}
        waiting = {each: batch for each in parts if (batch := next(batches[each], None)) is not None}
        while waiting:
            table = min((table for table, _ in waiting.values()), key=order.index)
            chosen = {each: rows for each, (found, rows) in waiting.items() if found is table}
            if table.model is UsageEntry:
                self._insert_usage(chosen)
            else:
                created = iter(_create(self._db.alias, table.model, chain.from_iterable(chosen.values())))
                for each, rows in chosen.items():
                    each.note(list(islice(created, len(rows))))
            for each, rows in chosen.items():
                counts[table.record] += len(rows)
                if (batch := next(batches[each], None)) is None:
                    del waiting[each]
                else:
                    waiting[each] = batch
        return counts

    def _insert_usage(self, chosen: Mapping[_Parts, Sequence[_Values]]) -> None:
        """Insert usage entries. A session takes back those that were kept when it was deleted."""
        tenant = next(iter(chosen)).unit.tenant
        entries = UsageEntry.objects.using(self._db.alias)
        owners = {each.unit.name: each for each in chosen if each.key is not None}
        ids = [values["entry_id"] for each in owners.values() for values in chosen[each]]
        kept = entries.filter(tenant=tenant, recorded_for__in=owners, session=None, entry_id__in=ids)
        found = {(row.recorded_for, row.entry_id): row for row in kept} if owners else {}
        new = []
        for each, rows in chosen.items():
            same = []
            for values in rows:
                row = found.get((each.unit.name, values["entry_id"]))
                if row is not None and _is_row(row, values):
                    same.append(row.pk)
                else:
                    new.append(values)
            if same:
                entries.filter(pk__in=same).update(session=each.key, tree_id=None)
        created = _create(self._db.alias, UsageEntry, new)
        if not self._is_trusted:
            add_usage(Database(self._db.alias, tenant), [row.pk for row in created])

    # --- Locks -------------------------------------------------------------------------------------

    def _raise_tokens(self, unit: Unit) -> Counts:
        records = enumerate(self._counted(unit))
        next(records)
        raised = 0
        while batch := list(islice(records, _ROWS)):
            locks = [values for _, values in self._readable(unit, format_of(declared(Lock)), batch)]
            raised += self._transact(partial(self._raise_batch, unit, locks))
        return Counter({"lock": raised} if raised else {})

    def _raise_batch(self, unit: Unit, locks: Sequence[Mapping[str, Any]]) -> int:
        raised, held = 0, []
        for lock in locks:
            parameters = {"tenant": unit.tenant, **lock}
            if self._db.execute(RAISE_TOKEN, parameters):
                raised += 1
            elif self._db.execute(TOKEN, parameters)[0][0] < lock["token"]:
                held.append(lock["name"])
        for name in held:
            self._problem(
                unit, f"has a higher token for {shown_id(name)}, which is held here: run it again later"
            )
        return raised

    # --- Rows of a tenant --------------------------------------------------------------------------

    def _merge(self, unit: Unit) -> Counts:
        """Add the rows that are not stored. Sessions share them, so often only some are new."""
        records = enumerate(self._counted(unit))
        next(records)
        added, differing = 0, 0
        table = next((each for each in tables("tenant") if each.record == unit.name), None)
        if table is None:
            raise InvalidPayload(path="/of", reason="no app in INSTALLED_APPS has registered this table")
        while batch := list(islice(records, _ROWS)):
            readable = [record for record, _ in self._readable(unit, format_of(table), batch)]
            merged = self._transact(partial(self._merge_batch, unit, readable))
            added, differing = added + merged[0], differing + merged[1]
        if differing:
            self._problem(
                unit, f"have {differing} rows that are stored already, and differ; they stay as they are"
            )
        return Counter({unit.name: added} if added else {})

    def _merge_batch(self, unit: Unit, batch: Sequence[Record]) -> tuple[int, int]:
        if self._is_trusted or unit.name not in (_BUDGETS, _COUNTERS):
            return _merge_rows(self._db, unit, batch, self._limits)
        if unit.name == _COUNTERS:
            # Only the usage in this database counts.
            return _merge_rows(self._db, unit, [record | _NOTHING for record in batch], self._limits)[0], 0
        merged = _merge_rows(self._db, unit, batch, self._limits)
        for record in batch:
            count_again(Database(self._db.alias, unit.tenant), record["name"])
        return merged

    def _readable(
        self, unit: Unit, table: RecordFormat, records: Iterable[tuple[int, Record]]
    ) -> list[tuple[Record, dict[str, Any]]]:
        """Return numbered records of independent rows with their values; each of the others is a problem."""
        found = []
        for at, record in records:
            try:
                if record["record"] != table.record:
                    raise InvalidPayload(path="/record", reason=f"expected a {table.record}")
                found.append((record, table.values_of(record, self._limits)))
            except (InvalidPayload, LimitExceeded) as exc:
                self._problem(unit, f"has a row that cannot be imported: {exc}", at=at)
        return found

    def note_missing_roots(self) -> None:
        """Report trees whose root is not stored, because their sessions could not ask a person anything."""
        for start in range(0, len(roots := list(self._roots.items())), _ROWS):
            some = dict(roots[start : start + _ROWS])
            tenants, names = {tenant for tenant, _ in some}, {root_id for _, root_id in some}
            stored = Session.objects.using(self._db.alias).filter(tenant__in=tenants, session_id__in=names)
            found: set[tuple[str, str]] = self._db.query(
                partial(set, stored.values_list("tenant", "session_id"))
            )
            for (tenant, root_id), unit in some.items():
                if (tenant, root_id) not in found:
                    self._problem(unit, f"belongs to the tree of {shown_id(root_id)}, which is not stored")

    # --- Problems ----------------------------------------------------------------------------------

    def _counted(self, unit: Unit) -> Iterator[Record]:
        """Yield the records of a unit; each is on the line after the previous one."""
        self._position = 0
        for record in unit.records():
            yield record
            self._position += 1

    def _problem(self, unit: Unit, text: str, *, at: int = 0) -> None:
        line = None if unit.line is None else unit.line + at
        self.summary.problems.append(Problem(text=f"the {unit} {text}", line=line))


class _Taken:
    """Small units of one kind and tenant, to be stored together, with their records in memory."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self._names: set[str] = set()
        self._records = 0
        self._characters = 0

    def add(self, unit: Unit) -> bool:
        """Add a unit, and return whether it belongs to the others and there was room for it."""
        if unit.kind not in _TOGETHER or len(self.units) == _UNITS_TOGETHER or unit.name in self._names:
            return False
        if any((each.kind, each.tenant) != (unit.kind, unit.tenant) for each in self.units[:1]):
            return False
        records, characters = [], self._characters
        try:
            for record in unit.records():
                records.append(record)
                characters += sum(len(str(value)) for value in record.values())
                if self._records + len(records) > _RECORDS_TOGETHER or characters > _CHARACTERS:
                    return False
        except _REFUSED:
            return False
        self.units.append(replace(unit, records=partial(iter, records)))
        self._names.add(unit.name)
        self._records += len(records)
        self._characters = characters
        return True


class _Parts:
    """The rows of a unit, and the keys of the checkpoints that other rows name."""

    def __init__(
        self,
        unit: Unit,
        records: Iterator[Record],
        known: Mapping[str, RecordFormat],
        limits: Limits | None,
    ) -> None:
        self.unit = unit
        self.key: int | None = None
        self.current: Reference | None = None
        self._records = records
        self._formats = known
        self._limits = limits
        self._current_key: int | None = None
        self._bases: dict[Reference, int] = {}

    def read_head(self) -> _Values:
        """Read the first record: the columns of the session or stream, or none for kept usage."""
        head = next(self._records)
        if self.unit.kind == "kept_usage":
            return {}
        table = self._formats[self.unit.kind]
        values = table.values_of(head, self._limits)
        self.current = table.reference_of(head)
        return values

    def batches(self) -> Iterator[tuple[RecordFormat, list[_Values]]]:
        """Yield the rows behind the first one, some of one table at a time. Insert and `note` each batch."""
        table: RecordFormat | None = None
        rows: list[_Values] = []
        characters = 0
        for record in self._records:
            found = self._formats[record["record"]]
            values = {**found.values_of(record, self._limits), found.parent: self.key}
            self._check_owner(values)
            base = found.reference_of(record)
            is_full = len(rows) == _ROWS or characters > _CHARACTERS
            if table is not None and (
                found is not table or is_full or (base is not None and base not in self._bases)
            ):
                yield table, rows
                rows, characters = [], 0
            if base is not None:
                values["base_id"] = _found(self._bases.get(base), "/base")
            table = found
            rows.append(values)
            characters += sum(len(value) for value in values.values() if isinstance(value, str | bytes))
        if table is not None:
            yield table, rows

    def note(self, rows: Iterable[Model]) -> None:
        """Keep the keys of inserted checkpoints."""
        for row in rows:
            if isinstance(row, Checkpoint):
                reference = (row.kind, row.namespace, row.version)
                if row.base_id is None and row.kind in _BASE_KINDS:
                    self._bases[reference] = row.pk
                if reference == self.current:
                    self._current_key = row.pk

    def current_key(self) -> int:
        """Return the key of the current state's checkpoint. Raises `InvalidPayload`."""
        return _found(self._current_key, "/current")

    def _check_owner(self, values: _Values) -> None:
        """Check the tenant and session of usage, which holds both because it outlives its session."""
        for name, owner in (("tenant", self.unit.tenant), ("recorded_for", self.unit.name)):
            if values.get(name, owner) != owner:
                raise InvalidPayload(path=f"/{name}", reason="the record belongs to something else")


def _is_row(row: Model, values: Mapping[str, Any]) -> bool:
    """Compare the columns that an entry has both with its session and without it."""
    compared = (name for name in values if name not in ("session_id", "tree_id"))
    return all(getattr(row, name) == values[name] for name in compared)


def _found(key: int | None, path: str) -> int:
    if key is None:
        raise InvalidPayload(path=path, reason="the session has no such checkpoint before this record")
    return key


def _create(alias: str, model: type[Model], rows: Iterable[_Values]) -> list[Any]:
    new = [model(**values) for values in rows]
    return model._base_manager.using(alias).bulk_create(new, batch_size=_ROWS)


def _refusal(error: IntegrityError) -> str:
    name = violated_constraint(error)
    by = "a constraint of the database" if name is None else f"the constraint {name}"
    return f"{by} refused a row, because of stored data or because a value is not allowed"


# --- Rows of a tenant ---------------------------------------------------------------------------------


def _merge_rows(
    db: Database, unit: Unit, records: Sequence[Record], limits: Limits | None
) -> tuple[int, int]:
    """Store missing rows, and return how many were added and how many differ from stored ones.

    Call this in a transaction. Raises `InvalidPayload`.
    """
    table = next(each for each in tables("tenant") if each.record == unit.name)
    model, order, format_ = table.model, table.order, format_of(table)
    rows = {_order_key(record, order): format_.values_of(record, limits) for record in records}
    wanted = with_order_keys(unit.tenant, order, list(rows.values()))
    before = _stored(db, format_, order, wanted)
    new = [model(tenant=unit.tenant, **values) for key, values in rows.items() if key not in before]
    model._base_manager.using(db.alias).bulk_create(new, ignore_conflicts=True)
    # Another import may have stored the same row in the meantime.
    after = _stored(db, format_, order, wanted) if new else before
    # SQLite leaves out a row for which any constraint fails, not only one that is stored already.
    if refused := [key for key in rows if key not in after]:
        shown = ", ".join(map(shown_id, map(str, refused[0])))
        raise IntegrityFault(f"The database refused the row {shown} because of a constraint.")
    differing = sum(after[_order_key(record, order)] != record for record in records)
    return len(new), differing


def _order_key(record: Record, order: tuple[str, ...]) -> _OrderKey:
    return tuple(record.get(name) for name in order)


def with_order_keys(tenant: str, order: tuple[str, ...], rows: Sequence[Mapping[str, Any]]) -> Q:
    """Return the condition that selects the rows with these values in the identifying columns."""
    if len(order) == 1:
        (name,) = order
        return Q(**{"tenant": tenant, f"{name}__in": [values[name] for values in rows]})
    keys = Q()
    for values in rows:
        keys |= Q(**{name: values[name] for name in order})
    return Q(tenant=tenant) & keys


def _stored(
    db: Database, format_: RecordFormat, order: tuple[str, ...], wanted: Q
) -> dict[_OrderKey, Record]:
    found = format_.model._base_manager.using(db.alias).filter(wanted).values_list(*format_.selected)
    records = [format_.record_of(values, None) for values in found]
    return {_order_key(record, order): record for record in records}
