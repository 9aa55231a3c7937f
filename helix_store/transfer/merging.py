"""Merging of a tenant's rows: an import adds them to the stored rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db.models import Q

from helix_store.catalogue import tables
from helix_store.core.limits import Limits
from helix_store.engine.database import Database
from helix_store.exceptions import InvalidPayload
from helix_store.transfer.columns import RecordFormat
from helix_store.transfer.layout import format_of
from helix_store.transfer.records import Record, Unit

_Place = tuple[Any, ...]


def merge_rows(db: Database, unit: Unit, records: Sequence[Record], limits: Limits | None) -> tuple[int, int]:
    """Store missing rows, and return how many were added and how many differ from stored ones.

    Call in a transaction. Raises `InvalidPayload`.
    """
    table = next((each for each in tables("tenant") if each.record == unit.name), None)
    if table is None or any(record["record"] != unit.name for record in records):
        raise InvalidPayload(path="/of", reason="no app in INSTALLED_APPS has registered this table")
    model, order, format_ = table.model, table.order, format_of(table)
    rows = {_place(record, order): format_.values_of(record, limits) for record in records}
    wanted = at_places(unit.tenant, order, list(rows.values()))
    before = _stored(db, format_, order, wanted)
    new = [model(tenant=unit.tenant, **values) for place, values in rows.items() if place not in before]
    model._base_manager.using(db.alias).bulk_create(new, ignore_conflicts=True)
    # Another import may have stored the same row in the meantime.
    after = _stored(db, format_, order, wanted) if new else before
    differing = sum(after.get(_place(record, order)) != record for record in records)
    return len(new), differing


def _place(record: Record, order: tuple[str, ...]) -> _Place:
    return tuple(record.get(name) for name in order)


def at_places(tenant: str, order: tuple[str, ...], rows: Sequence[Mapping[str, Any]]) -> Q:
    """Return the condition for the rows with these values in the columns that distinguish them."""
    if len(order) == 1:
        (name,) = order
        return Q(**{"tenant": tenant, f"{name}__in": [values[name] for values in rows]})
    places = Q()
    for values in rows:
        places |= Q(**{name: values[name] for name in order})
    return Q(tenant=tenant) & places


def _stored(db: Database, format_: RecordFormat, order: tuple[str, ...], wanted: Q) -> dict[_Place, Record]:
    found = format_.model._base_manager.using(db.alias).filter(wanted).values_list(*format_.selected)
    records = [format_.record_of(values, None) for values in found]
    return {_place(record, order): record for record in records}
