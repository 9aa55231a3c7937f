"""Giving connections back from threads that nobody else does it for.

Django closes a thread's connections when a request ends there. A thread of an agent framework's executor, or
one that the project started itself, never ends a request: each would keep a connection for its whole life.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from django.core.signals import request_finished, request_started
from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["given_back", "kept_by_the_caller", "kept_together", "watch_requests"]

_requests: Final = threading.local()
_is_kept: ContextVar[bool] = ContextVar("helix_store_connection_is_kept", default=False)


@contextmanager
def given_back(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """After the call, close what the end of a request would, unless somebody looks after the thread.

    Like Django at the end of a request this honours ``CONN_MAX_AGE`` and returns a pooled connection. A
    connection in an atomic block is the caller's.
    """
    try:
        yield
    finally:
        if not (connection.in_atomic_block or _is_looked_after()):
            connection.close_if_unusable_or_obsolete()


@contextmanager
def kept_by_the_caller() -> Iterator[None]:
    """Leave connections open: whoever brought the call to this thread looks after them."""
    token = _is_kept.set(True)
    try:
        yield
    finally:
        _is_kept.reset(token)


@contextmanager
def kept_together(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Give the connection back after the last of several calls, and not after each."""
    with given_back(connection), kept_by_the_caller():
        yield


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
