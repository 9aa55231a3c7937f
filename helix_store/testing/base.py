"""The common base class of all suites."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeVar

T = TypeVar("T")

_PATIENCE_SECONDS: Final = 60.0


class SuiteTests:
    """Hooks that a back end may override for every suite, and a way to make calls in several threads."""

    def storage_untouched(self) -> AbstractContextManager[None]:
        """Return a context that fails if storage is used inside it. By default nothing is watched."""
        return nullcontext()

    def leave_thread(self) -> None:
        """Release the resources of a thread. The suite calls this at the end of each of its threads."""

    def at_once(self, *calls: Callable[[], T]) -> list[T]:
        """Make calls at the same time, each in its own thread, and return their results in order.

        Raises `threading.BrokenBarrierError` if one of the threads does not start.
        """
        start = threading.Barrier(len(calls), timeout=_PATIENCE_SECONDS)

        def result(call: Callable[[], T]) -> T:
            try:
                start.wait()
                return call()
            finally:
                self.leave_thread()

        interval = sys.getswitchinterval()
        # With Python's default interval, a call that takes a millisecond ends before another thread runs.
        # Under a debugger or coverage, it is not changed: Python 3.11 refuses trace functions to threads that
        # begin at once.
        if sys.gettrace() is None:
            sys.setswitchinterval(1e-5)
        try:
            with ThreadPoolExecutor(len(calls)) as pool:
                return list(pool.map(result, calls))
        finally:
            sys.setswitchinterval(interval)
