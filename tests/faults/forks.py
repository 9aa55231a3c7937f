"""A process that forks workers to be killed: it has one thread and no open connection.

Its parent keeps its own connections meanwhile. A child inherits none of them, and no lock of a file.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

__all__ = ["Forks", "Tell", "Worker"]

_PATIENCE_SECONDS: Final = 30.0
_DEAD: Final = b"."

Tell = Callable[[str], None]


class Forks:
    """Forks one worker at a time, which calls ``work(request, tell)`` and waits for its end.

    Make it where there is one thread and no open connection. What ``work`` tells, the worker's parent hears.
    """

    def __init__(self, work: Callable[[Any, Tell], None]) -> None:
        self._work = work
        self._socket, theirs = socket.socketpair()
        # Ends the threads of executors that nobody has any more.
        gc.collect()
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join(_PATIENCE_SECONDS)
        assert threading.active_count() == 1, threading.enumerate()
        # A child then copies no page only because the collector touches it.
        gc.freeze()
        if os.fork() == 0:
            self._socket.close()
            self._serve(theirs)
        theirs.close()

    def close(self) -> None:
        self._socket.close()
        gc.unfreeze()
        os.wait()

    @contextmanager
    def worker(self, request: Any) -> Iterator[Worker]:
        """A worker that is dead and gone after the block, with its files and its locks."""
        told, tell = os.pipe()
        socket.send_fds(self._socket, [pickle.dumps(request)], [tell])
        os.close(tell)
        worker = Worker(told)
        try:
            worker.pid = int(worker.hear())
            yield worker
        finally:
            worker.kill()
            assert self._socket.recv(1) == _DEAD
            os.close(told)

    def _serve(self, requests: socket.socket) -> NoReturn:
        try:
            while True:
                data, (tell,), _, _ = socket.recv_fds(requests, 65_536, 1)
                child = os.fork()
                if child == 0:
                    self._run(pickle.loads(data), tell, requests)  # noqa: S301  from our own parent
                os.close(tell)
                os.waitpid(child, 0)
                requests.sendall(_DEAD)
        finally:
            # Its parent has gone.
            os._exit(0)

    def _run(self, request: Any, tell: int, requests: socket.socket) -> NoReturn:
        def say(text: str) -> None:
            os.write(tell, f"{text}\n".encode())

        try:
            say(str(os.getpid()))
            self._work(request, say)
            requests.recv(1)
        except BaseException as exc:  # noqa: BLE001  the parent hears it
            say(f"failed {exc!r}")
        finally:
            os._exit(1)


class Worker:
    """A forked process, which is heard through a pipe."""

    pid = 0

    def __init__(self, told: int) -> None:
        self._told = told
        self._heard = b""

    def hear(self) -> str:
        """The next line. Raises `AssertionError` when the worker has failed, or says nothing."""
        line = self.hear_within(_PATIENCE_SECONDS)
        assert line is not None, "the worker is silent"
        return line

    def hear_within(self, seconds: float) -> str | None:
        """The next line, or ``None`` after some seconds or the end of the worker."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._heard:
            if not select.select([self._told], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            data = os.read(self._told, 4096)
            if not data:
                return None
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        assert not line.startswith(b"failed"), line.decode()
        return line.decode()

    def kill(self) -> None:
        """Safe to repeat: the second one might meet another process with the same number."""
        pid, self.pid = self.pid, 0
        if pid:
            os.kill(pid, signal.SIGKILL)
