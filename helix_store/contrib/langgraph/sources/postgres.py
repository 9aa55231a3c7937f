"""The tables of LangGraph's ``PostgresSaver`` and ``AsyncPostgresSaver``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, Final

from helix_store.contrib.langgraph.sources.threads import (
    Channel,
    ForeignCheckpoint,
    ThreadSession,
    ThreadSource,
    checked_checkpoint,
    json_object,
)
from helix_store.transfer.records import Counts, Problem
from helix_store.transfer.sources.foreign import Origin
from helix_store.transfer.sources.readers import PostgresReader

_THREADS: Final = """
    SELECT thread_id FROM checkpoints UNION SELECT thread_id FROM checkpoint_writes
    UNION SELECT thread_id FROM checkpoint_blobs WHERE type <> 'empty' """

# A row of the type "empty" means that a channel has no value at a version.
_VALUES: Final = """
    SELECT channel, checkpoint_ns, version, type, blob FROM checkpoint_blobs
    WHERE thread_id = %s AND type <> 'empty'
    ORDER BY checkpoint_ns COLLATE "C", channel COLLATE "C", version COLLATE "C" """


class PostgresSaverSource(ThreadSource):
    session_count_query: ClassVar = f"SELECT count(*) FROM ({_THREADS}) AS threads"
    sessions_query: ClassVar = f'SELECT thread_id FROM ({_THREADS}) AS threads ORDER BY thread_id COLLATE "C"'
    checkpoints_query: ClassVar = """
        SELECT checkpoint_id, checkpoint_ns, parent_checkpoint_id, checkpoint::text, metadata::text
        FROM checkpoints WHERE thread_id = %s
        ORDER BY checkpoint_ns COLLATE "C", checkpoint_id COLLATE "C" """
    writes_query: ClassVar = """
        SELECT checkpoint_id, checkpoint_ns, task_id, idx, task_path, channel, type, blob
        FROM checkpoint_writes WHERE thread_id = %s
        ORDER BY checkpoint_ns COLLATE "C", checkpoint_id COLLATE "C", task_id COLLATE "C", idx """
    writes_table: ClassVar = "checkpoint_writes"

    def __init__(self, origin: Origin) -> None:
        super().__init__(origin, PostgresReader(origin.dsn, schema=origin.schema))

    def left_out(self, exported: Counts) -> Iterator[Problem]:
        """Yield the tables from which the source has not read all rows."""
        counts = {
            "checkpoints": "SELECT count(*) FROM checkpoints",
            "checkpoint_blobs": "SELECT count(*) FROM checkpoint_blobs WHERE type <> 'empty'",
            "checkpoint_writes": "SELECT count(*) FROM checkpoint_writes",
        }
        return self.tally.compare({table: self._reader.one(query)[0] for table, query in counts.items()})

    def _read_values(self, session: ThreadSession) -> None:
        for row in self._reader.rows(_VALUES, session.source_id):
            session.take("checkpoint_blobs", row, partial(self._add_blob, session))

    def _add_blob(self, session: ThreadSession, _: str, row: tuple[Any, ...]) -> None:
        channel, namespace, version, kind, blob = row
        self._add_value(session, Channel(namespace, channel, version), kind, blob or b"")

    def _checkpoint(self, row: tuple[Any, ...]) -> ForeignCheckpoint:
        checkpoint_id, namespace, parent_id, checkpoint_text, metadata_text = row
        checkpoint = checked_checkpoint(json_object(checkpoint_text, "checkpoint"))
        small = checkpoint.pop("channel_values")
        metadata = json_object(metadata_text, "metadata")
        return ForeignCheckpoint(checkpoint_id, namespace, parent_id, checkpoint, metadata, small)
