"""The writes of locks, streams, the usage ledger and turns. A store in memory makes them too."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Final

from helix_store.core import moments
from helix_store.stores import Lock
from helix_store.streams.manager import StreamWriter
from helix_store.testing.state_store.samples import message, messages
from helix_store.testing.usage.base import custom, tokens
from tests.faults.writes.faces import Faces, Write, synchronous

__all__ = ["MANAGERS", "SEVERAL_TRANSACTIONS", "begin_managers", "contents_of_managers"]

_HOUR: Final = timedelta(hours=1)
_CHUNK: Final = {"type": "text_delta", "delta": "word"}

# Locks


def _taken_over(faces: Faces, key: str) -> Lock:
    return faces.locks.take_over(f"{key}-lock", owner="worker", ttl_ms=2 * _HOUR)


def _acquire(faces: Faces, key: str) -> object:
    return faces.locks.acquire(f"{key}-lock", owner="worker", ttl_ms=_HOUR)


# Usage


def _entry_id(faces: Faces, key: str) -> str:
    return f"entry-{len(faces.usage.get_entries(key))}"


def _record_two(faces: Faces, key: str) -> object:
    first = _entry_id(faces, key)
    return faces.usage.record_entries([tokens(key, id=f"{first}-a", prompt=3), custom(key, id=f"{first}-b")])


# Streams


def _create_writer(faces: Faces, key: str) -> Awaitable[StreamWriter]:
    return faces.streams.create_writer(f"{key}-stream", "run", "agent")


async def _write_many(faces: Faces, key: str) -> object:
    return await (await _create_writer(faces, key)).write_many([_CHUNK] * 3)


async def _heartbeat(faces: Faces, key: str) -> None:
    await (await _create_writer(faces, key)).heartbeat()


async def _close(faces: Faces, key: str) -> None:
    await (await _create_writer(faces, key)).close()


# Turns


def _turn(faces: Faces, key: str) -> None:
    """Of a worker that takes the place of a dead one: two steps, what they spend, and what they stage."""
    faces.locks.force_release(key)
    with faces.store.session(key).turn(owner="worker") as turn:
        for _ in range(2):
            if not turn.is_active:
                return
            turn.tokens(model="no-such-model", prompt=1)
            with ExitStack() as leaving, turn.step() as step:
                step.say(message("in a turn"))
                step.stage("call", merge_changes={"turns": [step.number]})
                leaving.enter_context(faces.one_transaction())


def _step_of_a_handle(faces: Faces, key: str) -> None:
    with ExitStack() as leaving, faces.store.session(key).step() as step:
        step.say(*messages(2))
        leaving.enter_context(faces.one_transaction())


MANAGERS: Final[dict[str, Write]] = {
    "locks: acquire": _acquire,
    "locks: take_over": _taken_over,
    "locks: force_release": lambda faces, key: faces.locks.force_release(f"{key}-lock"),
    "lock: refresh": lambda faces, key: _taken_over(faces, key).refresh(9 * _HOUR),
    "lock: release": lambda faces, key: _taken_over(faces, key).release(),
    "usage: record_entry": lambda faces, key: faces.usage.record_entry(
        tokens(key, id=_entry_id(faces, key), prompt=1)
    ),
    "usage: record_entries": _record_two,
    "usage: delete": lambda faces, key: faces.usage.delete(key),
    "streams: write_sync": lambda faces, key: faces.streams.write_sync(f"{key}-stream", [_CHUNK] * 4),
    "streams: create_writer": synchronous(_create_writer),
    "streams: end_stream": synchronous(lambda faces, key: faces.streams.end_stream(f"{key}-stream", [1])),
    "streams: fail_stream": synchronous(lambda faces, key: faces.streams.fail_stream(f"{key}-stream", "E")),
    "streams: pause_stream": synchronous(lambda faces, key: faces.streams.pause_stream(f"{key}-stream")),
    "streams: reactivate_stream": synchronous(
        lambda faces, key: faces.streams.reactivate_stream(f"{key}-stream")
    ),
    "streams: reset_stream": synchronous(lambda faces, key: faces.streams.reset_stream(f"{key}-stream")),
    "streams: delete_stream": synchronous(lambda faces, key: faces.streams.delete_stream(f"{key}-stream")),
    "streams: prune": synchronous(lambda faces, key: faces.streams.prune(older_than=None, keep_chunks=2)),
    "stream writer: write_many": synchronous(_write_many),
    "stream writer: heartbeat": synchronous(_heartbeat),
    "stream writer: close": synchronous(_close),
    "session handle: step": _step_of_a_handle,
    "session handle: turn": _turn,
}

SEVERAL_TRANSACTIONS: Final = {
    "lock: refresh",
    "lock: release",
    "stream writer: write_many",
    "stream writer: heartbeat",
    "stream writer: close",
    "session handle: step",
    "session handle: turn",
}
"""Each of their transactions is there or not; a kill may fall between two."""


def begin_managers(faces: Faces, key: str) -> None:
    synchronous(_create_writer)(faces, key)


def contents_of_managers(faces: Faces, key: str) -> dict[str, Any]:
    """What is stored beside the session. An end of a term is its distance from now, in hours."""
    stream = f"{key}-stream"
    # What get_info() returns, without the thread and the event loop that a synchronous caller needs for it.
    info = faces.streams._backend.info(stream)
    return {
        "locks": [
            (lock.name, lock.owner, lock.fencing_token, round((lock.expires_at - moments.now()) / _HOUR))
            for lock in faces.locks.get_active_locks()
        ],
        "usage": faces.usage.get_entries(key),
        "spent": faces.usage.get_rollup(key),
        "stream": info,
        "chunks": info and faces.streams.read_after(stream, info.last_sequence - info.chunk_count),
    }
