"""The checkpoint storage of Microsoft Agent Framework in the project's database."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

from agent_framework import (
    CheckpointID,
    CheckpointStorage,
    Workflow,
    WorkflowCheckpoint,
    WorkflowCheckpointException,
    WorkflowRunResult,
)
from agent_framework._workflows._checkpoint_encoding import decode_checkpoint_value, encode_checkpoint_value

from helix_store.adapters import LockedSession, session_id_for
from helix_store.contrib.item_storage import (
    Document,
    ItemStorage,
    LockedItems,
    OpenRequests,
    document_of,
)
from helix_store.core.types import UserId
from helix_store.exceptions import ConflictError, OutcomeUnknown, SessionNotFound, StoreTimeout
from helix_store.models import Item

_CHECKPOINTS: Final = "agent_framework/checkpoints"
_HEADS: Final = "agent_framework/checkpoint_heads"


class DjangoCheckpointStorage(CheckpointStorage):
    """The checkpoints of workflow runs as items of one session, in the database ``using`` and one tenant.

    Pass one storage for each run or conversation, ``workflow.run(…, checkpoint_storage=storage)``: its
    checkpoints are exported, erased and deleted with the session ``session_id``, which belongs to
    ``user_id``. Every write is one transaction under the session's lock. With a ``fencing_token``, a write
    raises `FencedOutError` if the session's lock has a larger one. An erased session is not created again,
    which raises `SessionErased`, unless ``recreate`` is True.

    The framework writes values that JSON cannot represent as pickles. They are read only with its restricted
    reader, which creates objects of the framework's own types, of types that the application registers with
    ``register_checkpoint_type``, and of ``allowed_checkpoint_types`` (``"module:qualname"``).

    Example::

        offer = f"{Offer.__module__}:{Offer.__qualname__}"
        storage = DjangoCheckpointStorage("lisbon", user_id="ada", allowed_checkpoint_types=[offer])
        await workflow.run("Lisbon", checkpoint_storage=storage)
        latest = await storage.get_latest(workflow_name=workflow.name)
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
        recreate: bool = False,
        allowed_checkpoint_types: Iterable[str] = (),
    ) -> None:
        self.session_id = session_id_for(session_id)
        self._storage = ItemStorage(
            agent_type,
            using,
            tenant=tenant,
            user_id=user_id,
            fencing_token=fencing_token,
            recreate=recreate,
        )
        self._allowed = frozenset(allowed_checkpoint_types)
        self._failure: Exception | None = None
        self._running: asyncio.Future[WorkflowRunResult] | None = None

    @property
    def failure(self) -> Exception | None:
        """The error of the newest `save`, which a workflow only logs; ``None`` if it succeeded."""
        return self._failure

    async def run(self, workflow: Workflow, message: Any = None, **options: Any) -> WorkflowRunResult:
        """Return the result of ``workflow.run(message, checkpoint_storage=self, **options)``.

        A workflow continues without checkpoints if they cannot be saved. This call cancels it after an error
        that no later attempt can succeed with, such as `FencedOutError`, `SessionErased` or `LimitExceeded`,
        and raises this error. A storage can run one workflow at a time.
        """
        if self._running is not None:
            raise ConflictError("This storage is running a workflow; use one storage for each run.")
        self._failure = None
        given = () if message is None else (message,)
        running = asyncio.ensure_future(workflow.run(*given, checkpoint_storage=self, **options))
        self._running = running
        try:
            result = await running
        except asyncio.CancelledError:
            if self.failure is None or not _ends_run(self.failure):
                raise
        finally:
            running.cancel()
            self._running = None
        if self.failure is not None and _ends_run(self.failure):
            raise self.failure
        return result

    async def save(self, checkpoint: WorkflowCheckpoint) -> CheckpointID:
        """Store a checkpoint, and replace an older one with the same id.

        Raises ``WorkflowCheckpointException`` for a checkpoint that could not be loaded again, for example
        because the type of an object is not allowed; also raises `InvalidPayload` and `LimitExceeded`.
        """
        try:
            await self._save(checkpoint)
        except Exception as exc:
            self._failure = exc
            if self._running is not None and _ends_run(exc):
                # The workflow catches the error, and would continue.
                self._running.cancel()
            raise
        self._failure = None
        return checkpoint.checkpoint_id

    async def _save(self, checkpoint: WorkflowCheckpoint) -> None:
        document = encode_checkpoint_value(checkpoint.to_dict())
        self._checkpoint(document)
        head = {"workflow_name": checkpoint.workflow_name, "timestamp": checkpoint.timestamp}

        def put(locked: LockedSession) -> None:
            LockedItems(locked, _CHECKPOINTS).put(checkpoint.checkpoint_id, document)
            LockedItems(locked, _HEADS).put(checkpoint.checkpoint_id, head)
            requests = OpenRequests(locked, f"workflow {checkpoint.workflow_name}")
            requests.replace(checkpoint.pending_request_info_events)
            requests.write()

        await self._storage.awrite(self.session_id, put)

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
        return await self._of(workflow_name)

    async def get_latest(self, *, workflow_name: str) -> WorkflowCheckpoint | None:
        """Return the checkpoint of a workflow that was added last, or ``None``. Two queries.

        The order is that of the writes to the session, not that of the ``timestamp``, which comes from the
        clock of the worker that made the checkpoint.
        """
        for checkpoint_id in reversed(await self._of(workflow_name)):
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

    async def _of(self, workflow_name: str) -> list[CheckpointID]:
        """Return the ids of a workflow's checkpoints in the order in which they were added."""
        items = await self._storage.log(self.session_id, _HEADS).atail()
        heads = [(str(item.key), document_of(item.payload)) for item in items]
        return [checkpoint_id for checkpoint_id, head in heads if head["workflow_name"] == workflow_name]

    def _checkpoint(self, document: Document) -> WorkflowCheckpoint:
        """Build a checkpoint. Raises ``WorkflowCheckpointException``."""
        decoded: Any = decode_checkpoint_value(document, allowed_types=self._allowed)
        return WorkflowCheckpoint.from_dict(decoded)


def _ends_run(error: Exception) -> bool:
    """Return whether each later checkpoint of the run would fail with the same error."""
    return not getattr(error, "retryable", False) and not isinstance(error, OutcomeUnknown | StoreTimeout)
