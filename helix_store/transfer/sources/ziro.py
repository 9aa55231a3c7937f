"""The table of ``@ziro-agent/checkpoint-postgres``, as threads of `SnapshotCheckpointer`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any, Final

from helix_store import conf
from helix_store.checkpointers.snapshots.rules import encode_snapshot, new_thread
from helix_store.core import validation
from helix_store.core.types import CheckpointSource
from helix_store.exceptions import HelixStoreError, InvalidPayload, shown_id
from helix_store.models import Checkpoint, CheckpointKind
from helix_store.transfer.layout import CHECKPOINTS
from helix_store.transfer.records import Counts, Problem, Record, Unit
from helix_store.transfer.sources.origin import Origin, Tally
from helix_store.transfer.sources.postgres import PostgresReader
from helix_store.transfer.sources.sessions import head_records
from helix_store.transfer.sources.spool import Spool

__all__ = ["ZiroSource"]

_SCHEMA: Final = "public"
_TABLE: Final = "ziro_checkpoints"

_THREADS: Final = """
    SELECT thread_id, min(created_at), max(created_at) FROM {table}
    GROUP BY thread_id ORDER BY thread_id COLLATE "C" """
# An id is a UUIDv7: its first 13 characters are a millisecond, and the others are random. Within one
# millisecond the database's clock tells which snapshot was written last.
_SNAPSHOTS: Final = """
    SELECT checkpoint_id, version, created_at, snapshot::text FROM {table} WHERE thread_id = %s
    ORDER BY
        CASE WHEN checkpoint_id ~ '^[0-9a-f]{{8}}-[0-9a-f]{{4}}-7' THEN left(checkpoint_id, 13)
            ELSE checkpoint_id END COLLATE "C",
        created_at, checkpoint_id COLLATE "C" """


class ZiroSource:
    """Threads with their snapshots. The last one in time becomes the newest of its thread."""

    def __init__(self, origin: Origin) -> None:
        self._tenant = validation.tenant(origin.tenant)
        self._only_whole = origin.only_whole
        table = (origin.schema or _SCHEMA, origin.table or _TABLE)
        self._reader = PostgresReader(origin.dsn, names={"table": table})
        self._limits = conf.limits()
        self.tally = Tally()

    @property
    def session_count(self) -> int:
        count: int = self._reader.one("SELECT count(DISTINCT thread_id) FROM {table}")[0]
        return count

    def reading(self) -> AbstractContextManager[None]:
        return self._reader.reading()

    def units(self) -> Iterator[Unit]:
        for row in self._reader.rows(_THREADS):
            with Spool() as snapshots:
                tally = Tally()
                head = self._read(row, snapshots, tally)
                self.tally.add(tally)
                if head is not None:
                    yield Unit("session", self._tenant, row[0], partial(_records, head, snapshots))

    def left_out(self, exported: Counts) -> Iterator[Problem]:
        (count,) = self._reader.one("SELECT count(*) FROM {table}")
        return self.tally.compare({"snapshots": count})

    def _read(self, row: tuple[Any, ...], snapshots: Spool, tally: Tally) -> list[Record] | None:
        """Read all of a thread, and return its first records; ``None`` if it is left out."""
        thread_id, created_at, updated_at = row
        number = 0
        for snapshot in self._reader.rows(_SNAPSHOTS, thread_id):
            tally.found["snapshots"] += 1
            try:
                snapshots.add(self._record(snapshot, number + 1))
                number += 1
            except HelixStoreError as exc:
                name = f"snapshot {shown_id(snapshot[0])} of thread {shown_id(thread_id)}"
                tally.leave("snapshots", name, exc)
        head, reason = None, None
        try:
            validation.identifier(thread_id, "thread_id")
            new = new_thread(thread_id)
        except HelixStoreError as exc:
            reason = f"thread {shown_id(thread_id)} is left out: {exc}"
        if reason is None and tally.problems and (self._only_whole or not number):
            reason = f"thread {shown_id(thread_id)} is left out, because of {len(tally.problems)} problems"
        if reason is not None:
            tally.leave_all(reason)
        else:
            head = head_records(new, self._tenant, created_at=created_at, updated_at=updated_at)
        return head

    def _record(self, row: tuple[Any, ...], number: int) -> Record:
        checkpoint_id, version, created_at, text = row
        snapshot = encode_snapshot(_document(text), self._limits)
        return CHECKPOINTS.record_from(
            Checkpoint(
                kind=CheckpointKind.SNAPSHOT.value,
                version=number,
                checkpoint_id=validation.identifier(checkpoint_id, "checkpoint_id"),
                source=CheckpointSource.INTERRUPT.value,
                payload=snapshot.text,
                size_bytes=snapshot.size_bytes,
                created_at=created_at,
                snapshot_version=version,
            )
        )


def _document(text: str) -> Any:
    """The value of a document of the database. Raises `InvalidPayload` for one that Python cannot read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    raise InvalidPayload(path="/snapshot", reason="it is nested too deeply, or has too long a number")


def _records(head: list[Record], snapshots: Spool) -> Iterator[Record]:
    return chain(head, snapshots.records())
