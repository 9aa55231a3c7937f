"""Sessions and files of Strands agents."""

from __future__ import annotations

import asyncio
import builtins
import contextvars
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django.db.models import Q, Subquery
from strands.session.session_repository import SessionRepository
from strands.storage import Storage
from strands.types.exceptions import SessionException, StorageError
from strands.types.session import Session, SessionAgent, SessionMessage

from helix_store import conf
from helix_store.adapters import LockedSession, session_id_for
from helix_store.contrib.item_storage import (
    Document,
    ItemStorage,
    LockedItems,
    built,
    count_of,
    document_of,
    encode_document,
    record_usage,
    refuse_unreadable,
    response_entry,
)
from helix_store.core import validation
from helix_store.core.ids import PerProcess
from helix_store.core.payloads import decode
from helix_store.core.types import UserId
from helix_store.core.usage import UsageEntry
from helix_store.engine.database import Database
from helix_store.exceptions import IntegrityFault, InvalidPayload, SessionNotFound
from helix_store.items import item_key, lane_name
from helix_store.models import Item
from helix_store.models import Session as StoredSession

if TYPE_CHECKING:
    from strands.multiagent import MultiAgentBase


R = TypeVar("R")
Built = TypeVar("Built", Session, SessionAgent, SessionMessage)

_SESSION: Final = "session"
_AGENTS: Final = "agents"
_MULTI_AGENTS: Final = "multi_agents"

_threads: Final = PerProcess(lambda: ThreadPoolExecutor(thread_name_prefix="helix_store_strands"))


class DjangoSessionRepository(SessionRepository):
    """Sessions of Strands as items of sessions, in the database ``using`` and one tenant.

    A session of Strands is one session here. Its agents are items in a lane, and the messages of each agent
    are a lane. Every write is one transaction under the session's lock. The usage of the model's responses is
    recorded in the usage ledger in the same transaction, under the name ``model``, unless that is ``None``. A
    write sets ``user_id`` as the user of a session without one, and raises `ConflictError` if the session
    belongs to another user. With a ``fencing_token``, a write raises `FencedOutError` if the session's lock
    has a larger one. An erased session is not created again, which raises `SessionErased`, unless
    ``recreate`` is True. Methods may be called in the thread of a running event loop, which then waits.
    Raises Strands' `SessionException` if something does not exist or already exists, and the errors of
    helix_store.

    Example::

        repository = DjangoSessionRepository(user_id="ada", model="claude-opus-4-6")
        manager = RepositorySessionManager(session_id="lisbon", session_repository=repository)
        agent = Agent(model=model, tools=[weather], session_manager=manager)
        agent("How is the weather?")
    """

    def __init__(
        self,
        using: str | None = None,
        *,
        tenant: str = "",
        agent_type: str = "strands",
        user_id: UserId | None = None,
        model: str | None = "unknown",
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
        self._model = validation.optional_identifier(model, "model")

    @staticmethod
    def session_id_of(session_id: str) -> str:
        """Return the session's id in this store, which is derived from Strands' id if that is too long."""
        return session_id_for(session_id)

    # --- Sessions ----------------------------------------------------------------------------------

    def create_session(self, session: Session, **kwargs: Any) -> Session:
        """Create a session, or use one that the application created with this id."""
        document = _document(validation.instance(session, Session, "session"))

        def create(locked: LockedSession) -> None:
            if not LockedItems(locked, _SESSION).add(_SESSION, document):
                raise SessionException(f"Session {session.session_id} already exists")

        _beside_the_loop(partial(self._storage.write, session_id_for(session.session_id), create))
        return session

    def read_session(self, session_id: str, **kwargs: Any) -> Session | None:
        document = self._read(session_id, _SESSION, _SESSION)
        # A branch of a session holds the same document as its source.
        return None if document is None else _built(Session, {**document, "session_id": session_id})

    def delete_session(self, session_id: str, **kwargs: Any) -> None:
        """Delete a session with its agents, messages and usage. Safe to repeat.

        If the application created the session, only the items are deleted.
        """
        _beside_the_loop(partial(self._storage.delete, session_id_for(session_id), Item))

    # --- Agents ------------------------------------------------------------------------------------

    def create_agent(self, session_id: str, session_agent: SessionAgent, **kwargs: Any) -> None:
        document = _document(validation.instance(session_agent, SessionAgent, "session_agent"))
        agent_id = session_agent.agent_id
        # Otherwise, an agent would be stored whose messages cannot be stored.
        _messages(agent_id)

        def create(locked: LockedSession) -> None:
            if not LockedItems(locked, _AGENTS).add(agent_id, document):
                raise SessionException(f"Agent {agent_id} already exists in session {session_id}")

        self._write(session_id, create)

    def read_agent(self, session_id: str, agent_id: str, **kwargs: Any) -> SessionAgent | None:
        document = self._read(session_id, _AGENTS, agent_id)
        return None if document is None else _built(SessionAgent, document)

    def update_agent(self, session_id: str, session_agent: SessionAgent, **kwargs: Any) -> None:
        """Replace the stored agent, except its ``created_at``."""
        agent_id = validation.instance(session_agent, SessionAgent, "session_agent").agent_id
        self._replace(session_id, _AGENTS, agent_id, session_agent, f"Agent {agent_id}")

    # --- Messages ----------------------------------------------------------------------------------

    def create_message(
        self, session_id: str, agent_id: str, session_message: SessionMessage, **kwargs: Any
    ) -> None:
        """Add a message and record its usage. If two processes add the same id, the second gets an error."""
        lane, key = _messages(agent_id), _key_of(session_message)
        document = _document(session_message)

        def create(locked: LockedSession) -> None:
            if LockedItems(locked, _AGENTS).get(agent_id) is None:
                raise SessionException(f"Agent {agent_id} does not exist in session {session_id}")
            if not LockedItems(locked, lane).add(key, document):
                name = f"Message {session_message.message_id} of agent {agent_id}"
                raise SessionException(f"{name} already exists in session {session_id}")
            self._record_usage(locked, [document["message"]])

        self._write(session_id, create)

    def read_message(
        self, session_id: str, agent_id: str, message_id: int, **kwargs: Any
    ) -> SessionMessage | None:
        document = self._read(session_id, _messages(agent_id), _message_key(message_id))
        return None if document is None else _built(SessionMessage, document)

    def update_message(
        self, session_id: str, agent_id: str, session_message: SessionMessage, **kwargs: Any
    ) -> None:
        """Replace the stored message, except its ``created_at``."""
        lane, key = _messages(agent_id), _key_of(session_message)
        name = f"Message {session_message.message_id} of agent {agent_id}"
        self._replace(session_id, lane, key, session_message, name)

    def list_messages(
        self, session_id: str, agent_id: str, limit: int | None = None, offset: int = 0, **kwargs: Any
    ) -> list[SessionMessage]:
        """Return the messages of an agent by their ids, without the first ``offset``. One query.

        Raises `IntegrityFault` if a message cannot be read, because the agent must not continue without it.
        """
        lane, start = _messages(agent_id), validation.page_offset(offset)
        end = None if limit is None else start + validation.query_number(limit, "limit")

        def read(db: Database) -> list[str]:
            session = StoredSession.objects.filter(tenant=db.tenant, session_id=session_id_for(session_id))
            items = Item.objects.using(db.alias).filter(
                session_id=Subquery(session.values("pk")[:1]), lane=lane, key__isnull=False
            )
            return list(items.order_by("key").values_list("payload", flat=True)[start:end])

        texts = _beside_the_loop(partial(self._storage.read, read))
        return [_built(SessionMessage, document_of(decode(text))) for text in texts]

    # --- Graphs and swarms -------------------------------------------------------------------------

    def create_multi_agent(self, session_id: str, multi_agent: MultiAgentBase, **kwargs: Any) -> None:
        """Store the state of a graph or swarm, replacing an older one with the same id, and record the usage
        of its agents.
        """
        self._put_multi_agent(session_id, multi_agent)

    def read_multi_agent(self, session_id: str, multi_agent_id: str, **kwargs: Any) -> Document | None:
        return self._read(session_id, _MULTI_AGENTS, multi_agent_id)

    def update_multi_agent(self, session_id: str, multi_agent: MultiAgentBase, **kwargs: Any) -> None:
        """Replace the stored state, and record the usage of the agents since the last one."""
        self._put_multi_agent(session_id, multi_agent, must_exist=True)

    def _put_multi_agent(
        self, session_id: str, multi_agent: MultiAgentBase, *, must_exist: bool = False
    ) -> None:
        name, state = _multi_agent(multi_agent)

        def put(locked: LockedSession) -> None:
            items = LockedItems(locked, _MULTI_AGENTS)
            if must_exist and items.get(name) is None:
                raise SessionException(f"MultiAgent state {name} does not exist in session {session_id}")
            items.put(name, state)
            self._record_usage(locked, _messages_of(multi_agent))

        self._write(session_id, put)

    # --- Items -------------------------------------------------------------------------------------

    def _read(self, session_id: str, lane: str, key: str) -> Document | None:
        return _beside_the_loop(partial(self._storage.get, session_id_for(session_id), lane, key))

    def _replace(
        self, session_id: str, lane: str, key: str, value: SessionAgent | SessionMessage, name: str
    ) -> None:
        document = _document(value)

        def replace(locked: LockedSession) -> None:
            items = LockedItems(locked, lane)
            stored = items.get(key)
            if stored is None:
                raise SessionException(f"{name} does not exist in session {session_id}")
            items.put(key, {**document, "created_at": stored.get("created_at")})

        self._write(session_id, replace)

    def _write(self, session_id: str, call: Callable[[LockedSession], None]) -> None:
        try:
            _beside_the_loop(partial(self._storage.write, session_id_for(session_id), call, create=False))
        except SessionNotFound as exc:
            raise SessionException(f"Session {session_id} does not exist") from exc

    def _record_usage(self, locked: LockedSession, messages: Iterable[Mapping[str, Any]]) -> None:
        if self._model is None:
            return
        agent_type = self._storage.agent_type
        usage = partial(
            usage_of_message, session_id=locked.session_id, agent_type=agent_type, model=self._model
        )
        record_usage(locked, map(usage, messages))


def _document(value: Session | SessionAgent | SessionMessage) -> Document:
    """Return the document of a value. Raises `InvalidPayload` for one that could not be read again."""
    document, kind = _plain(value.to_dict), type(value)
    refuse_unreadable(kind.from_dict, document, "strands-agents", kind.__name__)
    return document


def _plain(write: Callable[[], Any]) -> Document:
    """Return the document as plain JSON, with enumerations as strings and tuples as lists.

    Raise `InvalidPayload` or `LimitExceeded` for one that cannot be stored, before a transaction begins.
    """
    try:
        plain: Document = json.loads(json.dumps(write(), ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidPayload(path="", reason="Python cannot write it as JSON") from exc
    # How deep a value may be depends on Strands, which copies most of them, and on Python.
    encode_document(plain, conf.limits())
    return plain


def _multi_agent(given: MultiAgentBase) -> tuple[str, Document]:
    """Return the id and the state of a graph or swarm."""
    if not hasattr(given, "serialize_state"):
        reason = f"expected MultiAgentBase, got {type(given).__name__}"
        raise InvalidPayload(path="multi_agent", reason=reason)
    return item_key(given.id, "multi_agent/id"), _plain(given.serialize_state)


def _built(kind: type[Built], document: Document) -> Built:
    return built(kind.from_dict, document, "strands-agents", kind.__name__)


def _messages(agent_id: str) -> str:
    """Return the lane for the messages of an agent."""
    return lane_name(f"messages/{item_key(agent_id, 'agent_id')}", "agent_id")


def _key_of(message: SessionMessage) -> str:
    return _message_key(validation.instance(message, SessionMessage, "session_message").message_id)


def _message_key(message_id: int) -> str:
    """Return a key whose order as text is the order of the numbers."""
    return f"{validation.whole_number(message_id, 'message_id'):019d}"


def _beside_the_loop(call: Callable[[], R]) -> R:
    """Make a call in this thread, or in another if an event loop is running here, and wait for its result.

    Strands calls a repository from hooks without ``await``, in the thread of the event loop that runs the
    agent, and Django refuses blocking calls there.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    return _threads.get().submit(contextvars.copy_context().run, call).result()


# --- Usage -----------------------------------------------------------------------------------------


def _messages_of(multi_agent: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the messages with an id from the agents of a graph or swarm, including nested ones.

    A message without an id would be recorded again by each update.
    """
    nodes = getattr(multi_agent, "nodes", None)
    for node in nodes.values() if isinstance(nodes, dict) else ():
        messages = getattr(node.executor, "messages", None)
        if isinstance(messages, list):
            yield from (message for message in messages if "tracking_id" in message)
        yield from _messages_of(node.executor)


def usage_of_message(
    message: Mapping[str, Any], *, session_id: str, agent_type: str, model: str
) -> UsageEntry | None:
    """Return the ledger's entry for a model's response, or ``None`` for a message without usage. It has the
    id of the message, so that a copy in another session is not counted again.
    """
    match message:
        case {"metadata": {"usage": dict(usage)}}:
            pass
        case _:
            return None
    counts = {name: count_of(value) for name, value in usage.items()}
    prompt, completion = counts.get("inputTokens", 0), counts.get("outputTokens", 0)
    cached, written = counts.get("cacheReadInputTokens", 0), counts.get("cacheWriteInputTokens", 0)
    if prompt + completion != counts.get("totalTokens", 0):
        # This provider reports cached tokens in addition to the input tokens.
        prompt += cached + written
    return response_entry(
        session_id,
        _usage_id(message),
        source=agent_type,
        model=model,
        prompt=prompt,
        completion=completion,
        cached=cached,
        cache_write=written,
    )


def _usage_id(message: Mapping[str, Any]) -> str | None:
    try:
        return validation.identifier(f"strands:{message['tracking_id']}", "id")
    except (KeyError, InvalidPayload):
        return None


_LANE: Final = "storage"
_OF_SESSION: Final = re.compile(r"session/([^/]+)/(.+)", re.DOTALL)
"""A key of ``SnapshotSessionManager``: the id of the session, and the rest."""


class DjangoStorage(Storage):
    """A storage for ``SnapshotSessionManager(session_id, storage=DjangoStorage())``.

    It keeps the snapshots of one tenant in the database ``using``.

    A session of Strands is one session here, whose snapshots are items in the lane ``storage``. A key that
    belongs to no session is an item of the session ``shared_session_id``. A write is one transaction under
    the session's lock and replaces the value of the key. It records the usage of the messages in a snapshot
    in the usage ledger, each message once, under the name ``model``, unless that is ``None``. ``user_id`` is
    the user of the sessions, but not of the shared one; a session of another user raises `ConflictError`.
    With a ``fencing_token``, a write raises `FencedOutError` if the session's lock has a larger one. An
    erased session is not created again, which raises `SessionErased`, unless ``recreate`` is True. If a write
    is cancelled, the caller is told after its transaction has ended. Raises Strands' ``StorageError`` for a
    key that is not valid, and the errors of helix_store.

    Example::

        storage = DjangoStorage(user_id="ada", model="claude-opus-4-6")
        manager = SnapshotSessionManager("lisbon", storage=storage)
        agent = Agent(model=model, tools=[weather], session_manager=manager)
        agent("How is the weather?")
    """

    def __init__(
        self,
        using: str | None = None,
        *,
        tenant: str = "",
        agent_type: str = "strands",
        user_id: UserId | None = None,
        model: str | None = "unknown",
        fencing_token: int | None = None,
        shared_session_id: str = "strands-storage",
        recreate: bool = False,
    ) -> None:
        storage = partial(
            ItemStorage, agent_type, using, tenant=tenant, fencing_token=fencing_token, recreate=recreate
        )
        self._storage = storage(user_id=user_id)
        # What belongs to no session belongs to no user either, so that no user's erasure deletes it.
        self._shared_storage = storage(user_id=None)
        self._model = validation.optional_identifier(model, "model")
        self._shared_id = session_id_for(shared_session_id)

    @staticmethod
    def session_id_of(session_id: str) -> str:
        """Return the session's id in this store, which is derived from Strands' id if that is too long."""
        return session_id_for(session_id)

    async def write(self, key: str, data: bytes) -> None:
        """Store the value of a key. Raises `LimitExceeded` for one of more than ``max_state_bytes``."""
        session_id, name = self._session_and_name(key)
        document = _file_document(bytes(data))

        def write(locked: LockedSession) -> None:
            LockedItems(locked, _LANE).put(name, document)
            if self._model is not None and "text" in document:
                agent_type, model = self._storage.agent_type, self._model
                record_usage(
                    locked,
                    [
                        usage_of_message(
                            message, session_id=locked.session_id, agent_type=agent_type, model=model
                        )
                        for message in _file_messages(document["text"])
                    ],
                )

        await self._storage_of(session_id).awrite(session_id, write)

    async def read(self, key: str) -> bytes | None:
        """Return the value of a key, or ``None``. One query. Raises `IntegrityFault`."""
        session_id, name = self._session_and_name(key)
        document = await self._storage.aget(session_id, _LANE, name)
        return None if document is None else _data(document)

    async def delete(self, key: str) -> None:
        """Delete the value of a key. Safe to repeat. The session stays; `delete_session` deletes it."""
        session_id, name = self._session_and_name(key)

        def delete(locked: LockedSession) -> None:
            Item.objects.using(locked.alias).filter(session_id=locked.key, lane=_LANE, key=name).delete()

        try:
            await self._storage_of(session_id).awrite(session_id, delete, create=False)
        except SessionNotFound:
            return

    async def list(self, query: str = "") -> builtins.list[str]:
        """Return the keys that begin with ``query``, in order. One query.

        If ``query`` does not name a session, this reads the keys of all sessions of this agent type.
        """
        prefix = _plain_key(query).lstrip("/")
        of_session = _OF_SESSION.fullmatch(f"{prefix}*")
        stored_id = session_id_for(of_session[1]) if of_session is not None else None

        def read(db: Database) -> builtins.list[tuple[str, str]]:
            items = Item.objects.using(db.alias).filter(session__tenant=db.tenant, lane=_LANE)
            if stored_id is not None:
                items = items.filter(session__session_id=stored_id)
            else:
                own = Q(session__agent_type=self._storage.agent_type)
                items = items.filter(own | Q(session__session_id=self._shared_id))
            rows = items.values_list("session__session_id", "key")
            return [(session_id, key) for session_id, key in rows if key is not None]

        keys = []
        for session_id, name in await self._storage.aread(read):
            if of_session is not None:
                keys.append(f"session/{of_session[1]}/{name}")
            else:
                keys.append(name if session_id == self._shared_id else f"session/{session_id}/{name}")
        return sorted(key for key in keys if key.startswith(prefix))

    def _storage_of(self, session_id: str) -> ItemStorage:
        return self._shared_storage if session_id == self._shared_id else self._storage

    def _session_and_name(self, key: str) -> tuple[str, str]:
        """Return the id of the session with a key, and the key of its item."""
        name = _plain_key(key).strip("/")
        if not name:
            raise StorageError("A key must not be empty.")
        if of_session := _OF_SESSION.fullmatch(name):
            return session_id_for(of_session[1]), of_session[2]
        return self._shared_id, name


def _plain_key(key: str) -> str:
    """Return a key without repeated slashes. Raises ``StorageError``, as Strands' own storages do."""
    plain = re.sub("/+", "/", validation.instance(key, str, "key"))
    if "\\" in plain or ".." in plain.split("/"):
        raise StorageError(f"The key {key!r} has a backslash or a segment '..'.")
    return plain


def _file_document(data: bytes) -> Document:
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": b64encode(data).decode("ascii")}


def _data(document: Document) -> bytes:
    match document:
        case {"text": str(text)}:
            return text.encode()
        case {"base64": str(text)}:
            return b64decode(text)
    raise IntegrityFault("A stored value of Strands is not readable; other rows are not affected.")


def _file_messages(text: str) -> Iterator[Mapping[str, Any]]:
    """Yield the messages with an id in a snapshot of an agent, a graph or a swarm. A message without an id
    would be recorded again by each snapshot.
    """
    try:
        pending = [json.loads(text)]
    except (ValueError, RecursionError):
        return
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if "tracking_id" in value and "role" in value:
                yield value
            else:
                pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
