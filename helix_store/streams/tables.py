"""The tables of streams, for the catalogue."""

from typing import Final

from helix_store.catalogue import Table
from helix_store.models import Stream, StreamChunk

TABLES: Final = (
    Table(
        Stream,
        record="stream",
        order=("stream_id",),
        parent="tenant",
        unit="stream",
        reads=None,
        session_id="stream_id",
    ),
    Table(StreamChunk, record="stream_chunk", order=("sequence",), parent="stream_id"),
)
