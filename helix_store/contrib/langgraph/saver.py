"""LangGraph's checkpointer on the sessions of this store."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from helix_store.adapters import LockedSession, SessionAdapter
from helix_store.contrib.langgraph import deltas, pages, sql, upkeep
from helix_store.contrib.langgraph.encoding import (
    AGENT_TYPE,
    Place,
    about_thread,
    config_of,
    encoded_checkpoint,
    encoded_writes,
)
from helix_store.contrib.langgraph.habits import OpenedByHabit
from helix_store.contrib.langgraph.models import LangGraphCheckpoint, LangGraphValue, LangGraphWrite
from helix_store.contrib.langgraph.serializer import StrictSerializer
from helix_store.core.guards import guard
from helix_store.engine.async_twins import async_iterator_twin, async_twin
from helix_store.engine.database import Call
from helix_store.engine.statement import Statement
from helix_store.exceptions import InvalidPayload
from helix_store.locks.database import hold_fence
from helix_store.locks.manager import DatabaseLockManager


class _Owned(NamedTuple):
    """The thread that a saver owns, and the fencing token of its lease."""

    session_id: str
    fencing_token: int


class DjangoSaver(OpenedByHabit, BaseCheckpointSaver[str]):
    """A LangGraph checkpointer in a Django database, for sync and async graphs.

    A thread is the session with its id, in the database ``using`` and one tenant; the first write creates it
    with agent type ``langgraph``, and with the ``user_id`` and ``title`` in the config's metadata. A later
    write adds the config's user to a thread without one, and raises `ConflictError` if the thread belongs to
    another user. Values are stored as the pairs of type and bytes that ``serde`` creates, and are never
    interpreted. The default serializer builds objects of the types that a graph's schema names, and reads
    other types as plain data, regardless of the environment. ``allow`` names more types as (module, class
    name). Bytes that are marked as ``json`` or ``pickle`` raise `IntegrityFault`.

    Safe in any thread: each call releases its connection. A call that you make yourself joins an open
    transaction of its thread. Calls from the threads of ``graph.invoke`` cannot: inside ``atomic()`` they
    raise `OutsideTransaction`, whereas ``async_to_sync(graph.ainvoke)`` joins. If a task is cancelled during
    a write, it is told after the write has finished.
    """

    def __init__(
        self,
        using: str | None = None,
        *,
        tenant: str = "",
        serde: SerializerProtocol | None = None,
        allow: Iterable[tuple[str, str]] = (),
    ) -> None:
        # None means strict; if the argument were omitted, the environment would decide.
        super().__init__(serde=serde or StrictSerializer(allowed_msgpack_modules=list(allow) or None))
        self._adapter = SessionAdapter(AGENT_TYPE, using, tenant=tenant)
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
        return pages.one(self._adapter.db, self.serde, Place.of(config))

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
        return pages.every(self._adapter.db, self.serde, config, wanted=filter, before=before, limit=limit)

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return the writes of a checkpoint's ancestors to channels, each back to the newest stored value.

        Takes one statement for each page of ancestors, and one for all writes and values. Raises
        `IntegrityFault` if one of the stored values cannot be read.
        """
        return deltas.history(self._adapter.db, self.serde, Place.of(config), channels)

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
        place = Place.of(config)
        columns = encoded_checkpoint(
            self.serde, place, config, checkpoint, metadata, new_versions, limit=self._largest
        )
        self._store(place, config, sql.PUT, columns, _put_locked)
        return config_of(place.thread_id, place.namespace, columns["checkpoint_id"])

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
        place = Place.of(config)
        if place.checkpoint_id is None:
            raise InvalidPayload(
                path="config/configurable/checkpoint_id", reason="expected the checkpoint's id"
            )
        columns = encoded_writes(self.serde, place, writes, task_id, task_path, limit=self._largest)
        # A repeated statement could replace a value that another worker has since stored in that position.
        replaces = any(position < 0 for position in columns["positions"])
        statement = None if replaces else sql.PUT_WRITES
        self._store(place, config, statement, columns, _put_writes_locked)

    @property
    def _largest(self) -> int:
        return self._adapter.db.limits.max_state_bytes

    def _store(
        self,
        place: Place,
        config: RunnableConfig,
        statement: Statement | None,
        columns: dict[str, Any],
        locked: Any,
    ) -> None:
        """Store with ``statement``; if there is none, use a transaction, whose number reveals its outcome."""
        db, owned = self._adapter.db, self._owned
        if owned is not None and owned.session_id != place.session_id:
            reason = "this saver owns another thread; claim this one too"
            raise InvalidPayload(path="config/configurable/thread_id", reason=reason)
        portable = partial(self._store_locked, place, config, columns, locked)
        if statement is None or owned is not None or not db.has_fast_writes:
            portable()
            return

        def store(call: Call) -> None:
            about = _about_thread(config)
            thread = {"session_id": place.session_id, "user_id": about.get("user_id")}
            parameters = {**columns, **thread, "tenant": db.tenant}
            if call.try_write(statement, parameters):
                return
            # The thread is new, its user is not yet set, or the statement was aborted; the portable form
            # tries again.
            self._adapter.ensure(place.session_id, **about)
            # This is checked again because it opens the connection that the previous call released.
            if not (call.has_fast_writes and call.try_write(statement, parameters)):
                portable()

        # A repeat stores the same checkpoint under the id from LangGraph, or leaves writes unchanged.
        db.committed_once(store, lambda _: portable(), operation_id=lambda: columns["checkpoint_id"])

    def _store_locked(
        self, place: Place, config: RunnableConfig, columns: dict[str, Any], locked: Any
    ) -> None:
        self._adapter.write(
            place.session_id,
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
        _, session_id = Place.ids_of_thread(thread_id)
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
        _, session_id = Place.ids_of_thread(thread_id)
        self._adapter.delete(session_id, LangGraphCheckpoint, LangGraphValue, LangGraphWrite)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of runs, with their writes, and values that no other checkpoint refers to.

        One transaction for each thread. A `DeltaChannel` needs the writes of earlier checkpoints: do not
        delete a run of a thread that uses one and continues.
        """
        upkeep.delete_for_runs(self._adapter, run_ids)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy all checkpoints, values and writes of a thread to another one, in one transaction.

        Rows that the target already has are kept. A new target gets the user and the title of the source.
        """
        upkeep.copy_thread(
            self._adapter, Place.ids_of_thread(source_thread_id), Place.ids_of_thread(target_thread_id)
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
        upkeep.prune(self._adapter, self.serde, thread_ids, strategy, self.delete_thread)

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
        session.db.execute(sql.INSERT_VALUE, {**own, **value})
    session.db.execute(sql.INSERT_CHECKPOINT, {**columns, **own})


def _put_writes_locked(session: LockedSession, columns: Mapping[str, Any]) -> None:
    own = {**columns, "session": session.key}
    writes = zip(columns["positions"], columns["channels"], columns["types"], columns["blobs"], strict=True)
    for position, channel, kind, blob in writes:
        write = {"position": position, "channel": channel, "type": kind, "blob": blob}
        session.db.execute(sql.INSERT_WRITE, {**own, **write})
