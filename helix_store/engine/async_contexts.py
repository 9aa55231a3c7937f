"""Context managers for ``with`` and ``async with``: one body, which the async form runs in a thread."""

from __future__ import annotations

import asyncio
import functools
from types import TracebackType
from typing import Self, TypeVar

from helix_store.engine.async_twins import in_thread_to_the_end

R = TypeVar("R")


class BothContexts:
    """A base that adds ``async with`` to a class with ``__enter__`` and ``__exit__``. ``__exit__`` must do
    nothing if the object was not entered, because a cancelled ``async with`` also calls it.
    """

    def __enter__(self) -> Self:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        try:
            return await in_thread_to_the_end(self.__enter__)
        except asyncio.CancelledError as error:
            # Nothing else releases what was acquired on entry, such as the lock of a turn.
            await in_thread_to_the_end(
                functools.partial(self.__exit__, type(error), error, error.__traceback__)
            )
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return await in_thread_to_the_end(functools.partial(self.__exit__, kind, error, trace))
