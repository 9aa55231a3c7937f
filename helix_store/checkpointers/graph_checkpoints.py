"""Checkpoints of graphs: save, read, fork."""

from __future__ import annotations

from typing import Any

from helix_store.checkpointers.graph_calls import GraphCalls, namespace_filter
from helix_store.core import validation
from helix_store.core.graph import GraphCheckpoint, GraphPage, GraphSession
from helix_store.core.graph_payloads import CheckpointRequest, encode_checkpoint
from helix_store.core.ids import new_id
from helix_store.core.types import CheckpointSource
from helix_store.stores.api.base import guard
from helix_store.stores.async_twins import async_twin
from helix_store.stores.cursors import read_cursor, write_cursor

__all__ = ["GraphCheckpointCalls"]


class GraphCheckpointCalls(GraphCalls):
    def save_checkpoint(
        self,
        session_id: str,
        *,
        namespace: str = "",
        version: int | None = None,
        step: int,
        node_id: str | None = None,
        node_results: dict[Any, Any] | None = None,
        pending_nodes: Any = (),
        cycle_state: Any = None,
        source: CheckpointSource | str = CheckpointSource.LOOP,
        parent_id: str | None = None,
        fencing_token: int | None = None,
    ) -> GraphCheckpoint:
        """Store what a graph has done so far and return the checkpoint as it was stored.

        One transaction under the session's lock. Without a ``version`` it takes the next free one of its
        namespace, so a graph may run and resume as often as it likes. ``node_results`` holds a dict with a
        ``status`` by node id; typed values are kept. It marks the session as just written and leaves its
        version alone. Raises `SessionNotFound`, `ConflictError` for a taken version, `CheckpointNotFound` for
        a parent that the session does not have, `InvalidPayload`, `LimitExceeded` and `FencedOutError`.
        """
        validation.identifier(session_id, "session_id")
        if version is not None:
            validation.whole_number(version, "version", minimum=1)
        request = CheckpointRequest(
            session_id=session_id,
            namespace=validation.tenant(namespace, "namespace"),
            version=version,
            step=validation.whole_number(step, "step"),
            node_id=validation.optional_identifier(node_id, "node_id"),
            payload=encode_checkpoint(
                node_results=node_results,
                pending_nodes=pending_nodes,
                cycle_state=cycle_state,
                limits=self.limits,
            ),
            source=validation.enum(CheckpointSource, source, "source"),
            parent_id=validation.optional_identifier(parent_id, "parent_id"),
            guard=guard(fencing_token=fencing_token),
        )
        return self._checkpoints.save(request)

    def get_checkpoint(self, checkpoint_id: str) -> GraphCheckpoint | None:
        """A checkpoint by its id alone, or ``None``. One query."""
        return self._checkpoints.get(validation.identifier(checkpoint_id, "checkpoint_id"))

    def get_latest_checkpoint(self, session_id: str, namespace: str | None = None) -> GraphCheckpoint | None:
        """The checkpoint of the highest version, in one namespace or in all, whatever its step. One query.

        ``None`` when there is none or the session is unknown. Of equal versions in several namespaces it is
        the one that was saved last.
        """
        validation.identifier(session_id, "session_id")
        return self._checkpoints.latest(session_id, namespace_filter(namespace))

    def list_checkpoints(
        self,
        session_id: str,
        *,
        namespace: str | None = None,
        limit: int = 20,
        cursor: str | None = None,
    ) -> GraphPage[GraphCheckpoint]:
        """Checkpoints, the highest version first: the first one is the latest. One query.

        ``namespace=None`` means all of them, the empty one is that of the outermost graph. ``limit`` is 1 to
        200 (above means 200). A checkpoint that cannot be read is there, and raises `IntegrityFault` when one
        of its typed values is asked for. Raises `SessionNotFound`, `InvalidQuery` and `InvalidCursor`.
        """
        validation.identifier(session_id, "session_id")
        chosen = namespace_filter(namespace)
        binding = ["graph checkpoints", self.tenant, session_id, chosen]
        after = None
        if cursor is not None:
            version, key = read_cursor(cursor, query=binding)
            after = (version, key)
        items, following = self._checkpoints.select(
            session_id, namespace=chosen, limit=validation.page_limit(limit), after=after
        )
        next_cursor = None if following is None else write_cursor(list(following), query=binding)
        return GraphPage(items=items, next_cursor=next_cursor)

    def fork(
        self, checkpoint_id: str, *, title: str | None = None, with_history: bool = False
    ) -> GraphSession:
        """Start a new session from a checkpoint and return it.

        It has the messages that the session had at the checkpoint, with their times, and a copy of the
        checkpoint whose parent is the original and whose source is ``fork``. With history it also has every
        checkpoint that was saved before, in all namespaces, less later versions of the checkpoint's own.
        One transaction, six statements whatever the history's length. Deleting the original leaves a fork
        whole. Raises `CheckpointNotFound`. A repeat makes another fork.
        """
        return self._forks.fork(
            validation.identifier(checkpoint_id, "checkpoint_id"),
            new_session_id=new_id(),
            title=validation.optional_text(title, "title"),
            with_history=bool(with_history),
        )

    asave_checkpoint = async_twin(save_checkpoint)
    aget_checkpoint = async_twin(get_checkpoint)
    aget_latest_checkpoint = async_twin(get_latest_checkpoint)
    alist_checkpoints = async_twin(list_checkpoints)
    afork = async_twin(fork)
