"""LangGraph's own savers as sources of ``helix_import``: threads with checkpoints, values and writes."""

from __future__ import annotations

import json
import sqlite3
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar, Final

import ormsgpack
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from helix_store.contrib.langgraph.catalogue import importable_type
from helix_store.contrib.langgraph.encoding import (
    AGENT_TYPE,
    CheckpointAddress,
    about_checkpoint,
    dumped,
    is_small,
    long_id,
)
from helix_store.contrib.langgraph.models import LangGraphCheckpoint, LangGraphValue, LangGraphWrite
from helix_store.core import validation
from helix_store.core.limits import MAX_METADATA_BYTES
from helix_store.exceptions import HelixStoreError, InvalidPayload, InvalidQuery
from helix_store.sessions.state import root_session
from helix_store.transfer.records import Counts, Problem
from helix_store.transfer.sources import (
    ForeignSession,
    ForeignSource,
    Head,
    Origin,
    PostgresReader,
    Reader,
    SqliteReader,
    iso_moment,
    parsed,
    session_of,
)

_NO_TIME: Final = datetime.max.replace(tzinfo=UTC)
_OLDEST_FORMAT: Final = 4


class ThreadSource(ForeignSource):
    """A source of threads as `DjangoSaver` stores them. Values and writes are copied as bytes."""

    kind: ClassVar = "thread"
    checkpoints_query: ClassVar[str]
    """Checkpoints of a thread by namespace and id; each begins with its id, namespace and parent."""
    writes_query: ClassVar[str]
    """The id and namespace of the checkpoint, then task, position, path, channel, type and bytes."""
    values_table: ClassVar[str]
    writes_table: ClassVar[str]

    def __init__(self, origin: Origin, reader: Reader) -> None:
        if origin.table is not None:
            raise InvalidQuery("The names of LangGraph's tables are fixed.", path="table")
        super().__init__(origin, reader)
        self._serde = JsonPlusSerializer(allowed_msgpack_modules=None)

    def _session(self, row: tuple[Any, ...]) -> ForeignSession:
        return session_of(self.kind, row[0])

    def _head(self, session: ForeignSession, row: tuple[Any, ...]) -> Head:
        # A saver writes text. Other values in an SQLite file have no thread of their own here.
        thread_id = validation.instance(row[0], str, "thread_id")
        _, session_id = CheckpointAddress.ids_of_thread(thread_id)
        return Head(root_session(session_id, AGENT_TYPE), _NO_TIME, _NO_TIME)

    def _completed(self, head: Head, session: ForeignSession) -> Head:
        if self._first is _NO_TIME:
            raise InvalidPayload(path="thread_id", reason="the thread has no checkpoint that can be imported")
        return head._replace(created_at=self._first, updated_at=self._last)

    def _read_parts(self, session: ForeignSession) -> None:
        # The number of bytes of each value read so far, until a checkpoint refers to the value.
        self._sizes: dict[tuple[str, str, str], int] = {}
        self._first, self._last = _NO_TIME, datetime.min.replace(tzinfo=UTC)
        for row in self._value_rows(session.source_id):
            session.take(self.values_table, row, partial(self._add_value, session))
        for row in self._reader.rows(self.checkpoints_query, session.source_id):
            session.take("checkpoints", row, partial(self._add_checkpoint, session))
        for row in self._reader.rows(self.writes_query, session.source_id):
            session.take(self.writes_table, row, partial(self._add_write, session))

    @abstractmethod
    def _value_rows(self, thread_id: str) -> Iterator[tuple[Any, ...]]:
        """Yield the channel, namespace, version, type and bytes of each value, ordered by the first three as
        in an export.
        """

    @abstractmethod
    def _checkpoint(self, *columns: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return a checkpoint, its metadata and the values inside it, from the columns after its id,
        namespace and parent. Raises `InvalidPayload` if they cannot be read.
        """

    def _add_value(self, session: ForeignSession, _: str, row: tuple[Any, ...]) -> None:
        channel, namespace, version, kind, blob = row
        value = LangGraphValue(
            namespace=long_id(namespace, "checkpoint_ns"),
            channel=long_id(channel, "channel"),
            version=long_id(version, "version"),
            type=importable_type(kind),
            blob=_bytes(blob, "blob"),
        )
        session.add(value)
        self._sizes[namespace, channel, version] = len(value.blob)

    def _add_checkpoint(self, session: ForeignSession, _: str, row: tuple[Any, ...]) -> None:
        checkpoint_id, namespace, parent_id, *columns = row
        stored, metadata, small = self._checkpoint(*columns)
        if parent_id and stored.get("v", 0) < _OLDEST_FORMAT:
            raise InvalidPayload(path="checkpoint/v", reason="the format is older than LangGraph 0.5")
        at = iso_moment(stored.get("ts"), "checkpoint/ts")
        versions = {
            channel: str(version)
            for channel, version in stored["channel_versions"].items()
            if (namespace, channel, str(version)) in self._sizes
        }
        new = [(namespace, channel, version) for channel, version in versions.items()]
        size = sum(self._sizes[value] for value in new)
        self._sizes.update(dict.fromkeys(new, 0))
        body = {"checkpoint": stored, "metadata": metadata, "values": small}
        kind, text = dumped(self._serde, body, "checkpoint")
        about = about_checkpoint(metadata)
        checkpoint = LangGraphCheckpoint(
            thread_id=None if session.source_id == session.id else session.source_id,
            namespace=long_id(namespace, "checkpoint_ns"),
            checkpoint_id=long_id(checkpoint_id, "checkpoint_id"),
            parent_id=parent_id and long_id(parent_id, "parent_checkpoint_id"),
            **{**about, "metadata": json.loads(about["metadata"])},
            versions=json.dumps(versions, ensure_ascii=False),
            type=kind,
            body=text,
            size_bytes=len(text) + size,
            created_at=at,
        )
        session.add(checkpoint)
        session.checkpoint_count += 1
        self._first, self._last = min(self._first, at), max(self._last, at)

    def _add_write(self, session: ForeignSession, _: str, row: tuple[Any, ...]) -> None:
        checkpoint_id, namespace, task_id, position, task_path, channel, kind, blob = row
        write = LangGraphWrite(
            namespace=long_id(namespace, "checkpoint_ns"),
            checkpoint_id=long_id(checkpoint_id, "checkpoint_id"),
            task_id=long_id(task_id, "task_id"),
            position=validation.whole_number(position, "idx", minimum=-(2**31), maximum=2**31 - 1),
            task_path=validation.text(task_path, "task_path", limit=MAX_METADATA_BYTES),
            channel=long_id(channel, "channel"),
            type=importable_type(kind),
            blob=_bytes(blob, "value"),
        )
        session.add(write)


# --- PostgreSQL ------------------------------------------------------------------------------------

_POSTGRES_THREADS: Final = """
    SELECT thread_id FROM checkpoints UNION SELECT thread_id FROM checkpoint_writes
    UNION SELECT thread_id FROM checkpoint_blobs WHERE type <> 'empty' """

# A row of the type "empty" means that the channel has no value at that version.
_POSTGRES_VALUES: Final = """
    SELECT channel, checkpoint_ns, version, type, blob FROM checkpoint_blobs
    WHERE thread_id = %s AND type <> 'empty'
    ORDER BY checkpoint_ns COLLATE "C", channel COLLATE "C", version COLLATE "C" """


class PostgresSaverSource(ThreadSource):
    session_count_query: ClassVar = f"SELECT count(*) FROM ({_POSTGRES_THREADS}) AS threads"
    sessions_query: ClassVar = (
        f'SELECT thread_id FROM ({_POSTGRES_THREADS}) AS threads ORDER BY thread_id COLLATE "C"'
    )
    checkpoints_query: ClassVar = """
        SELECT checkpoint_id, checkpoint_ns, parent_checkpoint_id, checkpoint::text, metadata::text
        FROM checkpoints WHERE thread_id = %s
        ORDER BY checkpoint_ns COLLATE "C", checkpoint_id COLLATE "C" """
    writes_query: ClassVar = """
        SELECT checkpoint_id, checkpoint_ns, task_id, idx, task_path, channel, type, blob
        FROM checkpoint_writes WHERE thread_id = %s
        ORDER BY checkpoint_ns COLLATE "C", checkpoint_id COLLATE "C", task_id COLLATE "C", idx """
    values_table: ClassVar = "checkpoint_blobs"
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

    def _value_rows(self, thread_id: str) -> Iterator[tuple[Any, ...]]:
        return self._reader.rows(_POSTGRES_VALUES, thread_id)

    def _checkpoint(self, *columns: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        checkpoint_text, metadata_text = columns
        checkpoint = _checked(_json_object(checkpoint_text, "checkpoint"))
        small = checkpoint.pop("channel_values")
        return checkpoint, _json_object(metadata_text, "metadata"), small


# --- SQLite ----------------------------------------------------------------------------------------

_SORTED_VALUES: Final = """
    CREATE TABLE v (channel, ns, version, type, blob, PRIMARY KEY (ns, channel, version)) WITHOUT ROWID"""
_SQLITE_THREADS: Final = "SELECT thread_id FROM checkpoints UNION SELECT thread_id FROM writes"


class SqliteSaverSource(ThreadSource):
    """The source of threads. Each checkpoint contains all values; a value of several checkpoints is imported
    once, by its version. The bytes are split without building the objects in them, so that code in the data
    cannot run during the import.
    """

    session_count_query: ClassVar = f"SELECT count(*) FROM ({_SQLITE_THREADS})"
    sessions_query: ClassVar = f"SELECT thread_id FROM ({_SQLITE_THREADS}) ORDER BY thread_id"
    checkpoints_query: ClassVar = """
        SELECT checkpoint_id, checkpoint_ns, parent_checkpoint_id, type, checkpoint, metadata
        FROM checkpoints WHERE thread_id = ? ORDER BY checkpoint_ns, checkpoint_id """
    writes_query: ClassVar = """
        SELECT checkpoint_id, checkpoint_ns, task_id, idx, task_path, channel, type, value
        FROM writes WHERE thread_id = ? ORDER BY checkpoint_ns, checkpoint_id, task_id, idx """
    values_table: ClassVar = "values"
    writes_table: ClassVar = "writes"

    def __init__(self, origin: Origin) -> None:
        if origin.schema is not None:
            raise InvalidQuery("An SQLite file has no schemas.", path="schema")
        super().__init__(origin, SqliteReader(origin.dsn))

    def left_out(self, exported: Counts) -> Iterator[Problem]:
        """Yield the tables from which the source has not read all rows."""
        return self.tally.compare(self._reader.row_counts("checkpoints", "writes"))

    def _value_rows(self, thread_id: str) -> Iterator[tuple[Any, ...]]:
        # The values are on disk and in export order, because those of a thread may not fit into memory.
        with closing(sqlite3.connect("", isolation_level=None)) as sorter:
            sorter.execute(_SORTED_VALUES)
            for row in self._reader.rows(self.checkpoints_query, thread_id):
                try:
                    values = list(self._values(row))
                except HelixStoreError:
                    continue  # This is reported when the checkpoint is added.
                sorter.executemany("INSERT OR IGNORE INTO v VALUES (?, ?, ?, ?, ?)", values)
            yield from sorter.execute("SELECT * FROM v ORDER BY ns, channel, version")

    def _values(self, row: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        _, namespace, _, kind, data, _ = row
        checkpoint = self._unpacked(kind, data)
        versions = checkpoint["channel_versions"]
        for channel, value in checkpoint["channel_values"].items():
            if channel in versions and not is_small(value):
                yield (channel, namespace, str(versions[channel]), *dumped(self._serde, value, channel))

    def _checkpoint(self, *columns: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        kind, data, metadata_text = columns
        checkpoint = self._unpacked(kind, data)
        values = checkpoint.pop("channel_values")
        versions = checkpoint["channel_versions"]
        small = {
            channel: value for channel, value in values.items() if channel not in versions or is_small(value)
        }
        return checkpoint, {} if metadata_text is None else _json_object(metadata_text, "metadata"), small

    def _unpacked(self, kind: Any, data: Any) -> dict[str, Any]:
        """Return a checkpoint in which objects remain bytes. Raises `InvalidPayload`."""
        if kind != "msgpack":
            raise InvalidPayload(path="checkpoint/type", reason="only msgpack can be imported")
        try:
            value = ormsgpack.unpackb(data, ext_hook=ormsgpack.Ext, option=ormsgpack.OPT_NON_STR_KEYS)
        except (ValueError, TypeError):
            value = None
        # What is nested too deeply can be read but not written: the checkpoint is left out with its values.
        dumped(self._serde, value, "checkpoint")
        return _checked(value)


# --- Shared parts ----------------------------------------------------------------------------------


def _bytes(value: Any, path: str) -> bytes:
    """Return the bytes of a value or write. Raises `InvalidPayload` for anything else in an SQLite file."""
    if value is not None and type(value) is not bytes:
        raise InvalidPayload(path=path, reason="expected bytes")
    return value or b""


def _checked(value: Any) -> dict[str, Any]:
    """Return the checkpoint of a saver with the parts that the import reads. Raises `InvalidPayload`."""
    if type(value) is not dict:
        raise InvalidPayload(path="checkpoint", reason="it is not a readable object")
    for part in ("channel_values", "channel_versions"):
        value[part] = value.get(part) or {}
        if type(value[part]) is not dict or not all(type(channel) is str for channel in value[part]):
            raise InvalidPayload(path=f"checkpoint/{part}", reason="expected an object")
    validation.whole_number(value.get("v", 0), "checkpoint/v")
    return value


def _json_object(text: Any, path: str) -> dict[str, Any]:
    """Return the object in a JSON text. Raises `InvalidPayload`."""
    value = parsed(text, path)
    if not isinstance(value, dict):
        raise InvalidPayload(path=path, reason="it is not a readable object")
    return value
