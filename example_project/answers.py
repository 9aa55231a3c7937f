"""A stream to which an agent in a thread writes its answer. Every process can read it."""

from __future__ import annotations

import os
import time
from typing import Any, Final

from asgiref.sync import async_to_sync

from helix_store import Store
from helix_store.core.ids import new_id

__all__ = ["SECONDS_PER_WORD", "Answer"]

SECONDS_PER_WORD: Final = float(os.environ.get("SECONDS_PER_WORD", "0.05"))


class Answer:
    """One stream, created at once. Each chunk renews its lease."""

    def __init__(self, stream_id: str, *, agent_name: str) -> None:
        self.stream_id = stream_id
        self._streams = Store().streams
        self._writer = async_to_sync(self._streams.create_writer)(stream_id, new_id(), agent_name)

    def speak(self, text: str) -> None:
        """Write a text word by word, as models answer."""
        for word in text.split(" "):
            async_to_sync(self._writer.write)({"type": "text_delta", "delta": f"{word} "})
            time.sleep(SECONDS_PER_WORD)

    def end(self, output: Any) -> None:
        async_to_sync(self._streams.end_stream)(self.stream_id, output)
