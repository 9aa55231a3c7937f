"""What is measured beside sessions: usage, streams, snapshots, graphs. Public names only."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from benchmarks.compare.operations import AGENT_TYPE, Operation
from benchmarks.payloads import state_of
from helix_store.checkpointers import GraphCheckpointStore, SnapshotCheckpointer
from helix_store.stores import DatabaseStateStore, DatabaseStreamManager, DatabaseUsageStore

__all__ = [
    "GetRollup",
    "GetSnapshot",
    "ListSnapshots",
    "PutSnapshot",
    "ReadAfter",
    "RecordEntry",
    "SaveGraphCheckpoint",
    "WriteChunks",
]


class RecordEntry(Operation):
    def __init__(self, alias: str, key: str) -> None:
        super().__init__(alias, key)
        self.usage = DatabaseUsageStore(alias)

    def create(self) -> None:
        DatabaseStateStore(self.alias).create_session(self.key, agent_type=AGENT_TYPE)

    def __call__(self) -> object:
        self.usage.record_entry(_entry(self.key, 1))
        return None


class GetRollup(RecordEntry):
    ENTRIES = 2_000

    def create(self) -> None:
        super().create()
        for start in range(0, self.ENTRIES, 500):
            self.usage.record_entries([_entry(self.key, number) for number in range(start, start + 500)])

    def __call__(self) -> object:
        rollup = self.usage.get_rollup(self.key)
        assert rollup is not None
        assert rollup.entry_count == self.ENTRIES
        return rollup


class WriteChunks(Operation):
    CHUNKS = 10

    def __init__(self, alias: str, key: str) -> None:
        super().__init__(alias, key)
        self.manager = DatabaseStreamManager(alias)
        self.chunks = _chunks(self.CHUNKS)

    def create(self) -> None:
        asyncio.run(self._create_writer())

    def __call__(self) -> object:
        self.manager.write_sync(self.key, self.chunks)
        return None

    async def _create_writer(self) -> None:
        await self.manager.create_writer(self.key, "run", "compared")


class ReadAfter(WriteChunks):
    STORED = 2_000
    PAGE = 500

    def __init__(self, alias: str, key: str) -> None:
        super().__init__(alias, key)
        self.positions = itertools.cycle(range(0, self.STORED - self.PAGE, 457))

    def create(self) -> None:
        super().create()
        self.manager.write_sync(self.key, _chunks(self.STORED))

    def __call__(self) -> object:
        found = self.manager.read_after(self.key, next(self.positions), limit=self.PAGE)
        assert len(found) == self.PAGE
        return found


class PutSnapshot(Operation):
    CAP = 50

    def __init__(self, alias: str, key: str) -> None:
        super().__init__(alias, key)
        self.snapshots = SnapshotCheckpointer(alias, max_checkpoints_per_thread=self.CAP)
        self.snapshot = {"version": 2, "step": 3, "state": state_of(4)}

    def create(self) -> None:
        for _ in range(self.CAP):
            self.snapshots.put(self.key, self.snapshot)

    def __call__(self) -> object:
        return self.snapshots.put(self.key, self.snapshot)

    def check(self) -> None:
        assert self.snapshots.get(self.key) == self.snapshot
        assert len(self.snapshots.list(self.key)) == self.CAP


class GetSnapshot(PutSnapshot):
    def __call__(self) -> object:
        found = self.snapshots.get(self.key)
        assert found is not None
        return found


class ListSnapshots(PutSnapshot):
    def __call__(self) -> object:
        found = self.snapshots.list(self.key, limit=20)
        assert len(found) == 20
        return found


class SaveGraphCheckpoint(Operation):
    def __init__(self, alias: str, key: str) -> None:
        super().__init__(alias, key)
        self.graph = GraphCheckpointStore(alias)
        self.results = {
            name: {"status": "completed", "output": value} for name, value in list(state_of(4).items())[:8]
        }

    def create(self) -> None:
        self.graph.create_session("/compared", session_id=self.key)

    def __call__(self) -> object:
        return self.graph.save_checkpoint(
            self.key, step=1, node_id="node", node_results=self.results, pending_nodes=["next", "last"]
        )


def _chunks(count: int) -> list[dict[str, Any]]:
    return [{"type": "text_delta", "delta": f"some words of an answer {number}"} for number in range(count)]


def _entry(session_id: str, number: int) -> dict[str, Any]:
    """Four in five are tokens of a model, the fifth is a tool call."""
    shared = {
        "session_id": session_id,
        "step_count": number,
        "timestamp": time.time_ns() // 1_000_000,
        "source": {"type": "agent", "name": "compared"},
        "cost_usd": "0.00075",
    }
    if number % 5 == 0:
        return {**shared, "kind": "tool", "tool_name": "search", "success": True, "duration_ms": 420}
    tokens = {"prompt": 100, "completion": 50, "total": 150}
    return {**shared, "kind": "tokens", "model": "gpt-4o", "tokens": tokens}
