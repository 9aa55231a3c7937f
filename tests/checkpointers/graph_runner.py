"""A small graph runtime on the graph store: waves, cycles, sub-graphs, skipped nodes, interrupts, resume.

The messages of a wave and its checkpoint are one transaction, so a run that dies anywhere continues from its
latest checkpoint, and every node's message is there exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction

from helix_store.checkpointers import GraphCheckpointStore
from helix_store.checkpointers.graph.types import GraphCheckpoint

__all__ = ["Graph", "GraphRunner", "Node"]

ENDED = ("completed", "skipped")


@dataclass(frozen=True)
class Node:
    """``run`` gets the outputs by node; ``graph`` runs in its place, in another namespace."""

    run: Callable[[Mapping[str, Any]], Any] = lambda outputs: None
    after: tuple[str, ...] = ()
    only_if: Callable[[Mapping[str, Any]], bool] = lambda outputs: True
    graph: Graph | None = None
    needs_approval: bool = False
    back_to: str | None = None
    until: Callable[[Mapping[str, Any]], bool] = lambda outputs: True


@dataclass(frozen=True)
class Graph:
    nodes: Mapping[str, Node]

    def between(self, first: str, last: str) -> set[str]:
        """The nodes of a cycle from ``first`` to ``last``."""
        found = {last}
        pending = [last]
        while pending:
            for name in self.nodes[pending.pop()].after:
                if name not in found:
                    found.add(name)
                    if name != first:
                        pending.append(name)
        return found


@dataclass
class GraphRunner:
    store: GraphCheckpointStore
    alias: str
    session_id: str
    approval: Any = None
    before_commit: Callable[[], None] = field(default=lambda: None)

    def run(self, graph: Graph, namespace: str = "") -> dict[str, Any] | None:
        """Run or go on until the end and return the outputs, or ``None`` when an approval is missing."""
        checkpoint = self.store.get_latest_checkpoint(self.session_id, namespace)
        results = _restored(graph, checkpoint)
        cycle_state = None if checkpoint is None else checkpoint.cycle_state
        step = 0 if checkpoint is None else checkpoint.step + 1
        while wave := _ready(graph, results):
            interrupted = self._run_wave(graph, namespace, wave, results)
            cycle_state = _closed_cycle(graph, wave, results, cycle_state)
            checkpoint = self._save(namespace, wave, results, cycle_state, step, checkpoint, interrupted)
            if interrupted is not None:
                return None
            step += 1
        return {name: result.get("output") for name, result in results.items()}

    def _run_wave(self, graph: Graph, namespace: str, wave: list[str], results: dict[str, Any]) -> str | None:
        outputs = {name: result.get("output") for name, result in results.items()}
        interrupted = None
        for name in wave:
            node = graph.nodes[name]
            if not node.only_if(outputs):
                results[name] = {"status": "skipped"}
            elif node.needs_approval and self.approval is None:
                interrupted = name
            elif node.graph is not None:
                inner = self.run(node.graph, f"{namespace}/{name}" if namespace else name)
                if inner is None:
                    interrupted = name
                else:
                    results[name] = {"status": "completed", "output": inner}
            else:
                given = {**outputs, "approval": self.approval} if node.needs_approval else outputs
                results[name] = {"status": "completed", "output": node.run(given)}
        return interrupted

    def _save(
        self,
        namespace: str,
        wave: list[str],
        results: dict[str, Any],
        cycle_state: Any,
        step: int,
        parent: GraphCheckpoint | None,
        interrupted: str | None,
    ) -> GraphCheckpoint:
        with transaction.atomic(using=self.alias):
            for name in wave:
                if results[name]["status"] != "pending" or name != interrupted:
                    self.store.add_message(self.session_id, role="tool", content=f"{namespace}:{name}")
            saved = self.store.save_checkpoint(
                self.session_id,
                namespace=namespace,
                step=step,
                node_id=interrupted,
                node_results=results,
                pending_nodes=[name for name, result in results.items() if result["status"] == "pending"],
                cycle_state=cycle_state,
                source="loop" if interrupted is None else "interrupt",
                parent_id=None if parent is None else parent.checkpoint_id,
            )
            self.before_commit()
        return saved


def _restored(graph: Graph, checkpoint: GraphCheckpoint | None) -> dict[str, Any]:
    """Results by node: what has ended stays, and everything else, failed nodes included, runs (again)."""
    results = {}
    for name in graph.nodes:
        stored = {} if checkpoint is None else checkpoint.node_results.get(name, {})
        results[name] = stored if stored.get("status") in ENDED else {**stored, "status": "pending"}
    return results


def _ready(graph: Graph, results: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, node in graph.nodes.items()
        if results[name]["status"] == "pending"
        and all(results[before]["status"] in ENDED for before in node.after)
    ]


def _closed_cycle(graph: Graph, wave: list[str], results: dict[str, Any], cycle_state: Any) -> Any:
    """Send a cycle round again by making its nodes pending."""
    for name in wave:
        node = graph.nodes[name]
        outputs = {each: result.get("output") for each, result in results.items()}
        if node.back_to is None or results[name]["status"] != "completed" or node.until(outputs):
            continue
        for each in graph.between(node.back_to, name):
            results[each] = {"status": "pending", "output": results[each].get("output")}
        iteration = 1 if cycle_state is None else cycle_state["iteration"] + 1
        return {"back_edge": (name, node.back_to), "iteration": iteration}
    return cycle_state
