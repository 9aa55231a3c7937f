"""What a lock is: its terms, how long its holder may trust one, and when to ask again for a held one."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from helix_store.core.serialization import Serializable
from helix_store.core.validation import whole_number

__all__ = [
    "MAX_TTL_MS",
    "LockInfo",
    "Term",
    "process_owner",
    "retry_pauses",
    "trust_ends",
    "ttl_milliseconds",
]

MAX_TTL_MS: Final = 7 * 24 * 60 * 60 * 1000
"""Seven days: a crashed holder blocks its name for the rest of its term."""

_TRUSTED_PART: Final = 0.9
"""The last tenth of a term is the margin for clocks that run apart and for the holder's own reaction."""

_FIRST_PAUSE_SECONDS: Final = 0.01
_LONGEST_PAUSE_SECONDS: Final = 0.25
_LONGEST_HOST_NAME: Final = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class LockInfo(Serializable):
    """A lock that somebody holds."""

    name: str
    owner: str
    fencing_token: int
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Term:
    """What a back end hands out: a token that grows with every term of a name, and the end of this one."""

    fencing_token: int
    expires_at: datetime


def ttl_milliseconds(value: Any, name: str = "ttl_ms") -> int:
    """How long a term may last. Raises `InvalidPayload`."""
    return whole_number(value, name, minimum=1, maximum=MAX_TTL_MS)


def trust_ends(requested_at: float, ttl_ms: int) -> float:
    """When the holder stops trusting a term, on the clock that ``requested_at`` was read from, in seconds.

    Counted from before the request was sent: the database started the term later than that, so it also ends
    later, however slow the reply was.
    """
    return requested_at + _TRUSTED_PART * ttl_ms / 1000


def process_owner(nonce: str) -> str:
    """The owner that is recorded when none is given.

    Host names and process ids are used again after a reboot; a nonce is not.
    """
    return f"{socket.gethostname()[:_LONGEST_HOST_NAME]}:{os.getpid()}:{nonce}"


def retry_pauses(timeout_ms: int) -> Iterator[float]:
    """Seconds to pause between attempts, growing and jittered so that waiters do not meet again and again.

    The last pause ends at the timeout, so that one attempt is made then; without a timeout there is none.
    """
    deadline = time.monotonic() + timeout_ms / 1000
    longest = _FIRST_PAUSE_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        yield min(left, random.uniform(longest / 2, longest))  # noqa: S311  jitter, not a secret
        longest = min(2 * longest, _LONGEST_PAUSE_SECONDS)
