"""Take the pictures of the admin in ``docs/images`` again, from the demo and some more sessions.

Run ``python -m tests.example.pictures`` after a change of the admin that they show. It needs Chromium.
The picture of the frameworks is taken only if all of them are installed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
IMAGES: Final = ROOT / "docs" / "images"
WIDTH: Final = 1400
MOST_PIXELS: Final = 1400
FRAMEWORKS: Final = [
    "agent_framework",
    "agents",
    "claude_agent_sdk",
    "google.adk",
    "langgraph",
    "pydantic_ai",
    "strands",
]

SESSIONS: Final = (
    ("order-4711", "Refund of a cancelled flight", "support", "mia@example.org", "claude-sonnet-4-5"),
    ("order-4712", "Quarterly report", "analyst", "sam@example.org", "gpt-4o"),
    ("order-4716", "Change of the billing address", "support", "ana@example.org", "gpt-4o-mini"),
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DATABASE_URL"] = f"sqlite:///{folder}/pictures.sqlite3"
        os.environ["DJANGO_SETTINGS_MODULE"] = "example_project.settings"
        _manage("demo")
        import django

        django.setup()
        _fill()
        with _server() as address:
            _take(address)


def _manage(*arguments: str) -> None:
    subprocess.run([sys.executable, "manage.py", *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def _fill() -> None:
    """Add sessions that run, one that has failed, a week of usage, and budgets."""
    from helix_store import Store

    store = Store()
    for number, (session_id, title, agent_type, user, model) in enumerate(SESSIONS):
        session = store.new_session(session_id, agent_type=agent_type, user_id=user, title=title)
        session.say({"role": "user", "content": f"{title}, please."})
        for day in range(7):
            entry: dict[str, Any] = {
                "kind": "tokens",
                "session_id": session_id,
                "step_count": 0,
                "timestamp": datetime.now(UTC) - timedelta(days=day, minutes=1),
                "source": {"type": "agent", "name": agent_type},
                "model": model,
                "tokens": {"prompt": 40_000 + 9_000 * ((day + number) % 4), "completion": 9_000},
            }
            entry["tokens"]["total"] = sum(entry["tokens"].values())
            store.usage.record_entry(entry)
    with store.session("order-4711").turn() as turn, turn.step() as step:
        step.fail("The model answered 529 overloaded three times.")
    store.locks.acquire("order-4712", owner="worker-17", ttl_ms=3_600_000)
    store.budgets.set_budget("ana", scope="user", value="ana@example.org", period="month", limit_usd=5)
    store.budgets.set_budget("each agent type", scope="agent_type", limit_tokens=1_000_000)
    store.budgets.set_budget("everything", scope="tenant", period="month", limit_usd=100)
    store.budgets.set_budget("free-plan", scope="user", period="day", limit_usd="0.10", limit_tokens=80_000)


@contextmanager
def _server() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "manage.py", "runserver", "--noreload", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                with socket.socket() as connection:
                    if connection.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def _take(address: str) -> None:
    from helix_store.models import Session
    from tests.browser import chromium

    waiting = Session.objects.get(status="paused").pk
    pages = {
        "admin-start": "helix_store/",
        "admin-sessions": "helix_store/session/",
        "admin-session": f"helix_store/session/{waiting}/change/",
        "admin-answer": f"helix_store/session/{waiting}/change/?section=waits",
        "admin-usage": "helix_store/usageentry/report/",
        "admin-budgets": "helix_store/budget/",
    }
    with chromium() as browser:
        browser.resize(WIDTH, 900)
        browser.open(f"{address}/admin/login/")
        browser.fill("[name=username]", "demo")
        browser.fill("[name=password]", "demo\n")
        browser.until("h1", contains="administration")
        for name, page in pages.items():
            _picture(browser, name, f"{address}/admin/{page}")
        if all(map(_is_installed, FRAMEWORKS)):
            run = [sys.executable, "-m", "example_project.frameworks"]
            subprocess.run(run, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            _picture(browser, "admin-frameworks", f"{address}/admin/helix_store/session/?q=ada")


def _picture(browser: Any, name: str, address: str) -> None:
    browser.resize(WIDTH, 900)
    browser.open(address)
    browser.run(
        "document.head.insertAdjacentHTML('beforeend', '<style>::-webkit-scrollbar {width: 0}</style>')"
    )
    height = browser.run("return document.documentElement.scrollHeight")
    browser.resize(WIDTH, min(height, MOST_PIXELS))
    (IMAGES / f"{name}.png").write_bytes(browser.screenshot())


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    main()
