"""What a process remembers for a while: in so much memory, and what was used last.

Nothing may be decided by it: other processes write too, and what is forgotten has to be read again.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Final, Generic, TypeVar
from weakref import WeakSet

__all__ = ["Recent"]

V = TypeVar("V")

_LARGEST_SHARE: Final = 2
"""One value may take half of the room."""


class Recent(Generic[V]):
    """Values by place, those used last, within so many bytes. Safe to use from any thread.

    ``lock`` makes several calls one.
    """

    lock: threading.RLock
    size: int
    """The bytes of what is remembered."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.reset()
        _all.add(self)

    def reset(self) -> None:
        """Forget everything and the lock, as a forked child must: its parent may have held it."""
        self.lock = threading.RLock()
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self.size = 0

    def get(self, place: Hashable) -> V | None:
        with self.lock:
            if place not in self._values:
                return None
            self._values.move_to_end(place)
            return self._values[place][0]

    def put(self, place: Hashable, value: V, size: int) -> None:
        """Remember a value of so many bytes in place of an earlier one, unless it is too large."""
        with self.lock:
            self.take(place)
            if size * _LARGEST_SHARE > self._most_bytes:
                return
            self._values[place] = (value, size)
            self.size += size
            while self.size > self._most_bytes:
                self.take(next(iter(self._values)))

    def take(self, place: Hashable) -> V | None:
        """Forget a value and return it."""
        with self.lock:
            value, size = self._values.pop(place, (None, 0))
            self.size -= size
            return value


_all: Final[WeakSet[Recent[Any]]] = WeakSet()


def _reset_all() -> None:
    for recent in _all:
        recent.reset()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_reset_all)
