"""Import of units into a database, each in one transaction, without ever overwriting stored data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final

from django.core.exceptions import ObjectDoesNotExist
from django.db import DataError, IntegrityError
from django.db.models import Model, Q

from helix_store.budgets import count_again
from helix_store.catalogue import declared, tables
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

_OrderKey = tuple[Any, ...]

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
    """Store units, each in one transaction, and return a summary. A repeat stores nothing twice.

    Units that are already stored are compared: an identical unit is skipped; a different one is a problem,
    and nothing changes. Only the token of a free lock is raised to the unit's token. A unit that the database
    refuses is also a problem, but does not stop the import. With a ``tenant``, units of other tenants are
    left out. ``progress`` is called after each unit, and ``is_stopped`` before each. With ``reads_back``, a
    unit is stored only if it can be read back as it was written. ``transact`` runs the transactions. Budgets
    count the usage that is stored.

    Ids, strings and payloads must be values that the stores currently accept. Units that are ``is_trusted``
    come from another database of the project, where limits may have been larger when they were stored. They
    are all of the tenant's data, so the counters of its budgets are stored unchanged.
    """
    db = Database(using, tenant or "")
    importer = _Importer(db, transact, reads_back=reads_back, is_trusted=is_trusted)
    for unit in units:
        if is_stopped is not None and is_stopped():
            return importer.summary
        if tenant is not None and unit.tenant != tenant:
            importer.summary.other_tenants += 1
        else:
            importer.store(unit)
        if progress is not None:
            progress(importer.summary)
    importer.note_missing_roots()
    importer.summary.is_complete = True
    return importer.summary


class _Importer:
    def __init__(
        self,
        db: Database,
        transact: Callable[[Database, Callable[[], Any]], Any],
        *,
        reads_back: bool,
        is_trusted: bool,
    ) -> None:
        self._db = db
        self._transact = partial(transact, db)
        self._reads_back = reads_back
        self._is_trusted = is_trusted
        self._limits = None if is_trusted else db.limits
        self._roots: dict[tuple[str, str], Unit] = {}
        self._stored = DatabaseSource(db.alias, tenant=db.tenant or None)
        self._position = 0
        self.summary = ImportSummary()

    def store(self, unit: Unit) -> None:
        try:
            stored = self._store(unit)
        except (InvalidPayload, LimitExceeded) as exc:
            self._problem(unit, f"cannot be imported: {exc}", at=self._position)
            return
        except IntegrityFault as exc:
            self._problem(unit, f"cannot be imported: {exc}")
            return
        except _CAUSED_BY_DATA as exc:
            # A rule of this module is missing, but the other units can be imported.
            self._problem(unit, f"cannot be imported: {type(exc).__name__} for one of its values")
            return
        except IntegrityError as exc:
            # Another import may have stored the same unit since it was looked up.
            is_identical = self._is_identical(unit)
            if is_identical is None:
                self._problem(unit, f"cannot be imported: {_refusal(exc)}")
                return
            stored = Counter() if is_identical else None
        if stored is None:
            self._problem(unit, "is stored already, and differs; it was not changed")
        elif stored:
            self.summary.imported[unit.kind] += 1
            self.summary.records.update(stored)
        else:
            self.summary.identical[unit.kind] += 1

    def _store(self, unit: Unit) -> Counts | None:
        """Return the written rows: none if the unit is already stored, or ``None`` if a different one is."""
        if unit.kind == "locks":
            return self._raise_tokens(unit)
        if unit.kind == "tenant_rows":
            return self._merge(unit)
        is_identical = self._is_identical(unit)
        if is_identical is None:
            written: Counts = self._transact(partial(self._insert_checked, unit))
            return written
        return Counter() if is_identical else None

    def _is_identical(self, unit: Unit) -> bool | None:
        """Return whether the stored unit of the same name is identical; ``None`` if there is none."""
        if unit.kind == "tenant_rows":
            return None
        stored = self._stored.unit(unit.kind, unit.tenant, unit.name)
        return None if stored is None else digest_of(stored) == digest_of(unit)

    def _insert_checked(self, unit: Unit) -> Counts:
        written = self._insert(unit)
        if self._reads_back and not self._is_identical(unit):
            raise IntegrityFault("The data that was read back differs from the data that was written.")
        return written

    def _insert(self, unit: Unit) -> Counts:
        records = self._counted(unit)
        head = next(records)
        rows = _Rows(self._db, unit, self._limits, is_counted=not self._is_trusted)
        if unit.kind == "kept_usage":
            rows.add_all(records)
            return rows.counts
        table = formats()[unit.kind]
        (row,) = _create(self._db.alias, table.model, [table.values_of(head, self._limits)])
        rows.key, rows.current = row.pk, table.reference_of(head)
        if unit.kind == "session" and row.root_session_id not in (None, unit.name):
            self._roots.setdefault((unit.tenant, row.root_session_id), unit)
        rows.add_all(records)
        if rows.current is not None:
            self._position = 0
            Session.objects.using(self._db.alias).filter(pk=row.pk).update(current=rows.current_key())
        return rows.counts + Counter({unit.kind: 1})

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
        for (tenant, root_id), unit in self._roots.items():
            root = Session.objects.using(self._db.alias).filter(tenant=tenant, session_id=root_id)
            if not self._db.query(root.exists):
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


@dataclass(eq=False)
class _Rows:
    """The rows of a unit, inserted in batches, and the keys of the checkpoints that other rows name."""

    db: Database
    unit: Unit
    limits: Limits | None
    is_counted: bool
    key: int | None = None
    current: Reference | None = None
    counts: Counts = field(init=False, default_factory=Counter)
    _current_key: int | None = field(init=False, default=None)
    _bases: dict[Reference, int] = field(init=False, default_factory=dict)
    _table: RecordFormat | None = field(init=False, default=None)
    _waiting: list[dict[str, Any]] = field(init=False, default_factory=list)
    _characters: int = field(init=False, default=0)

    def add_all(self, records: Iterable[Record]) -> None:
        known = formats()
        for record in records:
            self._add(known[record["record"]], record)
        self._flush()

    def current_key(self) -> int:
        """Return the key of the current state's checkpoint. Raises `InvalidPayload`."""
        return _found(self._current_key, "/current")

    def _add(self, table: RecordFormat, record: Record) -> None:
        values = {**table.values_of(record, self.limits), table.parent: self.key}
        self._check_owner(values)
        base = table.reference_of(record)
        if table is not self._table or len(self._waiting) == _ROWS or self._characters > _CHARACTERS:
            self._flush()
        if base is not None:
            if base not in self._bases:
                self._flush()
            values["base_id"] = _found(self._bases.get(base), "/base")
        self._table = table
        self._waiting.append(values)
        self._characters += sum(len(value) for value in values.values() if isinstance(value, str | bytes))
        self.counts[table.record] += 1

    def _check_owner(self, values: Mapping[str, Any]) -> None:
        """Check the tenant and session of usage, which holds both because it outlives its session."""
        for name, owner in (("tenant", self.unit.tenant), ("recorded_for", self.unit.name)):
            if values.get(name, owner) != owner:
                raise InvalidPayload(path=f"/{name}", reason="the record belongs to something else")

    def _flush(self) -> None:
        if self._table is not None and self._waiting:
            waiting = self._without_kept() if self._table.model is UsageEntry else self._waiting
            rows = _create(self.db.alias, self._table.model, waiting)
            if self._table.model is UsageEntry and self.is_counted:
                add_usage(Database(self.db.alias, self.unit.tenant), [row.pk for row in rows])
            if self._table.model is Checkpoint:
                for row in rows:
                    reference = (row.kind, row.namespace, row.version)
                    if row.base_id is None and row.kind in _BASE_KINDS:
                        self._bases[reference] = row.pk
                    if reference == self.current:
                        self._current_key = row.pk
        self._waiting = []
        self._characters = 0

    def _without_kept(self) -> list[dict[str, Any]]:
        """Return the usage entries to insert. The session takes back entries kept at its deletion."""
        key = self.key
        if key is None:
            return self._waiting
        entry_ids = [values["entry_id"] for values in self._waiting]
        kept = UsageEntry.objects.using(self.db.alias).filter(
            tenant=self.unit.tenant, recorded_for=self.unit.name, session=None, entry_id__in=entry_ids
        )
        found = {row.entry_id: row for row in kept}
        new, same = [], []
        for values in self._waiting:
            row = found.get(values["entry_id"])
            if row is not None and _is_row(row, values):
                same.append(row.pk)
            else:
                new.append(values)
        if same:
            UsageEntry.objects.using(self.db.alias).filter(pk__in=same).update(session=key, tree_id=None)
        return new


def _is_row(row: Model, values: Mapping[str, Any]) -> bool:
    """Compare the columns that an entry has both with its session and without it."""
    compared = (name for name in values if name not in ("session_id", "tree_id"))
    return all(getattr(row, name) == values[name] for name in compared)


def _found(key: int | None, path: str) -> int:
    if key is None:
        raise InvalidPayload(path=path, reason="the session has no such checkpoint before this record")
    return key


def _create(alias: str, model: type[Model], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    return model._base_manager.using(alias).bulk_create([model(**values) for values in rows])


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
