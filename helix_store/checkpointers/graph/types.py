"""Value objects of the graph checkpoint store.

Typed values (`core.typed_json`) are returned with the same value and type, detached from the store. When the
stored text of a row cannot be read, a list still contains the row with its columns, and reading one of its
typed values raises `IntegrityFault`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from helix_store.core.serialization import Page
from helix_store.core.types import CheckpointSource
from helix_store.exceptions import IntegrityFault

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
    session_id: str
    directory: str
    title: str | None
    workspace_id: str | None
    metadata: dict[Any, Any] | None = field(repr=False)
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage(_WithTypedValues):
    """A message as it was written; ``id`` increases in append order."""

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
