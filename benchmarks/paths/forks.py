"""Forks: a session of 500 messages and 50 checkpoints, copied whole."""

from __future__ import annotations

from typing import Any

from benchmarks.bench import Bench
from benchmarks.evidence import Evidence
from benchmarks.figures import Target
from benchmarks.operations import Operation
from benchmarks.payloads import message, state_of
from benchmarks.races import Client, Comparison, Race
from benchmarks.sessions import AGENT_TYPE, live_sessions
from helix_store.checkpointers import GraphCheckpointStore
from helix_store.core.types import StepInfo
from helix_store.models import (
    Checkpoint,
    Message,
    Session,
)
from helix_store.stores import DatabaseStateStore

__all__ = ["CASES"]

MESSAGES = 500
CHECKPOINTS = 50
MOST = 25
"""Forks of a leg in a round: each copies about 700 KB."""


class ForkGraph(Operation):
    def __init__(self, worker: int) -> None:
        self.graphs = GraphCheckpointStore()
        latest = self.graphs.get_latest_checkpoint("graph")
        assert latest is not None
        self.checkpoint_id = latest.checkpoint_id
        self.made = ""

    def __call__(self) -> None:
        self.made = self.graphs.fork(self.checkpoint_id, with_history=True).session_id

    def check(self) -> None:
        summary = self.graphs.get_session_summary(self.made)
        assert summary is not None
        assert (summary.message_count, summary.checkpoint_count) == (MESSAGES, CHECKPOINTS)


class BranchSession(Operation):
    def __init__(self, worker: int) -> None:
        self.store = DatabaseStateStore()
        self.made = ""

    def __call__(self) -> None:
        self.made = self.store.branch_session("branched").session_id

    def check(self) -> None:
        state = self.store.load_state(self.made)
        assert state is not None
        assert state.message_count == MESSAGES
        assert state.custom_state == state_of(4, CHECKPOINTS - 1)


def originals(bench: Bench) -> None:
    """A session of graphs and one of the state store, alike in size."""
    graphs = GraphCheckpointStore()
    graphs.create_session("./bench", session_id="graph", title="Bench")
    for number in range(CHECKPOINTS):
        graphs.add_messages("graph", [message(each) for each in range(MESSAGES // CHECKPOINTS)])
        results: dict[Any, Any] = {"plan": {"status": "completed", "output": state_of(4, number)}}
        graphs.save_checkpoint("graph", step=number, node_results=results)
    store = DatabaseStateStore()
    session = store.create_session("branched", agent_type=AGENT_TYPE)
    for number in range(CHECKPOINTS):
        session.custom_state = state_of(4, number)
        messages = [message(each) for each in range(MESSAGES // CHECKPOINTS)]
        store.save_state_and_promote_staging(
            "branched", session, messages, StepInfo(f"step-{number}", number)
        )


_ROWS = f"""
    SELECT (SELECT count(*) FROM "{Message._meta.db_table}"),
        (SELECT count(*) FROM "{Session._meta.db_table}"),
        (SELECT count(*) FROM "{Checkpoint._meta.db_table}" WHERE kind = 'graph')"""

CASES = [
    Race(
        contestants={
            "fork": Client(operation=ForkGraph, evidence=Evidence(_ROWS, (MESSAGES, 1, CHECKPOINTS))),
            "branch_session": Client(operation=BranchSession, evidence=Evidence(_ROWS, (MESSAGES, 1, 0))),
        },
        comparisons=[
            Comparison(
                path="fork of 500 messages + 50 checkpoints",
                of="fork",
                to=None,
                target=Target(10, 5, at_most=True),
                note="the peer took 82 ms on another machine",
            ),
            Comparison(path="branch_session of 500 messages", of="branch_session", to=None),
        ],
        needs=[live_sessions, originals],
        bounds=lambda scale: (1, MOST),
    ),
]
