"""``python -m benchmarks.chat``: many open streams of chats on one server with one process.

It starts a PostgreSQL server and uvicorn, lets 30 agents answer at once with 25 deltas a second each, opens
300 streams of their threads and, when all of them are open, measures for the rest of the answers. It prints
the time from `out.text` to the client, the memory and the database connections of the server. Each delta says
when it was said; both ends use the clock of this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg

from tests.postgres import PostgresCluster

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[1]
_PATIENCE_SECONDS = 120
_SECONDS_TO_SETTLE = 8


@dataclass
class _Delays:
    """The milliseconds from when each delta was said until it has arrived, from a moment on."""

    since: float = math.inf
    opened: int = 0
    found: list[float] = field(default_factory=list)

    def note(self, now: float, said: Iterable[float]) -> None:
        self.found += [now - moment for moment in said if moment >= self.since]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chat", description=__doc__)
    parser.add_argument("--streams", type=int, default=300, metavar="N")
    parser.add_argument("--answers", type=int, default=30, metavar="N")
    parser.add_argument("--deltas", type=int, default=750, metavar="N", help="of each answer")
    options = parser.parse_args()
    with PostgresCluster() as cluster:
        _measure(cluster.url, options)
    return 0


def _measure(url: str, options: argparse.Namespace) -> None:
    name = f"chat-{uuid.uuid4().hex}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "benchmarks.chat_settings",
        "DATABASE_URL": f"{url}{'&' if '?' in url else '?'}application_name={name}",
        "CHAT_THREADS": str(options.answers),
        "CHAT_DELTAS": str(options.deltas),
    }
    migrate = [sys.executable, "-m", "django", "migrate", "-v", "0", "--skip-checks"]
    subprocess.run(migrate, cwd=_ROOT, env=environment, check=True)  # noqa: S603  our own command
    command = [sys.executable, "-m", "uvicorn", "benchmarks.chat_site:application", "--port", str(port)]
    process = subprocess.Popen(  # noqa: S603  our own command
        [*command, "--no-access-log", "--lifespan", "off", "--log-level", "warning"],
        cwd=_ROOT,
        env=environment,
    )
    try:
        asyncio.run(_run(url, name, port, psutil.Process(process.pid), options))
    finally:
        process.terminate()
        process.wait()


async def _run(url: str, name: str, port: int, server: psutil.Process, options: argparse.Namespace) -> None:
    await _until_up(port)
    threads = [f"thread-{number}" for number in range(options.answers)]
    for thread in threads:
        # The first message makes the thread; its answer is short.
        await _events(port, "POST", "agui/", _run_input(thread, "u0", "short"), _Delays())
    before = server.memory_info().rss
    delays = _Delays()
    answering = [
        asyncio.ensure_future(_events(port, "POST", "agui/", _run_input(thread, "u1", "long"), delays))
        for thread in threads
    ]
    await asyncio.sleep(0.5)  # the streams are opened while the answers run
    opened = [
        asyncio.ensure_future(_events(port, "GET", f"agui/{threads[number % len(threads)]}/", None, delays))
        for number in range(options.streams - len(threads))
    ]
    while delays.opened < options.streams:  # noqa: ASYNC110  a counter of many tasks
        await asyncio.sleep(0.1)
    await asyncio.sleep(_SECONDS_TO_SETTLE)
    delays.since = time.time() * 1000
    memory, connections = [], []
    while not all(each.done() for each in (*answering, *opened)):
        memory.append(server.memory_info().rss)
        connections.append(await asyncio.to_thread(_connections, url, name))
        await asyncio.sleep(0.5)  # between two samples
    await asyncio.gather(*answering, *opened)
    ordered = statistics.quantiles(delays.found, n=100)
    megabyte = 1024 * 1024
    print(f"{len(delays.found):,} deltas on {options.streams} streams, {options.answers} answers at once")
    print(f"from out.text to the client: p50 {ordered[49]:.0f} ms, p95 {ordered[94]:.0f} ms")
    start, end = memory[0] // megabyte, memory[-1] // megabyte
    print(f"memory: {before // megabyte} MiB before, {start} MiB with all streams open, {end} MiB at the end")
    print(f"database connections: at most {max(connections)}")


def _connections(url: str, name: str) -> int:
    with psycopg.connect(url) as connection:
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        row = connection.execute(query, [name]).fetchone()
    return 0 if row is None else int(row[0])


def _run_input(thread: str, message_id: str, text: str) -> dict[str, Any]:
    messages = [{"id": message_id, "role": "user", "content": text}]
    return {"threadId": thread, "runId": message_id, "messages": messages}


async def _until_up(port: int) -> None:
    until = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < until:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
        else:
            writer.close()
            return
    raise RuntimeError("The server did not start.")


async def _events(port: int, method: str, path: str, body: Any, delays: _Delays) -> None:
    """Make a request, and note the age of each delta that arrives."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    text = b"" if body is None else json.dumps(body).encode()
    head = f"{method} /chat/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode() + text)
    has_begun = False
    while line := await reader.readline():
        now = time.time() * 1000
        if not has_begun and line.startswith(b"data: "):
            has_begun, delays.opened = True, delays.opened + 1
        if line.startswith(b"data: ") and b'"TEXT_MESSAGE_CONTENT"' in line:
            said = map(float, json.loads(line[6:])["delta"].split())
            delays.note(now, said)
    writer.close()


if __name__ == "__main__":
    sys.exit(main())
