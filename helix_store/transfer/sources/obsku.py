"""The tables of ``@obsku/checkpoint-postgres``, as sessions of `GraphCheckpointStore`."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Final

from helix_store.checkpointers.graph.payloads import (
    encode_checkpoint,
    encode_message,
    encode_metadata,
    new_session,
)
from helix_store.core import validation
from helix_store.core.payloads import size_of
from helix_store.core.types import CheckpointSource
from helix_store.exceptions import HelixStoreError, InvalidQuery
from helix_store.models import CheckpointKind
from helix_store.transfer.records import Counts, Problem
from helix_store.transfer.sources.foreign import ForeignSource, Origin
from helix_store.transfer.sources.jsonplus import revive
from helix_store.transfer.sources.readers import PostgresReader
from helix_store.transfer.sources.sessions import ForeignSession, Head, moment

_MESSAGES: Final = """
    SELECT id, created_at, role, content, tool_calls, tool_results, tokens_in, tokens_out
    FROM messages WHERE session_id = %s ORDER BY created_at, id"""
_CHECKPOINTS: Final = """
    SELECT id, created_at, namespace, parent_id, version, step, node_id, node_results, pending_nodes,
        cycle_state, source
    FROM checkpoints WHERE session_id = %s ORDER BY version, created_at, id COLLATE "C" """

_IMPORTED: Final = ("sessions", "messages", "checkpoints")
_WITHOUT_TABLE_HERE: Final = ("entities", "facts")

_STATUSES: Final = {"Complete": "completed", "Failed": "failed", "Skipped": "skipped"}
"""Additional words for the status of a node that the original accepts."""

_EARLIEST: Final = datetime.min.replace(tzinfo=UTC)
_TICK: Final = timedelta(microseconds=1)


class ObskuSource(ForeignSource):
    """Sessions with their messages and checkpoints; entities and facts have no table here."""

    kind: ClassVar = "session"
    session_count_query: ClassVar = "SELECT count(*) FROM sessions"
    sessions_query: ClassVar = """
        SELECT id, workspace_id, title, directory, created_at, updated_at, metadata
        FROM sessions ORDER BY id COLLATE "C" """

    def __init__(self, origin: Origin) -> None:
        if origin.table is not None:
            raise InvalidQuery("The names of obsku's tables are fixed; pass a schema.", path="table")
        super().__init__(origin, PostgresReader(origin.dsn, schema=origin.schema))

    def left_out(self, exported: Counts) -> Iterator[Problem]:
        """Report rows without a session, and entities and facts unless the origin lets them be left out."""
        yield from self.tally.compare(self._reader.row_counts(*_IMPORTED))
        yield from self._without_table_here(*_WITHOUT_TABLE_HERE)

    def _head(self, session: ForeignSession, row: tuple[Any, ...]) -> Head:
        session_id, workspace_id, title, directory, created_at, updated_at, text = row
        session.tally.found["sessions"] += 1
        metadata = None
        try:
            metadata = _revived(session, str(session), "metadata", text)
            encode_metadata(metadata, self._limits)
        except HelixStoreError as exc:
            session.tally.report(f"the metadata of {session} is left out: {exc}")
            metadata = None
        new = new_session(
            validation.identifier(session_id, "session_id"),
            directory=directory,
            title=title,
            workspace_id=workspace_id,
            metadata=metadata,
            limits=self._limits,
        )
        return Head(new, moment(created_at, "/created_at"), moment(updated_at, "/updated_at"))

    def _read_parts(self, session: ForeignSession) -> None:
        self._milliseconds, self._newest = array("q"), _EARLIEST
        for row in self._reader.rows(_MESSAGES, session.id):
            session.take("messages", row, partial(self._add_message, session))
        for row in self._reader.rows(_CHECKPOINTS, session.id):
            session.take("checkpoints", row, partial(self._add_checkpoint, session))

    def _add_message(self, session: ForeignSession, name: str, row: tuple[Any, ...]) -> None:
        _, milliseconds, role, content, calls, results, tokens_in, tokens_out = row
        created_at = moment(milliseconds, "/created_at")
        message = {
            "role": role,
            "content": content,
            "tool_calls": _revived(session, name, "tool_calls", calls),
            "tool_results": _revived(session, name, "tool_results", results),
            "tokens_in": tokens_in,
            "tokens_out": tokens_out,
        }
        encoded = encode_message(message, self._limits)
        self._milliseconds.append(milliseconds)
        # Times of one millisecond differ by a microsecond, so that no page by time ends between them.
        self._newest = max(created_at, self._newest + _TICK)
        session.add_message(role=encoded.role, payload=encoded.text, created_at=self._newest)

    def _add_checkpoint(self, session: ForeignSession, name: str, row: tuple[Any, ...]) -> None:
        (
            checkpoint_id, milliseconds, namespace, parent_id, version, step, node_id, node_results,
            pending_nodes, cycle_state, source,
        ) = row  # fmt: skip
        pending = _revived(session, name, "pending_nodes", pending_nodes)
        payload = encode_checkpoint(
            node_results=_with_known_statuses(_revived(session, name, "node_results", node_results)),
            pending_nodes=[] if pending is None else pending,
            cycle_state=_revived(session, name, "cycle_state", cycle_state),
            limits=self._limits,
        )
        session.add_checkpoint(
            kind=CheckpointKind.GRAPH.value,
            namespace=validation.tenant(namespace, "namespace"),
            version=validation.whole_number(version, "version", minimum=1),
            checkpoint_id=validation.identifier(checkpoint_id, "checkpoint_id"),
            parent_checkpoint_id=validation.optional_identifier(parent_id, "parent_id"),
            source=validation.enum(CheckpointSource, source, "source").value,
            step_id=validation.optional_identifier(node_id, "node_id"),
            step_count=validation.whole_number(step, "step"),
            # As in the original: the messages before this time or in the same millisecond.
            message_count=bisect_right(self._milliseconds, milliseconds),
            payload=payload,
            size_bytes=size_of(payload),
            created_at=moment(milliseconds, "/created_at"),
        )


def _revived(session: ForeignSession, name: str, field: str, text: str | None) -> Any:
    """Return the value of a column. Raises `InvalidPayload`."""
    if text is None:
        return None
    remarks: list[str] = []
    value = revive(text, f"/{field}", remarks)
    for remark in remarks:
        session.tally.report(f"{name}: {remark}")
    return value


def _with_known_statuses(node_results: Any) -> Any:
    """Return node results with the statuses of this package. Any other value is checked later."""
    if type(node_results) is not dict:
        return node_results
    return {node_id: _with_known_status(result) for node_id, result in node_results.items()}


def _with_known_status(result: Any) -> Any:
    status = result.get("status") if type(result) is dict else None
    known = _STATUSES.get(status) if type(status) is str else None
    return result if known is None else {**result, "status": known}
