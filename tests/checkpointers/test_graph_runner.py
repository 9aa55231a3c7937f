"""A graph runtime that is killed at every wave, interrupted, repeated and forked, and always goes on."""

from __future__ import annotations

from decimal import Decimal
from multiprocessing.synchronize import Event
from typing import Any

import pytest

from helix_store.checkpointers import GraphCheckpointStore
from helix_store.core.types import CheckpointSource
from tests.checkpointers.graph_runner import Graph, GraphRunner, Node
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants
from tests.processes import PROCESSES, WorkerProcess

RESEARCH = Graph(
    {
        "search": Node(lambda outputs: {"a", "b"}),
        "read": Node(lambda outputs: tuple(sorted(outputs["search"])), after=("search",)),
    }
)

# Waves: plan; research (two inner waves), skipped; draft, review three times over; approve; publish.
PLAN = Graph(
    {
        "plan": Node(lambda outputs: {"budget": Decimal("1.10")}),
        "research": Node(after=("plan",), graph=RESEARCH),
        "skipped": Node(after=("plan",), only_if=lambda outputs: False),
        "draft": Node(lambda outputs: (outputs["draft"] or 0) + 1, after=("research", "skipped")),
        "review": Node(
            lambda outputs: outputs["draft"],
            after=("draft",),
            back_to="draft",
            until=lambda outputs: outputs["review"] == 3,
        ),
        "approve": Node(lambda outputs: outputs["approval"], after=("review",), needs_approval=True),
        "publish": Node(lambda outputs: (outputs["approve"], outputs["draft"]), after=("approve",)),
    }
)

OUTPUTS = {
    "plan": {"budget": Decimal("1.10")},
    "research": {"search": {"a", "b"}, "read": ("a", "b")},
    "skipped": None,
    "draft": 3,
    "review": 3,
    "approve": "yes",
    "publish": ("yes", 3),
}
EXECUTED = [
    ":plan",
    "research:search",
    "research:read",
    ":research",
    ":skipped",
    *[":draft", ":review"] * 3,
    ":approve",
    ":publish",
]


def runner(store: GraphCheckpointStore, database: CommittedDatabase, **options: Any) -> GraphRunner:
    return GraphRunner(store, database.alias, "s", **options)


def executed(store: GraphCheckpointStore, session_id: str = "s") -> list[str | None]:
    return [message.content for message in store.get_messages(session_id)]


def run_until_the_commit(alias: str, tenant: str, commits: int, reached: Event) -> Any:
    """Run, and block for ever in the transaction after this number of commits."""
    left = iter(range(commits))

    def before_commit() -> None:
        if next(left, None) is None:
            reached.set()
            PROCESSES.Event().wait()

    store = GraphCheckpointStore(alias, tenant=tenant)
    return GraphRunner(store, alias, "s", approval="yes", before_commit=before_commit).run(PLAN)


@pytest.mark.thorough
def test_a_run_that_is_killed_at_wave_after_wave_ends_as_one_that_is_not(
    graph: GraphCheckpointStore, committed_db: CommittedDatabase
) -> None:
    graph.create_session("", session_id="s")
    kills = 0
    for _ in range(6):
        reached = PROCESSES.Event()
        worker = WorkerProcess(run_until_the_commit, committed_db.alias, committed_db.tenant, 1, reached)
        assert reached.wait(60)
        assert worker.is_alive
        worker.kill()
        kills += 1
        # One wave is committed; the wave in which the process died left nothing.
        assert executed(graph) == EXECUTED[: len(executed(graph))]
        assert broken_invariants(committed_db) == []
    assert kills == 6
    assert 6 < len(executed(graph)) < len(EXECUTED)
    assert runner(graph, committed_db, approval="yes").run(PLAN) == OUTPUTS
    assert executed(graph) == EXECUTED


def test_an_interrupted_run_waits_for_the_answer_and_repeats_nothing(
    graph: GraphCheckpointStore, committed_db: CommittedDatabase
) -> None:
    graph.create_session("", session_id="s")
    assert runner(graph, committed_db).run(PLAN) is None
    waiting = graph.get_latest_checkpoint("s", "")
    assert waiting is not None
    assert (waiting.source, waiting.node_id) == (CheckpointSource.INTERRUPT, "approve")
    assert waiting.pending_nodes == ["approve", "publish"]
    assert waiting.cycle_state == {"back_edge": ("review", "draft"), "iteration": 2}
    assert waiting.node_results["skipped"] == {"status": "skipped"}
    assert executed(graph) == EXECUTED[:-2]
    assert runner(graph, committed_db).run(PLAN) is None
    assert executed(graph) == EXECUTED[:-2]
    assert runner(graph, committed_db, approval="yes").run(PLAN) == OUTPUTS
    assert executed(graph) == EXECUTED


def test_a_finished_graph_is_resumed_and_run_again_as_often_as_you_like(
    graph: GraphCheckpointStore, committed_db: CommittedDatabase
) -> None:
    graph.create_session("", session_id="s")
    for _ in range(3):
        assert runner(graph, committed_db, approval="yes").run(PLAN) == OUTPUTS
    assert executed(graph) == EXECUTED
    other = Graph({"plan": PLAN.nodes["plan"], "more": Node(lambda outputs: 1, after=("plan",))})
    assert runner(graph, committed_db).run(other) == {"plan": {"budget": Decimal("1.10")}, "more": 1}


def test_a_failed_node_is_run_again_after_a_resume(
    graph: GraphCheckpointStore, committed_db: CommittedDatabase
) -> None:
    graph.create_session("", session_id="s")
    graph.save_checkpoint("s", step=0, node_results={"only": {"status": "failed", "error": "lost"}})
    only = Graph({"only": Node(lambda outputs: "done")})
    assert runner(graph, committed_db).run(only) == {"only": "done"}


def test_the_history_is_a_chain_of_parents_in_each_namespace(
    graph: GraphCheckpointStore, committed_db: CommittedDatabase
) -> None:
    graph.create_session("", session_id="s")
    runner(graph, committed_db, approval="yes").run(PLAN)
    for namespace, waves in [("", 10), ("research", 2)]:
        chain = []
        checkpoint = graph.get_latest_checkpoint("s", namespace)
        while checkpoint is not None:
            chain.append(checkpoint)
            checkpoint = graph.get_checkpoint(checkpoint.parent_id) if checkpoint.parent_id else None
        assert chain == list(graph.list_checkpoints("s", namespace=namespace, limit=200))
        assert [each.version for each in chain] == list(range(waves, 0, -1))


def test_a_fork_in_the_middle_goes_its_own_way_to_the_end(
    graph: GraphCheckpointStore, committed_db: CommittedDatabase
) -> None:
    graph.create_session("", session_id="s")
    runner(graph, committed_db).run(PLAN)
    waiting = graph.get_latest_checkpoint("s", "")
    assert waiting is not None
    for with_history in (False, True):
        fork = graph.fork(waiting.checkpoint_id, with_history=with_history)
        other = GraphRunner(graph, committed_db.alias, fork.session_id, approval="no")
        assert other.run(PLAN) == {**OUTPUTS, "approve": "no", "publish": ("no", 3)}
        assert executed(graph, fork.session_id) == EXECUTED
    assert graph.delete_session("s") == 1
    assert executed(graph, fork.session_id) == EXECUTED
