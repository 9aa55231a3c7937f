"""The stores and managers are what their protocols say; the type checker reads this file too."""

from __future__ import annotations

import inspect
from typing import assert_type

import pytest

from helix_store import (
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    InMemoryLockManager,
    InMemoryStateStore,
    InMemoryStreamManager,
    LockManager,
    NoOpLockManager,
    SessionState,
    StateStore,
)
from helix_store.core.contracts import REQUIRED_METHODS, ChunkReader, ChunkWriter, HeldLock, StreamManager
from tests.cells import for_each


def test_each_call_of_a_state_store_is_required_with_its_async_version() -> None:
    calls = [name for name in REQUIRED_METHODS if f"a{name}" in REQUIRED_METHODS]
    assert list(REQUIRED_METHODS) == [*calls, *(f"a{name}" for name in calls)]
    assert {name for name in vars(StateStore) if not name.startswith("_")} == set(REQUIRED_METHODS)
    for name in calls:
        call, version = getattr(StateStore, name), getattr(StateStore, f"a{name}")
        assert version.__name__ == f"a{name}"
        assert inspect.signature(version).parameters == inspect.signature(call).parameters, name


@for_each(
    ("protocol", "classes"),
    [
        (StateStore, [DatabaseStateStore, InMemoryStateStore]),
        (LockManager, [DatabaseLockManager, InMemoryLockManager, NoOpLockManager]),
        (StreamManager, [DatabaseStreamManager, InMemoryStreamManager]),
    ],
)
def test_a_class_has_every_call_of_its_protocol_with_its_parameters(
    protocol: type, classes: list[type]
) -> None:
    calls = [name for name in dir(protocol) if not name.startswith("_")]
    assert len(calls) > 8
    assert not isinstance(object(), protocol)
    for cls in classes:
        assert isinstance(cls(), protocol)
        for name in calls:
            declared = inspect.signature(getattr(protocol, name)).parameters
            assert list(inspect.signature(getattr(cls, name)).parameters) == list(declared), (cls, name)


async def test_a_program_can_be_written_against_the_protocols() -> None:
    store: StateStore = InMemoryStateStore()
    locks: LockManager = InMemoryLockManager()
    streams: StreamManager = InMemoryStreamManager()
    state = await store.acreate_session("session", agent_type="agent")
    assert_type(state, SessionState)
    assert_type(await store.aload_state("session"), SessionState | None)
    assert [message async for message in store.aiter_messages("session")] == []

    lock = await locks.aacquire("session")
    assert lock is not None
    assert_type(lock, HeldLock)
    async with lock as held:
        assert (await locks.aget_active_locks())[0].fencing_token == held.fencing_token
    assert not locks.is_locked("session")

    writer: ChunkWriter = await streams.create_writer("session", "run", "agent")
    async with writer:
        assert await writer.write({"type": "text"}) == 1
    await streams.end_stream("session")
    reader: ChunkReader | None = await streams.create_resumable_reader("session")
    assert reader is not None
    assert [chunk.sequence async for chunk in reader] == [1]


def test_the_database_classes_follow_the_protocols() -> None:
    """What the type checker checks here needs no database."""
    store: StateStore = DatabaseStateStore()
    locks: LockManager = DatabaseLockManager()
    streams: StreamManager = DatabaseStreamManager()
    assert [type(each).__name__.removeprefix("Database") for each in (store, locks, streams)] == [
        "StateStore",
        "LockManager",
        "StreamManager",
    ]


@for_each("given", [{"agent": "a"}, {"agent_type": "a", "tag": "t"}])
def test_a_list_of_sessions_takes_only_the_filters_of_the_contract(given: dict[str, str]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        InMemoryStateStore().list_sessions(**given)  # type: ignore[arg-type]
