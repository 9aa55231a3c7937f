"""A live server with the chat of `tests.chat.site`, and the released clients of both protocols in Node."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from tests.asgi_server import AsgiServer, serving
from tests.databases import CommittedDatabase
from tests.installed import installed_once

__all__ = ["Client", "Site", "comparable", "node_modules", "site"]

_PACKAGES: Final = ("ai@7.0.173", "@ag-ui/client@1.0.0")
_SCRIPT: Final = Path(__file__).with_name("clients") / "client.mjs"
_PATIENCE_SECONDS: Final = 60


def node_modules() -> str:
    """The folder with the released clients, or a skip with the reason."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("Node and npm are not installed.")
    command = [npm, "install", "--silent", "--prefix", ".", "--engine-strict=false", *_PACKAGES]
    return str(installed_once("chat-clients", command) / "node_modules")


class Site:
    """A server with the chat, which can be killed and started again on the same port."""

    def __init__(self, database: CommittedDatabase, port: int, environment: Mapping[str, str]) -> None:
        self.database = database
        self.port = port
        self._environment = dict(environment)
        self._serving: AbstractContextManager[AsgiServer] | None = None
        self.start()

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}/chat/"

    def start(self) -> None:
        self._serving = serving(
            self.database,
            settings="tests.chat.server_settings",
            application="tests.chat.asgi:application",
            port=self.port,
            **self._environment,
        )
        self.server = self._serving.__enter__()

    def kill(self) -> None:
        assert self._serving is not None
        self._serving.__exit__(None, None, None)
        self._serving = None

    def stop(self) -> None:
        if self._serving is not None:
            self.kill()

    def request(
        self, method: str, path: str, body: Any = None, *, owner: str = "ann", headers: Any = None
    ) -> tuple[int, bytes]:
        data = None if body is None else json.dumps(body).encode()
        own = {"X-Owner": owner, "X-Tenant": self.database.tenant, "Content-Type": "application/json"}
        request = urllib.request.Request(  # noqa: S310  the test's own server
            self.base + path, method=method, data=data, headers={**own, **(headers or {})}
        )
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE_SECONDS) as response:  # noqa: S310
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def thread(self, thread: str, kind: str = "agui", *, owner: str = "ann") -> dict[str, Any]:
        _, body = self.request("GET", f"threads/{thread}/?format={kind}", owner=owner)
        found: dict[str, Any] = json.loads(body)
        return found

    def events(self, method: str, path: str, body: Any = None, **options: Any) -> list[dict[str, Any]]:
        status, text = self.request(method, path, body, **options)
        assert status == 200, (status, text, "".join(self.server.log[-30:]))
        lines = text.decode().split("\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    def say(self, thread: str, message_id: str, text: str, **more: Any) -> list[dict[str, Any]]:
        """The events of a message in AG-UI."""
        messages = [{"id": message_id, "role": "user", "content": text}] if text else []
        run = {"threadId": thread, "runId": f"run-{message_id}", "messages": messages}
        rest: dict[str, Any] = {"tools": [], "context": [], "state": {}, "forwardedProps": {}}
        return self.events("POST", "agui/", {**run, **rest, **more})


@contextmanager
def site(database: CommittedDatabase, **environment: str) -> Iterator[Site]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = Site(database, port, environment)
    try:
        yield running
    finally:
        running.stop()


class Client:
    """One released client in a process of Node. ``kind`` is ``agui`` or ``ai``."""

    def __init__(self, modules: str, site: Site, kind: str, thread: str, *, owner: str = "ann") -> None:
        self.kind, self.thread = kind, thread
        self._process = subprocess.Popen(
            ["node", str(_SCRIPT), modules, kind, site.base, owner, site.database.tenant, thread],  # noqa: S607
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(_PATIENCE_SECONDS * 2, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        found: dict[str, Any] = json.loads(line) if line else {"failure": "The client has ended."}
        return found

    def do(self, name: str, **options: Any) -> dict[str, Any]:
        """Let the client do something; returns the outcome and the messages that it holds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": name, **options}) + "\n")
        self._process.stdin.flush()
        answer = self._line()
        assert "failure" not in answer, answer
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def comparable(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Messages as text. Left out is the beginning of a step that `reset-step` leaves in a UI message."""
    found = []
    for message in messages:
        if message["role"] == "assistant" and "parts" in message:
            parts = list(message["parts"])
            while parts and parts[-1]["type"] == "step-start":
                parts.pop()
            if not parts:
                continue
            message = {**message, "parts": parts}
        found.append(json.dumps(message, sort_keys=True, ensure_ascii=False))
    return found
