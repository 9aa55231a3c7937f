"""Tests that invalid arguments are refused before storage is used."""

from __future__ import annotations

import decimal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from helix_store.exceptions import InvalidPayload, InvalidQuery
from helix_store.streams.manager import StreamManagerBase
from helix_store.testing.cells import table
from helix_store.testing.streams.base import (
    StreamTests,
    chunk,
    run,
)

__all__ = ["StreamArgumentContract"]

NO_POSITIONS: list[Any] = [
    -1,
    0.5,
    1.0,
    float("nan"),
    float("inf"),
    "1",
    "",
    b"1",
    True,
    None,
    2**63,
    10**400,
    [1],
    decimal.Decimal(1),
]
NO_IDENTIFIERS: list[Any] = ["", "x" * 256, "nul\x00", "line\nbreak", "high\ud83d", b"bytes", 7, None, True]

CALLS: dict[str, Callable[[StreamManagerBase, Any], Any]] = {
    "create_writer": lambda streams, bad: run(lambda: streams.create_writer(bad, "run", "agent")),
    "create_reader": lambda streams, bad: run(lambda: streams.create_reader(bad)),
    "create_resumable_reader": lambda streams, bad: run(lambda: streams.create_resumable_reader(bad)),
    "end_stream": lambda streams, bad: run(lambda: streams.end_stream(bad)),
    "fail_stream": lambda streams, bad: run(lambda: streams.fail_stream(bad, "error")),
    "pause_stream": lambda streams, bad: run(lambda: streams.pause_stream(bad)),
    "reactivate_stream": lambda streams, bad: run(lambda: streams.reactivate_stream(bad)),
    "reset_stream": lambda streams, bad: run(lambda: streams.reset_stream(bad)),
    "get_info": lambda streams, bad: run(lambda: streams.get_info(bad)),
    "delete_stream": lambda streams, bad: run(lambda: streams.delete_stream(bad)),
    "write_sync": lambda streams, bad: streams.write_sync(bad, [chunk(1)]),
    "read_after": lambda streams, bad: streams.read_after(bad, 0),
    "run_id": lambda streams, bad: run(lambda: streams.create_writer("stream", bad, "agent")),
    "agent_name": lambda streams, bad: run(lambda: streams.create_writer("stream", "run", bad)),
}


class StreamArgumentContract(StreamTests):
    @table("bad", NO_POSITIONS)
    def test_a_position_is_a_whole_number(self, streams: StreamManagerBase, bad: Any) -> None:
        self.filled(streams)
        with self.storage_untouched():
            with pytest.raises(InvalidQuery):
                run(lambda: streams.create_resumable_reader("stream", from_sequence=bad))
            with pytest.raises(InvalidQuery):
                streams.read_after("stream", bad)

    @table("bad", [0, -1, 1.5, "1", None, True, 2**63])
    def test_a_limit_is_a_whole_number_from_one(self, streams: StreamManagerBase, bad: Any) -> None:
        self.filled(streams)
        with self.storage_untouched(), pytest.raises(InvalidQuery):
            streams.read_after("stream", 0, limit=bad)

    @table("bad", NO_IDENTIFIERS, shared=True)
    @table("call", CALLS)
    def test_ids_are_identifiers(self, streams: StreamManagerBase, call: str, bad: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            CALLS[call](streams, bad)

    @table("bad", [-1, 1.5, "1", True], shared=True)
    def test_a_token_is_a_whole_number(self, streams: StreamManagerBase, bad: Any) -> None:
        with self.storage_untouched():
            with pytest.raises(InvalidPayload):
                run(lambda: streams.create_writer("stream", "run", "agent", fencing_token=bad))
            with pytest.raises(InvalidPayload):
                streams.write_sync("stream", [chunk(1)], fencing_token=bad)
            with pytest.raises(InvalidPayload):
                run(lambda: streams.end_stream("stream", fencing_token=bad))

    @table("bad", [timedelta(seconds=-1), 60, "1h", True], shared=True)
    def test_a_retention_is_a_timedelta(self, bad: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            self.make_manager(retention=bad)

    @table("bad", [0, -1, True, "1", float("nan"), timedelta(0), timedelta(days=8)], shared=True)
    def test_a_lease_is_a_time_of_at_most_seven_days(self, bad: Any) -> None:
        with self.storage_untouched(), pytest.raises(InvalidPayload):
            self.make_manager(writer_lease=bad)

    @table("stream_id", ["x", "a/b c", "é" * 255, "../..", "🙂"], shared=True)
    def test_ids_are_opaque(self, streams: StreamManagerBase, stream_id: str) -> None:
        self.filled(streams, 1, stream_id)
        assert len(streams.read_after(stream_id, 0)) == 1
