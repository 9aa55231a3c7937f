"""The in-memory stream manager under the contract suite, and what only it has."""

from __future__ import annotations

from datetime import timedelta

import pytest

from helix_store.core.limits import Limits
from helix_store.core.types import StreamStatus
from helix_store.exceptions import InvalidPayload
from helix_store.stores import (
    InMemoryLockManager,
    InMemoryStreamManager,
    MemoryWorld,
)
from helix_store.testing import StreamManagerContract
from helix_store.testing.streams import StreamArgumentContract


class TestInMemoryStreamManager(StreamManagerContract):
    # They are above the back end.
    only_on_databases = (StreamArgumentContract,)

    @pytest.fixture(autouse=True)
    def one_world(self) -> None:
        self.world = MemoryWorld()

    def make_manager(
        self,
        *,
        tenant: str = "",
        retention: timedelta | None = None,
        writer_lease: float | timedelta | None = None,
        limits: Limits | None = None,
    ) -> InMemoryStreamManager:
        return InMemoryStreamManager(
            tenant=tenant, world=self.world, retention=retention, writer_lease=writer_lease, limits=limits
        )

    def make_lock_manager(self) -> InMemoryLockManager:
        return InMemoryLockManager(world=self.world)


async def test_the_helpers_for_tests_see_everything() -> None:
    streams = InMemoryStreamManager()
    assert streams.get_all_stream_ids() == []
    assert streams.get_status_sync("b") is None
    assert streams.get_chunks_sync("b") == []
    for stream_id in ("b", "a"):
        writer = await streams.create_writer(stream_id, "run", "agent")
        await writer.write({"type": "tool_start", "tool_name": "search"})
    await streams.end_stream("a")
    assert streams.get_all_stream_ids() == ["b", "a"]
    assert (streams.get_status_sync("b"), streams.get_status_sync("a")) == (
        StreamStatus.ACTIVE,
        StreamStatus.ENDED,
    )
    chunks = streams.get_chunks_sync("b")
    assert chunks == [{"type": "tool_start", "tool_name": "search"}]
    chunks[0]["tool_name"] = "changed"
    assert streams.get_chunks_sync("b")[0]["tool_name"] == "search"
    streams.clear()
    streams.clear()
    assert streams.get_all_stream_ids() == []
    with pytest.raises(InvalidPayload):
        streams.get_status_sync("")
    with pytest.raises(InvalidPayload):
        streams.get_chunks_sync("")


async def test_managers_without_a_world_of_their_own_do_not_see_each_other() -> None:
    await InMemoryStreamManager().create_writer("stream", "run", "agent")
    assert await InMemoryStreamManager().get_info("stream") is None
