"""Responses that need the same reading of a thread at the same time share it, if it has not begun."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Final

import pytest
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from helix_store import Store
from helix_store.contrib.chat.reading import call_soon, in_reading_thread, read_together
from helix_store.contrib.chat.threads import load_thread
from tests.databases import CommittedDatabase

_PATIENCE_SECONDS: Final = 30.0


class Readings:
    """Readings that begin and end when the test says so. The result of each is its number."""

    def __init__(self) -> None:
        self.begun = 0
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def read(self) -> int:
        self.begun += 1
        self.has_begun.set()
        assert self.may_end.wait(_PATIENCE_SECONDS), "the reading was not let go"
        return self.begun

    def fail(self) -> int:
        self.begun += 1
        raise ConnectionError("the database is gone")


async def _until_begun(readings: Readings) -> None:
    assert await asyncio.to_thread(readings.has_begun.wait, _PATIENCE_SECONDS)


def _ask(call: Callable[[], int], thread: str) -> asyncio.Task[int]:
    return asyncio.ensure_future(read_together(call, "default", "", thread))


async def test_who_asks_before_a_reading_begins_shares_it() -> None:
    readings = Readings()
    readings.may_end.set()
    asked = [_ask(readings.read, "one") for _ in range(10)]
    assert await asyncio.gather(*asked) == [1] * 10


async def test_who_asks_after_it_has_begun_gets_a_newer_one() -> None:
    readings = Readings()
    first = _ask(readings.read, "one")
    await _until_begun(readings)
    second = _ask(readings.read, "one")
    await asyncio.sleep(0)  # it has asked
    readings.may_end.set()
    await asyncio.gather(first, second)
    assert readings.begun == 2


async def test_threads_do_not_share_their_readings() -> None:
    readings = Readings()
    readings.may_end.set()
    await asyncio.gather(_ask(readings.read, "one"), _ask(readings.read, "other"))
    assert readings.begun == 2


async def test_a_response_that_ends_leaves_the_reading_to_the_others() -> None:
    readings = Readings()
    leaving, staying = _ask(readings.read, "one"), _ask(readings.read, "one")
    await _until_begun(readings)
    leaving.cancel()
    readings.may_end.set()
    assert await staying == 1
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_an_error_reaches_all_who_have_asked_and_the_next_one_reads_again() -> None:
    readings = Readings()
    found = await asyncio.gather(
        _ask(readings.fail, "one"), _ask(readings.fail, "one"), return_exceptions=True
    )
    assert [str(each) for each in found] == ["the database is gone"] * 2
    assert readings.begun == 1
    with pytest.raises(ConnectionError):
        await _ask(readings.fail, "one")
    assert readings.begun == 2


async def test_a_reading_opens_one_connection_for_all_its_statements(committed_db: CommittedDatabase) -> None:
    store = Store(committed_db.alias, tenant=committed_db.tenant)
    await store.sessions.acreate_session("t", agent_type="agent")
    opened: list[str] = []

    def note(connection: BaseDatabaseWrapper, **kwargs: object) -> None:
        if threading.current_thread().name.startswith("helix_store chat reader"):
            opened.append(connection.alias)

    connection_created.connect(note)
    try:
        await in_reading_thread(lambda: load_thread(store, "t"))
    finally:
        connection_created.disconnect(note)
    assert opened == [committed_db.alias]


async def test_a_runner_that_waits_for_its_queue_keeps_nobody_from_reading() -> None:
    """It is called once for each thread at a time, and again after that."""
    runner, readings = Readings(), Readings()
    readings.may_end.set()
    for _ in range(3):
        call_soon(runner.read, "one")
    await _until_begun(runner)
    assert await asyncio.wait_for(_ask(readings.read, "one"), _PATIENCE_SECONDS) == 1
    assert runner.begun == 1
    runner.may_end.set()
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while runner.begun == 1:
            call_soon(runner.read, "one")
            await asyncio.sleep(0.01)


async def test_an_error_of_a_call_is_logged_and_the_next_call_is_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = Readings()
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while runner.begun < 2:
            call_soon(runner.fail, "one")
            await asyncio.sleep(0.01)
    assert "the database is gone" in caplog.text
