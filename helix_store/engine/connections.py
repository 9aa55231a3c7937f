"""Releasing connections of threads that Django does not manage.

Django closes a thread's connections when a request ends there. A thread of an agent framework's executor,
or one that the project started, never ends a request: each would keep a connection for its whole life.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from django.core.signals import request_finished, request_started
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.engine.forks import note_use

__all__ = [
    "after_commit",
    "keep_open",
    "release",
    "release_after",
    "release_once",
    "return_to_pool",
    "watch_requests",
]

# Not a context variable: a thread that copies the context of a request does not serve that request.
_requests: Final = threading.local()
_is_kept_open: ContextVar[bool] = ContextVar("helix_store_connection_is_kept_open", default=False)


def release(connection: BaseDatabaseWrapper) -> None:
    """Close what the end of a request would close, in a thread that Django does not manage.

    As at the end of a request, this honours ``CONN_MAX_AGE`` and returns a pooled connection. A connection
    with an open transaction stays: it belongs to the caller, in an ``atomic()`` block or with autocommit
    off.
    """
    note_use(connection.alias)
    if connection.in_atomic_block or _is_managed():
        return
    if connection.connection is None or connection.autocommit:
        connection.close_if_unusable_or_obsolete()


def after_commit(connection: BaseDatabaseWrapper, call: Callable[[], object]) -> None:
    """Make a call after the commit of the open transaction; at once outside a block."""
    if connection.in_atomic_block:
        transaction.on_commit(call, using=connection.alias, robust=True)
    else:
        # Outside a block, on_commit() would open a connection only to ask for its autocommit.
        call()


class release_after:
    """`release` the connection at the end of a ``with`` block."""

    __slots__ = ("_connection",)

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        release(self._connection)


class keep_open:
    """Leave connections open in a ``with`` block: the caller of the thread releases them."""

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = _is_kept_open.set(True)

    def __exit__(self, *exc_info: object) -> None:
        _is_kept_open.reset(self._token)


class release_once(keep_open):
    """`release` the connection once after several calls, and not after each."""

    __slots__ = ("_connection",)

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__()
        release(self._connection)


def return_to_pool(connection: BaseDatabaseWrapper) -> None:
    """Return a pooled connection; keep any other one open.

    For a background thread between two uses: it must not occupy a place in a small pool while it waits.
    """
    if connection.settings_dict["OPTIONS"].get("pool"):
        connection.close()


def watch_requests() -> None:
    """Know which threads serve a request of Django; called once, when the app is ready."""
    request_started.connect(_begin_request, dispatch_uid="helix_store.connections")
    request_finished.connect(_end_request, dispatch_uid="helix_store.connections")


def _begin_request(**kwargs: Any) -> None:
    _requests.is_served = True


def _end_request(**kwargs: Any) -> None:
    _requests.is_served = False


def _is_managed() -> bool:
    """Whether the end of a request, the process or a caller releases this thread's connections."""
    if threading.current_thread() is threading.main_thread():
        return True
    return _is_kept_open.get() or getattr(_requests, "is_served", False)
