"""Signatures that are written down once: those of async versions, and of the lists of sessions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from helix_store.core.types import UNSET, SessionPage, SessionStatus, Timestamp, Unset, UserId

S = TypeVar("S")
R = TypeVar("R")
P = ParamSpec("P")


def async_version_of(
    call: Callable[Concatenate[S, P], R],
) -> Callable[[Callable[[S], None]], Callable[Concatenate[S, P], Coroutine[Any, Any, R]]]:
    """Declare a method with the parameters and the result of a call.

    The decorated method's name is kept.
    """

    def declared(named: Callable[[S], None]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
        @wraps(call)
        async def version(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            raise NotImplementedError

        version.__name__, version.__qualname__ = named.__name__, named.__qualname__
        return version

    return declared


# --- Lists of sessions: filters, order and page -----------------------------------------------------


def _list_sessions(
    self: object,
    *,
    agent_type: str | None = None,
    status: SessionStatus | str | Collection[SessionStatus | str] | None = None,
    user_id: UserId | None = None,
    parent_session_id: str | Unset | None = UNSET,
    root_session_id: str | None = None,
    workspace_id: str | None = None,
    tags: Iterable[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    created_from: Timestamp | None = None,
    created_to: Timestamp | None = None,
    order_by: str = "updated_at",
    direction: str = "desc",
    limit: int = 50,
    offset: int = 0,
    cursor: str | None = None,
    count: bool = True,
) -> SessionPage:
    raise NotImplementedError


_SIGNATURE: Final = inspect.signature(_list_sessions)
_DEFAULTS: Final = {name: each.default for name, each in _SIGNATURE.parameters.items() if name != "self"}

SESSION_FILTERS: Final = tuple(_DEFAULTS)
"""The names of the parameters, for interfaces that offer all of them."""


def _with_parameters_of(
    described: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    def decorated(method: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        @wraps(method)
        def call(self: Any, /, *args: P.args, **given: P.kwargs) -> R:
            if args or not given.keys() <= _DEFAULTS.keys():
                _SIGNATURE.bind(self, *args, **given)  # This raises the same TypeError as an ordinary call
            return method(self, **{**_DEFAULTS, **given})

        call.__signature__ = _SIGNATURE  # type: ignore[attr-defined]  # what `inspect.signature` returns
        return call

    return decorated


takes_session_filters: Final = _with_parameters_of(_list_sessions)
"""Give a method the parameters of ``list_sessions``; its body receives every parameter by keyword."""
