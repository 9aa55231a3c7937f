"""The tests of LangGraph's engine, on `DjangoSaver`: ``python -m tests.upstream.langgraph``.

It needs, besides the extra ``dev``: ``pip install pytest-mock syrupy redis pycryptodome``. They are plugins
of pytest and imports of upstream's, which the suite here must not have.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import psycopg

from tests.postgres import NOT_DURABLE, PostgresCluster
from tests.upstream.sdists import unpacked

__all__ = ["MODULES"]

MODULES: Final = (
    "test_pregel",
    "test_pregel_async",
    "test_time_travel",
    "test_time_travel_async",
    "test_interruption",
    "test_large_cases",
    "test_large_cases_async",
    "test_subgraph_persistence",
    "test_subgraph_persistence_async",
)
_MOST_CONNECTIONS: Final = 20
_SOME_FAILED: Final = 1
_MORE_TRIES: Final = 3
"""The exit code of pytest when tests have failed, and nothing else went wrong."""
_CHECKOUT: Final = Path(__file__).parent.parent.parent


class _Connections:
    """Counts the connections to the databases of the run, as the server sees them."""

    def __init__(self, url: str) -> None:
        self.peak = 0
        self._url = url
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._count)

    def __enter__(self) -> _Connections:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end.set()
        self._thread.join()

    def _count(self) -> None:
        counted = "SELECT count(*) FROM pg_stat_activity WHERE datname LIKE 'langgraph%'"
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._end.wait(0.02):
                row = connection.execute(counted).fetchone()
                self.peak = max(self.peak, row[0] if row else 0)


@contextmanager
def _server(database: str, folder: str) -> Iterator[dict[str, Any]]:
    if database == "sqlite":
        yield {"sqlite": folder}
        return
    with PostgresCluster(options=NOT_DURABLE) as cluster:
        yield {"url": cluster.tcp_url}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--workers", default="2", help="processes of pytest-xdist")
    parser.add_argument("-k", dest="only", default="", help="run the tests that match this too")
    arguments = parser.parse_args()
    # The id "memory" is the only one that upstream has snapshots for, and serves sync and async fixtures.
    chosen = f"memory and ({arguments.only})" if arguments.only else "memory"
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-o", "addopts=", "-W", "ignore"]
    for plugin in ("langgraph_plugin", "no:django", "no:asyncio"):
        command += ["-p", plugin]
    command += ["-k", chosen, *(f"tests/{module}.py" for module in MODULES)]
    folder = unpacked("langgraph")
    with TemporaryDirectory() as scratch, _server(arguments.database, scratch) as server:
        command += ["-o", f"cache_dir={scratch}/cache"]
        environment = {
            **os.environ,
            "NO_DOCKER": "true",
            # Not the folder above: its package "tests" is not that of upstream.
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "plugins"), str(_CHECKOUT)]),
            "HELIX_UPSTREAM_DATABASE": json.dumps(server),
        }

        def run(*options: str) -> int:
            return subprocess.run([*command, *options], cwd=folder, env=environment, check=False).returncode

        def run_all() -> int:
            code = run("-n", arguments.workers)
            for _ in range(_MORE_TRIES):
                if code != _SOME_FAILED:
                    break
                # Some tests of upstream compare orders that pauses of 10 ms make, or times on the wall clock.
                print("Those that failed, once more and alone:", flush=True)
                code = run("--last-failed", "--last-failed-no-failures=none")
            return code

        if "url" not in server:
            return run_all()
        with _Connections(server["url"]) as connections:
            code = run_all()
    print(f"{connections.peak} connections at most")
    return code or int(connections.peak > _MOST_CONNECTIONS)


if __name__ == "__main__":
    raise SystemExit(main())
