"""The connection of a call: taken when the call enters the engine, and released when it ends.

A connection belongs to a thread, so a call cannot join the transaction of a caller that waits for it in
another thread. If it ran, it would commit even if the caller rolls back, or wait forever for rows that the
caller has locked.

Django closes a thread's connections when a request ends there. A thread of an agent framework's executor, or
one that the project started, never ends a request, so it would keep its connection forever.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary, ref

from django.core.signals import request_finished, request_started
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.engine.forks import opened_connections
from helix_store.exceptions import OutsideTransaction

# This is not a context variable: a thread that copies the context of a request does not serve that request.
_requests: Final = threading.local()
_opened_by_calls: Final[WeakKeyDictionary[BaseDatabaseWrapper, ref[Any]]] = WeakKeyDictionary()
"""The driver's connection that a call has opened, until the call ends."""
is_kept_open: ContextVar[bool] = ContextVar("helix_store_connection_is_kept_open", default=False)


class _Block(NamedTuple):
    """The outermost ``atomic()`` of a connection, with weak references because contexts may live long."""

    connection: ref[Any]
    block: ref[Any]

    def is_open(self) -> bool:
        connection, block = self.connection(), self.block()
        return connection is not None and block is not None and _outermost(connection) is block


# Executors of agent frameworks copy the context of the thread that waits for them.
open_blocks: Final[ContextVar[Mapping[str, _Block]]] = ContextVar(
    "helix_store_open_blocks",
    default=MappingProxyType({}),
)


def require_thread_of_caller(connection: BaseDatabaseWrapper) -> None:
    """Raise `OutsideTransaction` if a caller has a transaction of this database open in another thread.

    A caller is recognised by its context: through a call in its block, or through `note_transactions_of`.
    """
    blocks = open_blocks.get()
    known = blocks.get(connection.alias)
    if known is not None and known.is_open():
        if known.connection() is not connection:
            raise OutsideTransaction
    elif connection.in_atomic_block:
        _note(connection)
    elif known is not None:
        open_blocks.set({alias: block for alias, block in blocks.items() if block is not known})


def note_transactions_of(threads: Collection[int]) -> None:
    """Record the open transactions of threads that wait for this context; ``threads`` are thread idents."""
    for connection in opened_connections():
        if connection.in_atomic_block and connection._thread_ident in threads:  # type: ignore[attr-defined]
            _note(connection)


def _note(connection: BaseDatabaseWrapper) -> None:
    block = _outermost(connection)
    if block is not None:
        open_blocks.set({**open_blocks.get(), connection.alias: _Block(ref(connection), ref(block))})


def _outermost(connection: Any) -> object | None:
    # Another thread may end the block in the meantime.
    return next(iter(connection.atomic_blocks), None)


def release(connection: BaseDatabaseWrapper) -> None:
    """Close what the end of a request would close, in a thread that Django does not manage.

    As at the end of a request, this honours ``CONN_MAX_AGE`` and returns a pooled connection. A connection
    with an open transaction stays open: it belongs to the caller, in an ``atomic()`` block or with autocommit
    off.

    The main thread returns a pooled connection that a call of the store has opened, because it may run for
    hours, and a small pool cannot spare the connection.
    """
    if connection.in_atomic_block or is_kept_open.get():
        return
    if _is_managed():
        _return_what_calls_opened(connection)
        return
    if connection.connection is None or connection.autocommit:
        connection.close_if_unusable_or_obsolete()


def note_opened_by_call(connection: BaseDatabaseWrapper) -> None:
    """Record that a call of the store, not other code in its thread, has taken a pooled connection."""
    if connection.settings_dict["OPTIONS"].get("pool"):
        _opened_by_calls[connection] = ref(connection.connection)


def _return_what_calls_opened(connection: BaseDatabaseWrapper) -> None:
    if not connection.settings_dict["OPTIONS"].get("pool"):
        return
    opened = _opened_by_calls.pop(connection, None)
    is_ours = opened is not None and opened() is connection.connection
    if is_ours and connection.autocommit and not getattr(_requests, "is_served", False):
        return_to_pool(connection)


@contextmanager
def keep_open() -> Iterator[None]:
    """Leave connections open in a ``with`` block, because the caller of the thread releases them."""
    token = is_kept_open.set(True)
    try:
        yield
    finally:
        is_kept_open.reset(token)


@contextmanager
def return_to_pool_after() -> Iterator[None]:
    """Leave connections open in a ``with`` block, then return the pooled ones that calls in it have opened.

    Use this for one of Django's threads outside of requests, where nothing else closes its connections.
    """
    try:
        with keep_open():
            yield
    finally:
        for connection in connections.all(initialized_only=True):
            if not connection.in_atomic_block:
                _return_what_calls_opened(connection)


@contextmanager
def release_once(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """`release` the connection once after several calls instead of after each one."""
    try:
        with keep_open():
            yield
    finally:
        release(connection)


def return_to_pool(connection: BaseDatabaseWrapper) -> None:
    """Return a pooled connection; keep any other one open.

    Use this for a background thread between two uses: it must not occupy a place in a small pool while it
    waits.
    """
    if connection.settings_dict["OPTIONS"].get("pool"):
        connection.close()


def watch_requests() -> None:
    """Track which threads serve a Django request; called once, when the app is ready."""
    request_started.connect(_begin_request, dispatch_uid="helix_store.connections")
    request_finished.connect(_end_request, dispatch_uid="helix_store.connections")


def _begin_request(**kwargs: Any) -> None:
    _requests.is_served = True


def _end_request(**kwargs: Any) -> None:
    _requests.is_served = False


def _is_managed() -> bool:
    """Return whether the end of a request or of the process releases the connections of this thread."""
    if threading.current_thread() is threading.main_thread():
        return True
    return getattr(_requests, "is_served", False)
