"""Snapshots and claims of threads.

The SQL of snapshots: puts, reads and claims.

A thread is a session. The parameters ``tenant`` and ``thread_id`` identify it, or ``key`` if its row is
already locked.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Any, Final, NamedTuple

from django.db import IntegrityError
from django.db.models import Count, QuerySet

from helix_store import conf
from helix_store.core import moments, validation
from helix_store.core.ids import new_id
from helix_store.core.limits import MAX_BIGINT, Limits
from helix_store.core.moments import as_utc
from helix_store.core.payloads import Serializable, decode_object, encode, size_of
from helix_store.core.types import Duration
from helix_store.core.validation import Guard, guard
from helix_store.engine.async_twins import async_twin
from helix_store.engine.database import Call, Database, DatabaseOperations, Rows, reads, writes
from helix_store.engine.errors import is_unique_violation
from helix_store.engine.memory import MemoryWorld
from helix_store.engine.statement import Statement, table, with_clock
from helix_store.exceptions import (
    CheckpointNotFound,
    ConflictError,
    InvalidPayload,
    LockLostError,
    SessionNotFound,
)
from helix_store.locks import StoredLock, claim_gap, ttl_milliseconds
from helix_store.models import Checkpoint, CheckpointKind, Session
from helix_store.sessions.heads import delete_tree, lock_or_insert_session
from helix_store.sessions.locking import lock_session, lock_sessions, sessions_with_ids
from helix_store.sessions.memory import with_descendants
from helix_store.sessions.records import SessionRecord, TenantScope
from helix_store.sessions.state import NewSession, root_session
from helix_store.sessions.statements import session_by_id

SNAPSHOT_AGENT_TYPE: Final = "snapshot"
"""The agent type of the session that the first snapshot of an unknown thread creates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta(Serializable):
    """A listed snapshot, without its payload.

    Example::

        snapshots = SnapshotCheckpointer()
        snapshots.put("chat-42", {"version": 2, "messages": []})
        print([(meta.id, meta.size_bytes) for meta in snapshots.list("chat-42")])
    """

    id: str
    thread_id: str
    created_at: datetime
    agent_snapshot_version: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimTerm:
    """The owner of a claimed snapshot, and the time when the claim expires."""

    thread_id: str
    checkpoint_id: str
    owner: str
    token: int
    expires_at: datetime
    snapshot: dict[str, Any]


class EncodedSnapshot(NamedTuple):
    text: str
    version: int
    size_bytes: int


def encode_snapshot(snapshot: Any, limits: Limits) -> EncodedSnapshot:
    """Check and encode a snapshot. Raises `InvalidPayload` and `LimitExceeded`."""
    if type(snapshot) is not dict:
        raise InvalidPayload(path="/snapshot", reason=f"expected a dict, got {type(snapshot).__name__}")
    version = validation.whole_number(snapshot.get("version"), "/snapshot/version", minimum=1)
    text = encode(snapshot, limit=limits.max_state_bytes, path="/snapshot")
    return EncodedSnapshot(text, version, size_of(text))


def new_thread(thread_id: str) -> NewSession:
    """Return the session that the first snapshot of an unknown thread creates."""
    return root_session(thread_id, SNAPSHOT_AGENT_TYPE)


def optional_count(value: Any, name: str) -> int | None:
    """Return a whole number of at least 1, or ``None`` for no bound. Raises `InvalidQuery`."""
    return None if value is None else validation.query_number(value, name, minimum=1)


_CHECKPOINT: Final = table(Checkpoint)
_SESSION: Final = table(Session)
_IS_THREAD: Final = session_by_id(session_id="thread_id")


def _is_snapshot_of(key: str) -> str:
    return f"session_id = {key} AND kind = 'snapshot' AND namespace = ''"


_OF_THREAD: Final = _is_snapshot_of(f"(SELECT id FROM {_SESSION} WHERE {_IS_THREAD})")
_OF_LOCKED_THREAD: Final = _is_snapshot_of("%(key)s")

# Puts

_COLUMNS: Final = {
    "kind": "'snapshot'",
    "namespace": "''",
    "checkpoint_id": "%(checkpoint_id)s",
    "source": "'interrupt'",
    "step_count": "0",
    "status": "''",
    "stream_sequence": "0",
    "payload": "%(payload)s",
    "envelope": "'{}'",
    "size_bytes": "%(size_bytes)s",
    "created_at": "%(at)s",
    "call_id": "%(call_id)s",
    "snapshot_version": "%(snapshot_version)s",
}


def _newest_versions(key: str, *, offset: str = "0") -> str:
    return f"""
        SELECT version FROM {_CHECKPOINT} WHERE {_is_snapshot_of(key)}
        ORDER BY version DESC LIMIT 1 OFFSET {offset}"""


def _trim(key: str) -> str:
    """Delete all but the ``kept`` newest snapshots."""
    return f"""
        DELETE FROM {_CHECKPOINT}
        WHERE {_is_snapshot_of(key)} AND version <= ({_newest_versions(key, offset="%(kept)s")})"""


def _add(key: str, sessions: str) -> str:
    """Insert the snapshot with the next number of its thread."""
    return f"""
        INSERT INTO {_CHECKPOINT} (session_id, version, message_count, {", ".join(_COLUMNS)})
        SELECT id, coalesce(({_newest_versions(key)}), 0) + 1, message_count, {", ".join(_COLUMNS.values())}
        FROM {sessions}
        RETURNING id"""


def _put(*, trims: bool) -> str:
    """Return a put whose single statement locks the thread, without a transaction around it. ``head`` makes
    the decision, and the other parts take the thread's key from it. A statement that waited for the session's
    row sees that row as it is after the wait, but all other rows as of its start. Conditions:

    - The thread exists: this is checked again on the locked row.
    - The thread still has the snapshots from which the number and the trimming were computed: every write
      that adds or deletes a snapshot updates the session's row and changes its ``xmin``. PostgreSQL compares
      it again on the locked row, while the subselect keeps its original value.
    - ``message_count`` comes from the locked row.
    - The id is new in the thread: the unique constraint checks this.

    Claims change neither numbers nor the cap.
    """
    key = "(SELECT id FROM head)"
    trimmed = f", trimmed AS ({_trim(key)})" if trims else ""
    return f"""
        WITH head AS (
            UPDATE {_SESSION} SET updated_at = %(at)s
            WHERE {_IS_THREAD} AND xmin = (SELECT xmin FROM {_SESSION} WHERE {_IS_THREAD})
            RETURNING id, message_count
        ){trimmed} {_add(key, "head")}"""


TRIM: Final = Statement(_trim("%(key)s"))
ADD: Final = Statement(_add("%(key)s", f"{_SESSION} WHERE id = %(key)s"))
PUT: Final = Statement(_put(trims=False))
PUT_AND_TRIM: Final = Statement(_put(trims=True))

# Reads

_LISTED: Final = "checkpoint_id, created_at, snapshot_version, size_bytes"
_WITH_ID: Final = "checkpoint_id = %(checkpoint_id)s"

NEWEST: Final = Statement(f"""
    SELECT payload FROM {_CHECKPOINT} WHERE {_OF_THREAD} ORDER BY version DESC LIMIT 1""")
ONE: Final = Statement(f"SELECT payload FROM {_CHECKPOINT} WHERE {_OF_THREAD} AND {_WITH_ID}")
VERSION: Final = Statement(f"SELECT version FROM {_CHECKPOINT} WHERE {_OF_THREAD} AND {_WITH_ID}")
LIST: Final = Statement(f"""
    SELECT {_LISTED} FROM {_CHECKPOINT} WHERE {_OF_THREAD}
    ORDER BY version DESC LIMIT %(limit)s""")
LIST_BEFORE: Final = Statement(f"""
    SELECT {_LISTED} FROM {_CHECKPOINT} WHERE {_OF_THREAD} AND version < %(version)s
    ORDER BY version DESC LIMIT %(limit)s""")

# Claims use the database's clock and the lock of the thread

_ONE_LOCKED: Final = f"{_OF_LOCKED_THREAD} AND {_WITH_ID}"
_NEWEST_LOCKED: Final = f"""id = (
    SELECT id FROM {_CHECKPOINT} WHERE {_OF_LOCKED_THREAD} ORDER BY version DESC LIMIT 1)"""
_IS_FREE: Final = "claim_done_at IS NULL AND (claim_expires_at IS NULL OR claim_expires_at <= {now})"
_IS_OWN: Final = f"{_ONE_LOCKED} AND claim_owner = %(owner)s AND claim_token = %(token)s"
_IS_HELD: Final = f"{_IS_OWN} AND claim_done_at IS NULL AND claim_expires_at > {{now}}"


def _update(assignments: str, condition: str, returning: str) -> Statement:
    """Return an update in which ``{now}`` is the database's time and ``{end}`` is the end of a new term."""
    text = f"UPDATE {_CHECKPOINT} SET {assignments} WHERE {condition} RETURNING {returning}"
    return with_clock(lambda clock: text.format(now=clock.now, end=clock.after("ttl_ms")))


def _claim(snapshot: str) -> Statement:
    return _update(
        "claim_owner = %(owner)s, claim_token = COALESCE(claim_token, 0) + %(gap)s, claim_expires_at = {end}",
        f"{snapshot} AND {_IS_FREE}",
        "checkpoint_id, claim_token, claim_expires_at, payload",
    )


CLAIM_ONE: Final = _claim(_ONE_LOCKED)
CLAIM_NEWEST: Final = _claim(_NEWEST_LOCKED)
REFRESH_CLAIM: Final = _update("claim_expires_at = {end}", _IS_HELD, "claim_expires_at")
RELEASE_CLAIM: Final = _update("claim_expires_at = NULL", _IS_HELD, "id")
# This also works after the term, unless someone else has claimed it since, because the work is done.
FINISH_CLAIM: Final = _update(
    "claim_done_at = COALESCE(claim_done_at, {now})", f"{_IS_OWN} AND claim_expires_at IS NOT NULL", "id"
)


_UNGUARDED: Final = Guard()


class DatabaseSnapshots(DatabaseOperations):
    """The database back end. Arguments have already been checked. All writes, even claims, lock the
    session's row first.
    """

    def put(
        self, thread_id: str, checkpoint_id: str, snapshot: EncodedSnapshot, *, cap: int | None, guard: Guard
    ) -> None:
        """Store a snapshot as the newest of its thread, and delete the oldest beyond ``cap``."""
        parameters = {
            "tenant": self.db.tenant,
            "thread_id": thread_id,
            "checkpoint_id": checkpoint_id,
            "payload": snapshot.text,
            "size_bytes": snapshot.size_bytes,
            "snapshot_version": snapshot.version,
            "at": moments.now(),
        }
        if cap is not None:
            parameters["kept"] = cap - 1
        if guard != _UNGUARDED or not self.db.has_fast_writes:
            self._put(thread_id, parameters, guard)
            return

        def put(call: Call) -> None:
            recorded = {**parameters, "call_id": call.id}
            try:
                if call.try_write(PUT if cap is None else PUT_AND_TRIM, recorded):
                    return
            except IntegrityError as exc:
                if not is_unique_violation(exc):
                    raise
            # The thread is new, another write has changed it, or it already has a snapshot with this id.
            self._put(thread_id, recorded, guard)

        def look_first(call: Call) -> None:
            with suppress(SessionNotFound):
                key = lock_session(self.db, thread_id).pk
                if self._snapshots([key]).filter(checkpoint_id=checkpoint_id, call_id=call.id).exists():
                    return
            self._put(thread_id, {**parameters, "call_id": call.id}, guard)

        self.db.committed_once(put, look_first, operation_id=lambda: checkpoint_id)

    @writes
    def _put(self, thread_id: str, parameters: dict[str, Any], guard: Guard) -> None:
        head, _ = lock_or_insert_session(self.db, thread_id, lambda: new_thread(thread_id), guard)
        # A put that waited for the lock comes after the puts that it waited for.
        of_thread = {"call_id": None, **parameters, "key": head.pk, "at": moments.now()}
        if "kept" in parameters:
            self.db.execute(TRIM, of_thread)
        try:
            self.db.execute(ADD, of_thread)
        except IntegrityError as exc:
            if is_unique_violation(exc):
                raise ConflictError("The thread already has a checkpoint with this id.") from exc
            raise
        self._mark_written([head.pk], of_thread["at"])

    def get(self, thread_id: str, checkpoint_id: str | None) -> dict[str, Any] | None:
        statement = NEWEST if checkpoint_id is None else ONE
        parameters = {"tenant": self.db.tenant, "thread_id": thread_id, "checkpoint_id": checkpoint_id}
        for (payload,) in self.db.read(statement, parameters):
            return decode_object(payload)
        return None

    def select(self, thread_id: str, *, limit: int | None, before: str | None) -> list[CheckpointMeta]:
        parameters = {
            "tenant": self.db.tenant,
            "thread_id": thread_id,
            "limit": MAX_BIGINT if limit is None else limit,
        }
        rows = self.db.read(LIST, parameters) if before is None else self._rows_before(before, parameters)
        return [
            CheckpointMeta(
                id=checkpoint_id,
                thread_id=thread_id,
                created_at=as_utc(created_at),
                agent_snapshot_version=version or 0,
                size_bytes=size_bytes,
            )
            for checkpoint_id, created_at, version, size_bytes in rows
        ]

    @reads
    def _rows_before(self, checkpoint_id: str, parameters: dict[str, Any]) -> Rows:
        found = self.db.execute(VERSION, {**parameters, "checkpoint_id": checkpoint_id})
        if not found:
            raise CheckpointNotFound(checkpoint_id)
        return self.db.execute(LIST_BEFORE, {**parameters, "version": found[0][0]})

    @writes
    def delete(self, thread_id: str, checkpoint_id: str | None) -> int:
        try:
            head = lock_session(self.db, thread_id)
        except SessionNotFound:
            return 0
        snapshots = self._snapshots([head.pk])
        if checkpoint_id is not None:
            snapshots = snapshots.filter(checkpoint_id=checkpoint_id)
        deleted, _ = snapshots.delete()
        if deleted:
            self._mark_written([head.pk], moments.now())
        return deleted

    @writes
    def delete_threads(self, thread_ids: Collection[str]) -> dict[str, int]:
        found = sessions_with_ids(self.db, thread_ids)
        heads = lock_sessions(self.db, found.values_list("pk", flat=True))
        snapshots = self._snapshots([head.pk for head in heads])
        counts = dict(snapshots.order_by().values_list("session_id").annotate(Count("pk")))
        snapshots.delete()
        made_by_put = dict(found.filter(agent_type=SNAPSHOT_AGENT_TYPE).values_list("pk", "session_id"))
        for thread_id in made_by_put.values():
            delete_tree(self.db, thread_id, keep_usage=False)
        if kept := counts.keys() - made_by_put.keys():
            self._mark_written(kept, moments.now())
        deleted = {head.session_id: counts.get(head.pk, 0) for head in heads}
        return {thread_id: deleted.get(thread_id, 0) for thread_id in thread_ids}

    @writes
    def claim(
        self, thread_id: str, checkpoint_id: str | None, *, owner: str, ttl_ms: int
    ) -> ClaimTerm | None:
        """Return a term on a snapshot that is neither claimed nor resumed, or ``None``."""
        rows = self._in_locked_thread(
            thread_id,
            CLAIM_NEWEST if checkpoint_id is None else CLAIM_ONE,
            {"checkpoint_id": checkpoint_id, "owner": owner, "ttl_ms": ttl_ms, "gap": claim_gap()},
        )
        for claimed_id, token, expires_at, payload in rows:
            return ClaimTerm(
                thread_id=thread_id,
                checkpoint_id=claimed_id,
                owner=owner,
                token=token,
                expires_at=as_utc(expires_at),
                snapshot=decode_object(payload),
            )
        return None

    @writes
    def refresh_claim(self, term: ClaimTerm, *, ttl_ms: int) -> datetime | None:
        """Return the new end of a term that has not expired, or ``None``."""
        rows = self._in_locked_thread(term.thread_id, REFRESH_CLAIM, {**_own(term), "ttl_ms": ttl_ms})
        return as_utc(rows[0][0]) if rows else None

    @writes
    def release_claim(self, term: ClaimTerm) -> bool:
        return bool(self._in_locked_thread(term.thread_id, RELEASE_CLAIM, _own(term)))

    @writes
    def finish_claim(self, term: ClaimTerm) -> bool:
        """Mark the snapshot as resumed; return ``False`` if it was released, deleted or claimed again."""
        return bool(self._in_locked_thread(term.thread_id, FINISH_CLAIM, _own(term)))

    def _in_locked_thread(self, thread_id: str, statement: Statement, parameters: dict[str, Any]) -> Rows:
        try:
            head = lock_session(self.db, thread_id)
        except SessionNotFound:
            return []
        return self.db.execute(statement, {**parameters, "key": head.pk})

    def _snapshots(self, keys: Collection[int]) -> QuerySet[Checkpoint]:
        return Checkpoint.objects.using(self.db.alias).filter(
            session_id__in=keys, kind=CheckpointKind.SNAPSHOT
        )

    def _mark_written(self, keys: Collection[int], at: datetime) -> None:
        """Update the rows of locked sessions, so that `sql.PUT` notices that their snapshots have changed."""
        Session.objects.using(self.db.alias).filter(pk__in=keys).update(updated_at=at)


def _own(term: ClaimTerm) -> dict[str, Any]:
    return {"checkpoint_id": term.checkpoint_id, "owner": term.owner, "token": term.token}


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot with its newest claim; ``is_done`` means that it was resumed."""

    meta: CheckpointMeta
    text: str
    claim: StoredLock | None = None
    is_done: bool = False

    @property
    def is_held(self) -> bool:
        return self.claim is not None and self.claim.lasts and not self.is_done


class MemorySnapshots:
    """The in-memory back end; see `DatabaseSnapshots` for its operations."""

    def __init__(self, scope: TenantScope) -> None:
        self._scope = scope

    def put(
        self, thread_id: str, checkpoint_id: str, snapshot: EncodedSnapshot, *, cap: int | None, guard: Guard
    ) -> None:
        with self._scope.lock:
            record = self._scope.find(thread_id)
            draft = _new_record(thread_id) if record is None else record.draft()
            self._scope.check_guard(draft, guard)
            if checkpoint_id in draft.snapshots:
                raise ConflictError("The thread already has a checkpoint with this id.")
            at = moments.now()
            draft.snapshots[checkpoint_id] = StoredSnapshot(
                CheckpointMeta(
                    id=checkpoint_id,
                    thread_id=thread_id,
                    created_at=at,
                    agent_snapshot_version=snapshot.version,
                    size_bytes=snapshot.size_bytes,
                ),
                snapshot.text,
            )
            excess = 0 if cap is None else max(len(draft.snapshots) - cap, 0)
            for oldest in list(islice(draft.snapshots, excess)):
                del draft.snapshots[oldest]
            draft.columns["updated_at"] = at
            self._scope.sessions[thread_id] = draft

    def get(self, thread_id: str, checkpoint_id: str | None) -> dict[str, Any] | None:
        stored = _chosen(self._snapshots(thread_id), checkpoint_id)
        return None if stored is None else decode_object(stored.text)

    def select(self, thread_id: str, *, limit: int | None, before: str | None) -> list[CheckpointMeta]:
        metas = [stored.meta for stored in reversed(self._snapshots(thread_id).values())]
        if before is not None:
            ids = [meta.id for meta in metas]
            if before not in ids:
                raise CheckpointNotFound(before)
            metas = metas[ids.index(before) + 1 :]
        return metas if limit is None else metas[:limit]

    def delete(self, thread_id: str, checkpoint_id: str | None) -> int:
        with suppress(SessionNotFound), self._scope.writing(thread_id) as draft:
            doomed = list(draft.snapshots) if checkpoint_id is None else [checkpoint_id]
            deleted = sum(draft.snapshots.pop(each, None) is not None for each in doomed)
            if deleted:
                draft.columns["updated_at"] = moments.now()
            return deleted
        return 0

    def delete_threads(self, thread_ids: Collection[str]) -> dict[str, int]:
        with self._scope.lock:
            deleted = {thread_id: self.delete(thread_id, None) for thread_id in thread_ids}
            for thread_id in thread_ids:
                record = self._scope.find(thread_id)
                if record is not None and record.columns["agent_type"] == SNAPSHOT_AGENT_TYPE:
                    for doomed in with_descendants(self._scope.sessions, thread_id):
                        self._scope.forget(doomed)
        return deleted

    def claim(
        self, thread_id: str, checkpoint_id: str | None, *, owner: str, ttl_ms: int
    ) -> ClaimTerm | None:
        with suppress(SessionNotFound), self._scope.writing(thread_id) as draft:
            stored = _chosen(draft.snapshots, checkpoint_id)
            if stored is None or stored.is_done or stored.is_held:
                return None
            snapshot = decode_object(stored.text)
            token = (0 if stored.claim is None else stored.claim.token) + claim_gap()
            claim = StoredLock.until(owner, token, ttl_ms)
            draft.snapshots[stored.meta.id] = replace(stored, claim=claim)
            return ClaimTerm(
                thread_id=thread_id,
                checkpoint_id=stored.meta.id,
                owner=owner,
                token=token,
                expires_at=claim.expires_at,
                snapshot=snapshot,
            )
        return None

    def refresh_claim(self, term: ClaimTerm, *, ttl_ms: int) -> datetime | None:
        with self._scope.lock:
            stored = self._claimed(term)
            if stored is None or not stored.is_held:
                return None
            claim = StoredLock.until(term.owner, term.token, ttl_ms)
            self._replace(term, replace(stored, claim=claim))
        return claim.expires_at

    def release_claim(self, term: ClaimTerm) -> bool:
        with self._scope.lock:
            stored = self._claimed(term)
            if stored is None or stored.claim is None or not stored.is_held:
                return False
            self._replace(term, replace(stored, claim=stored.claim.ended()))
        return True

    def finish_claim(self, term: ClaimTerm) -> bool:
        with self._scope.lock:
            stored = self._claimed(term)
            if stored is None or stored.claim is None or stored.claim.was_released:
                return False
            self._replace(term, replace(stored, is_done=True))
        return True

    def _snapshots(self, thread_id: str) -> dict[str, StoredSnapshot]:
        record = self._scope.find(thread_id)
        return {} if record is None else record.snapshots

    def _claimed(self, term: ClaimTerm) -> StoredSnapshot | None:
        """Return the snapshot, unless someone else has claimed it since."""
        stored = self._snapshots(term.thread_id).get(term.checkpoint_id)
        claim = None if stored is None else stored.claim
        is_own = claim is not None and (claim.owner, claim.token) == (term.owner, term.token)
        return stored if is_own else None

    def _replace(self, term: ClaimTerm, stored: StoredSnapshot) -> None:
        with self._scope.writing(term.thread_id) as draft:
            draft.snapshots[term.checkpoint_id] = stored


def _new_record(thread_id: str) -> SessionRecord:
    return SessionRecord.new(thread_id, new_thread(thread_id).encoded)


def _chosen(snapshots: dict[str, StoredSnapshot], checkpoint_id: str | None) -> StoredSnapshot | None:
    """Return the snapshot with this id, or the newest one."""
    if checkpoint_id is not None:
        return snapshots.get(checkpoint_id)
    return next(reversed(snapshots.values()), None)


SnapshotBackend = DatabaseSnapshots | MemorySnapshots


class Claim:
    """The right to resume one snapshot for a limited term, measured by the database's clock.

    During the term, and at any time after `done`, a second claim on the snapshot is refused. If the resumer
    dies, the snapshot becomes available again at the end of the term.

    Example::

        snapshots = SnapshotCheckpointer()
        snapshots.put("chat-42", {"version": 2, "messages": []})
        if (claim := snapshots.claim("chat-42", owner="worker-1")) is not None:
            print(claim.snapshot)
            claim.done()
    """

    def __init__(self, backend: SnapshotBackend, term: ClaimTerm, *, ttl_ms: int) -> None:
        self._backend = backend
        self._term = term
        self._ttl_ms = ttl_ms
        self.thread_id: Final = term.thread_id
        self.checkpoint_id: Final = term.checkpoint_id
        self.owner: Final = term.owner
        self.token: Final = term.token
        """A number that increases with every claim on the snapshot."""
        self.snapshot: Final = term.snapshot
        """The claimed snapshot, a copy that belongs to this claim."""
        self.expires_at = term.expires_at
        """The end of the term on the database's clock."""

    def __repr__(self) -> str:
        return f"<Claim on {self.checkpoint_id} of {self.owner!r}>"

    def refresh(self, ttl_ms: Duration | None = None) -> datetime:
        """Restart the term and return its new end, for a resume that takes longer than one term.

        One transaction under the session's lock. By default, ``ttl_ms`` is that of the claim. Raises
        `LockLostError` if the term has expired; this resumer must then stop. Safe to repeat.
        """
        ttl_ms = self._ttl_ms if ttl_ms is None else ttl_milliseconds(ttl_ms, "ttl_ms")
        expires_at = self._backend.refresh_claim(self._term, ttl_ms=ttl_ms)
        if expires_at is None:
            raise LockLostError(name=self.checkpoint_id, fencing_token=self.token)
        self._ttl_ms = ttl_ms
        self.expires_at = expires_at
        return expires_at

    def done(self) -> bool:
        """Mark the snapshot as resumed: it cannot be claimed again.

        Runs in one transaction under the session's lock; if you call it in the transaction of the side
        effect, both happen or neither does. It also works after the end of the term. Returns ``False`` if the
        snapshot was claimed again, released or deleted. Safe to repeat.
        """
        return self._backend.finish_claim(self._term)

    def release(self) -> bool:
        """Make the snapshot available again; return ``False`` if the term had expired.

        One transaction under the session's lock. Safe to repeat.
        """
        return self._backend.release_claim(self._term)

    arefresh = async_twin(refresh)
    adone = async_twin(done)
    arelease = async_twin(release)


class SnapshotCheckpointerBase:
    """The snapshot checkpointer of the contract; subclasses supply the back end.

    A thread is the session with the same id, and the first `put` creates it. An agent with a session in a
    state store may keep its snapshots there. Ids come from ``id_factory``; the order never depends on them.
    Source: the checkpointer of `@ziro-agent/checkpoint-postgres`.
    """

    def __init__(
        self,
        backend: SnapshotBackend,
        *,
        tenant: str,
        max_checkpoints_per_thread: int | None,
        id_factory: Callable[[], str],
    ) -> None:
        self._backend = backend
        self.tenant: Final = tenant
        self.max_checkpoints_per_thread: Final = optional_count(
            max_checkpoints_per_thread, "max_checkpoints_per_thread"
        )
        self._new_id = id_factory

    def put(self, thread_id: str, snapshot: dict[str, Any], *, fencing_token: int | None = None) -> str:
        """Store a snapshot as the newest of its thread and return its id.

        One transaction under the session's lock, which also deletes the oldest snapshots beyond the cap. It
        updates the session's ``updated_at`` and does not change its version. Raises `InvalidPayload` unless
        ``snapshot["version"]`` is a whole number from 1, `LimitExceeded` beyond ``max_state_bytes``,
        `ConflictError` for an id that the thread already has, and `FencedOutError`. A repeat stores a second
        snapshot.
        """
        validation.identifier(thread_id, "thread_id")
        encoded = encode_snapshot(snapshot, conf.limits())
        checkpoint_id = self._new_id()
        fence, cap = guard(fencing_token=fencing_token), self.max_checkpoints_per_thread
        self._backend.put(thread_id, checkpoint_id, encoded, cap=cap, guard=fence)
        return checkpoint_id

    def get(self, thread_id: str, checkpoint_id: str | None = None) -> dict[str, Any] | None:
        """Return a snapshot, by default the newest, exactly as it was stored, or ``None``. One query."""
        validation.identifier(thread_id, "thread_id")
        return self._backend.get(thread_id, _optional_id(checkpoint_id))

    def list(
        self, thread_id: str, *, limit: int | None = None, before: str | None = None
    ) -> builtins.list[CheckpointMeta]:
        """List the thread's snapshots without their payloads, newest first; an unknown thread has none.

        Takes one query, or two with ``before``, which is the id of the last snapshot of the previous page.
        Raises `CheckpointNotFound` for an id that the thread does not have, such as the id of a deleted
        snapshot, and `InvalidQuery` for a limit below 1.
        """
        validation.identifier(thread_id, "thread_id")
        return self._backend.select(
            thread_id, limit=optional_count(limit, "limit"), before=_optional_id(before, "before")
        )

    def delete(self, thread_id: str, checkpoint_id: str | None = None) -> int:
        """Delete one snapshot, or all snapshots of the thread if no id is given, and return their number.

        One transaction under the session's lock; a deletion updates the session's ``updated_at``. Safe to
        repeat.
        """
        validation.identifier(thread_id, "thread_id")
        return self._backend.delete(thread_id, _optional_id(checkpoint_id))

    def delete_threads(self, thread_ids: Collection[str]) -> dict[str, int]:
        """Erase threads in one transaction, and return the number of snapshots by thread.

        A session that `put` created is deleted with its usage and its descendants, as by ``delete_session``;
        for any other session, only the snapshots are deleted. Safe to repeat.
        """
        unique = dict.fromkeys(
            validation.identifier(thread_id, f"thread_ids/{index}")
            for index, thread_id in enumerate(validation.items(thread_ids, "thread_ids"))
        )
        return self._backend.delete_threads(unique)

    def claim(
        self, thread_id: str, checkpoint_id: str | None = None, *, owner: str, ttl_ms: Duration | None = None
    ) -> Claim | None:
        """Claim one snapshot, by default the newest, to resume it.

        One transaction under the session's lock. Returns ``None`` during the term of another claim, after
        `Claim.done`, and if there is no such snapshot. Side effects that run after the claim therefore run
        only once. The term is ``ttl_ms``, by default ``HELIX_STORE["DEFAULT_LOCK_TTL_MS"]``.
        """
        validation.identifier(thread_id, "thread_id")
        validation.identifier(owner, "owner")
        ttl_ms = conf.default_lock_ttl_ms() if ttl_ms is None else ttl_milliseconds(ttl_ms, "ttl_ms")
        term = self._backend.claim(thread_id, _optional_id(checkpoint_id), owner=owner, ttl_ms=ttl_ms)
        return None if term is None else Claim(self._backend, term, ttl_ms=ttl_ms)

    aput = async_twin(put)
    aget = async_twin(get)
    alist = async_twin(list)
    adelete = async_twin(delete)
    adelete_threads = async_twin(delete_threads)
    aclaim = async_twin(claim)


class SnapshotCheckpointer(SnapshotCheckpointerBase):
    """Snapshots in a Django database, in the order of their commits.

    Example::

        snapshots = SnapshotCheckpointer(max_checkpoints_per_thread=10)
        snapshots.put("chat-42", {"version": 2, "messages": []})
        print(snapshots.get("chat-42"))
    """

    def __init__(
        self,
        using: str | None = None,
        *,
        tenant: str = "",
        max_checkpoints_per_thread: int | None = 100,
        id_factory: Callable[[], str] = new_id,
    ) -> None:
        conf.require_usable_prefix()
        db = Database(using, validation.tenant(tenant))
        super().__init__(
            DatabaseSnapshots(db),
            tenant=db.tenant,
            max_checkpoints_per_thread=max_checkpoints_per_thread,
            id_factory=id_factory,
        )


class InMemorySnapshotCheckpointer(SnapshotCheckpointerBase):
    """Snapshots in the memory of this process, with the same contract; for tests and experiments.

    With the ``world`` of an `InMemoryStateStore`, its threads are sessions of that store.

    Example::

        snapshots = InMemorySnapshotCheckpointer(max_checkpoints_per_thread=10)
        snapshots.put("chat-42", {"version": 2, "messages": []})
        print(snapshots.get("chat-42"))
    """

    def __init__(
        self,
        *,
        tenant: str = "",
        max_checkpoints_per_thread: int | None = 100,
        world: MemoryWorld | None = None,
        id_factory: Callable[[], str] = new_id,
    ) -> None:
        tenant = validation.tenant(tenant)
        scope = TenantScope(MemoryWorld() if world is None else world, tenant=tenant, limits=None)
        super().__init__(
            MemorySnapshots(scope),
            tenant=tenant,
            max_checkpoints_per_thread=max_checkpoints_per_thread,
            id_factory=id_factory,
        )


def _optional_id(checkpoint_id: str | None, name: str = "checkpoint_id") -> str | None:
    """Return an id or ``None``; refuse an empty id, which must never mean the newest snapshot, or all."""
    return None if checkpoint_id is None else validation.identifier(checkpoint_id, name)
