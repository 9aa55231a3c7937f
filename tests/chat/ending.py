"""The chat of a process that ends while its pool takes turns. ``CHAT_AGENT`` names its agent."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from typing import Any

from django.urls import path

from helix_store.contrib.chat import Chat

_begun = threading.Event()


async def uses_executors_to_the_end(turn: Any, out: Any) -> None:
    sys.stdout.write("The agent works.\n")
    sys.stdout.flush()
    _begun.set()
    while True:
        await asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.01)


async def uses_executors_for_a_while(turn: Any, out: Any) -> None:
    for _ in range(2):
        await asyncio.get_running_loop().run_in_executor(None, threading.main_thread().join, 0.3)
    async with turn.step() as step:
        await step.asay({"role": "assistant", "content": "Done."})
        await step.aend_turn()


def waits_for_the_end(turn: Any, out: Any) -> None:
    _begun.set()
    threading.main_thread().join()
    with turn.step() as step:
        step.say({"role": "assistant", "content": "Done."})
        step.end_turn()


chat = Chat(os.environ["CHAT_AGENT_TYPE"], globals()[os.environ["CHAT_AGENT"]], owner="ann")
urlpatterns = [path("chat/", chat.urls)]


def drive_until_the_end(session_ids: list[str]) -> None:
    for each in session_ids:
        chat.run(each, None, os.environ["CHAT_TENANT"])
    if not _begun.wait(60):
        sys.exit("No turn has begun.")
