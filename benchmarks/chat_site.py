"""The site of `benchmarks.chat`: each delta of its agent is the time at which it is said."""

from __future__ import annotations

import os
import time
from typing import Any

from django.core.asgi import get_asgi_application
from django.urls import path

application = get_asgi_application()

from helix_store.contrib.chat import Chat  # noqa: E402  it needs the apps

_DELTAS = int(os.environ.get("CHAT_DELTAS", "250"))
_SECONDS = 1 / 25


def answer(turn: Any, out: Any) -> None:
    while turn.is_active:
        text, count = "", 1 if turn.messages(last=1)[0]["content"] == "short" else _DELTAS
        for _ in range(count):
            delta = f"{time.time() * 1000:.1f} "
            text += delta
            out.text(delta)
            time.sleep(_SECONDS)  # the pace of a model
        with turn.step() as step:
            step.say({"role": "assistant", "content": text})
            step.end_turn()


urlpatterns = [path("chat/", Chat("benchmark", answer, owner="ann").urls)]
