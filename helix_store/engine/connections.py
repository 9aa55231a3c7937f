"""Giving connections back from threads that nobody else does it for.

Django closes a thread's connections when a request ends there. A thread of an agent framework's executor, or
one that the project started itself, never ends a request: each would keep a connection for its whole life.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Any, Final

from django.core.signals import request_finished, request_started
from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["given_back", "kept_by_the_caller", "kept_together", "watch_requests"]

_requests: Final = threading.local()
_is_kept: ContextVar[bool] = ContextVar("helix_store_connection_is_kept", default=False)


class given_back:
    """After the call, close what the end of a request would, unless somebody looks after the thread.

    Like Django at the end of a request this honours ``CONN_MAX_AGE`` and returns a pooled connection. A
    connection in an atomic block is the caller's.
    """

    __slots__ = ("_connection",)

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        connection = self._connection
        if not (connection.in_atomic_block or _is_looked_after()):
            connection.close_if_unusable_or_obsolete()


class kept_by_the_caller:
    """Leave connections open: whoever brought the call to this thread looks after them."""

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = _is_kept.set(True)

    def __exit__(self, *exc_info: object) -> None:
        _is_kept.reset(self._token)


class kept_together(kept_by_the_caller):
    """Give the connection back after the last of several calls, and not after each."""

    __slots__ = ("_given_back",)

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._given_back = given_back(connection)

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__()
        self._given_back.__exit__()


def watch_requests() -> None:
    """Know which threads serve a request of Django; called once, when the app is ready."""
    request_started.connect(_begin_request, dispatch_uid="helix_store.connections")
    request_finished.connect(_end_request, dispatch_uid="helix_store.connections")


def _begin_request(**kwargs: Any) -> None:
    _requests.is_served = True


def _end_request(**kwargs: Any) -> None:
    _requests.is_served = False


def _is_looked_after() -> bool:
    if threading.current_thread() is threading.main_thread():
        return True
    return _is_kept.get() or getattr(_requests, "is_served", False)
