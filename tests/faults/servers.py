"""Crashes of a PostgreSQL server, and the moment at which it is ready again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from django.db.backends.base.base import BaseDatabaseWrapper

from tests.faults.campaign import Trial
from tests.faults.crew import until
from tests.postgres import PostgresCluster

__all__ = ["crash_one_process", "kill_all_processes"]

_READY: Final = b"database system is ready to accept connections"
_OF_CLIENTS: Final = "client backend"
_PROCESSES: Final = """
    SELECT backend_type, pid FROM pg_stat_activity
    WHERE pid <> pg_backend_pid() AND backend_type IN ('client backend', 'checkpointer', 'walwriter')
    ORDER BY backend_type, pid"""


def crash_one_process(cluster: PostgresCluster, connection: BaseDatabaseWrapper, trial: Trial) -> int:
    """Kill a client's process of the server, at times one of its own: it ends all others and recovers."""
    with connection.cursor() as cursor:
        cursor.execute(_PROCESSES)
        found: dict[str, list[int]] = {}
        for kind, pid in cursor.fetchall():
            found.setdefault(kind, []).append(pid)
    kind = _OF_CLIENTS if trial.chance.random() < 0.8 else trial.chance.choice(sorted(found))
    trial.count(f"killed: {kind}")
    victim = trial.chance.choice(found[kind])
    return _ready_after(cluster, lambda: os.kill(victim, signal.SIGKILL))


def kill_all_processes(cluster: PostgresCluster, connection: BaseDatabaseWrapper, trial: Trial) -> int:
    """Kill the whole server and start it."""
    trial.count("killed: server")

    def kill_and_start() -> None:
        cluster.kill()
        cluster.start()

    return _ready_after(cluster, kill_and_start)


def _ready_after(cluster: PostgresCluster, crash: Callable[[], object]) -> int:
    """Make the server crash. Returns the moment, in nanoseconds, at which its log says that it is ready."""
    log = cluster.directory / "log"
    end = log.stat().st_size
    # Beside the crash: pg_ctl notices a server that is ready only a while later.
    with ThreadPoolExecutor(1) as beside:
        ready = beside.submit(_wait_for_ready, log, end)
        crash()
        return ready.result()


def _wait_for_ready(log: Path, begin: int) -> int:
    def is_ready() -> bool:
        with log.open("rb") as file:
            file.seek(begin)
            return _READY in file.read()

    until(is_ready, "the server is ready")
    return time.monotonic_ns()
