"""A TCP proxy before PostgreSQL that breaks a connection around its next COMMIT.

It reads the messages of both sides. A batch of messages that commits is the ``COMMIT`` of a transaction that
wrote, or a statement alone that writes. Clients connect without encryption.
"""

from __future__ import annotations

import re
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Final

from django.db import connections

from tests.pooler import Address

__all__ = ["Cut", "FaultyProxy", "faulty_proxy"]

_WORD: Final = struct.Struct("!I")
_HEADER: Final = struct.Struct("!cI")
_WITHOUT_TYPE: Final = {80_877_103, 80_877_104, 196_608, 196_610}  # TLS, GSS, and two versions of the startup
_SYNCHRONISED: Final = (b"Q", b"S")
_COMMIT: Final = b"COMMIT\0"
_WRITES: Final = re.compile(rb"\b(INSERT INTO|DELETE FROM|UPDATE) \"")
_IN_TRANSACTION: Final = b"T"
_PATIENCE_SECONDS: Final = 30.0


class Cut(Enum):
    """What happens to a COMMIT. All but the first deliver it, the last perhaps long after."""

    BEFORE = "before COMMIT"
    AFTER = "after COMMIT"
    IN_REPLY = "in the reply"
    UNDELIVERED = "half open, COMMIT is lost"
    RUNNING = "while COMMIT runs"
    LATE = "half open, COMMIT comes late"


class FaultyProxy:
    """A port that leads to a server. One armed cut breaks one connection."""

    def __init__(self, server: Address, *, half_open_seconds: float = 0.1) -> None:
        self._server = server
        self.half_open_seconds = half_open_seconds
        self._cut: Cut | None = None
        self._spared = 0
        self._goes_down = False
        self._is_down = False
        self._meanwhile: Callable[[], object] | None = None
        self._has_cut = threading.Event()
        self._threads: list[threading.Thread] = []
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.is_closing = threading.Event()
        self.commits = 0
        self.cuts = 0

    def arm(
        self,
        cut: Cut,
        *,
        goes_down: bool = False,
        after: int = 0,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Cut the next commit, or the one ``after`` so many.

        With ``goes_down`` no connection is accepted after it until `come_up`. ``meanwhile`` is called in a
        thread of the proxy after the commit was, or was not, delivered, and before the client learns that its
        connection is broken.
        """
        self._goes_down = goes_down
        self._meanwhile = meanwhile
        self._spared = after
        self._has_cut.clear()
        self._cut = cut

    def disarm(self) -> None:
        """Spare every later commit, if the armed cut met none."""
        self._cut = self._meanwhile = None

    def wait_for_cut(self) -> None:
        """Wait until the armed cut is over, and a late COMMIT was answered."""
        assert self._has_cut.wait(_PATIENCE_SECONDS), "no COMMIT was cut"

    def come_up(self) -> None:
        self._is_down = False

    def serve(self) -> None:
        with suppress(OSError):  # once it is closed
            while True:
                client, _ = self._listener.accept()
                if self._is_down:
                    client.close()
                    continue
                thread = threading.Thread(target=self._attend, args=(client,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def close(self) -> None:
        self.is_closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in list(self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_PATIENCE_SECONDS)

    def call_meanwhile(self) -> None:
        if self._meanwhile is not None:
            self._meanwhile()
            for connection in connections.all(initialized_only=True):
                connection.close()

    def _attend(self, client: socket.socket) -> None:
        server = _connected(self._server)
        ends = {client, server}
        self._sockets |= ends
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        try:
            with suppress(OSError):
                _Pair(client, server, self).run()
        finally:
            self._sockets -= ends
            client.close()
            server.close()

    def _taken_cut(self) -> Cut | None:
        """The cut of this commit, if it is the one that was armed."""
        self.commits += 1
        if self._cut is None:
            return None
        if self._spared:
            self._spared -= 1
            return None
        cut, self._cut = self._cut, None
        self._is_down = self._goes_down
        self.cuts += 1
        return cut


class _Pair:
    """A client's connection and its session of the server."""

    def __init__(self, client: socket.socket, server: socket.socket, proxy: FaultyProxy) -> None:
        self._client = client
        self._server = server
        self._proxy = proxy
        self._asked = b""
        self._answered = b""
        self._has_started = False
        self._status = b"I"
        self._prepared: dict[bytes, bytes] = {}
        self._has_written = False

    def run(self) -> None:
        while True:
            readable, _, _ = select.select([self._client, self._server], [], [])
            if self._server in readable:
                data = self._server.recv(65_536)
                if not data:
                    return
                self._read_status(data)
                self._client.sendall(data)
            elif not self._pass_batch():
                return

    def _pass_batch(self) -> bool:
        """Forward what the client sends, by whole batches; ``False`` at the end of the connection."""
        data = self._client.recv(65_536)
        if not data:
            return False
        self._asked += data
        if not self._has_started:
            # Until the first typed message, which answers the server's request for a password or is a query.
            (length,) = _WORD.unpack_from(self._asked)
            code = _WORD.unpack_from(self._asked, 4)[0] if len(self._asked) >= 8 else 0
            if code in _WITHOUT_TYPE and len(self._asked) >= length:
                self._has_started = code not in (80_877_103, 80_877_104)
                self._send_all()
            return True
        if not self._ends_a_batch():
            return True
        cut = self._proxy._taken_cut() if self._commits() else None
        if cut is None:
            self._send_all()
            return True
        try:
            self._break(cut)
            # What was not committed keeps no lock from the others.
            self._server.close()
            self._proxy.call_meanwhile()
        finally:
            self._proxy._has_cut.set()
        return False

    def _commits(self) -> bool:
        """Whether this batch commits something that was written."""
        if self._status != _IN_TRANSACTION:
            self._has_written = False
        self._has_written |= any(_WRITES.search(text) for text in self._statements())
        is_alone = self._status != _IN_TRANSACTION and b"BEGIN" not in self._asked
        return self._has_written and (is_alone or _COMMIT in self._asked)

    def _statements(self) -> Iterator[bytes]:
        """The text of each statement that this batch runs."""
        position = 0
        while position < len(self._asked):
            kind, length = _HEADER.unpack_from(self._asked, position)
            body = self._asked[position + _HEADER.size : position + 1 + length]
            position += 1 + length
            if kind == b"P":
                name, text, _ = body.split(b"\0", 2)
                self._prepared[name] = text
            elif kind == b"B":
                _, name, _ = body.split(b"\0", 2)
                yield self._prepared[name]
            elif kind == b"Q":
                yield body

    def _ends_a_batch(self) -> bool:
        """Whether only whole messages have come, of which the last makes the server answer."""
        position, last = 0, b""
        while position + _HEADER.size <= len(self._asked):
            last, length = _HEADER.unpack_from(self._asked, position)
            position += length + 1
        if position != len(self._asked):
            return False
        # A password is answered at once too, and the end of the connection has no answer.
        return last in (*_SYNCHRONISED, b"p", b"X", b"H")

    def _send_all(self) -> None:
        self._server.sendall(self._asked)
        self._asked = b""

    def _break(self, cut: Cut) -> None:
        if cut is Cut.BEFORE:
            return
        if cut in (Cut.UNDELIVERED, Cut.LATE):
            # The server does not learn that the client has gone: it keeps the locks of the transaction.
            self._client.close()
            self._proxy.is_closing.wait(self._proxy.half_open_seconds)
            if cut is Cut.UNDELIVERED:
                return
        self._send_all()
        if cut is Cut.RUNNING:
            return
        reply = b""
        while not reply.endswith((b"Z\0\0\0\x05I", b"Z\0\0\0\x05T", b"Z\0\0\0\x05E")):
            data = self._server.recv(65_536)
            if not data:
                return
            reply += data
        if cut is Cut.IN_REPLY:
            self._client.sendall(reply[: len(reply) // 2])

    def _read_status(self, data: bytes) -> None:
        """Follow the server's messages up to the last one, which says whether a transaction is open."""
        self._answered = (self._answered + data)[-6:]
        if self._answered[:5] == b"Z\0\0\0\x05":
            self._status = self._answered[5:]


def _connected(server: Address) -> socket.socket:
    if server.host.startswith("/"):
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(f"{server.host}/.s.PGSQL.{server.port}")
        return connected
    return socket.create_connection((server.host or "127.0.0.1", server.port))


@contextmanager
def faulty_proxy(server: Address) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(server)
    thread = threading.Thread(target=proxy.serve, name="faulty proxy", daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.close()
        thread.join(_PATIENCE_SECONDS)
