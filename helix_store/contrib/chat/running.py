"""Who drives a thread when a message or an answer has arrived: by default a few threads of this process."""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from django.db import close_old_connections, connections
from django.urls import get_resolver

from helix_store import conf

__all__ = ["Pool", "chats", "pool", "run_thread"]

_IDLE_SECONDS: Final = 60.0
_LAST_SECONDS: Final = 10.0
"""How long a process that ends waits for its turns. What is left is continued by the next process."""

_THREAD: Final = re.compile(r"chat-[0-9a-f]{10}-[0-9a-f]{40}")
"""The id of a thread: the beginning of its chat's ids, and a digest of its owner and its own id."""

_logger = logging.getLogger(__name__)


class _Runs(Protocol):
    """A chat, as far as its runner is concerned."""

    def run(self, session_id: str, using: str | None, tenant: str) -> None: ...


chats: Final[dict[str, _Runs]] = {}
"""The chats of the project by the beginning of their session ids."""


def run_thread(*, session_id: str, tenant: str, using: str | None, **kwargs: Any) -> None:
    """Have a thread driven by the runner of its chat.

    A receiver of `session_posted`, `session_answered` and `session_ready`.
    Sessions that are no threads of a chat are left alone.
    """
    if not _THREAD.fullmatch(session_id):
        return
    if not chats:
        # A process without requests, such as a command, has not imported the URLs, and with them the chats.
        len(get_resolver().url_patterns)
    chat = chats.get(session_id.rpartition("-")[0])
    if chat is not None:
        chat.run(session_id, using, tenant)


class Pool:
    """A bounded pool of threads, which start when there is work and end after a minute without it.

    The threads do not keep a process from ending: at its end, it waits some seconds for them, and abandons
    the turns that last longer, as if the process had been killed.
    """

    def __init__(self, *, idle_seconds: float = _IDLE_SECONDS) -> None:
        self._idle_seconds = idle_seconds
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._condition = threading.Condition()
        self._queue: deque[tuple[tuple[object, ...], Callable[[], object]]] = deque()
        self._queued: set[tuple[object, ...]] = set()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        atexit.register(self._finish, os.getpid())

    @property
    def threads(self) -> int:
        """The number of threads that are alive in this process."""
        return 0 if self._process != os.getpid() else len(self._threads)

    def submit(self, key: tuple[object, ...], call: Callable[[], object]) -> None:
        """Make a call soon, once for all submissions of the key that have not begun."""
        if self._process != os.getpid():
            self._reset()  # the threads have stayed in the parent
        with self._condition:
            if key in self._queued:
                return
            self._queued.add(key)
            self._queue.append((key, call))
            if self._idle >= len(self._queue):
                self._condition.notify()
            elif len(self._threads) < conf.chat_threads():
                thread = threading.Thread(target=self._work, name="helix_store chat", daemon=True)
                self._threads.add(thread)
                thread.start()

    def _work(self) -> None:
        try:
            while (call := self._next()) is not None:
                try:
                    close_old_connections()
                    call()
                except Exception:
                    _logger.exception("A thread of a chat was not driven.")
                finally:
                    connections.close_all()
                del call
        except BaseException:
            with self._condition:
                self._threads.discard(threading.current_thread())
            raise

    def _next(self) -> Callable[[], object] | None:
        with self._condition:
            self._idle += 1
            has_work = self._condition.wait_for(lambda: self._queue, self._idle_seconds)
            self._idle -= 1
            if not has_work:
                self._threads.discard(threading.current_thread())
                self._condition.notify_all()
                return None
            key, call = self._queue.popleft()
            self._queued.discard(key)
            return call

    def _finish(self, process: int) -> None:
        if process != os.getpid() or self._process != process:
            return
        until = time.monotonic() + _LAST_SECONDS
        while time.monotonic() < until:
            with self._condition:
                if not self._queue and self._idle == len(self._threads):
                    return
            time.sleep(0.02)


pool: Final = Pool()
"""The pool of this process, for all of its chats."""
