"""A stream that an agent in a thread writes its answer to. Every process can read it."""

from __future__ import annotations

import time
from typing import Any, Final

from asgiref.sync import async_to_sync

from helix_store import DatabaseStreamManager
from helix_store.core.ids import new_id

__all__ = ["Answer"]

_SECONDS_PER_WORD: Final = 0.05


class Answer:
    """One stream, created at once. Each chunk renews its lease."""

    def __init__(self, stream_id: str, *, agent_name: str) -> None:
        self.stream_id = stream_id
        self._streams = DatabaseStreamManager()
        self._writer = async_to_sync(self._streams.create_writer)(stream_id, new_id(), agent_name)

    def write(self, kind: str, **fields: Any) -> None:
        async_to_sync(self._writer.write)({"type": kind, **fields})

    def speak(self, text: str, **fields: Any) -> None:
        """Write a text word by word, as models answer; each chunk also has the ``fields``."""
        for word in text.split(" "):
            self.write("text_delta", delta=f"{word} ", **fields)
            time.sleep(_SECONDS_PER_WORD)

    def end(self, output: Any) -> None:
        async_to_sync(self._streams.end_stream)(self.stream_id, output)

    def fail(self, error: Any) -> None:
        async_to_sync(self._streams.fail_stream)(self.stream_id, error)
