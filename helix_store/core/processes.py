"""The hook for forks, and values that a forked child creates anew."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


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
