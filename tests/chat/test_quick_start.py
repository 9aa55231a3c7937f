"""The quick start of docs/chat.md, followed from `startproject` to an answer that survives a reload."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any, Final

from tests.docs.test_examples import ROOT

_PAGE: Final = (ROOT / "docs" / "chat.md").read_text().split("## Chat\n")[0]
_FILE: Final = re.compile(r"^```python\n# ([\w/]+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PATIENCE_SECONDS: Final = 60
_USER: Final = (
    "from django.contrib.auth.models import User; User.objects.create_superuser('ann', '', 'secret')"
)


def _files() -> list[tuple[str, str]]:
    return _FILE.findall(_PAGE)


def test_a_chat_takes_twelve_lines() -> None:
    settings, _, chat, _ = (text.splitlines() for _, text in _files())
    own = [line for line in (*settings, *chat) if line and "mysite.model" not in line]
    assert len(own) == 12


def test_the_quick_start_can_be_followed(tmp_path: Path) -> None:
    def manage(*arguments: str) -> None:
        command = [sys.executable, "manage.py", *arguments]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=120)

    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "django", "startproject", "mysite", "."]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=60)
    for path, text in _files():
        file = tmp_path / path
        file.write_text(f"{file.read_text()}\n{text}" if file.exists() else text)
    manage("migrate", "-v", "0")
    manage("shell", "-v", "0", "-c", _USER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "mysite.asgi:application", "--port", str(port)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _talk(f"http://127.0.0.1:{port}")
    finally:
        server.kill()
        server.wait()


def _talk(address: str) -> None:
    jar = CookieJar()
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))

    def opened(path: str, body: bytes | None = None, kind: str = "application/json") -> str:
        token = next((cookie.value for cookie in jar if cookie.name == "csrftoken"), "") or ""
        headers = {"Content-Type": kind, "X-CSRFToken": token, "Referer": address}
        request = urllib.request.Request(address + path, body, headers)  # noqa: S310  the test's own server
        with browser.open(request, timeout=_PATIENCE_SECONDS) as response:
            return str(response.read().decode())

    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            opened("/admin/login/")
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.1)
        else:
            break
    opened("/admin/login/", b"username=ann&password=secret&next=/admin/", "application/x-www-form-urlencoded")
    assert "EventSource" in opened("/")
    run: dict[str, Any] = {"threadId": "t", "runId": "r"}
    run["messages"] = [{"id": "u1", "role": "user", "content": "Hello there"}]
    events = opened("/chat/agui/", json.dumps(run).encode())
    assert "TEXT_MESSAGE_CONTENT" in events
    shown = json.loads(opened("/chat/threads/t/"))
    assert [message["content"] for message in shown["messages"]] == ["Hello there", "You said: Hello there "]
    assert shown["messages"][-1]["id"] in events
    assert "MESSAGES_SNAPSHOT" in opened("/chat/agui/t/")
