"""The checkpoint storage of Microsoft Agent Framework in the project's database."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from agent_framework import CheckpointID, CheckpointStorage, WorkflowCheckpoint, WorkflowCheckpointException
from agent_framework._workflows._checkpoint_encoding import decode_checkpoint_value, encode_checkpoint_value

from helix_store.adapters import LockedSession, session_id_for
from helix_store.contrib.item_storage import Document, ItemStorage, LockedItems, document_of
from helix_store.core.types import UserId
from helix_store.exceptions import SessionNotFound
from helix_store.models import Item

_CHECKPOINTS: Final = "agent_framework/checkpoints"
_HEADS: Final = "agent_framework/checkpoint_heads"


class DjangoCheckpointStorage(CheckpointStorage):
    """The checkpoints of workflow runs as items of one session, in the database ``using`` and one tenant.

    Pass one storage for each run or conversation, ``workflow.run(…, checkpoint_storage=storage)``: its
    checkpoints are exported, erased and deleted with the session ``session_id``, which belongs to
    ``user_id``. Every write is one transaction under the session's lock. With a ``fencing_token``, a write
    raises `FencedOutError` if the session's lock has a larger one.

    The framework writes values that JSON cannot represent as pickles. They are read only with its restricted
    reader, which creates objects of the framework's own types, of types that the application registers with
    ``register_checkpoint_type``, and of ``allowed_checkpoint_types`` (``"module:qualname"``).
    """

    def __init__(
        self,
        session_id: str,
        using: str | None = None,
        *,
        tenant: str = "",
        agent_type: str = "agent_framework",
        user_id: UserId | None = None,
        fencing_token: int | None = None,
        allowed_checkpoint_types: Iterable[str] = (),
    ) -> None:
        self.session_id = session_id_for(session_id)
        self._storage = ItemStorage(
            agent_type, using, tenant=tenant, user_id=user_id, fencing_token=fencing_token
        )
        self._allowed = frozenset(allowed_checkpoint_types)

    async def save(self, checkpoint: WorkflowCheckpoint) -> CheckpointID:
        """Store a checkpoint, and replace an older one with the same id.

        Raises ``WorkflowCheckpointException`` for a checkpoint that could not be loaded again, for example
        because the type of an object is not allowed; also raises `InvalidPayload` and `LimitExceeded`.
        """
        document = encode_checkpoint_value(checkpoint.to_dict())
        self._checkpoint(document)
        head = {"workflow_name": checkpoint.workflow_name, "timestamp": checkpoint.timestamp}

        def put(locked: LockedSession) -> None:
            LockedItems(locked, _CHECKPOINTS).put(checkpoint.checkpoint_id, document)
            LockedItems(locked, _HEADS).put(checkpoint.checkpoint_id, head)

        await self._storage.awrite(self.session_id, put)
        return checkpoint.checkpoint_id

    async def load(self, checkpoint_id: CheckpointID) -> WorkflowCheckpoint:
        """Return a checkpoint. One query. Raises ``WorkflowCheckpointException``."""
        checkpoint = await self._find(checkpoint_id)
        if checkpoint is None:
            raise WorkflowCheckpointException(f"No checkpoint found with ID {checkpoint_id}")
        return checkpoint

    async def list_checkpoints(self, *, workflow_name: str) -> list[WorkflowCheckpoint]:
        """Return the checkpoints of a workflow in the order in which they were added. One query."""
        items = await self._storage.log(self.session_id, _CHECKPOINTS).atail()
        documents = [document_of(item.payload) for item in items]
        return [self._checkpoint(each) for each in documents if each.get("workflow_name") == workflow_name]

    async def list_checkpoint_ids(self, *, workflow_name: str) -> list[CheckpointID]:
        """Return the ids of a workflow's checkpoints. One query, which reads no checkpoints."""
        return [checkpoint_id for checkpoint_id, _ in await self._of(workflow_name)]

    async def get_latest(self, *, workflow_name: str) -> WorkflowCheckpoint | None:
        """Return the latest checkpoint of a workflow, or ``None``. Two queries."""
        heads = await self._of(workflow_name)
        for checkpoint_id, _ in sorted(heads, key=lambda head: head[1], reverse=True):
            # It may have been deleted since the ids were read.
            if (checkpoint := await self._find(checkpoint_id)) is not None:
                return checkpoint
        return None

    async def delete(self, checkpoint_id: CheckpointID) -> bool:
        """Delete a checkpoint, and return whether it existed."""

        def delete(locked: LockedSession) -> bool:
            items = Item.objects.using(locked.alias).filter(session_id=locked.key, key=checkpoint_id)
            return bool(items.filter(lane__in=(_CHECKPOINTS, _HEADS)).delete()[0])

        try:
            return await self._storage.awrite(self.session_id, delete, create=False)
        except SessionNotFound:
            return False

    async def _find(self, checkpoint_id: CheckpointID) -> WorkflowCheckpoint | None:
        document = await self._storage.aget(self.session_id, _CHECKPOINTS, checkpoint_id)
        return None if document is None else self._checkpoint(document)

    async def _of(self, workflow_name: str) -> list[tuple[CheckpointID, datetime]]:
        """Return the ids and times of a workflow's checkpoints."""
        items = await self._storage.log(self.session_id, _HEADS).atail()
        heads = [(str(item.key), document_of(item.payload)) for item in items]
        return [
            (checkpoint_id, datetime.fromisoformat(head["timestamp"]))
            for checkpoint_id, head in heads
            if head["workflow_name"] == workflow_name
        ]

    def _checkpoint(self, document: Document) -> WorkflowCheckpoint:
        """Build a checkpoint. Raises ``WorkflowCheckpointException``."""
        decoded: Any = decode_checkpoint_value(document, allowed_types=self._allowed)
        return WorkflowCheckpoint.from_dict(decoded)
