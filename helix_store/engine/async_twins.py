"""The async twin of a synchronous method or context manager, built by one helper without a second body."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import itertools
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, Self, TypeVar

from asgiref.sync import sync_to_async
from django.db import close_old_connections

from helix_store import conf
from helix_store.core.ids import PerProcess
from helix_store.engine.tasks import (
    Obstacle,
    find_obstacle,
    note_transactions_of,
    passing,
    require_open_block,
)
from helix_store.engine.threads import (
    find_djangos_thread,
    find_parked_caller,
    keep_open,
    return_to_pool_after,
)
from helix_store.exceptions import HelixStoreError, OutsideTransaction, StoreBusy

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_ITEMS_PER_CROSSING = 100
"""Switching to a thread costs more than an item; batches keep memory use constant."""
_LONGEST_HANDOVER_SECONDS = 1.0


def is_async(call: Callable[..., Any]) -> bool:
    """Return whether this is a coroutine function, or an object whose ``__call__`` is one."""
    of_object = getattr(call, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(of_object)


def async_twin(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Build ``a<name>`` from ``<name>``: the same call, run in a thread that may block.

    By default, this is Django's thread for synchronous code, so a twin joins the transaction of a caller that
    uses ``async_to_sync``. If that thread is waiting for the event loop, the loop's own pool is used. With
    ``HELIX_STORE["ASYNC_THREADS"] = n``, calls run in a pool of ``n`` threads. If the caller is cancelled, it
    is told after the call has ended.
    """

    return _twin(method, in_thread_to_the_end)


def async_twin_of_an_end(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Build ``a<name>`` from ``<name>`` as `async_twin` does; `in_thread_at_the_end` makes the call."""
    return _twin(method, in_thread_at_the_end)


def _twin(
    method: Callable[Concatenate[S, P], R], make: Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    @functools.wraps(method)
    async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        made: R = await make(partial(method, self, *args, **kwargs))
        return made

    twin.__name__ = f"a{method.__name__}"
    twin.__qualname__ = f"{method.__qualname__.rpartition('.')[0]}.{twin.__name__}"
    twin.__doc__ = f"Async version of `{method.__name__}`."
    return twin


def async_iterator_twin(
    method: Callable[Concatenate[S, P], Iterator[R]],
) -> Callable[Concatenate[S, P], AsyncIterator[R]]:
    """Build ``aiter_…`` from ``iter_…``: it fetches a batch of items for each switch to a thread."""

    @functools.wraps(method)
    async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[R]:
        iterator = await in_thread_to_the_end(partial(method, self, *args, **kwargs))
        take = partial(itertools.islice, iterator, _ITEMS_PER_CROSSING)
        while batch := await in_thread_to_the_end(lambda: list(take())):
            for item in batch:
                yield item

    twin.__name__ = f"a{method.__name__}"
    twin.__doc__ = f"Async version of `{method.__name__}`."
    return twin


class BothContexts:
    """A base class that adds ``async with`` to a class with ``__enter__`` and ``__exit__``."""

    def __enter__(self) -> Self:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        entered: list[Self] = []
        try:
            await self._begin_in_thread(lambda: entered.append(self.__enter__()))
        except asyncio.CancelledError as error:
            if entered:
                # Nothing else releases what was acquired on entry, such as the lock of a turn. The task is
                # told that it was cancelled, not what the way out has raised.
                with suppress(HelixStoreError):
                    await self._end_in_thread(partial(self.__exit__, type(error), error, error.__traceback__))
            raise
        return entered[0]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            if error is None:
                require_open_block()
        except OutsideTransaction as refusal:
            # Nothing that it stores now would be part of the block: it ends as if the block had raised this.
            with suppress(HelixStoreError):
                await self._end_in_thread(
                    partial(self.__exit__, type(refusal), refusal, refusal.__traceback__)
                )
            raise
        return await self._end_in_thread(partial(self.__exit__, kind, error, trace))

    async def _begin_in_thread(self, enter: Callable[[], R]) -> R:
        return await in_thread_to_the_end(enter)

    async def _end_in_thread(self, leave: Callable[[], bool]) -> bool:
        return await in_thread_at_the_end(leave)


async def in_thread(call: Callable[[], R]) -> R:
    """Make a call in a thread that may block. Raises `OutsideTransaction` if the caller blocks this thread or
    Django's and has a transaction open there, and `StoreBusy` if another task has one open in Django's thread
    for too long.
    """
    return await _made_in(_choose_thread(), call)


def in_callers_thread(call: Callable[[], R]) -> R:
    """Make a call in the thread that waits in ``async_to_sync`` for this context; if there is none, make it
    here. Synchronous code of an async run can join the transaction of its caller in this way.
    """
    parked = None if conf.async_threads() else find_parked_caller()
    if parked is None:
        return call()
    future = parked.submit(contextvars.copy_context().run, call)
    try:
        return future.result(_LONGEST_HANDOVER_SECONDS)
    except TimeoutError:
        # In the meantime, the thread has begun something else, which may wait for this thread.
        if future.cancel():
            return call()
        return future.result()


class _Thread(NamedTuple):
    """Where to make a call: in Django's thread, or in a pool with this number of threads."""

    is_djangos: bool
    threads: int


def is_in_djangos_thread() -> bool:
    """Return whether one thread makes all calls of this context, so that they can share a transaction."""
    return _choose_thread().is_djangos


def _choose_thread() -> _Thread:
    require_open_block()
    threads, djangos = conf.async_threads(), find_djangos_thread()
    # Also if this call joins the transaction: code of this context that runs in other threads cannot.
    note_transactions_of({threading.get_ident(), djangos.caller})
    return _Thread(not threads and not djangos.is_blocked, threads)


async def _as_it_is(work: Coroutine[Any, Any, T]) -> T:
    return await work


async def _made_in(
    thread: _Thread, call: Callable[[], R], await_work: Callable[..., Coroutine[Any, Any, Any]] = _as_it_is
) -> R:
    if thread.is_djangos:
        return await _in_djangos_thread(call, await_work)
    made: R = await await_work(_in_pool(thread.threads, call))
    return made


async def _in_djangos_thread(
    call: Callable[[], R], await_work: Callable[..., Coroutine[Any, Any, Any]] = _as_it_is
) -> R:
    """Make a call in Django's thread, but not in a transaction that another task has open there. Raises
    `StoreBusy` if the call has to wait for the transaction for too long.

    While it waits, nothing has begun: a caller that is cancelled is told at once.
    """
    began = time.monotonic()
    attempt = sync_to_async(_unless_taken, thread_sensitive=True)
    made: R | Obstacle = await await_work(attempt(call))
    while isinstance(made, Obstacle):
        if made.passing_threads:
            passed: R = await await_work(_in_pool(made.passing_threads, partial(passing, call)))
            return passed
        await made.block.wait_for_end(began)
        made = await await_work(attempt(call))
    return made


async def _in_pool(threads: int, call: Callable[[], R]) -> R:
    # The event loop's pool ends with the loop, and no thread in that pool waits for this loop.
    pool = _pools.get()(threads) if threads and not _is_pooled.get() else None
    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(pool, context.run, _releasing_connections, call)


async def in_thread_to_the_end(call: Callable[[], R]) -> R:
    """Make a call with `in_thread`; if the caller is cancelled after its begin, it is told after its end.
    Otherwise the caller would continue while a transaction that it believes to be stopped is committed, on a
    connection that its next call would share.
    """
    # A transaction is noted in the context of the caller, not in that of a task.
    return await _made_in(_choose_thread(), call, _to_the_end)


async def in_thread_at_the_end(call: Callable[[], R]) -> R:
    """Make a call that ends something, as `in_thread_to_the_end` does, but make it in any case: it also stops
    threads, for example. If it cannot be made outside of the block of another task, it stores nothing there.
    """
    try:
        thread = _choose_thread()
    except OutsideTransaction:
        thread = _Thread(is_djangos=True, threads=0)
    return await _to_the_end(_made_in_any_case(thread, call))


async def _made_in_any_case(thread: _Thread, call: Callable[[], R]) -> R:
    is_begun = False

    def begun() -> R:
        nonlocal is_begun
        is_begun = True
        return call()

    try:
        return await _made_in(thread, begun)
    except (OutsideTransaction, StoreBusy) as refusal:
        if is_begun:
            raise
        # In the block of another task, each statement raises `OutsideTransaction`.
        try:
            return await sync_to_async(_keeping_connections, thread_sensitive=True)(call)
        except OutsideTransaction:
            raise refusal from None


async def begin_in_djangos_thread(call: Callable[[], R]) -> R:
    """Begin a transaction in Django's thread, which `is_in_djangos_thread` has found. It does not choose a
    thread again: a call of another event loop that has begun there in the meantime ends by itself.
    """
    return await _in_djangos_thread(call, _to_the_end)


async def in_djangos_thread_to_the_end(call: Callable[[], R]) -> R:
    """End a transaction in Django's thread, even while another task has one open in it."""
    return await _to_the_end(sync_to_async(_keeping_connections, thread_sensitive=True)(call))


async def _to_the_end(work: Coroutine[Any, Any, R]) -> R:
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        with _shielded_from_anyio():
            while not running.done():
                # The task was cancelled again: the outcome is still open.
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
        if not running.cancelled():
            # Retrieve it, so that asyncio does not report an exception that was never retrieved.
            running.exception()
        raise


def _shielded_from_anyio() -> AbstractContextManager[object]:
    """Return a scope in which anyio, if it is in use, does not cancel a waiting task again in every loop
    turn. Anyio repeats a cancellation until the task has left the cancelled scope, which would keep a
    processor busy.
    """
    anyio = sys.modules.get("anyio")
    return nullcontext() if anyio is None else anyio.CancelScope(shield=True)


def _new_pools() -> Callable[[int], ThreadPoolExecutor]:
    """Return a pool for each number of threads, created on first use."""
    return functools.cache(lambda threads: ThreadPoolExecutor(threads, thread_name_prefix="helix_store"))


_pools: Final = PerProcess(_new_pools)


def _unless_taken(call: Callable[[], R]) -> R | Obstacle:
    """Make a call unless another task has a transaction open in this thread."""
    # No task can open one while the call runs.
    return find_obstacle() or _keeping_connections(call)


def _keeping_connections(call: Callable[[], R]) -> R:
    # This is Django's thread for synchronous code; Django closes its connections after the request.
    with return_to_pool_after():
        return call()


_is_pooled: Final[ContextVar[bool]] = ContextVar("helix_store_is_pooled", default=False)
"""True while a call runs in a pool: a signal receiver in the call, for example, must not wait for it."""


def _releasing_connections(call: Callable[[], R]) -> R:
    _is_pooled.set(True)
    # No request ends in these threads, so Django neither applies CONN_MAX_AGE nor refills its pool there.
    try:
        with keep_open():
            return call()
    finally:
        close_old_connections()
