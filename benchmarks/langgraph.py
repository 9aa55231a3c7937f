"""``python -m benchmarks.langgraph``: `DjangoSaver` beside LangGraph's PostgresSaver, on one server.

Each operation runs once on both savers, in random order, one after the other: a ratio compares medians of
the same minutes. A superstep writes three channels and three writes of tasks. Statements are those that
Django sends.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, Final, TypedDict

import psycopg
from django.db import connections
from langgraph.checkpoint.base import BaseCheckpointSaver, empty_checkpoint
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.graph import END, START, StateGraph
from psycopg.rows import dict_row

from benchmarks.payloads import message, state_of
from benchmarks.server import benchmark_server, connection_url, create_database

__all__ = ["AIMS"]

AIMS: Final = {
    "put + put_writes": 0.87,
    "get_tuple": 0.5,
    "statements per superstep": 3.0,
    "put + put_writes, thread of 1,000 steps / of 10": 1.3,
    "get_tuple, thread of 1,000 steps / of 10": 1.3,
}
"""The largest ratios and counts. A thread of 1,000 steps is as fast as one of 10, up to the noise."""

_WRITES: Final = [("messages", message(1)), ("notes", {"a": 1}), ("branch:to:next", None)]


class Thread:
    """A thread of one saver, to which supersteps are written."""

    def __init__(self, saver: BaseCheckpointSaver[Any], name: str) -> None:
        self.saver = saver
        self.start: Any = {"configurable": {"thread_id": name, "checkpoint_ns": ""}}
        self.config: Any = self.start
        self.version: Any = None
        self.steps = 0

    def superstep(self) -> None:
        self.version = self.saver.get_next_version(self.version, None)
        self.steps += 1
        values = {
            "state": state_of(4, self.steps),
            "messages": [message(number) for number in range(4)],
            "notes": {"step": self.steps},
        }
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = values
        checkpoint["channel_versions"] = dict.fromkeys(values, self.version)
        metadata: Any = {"source": "loop", "step": self.steps, "parents": {}}
        self.config = self.saver.put(self.config, checkpoint, metadata, dict.fromkeys(values, self.version))
        self.saver.put_writes(self.config, _WRITES, f"task-{self.steps}", "~path")

    def read(self) -> None:
        found = self.saver.get_tuple(self.start)
        assert found is not None
        assert found.checkpoint["channel_values"]["notes"] == {"step": self.steps}
        assert len(found.pending_writes or []) == len(_WRITES)


def medians(first: Callable[[], None], second: Callable[[], None], count: int) -> tuple[float, float]:
    """Milliseconds of two operations that run by turns, after a warm-up."""
    seconds: dict[int, list[float]] = {0: [], 1: []}
    order = [0, 1]
    shuffle = random.Random(1).shuffle  # noqa: S311  an order, not a secret
    for number in range(count + 20):
        shuffle(order)
        for which in order:
            begun = time.perf_counter()
            (first, second)[which]()
            if number >= 20:
                seconds[which].append(time.perf_counter() - begun)
    return statistics.median(seconds[0]) * 1000, statistics.median(seconds[1]) * 1000


class _State(TypedDict):
    number: int


def statements_per_superstep(saver: BaseCheckpointSaver[Any], supersteps: int = 20) -> float:
    """Return how many statements a run of a graph sends for each of its supersteps."""
    sent = 0

    def count(execute: Any, *arguments: Any) -> Any:
        nonlocal sent
        sent += 1
        return execute(*arguments)

    class Counted(type(saver)):  # type: ignore[misc]  # the class of the saver that is given
        """LangGraph writes in threads of its own, so each call counts on the connection of its thread."""

        def put(self, *arguments: Any) -> Any:
            with connections["default"].execute_wrapper(count):
                return super().put(*arguments)

        def put_writes(self, *arguments: Any, **keywords: Any) -> None:
            with connections["default"].execute_wrapper(count):
                super().put_writes(*arguments, **keywords)

        def get_tuple(self, config: Any) -> Any:
            with connections["default"].execute_wrapper(count):
                return super().get_tuple(config)

    # Before the graph is compiled: it runs with a copy of the saver.
    saver.__class__ = Counted
    builder = StateGraph(_State)
    builder.add_node("count", lambda state: {"number": state["number"] + 1})
    builder.add_edge(START, "count")
    builder.add_conditional_edges("count", lambda state: END if state["number"] >= supersteps else "count")
    graph = builder.compile(checkpointer=saver)
    config: Any = {"configurable": {"thread_id": "counted"}, "recursion_limit": supersteps + 5}
    graph.invoke({"number": 0}, config, durability="sync")
    if not sent:
        raise AssertionError("no statement was counted")
    return sent / supersteps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="operations of each kind")
    count = parser.parse_args().count
    with benchmark_server() as cluster:
        create_database(cluster, "default")
        create_database(cluster, "peers", is_empty=True)
        from helix_store.contrib.langgraph import DjangoSaver

        with psycopg.connect(
            connection_url("peers"), autocommit=True, prepare_threshold=0, row_factory=dict_row
        ) as connection:
            official = PostgresSaver(connection)
            official.setup()
            ours = DjangoSaver()
            figures = _measured(ours, official, count)
        figures["statements per superstep"] = statements_per_superstep(DjangoSaver())
    for name, figure in figures.items():
        verdict = "met" if figure <= AIMS[name] else "missed"
        print(f"{name:<50} {figure:6.2f}   at most {AIMS[name]}: {verdict}")
    return int(any(figure > AIMS[name] for name, figure in figures.items()))


def _measured(ours: Any, official: Any, count: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    pair = Thread(ours, "thread"), Thread(official, "thread")
    for name, call in (("put + put_writes", Thread.superstep), ("get_tuple", Thread.read)):
        mine, theirs = medians(lambda c=call: c(pair[0]), lambda c=call: c(pair[1]), count)  # type: ignore[misc]
        print(f"{name}: {mine:.2f} ms, PostgresSaver {theirs:.2f} ms")
        figures[name] = mine / theirs
    long, short = Thread(ours, "long"), Thread(ours, "short")
    for _ in range(1_000):
        long.superstep()
    for _ in range(10):
        short.superstep()
    for name, call in (("get_tuple", Thread.read), ("put + put_writes", Thread.superstep)):
        slow, quick = medians(lambda c=call: c(long), lambda c=call: c(short), count)  # type: ignore[misc]
        figures[f"{name}, thread of 1,000 steps / of 10"] = slow / quick
    return figures


if __name__ == "__main__":
    raise SystemExit(main())
