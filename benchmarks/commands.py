"""``python -m benchmarks.commands``: memory and time of the commands that read or write all sessions.

It fills a database of each kind with 10,000, 50,000 and 100,000 sessions that are idle, runs each command in
a process, and prints its time, the highest memory of that process and what it printed last. Memory that does
not depend on the number of sessions is what it is there to show. One session in five is a sub-session.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from django.core.management import call_command
from django.db import connections

from benchmarks.server import benchmark_server, create_database
from tests.postgres import PostgresCluster

__all__ = ["COMMANDS", "main"]

COMMANDS: Mapping[str, str] = {
    "list": "helix_sessions list",
    "doctor": "helix_doctor",
    "export": "helix_export --output {file}",
    "import": "helix_import {file}",
    "retention, dry run": "helix_retention --dry-run",
    "erasure, dry run": "helix_erase --tenant work --dry-run",
    "retention": "helix_retention --tenant work",
    "erasure": "helix_erase --tenant work --no-input",
}
"""In this order. ``import`` fills a second database, from which ``erasure`` deletes."""

DATABASES: Mapping[str, tuple[str, str]] = {
    "sqlite": ("sqlite", "second_sqlite"),
    "postgres": ("large", "first"),
}
_TEMPLATE, _TENANT = "template", "work"
_STRIDE = 100
"""Between the keys of the checkpoints of two copies."""
_DAYS_IDLE = 100


@dataclass(frozen=True)
class Ran:
    seconds: float
    megabytes: float
    said: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commands", description=__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[10_000, 50_000, 100_000], metavar="N")
    parser.add_argument("--database", choices=list(DATABASES), nargs="+", metavar="KIND")
    parser.add_argument("--only", choices=list(COMMANDS), nargs="+", metavar="COMMAND")
    given = parser.parse_args()
    print(
        f"{'database':>10} {'sessions':>9}  {'command':<20} {'seconds':>8} {'MB':>6}  ended with", flush=True
    )
    with benchmark_server() as cluster, TemporaryDirectory() as folder:
        for kind in given.database or DATABASES:
            full, empty = _databases(kind, cluster)
            for sessions in given.sessions:
                _fill(full, sessions)
                for name, command in COMMANDS.items():
                    if given.only and name not in given.only:
                        continue
                    alias = empty if name in ("import", "erasure") else full
                    file = Path(folder) / "all.jsonl"
                    ran = _run([*command.format(file=file).split(), "--database", alias])
                    if name == "import":
                        _analyse(empty)
                    print(
                        f"{kind:>10} {sessions:>9,}  {name:<20} {ran.seconds:>8.1f} {ran.megabytes:>6.0f}  "
                        f"{ran.said}",
                        flush=True,
                    )
                for alias in (full, empty):
                    call_command("flush", database=alias, interactive=False, verbosity=0)
    return 0


# Not `os.wait4`: what it tells of a process begins with the memory of the one that started it.
_MEASURED = """
import re, sys
from pathlib import Path
from django.core.management import execute_from_command_line
try:
    execute_from_command_line(["django", *sys.argv[1:]])
finally:
    print(re.search("VmHWM: *\\t* *([0-9]+) kB", Path("/proc/self/status").read_text())[1])
"""


def _run(arguments: Sequence[str]) -> Ran:
    """One command in a process, and the most memory that it ever had."""
    started = time.monotonic()
    ended = subprocess.run(  # noqa: S603  our own commands
        [sys.executable, "-c", _MEASURED, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    *_, last, memory = ended.stdout.splitlines()
    said = f"exit code {ended.returncode}: {last.rpartition(chr(13))[2][:60]}"
    return Ran(time.monotonic() - started, int(memory) / 1_024, said)


def _databases(kind: str, cluster: PostgresCluster) -> tuple[str, str]:
    """The aliases of two empty databases."""
    aliases = DATABASES[kind]
    for alias in aliases:
        if kind == "postgres":
            create_database(cluster, alias)
        else:
            call_command("migrate", database=alias, verbosity=0, skip_checks=True)
    return aliases


def _fill(alias: str, sessions: int) -> None:
    """One session that our API wrote, and its copies by SQL."""
    from asgiref.sync import async_to_sync

    from helix_store.models import Checkpoint, Message, Run, Session, Stream, StreamChunk, SubSessionRef
    from helix_store.models import UsageEntry as UsageRow
    from helix_store.stores import DatabaseStateStore, DatabaseStreamManager, DatabaseUsageStore
    from helix_store.testing.usage.base import tokens

    store = DatabaseStateStore(alias, tenant=_TENANT)
    streams = DatabaseStreamManager(alias, tenant=_TENANT)
    state = store.create_session(_TEMPLATE, agent_type="agent", user_id="user")
    store.start_run(_TEMPLATE, "run")
    for step in range(3):
        state.custom_state = {"step": step, "notes": "x" * 500}
        message = {"role": "user", "content": "hello " * 20}
        store.save_state_and_promote_staging(
            _TEMPLATE, state, [message], {"step_id": f"step-{step}", "step_count": step}, run_id="run"
        )
    ref = {"sub_session_id": "s", "agent_type": "a", "status": "done", "location": "remote"}
    store.add_sub_session_refs(_TEMPLATE, [ref])
    DatabaseUsageStore(alias, tenant=_TENANT).record_entry(tokens(_TEMPLATE))

    async def stream() -> None:
        writer = await streams.create_writer(_TEMPLATE, "run", "agent")
        await writer.write({"type": "text_delta", "text": "hello"})
        await writer.close()
        await streams.end_stream(_TEMPLATE)

    async_to_sync(stream)()
    store.update_run(_TEMPLATE, "run", status="completed")
    store.update_status(_TEMPLATE, "completed")
    connection = connections[alias]
    is_sqlite = connection.vendor == "sqlite"
    idle = (
        f"datetime('now', '-{_DAYS_IDLE} days', (n % 86400) || ' seconds')"
        if is_sqlite
        else f"now() - interval '{_DAYS_IDLE} days' + (n % 86400) * interval '1 second'"
    )
    # Sessions 2 to 5 are below 1, 7 to 10 below 6, and so on.
    name, parent = "'session-' || n", "'session-' || (n - n % 5 + 1)"
    below = f"CASE WHEN n % 5 = 2 THEN {parent} END"
    of_session = {"id": "id + n", "session_id": "session_id + n"}
    of_checkpoint = "+ n * " + str(_STRIDE)
    copies: list[tuple[Any, Mapping[str, str]]] = [
        (
            Session,
            {
                "id": "id + n",
                "session_id": name,
                "root_session_id": f"coalesce({below}, {name})",
                "parent_session_id": below,
                "stream_id": name,
                "current_id": f"current_id {of_checkpoint}",
                "updated_at": idle,
            },
        ),
        (
            Checkpoint,
            {
                **of_session,
                "id": f"id {of_checkpoint}",
                "base_id": f"base_id {of_checkpoint}",
            },
        ),
        (Message, {**of_session, "id": f"id {of_checkpoint}"}),
        (Run, of_session),
        (SubSessionRef, {**of_session, "sub_session_id": "'session-' || (n + 1)"}),
        (UsageRow, {**of_session, "entry_id": "entry_id || '-' || n", "recorded_for": name}),
        (Stream, {"id": "id + n", "stream_id": name, "ended_at": idle}),
        (StreamChunk, {"id": f"id {of_checkpoint}", "stream_id": "stream_id + n"}),
    ]
    numbers = f"SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {sessions}"
    with connection.cursor() as cursor:
        for model, changed in copies:
            table = model._meta.db_table
            columns = [str(field.column) for field in model._meta.concrete_fields]
            values = ", ".join(changed.get(column, column) for column in columns)
            # A ref to itself belongs to the first of five alone.
            which = " WHERE n % 5 = 1" if model is SubSessionRef else ""
            cursor.execute(
                f"WITH RECURSIVE numbers(n) AS ({numbers}) INSERT INTO {table} ({', '.join(columns)}) "
                f"SELECT {values} FROM {table} CROSS JOIN numbers{which}"
            )
            if not is_sqlite:
                cursor.execute(
                    f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), (SELECT max(id) FROM {table}))"
                )
    connection.close()
    _analyse(alias)


def _analyse(alias: str) -> None:
    """Do what the autovacuum, which is off here, does within a minute."""
    connection = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE" if connection.vendor == "sqlite" else "VACUUM ANALYZE")
    connection.close()


if __name__ == "__main__":
    sys.exit(main())
