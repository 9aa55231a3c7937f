"""LangGraph's PostgresSaver: what it stores for a step of a graph."""

from __future__ import annotations

import itertools
from typing import Any

import psycopg
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.postgres import PostgresSaver
from psycopg.rows import dict_row

from benchmarks.operations import Operation
from benchmarks.payloads import STATES, message, state_of
from benchmarks.server import connection_url

__all__ = ["SaveCheckpoint", "create_tables"]


class SaveCheckpoint(Operation):
    """``put_writes`` of a step's two messages, then ``put`` of its state: two commits.

    The state is one channel. With a ``history`` the messages are another one, a plain list that grew so long
    and that every checkpoint stores again. Without one they are in no channel, which spares the peer a write.
    """

    def __init__(self, worker: int, *, is_writing: bool = True, history: int = 0, threads: int = 200) -> None:
        self.saver = PostgresSaver(_connect())
        self.is_writing = is_writing
        self.states = [state_of(4, step) for step in range(STATES)]
        self.writes = [("messages", message(1)), ("messages", message(2))]
        self.history = {"messages": [message(number % 10) for number in range(history)]} if history else {}
        self.numbers = itertools.count(1)
        self.version: Any = self.saver.get_next_version(None, None)
        kind = f"{history}-{is_writing}"
        self.configs: list[Any] = [
            {"configurable": {"thread_id": f"{kind}-{worker}-{thread}", "checkpoint_ns": ""}}
            for thread in range(threads)
        ]
        for thread in range(threads):
            self._put(thread, step=0)
        self.last = 0

    def __call__(self) -> None:
        self.last = number = next(self.numbers)
        thread = number % len(self.configs)
        if self.is_writing:
            self.saver.put_writes(self.configs[thread], self.writes, task_id=f"task-{number}")
        self._put(thread, step=number)

    def check(self) -> None:
        found = self.saver.get_tuple(self.configs[self.last % len(self.configs)])
        assert found is not None
        assert found.checkpoint["channel_values"] == self._values(self.last)

    def close(self) -> None:
        self.saver.conn.close()

    def _put(self, thread: int, step: int) -> None:
        self.version = self.saver.get_next_version(self.version, None)
        values = self._values(step)
        versions = dict.fromkeys(values, self.version)
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = values
        checkpoint["channel_versions"] = versions
        metadata: Any = {"source": "loop", "step": step, "parents": {}}
        self.configs[thread] = self.saver.put(self.configs[thread], checkpoint, metadata, versions)

    def _values(self, step: int) -> dict[str, Any]:
        return {"state": self.states[step // len(self.configs) % STATES], **self.history}


def create_tables() -> None:
    with _connect() as connection:
        PostgresSaver(connection).setup()


def _connect() -> psycopg.Connection[Any]:
    """As ``PostgresSaver.from_conn_string`` does."""
    return psycopg.connect(
        connection_url("peers"), autocommit=True, prepare_threshold=0, row_factory=dict_row
    )
