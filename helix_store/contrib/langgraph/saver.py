"""LangGraph's checkpointer on the sessions of this store.

Copying and deleting checkpoints.

The caller's runs may continue; checkpoints that they store in the meantime are kept.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn, Self

from django.core.exceptions import ImproperlyConfigured
from django.db.models import F
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    get_checkpoint_id,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.types import INTERRUPT, RESUME

from helix_store import conf
from helix_store.adapters import LockedSession, SessionAdapter
from helix_store.contrib.langgraph.encoding import (
    AGENT_TYPE,
    Body,
    CheckpointAddress,
    CheckpointRow,
    StrictSerializer,
    ValueRow,
    WriteRow,
    about_thread,
    checkpoint_tuple,
    config_of,
    encoded_checkpoint,
    encoded_writes,
    read_body,
    read_from,
    read_writes,
    searchable_filter,
)
from helix_store.contrib.langgraph.models import LangGraphCheckpoint, LangGraphValue, LangGraphWrite
from helix_store.contrib.langgraph.statements import (
    CHAIN,
    COPY,
    COPY_PARTS,
    DELETE_CHECKPOINTS,
    DELETE_FREE_VALUES,
    DELETE_WRITES,
    HISTORY,
    INSERT_CHECKPOINT,
    INSERT_VALUE,
    INSERT_WRITE,
    NEWEST_ID,
    PUT,
    PUT_WRITES,
    UNLINK_PARENTS,
    WAITS_SINCE,
    select,
)
from helix_store.core import validation
from helix_store.core.limits import MAX_BIGINT, MAX_LONG_ID_BYTES
from helix_store.core.validation import guard
from helix_store.engine.async_twins import async_iterator_twin, async_twin
from helix_store.engine.database import Call, Database, Rows
from helix_store.engine.expressions import list_parameter
from helix_store.engine.statement import Statement
from helix_store.exceptions import IntegrityFault, InvalidPayload, SessionNotFound, shown_id
from helix_store.locks import DatabaseLockManager, hold_fence
from helix_store.sessions.locking import touch_session


class Nothing:
    """The result of a call such as `setup`, which async code awaits and sync code ignores."""

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


class AcceptsLifecycle:
    """A saver or store that works without ``setup()``, ``with`` and ``async with``, but also accepts them."""

    @classmethod
    def from_conn_string(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `ImproperlyConfigured`: the database is one of the project's ``DATABASES``."""
        raise ImproperlyConfigured(
            f"{cls.__name__} uses the connections of Django, so that its writes can join your transactions: "
            f'add the database to DATABASES, and pass its alias, as in {cls.__name__}(using="default").'
        )

    def setup(self) -> Nothing:
        """Do nothing: ``python manage.py migrate`` creates the tables. Async code may await the result."""
        return Nothing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: each call has released its connection."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Do nothing: each call has released its connection."""


_logger = logging.getLogger(__name__)

_CHECKPOINT, _VALUE, _WRITE = 0, 1, 2
_LONGEST_MARK: Final = 60
_DIGITS: Final = 8
_MOST_KNOWN: Final = 20
"""A mark of 255 characters has room for the digests of this many interrupts; the newest are kept."""

_Found = tuple[CheckpointRow, Callable[[], CheckpointTuple]]


def one(db: Database, serde: SerializerProtocol, address: CheckpointAddress) -> CheckpointTuple | None:
    """Return a checkpoint by its id, or the newest of its namespace."""
    parameters = {**_names(db, address), "namespace": address.namespace, "limit": 1}
    if address.checkpoint_id is not None:
        parameters["checkpoint_id"] = address.checkpoint_id
    found = _page(db, serde, parameters, address.thread_id)
    return found[0][1]() if found else None


def every(
    db: Database,
    serde: SerializerProtocol,
    config: RunnableConfig | None,
    *,
    wanted: Mapping[str, Any] | None,
    before: RunnableConfig | None,
    limit: int | None,
) -> Iterator[CheckpointTuple]:
    """Yield all checkpoints that match, page after page. Reading starts when the first checkpoint is
    requested. In the list of a thread, an unreadable checkpoint raises `IntegrityFault` when it is reached.
    In a list of all threads it is left out and logged, because damage in one thread must not hide the others.
    """
    address = CheckpointAddress.of(config) if config else None
    is_of_namespace = config is not None and config["configurable"].get("checkpoint_ns") is not None
    before_id = get_checkpoint_id(before) if before else None
    if before_id is not None:
        validation.text(before_id, "before/configurable/checkpoint_id", limit=MAX_LONG_ID_BYTES)
    parameters = {
        **({"tenant": db.tenant} if address is None else _names(db, address)),
        **({"checkpoint_id": address.checkpoint_id} if address and address.checkpoint_id else {}),
        **({"namespace": address.namespace} if address and is_of_namespace else {}),
        **({"before": before_id} if before_id is not None else {}),
        **({"filter": searchable_filter(wanted)} if wanted else {}),
    }
    thread_id = address.thread_id if address else None
    size = conf.page_size()
    left = None if limit is None else validation.query_number(limit, "limit", minimum=-MAX_BIGINT)
    while left is None or left > 0:
        parameters["limit"] = size if left is None else min(size, left)
        page = _page(db, serde, parameters, thread_id)
        for _, read in page:
            try:
                found = read()
            except IntegrityFault as exc:
                if address is not None:
                    raise
                _logger.error("A list of all threads leaves out a checkpoint. %s", exc)
                continue
            yield found
            left = None if left is None else left - 1
        if len(page) < parameters["limit"]:
            return
        last, _ = page[-1]
        parameters |= {"last_checkpoint_id": last.checkpoint_id, "last_id": last.id}


def _names(db: Database, address: CheckpointAddress) -> dict[str, Any]:
    return {"tenant": db.tenant, "session_id": address.session_id}


def _page(
    db: Database, serde: SerializerProtocol, parameters: Mapping[str, Any], thread_id: str | None
) -> list[_Found]:
    """Return the checkpoints of a page, each with the call that decodes it."""
    heads: list[CheckpointRow] = []
    values: dict[tuple[int, str, str, str], ValueRow] = {}
    writes: defaultdict[int, list[WriteRow]] = defaultdict(list)
    rows: Rows = db.read(select(frozenset(parameters)), parameters)
    for row_kind, key, session, namespace, name, other, text, thread, position, kind, blob in rows:
        if row_kind == _VALUE:
            values[session, namespace, name, other] = ValueRow(kind, blob)
        elif row_kind == _WRITE:
            writes[key].append(WriteRow(text, name, position, other, kind, blob))
        else:
            shown = thread if thread_id is None else thread_id
            heads.append(CheckpointRow(key, session, shown, namespace, name, other, text, kind, blob))
    # The parts of a UNION are returned in any order.
    heads.sort(key=lambda head: (head.checkpoint_id, head.id), reverse=True)
    return [(head, partial(checkpoint_tuple, serde, head, values, writes.get(head.id, ()))) for head in heads]


_PAGE: Final = 64


class _Ancestor(NamedTuple):
    checkpoint_id: str
    versions: Mapping[str, str]
    body: Body


@dataclass(slots=True)
class _Walk:
    """The walk of one channel: the ancestors that it passed, and the checkpoint that stores the value."""

    passed: list[str] = field(default_factory=list)
    seed: _Ancestor | None = None


def history(
    db: Database, serde: SerializerProtocol, address: CheckpointAddress, channels: Sequence[str]
) -> dict[str, DeltaChannelHistory]:
    channels = [
        validation.text(each, "channels", limit=MAX_LONG_ID_BYTES)
        for each in validation.items(channels, "channels")
    ]
    if not channels:
        return {}
    walks = _walks(db, serde, address, channels)
    writes, values = _written(db, address, walks)
    found: dict[str, DeltaChannelHistory] = {}
    for channel, walk in walks.items():
        found[channel] = {"writes": []}
        for checkpoint_id in reversed(walk.passed):
            read = partial(read_writes, serde, writes[checkpoint_id, channel])
            found[channel]["writes"] += read_from(address.thread_id, checkpoint_id, read)
        if walk.seed is not None:
            seed = partial(_seed, serde, channel, walk.seed, values)
            found[channel]["seed"] = read_from(address.thread_id, walk.seed.checkpoint_id, seed)
    return found


def ancestors_needed(
    db: Database, serde: SerializerProtocol, address: CheckpointAddress, channels: Sequence[str]
) -> set[str]:
    """Return the ids of the ancestors from which the values of channels are read."""
    return {
        checkpoint_id
        for walk in _walks(db, serde, address, channels).values()
        for checkpoint_id in walk.passed
    }


def _walks(
    db: Database, serde: SerializerProtocol, address: CheckpointAddress, channels: Sequence[str]
) -> dict[str, _Walk]:
    """Walk from the parent of a checkpoint to older ones until each channel has a stored value."""
    walks = {channel: _Walk() for channel in channels}
    for ancestor in _ancestors(db, serde, address):
        open_walks = {channel: walk for channel, walk in walks.items() if walk.seed is None}
        if not open_walks:
            break
        for channel, walk in open_walks.items():
            # The writes of an ancestor come after its own value.
            walk.passed.append(ancestor.checkpoint_id)
            if channel in ancestor.versions or channel in ancestor.body.values:
                walk.seed = ancestor
    return walks


def _ancestors(db: Database, serde: SerializerProtocol, address: CheckpointAddress) -> Iterator[_Ancestor]:
    names = {"tenant": db.tenant, "session_id": address.session_id, "namespace": address.namespace}
    start = address.checkpoint_id
    if start is None:
        newest = db.read(NEWEST_ID, names)
        start = newest[0][0] if newest else None
    known = {start}
    while start is not None:
        page = db.read(CHAIN, {**names, "checkpoint_id": start, "depth": _PAGE})
        # The first row is only the start of the page: it is not an ancestor, or was on the previous page.
        for checkpoint_id, _, versions, kind, content in page[1:]:
            if checkpoint_id in known:
                raise IntegrityFault(f"the checkpoint {shown_id(checkpoint_id)} is its own ancestor")
            known.add(checkpoint_id)
            body = read_from(address.thread_id, checkpoint_id, partial(read_body, serde, kind, content))
            yield _Ancestor(checkpoint_id, json.loads(versions), body)
        start = page[-1][0] if len(page) > _PAGE else None


def _written(
    db: Database, address: CheckpointAddress, walks: Mapping[str, _Walk]
) -> tuple[defaultdict[tuple[str, str], list[WriteRow]], dict[tuple[str, str], ValueRow]]:
    """Return the writes of each checkpoint to each channel, and the values by channel and version."""
    versions = {
        walk.seed.versions[channel]
        for channel, walk in walks.items()
        if walk.seed is not None and channel in walk.seed.versions
    }
    parameters = {
        "tenant": db.tenant,
        "session_id": address.session_id,
        "namespace": address.namespace,
        "checkpoint_ids": list_parameter(
            db, sorted({each for walk in walks.values() for each in walk.passed})
        ),
        "channels": list_parameter(db, list(walks)),
        "versions": list_parameter(db, sorted(versions)),
    }
    writes: defaultdict[tuple[str, str], list[WriteRow]] = defaultdict(list)
    values: dict[tuple[str, str], ValueRow] = {}
    for checkpoint_id, text, task_id, position, channel, kind, blob in db.read(HISTORY, parameters):
        if checkpoint_id is None:
            values[channel, text] = ValueRow(kind, blob)
        else:
            writes[checkpoint_id, channel].append(WriteRow(text, task_id, position, channel, kind, blob))
    return writes, values


def _seed(
    serde: SerializerProtocol,
    channel: str,
    ancestor: _Ancestor,
    values: Mapping[tuple[str, str], ValueRow],
) -> Any:
    # An imported checkpoint may have both: PostgresSaver marks a stored snapshot with a value of True.
    if channel not in ancestor.versions:
        return ancestor.body.values[channel]
    stored = values.get((channel, ancestor.versions[channel]))
    if stored is None:
        raise IntegrityFault(f"the value of the channel {shown_id(channel)} is not stored")
    return serde.loads_typed(stored)


_STRATEGIES: Final = ("keep_latest", "delete")
_AT_ONCE: Final = 500


def copy_thread_rows(adapter: SessionAdapter, source: tuple[str, str], target: tuple[str, str]) -> None:
    (_, source_id), (target_thread, target_id) = source, target
    names = {"tenant": adapter.tenant, "session_id": source_id}

    def copy(session: LockedSession) -> None:
        thread_id = None if target_thread == target_id else target_thread
        parameters = {**names, "target": session.key, "thread_id": thread_id}
        for statement in (COPY,) if session.db.is_postgresql else COPY_PARTS:
            session.db.execute(statement, parameters)

    if source_id == target_id:
        return
    checkpoints = LangGraphCheckpoint._base_manager.using(adapter.db.alias)
    of_source = checkpoints.filter(session__tenant=adapter.tenant, session__session_id=source_id)
    about = of_source.values(user_id=F("session__user_id"), title=F("session__title"))[:1]

    def ensure_and_copy() -> None:
        # An empty copy must not create a session, and a deletion of runs must not miss the copy because of an
        # older snapshot. So nobody can write to the source meanwhile, and its row is written.
        try:
            touch_session(adapter.db, source_id)
        except SessionNotFound:
            return
        if not (found := list(about)):
            return
        # The user is copied so that an erasure of the user also finds the copy.
        adapter.ensure(target_id, **about_thread(found[0]))
        adapter.write(target_id, copy)

    adapter.db.transaction(ensure_and_copy)


def delete_rows_of_runs(adapter: SessionAdapter, run_ids: Sequence[str]) -> None:
    runs = [
        validation.text(str(run_id), "run_ids", limit=1_000)
        for run_id in validation.items(run_ids, "run_ids")
    ]
    if not runs:
        return
    alias = adapter.db.alias
    of_runs = LangGraphCheckpoint._base_manager.using(alias).filter(
        session__tenant=adapter.tenant, run_id__in=runs
    )
    of_threads = of_runs.values_list("session__session_id", flat=True)
    threads = adapter.read(lambda db: sorted(set(of_threads)))

    def delete(session: LockedSession) -> None:
        _delete(session, list(of_runs.filter(session_id=session.key).values_list("pk", flat=True)))

    for session_id in threads:
        _in_thread(adapter, session_id, delete)


def prune_rows(
    adapter: SessionAdapter,
    serde: SerializerProtocol,
    thread_ids: Sequence[str],
    strategy: str,
    delete_thread: Callable[[str], None],
) -> None:
    if strategy not in _STRATEGIES:
        raise InvalidPayload(path="strategy", reason=f"expected one of {', '.join(_STRATEGIES)}")
    faults = []
    for thread_id in validation.items(thread_ids, "thread_ids"):
        if strategy == "delete":
            delete_thread(thread_id)
            continue
        names = CheckpointAddress.ids_of_thread(thread_id)
        try:
            _in_thread(adapter, names[1], partial(_keep_latest, serde, names))
        except IntegrityFault as exc:
            faults.append(exc)
    # This is raised only at the end, because an unreadable thread must not prevent the pruning of later ones.
    for fault in faults:
        raise fault


def _in_thread(adapter: SessionAdapter, session_id: str, call: Callable[[LockedSession], None]) -> None:
    try:
        adapter.write(session_id, call, create=False)
    except SessionNotFound:
        return


def _keep_latest(serde: SerializerProtocol, names: tuple[str, str], session: LockedSession) -> None:
    checkpoints = LangGraphCheckpoint._base_manager.using(session.alias).filter(session_id=session.key)
    keys: dict[str, dict[str, int]] = {}
    with_deltas: set[int] = set()
    for key, namespace, checkpoint_id, has_deltas in checkpoints.values_list(
        "pk", "namespace", "checkpoint_id", "has_deltas"
    ).iterator():
        keys.setdefault(namespace, {})[checkpoint_id] = key
        if has_deltas:
            with_deltas.add(key)
    heads = {namespace: max(known) for namespace, known in keys.items()}
    kept = set()
    for namespace, head in heads.items():
        key = keys[namespace][head]
        is_of_call = ":" in namespace
        if not is_of_call and key not in with_deltas:
            kept.add(key)
            continue
        kind, content = checkpoints.values_list("type", "body").get(pk=key)
        body = read_from(names[0], head, partial(read_body, serde, kind, bytes(content)))
        if is_of_call and _is_past(body, keys.get("", {}), heads.get("")):
            continue
        address = CheckpointAddress(*names, namespace, head)
        needed = ancestors_needed(session.db, serde, address, body.delta_channels)
        kept |= {key, *(keys[namespace][each] for each in needed)}
    _delete(session, [key for known in keys.values() for key in known.values() if key not in kept])


def _is_past(body: Body, roots: Iterable[str], newest: str | None) -> bool:
    """Return whether a subgraph was called from a checkpoint of the graph that is now being deleted."""
    parents: Any = body.metadata.get("parents") or {}
    # A call may be stored before the checkpoint from which it was made.
    return parents.get("") in roots and parents.get("") != newest


def _delete(session: LockedSession, keys: Sequence[int]) -> None:
    """Delete checkpoints with their writes, and the values that no other checkpoint refers to."""
    if not keys:
        return
    owner = {"session": session.key}
    for start in range(0, len(keys), _AT_ONCE):
        chosen = {"keys": list_parameter(session.db, keys[start : start + _AT_ONCE])}
        session.db.execute(DELETE_WRITES, {**owner, **chosen})
        session.db.execute(DELETE_CHECKPOINTS, chosen)
    session.db.execute(UNLINK_PARENTS, owner)
    session.db.execute(DELETE_FREE_VALUES, owner)


class _Owned(NamedTuple):
    """The thread that a saver owns, and the fencing token of its lease."""

    session_id: str
    fencing_token: int


class DjangoSaver(AcceptsLifecycle, BaseCheckpointSaver[str]):
    """A LangGraph checkpointer in a Django database, for sync and async graphs.

    A thread is the session with its id, in the database ``using`` and one tenant; the first write creates it
    with agent type ``langgraph``, and with the ``user_id`` and ``title`` in the config's metadata. A later
    write adds the config's user to a thread without one, and raises `ConflictError` if the thread belongs to
    another user. A thread that was erased is not created again, which raises `SessionErased`, unless
    ``recreate`` is True. Values are stored as the pairs of type and bytes that ``serde`` creates, and are
    never interpreted. The default serializer builds objects of the types that a graph's schema names, and
    reads other types as plain data, regardless of the environment. ``allow`` names more types as (module,
    class name). Bytes that are marked as ``json`` or ``pickle`` raise `IntegrityFault`.

    Safe in any thread: each call releases its connection. A call that you make yourself joins an open
    transaction of its thread. Calls from the threads of ``graph.invoke`` cannot: inside ``atomic()`` they
    raise `OutsideTransaction`, whereas ``async_to_sync(graph.ainvoke)`` joins. If a task is cancelled during
    a write, it is told after the write has finished.

    Example::

        graph = builder.compile(checkpointer=DjangoSaver())
        config = {"configurable": {"thread_id": "kyoto"}, "metadata": {"user_id": "ada"}}
        graph.invoke({"messages": [("user", "To Kyoto, please.")]}, config)
    """

    def __init__(
        self,
        using: str | None = None,
        *,
        tenant: str = "",
        serde: SerializerProtocol | None = None,
        allow: Iterable[tuple[str, str]] = (),
        recreate: bool = False,
    ) -> None:
        # None means strict; if the argument were omitted, the environment would decide.
        super().__init__(serde=serde or StrictSerializer(allowed_msgpack_modules=list(allow) or None))
        self._adapter = SessionAdapter(AGENT_TYPE, using, tenant=tenant, recreate=recreate)
        self._owned: _Owned | None = None

    @property
    def tenant(self) -> str:
        return self._adapter.tenant

    # --- Reads ---

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the config's checkpoint, the newest of its namespace, or ``None`` if there is none.

        One statement. Pending writes are in the order of their task paths, task ids and positions. Raises
        `IntegrityFault` for a stored checkpoint that cannot be read.
        """
        return one(self._adapter.db, self.serde, CheckpointAddress.of(config))

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Yield checkpoints of a thread, or with ``None`` of all the tenant's threads, newest first.

        ``filter`` holds members of the metadata that must be equal; one that JSON cannot represent, or that
        has more than 8,192 characters in JSON, raises `InvalidQuery`. Takes one statement for each page of
        ``HELIX_STORE["PAGE_SIZE"]``, and holds no connection between two pages.

        In the list of a thread, a checkpoint that cannot be read raises `IntegrityFault` when it is reached;
        to continue the list after it, pass it as ``before``. A list of all threads leaves it out and logs an
        error.
        """
        return every(self._adapter.db, self.serde, config, wanted=filter, before=before, limit=limit)

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return the writes of a checkpoint's ancestors to channels, each back to the newest stored value.

        Takes one statement for each page of ancestors, and one for all writes and values. Raises
        `IntegrityFault` if one of the stored values cannot be read.
        """
        return history(self._adapter.db, self.serde, CheckpointAddress.of(config), channels)

    # --- Writes ---

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint and the new values of its channels, and return the config that names it.

        One statement on PostgreSQL, one transaction on SQLite. A repeat replaces the checkpoint. Raises
        `InvalidPayload` and `LimitExceeded` before anything is stored, and `FencedOutError` for a superseded
        owner.
        """
        address = CheckpointAddress.of(config)
        columns = encoded_checkpoint(
            self.serde, address, config, checkpoint, metadata, new_versions, limit=self._largest
        )
        self._store(address, config, PUT, columns, _put_locked)
        return config_of(address.thread_id, address.namespace, columns["checkpoint_id"])

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store a task's writes after a checkpoint, which itself may be stored later than the writes.

        One statement on PostgreSQL, one transaction on SQLite. The first write of a task at a position is
        kept, but errors, interrupts and resume values replace earlier ones. Raises the same errors as `put`.
        """
        address = CheckpointAddress.of(config)
        if address.checkpoint_id is None:
            raise InvalidPayload(
                path="config/configurable/checkpoint_id", reason="expected the checkpoint's id"
            )
        columns = encoded_writes(self.serde, address, writes, task_id, task_path, limit=self._largest)
        # A repeated statement could replace a value that another worker has since stored in that position.
        replaces = any(position < 0 for position in columns["positions"])
        statement = None if replaces else PUT_WRITES
        interrupts = self._asked(writes, task_id) if INTERRUPT in columns["channels"] else {}
        self._store(address, config, statement, columns, partial(_put_writes_locked, interrupts=interrupts))

    def _asked(self, writes: Sequence[tuple[str, Any]], task_id: str) -> dict[str, str]:
        """Return the ids of a task's interrupts by a digest of what each asks.

        The interrupts of a node have one id, so the number of answers that the node already has is included.
        """
        members = {name: value if isinstance(value, list | tuple) else (value,) for name, value in writes}
        answers, asked = len(members.get(RESUME, ())), {}
        for interrupt in members[INTERRUPT]:
            kind, blob = self.serde.dumps_typed(interrupt)
            digest = hashlib.sha256(f"{kind} {answers} ".encode() + blob).hexdigest()
            asked[digest[:_DIGITS]] = str(getattr(interrupt, "id", task_id))
        return asked

    @property
    def _largest(self) -> int:
        return self._adapter.db.limits.max_state_bytes

    def _store(
        self,
        address: CheckpointAddress,
        config: RunnableConfig,
        statement: Statement | None,
        columns: dict[str, Any],
        locked: Any,
    ) -> None:
        """Store with ``statement``; if there is none, use a transaction, whose number reveals its outcome."""
        db, owned = self._adapter.db, self._owned
        if owned is not None and owned.session_id != address.session_id:
            reason = "this saver owns another thread; claim this one too"
            raise InvalidPayload(path="config/configurable/thread_id", reason=reason)
        portable = partial(self._store_locked, address, config, columns, locked)
        if statement is None or owned is not None or not db.has_fast_writes:
            portable()
            return

        def store(call: Call) -> None:
            about = _about_thread(config)
            thread = {"session_id": address.session_id, "user_id": about.get("user_id")}
            parameters = {**columns, **thread, "tenant": db.tenant}
            if call.try_write(statement, parameters):
                return
            # The thread is new, its user is not yet set, or the statement was aborted; the portable form
            # tries again.
            self._adapter.ensure(address.session_id, **about)
            # This is checked again because it opens the connection that the previous call released.
            if not (call.has_fast_writes and call.try_write(statement, parameters)):
                portable()

        # A repeat stores the same checkpoint under the id from LangGraph, or leaves writes unchanged.
        db.committed_once(store, lambda _: portable(), operation_id=lambda: columns["checkpoint_id"])

    def _store_locked(
        self, address: CheckpointAddress, config: RunnableConfig, columns: dict[str, Any], locked: Any
    ) -> None:
        self._adapter.write(
            address.session_id,
            partial(locked, columns=columns),
            fencing_token=self._owned.fencing_token if self._owned else None,
            **_about_thread(config),
        )

    def get_next_version(self, current: str | None, channel: None) -> str:
        """Return a version after ``current`` whose random part distinguishes the versions of two branches."""
        number = 0 if current is None else int(str(current).split(".")[0])
        return f"{number + 1:032}.{random.random():016}"  # noqa: S311  no secret

    # --- Ownership ---

    def claim_write_ownership(self, thread_id: str) -> DjangoSaver:
        """Return the only saver that may write to a thread, until someone claims the thread again. It takes
        over the lock with the name of the thread's session, in one statement: the former owner's writes are
        refused with `FencedOutError` and store nothing. This also supersedes a worker that drives the session
        with a turn or its own lock, and vice versa. Savers that have not claimed a thread are not checked.
        """
        _, session_id = CheckpointAddress.ids_of_thread(thread_id)
        lock = DatabaseLockManager(self._adapter.db.alias, tenant=self.tenant).take_over(session_id)
        owner = copy.copy(self)
        owner._owned = _Owned(session_id, lock.fencing_token)
        return owner

    def check_write_ownership(self) -> None:
        """Raise `FencedOutError` if this saver has been superseded. Without a claim, nothing is checked."""
        if self._owned is not None:
            session_id, token = self._owned
            db = self._adapter.db
            db.transaction(lambda: hold_fence(db, session_id, guard(fencing_token=token)))

    # --- Threads ---

    def delete_thread(self, thread_id: str) -> None:
        """Delete a thread: the whole session if a saver created it, otherwise only its checkpoints."""
        _, session_id = CheckpointAddress.ids_of_thread(thread_id)
        self._adapter.delete(session_id, LangGraphCheckpoint, LangGraphValue, LangGraphWrite)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of runs, with their writes, and values that no other checkpoint refers to.

        One transaction for each thread. A `DeltaChannel` needs the writes of earlier checkpoints: do not
        delete a run of a thread that uses one and continues.
        """
        delete_rows_of_runs(self._adapter, run_ids)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy all checkpoints, values and writes of a thread to another one, in one transaction.

        Rows that the target already has are kept. A new target gets the user and the title of the source.
        Nobody else can write to the source meanwhile.
        """
        copy_thread_rows(
            self._adapter,
            CheckpointAddress.ids_of_thread(source_thread_id),
            CheckpointAddress.ids_of_thread(target_thread_id),
        )

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete the history of threads (``keep_latest``), or whole threads (``delete``).

        ``keep_latest`` keeps the newest checkpoint of each namespace with its values and pending writes. The
        namespace of a subgraph's call is deleted with the checkpoint of the graph that it was called from. If
        a thread uses a `DeltaChannel`, it also keeps the ancestors from which the newest value is read. Each
        thread takes one transaction, during which no one else can write to it. Safe to repeat. Raises
        `InvalidPayload` for another strategy. A thread that cannot be read keeps its history, and
        `IntegrityFault` is raised after the other threads are pruned.
        """
        prune_rows(self._adapter, self.serde, thread_ids, strategy, self.delete_thread)

    # --- Async ---

    # From the method of LangGraph's class, mypy infers that ``self`` may be any saver.
    aget_tuple = async_twin(get_tuple)  # type: ignore[arg-type]  # see above
    aget_delta_channel_history = async_twin(get_delta_channel_history)  # type: ignore[arg-type]  # see above
    alist = async_iterator_twin(list)  # type: ignore[arg-type]  # see above
    aput = async_twin(put)  # type: ignore[arg-type]  # see above
    aput_writes = async_twin(put_writes)  # type: ignore[arg-type]  # see above
    aclaim_write_ownership = async_twin(claim_write_ownership)
    acheck_write_ownership = async_twin(check_write_ownership)
    adelete_thread = async_twin(delete_thread)  # type: ignore[arg-type]  # see above
    adelete_for_runs = async_twin(delete_for_runs)  # type: ignore[arg-type]  # see above
    acopy_thread = async_twin(copy_thread)  # type: ignore[arg-type]  # see above
    aprune = async_twin(prune)  # type: ignore[arg-type]  # see above


def _about_thread(config: RunnableConfig) -> dict[str, Any]:
    return about_thread({**config["configurable"], **(config.get("metadata") or {})})


def _put_locked(session: LockedSession, columns: Mapping[str, Any]) -> None:
    own = {"session": session.key, "namespace": columns["namespace"]}
    values = zip(
        columns["channels"], columns["channel_versions"], columns["types"], columns["blobs"], strict=True
    )
    for channel, version, kind, blob in values:
        value = {"channel": channel, "version": version, "type": kind, "blob": blob}
        session.db.execute(INSERT_VALUE, {**own, **value})
    session.db.execute(INSERT_CHECKPOINT, {**columns, **own})
    is_of_graph = not columns["namespace"]
    if is_of_graph and session.waiting_kind is not None and session.waiting_kind < _waits_since(columns):
        session.wait_for(None)


def _put_writes_locked(
    session: LockedSession, columns: Mapping[str, Any], interrupts: Mapping[str, str]
) -> None:
    own = {**columns, "session": session.key}
    writes = zip(columns["positions"], columns["channels"], columns["types"], columns["blobs"], strict=True)
    for position, channel, kind, blob in writes:
        write = {"position": position, "channel": channel, "type": kind, "blob": blob}
        session.db.execute(INSERT_WRITE, {**own, **write})
    if INTERRUPT in columns["channels"]:
        mark = session.waiting_kind or ""
        since, *known = mark.split(" ") if mark.startswith(WAITS_SINCE) else [""]
        opened: dict[str, str] = {}
        if not columns["namespace"]:
            # The interrupts of a subgraph are also those of the task that called it.
            opened = {digest: each for digest, each in interrupts.items() if digest not in known}
        digests = [*known, *opened][-_MOST_KNOWN:]
        since = max(_waits_since(columns), since)
        session.wait_for(" ".join([since, *digests]), opened=opened.values())


def _waits_since(columns: Mapping[str, Any]) -> str:
    return f"{WAITS_SINCE}{columns['checkpoint_id'][:_LONGEST_MARK]}"
