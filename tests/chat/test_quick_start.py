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
from collections.abc import Iterator
from http.cookiejar import CookieJar
from typing import Any, Final

import pytest

from tests.browser import chromium
from tests.docs.test_examples import ROOT

_PAGE: Final = (ROOT / "docs" / "chat.md").read_text().split("## Approvals")[0]
_FILE: Final = re.compile(r"^```python\n# ([\w/]+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PATIENCE_SECONDS: Final = 60
_USER: Final = (
    "from django.contrib.auth.models import User; User.objects.create_superuser('ann', '', 'secret')"
)


def _files() -> list[tuple[str, str]]:
    return _FILE.findall(_PAGE)


def test_a_chat_takes_twelve_lines() -> None:
    settings, _on_sqlite, _model, chat, _page = (text.splitlines() for _, text in _files())
    own = [line for line in (*settings, *chat) if line and "mysite.model" not in line]
    assert len(own) == 12


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server of a project that was made from the page."""

    def manage(*arguments: str) -> None:
        command = [sys.executable, "manage.py", *arguments]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, timeout=120)

    folder = tmp_path_factory.mktemp("quick-start")
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "django", "startproject", "mysite", "."]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=60)
    for path, text in _files():
        file = folder / path
        file.write_text(f"{file.read_text()}\n{text}" if file.exists() else text)
    manage("migrate", "-v", "0")
    manage("shell", "-v", "0", "-c", _USER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "mysite.asgi:application", "--port", str(port)],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + _PATIENCE_SECONDS
        while not _is_up(port):
            assert time.monotonic() < until
            time.sleep(0.1)  # the server prints nothing that a test could wait for
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _is_up(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def test_an_answer_is_streamed_and_stored(address: str) -> None:
    jar = CookieJar()
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))

    def opened(path: str, body: bytes | None = None, kind: str = "application/json") -> str:
        token = next((cookie.value for cookie in jar if cookie.name == "csrftoken"), "") or ""
        headers = {"Content-Type": kind, "X-CSRFToken": token, "Referer": address}
        request = urllib.request.Request(address + path, body, headers)  # noqa: S310  the test's own server
        with browser.open(request, timeout=_PATIENCE_SECONDS) as response:
            return str(response.read().decode())

    opened("/admin/login/")
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


@pytest.mark.parametrize("width", [1400, 390])
def test_the_page_fits_and_survives_a_reload_in_the_middle_of_an_answer(address: str, width: int) -> None:
    with chromium() as browser:
        browser.resize(width, 844)
        browser.open(f"{address}/")
        browser.until("#state", contains="Sign in to use this chat.")
        browser.open(f"{address}/admin/login/?next=/")
        browser.fill("[name=username]", "ann")
        browser.fill("[name=password]", "secret\n")
        browser.until("h1", equals="How can I help?")
        browser.run("delete Crypto.prototype.randomUUID")  # As on a host without HTTPS.
        wish = "please say " + " ".join(map(str, range(40)))
        browser.fill("#say textarea", wish)
        browser.click("#say .go")
        shown = browser.until("article.assistant", at_least=30)
        assert browser.content_width() <= width
        assert browser.run("return document.getElementById('stop').hidden") is False
        browser.reload()
        assert f"You said: {wish}".startswith(shown)
        browser.until("article.assistant:not(.writing)", equals=f"You said: {wish}")
        assert browser.run("return document.querySelectorAll('article').length") == 2
        browser.until("#threads a[aria-current]", contains="please say")
        assert browser.content_width() <= width
