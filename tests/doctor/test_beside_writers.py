"""No false alarm: an examination beside agents that write finds nothing, on either database."""

from __future__ import annotations

import pytest
from asgiref.sync import async_to_sync

from helix_store.core.types import StepInfo
from helix_store.doctor import diagnose
from helix_store.stores import DatabaseStateStore, DatabaseStreamManager
from tests.databases import CommittedDatabase
from tests.processes import WorkerProcess

STEPS = 60


def work(alias: str, tenant: str) -> int:
    """Steps with deltas, prunings, restores, tool calls, chunks, and sessions that come and go."""
    store = DatabaseStateStore(alias, tenant=tenant)
    streams = DatabaseStreamManager(alias, tenant=tenant)
    state = store.create_session("busy", agent_type="agent", custom_state={"ballast": "x" * 2_000})
    async_to_sync(streams.create_writer)("busy", "run-1", "agent")
    for number in range(1, STEPS + 1):
        state.custom_state["number"] = number
        messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
        store.save_state_and_promote_staging("busy", state, messages, StepInfo(f"step-{number}", number))
        streams.write_sync("busy", [{"type": "text_delta", "delta": "x"}] * 3)
        store.create_session(f"child-{number}", agent_type="agent", parent_session_id="busy")
        call = {f"call-{number}": {"tool_name": "ask", "deadline": 4_000_000_000_000 - number}}
        store.add_pending_tool_calls(f"child-{number}", call)
        if number % 5 == 0:
            store.prune_checkpoints("busy", keep=2)
            async_to_sync(streams.prune)(older_than=None, keep_chunks=2)
        if number % 7 == 0:
            store.restore_checkpoint("busy", store.list_checkpoints("busy").items[-1].checkpoint_id)
            loaded = store.load_state("busy")
            assert loaded is not None
            state = loaded
        if number % 3 == 0:
            store.delete_session(f"child-{number}")
    return number


@pytest.mark.thorough
def test_an_examination_beside_a_writer_finds_nothing(committed_db: CommittedDatabase) -> None:
    worker = WorkerProcess(work, committed_db.alias, committed_db.tenant)
    examinations = 0
    while worker.is_alive:
        found = diagnose(using=committed_db.alias, tenant=committed_db.tenant).findings
        assert found == []
        examinations += 1
    assert worker.outcome().unwrap() == STEPS
    assert examinations
    assert diagnose(using=committed_db.alias, tenant=committed_db.tenant).findings == []
