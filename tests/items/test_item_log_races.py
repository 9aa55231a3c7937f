"""Processes that take items of one lane at the same moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from helix_store import DatabaseStateStore
from helix_store.items import ItemLog
from tests.databases import CommittedDatabase
from tests.processes import run_in_processes, run_in_threads

PROCESSES = 8
EACH = 125


def pop_many(alias: str, tenant: str) -> list[int]:
    log = ItemLog("session", using=alias, tenant=tenant)
    return [item.payload for item in (log.pop() for _ in range(EACH)) if item is not None]


def append_many(alias: str, tenant: str, process: int) -> int:
    log = ItemLog("session", using=alias, tenant=tenant)
    return sum(log.append([process], keys=[f"{number}"]) for number in range(EACH))


def test_eight_processes_pop_each_item_once(committed_db: CommittedDatabase) -> None:
    log = ItemLog("session", using=committed_db.alias, tenant=committed_db.tenant)
    log.append(range(PROCESSES * EACH))
    outcomes = run_in_processes(
        pop_many, [(committed_db.alias, committed_db.tenant)] * PROCESSES, timeout=120
    )
    popped = [payload for outcome in outcomes for payload in outcome.unwrap()]
    assert sorted(popped) == list(range(PROCESSES * EACH))
    assert log.count() == 0


def test_a_key_that_eight_processes_append_is_stored_once(committed_db: CommittedDatabase) -> None:
    arguments = [(committed_db.alias, committed_db.tenant, process) for process in range(PROCESSES)]
    outcomes = run_in_processes(append_many, arguments, timeout=120)
    log = ItemLog("session", using=committed_db.alias, tenant=committed_db.tenant)
    keys = [item.key for item in log.tail()]
    assert sum(outcome.unwrap() for outcome in outcomes) == EACH
    assert set(Counter(keys).values()) == {1}
    assert len(keys) == EACH


def test_a_session_that_comes_and_goes_beside_an_append_does_not_stop_it(
    postgres_db: CommittedDatabase,
) -> None:
    store = DatabaseStateStore(postgres_db.alias, tenant=postgres_db.tenant)
    log = ItemLog("race", using=postgres_db.alias, tenant=postgres_db.tenant)
    looks = 0

    def beside(call: Callable[[], object]) -> None:
        run_in_threads(call, [()])[0].unwrap()

    def between(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal looks
        if "FOR NO KEY UPDATE" not in sql:
            return execute(sql, params, many, context)
        looks += 1
        if looks == 2:
            beside(lambda: store.delete_session("race"))
        found = execute(sql, params, many, context)
        if looks == 1:
            beside(lambda: store.create_session("race", agent_type="other"))
        return found

    with postgres_db.connection.execute_wrapper(between):
        assert log.append(["kept"]) == 1
    assert [item.payload for item in log.tail()] == ["kept"]
