"""Notice when the machine stood still: after a pause longer than a lease, two holders look like one too many.

A test that waits for a lease uses the fixture ``machine``. If it fails after a pause, its report says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from typing import Final

import pytest

__all__ = ["Machine", "machine", "pytest_runtest_makereport"]

_TICK_SECONDS: Final = 0.05
_WORTH_SAYING_SECONDS: Final = 1.0


class Machine:
    """The longest time during which no thread of this process ran."""

    def __init__(self) -> None:
        self.longest_pause = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch of the machine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        # A machine that is suspended may stop one clock and not the other.
        before = time.monotonic(), time.time()
        while not self._ended.wait(_TICK_SECONDS):
            now = time.monotonic(), time.time()
            self.longest_pause = max(self.longest_pause, now[0] - before[0], now[1] - before[1])
            before = now


_MACHINE: Final = pytest.StashKey[Machine]()


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Watch the machine during a test."""
    watched = request.node.stash[_MACHINE] = Machine()
    watched.start()
    yield watched
    watched.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    watched = item.stash.get(_MACHINE, None)
    if report.failed and watched is not None and watched.longest_pause > _WORTH_SAYING_SECONDS:
        text = f"It stood still for {watched.longest_pause:.1f} s: a shorter lease ended meanwhile."
        report.sections.append(("The machine", text))
    return report
