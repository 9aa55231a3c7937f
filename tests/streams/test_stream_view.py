"""The stream view on a real ASGI server: events, resuming, heartbeats and permissions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest
from django.test import AsyncClient, Client, override_settings

from helix_store.stores import DatabaseStreamManager
from tests.asgi_server import AsgiServer, serving
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.streams.event_source import EventSource, Received

_PATIENCE_SECONDS = 60


class Site:
    """A server and the streams it shows."""

    def __init__(self, server: AsgiServer, database: CommittedDatabase) -> None:
        self.server = server
        self.streams = DatabaseStreamManager(database.alias, tenant=database.tenant)

    async def filled(self, stream_id: str, count: int) -> None:
        writer = await self.streams.create_writer(stream_id, "run", "agent")
        await writer.write_many([{"type": "t", "number": number} for number in range(1, count + 1)])

    @asynccontextmanager
    async def opened(
        self, stream_id: str, query: str = "", last_event_id: str | None = None
    ) -> AsyncIterator[EventSource]:
        path = f"/streams/{quote(stream_id, safe='/')}/{query}"
        source = await EventSource.open(self.server.port, path, last_event_id=last_event_id)
        try:
            yield source
        finally:
            await source.close()

    async def received(
        self, stream_id: str, query: str = "", last_event_id: str | None = None
    ) -> list[Received]:
        async with self.opened(stream_id, query, last_event_id) as source:
            assert source.status == 200
            return await source.all()

    async def status(self, stream_id: str, query: str = "", last_event_id: str | None = None) -> int:
        async with self.opened(stream_id, query, last_event_id) as source:
            return source.status


@pytest.fixture
def site(committed_db: CommittedDatabase) -> Iterator[Site]:
    with serving(
        committed_db,
        settings="tests.streams.server_settings",
        HELIX_TEST_TENANT=committed_db.tenant,
    ) as server:
        yield Site(server, committed_db)


def _run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await scenario()

    asyncio.run(in_time())


def _ids(events: list[Received]) -> list[str | None]:
    return [event.id for event in events if event.event == "message"]


@pytest.mark.thorough
def test_the_view_shows_streams(site: Site) -> None:
    async def show() -> None:
        await _shows_headers_chunks_and_the_end(site)
        await _resumes(site)
        await _follows_with_heartbeats(site)
        await _says_how_a_stream_ended(site)
        await _tells_readers_below_the_floor(site)
        await _refuses(site)
        await _shows_exact_chunks_of_any_id(site)

    _run(show)
    assert not [line for line in site.server.log if "Traceback" in line], "".join(site.server.log)


async def _shows_headers_chunks_and_the_end(site: Site) -> None:
    await site.filled("ended", 120)
    await site.streams.end_stream("ended", {"answer": 42})
    async with site.opened("ended") as source:
        assert source.status == 200
        assert source.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert source.headers["cache-control"] == "private, no-store"
        assert source.headers["x-accel-buffering"] == "no"
        events = await source.all()
    assert events[0] == Received("message", "1", {"type": "t", "number": 1})
    assert _ids(events) == [str(number) for number in range(1, 121)]
    assert events[-1] == Received("end", None, {"status": "ended", "output": {"answer": 42}})


async def _resumes(site: Site) -> None:
    for query, last_event_id, first in (
        ("?from=100", None, 101),
        ("", "110", 111),
        ("?from=5", "118", 119),
        ("?from=0", None, 1),
        ("?from=120", None, 121),
        ("?from=9223372036854775807", None, 121),
    ):
        events = await site.received("ended", query, last_event_id)
        assert _ids(events) == [str(number) for number in range(first, 121)]
        assert events[-1].event == "end"


async def _follows_with_heartbeats(site: Site) -> None:
    await site.filled("live", 1)
    async with site.opened("live") as source:
        assert await source.next() == Received("message", "1", {"type": "t", "number": 1})
        following = asyncio.create_task(source.next())
        comments = source.comments
        while source.comments < comments + 2:  # noqa: ASYNC110  heartbeats are no events
            await asyncio.sleep(0.01)
        writer = await site.streams.create_writer("live", "run", "agent")
        await writer.write({"type": "t", "number": 2})
        assert await following == Received("message", "2", {"type": "t", "number": 2})
        await site.streams.end_stream("live")
        assert await source.all() == [Received("end", None, {"status": "ended", "output": None})]


async def _says_how_a_stream_ended(site: Site) -> None:
    await site.filled("failed", 1)
    await site.streams.fail_stream("failed", "overloaded")
    assert (await site.received("failed"))[1:] == [
        Received("fail", None, {"status": "failed", "error": "overloaded"})
    ]
    await site.filled("paused", 1)
    await site.streams.pause_stream("paused")
    assert (await site.received("paused"))[1:] == [Received("paused", None, {"status": "paused"})]
    await site.filled("deleted", 1)
    async with site.opened("deleted") as source:
        assert (await source.next()) is not None
        await site.streams.delete_stream("deleted")
        (last,) = await source.all()
    assert (last.event, last.data["error"]["code"]) == ("fail", "stream_not_found")


async def _tells_readers_below_the_floor(site: Site) -> None:
    await site.filled("pruned", 10)
    async with site.opened("pruned", "?from=10") as waiting:
        await site.streams.prune(older_than=timedelta(days=1), keep_chunks=3)
        for query in ("", "?from=6"):
            assert await site.received("pruned", query) == [Received("truncated", None, {"oldest": 8})]
        await site.streams.end_stream("pruned")
        assert [event.event for event in await waiting.all()] == ["end"]
    assert _ids(await site.received("pruned", "?from=7")) == ["8", "9", "10"]
    await site.filled("reset", 3)
    async with site.opened("reset", "?from=3") as source:
        await site.streams.reset_stream("reset")
        assert await source.all() == [Received("truncated", None, {"oldest": 1})]


async def _refuses(site: Site) -> None:
    assert await site.status("nowhere") == 404
    assert await site.status("secret") == 403
    assert await site.status("nul\x00") == 400
    for bad in ("-1", "1.5", "1e3", "abc", "9223372036854775808", "%D9%A3", "+1", "1" * 5_000, "0x1"):
        assert await site.status("ended", f"?from={bad}") == 400
    assert await site.status("ended", "", "abc") == 400
    assert await site.status("ended", "?from=1", "-1") == 400


async def _shows_exact_chunks_of_any_id(site: Site) -> None:
    chunk = {"type": "t", "text": "\r\n\n \u2028 \x00 <script> \ud83d" + "\ude00 \U0001f600", "-0.0": -0.0}
    for stream_id in ("a/b", "../x", "ü ?#", "x" * 255):
        writer = await site.streams.create_writer(stream_id, "run", "agent")
        await writer.write(chunk)
        await site.streams.end_stream(stream_id)
        first, last = await site.received(stream_id)
        assert json.dumps(first.data) == json.dumps(json.loads(json.dumps(chunk)))
        assert last.event == "end"


# Who may read


def deny(request: Any, stream_id: str) -> bool:
    return False


def allow(request: Any, stream_id: str) -> bool:
    return True


async def allow_asynchronously(request: Any, stream_id: str) -> bool:
    return True


@for_each(
    ("permission", "status"), [(None, 403), ("deny", 403), ("allow", 404), ("allow_asynchronously", 404)]
)
async def test_only_those_whom_the_project_lets_in_are_let_in(
    committed_db: CommittedDatabase, permission: str | None, status: int
) -> None:
    path = None if permission is None else f"tests.streams.test_stream_view.{permission}"
    streams = {"using": committed_db.alias}
    with override_settings(HELIX_STORE={"STREAM_PERMISSION": path, "STREAMS": streams}):
        response = await AsyncClient().get("/streams/nowhere/")
    assert response.status_code == status
    assert response.headers["Cache-Control"] == "private, no-store"


async def test_a_wrong_setting_is_no_wrong_request(
    committed_db: CommittedDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that gets 400 does not ask again, and its developer looks for a fault in the client."""
    permission = {"STREAM_PERMISSION": "tests.streams.test_stream_view.allow"}
    with override_settings(HELIX_STORE={**permission, "STREAMS": {"using": "nowhere"}}):
        response = await AsyncClient().get("/streams/stream/")
        assert response.status_code == 503
        assert b"nowhere" not in response.content
        assert "There is no database 'nowhere'" in caplog.text
        for path in ("/streams/stream/?from=-1", "/streams/nul%00/"):
            assert (await AsyncClient().get(path)).status_code == 400


def test_wsgi_is_refused_after_the_permission() -> None:
    with override_settings(HELIX_STORE={}):
        assert Client().get("/streams/stream/").status_code == 403
    with override_settings(HELIX_STORE={"STREAM_PERMISSION": "tests.streams.test_stream_view.allow"}):
        assert Client().get("/streams/stream/").status_code == 501


def test_streams_are_only_read() -> None:
    for method in ("post", "put", "delete", "head"):
        assert getattr(Client(), method)("/streams/stream/").status_code == 405
