"""Channels that are stored as deltas: the writes of a checkpoint's ancestors, back to a full value."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from langgraph.checkpoint.base import DeltaChannelHistory
from langgraph.checkpoint.serde.base import SerializerProtocol

from helix_store.contrib.langgraph import sql
from helix_store.contrib.langgraph.encoding import Body, Place, ValueRow, WriteRow, read_body, read_writes
from helix_store.contrib.langgraph.serializer import read_from
from helix_store.core import validation
from helix_store.core.limits import MAX_LONG_ID_BYTES
from helix_store.engine.database import Database
from helix_store.engine.expressions import list_parameter
from helix_store.exceptions import IntegrityFault, shown_id

_PAGE: Final = 64


class _Ancestor(NamedTuple):
    checkpoint_id: str
    versions: Mapping[str, str]
    body: Body


@dataclass(slots=True)
class _Walk:
    """The walk of one channel: the ancestors that it passed, and the place where the value is stored."""

    passed: list[str] = field(default_factory=list)
    seed: _Ancestor | None = None


def history(
    db: Database, serde: SerializerProtocol, place: Place, channels: Sequence[str]
) -> dict[str, DeltaChannelHistory]:
    channels = [
        validation.text(each, "channels", limit=MAX_LONG_ID_BYTES)
        for each in validation.items(channels, "channels")
    ]
    if not channels:
        return {}
    walks = _walks(db, serde, place, channels)
    writes, values = _written(db, place, walks)
    found: dict[str, DeltaChannelHistory] = {}
    for channel, walk in walks.items():
        found[channel] = {"writes": []}
        for checkpoint_id in reversed(walk.passed):
            read = partial(read_writes, serde, writes[checkpoint_id, channel])
            found[channel]["writes"] += read_from(place.thread_id, checkpoint_id, read)
        if walk.seed is not None:
            seed = partial(_seed, serde, channel, walk.seed, values)
            found[channel]["seed"] = read_from(place.thread_id, walk.seed.checkpoint_id, seed)
    return found


def ancestors_needed(
    db: Database, serde: SerializerProtocol, place: Place, channels: Sequence[str]
) -> set[str]:
    """Return the ids of the ancestors from which the values of channels are read."""
    return {
        checkpoint_id for walk in _walks(db, serde, place, channels).values() for checkpoint_id in walk.passed
    }


def _walks(
    db: Database, serde: SerializerProtocol, place: Place, channels: Sequence[str]
) -> dict[str, _Walk]:
    """Walk from the parent of a checkpoint to older ones until each channel has a stored value."""
    walks = {channel: _Walk() for channel in channels}
    for ancestor in _ancestors(db, serde, place):
        open_walks = {channel: walk for channel, walk in walks.items() if walk.seed is None}
        if not open_walks:
            break
        for channel, walk in open_walks.items():
            # The writes of an ancestor come after its own value.
            walk.passed.append(ancestor.checkpoint_id)
            if channel in ancestor.versions or channel in ancestor.body.values:
                walk.seed = ancestor
    return walks


def _ancestors(db: Database, serde: SerializerProtocol, place: Place) -> Iterator[_Ancestor]:
    names = {"tenant": db.tenant, "session_id": place.session_id, "namespace": place.namespace}
    start = place.checkpoint_id
    if start is None:
        newest = db.read(sql.NEWEST_ID, names)
        start = newest[0][0] if newest else None
    while start is not None:
        page = db.read(sql.CHAIN, {**names, "checkpoint_id": start, "depth": _PAGE})
        # The first row is only the start of the page: it is not an ancestor, or was on the previous page.
        for checkpoint_id, _, versions, kind, content in page[1:]:
            body = read_from(place.thread_id, checkpoint_id, partial(read_body, serde, kind, content))
            yield _Ancestor(checkpoint_id, json.loads(versions), body)
        start = page[-1][0] if len(page) > _PAGE else None


def _written(
    db: Database, place: Place, walks: Mapping[str, _Walk]
) -> tuple[defaultdict[tuple[str, str], list[WriteRow]], dict[tuple[str, str], ValueRow]]:
    """Return the writes of each checkpoint to each channel, and the values by channel and version."""
    versions = {
        walk.seed.versions[channel]
        for channel, walk in walks.items()
        if walk.seed is not None and channel in walk.seed.versions
    }
    parameters = {
        "tenant": db.tenant,
        "session_id": place.session_id,
        "namespace": place.namespace,
        "checkpoint_ids": list_parameter(
            db, sorted({each for walk in walks.values() for each in walk.passed})
        ),
        "channels": list_parameter(db, list(walks)),
        "versions": list_parameter(db, sorted(versions)),
    }
    writes: defaultdict[tuple[str, str], list[WriteRow]] = defaultdict(list)
    values: dict[tuple[str, str], ValueRow] = {}
    for checkpoint_id, text, task_id, position, channel, kind, blob in db.read(sql.HISTORY, parameters):
        if checkpoint_id is None:
            values[channel, text] = ValueRow(kind, blob)
        else:
            writes[checkpoint_id, channel].append(WriteRow(text, task_id, position, channel, kind, blob))
    return writes, values


def _seed(
    serde: SerializerProtocol,
    channel: str,
    ancestor: _Ancestor,
    values: Mapping[tuple[str, str], ValueRow],
) -> Any:
    # An imported checkpoint may have both: PostgresSaver marks a stored snapshot with a value of True.
    if channel not in ancestor.versions:
        return ancestor.body.values[channel]
    stored = values.get((channel, ancestor.versions[channel]))
    if stored is None:
        raise IntegrityFault(f"the value of the channel {shown_id(channel)} is not stored")
    return serde.loads_typed(stored)
