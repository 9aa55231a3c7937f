"""The values that stream managers return, and the options of ``HELIX_STORE["STREAMS"]``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final

from helix_store.core.payloads import Serializable
from helix_store.core.types import StreamStatus

__all__ = ["LONGEST_SECONDS", "PrunedStreams", "StoredChunk", "StreamInfo", "StreamOptions"]

LONGEST_SECONDS: Final = 7 * 24 * 60 * 60
"""The longest interval or lease that a stream accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """The options of streams; times are in seconds."""

    poll_interval: float = 0.2
    """The time between two polls of streams with readers: the longest delay if a notification is lost."""
    notify: bool = True
    """If true, PostgreSQL wakes readers with NOTIFY."""
    writer_lease: float = 60.0
    """The time for which a writer may be silent before it counts as dead."""
    heartbeat: float = 15.0
    """The time between two comments in the stream view, which keep proxies and browsers connected."""
    using: str | None = None
    """The database that the stream view reads."""
    listen_database: str | Mapping[str, str] | None = None
    """The alias on which readers listen; for several databases, a dict that maps each alias to one."""

    def listening_alias(self, alias: str) -> str:
        """Return the alias that receives the notifications of a database's writers."""
        if isinstance(self.listen_database, Mapping):
            return self.listen_database.get(alias, alias)
        return self.listen_database or alias

    @property
    def named_aliases(self) -> tuple[str, ...]:
        """Return every alias in ``listen_database``."""
        if isinstance(self.listen_database, Mapping):
            return (*self.listen_database, *self.listen_database.values())
        return () if self.listen_database is None else (self.listen_database,)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "notify":
                if type(value) is not bool:
                    raise ValueError("notify must be True or False")
            elif field.name == "using":
                if value is not None and type(value) is not str:
                    raise ValueError("using must be the name of a database or None")
            elif field.name == "listen_database":
                if not all(type(each) is str for each in self.named_aliases):
                    raise ValueError("listen_database must be an alias, a dict of aliases or None")
            elif type(value) not in (int, float) or not 0 < value <= LONGEST_SECONDS:
                raise ValueError(f"{field.name} must be a number of seconds above 0, at most seven days")


@dataclass(frozen=True, slots=True)
class StoredChunk(Serializable):
    """A chunk and its position in the stream; the first sequence is 1.

    Example::

        writer = await store.streams.create_writer("advice", "run-1", "travel")
        await writer.write({"type": "text_delta", "delta": "Take the early train."})
        await store.streams.end_stream("advice")
        async for stored in await store.streams.create_resumable_reader("advice"):
            print(stored.sequence, stored.chunk["delta"])
    """

    chunk: dict[str, Any]
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamInfo(Serializable):
    """A stream without its chunks. ``chunk_count`` counts the stored chunks: after pruning it is less than
    ``last_sequence``.

    ``run_id`` and ``agent_name`` belong to the newest writer.

    Example::

        await store.streams.create_writer("advice", "run-1", "travel")
        info = await store.streams.get_info("advice")
        print(info.status, info.chunk_count, info.last_sequence)
    """

    stream_id: str
    status: StreamStatus
    chunk_count: int
    last_sequence: int
    output: Any
    error: Any
    run_id: str
    agent_name: str
    created_at: datetime
    updated_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedStreams(Serializable):
    """The number of deleted ``chunks``, the number of ``streams`` that lost some, and the number of streams
    that were marked as failed. After a dry run, these are the numbers that a real run would have.
    """

    streams: int
    chunks: int
    failed: int
