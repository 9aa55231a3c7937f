"""Many processes that answer one call, or use one approval, at one moment."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from helix_store.core.approvals import ApprovedCall
from helix_store.exceptions import ApprovalUsed, StaleStateError
from helix_store.stores import DatabaseStateStore
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants
from tests.processes import PROCESSES, run_in_processes, run_in_threads

pytestmark = pytest.mark.usefixtures("machine")

WORKERS = 8
CALL: dict[str, Any] = {"tool_name": "pay", "input": {"amount": 7}, "approval_id": "call"}


def approve(alias: str, tenant: str, worker: int, given: dict[str, Any]) -> str:
    store = DatabaseStateStore(alias, tenant=tenant)
    return store.submit_tool_result(
        "s", "call", approved=True, approval_id="call", actor=f"worker {worker // 2}", **given
    ).outcome.value


def use(alias: str, tenant: str, worker: int, everybody_has_it: Any) -> ApprovedCall:
    with DatabaseStateStore(alias, tenant=tenant).session("s").step(f"step of {worker}") as step:
        call = step.use_approval("call")
        everybody_has_it.wait(60)
    return call


@pytest.fixture
def store(committed_db: CommittedDatabase) -> DatabaseStateStore:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("s", agent_type="t")
    return store


@pytest.mark.thorough
@pytest.mark.parametrize("run", [run_in_processes, run_in_threads], ids=["processes", "threads"])
def test_of_eight_who_approve_three_different_ones_are_recorded_and_one_answer_is_accepted(
    committed_db: CommittedDatabase, store: DatabaseStateStore, run: Any
) -> None:
    store.add_pending_tool_calls("s", {"call": {**CALL, "approvals": 3}})
    arguments: list[Any] = [
        (committed_db.alias, committed_db.tenant, worker, {}) for worker in range(WORKERS)
    ]
    outcomes = Counter(outcome.unwrap() for outcome in run(approve, arguments))
    assert (outcomes["recorded"], outcomes["accepted"]) == (2, 1)
    assert len(set(store.take_tool_results("s")["call"]["actors"])) == 3
    assert broken_invariants(committed_db) == []


@pytest.mark.thorough
def test_of_eight_who_edit_each_sees_only_approvals_of_its_own_input(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    store.add_pending_tool_calls("s", {"call": {**CALL, "approvals": 2, "editable": True}})
    arguments = [
        (committed_db.alias, committed_db.tenant, 2 * worker, {"input": {"amount": worker % 2}})
        for worker in range(WORKERS)
    ]
    outcomes = [outcome.unwrap() for outcome in run_in_processes(approve, arguments)]
    assert outcomes.count("accepted") <= 1
    if "accepted" in outcomes:
        answer = store.take_tool_results("s")["call"]
        workers = [int(actor.removeprefix("worker ")) for actor in answer["actors"]]
        assert {worker % 2 for worker in workers} == {answer["input"]["amount"]}
        assert len(set(workers)) == 2


@pytest.mark.thorough
def test_of_eight_steps_that_use_an_approval_one_commits(
    committed_db: CommittedDatabase, store: DatabaseStateStore
) -> None:
    store.add_pending_tool_calls("s", {"call": CALL})
    approve(committed_db.alias, committed_db.tenant, 0, {})
    with PROCESSES.Manager() as manager:
        barrier = manager.Barrier(WORKERS)
        arguments = [(committed_db.alias, committed_db.tenant, worker, barrier) for worker in range(WORKERS)]
        outcomes = run_in_processes(use, arguments)
    winners = [worker for worker, outcome in enumerate(outcomes) if outcome.error is None]
    assert len(winners) == 1
    assert all(isinstance(each.error, StaleStateError) for each in outcomes if each.error is not None)
    with pytest.raises(ApprovalUsed) as used, store.session("s").step() as step:
        step.use_approval("call")
    assert used.value.step_id == f"step of {winners[0]}"
    assert broken_invariants(committed_db) == []
