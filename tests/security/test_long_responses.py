"""A response of the stream view has a bound, so that a client that reads nothing costs no more than that."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from typing import Final

from helix_store.stores import DatabaseStreamManager
from tests.asgi_server import AsgiServer, serving
from tests.browser import chromium
from tests.databases import CommittedDatabase

_CHUNKS: Final = 50
_CHUNK_BYTES: Final = 200 * 1024
_MEBIBYTE: Final = 1024 * 1024


async def _fill(database: CommittedDatabase) -> None:
    """A stream of 10 MiB whose text is the numbers of its chunks."""
    streams = DatabaseStreamManager(database.alias, tenant=database.tenant)
    writer = await streams.create_writer("long", "run", "agent")
    for number in range(1, _CHUNKS + 1):
        await writer.write({"type": "t", "delta": f"{number} ", "padding": "x" * _CHUNK_BYTES})
    await streams.end_stream("long")


def _response(server: AsgiServer, after: int) -> str:
    url = f"{server.url}/streams/long/"
    request = urllib.request.Request(url, headers={"Last-Event-ID": str(after)})  # noqa: S310  our own server
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
        return str(response.read().decode())


def _ids(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^id: (\d+)$", text, re.MULTILINE)]


def test_a_long_response_ends_before_5_mib_and_the_next_one_goes_on(committed_db: CommittedDatabase) -> None:
    asyncio.run(_fill(committed_db))
    received: list[int] = []
    with serving(
        committed_db, settings="tests.streams.server_settings", HELIX_TEST_TENANT=committed_db.tenant
    ) as server:
        while True:
            text = _response(server, received[-1] if received else 0)
            assert len(text) < 5 * _MEBIBYTE
            received += _ids(text)
            if "event: end" in text:
                break
            # The next connection follows soon. After any other end of a response the pause is the usual one.
            assert re.findall(r"^retry: (\d+)$", text, re.MULTILINE) == ["3000", "500"]
    assert received == list(range(1, _CHUNKS + 1))


def test_a_browser_shows_a_long_stream_without_gaps_and_repetitions(committed_db: CommittedDatabase) -> None:
    asyncio.run(_fill(committed_db))
    with (
        serving(
            committed_db, settings="tests.streams.server_settings", HELIX_TEST_TENANT=committed_db.tenant
        ) as server,
        chromium() as browser,
    ):
        browser.open(f"{server.url}/live/long/")
        browser.until("#status", equals="finished")
        assert browser.text("#answer").split() == [str(number) for number in range(1, _CHUNKS + 1)]
        assert browser.complaints() == []
