"""``manage.py runserver`` on one of the test databases."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.asgi_server import database_url
from tests.databases import CommittedDatabase

__all__ = ["runserver"]

_ROOT: Final = Path(__file__).resolve().parents[2]


@contextmanager
def runserver(database: CommittedDatabase) -> Iterator[str]:
    """The address of the server."""
    # The command does not print the port that the system chose.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "manage.py", "runserver", "--noreload", f"127.0.0.1:{port}"],
        cwd=_ROOT,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "example_project.settings",
            "DATABASE_URL": database_url(database, "runserver"),
            "PYTHONUNBUFFERED": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "Quit the server" in line:
                yield f"http://127.0.0.1:{port}"
                return
        raise RuntimeError("The server did not start.")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
