"""Whether stored texts can be read by the code that reads them: payloads, envelopes, deltas, typed values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from django.db.models import QuerySet

from helix_store.checkpointers.graph.payloads import read_checkpoint
from helix_store.checkpointers.snapshots.rules import read_snapshot
from helix_store.core import typed_json
from helix_store.core.payloads import decode, decode_object
from helix_store.core.types import CheckpointSource, SessionStatus
from helix_store.doctor import sql
from helix_store.doctor.findings import Fault
from helix_store.doctor.invariants.owners import table_of
from helix_store.doctor.registry import each, fault, over
from helix_store.doctor.scope import Scope, fetched, read_keys
from helix_store.engine.database import Database
from helix_store.engine.expressions import after_keyset
from helix_store.exceptions import IntegrityFault
from helix_store.models import (
    Checkpoint,
    CheckpointKind,
    Item,
    Message,
    Run,
    Session,
    StagedChange,
    Stream,
    StreamChunk,
    SubSessionRef,
)
from helix_store.sessions.deltas import decode_with_deltas
from helix_store.sessions.layout import HEAD_FIELDS, JSON_COLUMNS
from helix_store.sessions.reading import checkpoint_state, current_state
from helix_store.sessions.requests import decode_staged

__all__ = ["READABLE", "can_read", "paged", "place_of"]

_PAGE: Final = 50
"""Rows with payloads that are in memory at once: each may be as long as the limits allow."""

_SOUND_ENVELOPE: Final = '{"agent_type":"any","status":"active"}'


def can_read(read: Callable[[], Any]) -> bool:
    """Whether stored text can be read by a function that raises `IntegrityFault` for other text."""
    try:
        read()
    except IntegrityFault:
        return False
    return True


# --- Sessions ----------------------------------------------------------------------------------------


@each(Session, "unreadable-columns", "unreadable-typed-values")
def heads(db: Database, keys: list[int]) -> Iterator[Fault]:
    for tenant, name, key, tags, metadata, typed, *texts in read_keys(db, sql.HEAD_TEXTS, keys):
        if typed is not None and not can_read(partial(_typed_object, typed)):
            yield fault("unreadable-typed-values", "session", tenant, name, key=key)
        columns = dict.fromkeys(HEAD_FIELDS) | {"tags": tags, "metadata": metadata}
        columns |= dict(zip(JSON_COLUMNS, texts, strict=True))
        if not can_read(partial(_read_head, columns)):
            yield fault("unreadable-columns", "session", tenant, name, key=key)


def _read_head(columns: dict[str, Any]) -> None:
    """Read the columns as a load does, with a state that is sound."""
    try:
        documents = {name: json.loads(columns[name]) for name in ("tags", "metadata")}
    except ValueError as exc:
        raise IntegrityFault from exc
    current_state({**columns, **documents, "status": SessionStatus.ACTIVE}, "{}", _SOUND_ENVELOPE)


def _typed_object(text: str) -> None:
    if type(typed_json.loads(text)) is not dict:
        raise IntegrityFault


# --- Rows of sessions and streams --------------------------------------------------------------------


@over("unreadable-payload")
def payloads(scope: Scope) -> Iterator[Fault]:
    sessions = ("session__tenant", "session__session_id")
    for model, order, columns, read in (
        (Message, ("sequence",), ("payload",), decode_object),
        (StagedChange, ("step_id", "tool_call_id"), ("payload",), lambda text: decode_staged([text])),
        (Item, ("lane", "id"), ("payload",), decode),
        (Run, ("turn",), ("error",), decode),
        (SubSessionRef, ("sub_session_id",), ("remote", "output", "error"), decode),
    ):
        for place, (tenant, name, *texts) in _rows_of_sessions(scope, model, order, (*sessions, *columns)):
            if any(text is not None and not can_read(partial(read, text)) for text in texts):
                yield fault("unreadable-payload", table_of(model), tenant, name, place_of(place))
    for keys in scope.pages(Stream):
        yield from _stream_payloads(scope, keys)


def _stream_payloads(scope: Scope, keys: list[int]) -> Iterator[Fault]:
    heads = scope.all_rows(Stream).filter(pk__in=keys).order_by("pk")
    columns = ("tenant", "stream_id", "pk", "output", "error")
    for tenant, name, key, *texts in fetched(scope.db, heads.values_list(*columns)):
        if any(text is not None and not can_read(partial(decode, text)) for text in texts):
            yield fault("unreadable-payload", "stream", tenant, name, key=key)
    chunks = scope.all_rows(StreamChunk).filter(stream_id__in=keys)
    named = ("stream__tenant", "stream__stream_id", "payload")
    for place, (tenant, name, text) in paged(scope, chunks, ("stream_id", "sequence"), named):
        if not can_read(partial(decode, text)):
            yield fault("unreadable-payload", "stream_chunk", tenant, name, place_of(place))


def place_of(place: tuple[Any, ...]) -> str:
    """What tells a row from the other rows of its owner."""
    return " ".join(map(str, place[1:]))


_Row = tuple[tuple[Any, ...], tuple[Any, ...]]


def _rows_of_sessions(
    scope: Scope, model: Any, order: tuple[str, ...], columns: tuple[str, ...]
) -> Iterator[_Row]:
    """The rows of the sessions in scope, in the order of the model's unique index."""
    for keys in scope.pages(Session):
        rows = scope.all_rows(model).filter(
            session_id__in=keys, session_id__gte=min(keys), session_id__lte=max(keys)
        )
        yield from paged(scope, rows, ("session_id", *order), columns)


def paged(
    scope: Scope, rows: QuerySet[Any], order: tuple[str, ...], columns: tuple[str, ...]
) -> Iterator[_Row]:
    """The place of each row in an order, and its columns; a page of payloads at a time."""
    ordered, last = rows.order_by(*order), None
    while page := scope.db.query(partial(_page_after, ordered, order, columns, last)):
        for row in page:
            yield row[: len(order)], row[len(order) :]
        scope.after_page(len(page))
        if len(page) < _PAGE:
            return
        last = dict(zip(order, page[-1], strict=False))


def _page_after(
    ordered: QuerySet[Any], order: tuple[str, ...], columns: tuple[str, ...], last: dict[str, Any] | None
) -> list[tuple[Any, ...]]:
    rows = ordered if last is None else ordered.filter(after_keyset(ordered.model, last))
    return list(rows.values_list(*order, *columns)[:_PAGE])


# --- States ------------------------------------------------------------------------------------------


@over("unreadable-payload", "unreadable-envelope", "unreadable-typed-values", "delta-misfit")
def states(scope: Scope) -> Iterator[Fault]:
    columns = ("session__tenant", "session__session_id", "payload", "envelope", "base_id", "base__payload")
    order = ("kind", "namespace", "version")
    for place, (tenant, name, *texts) in _rows_of_sessions(scope, Checkpoint, order, columns):
        rule = _broken_rule(place[1], *texts)
        if rule is not None:
            yield fault(rule, "checkpoint", tenant, name, place_of(place))


def _broken_rule(kind: str, payload: str, envelope: str, base_id: int | None, base: str | None) -> str | None:
    """The rule that the texts of a row break. An unreadable or missing base is a fault of another row."""
    if kind == CheckpointKind.GRAPH:
        return None if can_read(partial(_read_graph_checkpoint, payload)) else "unreadable-typed-values"
    if kind == CheckpointKind.SNAPSHOT:
        return None if can_read(partial(read_snapshot, payload)) else "unreadable-payload"
    if not can_read(partial(decode_object, payload)):
        return "unreadable-payload"
    if kind != CheckpointKind.BASE and not can_read(partial(_read_envelope, envelope)):
        return "unreadable-envelope"
    if base_id is None or base is None or not can_read(partial(decode_object, base)):
        return None
    return None if can_read(partial(decode_with_deltas, base, (payload,))) else "delta-misfit"


def _read_graph_checkpoint(payload: str) -> None:
    """Read it with columns that are sound."""
    read_checkpoint(
        payload,
        checkpoint_id="any",
        session_id="any",
        namespace="",
        parent_id=None,
        version=1,
        step=0,
        node_id=None,
        source=CheckpointSource.LOOP,
        created_at=_ANY_MOMENT,
    ).readable()


def _read_envelope(envelope: str) -> None:
    """Read it as that of a checkpoint, with a payload that is sound."""
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

READABLE: Final = (heads, payloads, states)
