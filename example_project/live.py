"""An agent that writes its answer word by word into a stream, which any worker can read."""

from __future__ import annotations

import asyncio
import threading
from typing import Final

from asgiref.sync import async_to_sync
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
"""The key of a visitor's Django session for the ids of their streams."""

_VIEW_STREAMS: Final = "helix_store.view_stream"
_SECONDS_PER_WORD: Final = 0.05


def may_watch(request: HttpRequest, stream_id: str) -> bool:
    """For ``HELIX_STORE["STREAM_PERMISSION"]``: a visitor may read their own streams, staff all of them."""
    return stream_id in request.session.get(STREAMS_KEY, []) or request.user.has_perm(_VIEW_STREAMS)


def start_answering() -> str:
    """Create a stream, start an agent that answers into it in the background, and return its id."""
    stream_id = f"live-{new_id()}"
    async_to_sync(DatabaseStreamManager().create_writer)(stream_id, new_id(), "travel")
    threading.Thread(target=async_to_sync(_answer), args=[stream_id], daemon=True).start()
    return stream_id


async def _answer(stream_id: str) -> None:
    streams = DatabaseStreamManager()
    async with await streams.create_writer(stream_id, new_id(), "travel") as writer:
        for word in ANSWER.split(" "):
            await writer.write({"type": "text_delta", "delta": f"{word} "})
            await asyncio.sleep(_SECONDS_PER_WORD)
    await streams.end_stream(stream_id, {"answer": ANSWER})
