"""Terms of locks, and the pauses between attempts."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from helix_store.core.validation import milliseconds

MAX_TTL_MS: Final = 7 * 24 * 60 * 60 * 1000
"""Seven days, because the name stays held for the rest of the term if the holder crashes."""

ttl_milliseconds: Final = partial(milliseconds, minimum=1, maximum=MAX_TTL_MS)
"""Return a checked TTL, as `milliseconds` does. Raises `InvalidPayload`."""

_FIRST_PAUSE_SECONDS: Final = 0.01
_LONGEST_PAUSE_SECONDS: Final = 0.25
_LONGEST_HOST_NAME: Final = 150


@dataclass(frozen=True, slots=True)
class Term:
    """One period of holding a name. Its token is larger than the tokens of all earlier terms of the name."""

    fencing_token: int
    expires_at: datetime | str
    """In the form that the database returns, for `core.moments.as_utc`."""


def process_owner(nonce: str) -> str:
    """Return the default owner. Host names and process ids may repeat after a reboot; the nonce does not."""
    return f"{socket.gethostname()[:_LONGEST_HOST_NAME]}:{os.getpid()}:{nonce}"


def retry_pauses(timeout_ms: int) -> Iterator[float]:
    """Yield the seconds to pause after each attempt, which grow and are jittered so that waiters spread out.
    The last attempt is at the timeout; its pause is 0.
    """
    deadline = time.monotonic() + timeout_ms / 1000
    longest = _FIRST_PAUSE_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        yield min(left, random.uniform(longest / 2, longest))  # noqa: S311  jitter, not a secret
        longest = min(2 * longest, _LONGEST_PAUSE_SECONDS)
    yield 0.0
