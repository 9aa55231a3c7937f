"""Graph checkpoints: types, and the checks and encoding of payloads.

Value objects of the graph checkpoint store.

Typed values (`core.typed_json`) are returned with the same value and type, detached from the store. When the
stored text of a row cannot be read, a list still contains the row with its columns, and reading one of its
typed values raises `IntegrityFault`.

The stored form of graph sessions, messages and checkpoints.

A message's payload is a JSON object with its role, like any other message; a checkpoint's payload holds its
node results, pending nodes and cycle state. Both are typed JSON. A row that cannot be read is returned
without its typed values, so that it does not affect the other rows of a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.core.payloads import Page, join_path, within_one_call
from helix_store.core.typed_json import dumps, loads_object
from helix_store.core.types import CheckpointSource
from helix_store.exceptions import IntegrityFault, InvalidPayload
from helix_store.sessions.state import GRAPH_FIELDS, EncodedMessage, NewSession, graph_values, root_session

__all__ = [
    "GRAPH_AGENT_TYPE",
    "MESSAGE_ROLES",
    "NODE_STATUSES",
    "GraphCheckpoint",
    "GraphContinuation",
    "GraphPage",
    "GraphSession",
    "GraphSessionSummary",
    "StoredMessage",
]


GRAPH_AGENT_TYPE: Final = "graph"
"""The agent type of the sessions that the graph store creates and lists."""

NODE_STATUSES: Final = ("pending", "running", "completed", "failed", "skipped")

MESSAGE_ROLES: Final = ("user", "assistant", "system", "tool")

T = TypeVar("T")


class _WithTypedValues:
    """A row whose typed values, the fields that its ``repr`` omits, may be unreadable."""

    __slots__ = ()

    @classmethod
    def without_typed_values(cls, **columns: Any) -> Self:
        """Return a row with unreadable text, which only has its columns."""
        row = object.__new__(cls)
        for name, value in columns.items():
            object.__setattr__(row, name, value)
        return row

    def readable(self) -> Self:
        """Return this row. Raises `IntegrityFault` if it cannot be read."""
        for each in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            getattr(self, each.name)
        return self

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Called only for missing attributes.
            if any(each.name == name for each in fields(self)):
                raise IntegrityFault(
                    f"The stored {name} of a row cannot be read; other rows are not affected."
                )
            raise AttributeError(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSession(_WithTypedValues):
    """A session of a graph runtime. The values in ``metadata`` keep their types.

    Example::

        graphs = GraphCheckpointStore()
        scan = graphs.create_session("./project", title="Security scan", metadata={"due": date(2026, 12, 24)})
        print(graphs.get_session(scan.session_id).metadata["due"].year)
    """

    session_id: str
    directory: str
    title: str | None
    workspace_id: str | None
    metadata: dict[Any, Any] | None = field(repr=False)
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage(_WithTypedValues):
    """A message as it was written; ``id`` increases in append order.

    Example::

        graphs = GraphCheckpointStore()
        message = graphs.add_message("trip", role="user", content="Scan example.com", tokens_in=12)
        print(message.id, message.content, message.created_at)
    """

    id: int
    session_id: str
    role: str
    content: str | None = field(repr=False)
    tool_calls: Any = field(repr=False)
    tool_results: Any = field(repr=False)
    tokens_in: int | None = field(repr=False)
    tokens_out: int | None = field(repr=False)
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCheckpoint(_WithTypedValues):
    """The progress of a graph after one wave of nodes.

    The ``parent_id`` of a fork is the id of the original in the other session, even after that is deleted.

    Example::

        graphs = GraphCheckpointStore()
        graphs.save_checkpoint("trip", step=0, pending_nodes=["scan"])
        checkpoint = graphs.get_latest_checkpoint("trip")
        print(checkpoint.version, checkpoint.pending_nodes)
    """

    checkpoint_id: str
    session_id: str
    namespace: str
    parent_id: str | None
    version: int
    step: int
    node_id: str | None
    node_results: dict[Any, dict[Any, Any]] = field(repr=False)
    pending_nodes: Any = field(repr=False)
    cycle_state: Any = field(repr=False)
    source: CheckpointSource
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphContinuation:
    """A session to continue, with all of its messages and its latest checkpoint."""

    session: GraphSession
    messages: list[StoredMessage]
    checkpoint: GraphCheckpoint | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSessionSummary:
    session: GraphSession
    message_count: int
    last_message: StoredMessage | None
    checkpoint_count: int

    @property
    def last_message_at(self) -> datetime | None:
        return None if self.last_message is None else self.last_message.created_at

    @property
    def duration(self) -> timedelta:
        """The time from the session's creation to its last write."""
        return self.session.updated_at - self.session.created_at


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPage(Page[T], Generic[T]):
    """A page of a list. ``next_cursor`` is ``None`` on the last one."""

    items: list[T]
    next_cursor: str | None

    @property
    def has_more(self) -> bool:
        return self.next_cursor is not None


_MESSAGE_FIELDS: Final = ("content", "tool_calls", "tool_results", "tokens_in", "tokens_out")
_COLUMNS_OF_CHECKPOINT: Final = {
    "checkpoint_id": "checkpoint_id",
    "namespace": "namespace",
    "parent_id": "parent_checkpoint_id",
    "version": "version",
    "step": "step_count",
    "node_id": "step_id",
    "created_at": "created_at",
}
CHECKPOINT_COLUMNS: Final = ("pk", *_COLUMNS_OF_CHECKPOINT.values(), "source", "payload")
_SESSION_FIELDS: Final = tuple(each.name for each in fields(GraphSession) if each.name != "metadata")
SESSION_COLUMNS: Final = (*_SESSION_FIELDS, "typed_metadata")
_PENDING_KINDS: Final = (list, tuple, set, frozenset)


def encode_metadata(metadata: Any, limits: Limits) -> str | None:
    if metadata is None:
        return None
    if type(metadata) is not dict:
        raise InvalidPayload(path="/metadata", reason=f"expected a dict, got {type(metadata).__name__}")
    return dumps(metadata, limit=limits.max_state_bytes, path="/metadata")


def new_session(
    session_id: str,
    *,
    directory: str,
    title: str | None,
    workspace_id: str | None,
    metadata: dict[Any, Any] | None,
    limits: Limits,
) -> NewSession:
    """Return a graph session in its initial form. Raises `InvalidPayload` and `LimitExceeded`."""
    typed_metadata = encode_metadata(metadata, limits)
    location = {"workspace_id": workspace_id, "directory": directory}
    new = root_session(session_id, GRAPH_AGENT_TYPE, limits=limits, title=title, **location)
    new.encoded.columns["typed_metadata"] = typed_metadata
    return new


def encode_messages(messages: Any, limits: Limits) -> list[EncodedMessage]:
    """Check and encode messages; each is a dict for `encode_message`."""
    if type(messages) not in (list, tuple):
        raise InvalidPayload(path="/messages", reason="expected a list of messages")
    checked = [
        _given_message(message, f"/messages/{index}")
        for index, message in enumerate(validation.items(messages, "messages"))
    ]
    limit = limits.max_message_bytes
    texts = within_one_call(
        (_written(message, limit, f"/messages/{index}") for index, message in enumerate(checked)), limit=limit
    )
    return [EncodedMessage(message["role"], text) for message, text in zip(checked, texts, strict=True)]


def _given_message(message: Any, path: str) -> dict[str, Any]:
    if type(message) is not dict:
        raise InvalidPayload(path=path, reason=f"expected a dict, got {type(message).__name__}")
    for key in message:
        if key != "role" and key not in _MESSAGE_FIELDS:
            raise InvalidPayload(path=join_path(path, key), reason="a message has no such field")
    return _checked_message(message, path)


def encode_message(message: Mapping[str, Any], limits: Limits) -> EncodedMessage:
    """Check and encode one message; ``None`` means the same as a missing field."""
    checked = _checked_message(message, "")
    return EncodedMessage(checked["role"], _written(checked, limits.max_message_bytes, ""))


def _checked_message(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return only the fields of a message that are set."""
    role = message.get("role")
    if type(role) is not str or role not in MESSAGE_ROLES:
        raise InvalidPayload(path=f"{path}/role", reason=f"expected one of {', '.join(MESSAGE_ROLES)}")
    content = message.get("content")
    if content is not None and type(content) is not str:
        raise InvalidPayload(path=f"{path}/content", reason=f"expected str, got {type(content).__name__}")
    for name in ("tokens_in", "tokens_out"):
        if message.get(name) is not None:
            validation.whole_number(message[name], f"{path}/{name}")
    kept = {name: message[name] for name in _MESSAGE_FIELDS if message.get(name) is not None}
    return {"role": role, **kept}


def _written(message: dict[str, Any], limit: int, path: str) -> str:
    return dumps(message, limit=limit, name="max_message_bytes", path=path)


def encode_checkpoint(*, node_results: Any, pending_nodes: Any, cycle_state: Any, limits: Limits) -> str:
    node_results = {} if node_results is None else node_results
    _check_node_results(node_results)
    if type(pending_nodes) not in _PENDING_KINDS:
        reason = f"expected a list of nodes, got {type(pending_nodes).__name__}"
        raise InvalidPayload(path="/pending_nodes", reason=reason)
    values = (node_results, pending_nodes, cycle_state)
    return dumps(dict(zip(GRAPH_FIELDS, values, strict=True)), limit=limits.max_state_bytes)


def _check_node_results(node_results: Any) -> None:
    if type(node_results) is not dict:
        reason = f"expected a dict by node id, got {type(node_results).__name__}"
        raise InvalidPayload(path="/node_results", reason=reason)
    for node_id, result in node_results.items():
        path = join_path("/node_results", node_id)
        if type(result) is not dict:
            raise InvalidPayload(path=path, reason=f"expected a dict, got {type(result).__name__}")
        status = result.get("status")
        if type(status) is not str or status not in NODE_STATUSES:
            raise InvalidPayload(path=f"{path}/status", reason=f"expected one of {', '.join(NODE_STATUSES)}")


def created_session(new: NewSession, at: datetime) -> GraphSession:
    """Return a graph session that was inserted at this time."""
    return read_session(
        {**new.encoded.columns, "session_id": new.session_id, "created_at": at, "updated_at": at}
    )


def read_session(row: Mapping[str, Any]) -> GraphSession:
    columns = {name: row[name] for name in _SESSION_FIELDS}
    text = row["typed_metadata"]
    try:
        metadata = None if text is None else loads_object(text)
    except IntegrityFault:
        return GraphSession.without_typed_values(**columns)
    return GraphSession(metadata=metadata, **columns)


def read_message(row: Mapping[str, Any], session_id: str) -> StoredMessage:
    columns = {name: row[name] for name in ("id", "role", "created_at")}
    try:
        message = loads_object(row["payload"])
    except IntegrityFault:
        return StoredMessage.without_typed_values(session_id=session_id, **columns)
    typed: dict[str, Any] = {name: message.get(name) for name in _MESSAGE_FIELDS}
    return StoredMessage(session_id=session_id, **columns, **typed)


def read_checkpoint(row: Mapping[str, Any], session_id: str) -> GraphCheckpoint:
    columns = {name: row[column] for name, column in _COLUMNS_OF_CHECKPOINT.items()}
    columns |= {"session_id": session_id, "source": CheckpointSource(row["source"])}
    try:
        return GraphCheckpoint(**graph_values(row["payload"]), **columns)
    except IntegrityFault:
        return GraphCheckpoint.without_typed_values(**columns)
