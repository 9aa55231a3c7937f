"""Transactions that change several counters of a budget lock them in one order, and no deadlock follows.

The holds of a budget belong to no period, and a commit after midnight holds in another period than it spends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import Event, Lock
from typing import Any, Final

import pytest
from django.db import OperationalError, connections

from helix_store.engine.statement import table
from helix_store.models import Budget, BudgetCounter
from helix_store.stores import Store
from helix_store.stores.store import SessionHandle
from tests.database.separate import fetch
from tests.databases import CommittedDatabase

DAY_MS: Final = 86_400_000
COUNTS: Final = f"INSERT INTO {table(BudgetCounter)} AS c"
ESTIMATE: Final = "0.2"


def spend(session: SessionHandle, before_commit: Callable[[], object], *, days_ago: int = 0) -> None:
    """Take a step that spends. Its commit also holds the estimate of the next step."""
    with session.turn(estimate_usd=ESTIMATE) as turn, turn.step():
        turn.tokens(model="model", prompt=1, cost_usd="0.1")
        entries = turn._spending._entries
        entries[:] = [replace(each, timestamp=each.timestamp - days_ago * DAY_MS) for each in entries]
        before_commit()


def begin(session: SessionHandle, before: Callable[[], object]) -> None:
    """Hold the estimate of a first step."""
    before()
    with session.turn(estimate_usd=ESTIMATE):
        pass


@contextmanager
def watched(alias: str, after_counting: Callable[[], object], victims: list[str]) -> Iterator[None]:
    """Make a call after the statement that counts usage, and note the statements of deadlocks."""
    is_next = has_called = False

    def wrapper(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        nonlocal is_next, has_called
        if is_next and not has_called:
            has_called = True
            after_counting()
        try:
            result = execute(sql, parameters, many, context)
        except OperationalError as exc:
            if getattr(exc.__cause__, "sqlstate", None) == "40P01":
                victims.append(sql)
            raise
        is_next = is_next or COUNTS in sql
        return result

    with connections[alias].execute_wrapper(wrapper):
        yield


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline


@pytest.mark.parametrize(("other", "days_ago"), [(begin, 0), (spend, 1)], ids=["begin", "midnight"])
def test_a_commit_holds_nothing_that_another_transaction_waits_for_in_turn(
    postgres_db: CommittedDatabase,
    other: Callable[[SessionHandle, Callable[[], object]], None],
    days_ago: int,
) -> None:
    alias, victims = postgres_db.alias, list[str]()
    begun, may_go_on, has_counted, is_done = (Event() for _ in range(4))
    store = Store(alias, tenant=postgres_db.tenant)
    store.budgets.set_budget("cap", scope="tenant", period="day", limit_usd=10)
    # It was made before midnight.
    Budget.objects.using(alias).filter(tenant=postgres_db.tenant).update(counted_from="2001-01-01")
    sessions = [store.new_session(name, agent_type="agent") for name in ("first", "second")]

    with postgres_db.second_connection() as watcher:
        watcher.inc_thread_sharing()
        watching = Lock()

        def somebody_waits() -> bool:
            sql = "SELECT 1 FROM pg_stat_activity WHERE cardinality(pg_blocking_pids(pid)) > 0"
            with watching:
                return bool(fetch(watcher, sql))

        def pause_other() -> None:
            has_counted.set()
            wait_until(lambda: is_done.is_set() or somebody_waits())

        def run_other() -> None:
            def wait() -> None:
                begun.set()
                assert may_go_on.wait(30)

            try:
                with watched(alias, pause_other, victims):
                    other(sessions[1], wait)
            finally:
                connections.close_all()

        def pause() -> None:
            may_go_on.set()
            wait_until(lambda: has_counted.is_set() or somebody_waits())

        with ThreadPoolExecutor(1) as pool:
            outcome = pool.submit(run_other)
            assert begun.wait(30)
            with watched(alias, pause, victims):
                spend(sessions[0], lambda: None, days_ago=days_ago)
            is_done.set()
            outcome.result(30)
    assert victims == []
    assert store.budgets.status("cap").held_usd == 0
