"""Small writes that workers agree by: a status compared and set, a lock acquired and released."""

from __future__ import annotations

import itertools

from benchmarks.bench import Bench
from benchmarks.evidence import Evidence
from benchmarks.figures import Target
from benchmarks.operations import Operation
from benchmarks.pgbench import Script
from benchmarks.races import Client, Comparison, Limit, Race
from benchmarks.reference import execute, reference_schema, reference_sessions
from benchmarks.sessions import PER_WORKER, WORKERS, live_sessions, sessions_of
from helix_store.models import Lock, Session
from helix_store.stores import DatabaseLockManager, DatabaseStateStore

__all__ = ["CASES"]


class SetStatus(Operation):
    def __init__(self, worker: int) -> None:
        self.store = DatabaseStateStore()
        self.sessions = itertools.cycle(sessions_of(worker))

    def __call__(self) -> None:
        changed = self.store.compare_and_set_status(next(self.sessions), ["active", "running"], "active")
        assert changed.ok


class LockCycle(Operation):
    def __init__(self, worker: int) -> None:
        self.manager = DatabaseLockManager()
        self.names = itertools.cycle(lock_names(worker))

    def __call__(self) -> None:
        lock = self.manager.acquire(next(self.names))
        assert lock is not None
        assert lock.release()


def lock_names(worker: int) -> list[str]:
    return [f"lock-{worker * PER_WORKER + number}" for number in range(1, PER_WORKER + 1)]


def locks(bench: Bench) -> None:
    """Names that were held before, as those of sessions are."""
    manager = DatabaseLockManager()
    for worker in range(WORKERS):
        for name in lock_names(worker):
            lock = manager.acquire(name)
            assert lock is not None
            lock.release()
    bench.once(reference_schema)
    execute(
        "default",
        "INSERT INTO ref_lock SELECT 'lock-' || n, 0, NULL FROM generate_series(1, %s) AS n",
        [WORKERS * PER_WORKER],
    )


PICK = f"\\set s 1 + :client_id * {PER_WORKER} + :k % {PER_WORKER}"

CASES = [
    Race(
        contestants={
            "limit": Limit(
                script=Script(
                    choose=PICK,
                    sql="""
                        UPDATE ref_session
                        SET status = 'active', version = version + 1, updated_at = clock_timestamp()
                        WHERE id = 's-' || :s AND status IN ('active', 'running') RETURNING version;""",
                ),
                evidence=Evidence("SELECT sum(version) FROM ref_session", (1,)),
            ),
            "ours": Client(
                operation=SetStatus,
                evidence=Evidence(f'SELECT sum(version) FROM "{Session._meta.db_table}"', (1,)),
            ),
        },
        comparisons=[Comparison(path="compare_and_set_status", target=Target(0.45, 0.65))],
        needs=[live_sessions, reference_sessions],
    ),
    Race(
        contestants={
            "limit": Limit(
                script=Script(
                    choose=PICK,
                    sql="""
                        INSERT INTO ref_lock
                        VALUES ('lock-' || :s, 1, clock_timestamp() + interval '30 s')
                        ON CONFLICT (name) DO UPDATE
                        SET token = ref_lock.token + 1, expires_at = excluded.expires_at
                        WHERE ref_lock.expires_at IS NULL OR ref_lock.expires_at < clock_timestamp()
                        RETURNING token;
                        UPDATE ref_lock SET expires_at = NULL WHERE name = 'lock-' || :s;""",
                ),
                evidence=Evidence("SELECT sum(token), count(expires_at) FROM ref_lock", (1, 0)),
            ),
            "ours": Client(
                operation=LockCycle,
                evidence=Evidence(
                    f'SELECT sum(token), count(expires_at) FROM "{Lock._meta.db_table}"', (1, 0)
                ),
            ),
        },
        comparisons=[Comparison(path="lock acquire + release", target=Target(0.45, 0.65))],
        needs=[locks],
    ),
]
