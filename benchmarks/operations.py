"""What a worker process does in a leg, again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.test.utils import override_settings

__all__ = ["MakeOperation", "Operation", "WithSettings"]


class Operation:
    """One worker's part in a leg, made by ``make(worker)`` in the worker's own process."""

    def prepare(self, count: int) -> None:
        """Get ready for so many calls; not timed."""

    def __call__(self) -> object:
        raise NotImplementedError

    def run(self, count: int) -> None:
        for _ in range(count):
            self()

    def check(self) -> None:
        """Fail unless the last calls did what they are measured for; not timed."""

    def report(self) -> object:
        """What there is to say beyond the time, if anything."""

    def close(self) -> None:
        """Give back what the operation holds."""


MakeOperation = Callable[[int], Operation]
"""Picklable, so that a worker process can be asked for it."""


class WithSettings(Operation):
    """Another operation under other values of ``HELIX_STORE``."""

    def __init__(self, worker: int, *, make: MakeOperation, **helix_store: Any) -> None:
        self.operation = make(worker)
        self.helix_store = helix_store

    def prepare(self, count: int) -> None:
        with override_settings(HELIX_STORE=self.helix_store):
            self.operation.prepare(count)

    def run(self, count: int) -> None:
        with override_settings(HELIX_STORE=self.helix_store):
            self.operation.run(count)

    def check(self) -> None:
        self.operation.check()

    def close(self) -> None:
        self.operation.close()
