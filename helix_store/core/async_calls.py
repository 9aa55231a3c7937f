"""The declaration of the async version of a protocol's call."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

__all__ = ["async_version_of"]

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def async_version_of(
    call: Callable[Concatenate[S, P], R],
) -> Callable[[Callable[[S], None]], Callable[Concatenate[S, P], Coroutine[Any, Any, R]]]:
    """Declare a method with the parameters and the result of a call.

    The decorated method determines the name.
    """

    def declared(named: Callable[[S], None]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
        @wraps(call)
        async def version(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            raise NotImplementedError

        version.__name__, version.__qualname__ = named.__name__, named.__qualname__
        return version

    return declared
