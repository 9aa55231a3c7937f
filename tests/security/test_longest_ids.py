"""Rows in which every id is as long as it may be fit the indexes of every database."""

from __future__ import annotations

import random

from asgiref.sync import async_to_sync

from helix_store.checkpointers import GraphCheckpointStore, SnapshotCheckpointer
from helix_store.core.limits import MAX_ID_BYTES
from helix_store.core.types import StepInfo, SubSessionRef
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
)
from tests.databases import CommittedDatabase


def test_the_longest_ids_fit_together_into_every_index(committed_db: CommittedDatabase) -> None:
    characters = random.Random(committed_db.tenant)  # noqa: S311  text that PostgreSQL cannot compress

    def longest() -> str:
        return "".join(chr(characters.randint(0x4E00, 0x9FFF)) for _ in range(MAX_ID_BYTES // 3))

    alias, tenant, session_id, run_id = committed_db.alias, longest(), longest(), longest()
    store = DatabaseStateStore(alias, tenant=tenant)
    store.create_session(
        session_id, agent_type=longest(), user_id=longest(), workspace_id=longest(), stream_id=longest()
    )
    child = store.create_session(longest(), agent_type=longest(), parent_session_id=session_id)
    store.start_run(session_id, run_id)
    store.stage_changes(session_id, longest(), {"tool_call_id": longest()})
    store.add_sub_session_refs(session_id, [SubSessionRef(sub_session_id=longest(), agent_type=longest())])
    state = store.load_state(session_id)
    assert state is not None
    commit = store.save_state_and_promote_staging(
        session_id,
        state,
        [{"role": longest()}],
        StepInfo(step_id=longest(), step_count=10**18),
        operation_id=longest(),
        run_id=run_id,
    )
    assert store.get_checkpoint(session_id, commit.checkpoint_id) is not None
    assert [head.session_id for head in store.list_sessions(parent_session_id=session_id).sessions] == [
        child.session_id
    ]

    lock = DatabaseLockManager(alias, tenant=tenant).acquire(session_id, owner=longest())
    assert lock is not None
    entry = {
        "session_id": session_id,
        "timestamp": 1,
        "step_count": 0,
        "source": {"type": longest(), "name": longest()},
        "run_id": run_id,
        "id": longest(),
    }
    usage = DatabaseUsageStore(alias, tenant=tenant)
    usage.record_entries(
        [
            {**entry, "kind": "tokens", "model": longest(), "tokens": {"total": 1}},
            {
                **entry,
                "id": longest(),
                "kind": "tool",
                "tool_name": longest(),
                "success": True,
                "duration_ms": 1,
            },
        ]
    )
    assert usage.query_usage().total == 2

    streams = DatabaseStreamManager(alias, tenant=tenant)
    async_to_sync(streams.create_writer)(session_id, run_id, longest())
    assert streams.write_sync(session_id, [{"type": longest()}]) == 1

    graphs = GraphCheckpointStore(alias, tenant=tenant)
    graph = graphs.create_session(longest(), session_id=longest(), workspace_id=longest())
    saved = graphs.save_checkpoint(graph.session_id, namespace=longest(), step=1, node_id=longest())
    assert graphs.get_checkpoint(saved.checkpoint_id) is not None

    snapshots = SnapshotCheckpointer(alias, tenant=tenant, id_factory=longest)
    snapshot_id = snapshots.put(longest_thread := longest(), {"version": 1})
    assert snapshots.get(longest_thread, snapshot_id) == {"version": 1}
    assert snapshots.claim(longest_thread, owner=longest()) is not None
