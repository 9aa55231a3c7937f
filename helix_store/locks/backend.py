"""What a back end of a lock manager has to do.

Arguments have been checked when they arrive here. A term is over when it was released, when its time is up or
when a newer term was given out; nothing ever waits for a lock.
"""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from helix_store.locks.rules import LockInfo, Term

__all__ = ["LockVerbs"]


class LockVerbs(Protocol):
    def acquire(self, name: str, *, owner: str, ttl_ms: int) -> Term | None:
        """A new term, or ``None`` while another one lasts, whoever holds it."""
        ...

    def refresh(self, name: str, *, owner: str, fencing_token: int, ttl_ms: int) -> datetime | None:
        """The new end of this term, or ``None`` when it is over."""
        ...

    def release(self, name: str, *, owner: str, fencing_token: int) -> bool:
        """End this term; ``False`` when it was over."""
        ...

    def force_release(self, name: str) -> bool:
        """End whatever term lasts and fence its holder out; ``False`` when there is none."""
        ...

    def is_locked(self, name: str) -> bool: ...

    def active(self) -> list[LockInfo]:
        """The terms that last, by name."""
        ...
