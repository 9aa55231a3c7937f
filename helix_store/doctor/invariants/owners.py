"""Invariants of ownership: every row has its owner, and a stream has the chunks that its head claims."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django.db.models import Exists, Max, Min, Model, OuterRef

from helix_store.catalogue.cascades import cascades_of
from helix_store.doctor import sql
from helix_store.doctor.findings import Fault
from helix_store.doctor.registry import by_statement, each, fault, over
from helix_store.doctor.scope import Scope, fetched, read_keys
from helix_store.engine.database import Database
from helix_store.models import Session, Stream, UsageEntry

__all__ = ["CHECKS", "CHILDREN", "stream_faults", "table_of"]

CHILDREN: Final = tuple(
    (relation.related_model, relation.field.attname, owner)
    for owner in (Session, Stream)
    for relation in cascades_of(owner)
)
"""Every table whose rows are deleted with their owner, its foreign key column, and the owner."""


def table_of(model: type[Model]) -> str:
    """Return the name of a table without its prefix."""
    return model._meta.db_table.removeprefix(Session._meta.db_table.removesuffix("session"))


@over("orphan-row")
def orphans(scope: Scope) -> Iterator[Fault]:
    """Yield rows without an owner. They belong to no tenant, so only a check of all tenants finds them."""
    if scope.is_narrowed:
        return
    for model, column, owner in CHILDREN:
        for key, owner_key in _orphans(scope, model, column, owner):
            sample = f"{key} of {table_of(owner)} {owner_key}"
            yield fault("orphan-row", table_of(model), None, None, sample, key=key)


def _orphans(scope: Scope, model: Any, column: str, owner: Any) -> Iterator[tuple[int, int]]:
    rows = scope.all_rows(model)
    ends = scope.db.query(lambda: rows.aggregate(first=Min("pk"), last=Max("pk")))
    if ends["first"] is None:
        return
    known = scope.all_rows(owner).filter(pk=OuterRef(column))
    # Use key ranges, not pages: most rows have an owner, so a page of orphans could be the whole table.
    for start in range(ends["first"], ends["last"] + 1, scope.page_size):
        page = rows.filter(~Exists(known), pk__gte=start, pk__lt=start + scope.page_size)
        found = fetched(scope.db, page.order_by("pk").values_list("pk", column))
        yield from found
        scope.after_page(scope.page_size)


@each(Stream, "stream-last-off", "stream-floor-off", "stream-hole")
def streams(db: Database, keys: list[int]) -> Iterator[Fault]:
    for tenant, name, key, *numbers in read_keys(db, sql.STREAMS, keys):
        for rule in stream_faults(*numbers):
            table = "stream" if rule != "stream-hole" else "stream_chunk"
            yield fault(rule, table, tenant, name, key=key)


def stream_faults(
    floor: int, last_sequence: int, number: int, first: int | None, last: int | None
) -> Iterator[str]:
    """Yield the rules that a stream's head breaks, given the number of its chunks, the first and the last."""
    newest = floor if last is None else last
    if last_sequence != newest:
        yield "stream-last-off"
    if floor < 0 or floor > max(last_sequence, newest) or (first is not None and first <= floor):
        yield "stream-floor-off"
    elif number and number != newest - floor:
        yield "stream-hole"


CHECKS: Final = (
    orphans,
    by_statement("usage-of-unknown-session", UsageEntry, "usage_entry", sql.USAGE_OF_UNKNOWN_SESSION),
    streams,
)
