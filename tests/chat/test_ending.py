"""The end of a process: its turns are finished or abandoned, and never failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from asgiref.sync import async_to_sync

from tests.asgi_server import database_url
from tests.chat.conftest import Chatting

Make = Callable[..., Chatting]

_DRIVE = """
import sys
import django
django.setup()
from tests.chat.ending import drive_until_the_end
drive_until_the_end(sys.argv[1:])
"""


def _begin(site: Chatting, *command: str, agent: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.chat.ending_settings",
            "DATABASE_URL": database_url(site.database, "ending"),
            "CHAT_AGENT_TYPE": site.chat.agent_type,
            "CHAT_AGENT": agent,
            "CHAT_TENANT": site.database.tenant,
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _run(site: Chatting, *command: str, agent: str, **environment: str) -> None:
    with _begin(site, *command, agent=agent, **environment) as process:
        try:
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, errors


def _wake(site: Chatting) -> list[str]:
    return ["-m", "django", "helix_sessions", "wake", "--tenant", site.database.tenant]


def _stands(site: Chatting, thread: str = "t") -> tuple[list[Any], list[str]]:
    """The statuses of a thread's runs, and the last words of its history."""
    session_id = site.session(thread).id
    said = [message["content"] for message in site.session(thread).messages()]
    return [run.status.value for run in site.store.sessions.list_runs(session_id)], said[-1:]


def test_a_wake_up_ends_after_its_turns(chatting: Make) -> None:
    site = chatting()
    async_to_sync(site.post)("t", "u1")
    _run(site, *_wake(site), agent="uses_executors_for_a_while")
    assert _stands(site) == (["completed"], ["Done."])


def test_a_wake_up_can_be_interrupted_while_it_waits(chatting: Make) -> None:
    site = chatting()
    async_to_sync(site.post)("t", "u1")
    with _begin(site, *_wake(site), agent="uses_executors_to_the_end") as process:
        try:
            assert process.stdout is not None
            while "The agent works." not in process.stdout.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert _stands(site) == (["running"], ["Hello"])


def test_a_turn_that_fails_because_its_process_ends_is_abandoned(chatting: Make) -> None:
    site = chatting()
    async_to_sync(site.post)("t", "u1")
    _run(site, "-c", _DRIVE, site.session("t").id, agent="uses_executors_to_the_end")
    assert _stands(site) == (["running"], ["Hello"])
    # The next process goes on at once.
    assert site.drive("t") is True
    assert _stands(site) == (["completed", "interrupted"], ["You said Hello."])


def test_a_process_that_ends_finishes_its_turns_and_begins_no_other(chatting: Make) -> None:
    site = chatting()
    for thread in ("a", "b"):
        async_to_sync(site.post)(thread, "u1")
    ids = [site.session(thread).id for thread in ("a", "b")]
    _run(site, "-c", _DRIVE, *ids, agent="waits_for_the_end", CHAT_THREADS="1")
    assert _stands(site, "a") == (["completed"], ["Done."])
    assert _stands(site, "b") == ([], [])
    assert len(site.session("b").posts().items) == 1
