"""Poolers for PostgreSQL in transaction mode that know nothing of prepared statements.

A client has a server connection from its first message until the server is idle outside of a transaction.
What is prepared stays on the server connection, where the next client finds it. Clients are not asked for a
password; the server is reached through its Unix socket, which trusts.
"""

from __future__ import annotations

import os
import pwd
import queue
import re
import select
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["PGBOUNCER", "Address", "can_track", "pgbouncer", "transaction_pooler"]

PGBOUNCER: Final = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")

_PATIENCE_SECONDS: Final = 30.0
_PROTOCOL: Final = 196_608  # 3.0
_WITHOUT_ENCRYPTION: Final = {80_877_103, 80_877_104}  # a client asks for TLS or GSS first
_HEADER: Final = struct.Struct("!cI")
_WORD: Final = struct.Struct("!I")
_AUTHENTICATION_OK: Final = b"R\0\0\0\x08\0\0\0\0"
_KEY: Final = b"K\0\0\0\x0c" + bytes(8)
_READY: Final = b"Z\0\0\0\x05I"
_ANSWERED_BY_READY: Final = b"QSF"


@dataclass(frozen=True)
class Address:
    """A database of a server that is reached through its socket in the directory ``host``."""

    host: str
    port: int
    database: str
    user: str

    @classmethod
    def of(cls, connection: BaseDatabaseWrapper) -> Address:
        parameters = connection.get_connection_params()
        return cls(
            host=parameters.get("host", ""),
            port=int(parameters.get("port", 5432)),
            database=parameters["dbname"],
            user=parameters.get("user", ""),
        )


@contextmanager
def transaction_pooler(server: Address, servers: int) -> Iterator[int]:
    """Share connections of a server among all clients of a port, which this yields.

    A client gets the connection that has been idle for the longest time.
    """
    pooler = _Pooler(server, servers)
    thread = threading.Thread(target=pooler.accept, name="transaction pooler", daemon=True)
    thread.start()
    try:
        yield pooler.port
    finally:
        pooler.stop_accepting()
        thread.join(_PATIENCE_SECONDS)
        pooler.hang_up()


class _Peer:
    """One end of a connection, read by whole messages."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._received = b""

    def messages(self) -> Iterator[bytes]:
        """The whole messages that have come."""
        while len(self._received) >= _HEADER.size:
            _, length = _HEADER.unpack_from(self._received)
            if len(self._received) <= length:
                return
            message, self._received = self._received[: length + 1], self._received[length + 1 :]
            yield message

    def receive(self) -> bool:
        """Wait for bytes; ``False`` at the end of the connection."""
        data = self.socket.recv(65_536)
        self._received += data
        return bool(data)


class _Server(_Peer):
    """A session of the server."""

    def __init__(self, server: Address) -> None:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(f"{server.host}/.s.PGSQL.{server.port}")
        super().__init__(connected)
        names = f"user\0{server.user}\0database\0{server.database}\0\0".encode()
        connected.sendall(_WORD.pack(8 + len(names)) + _WORD.pack(_PROTOCOL) + names)
        self.parameters = b""
        is_ready = False
        while not is_ready:
            assert self.receive(), "the server refused the connection"
            for message in self.messages():
                assert message[:1] != b"E", message
                if message[:1] == b"S":
                    self.parameters += message
                is_ready = message == _READY


class _Pooler:
    def __init__(self, server: Address, servers: int) -> None:
        self._server = server
        self._idle: queue.Queue[_Server] = queue.Queue()
        self._sockets: list[socket.socket] = []
        self._attending: list[threading.Thread] = []
        for _ in range(servers):
            self._add_server()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def accept(self) -> None:
        with suppress(OSError):  # once it is closed
            while True:
                client, _ = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
                self._sockets.append(client)
                thread = threading.Thread(target=self._attend, args=(client,), daemon=True)
                self._attending.append(thread)
                thread.start()

    def hang_up(self) -> None:
        """End every connection, once nothing more is accepted."""
        for each in list(self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._attending:
            thread.join(_PATIENCE_SECONDS)
        for each in self._sockets:
            each.close()

    def stop_accepting(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _add_server(self) -> None:
        server = _Server(self._server)
        self._sockets.append(server.socket)
        self._idle.put(server)

    def _attend(self, connected: socket.socket) -> None:
        client = _Peer(connected)
        # Closed at once: each call may make a connection, and select() takes no file beyond the 1,024th.
        with suppress(OSError, _GoneError), connected:
            self._greet(connected)
            while True:
                for message in client.messages():
                    self._lend(client, message)
                _require(client.receive())

    def _greet(self, connected: socket.socket) -> None:
        """Answer the startup with the parameters that a server has reported."""
        while True:
            start = _exactly(connected, 8)
            _exactly(connected, _WORD.unpack_from(start)[0] - 8)
            code = _WORD.unpack_from(start, 4)[0]
            if code not in _WITHOUT_ENCRYPTION:
                break
            connected.sendall(b"N")
        _require(code == _PROTOCOL)
        server = self._idle.get(timeout=_PATIENCE_SECONDS)
        self._idle.put(server)
        connected.sendall(_AUTHENTICATION_OK + server.parameters + _KEY + _READY)

    def _lend(self, client: _Peer, first: bytes) -> None:
        """Forward messages both ways for one transaction."""
        _require(first[:1] != b"X")
        server = self._idle.get(timeout=_PATIENCE_SECONDS)
        try:
            last = _forward(client, server, first)
        except (OSError, _GoneError):
            # A client that goes away within a transaction takes the server's session along.
            server.socket.close()
            with suppress(OSError):
                self._add_server()
            raise
        # Before the client knows: what it does next finds the connection idle.
        self._idle.put(server)
        client.socket.sendall(last)


def _forward(client: _Peer, server: _Server, first: bytes) -> bytes:
    """Forward until the server is idle again; returns its last message, which the client still waits for."""
    due = 0
    is_open = True

    def ask(message: bytes) -> None:
        nonlocal due, is_open
        _require(message[:1] != b"X")
        is_last = message[:1] in _ANSWERED_BY_READY
        due += is_last
        is_open = not is_last
        server.socket.sendall(message)

    ask(first)
    while True:
        for message in client.messages():
            ask(message)
        readable, _, _ = select.select([client.socket, server.socket], [], [])
        if server.socket in readable:
            _require(server.receive())
            for message in server.messages():
                due -= message[:1] == b"Z"
                if message == _READY and not due and not is_open:
                    return message
                client.socket.sendall(message)
        elif client.socket in readable:
            _require(client.receive())


class _GoneError(Exception):
    """The other end has hung up."""


def _require(condition: bool) -> None:
    if not condition:
        raise _GoneError


def _exactly(connected: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        received = connected.recv(count - len(data))
        _require(bool(received))
        data += received
    return data


# PgBouncer itself


@contextmanager
def pgbouncer(
    server: Address, servers: int, *, tracks: bool = False, options: Mapping[str, object] | None = None
) -> Iterator[int]:
    """The same by the installed PgBouncer; ``tracks`` switches its tracking of prepared statements on."""
    assert PGBOUNCER is not None
    directory = Path(tempfile.mkdtemp(prefix="helix-pgbouncer-"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    database = (
        f"{server.database} = host={server.host} port={server.port} user={server.user}"
        f" dbname={server.database} pool_size={servers}"
    )
    configured = {
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "unix_socket_dir": "",
        "auth_type": "any",
        "pool_mode": "transaction",
        **({"max_prepared_statements": 200 if tracks else 0} if can_track() else {}),
        **(options or {}),
    }
    configuration = directory / "pgbouncer.ini"
    lines = [
        "[databases]",
        database,
        "[pgbouncer]",
        *(f"{name} = {value}" for name, value in configured.items()),
    ]
    configuration.write_text("\n".join(lines) + "\n")
    owner: dict[str, Any] = {}
    if os.geteuid() == 0:
        # It refuses to run as root, and the server's socket is in a directory of this user.
        account = pwd.getpwnam("nobody")
        owner = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        for path in (directory, configuration):
            os.chown(path, account.pw_uid, account.pw_gid)
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [PGBOUNCER, str(configuration)], stdout=output, stderr=output, cwd=directory, **owner
        )
    try:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not _answers(port):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()  # noqa: PT018
            time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory)


def can_track() -> bool:
    """Whether the installed PgBouncer has ``max_prepared_statements``."""
    if PGBOUNCER is None:
        return False
    printed = subprocess.run([PGBOUNCER, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"(\d+)\.(\d+)", printed)
    assert version is not None, printed
    return (int(version[1]), int(version[2])) >= (1, 21)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
