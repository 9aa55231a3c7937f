"""Rows of a tenant, which an import adds to those that are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db.models import Q

from helix_store.app_tables import registered_tables
from helix_store.engine.database import Database
from helix_store.exceptions import InvalidPayload
from helix_store.transfer.columns import Table
from helix_store.transfer.layout import app_part
from helix_store.transfer.records import Record, Unit

__all__ = ["merge_rows"]

_Place = tuple[Any, ...]


def merge_rows(db: Database, unit: Unit, records: Sequence[Record]) -> tuple[int, int]:
    """Store the rows that are not there. Returns how many were added, and how many differ from stored ones.

    Call in a transaction. Raises `InvalidPayload`.
    """
    part = next((app_part(each) for each in registered_tables("tenant") if each.record == unit.name), None)
    if part is None or any(record["record"] != unit.name for record in records):
        raise InvalidPayload(path="/of", reason="no app in INSTALLED_APPS has registered this table")
    rows = {_place(record, part.order): part.table.values_of(record) for record in records}
    wanted = _wanted(unit.tenant, part.order, list(rows.values()))
    model = part.table.model
    before = _stored(db, part.table, part.order, wanted)
    new = [model(tenant=unit.tenant, **values) for place, values in rows.items() if place not in before]
    model._base_manager.using(db.alias).bulk_create(new, ignore_conflicts=True)
    # Another import may have stored the same row in the meantime.
    after = _stored(db, part.table, part.order, wanted) if new else before
    differing = sum(after.get(_place(record, part.order)) != record for record in records)
    return len(new), differing


def _place(record: Record, order: tuple[str, ...]) -> _Place:
    return tuple(record.get(name) for name in order)


def _wanted(tenant: str, order: tuple[str, ...], rows: Sequence[Mapping[str, Any]]) -> Q:
    if len(order) == 1:
        (name,) = order
        return Q(**{"tenant": tenant, f"{name}__in": [values[name] for values in rows]})
    places = Q()
    for values in rows:
        places |= Q(**{name: values[name] for name in order})
    return Q(tenant=tenant) & places


def _stored(db: Database, table: Table, order: tuple[str, ...], wanted: Q) -> dict[_Place, Record]:
    found = table.model._base_manager.using(db.alias).filter(wanted).values_list(*table.selected)
    records = [table.record_of(values, None) for values in found]
    return {_place(record, order): record for record in records}
