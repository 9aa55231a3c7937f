"""Checkpoints: read, list, restore, branch, prune."""

from __future__ import annotations

from helix_store.core import validation
from helix_store.core.guards import guard
from helix_store.core.ids import new_id
from helix_store.core.types import (
    Checkpoint,
    CheckpointPage,
    SessionState,
)
from helix_store.engine.async_twins import async_twin
from helix_store.engine.cursors import read_cursor, write_cursor
from helix_store.exceptions import InvalidQuery
from helix_store.sessions.backend import StoreCalls
from helix_store.sessions.requests import BranchRequest


class CheckpointCalls(StoreCalls):
    def get_checkpoint(self, session_id: str, checkpoint_id: str) -> Checkpoint | None:
        """Return this session's checkpoint with its state, or ``None`` for any other id. One query."""
        validation.identifier(session_id, "session_id")
        return self._backend.checkpoints.get(session_id, validation.checkpoint_id(checkpoint_id))

    def get_latest_checkpoint(self, session_id: str) -> Checkpoint | None:
        """Return the newest checkpoint, or ``None`` if there is none or the session is unknown. One query."""
        return self._backend.checkpoints.latest(validation.identifier(session_id, "session_id"))

    def list_checkpoints(
        self, session_id: str, *, limit: int = 20, cursor: str | None = None
    ) -> CheckpointPage:
        """List the heads of checkpoints, newest first, without reading their states.

        Pages stay stable while new checkpoints are written. ``limit`` is 1 to 200; larger values mean 200.
        Raises `SessionNotFound`, `InvalidCursor` and `InvalidQuery`.
        """
        validation.identifier(session_id, "session_id")
        binding = ["checkpoints", self.tenant, session_id]
        before = None if cursor is None else read_cursor(cursor, query=binding)[0]
        items, total, following = self._backend.checkpoints.select(
            session_id, limit=validation.page_limit(limit), before_version=before
        )
        next_cursor = None if following is None else write_cursor([following], query=binding)
        return CheckpointPage(items=items, next_cursor=next_cursor, total=total)

    def restore_checkpoint(
        self,
        session_id: str,
        checkpoint_id: str,
        *,
        expected_version: int | None = None,
        fencing_token: int | None = None,
    ) -> int:
        """Restore state and messages from a checkpoint and return the new version, one higher than before.

        Runs in one transaction. Deletes later checkpoints, later messages and all staged changes, and keeps
        the write-once mode. Raises `CheckpointNotFound` and `StaleStateError`.
        """
        validation.identifier(session_id, "session_id")
        return self._backend.checkpoints.restore(
            session_id, validation.checkpoint_id(checkpoint_id), guard(expected_version, fencing_token)
        )

    def branch_session(
        self,
        session_id: str,
        checkpoint_id: str | None = None,
        *,
        new_session_id: str | None = None,
        message_index: int | None = None,
        title: str | None = None,
    ) -> SessionState:
        """Start a new session from a checkpoint of this one, and return its state.

        The source is the given checkpoint, or the first ``message_index`` messages and the newest checkpoint
        within them, or the latest checkpoint; if there is no checkpoint, it is the current state. Messages
        are copied with their original times. The new session is active and the root of a new tree; workspace
        refs, pending calls, suspension and expiry are not copied. Runs in one transaction. Raises
        `CheckpointNotFound` and `SessionExists`. Raises `InvalidQuery` if both a checkpoint and an index are
        passed, or if the index is beyond the last message.
        """
        validation.identifier(session_id, "session_id")
        if checkpoint_id is not None and message_index is not None:
            raise InvalidQuery(
                "Branch from a checkpoint or from a message index, not both.", path="message_index"
            )
        if message_index is not None:
            validation.query_number(message_index, "message_index")
        chosen_id = (
            new_id() if new_session_id is None else validation.identifier(new_session_id, "new_session_id")
        )
        return self._backend.checkpoints.branch(
            BranchRequest(
                session_id=session_id,
                new_session_id=chosen_id,
                checkpoint_id=None if checkpoint_id is None else validation.checkpoint_id(checkpoint_id),
                message_index=message_index,
                title=validation.title(title),
            )
        )

    def delete_checkpoint(self, session_id: str, checkpoint_id: str) -> bool:
        """Delete one checkpoint without touching the current state. Safe to repeat."""
        validation.identifier(session_id, "session_id")
        return self._backend.checkpoints.delete(session_id, validation.checkpoint_id(checkpoint_id))

    def prune_checkpoints(self, session_id: str, *, keep: int) -> int:
        """Delete all but the newest ``keep`` checkpoints and return how many were deleted. Safe to repeat."""
        validation.identifier(session_id, "session_id")
        return self._backend.checkpoints.prune(session_id, validation.query_number(keep, "keep"))

    aget_checkpoint = async_twin(get_checkpoint)
    aget_latest_checkpoint = async_twin(get_latest_checkpoint)
    alist_checkpoints = async_twin(list_checkpoints)
    arestore_checkpoint = async_twin(restore_checkpoint)
    abranch_session = async_twin(branch_session)
    adelete_checkpoint = async_twin(delete_checkpoint)
    aprune_checkpoints = async_twin(prune_checkpoints)
