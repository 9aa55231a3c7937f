"""The filters, the order and the page of a list of sessions, described once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from helix_store.core.types import UNSET, SessionPage, SessionStatus, Timestamp, Unset, UserId

__all__ = ["SESSION_FILTERS", "takes_session_filters"]

R = TypeVar("R")
P = ParamSpec("P")


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
"""The names of the parameters, for interfaces that offer each of them."""


def _with_parameters_of(
    described: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    def decorated(method: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        @wraps(method)
        def call(self: Any, /, *args: P.args, **given: P.kwargs) -> R:
            if args or not given.keys() <= _DEFAULTS.keys():
                _SIGNATURE.bind(self, *args, **given)  # raises the same TypeError as an ordinary call
            return method(self, **{**_DEFAULTS, **given})

        call.__signature__ = _SIGNATURE  # type: ignore[attr-defined]  # what `inspect.signature` returns
        return call

    return decorated


takes_session_filters: Final = _with_parameters_of(_list_sessions)
"""Give a method the parameters of ``list_sessions``; its body gets every parameter by keyword."""
