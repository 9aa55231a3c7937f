"""Sessions, histories and workflow checkpoints of Microsoft Agent Framework in the project's database."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any, Final

from agent_framework import (
    AgentResponse,
    AgentSession,
    CheckpointID,
    CheckpointStorage,
    Content,
    HistoryProvider,
    Message,
    SessionContext,
    SessionStore,
    Workflow,
    WorkflowCheckpoint,
    WorkflowCheckpointException,
    WorkflowRunResult,
)
from agent_framework import SupportsAgentRun as Agent
from agent_framework._sessions import filter_new_messages
from agent_framework._workflows._checkpoint_encoding import decode_checkpoint_value, encode_checkpoint_value

from helix_store.adapters import LockedSession, session_id_for
from helix_store.contrib.agent_framework.catalogue import MESSAGES
from helix_store.contrib.item_storage import (
    Document,
    ItemStorage,
    LockedItems,
    OpenRequests,
    built,
    count_of,
    document_of,
    record_usage,
    refuse_unreadable,
    response_entry,
    store_exactly,
)
from helix_store.core import validation
from helix_store.core.ids import new_id
from helix_store.core.types import UserId
from helix_store.core.usage import UsageEntry
from helix_store.exceptions import (
    ConflictError,
    InvalidPayload,
    InvalidQuery,
    OutcomeUnknown,
    SessionNotFound,
    StoreTimeout,
)
from helix_store.items import ItemLog, item_key, lane_name
from helix_store.models import Item

_SESSION: Final = "agent_framework/session"
"""The lane of the snapshot, and its key."""

_MARKER: Final = "_helix_store_marker"
"""The attribute of an `AgentSession` that identifies the stored snapshot from which it was read."""

_USAGE_ID: Final = "_helix_store_usage_id"
"""The attribute of a response without an id that names its usage, whichever provider records it."""


class DjangoAgentSessions(SessionStore):
    """Snapshots of agents' sessions as items of sessions, in the database ``using`` and one tenant.

    The snapshot of an id is an item of the session with this id, which `DjangoHistoryProvider` may share.
    Every write is one transaction under the session's lock. Saving a session that was read from this store
    raises `ConflictError` if the stored one has been changed or deleted since then. Any other session
    replaces the stored one. ``user_id`` is the user of the sessions; a session of another user raises
    `ConflictError`. With a ``fencing_token``, a write raises `FencedOutError` if the session's lock has a
    larger one. An erased session is not created again, which raises `SessionErased`, unless ``recreate`` is
    True.

    Example::

        sessions = DjangoAgentSessions(user_id="ada")
        await sessions.set("lisbon", AgentSession(session_id="lisbon"))
        session = await sessions.get("lisbon")
    """

    def __init__(
        self,
        using: str | None = None,
        *,
        tenant: str = "",
        agent_type: str = "agent_framework",
        user_id: UserId | None = None,
        fencing_token: int | None = None,
        recreate: bool = False,
    ) -> None:
        self._storage = ItemStorage(
            agent_type,
            using,
            tenant=tenant,
            user_id=user_id,
            fencing_token=fencing_token,
            recreate=recreate,
        )

    async def get(self, session_id: str) -> AgentSession | None:
        """Return the stored session, or ``None``. One query. Raises `IntegrityFault`."""
        document = await self._storage.aget(self._stored_id(session_id), _SESSION, _SESSION)
        if document is None:
            return None
        return built(_session, document, "agent-framework-core", "session")

    async def set(self, session_id: str, session: AgentSession) -> None:
        """Store a session. Raises `ConflictError`, `InvalidPayload` and `LimitExceeded`."""
        stored_id = self._stored_id(session_id)
        if type(session) is not AgentSession:
            raise InvalidPayload(
                path="session", reason=f"expected AgentSession, got {type(session).__name__}"
            )
        known, marker = getattr(session, _MARKER, None), new_id()
        document = {"marker": marker, "session": session.to_dict()}
        refuse_unreadable(_session, document, "agent-framework-core", "session")

        def replace(locked: LockedSession) -> None:
            items = LockedItems(locked, _SESSION)
            if known is not None:
                stored = items.get(_SESSION)
                if stored is None or stored.get("marker") != known:
                    raise ConflictError(
                        "The session was changed after it was read; get it again and redo the change."
                    )
            items.put(_SESSION, document)

        await self._storage.awrite(stored_id, replace)
        setattr(session, _MARKER, marker)

    async def delete(self, session_id: str) -> None:
        """Delete the session with its history, its checkpoints and its usage. Safe to repeat.

        If the application created the session, only the items are deleted.
        """
        await self._storage.adelete(self._stored_id(session_id), Item)

    def _stored_id(self, session_id: str) -> str:
        self.validate_session_id(session_id)
        return session_id_for(session_id)


DjangoSessionStore = DjangoAgentSessions
"""The name before `DjangoAgentSessions`; code that imports it goes on working."""


def _session(document: Document) -> AgentSession:
    session = AgentSession.from_dict(document["session"])
    setattr(session, _MARKER, document["marker"])
    return session


_saved: Final[ContextVar[tuple[AgentResponse[Any], str] | None]] = ContextVar(
    "helix_store_saved", default=None
)
"""The response whose messages are being saved, and the name of its agent, to record its usage."""


class DjangoHistoryProvider(HistoryProvider):
    """The messages of agents' sessions as items of sessions, in the database ``using`` and one tenant.

    A session of the framework is one session here, and the messages of this provider are one of its lanes.
    Saving messages is one transaction under the session's lock: messages that are already stored are left
    out, as in the framework's own providers, and the usage of the response is recorded in the ledger.
    ``model`` is the name for responses that do not name their model; if it is ``None``, their usage is not
    recorded. ``user_id`` is the user of the sessions; a session of another user raises `ConflictError`. With
    a ``fencing_token``, a write raises `FencedOutError` if the session's lock has a larger one. An erased
    session is not created again, which raises `SessionErased`, unless ``recreate`` is True. The other
    options are the same as for the framework's providers.

    Example::

        history = DjangoHistoryProvider(user_id="ada")
        agent = Agent(client=client, tools=[weather], context_providers=[history])
        await agent.run("How is Lisbon?", session=AgentSession(session_id="lisbon"))
    """

    DEFAULT_SOURCE_ID: Final = "helix_store"

    def __init__(
        self,
        using: str | None = None,
        *,
        tenant: str = "",
        agent_type: str = "agent_framework",
        user_id: UserId | None = None,
        model: str | None = "unknown",
        fencing_token: int | None = None,
        recreate: bool = False,
        source_id: str = DEFAULT_SOURCE_ID,
        load_messages: bool = True,
        store_inputs: bool = True,
        store_context_messages: bool = False,
        store_context_from: set[str] | None = None,
        store_outputs: bool = True,
        skip_excluded: bool = False,
    ) -> None:
        super().__init__(
            source_id,
            load_messages=load_messages,
            store_inputs=store_inputs,
            store_context_messages=store_context_messages,
            store_context_from=store_context_from,
            store_outputs=store_outputs,
        )
        self.skip_excluded = skip_excluded
        self._storage = ItemStorage(
            agent_type,
            using,
            tenant=tenant,
            user_id=user_id,
            fencing_token=fencing_token,
            recreate=recreate,
        )
        self._lane = lane_name(f"{MESSAGES}{source_id}", "source_id")
        self._model = validation.optional_identifier(model, "model")

    @staticmethod
    def session_id_of(session_id: str) -> str:
        """Return the session's id in this store, which is derived if the framework's id is too long."""
        return session_id_for(session_id)

    async def get_messages(
        self, session_id: str | None, *, state: dict[str, Any] | None = None, **kwargs: Any
    ) -> list[Message]:
        """Return the stored messages. One query.

        Raises `IntegrityFault` if a message cannot be read, because the agent must not continue without it.
        """
        items = await self._log(session_id).atail()
        messages = [_message(item.payload) for item in items]
        if self.skip_excluded:
            return [each for each in messages if not each.additional_properties.get("_excluded", False)]
        return messages

    async def save_messages(
        self,
        session_id: str | None,
        messages: Sequence[Message],
        *,
        state: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the new messages and the usage of the response, either all of them or nothing.

        Raises `InvalidPayload` and `LimitExceeded`.
        """
        given = _messages(messages)
        if not given:
            return
        log, saved = self._log(session_id), _saved.get()

        def save(locked: LockedSession) -> None:
            # Messages stored before these cannot overlap with the new ones.
            known = [_message(item.payload) for item in log.tail(len(given) + 1)]
            added = filter_new_messages(known, given)
            new = [message.to_dict() for message in added]
            for document in new:
                refuse_unreadable(Message.from_dict, document, "agent-framework-core", "message")
            store_exactly(log.append, new)
            _note_requests(locked, added)
            if saved is not None and self._model is not None:
                response, agent = saved
                record_usage(locked, [_usage_of(response, agent, locked.session_id, self._model)])

        await self._storage.awrite(log.session_id, save)

    async def after_run(
        self, *, agent: Agent, session: AgentSession, context: SessionContext, state: dict[str, Any]
    ) -> None:
        """Save the messages of a run, and its usage."""
        response = context.response
        token = _saved.set(None if response is None else (response, agent.name or agent.id))
        try:
            await super().after_run(agent=agent, session=session, context=context, state=state)
        finally:
            _saved.reset(token)

    def _log(self, session_id: str | None) -> ItemLog:
        if session_id is None:
            raise InvalidPayload(path="session_id", reason="a history needs a session with an id")
        return self._storage.log(session_id_for(session_id), self._lane)


def _messages(given: Any) -> list[Message]:
    """Return messages as a list. Raises `InvalidPayload` for anything else."""
    if isinstance(given, str | bytes | Message) or not isinstance(given, Iterable):
        raise InvalidPayload(path="messages", reason=f"expected messages, got {type(given).__name__}")
    messages = list(given)
    for index, each in enumerate(messages):
        if not isinstance(each, Message):
            reason = f"expected Message, got {type(each).__name__}"
            raise InvalidPayload(path=f"messages/{index}", reason=reason)
    return messages


def _message(payload: Any) -> Message:
    """Build a message from a stored document. Raises `IntegrityFault`."""
    return built(Message.from_dict, document_of(payload), "agent-framework-core", "message")


def _note_requests(locked: LockedSession, messages: Iterable[Message]) -> None:
    """Note the approvals and calls that messages ask of the user, and the answers that they contain."""
    requests = OpenRequests(locked, "messages")
    for content in (content for message in messages for content in message.contents):
        match content:
            case Content(type="function_approval_request", id=str(asked)):
                requests.open(asked)
            case Content(type="function_call", user_input_request=True, call_id=str(asked)):
                requests.open(asked)
            case Content(type="function_approval_response", id=str(answered)):
                requests.answer(answered)
            case Content(type="function_result", call_id=str(answered)):
                requests.answer(answered)
    requests.write()


def _usage_of(response: AgentResponse[Any], agent: str, session_id: str, model: str) -> UsageEntry | None:
    """Return the entry of a response. Its id is that of the response, so that two providers of one agent
    record the usage only once.
    """
    counts: dict[str, Any] = dict(response.usage_details or {})
    named = getattr(response.raw_representation, "model", None)
    name = response.response_id
    if name is None:
        # A client need not give an id, and persistence per call of the service removes it.
        name = getattr(response, _USAGE_ID, None) or new_id()
        setattr(response, _USAGE_ID, name)
    return response_entry(
        session_id,
        session_id_for("agent_framework", session_id, name),
        source=session_id_for(agent),
        model=session_id_for(named) if isinstance(named, str) and named else model,
        prompt=count_of(counts.get("input_token_count")),
        completion=count_of(counts.get("output_token_count")),
        reasoning=count_of(counts.get("reasoning_output_token_count")),
        cached=count_of(counts.get("cache_read_input_token_count")),
        cache_write=count_of(counts.get("cache_creation_input_token_count")),
    )


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
        if not isinstance(checkpoint, WorkflowCheckpoint):
            reason = f"expected WorkflowCheckpoint, got {type(checkpoint).__name__}"
            raise InvalidPayload(path="checkpoint", reason=reason)
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
        _refuse_other_name(workflow_name)
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
        """Delete a checkpoint, and return whether it existed. Raises `InvalidPayload`."""
        key = item_key(checkpoint_id)

        def delete(locked: LockedSession) -> bool:
            items = Item.objects.using(locked.alias).filter(session_id=locked.key, key=key)
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
        _refuse_other_name(workflow_name)
        items = await self._storage.log(self.session_id, _HEADS).atail()
        heads = [(str(item.key), document_of(item.payload)) for item in items]
        return [checkpoint_id for checkpoint_id, head in heads if head["workflow_name"] == workflow_name]

    def _checkpoint(self, document: Document) -> WorkflowCheckpoint:
        """Build a checkpoint. Raises ``WorkflowCheckpointException``."""
        decoded: Any = decode_checkpoint_value(document, allowed_types=self._allowed)
        return WorkflowCheckpoint.from_dict(decoded)


def _refuse_other_name(workflow_name: Any) -> None:
    """Raise `InvalidQuery` for a name that no workflow can have."""
    if type(workflow_name) is not str:
        reason = f"workflow_name is a str, not {type(workflow_name).__name__}."
        raise InvalidQuery(reason, path="workflow_name")


def _ends_run(error: Exception) -> bool:
    """Return whether each later checkpoint of the run would fail with the same error."""
    return not getattr(error, "retryable", False) and not isinstance(error, OutcomeUnknown | StoreTimeout)
