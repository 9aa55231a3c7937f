"""The limit: the same work as one prepared statement, sent by ``pgbench``."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile

from tests.postgres import PostgresCluster

__all__ = ["Limit"]

_RATE = re.compile(r"tps = ([0-9.]+) \(without initial connection time\)")


class Limit:
    """A ``pgbench`` script; each run goes on counting in ``:k`` where the last one stopped."""

    def __init__(self, cluster: PostgresCluster, script: str, *, clients: int = 1) -> None:
        self.cluster = cluster
        self.clients = clients
        self.script = script
        self.runs = 0

    def __call__(self, seconds: float) -> float:
        self.runs += 1
        # pgbench counts whole seconds.
        whole_seconds = max(1, round(seconds))
        with NamedTemporaryFile("w", suffix=".sql") as file:
            file.write(self.script)
            file.flush()
            output = self._run(file.name, whole_seconds)
        found = _RATE.search(output)
        if found is None:
            raise RuntimeError(output)
        return float(found[1])

    def _run(self, script: str, seconds: int) -> str:
        command = [
            str(Path(self.cluster.binaries) / "pgbench"),
            *("--no-vacuum", "--protocol=prepared", f"--file={script}"),
            *(f"--client={self.clients}", f"--jobs={min(2, self.clients)}", f"--time={seconds}"),
            *(f"--define=k={self.runs * 1_000_000}", self.cluster.tcp_url),
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  our own binary
        if result.returncode:
            raise RuntimeError(result.stderr)
        return result.stdout
