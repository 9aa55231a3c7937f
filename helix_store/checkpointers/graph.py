"""The store of graph runtimes."""

from __future__ import annotations

from helix_store import conf
from helix_store.checkpointers.graph_checkpoints import GraphCheckpointCalls
from helix_store.checkpointers.graph_messages import GraphMessageCalls
from helix_store.checkpointers.graph_sessions import GraphSessionCalls
from helix_store.core import validation
from helix_store.stores.database.scope import Scope

__all__ = ["GraphCheckpointStore"]


class GraphCheckpointStore(GraphSessionCalls, GraphMessageCalls, GraphCheckpointCalls):
    """Sessions, messages and checkpoints of graph runtimes in a Django database.

    One checkpoint per wave of nodes, a namespace per sub-graph, forks. Its sessions are sessions like any
    other, of agent type ``graph``: a state store loads them, and this store finds other sessions by their id.
    Source: the graph checkpoint store document.
    """

    def __init__(self, using: str | None = None, *, tenant: str = "") -> None:
        conf.require_usable_prefix()
        super().__init__(Scope(using, validation.tenant(tenant), None))
