"""A tenant moves under eight workers that take turns, and the command is killed again and again.

A longer run::

    HELIX_TEST_KILLS=100 python -m pytest -s tests/shards/test_moves_under_load.py
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import threading
import time
from collections import Counter
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

from django.core.management import call_command
from django.test import override_settings

from helix_store.engine.database import Database
from helix_store.exceptions import HelixStoreError
from helix_store.models import Session
from helix_store.stores import DatabaseStateStore
from helix_store.transfer.fences import fence_of
from helix_store.transfer.moves import find_move
from tests.processes import PROCESSES, WorkerProcess
from tests.shards.conftest import Pair
from tests.shards.routers import place

KILLS: Final = int(os.environ.get("HELIX_TEST_KILLS", "8"))
WORKERS: Final = 8
SESSIONS: Final = 4
IDLE: Final = 40
_REST_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 0.3
_PATIENCE_SECONDS: Final = 300.0

ROUTED = override_settings(DATABASE_ROUTERS=["tests.shards.routers.ByPlacement"])


def take_turns(file: Path, tenant: str, number: int, stop: Event) -> dict[str, Any]:
    """Take turns until ``stop``. Returns what was acknowledged, and what else was heard."""
    place(file)
    # A turn that is refused says so for every write of its end.
    logging.getLogger("helix_store").setLevel(logging.CRITICAL)
    heard: Counter[str] = Counter()
    acknowledged: list[str] = []
    unknown: list[str] = []
    longest, last = 0.0, time.monotonic()
    with ROUTED:
        while not stop.is_set():
            item = f"{number}-{len(acknowledged) + len(unknown)}"
            # A new store asks the router, as each request or task of a project does.
            store = DatabaseStateStore(tenant=tenant)
            try:
                with store.session(f"session-{number % SESSIONS}").turn() as turn:
                    with turn.step() as step:
                        step.say({"role": "assistant", "content": item})
                        step.state.custom_state.setdefault("items", []).append(item)
                    acknowledged.append(item)
                    longest, last = max(longest, time.monotonic() - last), time.monotonic()
                # Eight workers that never rest would leave two cores no time to copy what they write.
                stop.wait(_REST_SECONDS)
            except HelixStoreError as exc:
                heard[type(exc).__name__] += 1
                if exc.applied != "no":
                    unknown.append(item)
                stop.wait(0.02)
    return {"acknowledged": acknowledged, "unknown": unknown, "heard": heard, "longest": longest}


def run_command(file: Path, tenant: str, options: list[str], begins: Event) -> str:
    """The command in a process of its own, which tells when it begins."""
    place(file)
    printed = io.StringIO()
    with ROUTED:
        begins.set()
        call_command("helix_move", tenant, *options, format="json", stdout=printed, verbosity=0)
    return printed.getvalue()


class Driver:
    """Runs a step of the command until one run comes to its end; the runs before it are killed."""

    def __init__(self, file: Path, tenant: str) -> None:
        self.file = file
        self.tenant = tenant
        self.chance = random.Random(20)  # noqa: S311  the same pauses in each run
        self.counts: Counter[str] = Counter()

    def run(self, *options: str, kills: int) -> dict[str, Any]:
        for number in range(kills):
            begins = PROCESSES.Event()
            process = WorkerProcess(run_command, self.file, self.tenant, list(options), begins)
            assert begins.wait(_PATIENCE_SECONDS)
            self._wait_for_the_phase(process, skipped=("none", "copied", "copying")[: 2 + number % 2])
            if process.wait(self.chance.uniform(0, _LONGEST_PAUSE_SECONDS)):
                self.counts["ended before its kill"] += 1
                ended: dict[str, Any] = json.loads(process.outcome().unwrap())
                return ended
            process.kill()
            phase = self._phase()
            self.counts[f"killed in the phase {phase}"] += 1
            if phase == "none":
                # An abort has nothing left to do.
                return {"phase": phase}
        last = WorkerProcess(run_command, self.file, self.tenant, list(options), PROCESSES.Event())
        report: dict[str, Any] = json.loads(last.outcome(_PATIENCE_SECONDS).unwrap())
        return report

    def _wait_for_the_phase(self, process: WorkerProcess, skipped: tuple[str, ...]) -> None:
        """Wait until the command is in another phase, or has ended."""
        while self._phase() in skipped and not process.wait(0.005):
            pass

    def _phase(self) -> str:
        with ROUTED:
            fence = find_move(self.tenant)
        return fence.phase if fence else "none"


def test_a_tenant_moves_under_load_and_nothing_is_lost_or_doubled(pair: Pair, tmp_path: Path) -> None:
    file, tenant = tmp_path / "placement", pair.tenant
    file.write_text(pair.first)
    place(file)
    source = DatabaseStateStore(pair.first, tenant=tenant)
    for number in range(SESSIONS):
        source.create_session(f"session-{number}", agent_type="agent")
    for number in range(IDLE):
        source.create_session(f"idle-{number}", agent_type="agent")
        source.append_messages(f"idle-{number}", [{"role": "user", "content": "x" * 20_000}] * 5)
    stop = PROCESSES.Event()
    workers = [WorkerProcess(take_turns, file, tenant, number, stop) for number in range(WORKERS)]
    driver = Driver(file, tenant)
    try:
        busy_until(source, messages=20)
        driver.run("--to", pair.second, kills=KILLS // 4)
        assert driver.run("--abort", kills=KILLS // 4)["phase"] == "none"
        busy_until(source, messages=40)
        copied = driver.run("--to", pair.second, kills=KILLS // 4)
        assert copied["phase"] == "copied"
        next_file = tmp_path / "next"
        next_file.write_text(pair.second)
        next_file.replace(file)
        assert driver.run("--finish", kills=KILLS // 4)["phase"] == "moved"
        target = DatabaseStateStore(pair.second, tenant=tenant)
        busy_until(target, messages=80)
    finally:
        stop.set()
    results = [worker.outcome().unwrap() for worker in workers]
    driver.run("--release", kills=0)
    acknowledged = Counter(item for each in results for item in each["acknowledged"])
    unknown = {item for each in results for item in each["unknown"]}
    stored = Counter(str(item) for number in range(SESSIONS) for item in contents(target, number))
    heard: Counter[str] = sum((each["heard"] for each in results), Counter())
    report = {
        "acknowledged": acknowledged.total(),
        "lost": len(acknowledged - stored),
        "doubled": sum(count > 1 for count in stored.values()),
        "not acknowledged, stored": sorted(set(stored) - set(acknowledged) - unknown),
        "heard": dict(heard),
        "longest_pause_s": round(max(each["longest"] for each in results), 2),
        **driver.counts,
    }
    print(f"{pair.vendor}: {json.dumps(report)}")  # noqa: T201  pytest shows it with -s
    assert heard["TenantMoved"] > 0
    assert (report["lost"], report["doubled"], report["not acknowledged, stored"]) == (0, 0, [])
    assert not Session.objects.using(pair.first).filter(tenant=tenant).exists()
    assert Session.objects.using(pair.second).filter(tenant=tenant).count() == SESSIONS + IDLE
    assert fence_of(Database(pair.first, tenant)) is None


def busy_until(store: DatabaseStateStore, *, messages: int) -> None:
    """Wait until the workers have written so many messages here."""
    pause, deadline = threading.Event(), time.monotonic() + _PATIENCE_SECONDS
    while sum(len(contents(store, number)) for number in range(SESSIONS)) < messages:
        assert time.monotonic() < deadline, "the workers do not write"
        pause.wait(0.05)


def contents(store: DatabaseStateStore, number: int) -> list[Any]:
    """The items of a session. Its state and its messages have the same."""
    with Database(store.alias, store.tenant).snapshot():
        state = store.load_state(f"session-{number}")
        if state is None:
            return []
        messages = store.session(f"session-{number}").messages()
    items: list[Any] = state.custom_state.get("items", [])
    assert [message["content"] for message in messages] == items
    return items
