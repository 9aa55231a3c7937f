"""What is written: bytes of a checkpoint, write-ahead log and disk for a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from django.db import connections

from benchmarks.bench import Bench
from benchmarks.figures import Figure, LeftOut, Target
from benchmarks.paths.steps import LANGGRAPH, OPENAI_AGENTS
from benchmarks.payloads import STATES, state_of
from benchmarks.peers import ADD_ITEMS, PUT_AND_WRITE, peer_tables
from benchmarks.races import Case, Client, Contestant
from benchmarks.reference import fill_reference_sessions, reference_schema_in
from benchmarks.rounds import prepared_run
from benchmarks.server import create_database, settle
from benchmarks.sessions import AGENT_TYPE, create_sessions, sessions_of
from benchmarks.steps import Step, step_evidence, step_limit
from helix_store.core.types import StepInfo
from helix_store.models import Checkpoint
from helix_store.stores import DatabaseStateStore

__all__ = ["CASES"]


@dataclass(frozen=True)
class CheckpointBytes:
    """Checkpoints of one session in a row, two of 24 keys changing, against the whole state as jsonb."""

    kib: int
    target: Target | None

    @property
    def paths(self) -> Sequence[str]:
        return [f"bytes of a checkpoint of {self.kib} KB, 2 of 24 keys changed, against jsonb"]

    def measure(self, bench: Bench, wanted: Callable[[str], bool]) -> Iterator[Figure]:
        if not wanted(self.paths[0]):
            return
        bench.once(_storage_database)
        ours = self._ours(bench.scale.checkpoints)
        jsonb = self._jsonb(bench.scale.checkpoints)
        yield Figure(
            path=self.paths[0],
            values=[ours / jsonb],
            target=self.target,
            note=f"{ours:,.0f} B against {jsonb:,.0f} B",
        )

    def _ours(self, count: int) -> float:
        store = DatabaseStateStore("storage")
        session = store.create_session(f"of-{self.kib}", agent_type=AGENT_TYPE)
        before = _relation_bytes(Checkpoint._meta.db_table)
        for number in range(count):
            session.custom_state = state_of(self.kib, number)
            store.save_state_and_promote_staging(
                session.session_id, session, [], StepInfo(f"step-{number}", number)
            )
        written = _relation_bytes(Checkpoint._meta.db_table) - before
        for back in (0, 1, STATES + 1):
            page = store.list_checkpoints(session.session_id, limit=back + 1)
            found = store.get_checkpoint(session.session_id, page.items[back].checkpoint_id)
            assert found is not None
            assert found.state.custom_state == state_of(self.kib, count - 1 - back)
        return written / count

    def _jsonb(self, count: int) -> float:
        before = _relation_bytes("ref_checkpoint")
        with connections["storage"].cursor() as cursor:
            cursor.executemany(
                "INSERT INTO ref_checkpoint VALUES (%s, %s, %s::jsonb, 0, clock_timestamp())",
                [
                    (f"of-{self.kib}", number, json.dumps(state_of(self.kib, number)))
                    for number in range(count)
                ],
            )
        return (_relation_bytes("ref_checkpoint") - before) / count


@dataclass(frozen=True)
class StepBytes:
    """What one contestant's step adds to the write-ahead log and to its database's files."""

    name: str
    contestant: Contestant
    alias: str
    needs: Callable[[Bench], None]

    @property
    def paths(self) -> Sequence[str]:
        return [f"WAL of a step: {self.name}", f"bytes on disk of a step: {self.name}"]

    def measure(self, bench: Bench, wanted: Callable[[str], bool]) -> Iterator[Figure | LeftOut]:
        if not any(map(wanted, self.paths)):
            return
        if self.contestant.missing:
            reason = self.contestant.missing
            yield from (LeftOut(path, reason) for path in self.paths if wanted(path))
            return
        bench.once(self.needs)
        settle(self.alias)
        with ExitStack() as stack:
            leg = self.contestant.enter(bench, 1, f"bytes: {self.name}", stack)
            # Pages that are written for the first time after a checkpoint of the server go to the log whole.
            prepared_run(leg, bench.scale.checkpoints)
            wal, disk = _wal_position(), _database_bytes(self.alias)
            operations = prepared_run(leg, bench.scale.checkpoints).operations
            written = _wal_position() - wal, _database_bytes(self.alias) - disk
        for path, grown in zip(self.paths, written, strict=True):
            if wanted(path):
                yield Figure(path=path, values=[grown / operations], unit="B")


def _storage_database(bench: Bench) -> None:
    """A database where nothing was deleted yet, so that what is written takes new room."""
    create_database(bench.cluster, "storage")
    create_sessions("storage", sessions_of(0))
    reference_schema_in("storage")
    fill_reference_sessions("storage")


def _relation_bytes(prefix: str) -> int:
    """Of a table and of those whose names go on from its own, with their indexes and TOAST."""
    return _number(
        "storage",
        f"""
        SELECT sum(pg_total_relation_size(oid)) FROM pg_class
        WHERE relkind = 'r' AND starts_with(relname, '{prefix}')""",
    )


def _database_bytes(alias: str) -> int:
    return _number(alias, "SELECT pg_database_size(current_database())")


def _wal_position() -> int:
    return _number("default", "SELECT pg_current_wal_insert_lsn() - '0/0'")


def _number(alias: str, sql: str) -> int:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql.replace("%", "%%"), [])
        return int(cursor.fetchone()[0])


CASES: Sequence[Case] = [
    CheckpointBytes(4, Target(0.8, 0.2, at_most=True)),
    CheckpointBytes(16, None),
    StepBytes("limit", step_limit(alias="storage"), "storage", _storage_database),
    StepBytes(
        "ours",
        Client(operation=partial(Step, alias="storage"), evidence=step_evidence("storage")),
        "storage",
        _storage_database,
    ),
    StepBytes(LANGGRAPH, PUT_AND_WRITE, "peers", peer_tables),
    StepBytes(OPENAI_AGENTS, ADD_ITEMS, "peers", peer_tables),
]
