"""An agent that answers live, one word after the other, into a stream that any worker can read."""

from __future__ import annotations

import asyncio
import threading
from typing import Final

from asgiref.sync import async_to_sync
from django.db import connections
from django.http import HttpRequest

from helix_store.core.ids import new_id
from helix_store.stores import DatabaseStreamManager

__all__ = ["ANSWER", "STREAMS_KEY", "may_watch", "start_answering"]

ANSWER: Final = (
    "A flight from Lisbon to Oslo takes about four hours, so the early one leaves you the afternoon. "
    "It departs at 07:40, and there is a seat at the window. The fare is 189 euros with one bag; the late "
    "flight costs 30 euros less, but arrives after the last train into the city. I would take the early one."
)
STREAMS_KEY: Final = "live_streams"
"""Where a visitor's session keeps the ids of the streams that were started for them."""

_SECONDS_PER_WORD: Final = 0.05


def may_watch(request: HttpRequest, stream_id: str) -> bool:
    """Named by ``HELIX_STORE["STREAM_PERMISSION"]``: everyone sees their own answers and nobody else's."""
    return stream_id in request.session.get(STREAMS_KEY, [])


def start_answering() -> str:
    """Let an agent answer in the background and return the id of its stream, which exists already."""
    stream_id = f"live-{new_id()}"
    async_to_sync(DatabaseStreamManager().create_writer)(stream_id, new_id(), "travel")
    threading.Thread(target=_answer_in_thread, args=[stream_id], daemon=True).start()
    return stream_id


def _answer_in_thread(stream_id: str) -> None:
    try:
        async_to_sync(_answer)(stream_id)
    finally:
        # Django closes connections at the end of requests; this thread belongs to none.
        connections.close_all()


async def _answer(stream_id: str) -> None:
    streams = DatabaseStreamManager()
    async with await streams.create_writer(stream_id, new_id(), "travel") as writer:
        for word in ANSWER.split(" "):
            await writer.write({"type": "text_delta", "delta": f"{word} "})
            await asyncio.sleep(_SECONDS_PER_WORD)
    await streams.end_stream(stream_id, {"answer": ANSWER})
