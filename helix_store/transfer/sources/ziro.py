"""The table of ``@ziro-agent/checkpoint-postgres``, as threads of `SnapshotCheckpointer`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, Final

from helix_store.checkpointers.snapshots.rules import encode_snapshot, new_thread
from helix_store.core import validation
from helix_store.core.types import CheckpointSource
from helix_store.models import CheckpointKind
from helix_store.transfer.records import Counts, Problem
from helix_store.transfer.sources.foreign import ForeignSource, Origin
from helix_store.transfer.sources.readers import PostgresReader
from helix_store.transfer.sources.sessions import ForeignSession, Head, parsed

_SCHEMA: Final = "public"
_TABLE: Final = "ziro_checkpoints"

# Python supports neither other years nor infinity.
_TIME: Final = "CASE WHEN created_at >= '0001-01-02' AND created_at < '9999-12-31' THEN created_at END"

# An id is a UUIDv7: its first 13 characters encode a millisecond, and the others are random. For snapshots of
# the same millisecond, the database's clock shows which snapshot was written last.
_SNAPSHOTS: Final = f"""
    SELECT checkpoint_id, version, {_TIME}, snapshot::text FROM {{table}} WHERE thread_id = %s
    ORDER BY
        CASE WHEN checkpoint_id ~ '^[0-9a-f]{{8}}-[0-9a-f]{{4}}-7' THEN left(checkpoint_id, 13)
            ELSE checkpoint_id END COLLATE "C",
        created_at, checkpoint_id COLLATE "C" """


class ZiroSource(ForeignSource):
    """Threads with their snapshots. The latest snapshot becomes the newest of its thread."""

    kind: ClassVar = "thread"
    session_count_query: ClassVar = "SELECT count(DISTINCT thread_id) FROM {table}"
    sessions_query: ClassVar = f"""
        SELECT thread_id, min({_TIME}), max({_TIME}) FROM {{table}}
        GROUP BY thread_id ORDER BY thread_id COLLATE "C" """

    def __init__(self, origin: Origin) -> None:
        schema, table = origin.schema or _SCHEMA, origin.table or _TABLE
        super().__init__(origin, PostgresReader(origin.dsn, schema=schema, table=table))

    def left_out(self, exported: Counts) -> Iterator[Problem]:
        (count,) = self._reader.one("SELECT count(*) FROM {table}")
        return self.tally.compare({"snapshots": count})

    def _head(self, session: ForeignSession, row: tuple[Any, ...]) -> Head:
        thread_id, created_at, updated_at = row
        return Head(new_thread(validation.identifier(thread_id, "thread_id")), created_at, updated_at)

    def _read_parts(self, session: ForeignSession) -> None:
        for row in self._reader.rows(_SNAPSHOTS, session.id):
            session.take("snapshots", row, partial(self._add, session))

    def _is_empty(self, session: ForeignSession) -> bool:
        return not session.checkpoint_count

    def _add(self, session: ForeignSession, name: str, row: tuple[Any, ...]) -> None:
        checkpoint_id, version, created_at, text = row
        snapshot = encode_snapshot(parsed(text, "/snapshot"), self._limits)
        session.add_checkpoint(
            kind=CheckpointKind.SNAPSHOT.value,
            version=session.checkpoint_count + 1,
            checkpoint_id=validation.identifier(checkpoint_id, "checkpoint_id"),
            source=CheckpointSource.INTERRUPT.value,
            payload=snapshot.text,
            size_bytes=snapshot.size_bytes,
            created_at=created_at,
            snapshot_version=version,
        )
