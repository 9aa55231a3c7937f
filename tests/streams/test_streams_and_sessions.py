"""Streams and sessions agree: steps remember positions, and a deleted session takes its stream along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from asgiref.sync import async_to_sync

from helix_store.core.types import StepInfo
from helix_store.sessions.store import StateStoreBase
from helix_store.stores import (
    DatabaseStateStore,
    DatabaseStreamManager,
    InMemoryStateStore,
    InMemoryStreamManager,
    MemoryWorld,
)
from helix_store.streams.manager import StreamManagerBase
from tests.cells import for_each
from tests.databases import CommittedDatabase


@dataclass
class Pair:
    """A state store and a stream manager on the same storage."""

    store: StateStoreBase
    streams: StreamManagerBase

    def write(self, stream_id: str, *deltas: str) -> int:
        async_to_sync(self.streams.create_writer)(stream_id, "run", "agent")
        return self.streams.write_sync(stream_id, [{"type": "t", "delta": delta} for delta in deltas])

    def read(self, stream_id: str, after: int) -> list[str]:
        async def read() -> list[str]:
            reader = await self.streams.create_resumable_reader(stream_id, from_sequence=after)
            assert reader is not None
            return [stored.chunk["delta"] async for stored in reader]

        return async_to_sync(read)()

    def knows(self, stream_id: str) -> bool:
        return async_to_sync(self.streams.get_info)(stream_id) is not None


@pytest.fixture
def database_pair(committed_db: CommittedDatabase) -> Pair:
    return Pair(
        DatabaseStateStore(committed_db.alias, tenant=committed_db.tenant),
        DatabaseStreamManager(committed_db.alias, tenant=committed_db.tenant),
    )


@pytest.fixture
def memory_pair() -> Pair:
    world = MemoryWorld()
    return Pair(InMemoryStateStore(world=world), InMemoryStreamManager(world=world))


def _a_checkpoint_says_where_to_read_on(pair: Pair) -> None:
    state = pair.store.create_session("session", agent_type="agent")
    assert state.stream_id == "session"
    expected: dict[int, list[str]] = {}
    words = []
    for step in range(1, 6):
        deltas = [f"{step}.{number}" for number in range(step)]
        words += deltas
        sequence = pair.write("session", *deltas)
        assert sequence == len(words)
        state.step_count = step
        pair.store.save_state_and_promote_staging(
            "session", state, [], StepInfo(f"step-{step}", step, sequence)
        )
        expected[step] = words.copy()
    words.append("never committed")
    pair.write("session", words[-1])
    async_to_sync(pair.streams.end_stream)("session")
    checkpoints = pair.store.list_checkpoints("session").items
    assert [checkpoint.step_count for checkpoint in checkpoints] == [5, 4, 3, 2, 1]
    for checkpoint in checkpoints:
        before = expected[checkpoint.step_count]
        assert checkpoint.stream_sequence == len(before)
        assert pair.read("session", checkpoint.stream_sequence) == words[len(before) :]


def _a_stream_goes_with_the_last_session_that_names_it(pair: Pair) -> None:
    for session_id, stream_id in (("own", None), ("guest", "own"), ("other", None)):
        pair.store.create_session(session_id, agent_type="agent", stream_id=stream_id)
    pair.write("own", "a")
    pair.write("other", "b")
    pair.store.delete_session("own")
    assert pair.knows("own")
    assert pair.knows("other")
    pair.store.delete_session("guest")
    assert not pair.knows("own")
    assert pair.knows("other")


def _a_tree_takes_all_of_its_streams_along(pair: Pair) -> None:
    pair.store.create_session("root", agent_type="agent")
    pair.store.create_session("child", agent_type="agent", parent_session_id="root")
    pair.store.create_session("shared", agent_type="agent", parent_session_id="root", stream_id="root")
    for stream_id in ("root", "child"):
        pair.write(stream_id, "a", "b")
    pair.store.delete_session("root")
    assert not pair.knows("root")
    assert not pair.knows("child")


def _a_session_whose_stream_has_its_own_name_keeps_it(pair: Pair) -> None:
    pair.store.create_session("guest", agent_type="agent", stream_id="host")
    pair.write("host", "a")
    pair.store.create_session("host", agent_type="agent")
    pair.store.delete_session("guest")
    assert pair.knows("host")


PROMISES: list[Callable[[Pair], None]] = [
    _a_checkpoint_says_where_to_read_on,
    _a_stream_goes_with_the_last_session_that_names_it,
    _a_tree_takes_all_of_its_streams_along,
    _a_session_whose_stream_has_its_own_name_keeps_it,
]


@for_each("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_in_the_database(database_pair: Pair, promise: Callable[[Pair], None]) -> None:
    promise(database_pair)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_in_memory(memory_pair: Pair, promise: Callable[[Pair], None]) -> None:
    promise(memory_pair)
