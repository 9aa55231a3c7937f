"""Lists and sweeps of the checkpointers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from tests.plans.calls import PAGE, Call
from tests.plans.rows import BUSY, LONG, World
from tests.plans.rows import BUSY_GRAPH as GRAPH

__all__ = ["CHECKPOINTER_CALLS"]

_ALL_OF_A_SESSION: Final = LONG + 100


Make = Callable[[World], Callable[[], object]]


def _of_graph(method: str, *arguments: Any, **options: Any) -> Make:
    return lambda world: partial(getattr(world.graph, method), *arguments, **options)


def _further_on(method: str, *arguments: Any, limit: int = 200, **options: Any) -> Make:
    """The page behind a first one of ``limit``."""

    def make(world: World) -> Callable[[], object]:
        list_page = partial(getattr(world.graph, method), *arguments, **options)
        return partial(list_page, limit=PAGE, cursor=list_page(limit=limit).next_cursor)

    return make


def _before_old_message(by: str) -> Make:
    def make(world: World) -> Callable[[], object]:
        old = world.graph.get_messages(GRAPH)[800]
        return partial(world.graph.get_messages, GRAPH, limit=PAGE, before=getattr(old, by))

    return make


def _of_latest_checkpoint(method: str, **options: Any) -> Make:
    def make(world: World) -> Callable[[], object]:
        latest = world.graph.get_latest_checkpoint(GRAPH)
        assert latest is not None
        return partial(getattr(world.graph, method), latest.checkpoint_id, **options)

    return make


def _of_snapshots(method: str, *arguments: Any, **options: Any) -> Make:
    return lambda world: partial(getattr(world.snapshots, method), *arguments, **options)


def _of_old_snapshot(method: str, **options: Any) -> Make:
    def make(world: World) -> Callable[[], object]:
        old = world.snapshots.list(BUSY)[500].id
        if method == "list":
            return partial(world.snapshots.list, BUSY, limit=PAGE, before=old)
        return partial(getattr(world.snapshots, method), BUSY, old, **options)

    return make


def _of_items(method: str, *arguments: Any, **options: Any) -> Make:
    return lambda world: partial(getattr(world.items_of(BUSY, "branch"), method), *arguments, **options)


def _items_before_an_old_one(world: World) -> Callable[[], object]:
    log = world.items_of(BUSY, "branch")
    return partial(log.tail, PAGE, before=log.tail()[100].position)


CHECKPOINTER_CALLS: Final = [
    # Items
    Call("items tail", _of_items("tail", PAGE)),
    Call("items tail before an old one", _items_before_an_old_one),
    Call("items get", _of_items("get", "key-800")),
    Call("items pop", _of_items("pop")),
    Call("items append", _of_items("append", [1], keys=["new"])),
    Call("items put", _of_items("put", "key-800", 2)),
    Call("items replace_suffix", _of_items("replace_suffix", [1, 1], [2])),
    # Counting reads the index.
    Call("items count", _of_items("count"), reads=_ALL_OF_A_SESSION),
    Call("items lanes", _of_items("lanes"), reads=_ALL_OF_A_SESSION, sorts=2),
    # Sessions of graphs
    Call("graph list_sessions", _of_graph("list_sessions", limit=PAGE)),
    Call("graph list_sessions, far page", _further_on("list_sessions")),
    Call("graph list_sessions of a workspace", _of_graph("list_sessions", "workspace-7", limit=PAGE)),
    Call("graph list_sessions without workspace", _of_graph("list_sessions", None, limit=PAGE)),
    Call("graph list_sessions without workspace, far page", _further_on("list_sessions", None)),
    # Counting its checkpoints reads their index.
    Call("graph get_session_summary", _of_graph("get_session_summary", GRAPH), reads=_ALL_OF_A_SESSION),
    Call(
        "graph list_session_summaries",
        _of_graph("list_session_summaries", limit=PAGE),
        reads=_ALL_OF_A_SESSION,
    ),
    # It returns the whole history.
    Call(
        "graph continue_latest",
        _of_graph("continue_latest"),
        reads=_ALL_OF_A_SESSION,
        sorts=_ALL_OF_A_SESSION,
    ),
    # Titles have no index, as its docstring says: it reads the tenant's graph sessions.
    Call("graph search_sessions", _of_graph("search_sessions", "no such", limit=PAGE), reads=2_100),
    # Messages of graphs
    Call("graph get_messages", _of_graph("get_messages", GRAPH, limit=PAGE), sorts=PAGE),
    Call("graph get_messages before an id", _before_old_message("id"), sorts=PAGE),
    # Times have no index: whatever is newer is passed over, for either end of the page.
    Call("graph get_messages before a time", _before_old_message("created_at"), reads=500, sorts=PAGE),
    Call("graph add_message", _of_graph("add_message", GRAPH, role="user", content="hello")),
    # Checkpoints of graphs
    Call("graph list_checkpoints", _of_graph("list_checkpoints", GRAPH, limit=PAGE)),
    Call("graph list_checkpoints, far page", _further_on("list_checkpoints", GRAPH)),
    Call(
        "graph list_checkpoints of a namespace",
        _of_graph("list_checkpoints", GRAPH, namespace="sub", limit=PAGE),
    ),
    Call(
        "graph list_checkpoints of a namespace, far page",
        _further_on("list_checkpoints", GRAPH, namespace="sub"),
    ),
    Call("graph get_latest_checkpoint", _of_graph("get_latest_checkpoint", GRAPH)),
    Call(
        "graph get_latest_checkpoint of a namespace",
        _of_graph("get_latest_checkpoint", GRAPH, "sub"),
    ),
    Call("graph get_checkpoint", _of_latest_checkpoint("get_checkpoint")),
    Call("graph save_checkpoint", _of_graph("save_checkpoint", GRAPH, step=1)),
    # The whole history is copied, in its order.
    Call(
        "graph fork",
        _of_latest_checkpoint("fork"),
        reads=2 * LONG,
        sorts=_ALL_OF_A_SESSION,
    ),
    Call(
        "graph fork with history",
        _of_latest_checkpoint("fork", with_history=True),
        reads=30 * LONG,
        sorts=4 * LONG,
    ),
    # Snapshots
    Call("snapshots list", _of_snapshots("list", BUSY, limit=PAGE)),
    Call("snapshots list before one", _of_old_snapshot("list")),
    Call("snapshots get", _of_snapshots("get", BUSY)),
    Call("snapshots get of one", _of_old_snapshot("get")),
    Call("snapshots put", _of_snapshots("put", "session-300", {"version": 1})),
    # The first one above the cap finds all those that are too many.
    Call("snapshots put above the cap", _of_snapshots("put", BUSY, {"version": 1}), reads=_ALL_OF_A_SESSION),
    Call("snapshots claim", _of_snapshots("claim", BUSY, owner="resumer")),
    Call("snapshots claim of one", _of_old_snapshot("claim", owner="resumer")),
    Call("snapshots delete of one", _of_old_snapshot("delete")),
    Call("snapshots delete_threads", _of_snapshots("delete_threads", ["session-300", "session-301"])),
]
