"""The chat of the example project, in a real browser on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from example_project.chat.guide import GUIDE
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from tests.asgi_server import serving
from tests.browser import Browser, chromium
from tests.databases import CommittedDatabase
from tests.example.wsgi_server import runserver


@pytest.fixture(autouse=True)
def _clean(committed_db: CommittedDatabase) -> Iterator[None]:
    yield
    # The server's tenant is that of all projects without tenants.
    store = DatabaseStateStore(committed_db.alias)
    for session in store.list_sessions(agent_type=GUIDE).sessions:
        store.delete_session(session.session_id)


@pytest.fixture
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def _send(browser: Browser, text: str) -> None:
    browser.fill("#compose textarea", text)
    browser.click("#compose button")


def _draft(browser: Browser) -> str:
    return str(browser.run("return document.querySelector('#compose textarea').value"))


@contextmanager
def _driven_elsewhere(database: CommittedDatabase, session_id: str) -> Iterator[None]:
    lock = DatabaseLockManager(database.alias).acquire(session_id)
    assert lock is not None
    with lock:
        yield


def _ask_for_a_booking(browser: Browser, url: str) -> None:
    browser.open(f"{url}/chat/")
    _send(browser, "Book the early flight for two.")
    browser.until("#question", contains="May the agent run book_flight?")


def test_a_message_is_answered_while_one_reads_and_a_tool_is_shown(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    with serving(committed_db) as server:
        browser.open(f"{server.url}/chat/")
        _send(browser, "Find me a flight to Lisbon.")
        browser.until_address(lambda address: "/chat/chat-" in address)
        browser.until("#transcript li.assistant .text", at_least=1)
        assert browser.text("#transcript li.tool") == ""
        browser.until("#transcript li.tool .text", contains="flight: TP 1357")
        browser.until("#transcript li:nth-child(4) .text", at_least=20)
        # The stream has words of a message that the page now shows as stored.
        browser.reload()
        browser.until("#transcript li:nth-child(4) .text", contains="Shall I book it?")
        browser.until("#status", equals="")
        assert browser.text("#transcript").count("Let me look") == 1
        live = browser.text("#transcript")
        browser.reload()
        assert _letters(browser.text("#transcript")) == _letters(live)
        _send(browser, "And what is the city like?")
        browser.until("#transcript li:nth-child(6) .text", contains="trams")
        assert browser.complaints() == []


def test_a_reload_in_the_middle_of_an_answer_neither_loses_nor_repeats_a_word(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    with serving(committed_db) as server:
        browser.open(f"{server.url}/chat/")
        _send(browser, "What is Lisbon like?")
        browser.until_address(lambda address: "/chat/chat-" in address)
        shown = ""
        for length in (10, 60, 110):
            shown = browser.until("#transcript li:nth-child(2) .text", at_least=length)
            assert "tell me to book" not in shown, "the answer was over before the reload"
            browser.reload()
        whole = browser.until("#transcript li:nth-child(2) .text", contains="tell me to book one.")
        assert whole.startswith(shown)
        browser.until("#status", equals="")
        browser.reload()
        assert _letters(browser.text("#transcript li:nth-child(2) .text")) == _letters(whole)
        assert browser.text("#transcript li:nth-child(3)") == ""
        assert browser.complaints() == []


@pytest.mark.parametrize(
    ("button", "answer", "is_booked"),
    [("approve", "It is booked", True), ("refuse", "I have not booked anything", False)],
)
def test_a_person_decides_in_the_page_and_the_agent_goes_on(
    committed_db: CommittedDatabase, browser: Browser, button: str, answer: str, is_booked: bool
) -> None:
    with serving(committed_db) as server:
        _ask_for_a_booking(browser, server.url)
        assert "flight: TP 1357" in browser.text("#question")
        browser.reload()
        browser.until("#question", contains="book_flight")
        browser.click(f"#approval button[value={button}]")
        browser.until("#transcript li:last-child .text", contains=answer)
        browser.until("#status", equals="")
        assert browser.complaints() == []
        session_id = browser.address().rstrip("/").rpartition("/")[2]
    state = DatabaseStateStore(committed_db.alias).session(session_id).load()
    assert ("booking" in state.custom_state) is is_booked
    assert state.completed_client_tool_calls["call-1"]["approved"] is is_booked


def test_a_second_tab_is_told_in_words_that_the_agent_is_busy_or_waits(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    with serving(committed_db) as server:
        _ask_for_a_booking(browser, server.url)
        # A tab that was opened before has an active button.
        browser.run("document.querySelector('#compose button').disabled = false")
        _send(browser, "Something else.")
        browser.until("[role=alert]", contains="waits for your decision")
        assert _draft(browser) == "Something else."
        session_id = browser.address().rstrip("/").rpartition("/")[2]
        with _driven_elsewhere(committed_db, session_id):
            browser.click("#approval button[value=approve]")
            browser.until("[role=alert]", contains="still at work")
        browser.open(f"{server.url}/chat/{session_id}/")
        browser.click("#go-on button")
        browser.until("#transcript li:last-child .text", contains="It is booked")
        browser.until("#status", equals="")
        with _driven_elsewhere(committed_db, session_id):
            _send(browser, "Thank you!")
            browser.until("[role=alert]", contains="still answering")
        assert _draft(browser) == "Thank you!"
    assert DatabaseStateStore(committed_db.alias).get_message_count(session_id) == 4


def test_a_message_from_another_tab_is_refused_during_an_answer(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    with serving(committed_db) as server:
        browser.open(f"{server.url}/chat/")
        _send(browser, "What is Lisbon like?")
        browser.until("#transcript li:nth-child(2) .text", at_least=1)
        status, answer = browser.run(
            "const form = document.getElementById('compose'), body = new FormData(form);"
            "body.set('text', 'And from here?');"
            "const sent = await fetch(form.action, {method: 'POST', body});"
            "return [sent.status, await sent.text()];"
        )
        assert status == 409
        assert "still answering" in answer
        assert "And from here?" in answer
        browser.until("#transcript li:nth-child(2) .text", contains="tell me to book one.")
        assert "And from here?" not in browser.text("#transcript")


def test_a_chat_goes_on_after_its_server_was_killed_in_the_middle_of_an_answer(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    with serving(committed_db) as server:
        browser.open(f"{server.url}/chat/")
        _send(browser, "What is Lisbon like?")
        browser.until("#transcript li:nth-child(2) .text", at_least=20)
        address = browser.address()
    with serving(committed_db, port=server.port):
        browser.open(address)
        # The lock of the dead process is held until its term ends.
        browser.until("#status", contains="silent for a while")
        browser.reload()
        browser.click("#go-on button")
        browser.until("#transcript li:nth-child(2) .text", contains="tell me to book one.")
        browser.until("#status", equals="")
    session_id = address.rstrip("/").rpartition("/")[2]
    messages = DatabaseStateStore(committed_db.alias).get_messages(session_id).messages
    roles = [message["role"] for message in messages]
    assert roles == ["user", "assistant"]


def test_a_chat_is_shown_to_nobody_else(committed_db: CommittedDatabase, browser: Browser) -> None:
    with serving(committed_db) as server:
        browser.open(f"{server.url}/chat/")
        _send(browser, "A secret.")
        browser.until("#transcript li:nth-child(2) .text", at_least=1)
        address, events = browser.address(), browser.run("return transcript.dataset.events")
        with chromium() as stranger:
            stranger.open(address)
            assert any("404" in complaint for complaint in stranger.until_complaints())
            assert "A secret." not in stranger.text("body")
            stranger.open(server.url + events)
            assert "Forbidden" in stranger.text("body")


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_and_says_in_words_which_server_to_start(
    committed_db: CommittedDatabase, browser: Browser, width: int
) -> None:
    with runserver(committed_db) as url:
        browser.resize(width, 800)
        browser.open(f"{url}/chat/")
        assert browser.content_width() <= width
        inline = "return document.querySelectorAll('script:not([src]), style, [style]').length"
        assert browser.run(inline) == 0
        policy = "return (await fetch(location)).headers.get('Content-Security-Policy')"
        assert browser.run(policy) == "default-src 'self'"
        _send(browser, "What is Lisbon like? " + "x" * 200)
        status = browser.until("#status", contains="ASGI server")
        assert "-m uvicorn" in status
        assert "example_project.asgi:application" in status
        assert browser.content_width() <= width
        complaints = browser.complaints()
        assert complaints
        assert all("501" in complaint for complaint in complaints)


def _letters(text: str) -> str:
    """Without the whitespace of markup."""
    return "".join(text.split())
