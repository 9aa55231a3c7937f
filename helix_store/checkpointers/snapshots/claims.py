"""A claimed snapshot."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from helix_store.checkpointers.snapshots.rules import ClaimTerm, SnapshotBackend
from helix_store.core.types import Duration
from helix_store.engine.async_twins import async_twin
from helix_store.exceptions import LockLostError
from helix_store.locks.rules import ttl_milliseconds

__all__ = ["Claim"]


class Claim:
    """The right to resume one snapshot, for a term on the database's clock.

    During the term, and at any time after `done`, a second claim on the snapshot is refused. If a resumer
    dies, the snapshot becomes available at the end of the term.
    """

    def __init__(self, backend: SnapshotBackend, term: ClaimTerm, *, ttl_ms: int) -> None:
        self._backend = backend
        self._term = term
        self._ttl_ms = ttl_ms
        self._expires_at = term.expires_at

    @property
    def thread_id(self) -> str:
        return self._term.thread_id

    @property
    def checkpoint_id(self) -> str:
        return self._term.checkpoint_id

    @property
    def owner(self) -> str:
        return self._term.owner

    @property
    def token(self) -> int:
        """A number that increases with every claim on the snapshot."""
        return self._term.token

    @property
    def snapshot(self) -> dict[str, Any]:
        """The claimed snapshot, a copy that belongs to this claim."""
        return self._term.snapshot

    @property
    def expires_at(self) -> datetime:
        """The end of the term on the database's clock."""
        return self._expires_at

    def __repr__(self) -> str:
        return f"<Claim on {self.checkpoint_id} of {self.owner!r}>"

    def refresh(self, ttl_ms: Duration | None = None) -> datetime:
        """Restart the term and return its new end; for a resume that takes longer than one term.

        One transaction under the session's lock. The default ``ttl_ms`` is the claim's. Raises
        `LockLostError` if the term is over; this resumer must stop. Safe to repeat.
        """
        ttl_ms = self._ttl_ms if ttl_ms is None else ttl_milliseconds(ttl_ms, "ttl_ms")
        expires_at = self._backend.refresh_claim(self._term, ttl_ms=ttl_ms)
        if expires_at is None:
            raise LockLostError(name=self.checkpoint_id, fencing_token=self.token)
        self._ttl_ms = ttl_ms
        self._expires_at = expires_at
        return expires_at

    def done(self) -> bool:
        """Mark the snapshot as resumed: it cannot be claimed again.

        One transaction under the session's lock; if you call it in the transaction of the side effect, both
        happen or neither. It also works after the end of the term. Returns ``False`` if the snapshot was
        claimed again, released or deleted. Safe to repeat.
        """
        return self._backend.finish_claim(self._term)

    def release(self) -> bool:
        """Make the snapshot available again; return ``False`` if the term was over.

        One transaction under the session's lock. Safe to repeat.
        """
        return self._backend.release_claim(self._term)

    arefresh = async_twin(refresh)
    adone = async_twin(done)
    arelease = async_twin(release)
