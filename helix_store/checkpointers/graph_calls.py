"""What the groups of calls of the graph store share."""

from __future__ import annotations

from typing import Any

from helix_store import conf
from helix_store.core import validation
from helix_store.core.limits import Limits
from helix_store.core.types import Unset
from helix_store.stores.database.graph_checkpoints import GraphCheckpoints
from helix_store.stores.database.graph_forks import GraphForks
from helix_store.stores.database.graph_messages import GraphMessages
from helix_store.stores.database.graph_sessions import GraphSessions
from helix_store.stores.database.scope import Scope

__all__ = ["GraphCalls", "namespace_filter", "workspace_filter"]


class GraphCalls:
    """The verbs of one alias and tenant."""

    def __init__(self, scope: Scope) -> None:
        self._tenant = scope.tenant
        self._sessions = GraphSessions(scope)
        self._messages = GraphMessages(scope)
        self._checkpoints = GraphCheckpoints(scope)
        self._forks = GraphForks(scope)

    @property
    def tenant(self) -> str:
        return self._tenant

    @property
    def limits(self) -> Limits:
        return conf.limits()


def workspace_filter(workspace_id: Any) -> str | Unset | None:
    """`UNSET` for every workspace, ``None`` for sessions without one; an empty id is a workspace like any."""
    if isinstance(workspace_id, Unset):
        return workspace_id
    return validation.optional_identifier(workspace_id, "workspace_id", empty=True)


def namespace_filter(namespace: Any) -> str | None:
    """``None`` for every namespace; the empty one is that of the outermost graph."""
    return validation.optional_identifier(namespace, "namespace", empty=True)
