"""A real ASGI server in a process of its own, on one of the test databases."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlencode

import psutil

from tests.databases import CommittedDatabase

__all__ = ["AsgiServer", "database_url", "serving"]

_ROOT: Final = Path(__file__).resolve().parents[1]
_RUNNING: Final = re.compile(r"Uvicorn running on (http://127\.0\.0\.1:(\d+))")
_PATIENCE_SECONDS: Final = 60.0


class AsgiServer:
    """One uvicorn process with one worker; ``log`` is what it has printed.

    PostgreSQL knows its connections by ``application_name``.
    """

    def __init__(self, process: subprocess.Popen[str], application_name: str) -> None:
        self.application_name = application_name
        self._process = process
        self._is_up = threading.Event()
        self.url = ""
        self.port = 0
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._is_up.wait(_PATIENCE_SECONDS) or not self.port:
            self.stop()
            raise RuntimeError("The server did not start:\n" + "".join(self.log))

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log.append(line)
            if found := _RUNNING.search(line):
                self.url, self.port = found[1], int(found[2])
                self._is_up.set()
        self._is_up.set()


@contextmanager
def serving(
    database: CommittedDatabase,
    *,
    settings: str = "example_project.settings",
    application: str = "example_project.asgi:application",
    port: int = 0,
    **environment: str,
) -> Iterator[AsgiServer]:
    """The example project or another application, by default on a free port."""
    application_name = f"server-{uuid.uuid4().hex}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "uvicorn", application),
            *("--port", str(port), "--no-access-log", "--lifespan", "off", "--log-level", "info"),
        ],
        cwd=_ROOT,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": settings,
            "DATABASE_URL": database_url(database, application_name),
            "PYTHONUNBUFFERED": "1",
            **environment,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    server = AsgiServer(process, application_name)
    try:
        yield server
    finally:
        server.stop()


def database_url(database: CommittedDatabase, application_name: str) -> str:
    """The ``DATABASE_URL`` of a process on this database."""
    settings = database.connection.settings_dict
    if database.vendor == "sqlite":
        return f"sqlite:///{settings['NAME']}"
    user = quote(settings["USER"] or "", safe="")
    password = quote(settings["PASSWORD"] or "", safe="")
    options = settings["OPTIONS"]
    address = {
        "host": options.get("host") or settings["HOST"],
        "port": options.get("port") or settings["PORT"],
        "application_name": application_name,
    }
    # In the query, because a directory of Unix sockets is no host of a URL.
    query = urlencode({name: value for name, value in address.items() if value}, safe="/")
    return f"postgresql://{user}{password and ':' + password}@/{settings['NAME']}?{query}"
