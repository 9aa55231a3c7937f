"""The page of the example project, in a real browser on a real server."""

from __future__ import annotations

from example_project.live import ANSWER
from tests.asgi_server import serving
from tests.browser import chromium
from tests.databases import CommittedDatabase


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
            assert stranger.text("#answer") == ""
