"""Reading checkpoints: one statement returns a page of checkpoints with their values and pending writes."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple, get_checkpoint_id
from langgraph.checkpoint.serde.base import SerializerProtocol

from helix_store import conf
from helix_store.contrib.langgraph import sql
from helix_store.contrib.langgraph.encoding import (
    CheckpointRow,
    Place,
    ValueRow,
    WriteRow,
    checkpoint_tuple,
    searchable_filter,
)
from helix_store.core import validation
from helix_store.core.limits import MAX_BIGINT, MAX_LONG_ID_BYTES
from helix_store.engine.database import Database, Rows
from helix_store.exceptions import IntegrityFault

_logger = logging.getLogger(__name__)

_CHECKPOINT, _VALUE, _WRITE = 0, 1, 2

_Found = tuple[CheckpointRow, Callable[[], CheckpointTuple]]


def one(db: Database, serde: SerializerProtocol, place: Place) -> CheckpointTuple | None:
    """Return a checkpoint by its id, or the newest of its namespace."""
    parameters = {**_names(db, place), "namespace": place.namespace, "limit": 1}
    if place.checkpoint_id is not None:
        parameters["checkpoint_id"] = place.checkpoint_id
    found = _page(db, serde, parameters, place.thread_id)
    return found[0][1]() if found else None


def every(
    db: Database,
    serde: SerializerProtocol,
    config: RunnableConfig | None,
    *,
    wanted: Mapping[str, Any] | None,
    before: RunnableConfig | None,
    limit: int | None,
) -> Iterator[CheckpointTuple]:
    """Yield all checkpoints that match, page after page. Reading starts when the first checkpoint is
    requested. In the list of a thread, an unreadable checkpoint raises `IntegrityFault` when it is reached.
    In a list of all threads it is left out and logged, because damage in one thread must not hide the others.
    """
    place = Place.of(config) if config else None
    is_of_namespace = config is not None and config["configurable"].get("checkpoint_ns") is not None
    before_id = get_checkpoint_id(before) if before else None
    if before_id is not None:
        validation.text(before_id, "before/configurable/checkpoint_id", limit=MAX_LONG_ID_BYTES)
    parameters = {
        **({"tenant": db.tenant} if place is None else _names(db, place)),
        **({"checkpoint_id": place.checkpoint_id} if place and place.checkpoint_id else {}),
        **({"namespace": place.namespace} if place and is_of_namespace else {}),
        **({"before": before_id} if before_id is not None else {}),
        **({"filter": searchable_filter(wanted)} if wanted else {}),
    }
    thread_id = place.thread_id if place else None
    size = conf.page_size()
    left = None if limit is None else validation.query_number(limit, "limit", minimum=-MAX_BIGINT)
    while left is None or left > 0:
        parameters["limit"] = size if left is None else min(size, left)
        page = _page(db, serde, parameters, thread_id)
        for _, read in page:
            try:
                found = read()
            except IntegrityFault as exc:
                if place is not None:
                    raise
                _logger.error("A list of all threads leaves out a checkpoint. %s", exc)
                continue
            yield found
            left = None if left is None else left - 1
        if len(page) < parameters["limit"]:
            return
        last, _ = page[-1]
        parameters |= {"last_checkpoint_id": last.checkpoint_id, "last_id": last.id}


def _names(db: Database, place: Place) -> dict[str, Any]:
    return {"tenant": db.tenant, "session_id": place.session_id}


def _page(
    db: Database, serde: SerializerProtocol, parameters: Mapping[str, Any], thread_id: str | None
) -> list[_Found]:
    """Return the checkpoints of a page, each with the call that decodes it."""
    heads: list[CheckpointRow] = []
    values: dict[tuple[int, str, str, str], ValueRow] = {}
    writes: defaultdict[int, list[WriteRow]] = defaultdict(list)
    rows: Rows = db.read(sql.select(frozenset(parameters)), parameters)
    for row_kind, key, session, namespace, name, other, text, thread, position, kind, blob in rows:
        if row_kind == _VALUE:
            values[session, namespace, name, other] = ValueRow(kind, blob)
        elif row_kind == _WRITE:
            writes[key].append(WriteRow(text, name, position, other, kind, blob))
        else:
            shown = thread if thread_id is None else thread_id
            heads.append(CheckpointRow(key, session, shown, namespace, name, other, text, kind, blob))
    # The parts of a UNION are returned in any order.
    heads.sort(key=lambda head: (head.checkpoint_id, head.id), reverse=True)
    return [(head, partial(checkpoint_tuple, serde, head, values, writes.get(head.id, ()))) for head in heads]
