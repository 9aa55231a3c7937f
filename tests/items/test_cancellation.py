"""An async write of items that is cancelled wherever it waits is applied or not, and never half."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final

import anyio
import pytest
from django.test import override_settings

from helix_store.items import ItemLog
from tests.databases import CommittedDatabase

Write = Callable[[ItemLog], Coroutine[Any, Any, Any]]

BEFORE: Final = ["one", "two", "three"]
WRITES: Final[dict[str, tuple[Write, list[Any]]]] = {
    "append": (lambda log: log.aappend(["four", "five"]), [*BEFORE, "four", "five"]),
    "put": (lambda log: log.aput("key", "changed"), ["changed", "two", "three"]),
    "pop": (lambda log: log.apop(), ["one", "two"]),
    "replace_suffix": (lambda log: log.areplace_suffix(["two", "three"], ["short"]), ["one", "short"]),
    "clear": (lambda log: log.aclear(), []),
}
"""Each with what the lane has after it."""


class Cancelled:
    """A call whose task is cancelled while it waits for the ``point``-th time."""

    def __init__(self, call: Coroutine[Any, Any, Any], point: int) -> None:
        self._call = call
        self._point = point
        self.was_reached = False

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._call.__await__()
        step, error, number = steps.send, None, 0
        while True:
            try:
                waiting = step(None) if error is None else steps.throw(error)
            except StopIteration as ended:
                return ended.value
            error = None
            if number == self._point:
                self.was_reached = True
                task = asyncio.current_task()
                assert task is not None
                asyncio.get_running_loop().call_soon(task.cancel)
            number += 1
            try:
                yield waiting
            except asyncio.CancelledError as cancelled:
                error = cancelled


async def _run(call: Cancelled) -> Any:
    return await call


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("write", WRITES)
async def test_a_write_that_is_cancelled_is_applied_or_not(
    committed_db: CommittedDatabase, write: str, threads: int
) -> None:
    make, after = WRITES[write]
    cancelled = 0
    with override_settings(HELIX_STORE={"ASYNC_THREADS": threads}):
        for point in range(20):
            log = ItemLog(f"s{point}", using=committed_db.alias, tenant=committed_db.tenant)
            await log.aappend(BEFORE, keys=["key", None, None])
            call = Cancelled(make(log), point)
            task = asyncio.create_task(_run(call))
            try:
                await task
            except asyncio.CancelledError:
                cancelled += 1
            found = [item.payload for item in await log.atail()]
            assert found in (BEFORE, after)
            # The write has ended: nothing changes later, and the connection takes the next one.
            assert await log.aappend(["next"]) == 1
            assert [item.payload for item in await log.atail()] == [*found, "next"]
            if not call.was_reached:
                break
    assert cancelled >= 1
    assert not call.was_reached


async def test_a_scope_of_anyio_does_not_cancel_a_waiting_write_in_every_turn_of_the_loop(
    committed_db: CommittedDatabase,
) -> None:
    log = ItemLog("session", using=committed_db.alias, tenant=committed_db.tenant)
    await log.aappend(BEFORE)
    begun, may_end = threading.Event(), threading.Event()
    scope = anyio.CancelScope()

    def validate(_: Any) -> bool:
        begun.set()
        return may_end.wait(30)

    async def pop() -> None:
        with scope:
            await log.apop(validate)

    task = asyncio.create_task(pop())
    await asyncio.to_thread(begun.wait, 30)
    scope.cancel()
    for _ in range(100):
        await asyncio.sleep(0)
    cancellations = task.cancelling()
    may_end.set()
    await task
    assert scope.cancelled_caught
    assert 0 < cancellations < 5
    assert [item.payload for item in await log.atail()] == BEFORE[:-1]
