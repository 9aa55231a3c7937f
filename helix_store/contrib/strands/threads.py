"""Blocking calls in the thread of a running event loop, which Django refuses. Strands calls a repository from
hooks without ``await``, in the thread of the event loop that runs the agent.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from helix_store.core.processes import PerProcess

R = TypeVar("R")

_threads: Final = PerProcess(lambda: ThreadPoolExecutor(thread_name_prefix="helix_store_strands"))


def beside_the_loop(call: Callable[[], R]) -> R:
    """Make a call in this thread, or in another one if an event loop runs here, and wait for its end."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    return _threads.get().submit(contextvars.copy_context().run, call).result()
