"""The async twin of a synchronous method: one helper, no second body."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.db import close_old_connections

from helix_store import conf
from helix_store.core.processes import PerProcess
from helix_store.engine.connections import keep_open

__all__ = ["async_iterator_twin", "async_twin", "in_thread", "in_thread_to_the_end"]

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")

_ITEMS_PER_CROSSING = 100
"""Crossing into a thread costs more than an item; a batch keeps memory constant."""


def async_twin(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Build ``a<name>`` from ``<name>``: the same call, run in a thread that may block.

    By default that is Django's thread for synchronous code, so that a twin is part of the caller's
    transaction. With ``HELIX_STORE["ASYNC_THREADS"] = n`` calls run on a pool of ``n`` threads. A cancelled
    caller is told so after the call has ended.
    """

    @functools.wraps(method)
    async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await in_thread_to_the_end(functools.partial(method, self, *args, **kwargs))

    twin.__name__ = f"a{method.__name__}"
    twin.__qualname__ = f"{method.__qualname__.rpartition('.')[0]}.{twin.__name__}"
    twin.__doc__ = f"Async version of `{method.__name__}`."
    return twin


def async_iterator_twin(
    method: Callable[Concatenate[S, P], Iterator[R]],
) -> Callable[Concatenate[S, P], AsyncIterator[R]]:
    """Build ``aiter_…`` from ``iter_…``: a batch of items per crossing into a thread that may block."""

    @functools.wraps(method)
    async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[R]:
        iterator = await in_thread_to_the_end(functools.partial(method, self, *args, **kwargs))
        while batch := await in_thread_to_the_end(lambda: _next_items(iterator)):
            for item in batch:
                yield item

    twin.__name__ = f"a{method.__name__}"
    twin.__doc__ = f"Async version of `{method.__name__}`."
    return twin


def _next_items(iterator: Iterator[R]) -> list[R]:
    return list(itertools.islice(iterator, _ITEMS_PER_CROSSING))


async def in_thread(call: Callable[[], R]) -> R:
    threads = conf.async_threads()
    if not threads:
        return await sync_to_async(_keeping_connections, thread_sensitive=True)(call)
    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_pools.get()(threads), context.run, _releasing_connections, call)


async def in_thread_to_the_end(call: Callable[[], R]) -> R:
    """`in_thread`, where a cancelled caller is told so when the call has ended, not before.

    Else the caller would go on while a transaction that it believes to be stopped is committed, on a
    connection that its next call would share.
    """
    running = asyncio.ensure_future(in_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        with _shielded_from_anyio():
            while not running.done():
                # Cancelled again: the outcome is still open.
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
        if not running.cancelled():
            # Read, so that asyncio does not report an error that nobody asked for.
            running.exception()
        raise


def _shielded_from_anyio() -> AbstractContextManager[object]:
    """Where anyio is in use: a scope in which it does not cancel a task that waits in every turn of the loop.

    It repeats a cancellation until the task has left the cancelled scope, and would keep a processor busy.
    """
    anyio = sys.modules.get("anyio")
    return nullcontext() if anyio is None else anyio.CancelScope(shield=True)


def _new_pools() -> Callable[[int], ThreadPoolExecutor]:
    """A pool for each number of threads, created at its first use."""
    return functools.cache(lambda threads: ThreadPoolExecutor(threads, thread_name_prefix="helix_store"))


_pools: Final = PerProcess(_new_pools)


def _keeping_connections(call: Callable[[], R]) -> R:
    # This is Django's thread for synchronous code; Django closes its connections after the request.
    with keep_open():
        return call()


def _releasing_connections(call: Callable[[], R]) -> R:
    # No request ends on these threads, so Django neither applies CONN_MAX_AGE nor refills its pool there.
    try:
        with keep_open():
            return call()
    finally:
        close_old_connections()
