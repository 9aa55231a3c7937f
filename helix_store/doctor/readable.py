"""Checks that the code can read what is stored: payloads, envelopes, deltas, typed values and words.

They include the checks that tables declare.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import repeat
from typing import Any, Final

from django.db.models import Model, QuerySet

from helix_store.catalogue import Table, declared, tables
from helix_store.checkpointers.graph.payloads import checkpoint_values
from helix_store.core import typed_json
from helix_store.core.payloads import decode, decode_object
from helix_store.core.types import SessionStatus
from helix_store.doctor import sql
from helix_store.doctor.checks import (
    Check,
    Scope,
    by_statement,
    each,
    fault,
    fetched,
    over,
    read_keys,
    table_of,
)
from helix_store.doctor.findings import Fault
from helix_store.engine.database import Database
from helix_store.engine.paging import keyset_pages
from helix_store.exceptions import IntegrityFault
from helix_store.models import Checkpoint, CheckpointKind, Session, Stream
from helix_store.models.fields import PayloadField
from helix_store.sessions.deltas import decode_with_delta
from helix_store.sessions.layout import HEAD_FIELDS, JSON_COLUMNS
from helix_store.sessions.reading import checkpoint_state, current_state

_PAGE: Final = 50
"""The maximum number of rows whose payloads are in memory at once: each may be as long as the limits."""

_SOUND_ENVELOPE: Final = '{"agent_type":"any","status":"active"}'


def _can_read(read: Callable[[], Any]) -> bool:
    """Return whether stored text is readable by ``read``, which raises `IntegrityFault` for faulty text."""
    try:
        read()
    except IntegrityFault:
        return False
    return True


# --- Sessions ----------------------------------------------------------------------------------------


@each(Session, "unreadable-columns", "unreadable-typed-values")
def heads(db: Database, keys: list[int]) -> Iterator[Fault]:
    for tenant, name, key, tags, metadata, typed, *texts in read_keys(db, sql.HEAD_TEXTS, keys):
        if typed is not None and not _can_read(partial(_typed_object, typed)):
            yield fault("unreadable-typed-values", "session", tenant, name, key=key)
        columns = dict.fromkeys(HEAD_FIELDS) | {"tags": tags, "metadata": metadata}
        columns |= dict(zip(JSON_COLUMNS, texts, strict=True))
        if not _can_read(partial(_read_head, columns)):
            yield fault("unreadable-columns", "session", tenant, name, key=key)


def _read_head(columns: dict[str, Any]) -> None:
    """Read the columns as a load does, but together with a sound state."""
    try:
        documents = {name: json.loads(columns[name]) for name in ("tags", "metadata")}
    except ValueError as exc:
        raise IntegrityFault from exc
    current_state({**columns, **documents, "status": SessionStatus.ACTIVE}, "{}", _SOUND_ENVELOPE)


def _typed_object(text: str) -> None:
    if type(typed_json.loads(text)) is not dict:
        raise IntegrityFault


# --- Rows --------------------------------------------------------------------------------------------


@each(Stream, "unreadable-payload")
def streams(db: Database, keys: list[int]) -> Iterator[Fault]:
    heads = Stream.objects.using(db.alias).filter(pk__in=keys).order_by("pk")
    columns = ("tenant", "stream_id", "pk", "output", "error")
    for tenant, name, key, *texts in fetched(db, heads.values_list(*columns)):
        if any(text is not None and not _can_read(partial(decode, text)) for text in texts):
            yield fault("unreadable-payload", "stream", tenant, name, key=key)


def _place_of(place: tuple[Any, ...]) -> str:
    """Return the values that distinguish a row from the other rows of its owner."""
    return " ".join(map(str, place[1:]))


_Row = tuple[tuple[Any, ...], tuple[Any, ...]]


def _rows_of(scope: Scope, model: type[Model], parent: str, keys: list[int]) -> QuerySet[Any]:
    """Return the rows of these owners, in a form that uses the model's unique index."""
    bounds = {f"{parent}__in": keys, f"{parent}__gte": min(keys), f"{parent}__lte": max(keys)}
    return scope.all_rows(model).filter(**bounds)


def _paged(
    scope: Scope, rows: QuerySet[Any], order: tuple[str, ...], columns: tuple[str, ...]
) -> Iterator[_Row]:
    """Yield the position of each row in an order and its columns, one page of payloads at a time."""
    for page in keyset_pages(scope.db, rows, order, *columns, sizes=repeat(_PAGE)):
        for row in page:
            yield row[len(columns) :], row[: len(columns)]
        scope.after_page(len(page))


# --- States ------------------------------------------------------------------------------------------


@over("unreadable-payload", "unreadable-envelope", "unreadable-typed-values", "delta-misfit")
def states(scope: Scope) -> Iterator[Fault]:
    columns = ("session__tenant", "session__session_id", "payload", "envelope", "base_id", "base__payload")
    order = ("kind", "namespace", "version")
    for keys in scope.pages(Session):
        rows = _rows_of(scope, Checkpoint, "session_id", keys)
        for place, (tenant, name, *texts) in _paged(scope, rows, ("session_id", *order), columns):
            rule = _broken_rule(place[1], *texts)
            if rule is not None:
                yield fault(rule, "checkpoint", tenant, name, _place_of(place))


def _broken_rule(kind: str, payload: str, envelope: str, base_id: int | None, base: str | None) -> str | None:
    """Return the rule that a row's columns break. An unreadable or missing base is a fault of another row."""
    if kind == CheckpointKind.GRAPH:
        return None if _can_read(partial(checkpoint_values, payload)) else "unreadable-typed-values"
    if kind == CheckpointKind.SNAPSHOT:
        return None if _can_read(partial(decode_object, payload)) else "unreadable-payload"
    if not _can_read(partial(decode_object, payload)):
        return "unreadable-payload"
    if kind != CheckpointKind.BASE and not _can_read(partial(_read_envelope, envelope)):
        return "unreadable-envelope"
    if base_id is None or base is None or not _can_read(partial(decode_object, base)):
        return None
    return None if _can_read(partial(decode_with_delta, base, payload)) else "delta-misfit"


def _read_envelope(envelope: str) -> None:
    """Read the envelope as that of a checkpoint, together with a sound payload."""
    checkpoint_state(
        "{}",
        envelope,
        session_id="any",
        version=1,
        message_count=0,
        created_at=_ANY_MOMENT,
        updated_at=_ANY_MOMENT,
    )


_ANY_MOMENT: Final = datetime(2000, 1, 1, tzinfo=UTC)

READABLE: Final = (
    by_statement("unknown-word", Session, "checkpoint", sql.UNKNOWN_CHECKPOINT_STATUS),
    heads,
    streams,
    states,
)

# --- Tables ------------------------------------------------------------------------------------------


def declared_checks() -> tuple[Check, ...]:
    """Return the checks of the tables in the catalogue."""
    return tuple(check for table in tables() for check in _checks_of(table))


def _checks_of(table: Table) -> Iterator[Check]:
    fields = table.model._meta.concrete_fields
    payloads = [field.attname for field in fields if isinstance(field, PayloadField)]
    if payloads and table.reads is not None:
        yield _readable(table, payloads, table.reads)
    if table.check is not None:
        yield _own(table)


def _readable(table: Table, payloads: list[str], read: Callable[[str], object]) -> Check:
    parent, names = "pk", [table.parent, "pk"]
    if table.owner is not None:
        parent = table.parent
        owner = table.parent_field.name
        names = [f"{owner}__tenant", f"{owner}__{declared(table.owner).order[0]}"]

    @over("unreadable-payload")
    def check(scope: Scope) -> Iterator[Fault]:
        for keys in _pages(scope, table):
            rows, order = _rows_of(scope, table.model, parent, keys), (table.parent, *table.order)
            for place, (tenant, name, *texts) in _paged(scope, rows, order, (*names, *payloads)):
                if any(text is not None and not _can_read(partial(read, text)) for text in texts):
                    shown = None if table.is_of_tenant else name
                    yield fault("unreadable-payload", table_of(table.model), tenant, shown, _place_of(place))

    return check


def _own(table: Table) -> Check:
    """Return a table's own check as a check for the doctor."""
    of: Any = table.model if table.is_of_tenant else Session
    columns = ("pk", "tenant", "pk" if table.is_of_tenant else "session_id")

    @over("app-rows-unsound")
    def check(scope: Scope) -> Iterator[Fault]:
        for keys in _pages(scope, table):
            found = scope.db.query(partial(_found, table, scope.db, keys))
            rows = of._base_manager.using(scope.db.alias).filter(pk__in={key for key, _ in found})
            owners = {key: owner for key, *owner in fetched(scope.db, rows.values_list(*columns))}
            for key, text in found:
                tenant, name = owners.get(key, (None, None))
                shown = None if table.is_of_tenant else name
                yield fault("app-rows-unsound", table_of(table.model), tenant, shown, text, key=key)

    return check


def _found(table: Table, db: Database, keys: list[int]) -> list[tuple[int, str]]:
    return [] if table.check is None else list(table.check(db, keys))


def _pages(scope: Scope, table: Table) -> Iterator[list[int]]:
    """Yield the keys of owners, or of a tenant's own rows, which belong to no session."""
    if table.owner is not None:
        yield from scope.pages(table.owner)
    elif scope.session_id is None:
        yield from scope.pages(table.model)
