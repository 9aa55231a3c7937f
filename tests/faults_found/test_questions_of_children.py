"""Children ask while their parents are inside steps: no step is lost, and no question."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest

from helix_store.core.contracts import StateStore
from helix_store.handles import SessionHandle
from helix_store.stores import DatabaseStateStore, InMemoryStateStore
from tests.databases import CommittedDatabase


def grow(store: StateStore, chance: random.Random, name: str) -> dict[str, str | None]:
    """Create a tree of up to seven sessions, and return the parent of each."""
    parents: dict[str, str | None] = {f"{name}-0": None}
    for number in range(1, chance.randint(2, 7)):
        parents[f"{name}-{number}"] = chance.choice(list(parents))
    for session_id, parent in parents.items():
        store.create_session(session_id, agent_type="agent", parent_session_id=parent)
    return parents


def drive(store: StateStore, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  the same tree for the same seed
    parents = grow(store, chance, f"tree-{seed}")
    root = f"tree-{seed}-0"
    busy = {parent for parent in parents.values() if parent is not None} | {root}
    asking = [session_id for session_id in parents if session_id not in busy]
    asked: dict[str, str] = {}
    with ExitStack() as steps:
        for parent in sorted(busy):
            step = steps.enter_context(SessionHandle(store, parent).step())
            step.stage("tool", merge_changes={"bought": parent})
            if chance.random() < 0.3:
                step.wait_for({f"call-of-{parent}": {"tool_name": "ask", "input": {}}})
                asked[f"call-of-{parent}"] = parent
        chance.shuffle(asking)
        for child in asking:
            with SessionHandle(store, child).step() as step:
                step.wait_for({f"call-of-{child}": {"tool_name": "ask", "input": {}}})
            asked[f"call-of-{child}"] = child
    for parent in busy:
        state = SessionHandle(store, parent).load()
        assert (state.step_count, state.custom_state) == (1, {"bought": parent})
    assert SessionHandle(store, root).load().client_tool_call_ownership == asked
    for call, owner in asked.items():
        assert store.submit_tool_result(root, call, result=1).session_id == owner


@pytest.mark.thorough
def test_two_hundred_trees_in_memory() -> None:
    store = InMemoryStateStore()
    for seed in range(200):
        drive(store, seed)


@pytest.mark.thorough
def test_twelve_trees_in_a_database(committed_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    for seed in range(12):
        drive(store, seed)


def test_a_step_that_asks_again_keeps_what_a_child_recorded(committed_db: CommittedDatabase) -> None:
    store = DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("root", agent_type="agent")
    store.create_session("child", agent_type="agent", parent_session_id="root")
    store.add_pending_tool_calls("child", {"call-1": {"tool_name": "ask", "input": {}}})
    before = store.load_state("root")
    assert before is not None
    store.add_pending_tool_calls("child", {"call-2": {"tool_name": "ask", "input": {}}})
    for number in (1, 2):
        before.version = store.save_state_and_promote_staging(
            "root",
            before,
            [],
            {"step_id": f"step-{number}", "step_count": number},
            expected_version=before.version,
        ).new_version
        after = store.load_state("root")
        assert after is not None
        assert after.version == number + 1
        assert after.client_tool_call_ownership == {"call-1": "child", "call-2": "child"}
        before.client_tool_call_ownership = {}
