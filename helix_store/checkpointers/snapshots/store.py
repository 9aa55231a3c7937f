"""The snapshot checkpointers, for agents that save one whole snapshot at every pause, and their claims."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any, Final

from helix_store import conf
from helix_store.checkpointers.snapshots.database import DatabaseSnapshots
from helix_store.checkpointers.snapshots.memory import MemorySnapshots
from helix_store.checkpointers.snapshots.rules import (
    CheckpointMeta,
    ClaimTerm,
    encode_snapshot,
    optional_count,
)
from helix_store.core import validation
from helix_store.core.guards import guard
from helix_store.core.ids import new_id
from helix_store.core.types import Duration
from helix_store.engine.async_twins import async_twin
from helix_store.engine.database import Database
from helix_store.engine.memory import MemoryWorld
from helix_store.exceptions import LockLostError
from helix_store.locks.rules import ttl_milliseconds
from helix_store.sessions.memory.scope import TenantScope

SnapshotBackend = DatabaseSnapshots | MemorySnapshots


class Claim:
    """The right to resume one snapshot for a limited term, measured by the database's clock.

    During the term, and at any time after `done`, a second claim on the snapshot is refused. If the resumer
    dies, the snapshot becomes available again at the end of the term.
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
    Source: the snapshot checkpointer document.
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
        if ttl_ms is None:
            ttl_ms = conf.default_lock_ttl_ms()
        ttl_ms = ttl_milliseconds(ttl_ms, "ttl_ms")
        term = self._backend.claim(thread_id, _optional_id(checkpoint_id), owner=owner, ttl_ms=ttl_ms)
        return None if term is None else Claim(self._backend, term, ttl_ms=ttl_ms)

    aput = async_twin(put)
    aget = async_twin(get)
    alist = async_twin(list)
    adelete = async_twin(delete)
    adelete_threads = async_twin(delete_threads)
    aclaim = async_twin(claim)


class SnapshotCheckpointer(SnapshotCheckpointerBase):
    """Snapshots in a Django database, in the order of their commits."""

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
