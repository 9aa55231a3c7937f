"""The tables of ``@obsku/checkpoint-postgres``, as sessions of `GraphCheckpointStore`."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import Any, Final

from helix_store import conf
from helix_store.checkpointers.graph.payloads import (
    encode_checkpoint,
    encode_message,
    encode_metadata,
    new_session,
)
from helix_store.core import validation
from helix_store.core.payloads import size_of
from helix_store.core.types import CheckpointSource
from helix_store.exceptions import HelixStoreError, InvalidQuery, shown_id
from helix_store.models import Checkpoint, CheckpointKind, Message
from helix_store.sessions.requests import NewSession
from helix_store.transfer.layout import CHECKPOINTS, MESSAGES
from helix_store.transfer.records import Counts, Problem, Record, Unit
from helix_store.transfer.sources.jsonplus import revive
from helix_store.transfer.sources.origin import Origin, Tally
from helix_store.transfer.sources.postgres import PostgresReader
from helix_store.transfer.sources.sessions import TICK, head_records, moment
from helix_store.transfer.sources.spool import Spool

__all__ = ["ObskuSource"]

_SESSIONS: Final = """
    SELECT id, workspace_id, title, directory, created_at, updated_at, metadata
    FROM sessions ORDER BY id COLLATE "C" """
_MESSAGES: Final = """
    SELECT id, created_at, role, content, tool_calls, tool_results, tokens_in, tokens_out
    FROM messages WHERE session_id = %s ORDER BY created_at, id"""
# The parent of a fork is in another session, which may be deleted.
_CHECKPOINTS: Final = """
    SELECT id, created_at, namespace, parent_id, version, step, node_id, node_results, pending_nodes,
        cycle_state, source,
        parent_id IS NULL OR source = 'fork' OR EXISTS (
            SELECT FROM checkpoints AS parent WHERE parent.id = checkpoints.parent_id)
    FROM checkpoints WHERE session_id = %s ORDER BY version, created_at, id COLLATE "C" """

_WITH_SESSIONS: Final = ("sessions", "messages", "checkpoints")
_WITHOUT_TABLE_HERE: Final = ("entities", "facts")

_STATUSES: Final = {"Complete": "completed", "Failed": "failed", "Skipped": "skipped"}
"""Words for the status of a node that the original reads, beside its own."""

_CALL: Final[dict[str, type]] = {"name": str, "toolUseId": str, "input": dict}
_RESULT: Final[dict[str, type]] = {"content": str, "toolUseId": str}

_EARLIEST: Final = datetime.min.replace(tzinfo=UTC)


class ObskuSource:
    """Sessions with their messages and checkpoints; entities and facts have no table here."""

    def __init__(self, origin: Origin) -> None:
        if origin.table is not None:
            raise InvalidQuery("The names of obsku's tables are fixed; give a schema.", path="table")
        self._tenant = validation.tenant(origin.tenant)
        self._only_whole = origin.only_whole
        self._leaves_tables = origin.leaves_tables
        self._reader = PostgresReader(origin.dsn, schema=origin.schema)
        self._limits = conf.limits()
        self.tally = Tally()

    @property
    def session_count(self) -> int:
        count: int = self._reader.one("SELECT count(*) FROM sessions")[0]
        return count

    def reading(self) -> AbstractContextManager[None]:
        return self._reader.reading()

    def units(self) -> Iterator[Unit]:
        for row in self._reader.rows(_SESSIONS):
            with Spool() as checkpoints, Spool() as messages:
                session = _Session(str(row[0]), Tally(), checkpoints, messages)
                head = self._read(session, row)
                self.tally.add(session.tally)
                if head is not None:
                    yield Unit("session", self._tenant, session.id, partial(session.records, head))

    def left_out(self, exported: Counts) -> Iterator[Problem]:
        """Rows of no session; and entities and facts, unless the origin accepts that they are left."""
        yield from self.tally.compare(self._reader.row_counts(*_WITH_SESSIONS))
        for table, count in self._reader.row_counts(*_WITHOUT_TABLE_HERE).items():
            self.tally.found[table] += count
            if count:
                self.tally.left[table] += count
                if not self._leaves_tables:
                    yield Problem(text=f"{count} rows of {table} are left out: there is no such table here")

    # --- One session -------------------------------------------------------------------------------

    def _read(self, session: _Session, row: tuple[Any, ...]) -> list[Record] | None:
        """Read all of a session, and return its first records; ``None`` if it is left out."""
        tally = session.tally
        tally.found["sessions"] += 1
        reason, head = None, None
        try:
            new = self._new_session(session, row)
            created_at, updated_at = moment(row[4], "/created_at"), moment(row[5], "/updated_at")
        except HelixStoreError as exc:
            reason = f"{session} is left out: {exc}"
        for message in self._reader.rows(_MESSAGES, row[0]):
            tally.found["messages"] += 1
            self._try("messages", session, message, self._add_message)
        for checkpoint in self._reader.rows(_CHECKPOINTS, row[0]):
            tally.found["checkpoints"] += 1
            self._try("checkpoints", session, checkpoint, self._add_checkpoint)
        if reason is None and self._only_whole and tally.problems:
            reason = f"{session} is left out, because of {len(tally.problems)} problems"
        if reason is not None:
            tally.leave_all(reason)
        else:
            head = head_records(
                new,
                self._tenant,
                message_count=len(session.times),
                created_at=created_at,
                updated_at=updated_at,
            )
        return head

    def _new_session(self, session: _Session, row: tuple[Any, ...]) -> NewSession:
        session_id, workspace_id, title, directory, _, _, text = row
        metadata = None
        try:
            metadata = session.revived(text, "metadata", str(session))
            encode_metadata(metadata, self._limits)
        except HelixStoreError as exc:
            session.tally.report(f"the metadata of {session} is left out: {exc}")
            metadata = None
        return new_session(
            validation.identifier(session_id, "session_id"),
            directory=directory,
            title=title,
            workspace_id=workspace_id,
            metadata=metadata,
            limits=self._limits,
        )

    def _try(
        self,
        table: str,
        session: _Session,
        row: tuple[Any, ...],
        add: Callable[[_Session, str, tuple[Any, ...]], None],
    ) -> None:
        """Add a row, or leave it in the source."""
        name = f"{table[:-1]} {shown_id(row[0])} of {session}"
        try:
            add(session, name, row)
        except HelixStoreError as exc:
            session.tally.leave(table, name, exc)

    def _add_message(self, session: _Session, name: str, row: tuple[Any, ...]) -> None:
        _, milliseconds, role, content, calls, results, tokens_in, tokens_out = row
        at = moment(milliseconds, "/created_at")
        message = {
            "role": role,
            "content": content,
            "tool_calls": session.revived(calls, "tool_calls", name),
            "tool_results": session.revived(results, "tool_results", name),
            "tokens_in": tokens_in,
            "tokens_out": tokens_out,
        }
        encoded = encode_message(message, self._limits)
        for field, members in (("tool_calls", _CALL), ("tool_results", _RESULT)):
            if message[field] is not None and not _is_list_of(message[field], members):
                session.tally.report(f"{name}: obsku cannot read its {field}; it is imported as it is")
        # Messages of one millisecond are a microsecond apart: a page by time does not end between them.
        session.last = max(at, session.last + TICK)
        session.times.append(milliseconds)
        row_here = Message(
            sequence=len(session.times), role=encoded.role, payload=encoded.text, created_at=session.last
        )
        session.messages.add(MESSAGES.record_from(row_here))

    def _add_checkpoint(self, session: _Session, name: str, row: tuple[Any, ...]) -> None:
        (
            checkpoint_id, milliseconds, namespace, parent_id, version, step, node_id, node_results,
            pending_nodes, cycle_state, source, has_parent,
        ) = row  # fmt: skip
        pending = session.revived(pending_nodes, "pending_nodes", name)
        payload = encode_checkpoint(
            node_results=_with_known_statuses(session.revived(node_results, "node_results", name)),
            pending_nodes=[] if pending is None else pending,
            cycle_state=session.revived(cycle_state, "cycle_state", name),
            limits=self._limits,
        )
        row_here = Checkpoint(
            kind=CheckpointKind.GRAPH.value,
            namespace=validation.tenant(namespace, "namespace"),
            version=validation.whole_number(version, "version", minimum=1),
            checkpoint_id=validation.identifier(checkpoint_id, "checkpoint_id"),
            parent_checkpoint_id=validation.optional_identifier(parent_id, "parent_id"),
            source=validation.enum(CheckpointSource, source, "source").value,
            step_id=validation.optional_identifier(node_id, "node_id"),
            step_count=validation.whole_number(step, "step"),
            # As its own forks: the messages that were written before the checkpoint, or in its millisecond.
            message_count=bisect_right(session.times, milliseconds),
            payload=payload,
            size_bytes=size_of(payload),
            created_at=moment(milliseconds, "/created_at"),
        )
        session.checkpoints.add(CHECKPOINTS.record_from(row_here))
        if not has_parent:
            session.tally.report(
                f"{name}: its parent {shown_id(parent_id)} does not exist; it is imported as it is"
            )


class _Session:
    """What was read of one session so far."""

    def __init__(self, session_id: str, tally: Tally, checkpoints: Spool, messages: Spool) -> None:
        self.id = session_id
        self.tally = tally
        self.checkpoints = checkpoints
        self.messages = messages
        self.times = array("q")
        self.last = _EARLIEST

    def __str__(self) -> str:
        return f"session {shown_id(self.id)}"

    def records(self, head: list[Record]) -> Iterator[Record]:
        return chain(head, self.checkpoints.records(), self.messages.records())

    def revived(self, text: str | None, field: str, name: str) -> Any:
        """The value of a column. Raises `InvalidPayload`."""
        if text is None:
            return None
        remarks: list[str] = []
        value = revive(text, f"/{field}", remarks)
        for remark in remarks:
            self.tally.report(f"{name}: {remark}")
        return value


def _with_known_statuses(node_results: Any) -> Any:
    """Node results with the statuses of this package. What is no such result is left to its check."""
    if type(node_results) is not dict:
        return node_results
    return {node_id: _with_known_status(result) for node_id, result in node_results.items()}


def _with_known_status(result: Any) -> Any:
    status = result.get("status") if type(result) is dict else None
    known = _STATUSES.get(status) if type(status) is str else None
    return result if known is None else {**result, "status": known}


def _is_list_of(value: Any, members: dict[str, type]) -> bool:
    return type(value) is list and all(
        type(item) is dict and all(type(item.get(name)) is kind for name, kind in members.items())
        for item in value
    )
