"""The threads that read for streams: one that has an item while another one gives up waiting (E10).

Tied to the hand-made threads of 5a5ce78, which block for good in this schedule. It is skipped where their
module is gone.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any, Final

import pytest

PATIENCE_SECONDS: Final = 5.0


def hand_made_threads() -> Any:
    module = pytest.importorskip("helix_store.stores.database.reading_threads")
    return module.ReadingThreads()


class StallingQueue(queue.SimpleQueue[Any]):
    """Once armed, a thread that has an item goes on only when another one has given up and looks again."""

    def __init__(self) -> None:
        super().__init__()
        self.is_armed = False
        self._looked_again = threading.Event()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if timeout is None:
            self._looked_again.set()
        item = super().get(block, timeout)
        if self.is_armed and timeout is not None:
            self.is_armed = False
            self._looked_again.wait(2.0)
        return item


async def test_a_thread_that_gives_up_waiting_does_not_block_the_one_that_has_the_item() -> None:
    threads = hand_made_threads()
    stalling = threads._queue = StallingQueue()
    both_work = threading.Barrier(2)
    await asyncio.gather(*(threads.run(name, lambda: both_work.wait(PATIENCE_SECONDS)) for name in "ab"))

    stalling.is_armed = True
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await threads.run("c", lambda: "read") == "read"
        assert await threads.run("d", lambda: "read again") == "read again"
