"""The tables of LangGraph's ``SqliteSaver`` and ``AsyncSqliteSaver``."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any, ClassVar, Final

import ormsgpack

from helix_store.contrib.langgraph.encoding import is_small
from helix_store.contrib.langgraph.sources.threads import (
    Channel,
    ForeignCheckpoint,
    ThreadSession,
    ThreadSource,
    checked_checkpoint,
    json_object,
)
from helix_store.exceptions import HelixStoreError, InvalidPayload, InvalidQuery
from helix_store.transfer.records import Counts, Problem
from helix_store.transfer.sources.foreign import Origin
from helix_store.transfer.sources.readers import SqliteReader

_SORTED_VALUES: Final = """
    CREATE TABLE v (ns, channel, version, type, blob, PRIMARY KEY (ns, channel, version)) WITHOUT ROWID"""
_THREADS: Final = "SELECT thread_id FROM checkpoints UNION SELECT thread_id FROM writes"


class SqliteSaverSource(ThreadSource):
    """The source of threads. Each checkpoint has all values; a value of several checkpoints is imported once,
    by its version. The bytes are split without building the objects in them, so the import cannot run code in
    the data.
    """

    session_count_query: ClassVar = f"SELECT count(*) FROM ({_THREADS})"
    sessions_query: ClassVar = f"SELECT thread_id FROM ({_THREADS}) ORDER BY thread_id"
    checkpoints_query: ClassVar = """
        SELECT checkpoint_id, checkpoint_ns, parent_checkpoint_id, type, checkpoint, metadata
        FROM checkpoints WHERE thread_id = ? ORDER BY checkpoint_ns, checkpoint_id """
    writes_query: ClassVar = """
        SELECT checkpoint_id, checkpoint_ns, task_id, idx, task_path, channel, type, value
        FROM writes WHERE thread_id = ? ORDER BY checkpoint_ns, checkpoint_id, task_id, idx """
    writes_table: ClassVar = "writes"

    def __init__(self, origin: Origin) -> None:
        if origin.schema is not None:
            raise InvalidQuery("An SQLite file has no schemas.", path="schema")
        super().__init__(origin, SqliteReader(origin.dsn))

    def left_out(self, exported: Counts) -> Iterator[Problem]:
        """Yield the tables from which the source has not read all rows."""
        return self.tally.compare(self._reader.row_counts("checkpoints", "writes"))

    def _read_values(self, session: ThreadSession) -> None:
        # On disk and in export order, because the values of a thread may be larger than the memory.
        with closing(sqlite3.connect("", isolation_level=None)) as sorter:
            sorter.execute(_SORTED_VALUES)
            for row in self._reader.rows(self.checkpoints_query, session.source_id):
                try:
                    values = list(self._values(row))
                except HelixStoreError:
                    continue  # Reported when the checkpoint is added.
                sorter.executemany("INSERT OR IGNORE INTO v VALUES (?, ?, ?, ?, ?)", values)
            for *channel, kind, blob in sorter.execute("SELECT * FROM v ORDER BY 1, 2, 3"):
                session.take("values", (channel[1], *channel, kind, blob), partial(self._add, session))

    def _add(self, session: ThreadSession, _: str, row: tuple[Any, ...]) -> None:
        _, *channel, kind, blob = row
        self._add_value(session, Channel(*channel), kind, blob)

    def _values(self, row: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        _, namespace, _, kind, data, _ = row
        checkpoint = _unpacked(kind, data)
        versions = checkpoint["channel_versions"]
        for channel, value in checkpoint["channel_values"].items():
            if channel in versions and not is_small(value):
                yield (namespace, channel, str(versions[channel]), *self._serde.dumps_typed(value))

    def _checkpoint(self, row: tuple[Any, ...]) -> ForeignCheckpoint:
        checkpoint_id, namespace, parent_id, kind, data, metadata_text = row
        checkpoint = _unpacked(kind, data)
        values = checkpoint.pop("channel_values")
        versions = checkpoint["channel_versions"]
        small = {
            channel: value for channel, value in values.items() if channel not in versions or is_small(value)
        }
        metadata = {} if metadata_text is None else json_object(metadata_text, "metadata")
        return ForeignCheckpoint(checkpoint_id, namespace, parent_id, checkpoint, metadata, small)


def _unpacked(kind: Any, data: Any) -> dict[str, Any]:
    """Return a checkpoint whose objects stay bytes. Raises `InvalidPayload`."""
    if kind != "msgpack":
        raise InvalidPayload(path="checkpoint/type", reason="only msgpack can be imported")
    try:
        value = ormsgpack.unpackb(data, ext_hook=ormsgpack.Ext, option=ormsgpack.OPT_NON_STR_KEYS)
    except (ValueError, TypeError):
        value = None
    return checked_checkpoint(value)
