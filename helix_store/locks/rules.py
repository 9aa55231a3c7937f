"""Lock terms, the operations of a back end and the pauses between attempts."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final, Protocol

from helix_store.core.locks import LockInfo
from helix_store.core.validation import milliseconds

__all__ = [
    "MAX_TTL_MS",
    "LockOperations",
    "Term",
    "process_owner",
    "retry_pauses",
    "ttl_milliseconds",
]

MAX_TTL_MS: Final = 7 * 24 * 60 * 60 * 1000
"""Seven days, because a crashed holder keeps the name for the rest of the term."""

ttl_milliseconds: Final = partial(milliseconds, minimum=1, maximum=MAX_TTL_MS)
"""Return a checked TTL, as `milliseconds` does. Raises `InvalidPayload`."""

_FIRST_PAUSE_SECONDS: Final = 0.01
_LONGEST_PAUSE_SECONDS: Final = 0.25
_LONGEST_HOST_NAME: Final = 150


@dataclass(frozen=True, slots=True)
class Term:
    """One period of holding a name. Its token is larger than the tokens of all earlier terms of the name."""

    fencing_token: int
    expires_at: datetime


class LockOperations(Protocol):
    """The operations of a back end. Arguments have already been checked, and no operation waits for a lock.

    A term is over when it is released, when its TTL has passed, or when a newer term has begun.
    """

    def acquire(self, name: str, *, owner: str, ttl_ms: int) -> Term | None:
        """Begin a term, or return ``None`` while another term lasts, even of the same owner."""
        ...

    def take_over(self, name: str, *, owner: str, ttl_ms: int) -> Term | None:
        """Begin a term that replaces any other, or return ``None`` while a guarded write is running."""
        ...

    def refresh(self, name: str, *, owner: str, fencing_token: int, ttl_ms: int) -> datetime | None:
        """Restart the TTL and return the new end of the term, or ``None`` if the term is over."""
        ...

    def release(self, name: str, *, owner: str, fencing_token: int) -> bool:
        """End this term; return ``False`` if it is already over."""
        ...

    def force_release(self, name: str) -> bool:
        """End the current term and fence out its holder; return ``False`` if the name is not held."""
        ...

    def is_locked(self, name: str) -> bool:
        """Return whether a term is active."""
        ...

    def active(self) -> list[LockInfo]:
        """Return the active terms, by name."""
        ...


def process_owner(nonce: str) -> str:
    """Return the default owner. Host names and process ids repeat after a reboot; the nonce does not."""
    return f"{socket.gethostname()[:_LONGEST_HOST_NAME]}:{os.getpid()}:{nonce}"


def retry_pauses(timeout_ms: int) -> Iterator[float]:
    """Yield the seconds to pause between attempts, which grow and are jittered so that waiters spread out.
    The last pause ends at the timeout, after which the caller makes one more attempt. With a timeout of 0,
    there are no pauses.
    """
    deadline = time.monotonic() + timeout_ms / 1000
    longest = _FIRST_PAUSE_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        yield min(left, random.uniform(longest / 2, longest))  # noqa: S311  jitter, not a secret
        longest = min(2 * longest, _LONGEST_PAUSE_SECONDS)
