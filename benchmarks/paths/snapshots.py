"""Snapshots of whole agents: put, get, list."""

from __future__ import annotations

import itertools
import json
from typing import Any

from benchmarks.bench import Bench
from benchmarks.evidence import Evidence
from benchmarks.figures import Target
from benchmarks.operations import Operation
from benchmarks.payloads import state_of
from benchmarks.pgbench import Script
from benchmarks.races import Client, Comparison, Limit, Race
from benchmarks.reference import execute, reference_schema
from benchmarks.sessions import WORKERS
from helix_store.checkpointers import SnapshotCheckpointer
from helix_store.checkpointers.snapshots import CheckpointMeta
from helix_store.models import Checkpoint

__all__ = ["CASES"]

THREADS_PER_WORKER = 2
CAP = 100
LISTED = 20
NODE_CLIENT = {"put": 1_624, "get": 4_980, "list": 4_212}
"""Operations per second of the original's client for Node.js, written down on another machine."""
_NOTE = "context: the other rate was recorded on another machine"


class Snapshots(Operation):
    def __init__(self, worker: int) -> None:
        self.snapshots = SnapshotCheckpointer(max_checkpoints_per_thread=CAP)
        self.threads = itertools.cycle(thread_names(worker))


class Put(Snapshots):
    def __init__(self, worker: int) -> None:
        super().__init__(worker)
        self.snapshot = snapshot()

    def __call__(self) -> None:
        self.snapshots.put(next(self.threads), self.snapshot)


class Get(Snapshots):
    found: dict[str, Any] | None = None

    def __call__(self) -> None:
        self.found = self.snapshots.get(next(self.threads))

    def check(self) -> None:
        assert self.found == snapshot()


class List(Snapshots):
    found: list[CheckpointMeta]

    def __call__(self) -> None:
        self.found = self.snapshots.list(next(self.threads), limit=LISTED)

    def check(self) -> None:
        assert len({meta.id for meta in self.found}) == LISTED


def snapshot() -> dict[str, Any]:
    return {"version": 2, "step": 3, "state": state_of(4)}


def thread_names(worker: int) -> list[str]:
    return [f"thread-{worker * THREADS_PER_WORKER + number}" for number in range(THREADS_PER_WORKER)]


def full_threads(bench: Bench) -> None:
    """Threads with as many snapshots as they may have, ours and the limit's."""
    snapshots = SnapshotCheckpointer(max_checkpoints_per_thread=CAP)
    for worker in range(WORKERS):
        for thread in thread_names(worker):
            for _ in range(CAP):
                snapshots.put(thread, snapshot())
    bench.once(reference_schema)
    parameters = {"threads": WORKERS * THREADS_PER_WORKER, "cap": CAP, "snapshot": json.dumps(snapshot())}
    execute(
        "default",
        """
        INSERT INTO ref_thread
        SELECT 'thread-' || n, %(cap)s FROM generate_series(0, %(threads)s - 1) AS n""",
        parameters,
    )
    execute(
        "default",
        """
        INSERT INTO ref_snapshot
        SELECT id, n, gen_random_uuid()::text, 4000, %(snapshot)s::jsonb, clock_timestamp()
        FROM ref_thread, generate_series(1, %(cap)s) AS n""",
        parameters,
    )


_PICK = f"\\set s :client_id * {THREADS_PER_WORKER} + :k % {THREADS_PER_WORKER}"
_PUT = f"""
    WITH head AS (
        UPDATE ref_thread SET last_seq = last_seq + 1 WHERE id = 'thread-' || :s RETURNING id, last_seq
    ), dropped AS (
        DELETE FROM ref_snapshot USING head WHERE thread_id = head.id AND seq <= head.last_seq - {CAP}
    )
    INSERT INTO ref_snapshot
    SELECT id, last_seq, gen_random_uuid()::text, 4000, :snapshot::jsonb, clock_timestamp() FROM head
    RETURNING id;"""
_PUT_EVIDENCE = f"""
    SELECT sum(newest), sum(kept) FROM (
        SELECT max(version) AS newest, count(*) AS kept FROM "{Checkpoint._meta.db_table}"
        WHERE kind = 'snapshot' GROUP BY session_id) AS threads"""


def _race(
    verb: str,
    target: Target,
    ours: Client,
    *,
    sql: str,
    evidence: Evidence | None = None,
    **script: Any,
) -> Race:
    return Race(
        contestants={
            "limit": Limit(script=Script(choose=_PICK, sql=sql, **script), evidence=evidence),
            "ours": ours,
        },
        comparisons=[
            Comparison(path=f"snapshot {verb} 4 KB"),
            Comparison(
                path=f"snapshot {verb} 4 KB, against the node client",
                to=None,
                recorded=NODE_CLIENT[verb],
                target=target,
                note=_NOTE,
            ),
        ],
        needs=[full_threads],
    )


CASES = [
    _race(
        "put",
        Target(1.0, 1.3),
        Client(operation=Put, evidence=Evidence(_PUT_EVIDENCE, (1, 0))),
        sql=_PUT,
        evidence=Evidence(
            "SELECT (SELECT sum(last_seq) FROM ref_thread), (SELECT count(*) FROM ref_snapshot)", (1, 0)
        ),
        parameters={"snapshot": json.dumps(snapshot())},
    ),
    _race(
        "get",
        Target(0.6, 0.8),
        Client(operation=Get),
        sql="SELECT payload FROM ref_snapshot WHERE thread_id = 'thread-' || :s ORDER BY seq DESC LIMIT 1;",
        rows=1,
    ),
    _race(
        "list",
        Target(0.6, 0.8),
        Client(operation=List),
        sql=f"""
            SELECT id, created_at, size FROM ref_snapshot WHERE thread_id = 'thread-' || :s
            ORDER BY seq DESC LIMIT {LISTED};""",
        rows=LISTED,
    ),
]
