"""The limit: the same work as one prepared statement, sent by ``pgbench``."""

from __future__ import annotations

import os
import re
import subprocess
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from django.db import connections

from benchmarks.rounds import Ran
from benchmarks.server import database_name
from tests.postgres import PostgresCluster

__all__ = ["Pgbench", "Script", "Stage"]

_RATE = re.compile(r"tps = ([0-9.]+) \(without initial connection time\)")
_PROCESSED = re.compile(r"number of transactions actually processed: (\d+)/(\d+)")
_VARIABLE = re.compile(r"(?<!:):(\w+)")


@dataclass(frozen=True, kw_only=True)
class Script:
    """A pgbench script: ``choose`` are its ``\\set`` commands, ``sql`` its statements.

    ``parameters`` are sent again with each execution, as a client sends them: a literal would be parsed once.
    Beside them there are ``:k``, which no client meets twice, ``:client_id`` and ``:tag``, the run's own.
    ``rows`` is how many rows a read has to return.
    """

    sql: str
    choose: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    alias: str = "default"
    rows: int | None = None

    @property
    def text(self) -> str:
        return f"\\set k :k + 1\n{self.choose}\n{self.sql}\n"

    def require_rows(self) -> None:
        """Fail when a read does not return what it should; every variable that is chosen is 1."""
        if self.rows is None:
            return
        values: dict[str, Any] = {**self.parameters}
        sql = _VARIABLE.sub(lambda match: f"%({match[1]})s", self.sql.replace("%", "%%"))
        for name in _VARIABLE.findall(self.sql):
            values.setdefault(name, 1)
        with connections[self.alias].cursor() as cursor:
            cursor.execute(sql, values)
            found = len(cursor.fetchall())
        if found != self.rows:
            raise AssertionError(f"{found} rows instead of {self.rows}: {self.sql}")


Stage = Callable[[str, int, range], None]
"""Writes what the transactions to come need: of which ``:tag``, of how many clients, and which ``:k``."""


class Pgbench:
    """Runs of one script; each goes on counting in ``:k`` where the last one stopped."""

    def __init__(
        self,
        cluster: PostgresCluster,
        script: Script,
        *,
        clients: int = 1,
        stage: Stage | None = None,
    ) -> None:
        self.cluster = cluster
        self.script = script
        self.clients = clients
        self.stage = stage
        self.tag = uuid.uuid4().hex
        self.k = 0
        script.require_rows()

    def prepare(self, count: int) -> None:
        if self.stage is not None:
            self.stage(self.tag, self.clients, range(self.k + 1, self.k + self._each(count) + 1))

    def run(self, count: int) -> Ran:
        """Do about so many transactions; the time is that without connecting."""
        each = self._each(count)
        with NamedTemporaryFile("w", suffix=".sql") as file:
            file.write(self.script.text)
            file.flush()
            output = self._run(file.name, each)
        self.k += each
        rate, processed = _RATE.search(output), _PROCESSED.search(output)
        if rate is None or processed is None or processed[1] != processed[2]:
            raise RuntimeError(output)
        return Ran(int(processed[1]), int(processed[1]) / float(rate[1]))

    def _each(self, count: int) -> int:
        return max(1, round(count / self.clients))

    def _run(self, script: str, transactions: int) -> str:
        variables = {**self.script.parameters, "tag": self.tag, "k": str(self.k)}
        command = [
            str(Path(self.cluster.binaries) / "pgbench"),
            *("--no-vacuum", "--protocol=prepared", f"--file={script}"),
            *(f"--client={self.clients}", f"--jobs={min(2, self.clients)}", f"--transactions={transactions}"),
            *(f"--define={name}={value}" for name, value in variables.items()),
            *("--host=127.0.0.1", f"--port={self.cluster.port}", f"--username={self.cluster.user}"),
            database_name(self.script.alias),
        ]
        result = subprocess.run(  # noqa: S603  our own binary
            command,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PGPASSWORD": self.cluster.password},
        )
        if result.returncode:
            raise RuntimeError(result.stderr)
        return result.stdout
