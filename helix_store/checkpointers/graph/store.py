"""The graph checkpoint store: sessions, messages and checkpoints of graph runtimes."""

from __future__ import annotations

from helix_store import conf
from helix_store.checkpointers.graph.checkpoints import GraphCheckpoints
from helix_store.checkpointers.graph.messages import GraphMessages
from helix_store.checkpointers.graph.sessions import GraphSessions
from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.engine.database import Database


class GraphCheckpointStore(GraphSessions, GraphMessages, GraphCheckpoints):
    """Sessions, messages and checkpoints of graph runtimes in a Django database, with a checkpoint per wave
    of nodes, a namespace per sub-graph, and forks. Its sessions are sessions of agent type ``graph``: a state
    store loads them, and this store finds the sessions of a state store by their id. Source: the graph
    checkpoint store document.
    """

    def __init__(self, using: str | None = None, *, tenant: str = "") -> None:
        conf.require_usable_prefix()
        super().__init__(Database(using, validation.tenant(tenant)))

    @property
    def tenant(self) -> str:
        return self.db.tenant

    @property
    def limits(self) -> Limits:
        return conf.limits()
