"""How checkpoints are encoded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph._internal import _serde
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    get_checkpoint_id,
    get_checkpoint_metadata,
    writes_sort_key,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from helix_store.adapters import session_id_for
from helix_store.contrib.langgraph.catalogue import PLAIN_TYPES
from helix_store.core import moments, validation
from helix_store.core.limits import MAX_BIGINT, MAX_LONG_ID_BYTES, MAX_METADATA_BYTES
from helix_store.core.payloads import TOO_LONG_INTEGER, check_call_bytes, size_of
from helix_store.exceptions import IntegrityFault, InvalidPayload, InvalidQuery, LimitExceeded, shown_id

# Graphs pass the types of their schemas to a saver only if this is set. LangGraph itself sets it only if the
# variable LANGGRAPH_STRICT_MSGPACK was set when LangGraph was imported. No other saver becomes strict: a
# serializer that builds all objects ignores these types.
_serde.STRICT_MSGPACK_ENABLED = True  # type: ignore[attr-defined]  # it is imported there

T = TypeVar("T")


class StrictSerializer(JsonPlusSerializer):
    """LangGraph's serializer, limited to the types that it writes. It builds objects of plain types, of
    LangChain's messages, and of the types in the schema of the graph.

    LangGraph's serializer also reads ``json``, a type of older versions, and builds the langchain_core
    objects that such bytes name. This one does not.
    """

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """Read a value. Raises `IntegrityFault` for another type."""
        if data[0] not in PLAIN_TYPES:
            raise IntegrityFault(f"the default serializer does not read the type {shown_id(data[0])}")
        return super().loads_typed(data)


def dumped(serde: SerializerProtocol, value: Any, path: str) -> tuple[str, bytes]:
    """Return the type and the bytes of a value. Raises `InvalidPayload` if the serializer refuses it."""
    try:
        kind, blob = serde.dumps_typed(value)
    except (TypeError, ValueError, RecursionError) as exc:
        reason = f"the serializer cannot write it ({type(exc).__name__})"
        raise InvalidPayload(path=path, reason=reason) from exc
    # LangGraph's serializer returns a bytearray unchanged.
    return kind, bytes(blob)


def read_from(thread_id: str, checkpoint_id: str, read: Callable[[], T]) -> T:
    """Read from the bytes of a checkpoint. If they cannot be read, raise an `IntegrityFault` that names it.
    Damaged bytes may raise any error, depending on where they are damaged. An `OSError` does not mean that
    the bytes are damaged: the serializer may have requested a key from a service.
    """
    try:
        return read()
    except (OSError, MemoryError):
        raise
    except Exception as exc:  # noqa: BLE001
        reason = str(exc) if isinstance(exc, IntegrityFault) else type(exc).__name__
    # Raised here, because a decoder's error may contain the whole value and would become the context.
    raise IntegrityFault(
        f"The LangGraph checkpoint {shown_id(checkpoint_id)} of the thread {shown_id(thread_id)} cannot be "
        f"read ({reason}); other checkpoints are not affected."
    )


AGENT_TYPE: Final = "langgraph"
_MAX_THREAD_ID_BYTES: Final = 4_096
_LONGEST_INLINE_TEXT: Final = 100
_INLINE_TYPES: Final = frozenset({type(None), bool, int, float})
_DELTA_COUNTERS: Final = "counters_since_delta_snapshot"
_DEEPEST_SEARCHABLE: Final = 8
_LONGEST_SEARCHABLE: Final = 8_192


class CheckpointAddress(NamedTuple):
    """The address that a config refers to: a thread, a namespace, and a checkpoint or the newest one."""

    thread_id: str
    session_id: str
    namespace: str
    checkpoint_id: str | None

    @classmethod
    def of(cls, config: RunnableConfig) -> CheckpointAddress:
        """Read a config. Raises `InvalidPayload` and `LimitExceeded` for ids that cannot be stored."""
        configurable = config["configurable"]
        thread_id, session_id = cls.ids_of_thread(configurable["thread_id"])
        checkpoint_id = get_checkpoint_id(config)
        return cls(
            thread_id,
            session_id,
            long_id(configurable.get("checkpoint_ns") or "", "checkpoint_ns"),
            long_id(checkpoint_id, "checkpoint_id") if checkpoint_id else None,
        )

    @staticmethod
    def ids_of_thread(thread_id: Any) -> tuple[str, str]:
        """Return the ids of a thread and its session as text. Raises `InvalidPayload` for ``None``."""
        if thread_id is None:
            # As text, it would be one thread for all callers that forgot to name theirs.
            raise InvalidPayload(path="thread_id", reason="expected the thread's id, got None")
        text = validation.text(str(thread_id), "thread_id", limit=_MAX_THREAD_ID_BYTES)
        return text, session_id_for(text)


def about_thread(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a new session for a thread from the metadata of a config. The id of a user may be
    a number or a UUID, like the primary key of a Django user. Raises `InvalidPayload` and `LimitExceeded`.
    """
    about = {"user_id": validation.user_id_text(given.get("user_id")), "title": given.get("title")}
    known = {name: value for name, value in about.items() if isinstance(value, str) and value}
    validation.user_id(known.get("user_id"))
    validation.title(known.get("title"))
    return known


def config_of(thread_id: str, namespace: str, checkpoint_id: str) -> RunnableConfig:
    return {
        "configurable": {
            "thread_id": thread_id,
            "checkpoint_ns": namespace,
            "checkpoint_id": checkpoint_id,
        }
    }


def long_id(value: Any, name: str) -> str:
    return validation.text(value, name, limit=MAX_LONG_ID_BYTES)


# --- What is written -------------------------------------------------------------------------------


def encoded_checkpoint(
    serde: SerializerProtocol,
    address: CheckpointAddress,
    config: RunnableConfig,
    checkpoint: Checkpoint,
    metadata: CheckpointMetadata,
    new_versions: ChannelVersions,
    *,
    limit: int,
) -> dict[str, Any]:
    """Return the columns of a checkpoint, and its new values as lists of columns, for `sql.PUT`.

    The serializer writes everything that the application passed: the checkpoint, its metadata and the values.
    """
    rest: dict[str, Any] = dict(checkpoint)
    values: Mapping[str, Any] = rest.pop("channel_values")
    small = {channel: value for channel, value in values.items() if is_small(value)}
    versions = {
        long_id(channel, "channel_versions"): long_id(str(version), "channel_versions")
        for channel, version in checkpoint["channel_versions"].items()
        if channel in values and channel not in small
    }
    # All writers use the same order, so that two writers never wait for each other.
    stored = sorted(channel for channel in new_versions if channel in versions)
    known = get_checkpoint_metadata(config, metadata)
    named = [("checkpoint", {"checkpoint": rest, "metadata": known, "values": small})]
    named += [(f"channel_values/{channel}", values[channel]) for channel in stored]
    (kind, body), *blobs = _encoded(serde, named, "channel_values", channels=stored, limit=limit)
    return {
        "thread_id": address.thread_id if address.thread_id != address.session_id else None,
        "namespace": address.namespace,
        "checkpoint_id": long_id(checkpoint["id"], "checkpoint/id"),
        "parent_id": address.checkpoint_id,
        **about_checkpoint(known),
        "versions": json.dumps(versions, ensure_ascii=False),
        "type": kind,
        "body": body,
        "size_bytes": len(body) + sum(len(blob) for _, blob in blobs),
        "at": moments.now(),
        "channels": stored,
        # This is not the order of channel_versions: a channel may be new in a version that the checkpoint
        # does not contain.
        "channel_versions": [str(new_versions[channel]) for channel in stored],
        "types": [kind for kind, _ in blobs],
        "blobs": [blob for _, blob in blobs],
    }


def about_checkpoint(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that copy parts of the metadata."""
    run_id, step = metadata.get("run_id"), metadata.get("step")
    return {
        "run_id": None if run_id is None else long_id(str(run_id), "metadata/run_id"),
        "source": str(metadata.get("source") or "")[:32],
        "step": step if type(step) is int and abs(step) <= MAX_BIGINT else None,
        "metadata": searchable({key: value for key, value in metadata.items() if key != "writes"}),
        "has_deltas": _DELTA_COUNTERS in metadata,
    }


def encoded_writes(
    serde: SerializerProtocol,
    address: CheckpointAddress,
    writes: Sequence[tuple[str, Any]],
    task_id: str,
    task_path: str,
    *,
    limit: int,
) -> dict[str, Any]:
    """Return the columns of a task's writes, for `sql.PUT_WRITES`."""
    # Two interrupts may have the same position. Only the later one is written, because a statement can write
    # a row only once.
    at_position = {
        WRITES_IDX_MAP.get(channel, index): (channel, v)
        for index, (channel, v) in enumerate(validation.items(writes, "writes"))
    }
    positions = sorted(at_position)
    named = [(f"writes/{position}", at_position[position][1]) for position in positions]
    channels = [long_id(at_position[position][0], "writes") for position in positions]
    blobs = _encoded(serde, named, "writes", channels=channels, limit=limit)
    return {
        "namespace": address.namespace,
        "checkpoint_id": address.checkpoint_id,
        "task_id": long_id(task_id, "task_id"),
        "task_path": validation.text(task_path, "task_path", limit=MAX_METADATA_BYTES),
        "positions": positions,
        "channels": channels,
        "types": [kind for kind, _ in blobs],
        "blobs": [blob for _, blob in blobs],
        "at": moments.now(),
    }


def is_small(value: Any) -> bool:
    """Return whether each checkpoint stores a copy of the value, which costs less than a row for it."""
    return type(value) in _INLINE_TYPES or (type(value) is str and len(value) <= _LONGEST_INLINE_TEXT)


def _encoded(
    serde: SerializerProtocol,
    values: Sequence[tuple[str, Any]],
    name: str,
    *,
    channels: Sequence[str],
    limit: int,
) -> list[tuple[str, bytes]]:
    """Return the types and bytes of all values of a call, which are passed with their paths.

    Raises `InvalidPayload`, and `LimitExceeded` at the first value that exceeds the limit. Names of channels
    also count, because a value may be shorter than its channel's name.
    """
    encoded = []
    size = size_of(*channels)
    for path, value in validation.items(values, name):
        kind, blob = dumped(serde, value, path)
        if len(blob) > limit:
            raise LimitExceeded(name="max_state_bytes", limit=limit, actual=len(blob))
        size += len(blob)
        check_call_bytes(size, limit=limit)
        encoded.append((kind, blob))
    return encoded


def searchable(metadata: Mapping[str, Any]) -> str:
    """Return metadata as JSON for filters, without long values and without values that JSON cannot represent.

    Members are sorted, so that equal values yield equal strings.
    """
    kept: dict[str, Any] = {}
    for key, value in metadata.items():
        plain = _plain({key: value}, _DEEPEST_SEARCHABLE)
        if plain and len(json.dumps(plain)) <= _LONGEST_SEARCHABLE:
            kept.update(plain)
    return json.dumps(kept, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def searchable_filter(wanted: Mapping[str, Any]) -> str:
    """Return a filter in the form that `searchable` returns. Raises `InvalidQuery` for values that
    `searchable` leaves out.

    Without such a value, the filter would match checkpoints that differ only in it.
    """
    for name, value in wanted.items():
        if not _is_whole(value, _DEEPEST_SEARCHABLE - 1) or searchable({name: value}) == "{}":
            kinds = "texts, finite numbers, booleans, None, lists and dicts"
            reason = (
                f"Metadata is compared with {kinds}, of at most {_LONGEST_SEARCHABLE} characters of JSON."
            )
            raise InvalidQuery(reason, path=f"filter/{name}")
    return searchable(wanted)


def _is_whole(value: Any, depth: int) -> bool:
    """Return whether `_plain` keeps all of a value."""
    if isinstance(value, Mapping | list | tuple):
        members = value.values() if isinstance(value, Mapping) else value
        return depth > 0 and all(_is_whole(member, depth - 1) for member in members)
    return _plain(value, depth) is not _ABSENT


_ABSENT: Final = object()


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value.replace("\x00", "").encode("utf-8", "replace").decode()
    if value is None or type(value) is bool:
        return value
    if type(value) is int:
        return value if abs(value) < TOO_LONG_INTEGER else _ABSENT
    if type(value) is float:
        return value if math.isfinite(value) else _ABSENT
    if depth == 0:
        return _ABSENT
    if isinstance(value, Mapping):
        members = ((_plain(str(key), 0), _plain(item, depth - 1)) for key, item in value.items())
        return {key: item for key, item in members if item is not _ABSENT}
    if isinstance(value, list | tuple):
        return [item for item in (_plain(item, depth - 1) for item in value) if item is not _ABSENT]
    return _ABSENT


# --- What is read ----------------------------------------------------------------------------------


class CheckpointRow(NamedTuple):
    id: int
    session: int
    thread_id: str
    namespace: str
    checkpoint_id: str
    parent_id: str | None
    versions: str
    type: str
    body: bytes


class ValueRow(NamedTuple):
    type: str
    blob: bytes


class WriteRow(NamedTuple):
    task_path: str
    task_id: str
    position: int
    channel: str
    type: str
    blob: bytes


class Body(NamedTuple):
    checkpoint: dict[str, Any]
    metadata: CheckpointMetadata
    values: dict[str, Any]

    @property
    def delta_channels(self) -> list[str]:
        """The channels whose values are in the writes of earlier checkpoints, unless one is stored closer."""
        counters: Any = self.metadata.get(_DELTA_COUNTERS) or {}
        return [channel for channel in counters if channel in self.checkpoint.get("channel_versions", {})]


def read_body(serde: SerializerProtocol, kind: str, body: bytes) -> Body:
    """Return the contents of a stored checkpoint. Call it through `read_from`."""
    content = serde.loads_typed((kind, body))
    if content.keys() != {"checkpoint", "metadata", "values"}:
        raise ValueError("the body of a checkpoint has three parts")
    if not all(isinstance(part, dict) for part in content.values()):
        raise TypeError("each part of a checkpoint is a dict")
    return Body(content["checkpoint"], content["metadata"], content["values"])


def read_writes(serde: SerializerProtocol, writes: Iterable[WriteRow]) -> list[tuple[str, str, Any]]:
    """Return the task, the channel and the value of each write, in LangGraph's order. Call it through
    `read_from`.
    """
    ordered = sorted(writes, key=lambda write: writes_sort_key(*write[:3]))
    return [(write.task_id, write.channel, serde.loads_typed((write.type, write.blob))) for write in ordered]


def checkpoint_tuple(
    serde: SerializerProtocol,
    row: CheckpointRow,
    values: Mapping[tuple[int, str, str, str], ValueRow],
    writes: Iterable[WriteRow],
) -> CheckpointTuple:
    """Return a checkpoint with its values and pending writes; each call reads all of them from their bytes.

    Raises `IntegrityFault` if one of them cannot be read.
    """

    def read() -> tuple[Body, dict[str, Any], list[Any]]:
        stored = {
            channel: serde.loads_typed(values[key])
            for channel, version in json.loads(row.versions).items()
            if (key := (row.session, row.namespace, channel, version)) in values
        }
        return read_body(serde, row.type, row.body), stored, read_writes(serde, writes)

    body, stored, pending = read_from(row.thread_id, row.checkpoint_id, read)
    checkpoint: Any = {**body.checkpoint, "channel_values": {**body.values, **stored}}
    return CheckpointTuple(
        config=config_of(row.thread_id, row.namespace, row.checkpoint_id),
        checkpoint=checkpoint,
        metadata=body.metadata,
        parent_config=config_of(row.thread_id, row.namespace, row.parent_id) if row.parent_id else None,
        pending_writes=pending,
    )
