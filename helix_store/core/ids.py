"""New ids: UUIDv7 (RFC 9562) and step checkpoint ids."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from helix_store.core.validation import identifier, whole_number
from helix_store.exceptions import InvalidPayload

__all__ = ["ParsedCheckpointId", "checkpoint_id", "new_id", "parse_checkpoint_id"]


T = TypeVar("T")


def tombstone_digest(tenant: str, session_id: str) -> str:
    """Return the SHA-256 of a session's names. It has no key: it must be the same in every database that the
    tenant is moved to, and after a change of ``SECRET_KEY``.
    """
    return hashlib.sha256(json.dumps([tenant, session_id]).encode()).hexdigest()


def after_fork(reset: Callable[[], object]) -> None:
    """Call ``reset`` in each forked child process. Windows has neither fork nor this hook."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=reset)


class PerProcess(Generic[T]):
    """A value that belongs to one process: its locks and threads do not survive a fork."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._reset()
        after_fork(self._reset)

    def get(self) -> T:
        return self._value

    def _reset(self) -> None:
        self._value = self._make()


_RANDOM_BITS: Final = 74
CHECKPOINT_ID: Final = "cpv1-{session_id}-s{step_count}-t{epoch_ms}-{random}"
_CHECKPOINT_ID: Final = re.compile(r"cpv1-(.+)-s([0-9]{1,19})-t([0-9]{1,19})-([0-9a-f]{6})", re.DOTALL)


class IdGenerator:
    """Generates strictly increasing UUIDv7 strings, even if the clock is set back.

    The time and random bits form one number of 48 + 74 bits. If the clock is not later than the last id, the
    next id is the last one plus a random number. An overflow of the random bits increases the time.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self.reset()

    def __reduce__(self) -> str:
        """Copy and pickle `new_id` by its name, because the ids of two generators could be out of order."""
        return "new_id"

    def reset(self) -> None:
        """Forget the last id and the lock: in a forked child they still belong to its parent."""
        self._lock = threading.Lock()
        self._last = 0

    def __call__(self) -> str:
        random = int.from_bytes(os.urandom(10), "big")
        with self._lock:
            now = self._clock_ns() // 1_000_000
            if now > self._last >> _RANDOM_BITS:
                # One bit stays free, so that many ids fit into a millisecond.
                number = now << _RANDOM_BITS | random >> 7
            else:
                number = self._last + 1 + (random & 0xFFFF_FFFF)
            self._last = number
        high, low = number >> 62, number & 0x3FFF_FFFF_FFFF_FFFF
        digits = f"{high >> 12:012x}7{high & 0xFFF:03x}{low | 1 << 63:016x}"
        return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


new_id: Final = IdGenerator()
after_fork(new_id.reset)


@dataclass(frozen=True, slots=True)
class ParsedCheckpointId:
    """The parts of a step checkpoint id."""

    session_id: str
    step_count: int
    epoch_ms: int
    random: str


def checkpoint_id(session_id: str, step_count: int, epoch_ms: int | None = None) -> str:
    """Return a new step checkpoint id for the time `epoch_ms`, by default now."""
    identifier(session_id, "session_id")
    whole_number(step_count, "step_count")
    if epoch_ms is None:
        epoch_ms = time.time_ns() // 1_000_000
    else:
        whole_number(epoch_ms, "epoch_ms")
    return CHECKPOINT_ID.format(
        session_id=session_id, step_count=step_count, epoch_ms=epoch_ms, random=os.urandom(3).hex()
    )


def parse_checkpoint_id(text: str) -> ParsedCheckpointId:
    """Return the parts of a step checkpoint id, read from the right because session ids may contain ``-``."""
    match = _CHECKPOINT_ID.fullmatch(text) if type(text) is str else None
    if match is None:
        raise InvalidPayload(path="checkpoint_id", reason="not a step checkpoint id")
    session_id, step_count, epoch_ms, random = match.groups()
    return ParsedCheckpointId(identifier(session_id, "checkpoint_id"), int(step_count), int(epoch_ms), random)
