"""The page of the example project, in a real browser on a real server."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager

import pytest

from example_project.live import ANSWER
from helix_store.stores import DatabaseStreamManager
from tests.asgi_server import AsgiServer, serving
from tests.browser import chromium
from tests.databases import CommittedDatabase
from tests.example.wsgi_server import runserver


def test_a_reload_in_the_middle_of_an_answer_neither_loses_nor_repeats_a_word(
    committed_db: CommittedDatabase,
) -> None:
    with serving(committed_db) as server, chromium() as browser:
        browser.open(f"{server.url}/live/")
        browser.click("button")
        for length in (len(ANSWER) // 8, len(ANSWER) // 3, len(ANSWER) // 2):
            shown = browser.until("#answer", at_least=length)
            assert ANSWER.startswith(shown.rstrip())
            assert len(shown) < len(ANSWER), "the answer was over before the reload"
            browser.reload()
        browser.until("#status", equals="finished")
        assert browser.text("#answer") == f"{ANSWER} "
        browser.reload()
        browser.until("#status", equals="finished")
        assert browser.text("#answer") == f"{ANSWER} "
        assert browser.complaints() == []


def test_an_answer_is_shown_to_nobody_else(committed_db: CommittedDatabase) -> None:
    with serving(committed_db) as server:
        with chromium() as browser:
            browser.open(f"{server.url}/live/")
            browser.click("button")
            browser.until("#answer", at_least=1)
            address = browser.address()
        with chromium() as stranger:
            stranger.open(address)
            assert stranger.text("h1") == "Which flight shall I take?"
            assert any("403" in complaint for complaint in stranger.until_complaints())
            stranger.until("#status", contains="another visitor")
            assert stranger.text("#answer") == ""


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_says_in_words_which_server_to_start(committed_db: CommittedDatabase, width: int) -> None:
    with runserver(committed_db) as url, chromium() as browser:
        browser.resize(width, 800)
        browser.open(f"{url}/live/")
        browser.click("button")
        status = browser.until("#status", contains="ASGI server")
        assert "-m uvicorn" in status
        assert "example_project.asgi:application" in status
        assert browser.content_width() <= width
        # Nothing was blocked: the browser reports the refused requests only.
        complaints = browser.complaints()
        assert complaints
        assert all("501" in complaint for complaint in complaints)


def test_the_page_says_that_the_connection_was_lost_and_goes_on_after_it(
    committed_db: CommittedDatabase,
) -> None:
    with chromium() as browser:
        with _open_to_everyone(committed_db) as server:
            asyncio.run(_write(committed_db, "one "))
            browser.open(f"{server.url}/live/interrupted/")
            browser.until("#answer", equals="one ")
        browser.until("#status", contains="connection was lost")
        asyncio.run(_write(committed_db, "two"))
        with _open_to_everyone(committed_db, port=server.port):
            browser.until("#answer", equals="one two")
            browser.until("#status", equals="answering")


def test_the_page_of_an_unknown_answer_says_so(committed_db: CommittedDatabase) -> None:
    with _open_to_everyone(committed_db) as server, chromium() as browser:
        browser.open(f"{server.url}/live/unknown/")
        browser.until("#status", contains="does not exist")


def _open_to_everyone(database: CommittedDatabase, *, port: int = 0) -> AbstractContextManager[AsgiServer]:
    settings = "tests.streams.server_settings"
    return serving(database, settings=settings, port=port, HELIX_TEST_TENANT=database.tenant)


async def _write(database: CommittedDatabase, word: str) -> None:
    streams = DatabaseStreamManager(database.alias, tenant=database.tenant)
    writer = await streams.create_writer("interrupted", "run", "agent")
    await writer.write({"type": "text_delta", "delta": word})
