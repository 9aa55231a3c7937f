"""Incidents of other stores in checkpoints, histories and lists. Each docstring names one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Final

import pytest

from helix_store.core import moments
from helix_store.core.types import StepInfo
from helix_store.exceptions import HelixStoreError, StaleStateError
from helix_store.items import ItemLog
from helix_store.stores import DatabaseStateStore
from helix_store.testing.state_store.samples import loaded, message
from tests.databases import CommittedDatabase
from tests.faults.statements import Fault, Kind, faults
from tests.museum.naive import NaiveRows
from tests.processes import run_in_threads

WORKERS: Final = 6


@pytest.fixture
def store(committed_db: CommittedDatabase) -> DatabaseStateStore:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("s", agent_type="agent")
    return store


def log_of(database: CommittedDatabase) -> ItemLog:
    return ItemLog("log", using=database.alias, tenant=database.tenant)


def contents(store: DatabaseStateStore, session_id: str = "s") -> list[Any]:
    return [each["content"] for each in store.iter_messages(session_id)]


def append(store: DatabaseStateStore, content: Any, version: int | None = None) -> None:
    store.append_messages("s", [message(content)], expected_version=version)


def at_once(call: Callable[[Any], Any]) -> list[Any]:
    """The result for each worker, whose number is the argument."""
    return [each.unwrap() for each in run_in_threads(call, [(number,) for number in range(WORKERS)])]


def together() -> Callable[[], object]:
    """A pause that ends when all workers have come to it."""
    return partial(threading.Barrier(WORKERS).wait, 30)


def test_p01_a_cancelled_older_run_cannot_overwrite_a_newer_checkpoint(
    naive: NaiveRows, store: DatabaseStateStore
) -> None:
    """langgraph#8810"""
    for run in ("newer", "older"):
        naive.save("thread", run)
    assert naive.load("thread") == "older"

    older, newer = loaded(store, "s"), loaded(store, "s")
    older.custom_state, newer.custom_state = {"by": "older"}, {"by": "newer"}
    store.save_state_and_promote_staging("s", newer, [], StepInfo("b", 1), expected_version=newer.version)
    with pytest.raises(StaleStateError):
        store.save_state_and_promote_staging("s", older, [], StepInfo("a", 1), expected_version=older.version)
    assert loaded(store, "s").custom_state == {"by": "newer"}


def test_p02_a_crash_between_two_writes_of_a_step_runs_no_effect_twice(
    naive: NaiveRows, store: DatabaseStateStore
) -> None:
    """langgraph#8039, langgraph#8234"""

    class Crash(Exception):
        pass

    def run_naively(*, crash_in: int | None = None) -> None:
        for number in range((naive.load("position") or 0) + 1, 4):
            naive.append("effects", number, at=number)
            if number == crash_in:
                raise Crash
            naive.save("position", number)

    with pytest.raises(Crash):
        run_naively(crash_in=2)
    run_naively()
    assert naive.values("effects") == [1, 2, 2, 3]

    def run(session_id: str) -> None:
        state = loaded(store, session_id)
        for number in range(state.step_count + 1, 4):
            step = StepInfo(f"step-{number}", number)
            store.save_state_and_promote_staging(session_id, state, [message(number)], step)

    for nth in count(1):
        session_id = f"crash at statement {nth}"
        store.create_session(session_id, agent_type="agent")
        with faults(naive.connection, Fault(nth, Kind.LOST, after=False)) as made, suppress(HelixStoreError):
            run(session_id)
        run(session_id)
        assert contents(store, session_id) == [1, 2, 3]
        if made.hit is None:
            break
    assert nth > 3


def test_p03_threads_that_share_a_saver_write_their_own_checkpoints(
    naive: NaiveRows, store: DatabaseStateStore
) -> None:
    """langgraph#4168, langgraph#7259"""

    class Saver:
        """It keeps what it is about to write, and is shared."""

        def put(self, value: Any) -> None:
            self.pending = value
            pause()
            naive.append("checkpoints", self.pending)

    saver, pause = Saver(), together()
    at_once(saver.put)
    assert len(set(naive.values("checkpoints"))) == 1

    at_once(partial(append, store))
    assert sorted(contents(store)) == list(range(WORKERS))


def test_p04_a_stale_writer_is_refused_and_appends_nothing(
    naive: NaiveRows, store: DatabaseStateStore
) -> None:
    """adk-python#4751"""
    naive.save("events", ["ask"])
    for answer in ("first run", "second run"):
        naive.save_after_reloading("events", ["ask"], answer)
    assert naive.load("events") == ["ask", "first run", "second run"]

    append(store, "ask")
    version = loaded(store, "s").version
    append(store, "first run", version)
    with pytest.raises(StaleStateError):
        append(store, "second run", version)
    assert contents(store) == ["ask", "first run"]


def test_p05_writes_at_equal_times_are_not_stale(
    naive: NaiveRows, store: DatabaseStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """adk-python#3717"""
    naive.save("state", 0)
    assert [naive.save_if_older("state", number, at=1.0) for number in (1, 2)] == [True, False]

    stopped = moments.now()
    monkeypatch.setattr(moments, "now", lambda: stopped)
    for number in (1, 2):
        append(store, number, loaded(store, "s").version)
    assert contents(store) == [1, 2]


def test_p06_what_a_write_reads_under_the_lock_does_not_grow_with_the_history(
    postgres_db: CommittedDatabase, postgres_naive: NaiveRows
) -> None:
    """adk-js PR 831"""
    store = DatabaseStateStore(postgres_db.alias, tenant=postgres_db.tenant)
    store.create_session("s", agent_type="agent")
    store.append_messages("s", [message(number) for number in range(300)])
    for number in range(300):
        postgres_naive.append("history", number)

    assert _rows_read(postgres_naive, lambda: postgres_naive.append_after_checking("history", "new")) > 300
    assert _rows_read(postgres_naive, lambda: append(store, "new")) < 10


def _rows_read(rows: NaiveRows, call: Callable[[], object]) -> int:
    """How many rows the server sent to the calling thread."""
    read = 0

    def count_rows(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        nonlocal read
        result = execute(sql, params, many, context)
        read += max(0, context["cursor"].rowcount)
        return result

    with rows.connection.execute_wrapper(count_rows):
        call()
    return read


def test_p07_no_write_is_dropped_by_a_concurrent_first_access(
    naive: NaiveRows, committed_db: CommittedDatabase
) -> None:
    """openai-agents-python#2722"""
    naive.pause = together()
    at_once(partial(naive.append_to_parent, "log"))
    assert len(naive.values("log")) == 1

    log = log_of(committed_db)
    at_once(lambda number: log.append([number]))
    assert sorted(item.payload for item in log.tail()) == list(range(WORKERS))


def test_p08_items_of_one_millisecond_keep_their_order(
    naive: NaiveRows, committed_db: CommittedDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """openai-agents-python#1900"""
    stopped = moments.now()
    monkeypatch.setattr(moments, "now", lambda: stopped)
    log, numbers = log_of(committed_db), list(range(30))
    for number in numbers:
        naive.append("log", number, at=stopped.timestamp())
        log.append([number])
    assert naive.values("log") != numbers
    assert [item.payload for item in log.tail()] == numbers


def test_p09_no_two_callers_pop_one_item(naive: NaiveRows, committed_db: CommittedDatabase) -> None:
    """openai-agents-python#4205"""
    log, numbers = log_of(committed_db), list(range(WORKERS))
    for number in numbers:
        naive.append("log", number, at=number)
    log.append(numbers)

    naive.pause = together()
    assert at_once(lambda _: naive.pop("log")) == [WORKERS - 1] * WORKERS
    assert sorted(item.payload for item in at_once(lambda _: log.pop())) == numbers
    assert log.tail() == []
