"""Forked writers that are killed, and what they leave.

This runs in a process of its own, which has one thread and no open connection when it forks.
"""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections import Counter
from typing import Any, Final

from django.db import connections

from helix_store.stores import DatabaseStateStore, InMemoryStateStore
from tests.faults.writes import begin, everything, story, write

__all__ = ["kill_writers"]

_LENGTH: Final = 8
_LONGEST_PAUSE_SECONDS: Final = 0.02
_PATIENCE_SECONDS: Final = 30.0
_BEGUN, _ACKNOWLEDGED = b"b", b"a"


def kill_writers(alias: str, tenant: str, seeds: list[int]) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Kill a writer for each seed. Returns counts, and the seeds that left what no whole writes leave."""
    counts: Counter[str] = Counter()
    faults = []
    for seed in seeds:
        try:
            _kill_one(alias, tenant, seed, counts)
        except Exception as exc:  # noqa: BLE001  whatever it is belongs to the seed
            faults.append((seed, f"{type(exc).__name__}: {exc}"))
    connections.close_all()
    return counts, faults


def _kill_one(alias: str, tenant: str, seed: int, counts: Counter[str]) -> None:
    chance = random.Random(seed)  # noqa: S311  the same draws for the same seed
    kinds = story(seed, _LENGTH)
    session_id = f"session-{seed}"
    store = DatabaseStateStore(alias, tenant=tenant)
    begin(store, session_id)
    # The child inherits no socket, and no lock of a file.
    connections.close_all()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        _write_until_killed(alias, tenant, session_id, kinds, tell)
    os.close(tell)
    try:
        last = chance.randrange(_LENGTH)
        heard, backend = _hear(told, begun=last + 1)
        _pause(chance.uniform(0, _LONGEST_PAUSE_SECONDS))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    heard += _rest(told)
    os.close(told)
    if backend:
        _wait_for_the_end_of(alias, backend)
    begun, acknowledged = heard.count(_BEGUN), heard.count(_ACKNOWLEDGED)
    assert begun - acknowledged in (0, 1), heard
    counts["acknowledged writes"] += acknowledged
    found = everything(store, session_id)
    memory = InMemoryStateStore()
    begin(memory, session_id)
    for kind in kinds[:acknowledged]:
        write(memory, session_id, kind)
    old = everything(memory, session_id)
    if begun == acknowledged:
        counts["killed between writes"] += 1
        assert found == old, _difference(old, found, kinds[:begun])
        return
    write(memory, session_id, kinds[acknowledged])
    new = everything(memory, session_id)
    counts[f"killed in {kinds[acknowledged]}"] += 1
    assert found in (old, new), _difference(old, found, kinds[:begun])
    outcome = "changed nothing" if old == new else "all new" if found == new else "all old"
    counts[f"killed within a write: {outcome}"] += 1


def _write_until_killed(alias: str, tenant: str, session_id: str, kinds: list[str], tell: int) -> None:
    try:
        store = DatabaseStateStore(alias, tenant=tenant)
        store.load_state(session_id)
        connection = connections[alias]
        connection.ensure_connection()
        backend = connection.connection.info.backend_pid if connection.vendor == "postgresql" else 0
        os.write(tell, f"{backend};".encode())
        for kind in kinds:
            os.write(tell, _BEGUN)
            write(store, session_id, kind)
            os.write(tell, _ACKNOWLEDGED)
        signal.pause()
    except BaseException as exc:  # noqa: BLE001  the parent finds it in what it hears
        os.write(tell, f"!{exc!r}".encode())
    finally:
        os._exit(1)


def _hear(told: int, *, begun: int) -> tuple[bytes, int]:
    """Read until so many writes have begun. Returns the marks, and the process of the server."""
    heard = b""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while b";" not in heard or heard.count(_BEGUN) < begun:
        assert select.select([told], [], [], deadline - time.monotonic())[0], "the writer is silent"
        data = os.read(told, 4096)
        assert data, heard
        assert b"!" not in data, data
        heard += data
    backend, _, marks = heard.partition(b";")
    return marks, int(backend)


def _pause(seconds: float) -> None:
    """Let the writer go on for a moment."""
    select.select([], [], [], seconds)


def _rest(told: int) -> bytes:
    rest = b""
    while data := os.read(told, 4096):
        rest += data
    assert b"!" not in rest, rest
    return rest


def _wait_for_the_end_of(alias: str, backend: int) -> None:
    """Wait until the server has noticed the death of its client: until then it may commit."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    with connections[alias].cursor() as cursor:
        while True:
            cursor.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [backend])
            if cursor.fetchone() is None:
                return
            assert time.monotonic() < deadline, "the server has not noticed the death of the writer"
            _pause(0.0005)


def _difference(expected: dict[str, Any], found: dict[str, Any], kinds: list[str]) -> str:
    lines = [f"after {', '.join(kinds)}"]
    for part in expected:
        before, after = expected[part] or {}, found[part] or {}
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                lines.append(f"{part}/{name}:\n  before {before.get(name)}\n  found  {after.get(name)}")
    return "\n".join(lines)
