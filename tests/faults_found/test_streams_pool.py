"""Readers and writers of streams in one process whose pool has two connections."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Final

import pytest

from helix_store.stores import DatabaseStreamManager
from tests.databases import CommittedDatabase

SCRIPT: Final = """
import asyncio, json, sys
import django
django.setup()

from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections
from helix_store.stores import DatabaseStreamManager

streams = DatabaseStreamManager(tenant=sys.argv[1], poll_interval=float(sys.argv[2]))


async def heard(stream_id, count):
    reader = await streams.create_resumable_reader(stream_id)
    sequences = []
    async for stored in reader:
        sequences.append(stored.sequence)
        if len(sequences) == count:
            break
    await reader.aclose()
    return sequences


async def write(stream_id, stopped):
    async with await streams.create_writer(stream_id, "run", "agent") as writer:
        while not stopped.is_set():
            await writer.write({"type": "t"})
            await asyncio.sleep(0.02)


async def main():
    for stream_id in ("one", "two"):
        await (await streams.create_writer(stream_id, "run", "agent")).close()
    stopped = asyncio.Event()
    writing = [asyncio.create_task(write(stream_id, stopped)) for stream_id in ("one", "two")]
    followed = []
    # Those that come later find the thread that polls and the one that notifies at work.
    for count in (10, 20, 30):
        followed += await asyncio.gather(*(heard(each, count) for each in ("one", "two", "one")))
    stopped.set()
    await asyncio.gather(*writing)
    await sync_to_async(connections.close_all)()
    return followed

print(json.dumps(asyncio.run(asyncio.wait_for(main(), 40))))
"""


def run(database: CommittedDatabase, min_size: int, poll_interval: float) -> subprocess.CompletedProcess[str]:
    settings: dict[str, Any] = database.connection.settings_dict
    named = {name: settings[name] for name in ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")}
    options = {**settings["OPTIONS"], "pool": {"min_size": min_size, "max_size": 2, "timeout": 5}}
    fresh = {"database": {**named, "OPTIONS": options}, "helix_store": {}}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, database.tenant, str(poll_interval)],
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.migrations.fresh_settings",
            "FRESH_SETTINGS": json.dumps(fresh),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("min_size", "poll_interval"), [(1, 0.05), (0, 1.0)], ids=["polling", "notified"])
def test_readers_hear_a_writer_of_their_process_with_a_pool_of_two(
    postgres_db: CommittedDatabase, min_size: int, poll_interval: float
) -> None:
    finished = run(postgres_db, min_size, poll_interval)
    assert finished.returncode == 0, finished.stderr
    expected = [list(range(1, count + 1)) for count in (10, 20, 30) for _ in range(3)]
    assert json.loads(finished.stdout) == expected
    assert "could not be polled" not in finished.stderr
    assert "were not notified" not in finished.stderr
    written = DatabaseStreamManager(postgres_db.alias, tenant=postgres_db.tenant).read_after("one", 0)
    assert len(written) >= 30
