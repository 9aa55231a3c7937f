"""The chat of the example project, in a real browser on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import example_project
from example_project.chat import BUDGET, GUIDE
from helix_store import Store
from helix_store.stores import DatabaseStateStore
from tests.admin.conftest import browser_on
from tests.admin.test_clicking import _sign_in
from tests.asgi_server import serving
from tests.browser import Browser, chromium
from tests.databases import CommittedDatabase
from tests.example.wsgi_server import runserver

_FOLDER = Path(example_project.__file__).parent
_SLOW = "0.15"
"""Seconds for each word, so that an answer is not over before the test has done something."""


@pytest.fixture(autouse=True)
def _clean(committed_db: CommittedDatabase) -> Iterator[None]:
    yield
    # The server's tenant is that of all projects without tenants.
    store = DatabaseStateStore(committed_db.alias)
    for session in store.list_sessions(agent_type=GUIDE).sessions:
        store.delete_session(session.session_id)
    Store(committed_db.alias).budgets.delete_budget(BUDGET)


@pytest.fixture
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def _begin(browser: Browser, url: str, text: str) -> None:
    """Begin a chat, and wait until the address is that of its thread."""
    browser.open(f"{url}/chat/")
    _send(browser, text)
    browser.until_address(lambda address: not address.endswith("/chat/"))


def _send(browser: Browser, text: str) -> None:
    browser.fill("#compose textarea", text)
    browser.click("#compose .main")


def _until_answered(browser: Browser, *, last: str) -> str:
    """Wait for the last entry and the end of the turn, and return the text of the page."""
    browser.until("#messages li:last-child .text", contains=last)
    _until_idle(browser)
    return browser.text("#messages")


def _until_idle(browser: Browser) -> None:
    """Wait until the page offers no stop any more."""
    browser.until("#stop:not([hidden])", equals="")


def _session_id(database: CommittedDatabase) -> str:
    (session,) = DatabaseStateStore(database.alias).list_sessions(agent_type=GUIDE).sessions
    return session.session_id


def _messages(database: CommittedDatabase) -> list[tuple[str, str]]:
    messages = DatabaseStateStore(database.alias).session(_session_id(database)).messages()
    return [(message["role"], message["content"]) for message in messages]


def _runs(database: CommittedDatabase) -> list[tuple[str, str | None]]:
    runs = DatabaseStateStore(database.alias).list_runs(_session_id(database))
    return [(run.status, run.completion_reason) for run in runs]


def test_the_chat_takes_less_than_250_lines() -> None:
    files = ("chat.py", "static/example/chat.js")
    assert sum(len((_FOLDER / file).read_text().splitlines()) for file in files) < 250


def test_a_message_is_answered_while_one_reads_and_a_tool_is_shown(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    with serving(committed_db, SECONDS_PER_WORD=_SLOW) as server:
        _begin(browser, server.url, "Find me a flight to Lisbon.")
        browser.until("#messages li.assistant .text", at_least=1)
        assert browser.text("#messages li.tool") == ""
        browser.until("#messages li.tool .text", contains="flight: TP 1357")
        browser.until("#messages li.tool + li.assistant .text", at_least=20)
        # The stream has words of a message that is stored now.
        browser.reload()
        live = _until_answered(browser, last="Shall I book it?")
        assert live.count("Let me look") == 1
        browser.reload()
        assert _until_answered(browser, last="Shall I book it?") == live
        _send(browser, "And what is the city like?")
        _until_answered(browser, last="trams")
        assert browser.text("#messages li.problem") == ""
        assert browser.complaints() == []


def test_a_reload_in_the_middle_of_an_answer_neither_loses_nor_repeats_a_word(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    with serving(committed_db, SECONDS_PER_WORD=_SLOW) as server:
        _begin(browser, server.url, "What is Lisbon like?")
        shown = ""
        for length in (10, 60, 110):
            shown = browser.until("#messages li.assistant .text", at_least=length)
            browser.reload()
        _until_answered(browser, last="tell me to book one.")
        (_, (_, whole)) = _messages(committed_db)
        assert browser.text("#messages") == f"YouWhat is Lisbon like?Guide{whole}"
        assert whole.startswith(shown)
        assert browser.complaints() == []


def test_a_message_during_an_answer_waits_in_every_browser_and_is_answered_by_the_same_turn(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    with serving(committed_db, SECONDS_PER_WORD="0.3") as server, chromium() as other:
        _begin(browser, server.url, "What is Lisbon like?")
        other.open(f"{server.url}/chat/")
        other.take_cookies(browser)
        other.open(browser.address())
        other.until("#messages li.assistant .text", at_least=1)
        _send(other, "Find me a flight.")
        for each in (other, browser):
            each.until("#messages li.waiting", contains="Find me a flight.")
        for each in (other, browser):
            shown = _until_answered(each, last="Shall I book it?")
            assert shown.index("tell me to book one.") < shown.index("Find me a flight.")
            assert each.text("#messages li.waiting") == ""
            assert each.complaints() == []
        # A browser in which nothing happens also learns of the next message.
        _send(browser, "Thank you!")
        _until_answered(other, last="trams")
    assert [status for status, _ in _runs(committed_db)] == ["completed"] * 2
    roles = [role for role, _ in _messages(committed_db)]
    assert roles == ["user", "assistant", "user", "assistant", "tool", "assistant", "user", "assistant"]


def test_a_withdrawn_message_is_not_answered(committed_db: CommittedDatabase, browser: Browser) -> None:
    with serving(committed_db, SECONDS_PER_WORD=_SLOW) as server:
        _begin(browser, server.url, "What is Lisbon like?")
        browser.until("#messages li.assistant .text", at_least=1)
        _send(browser, "Find me a flight.")
        browser.until("#messages li.waiting", contains="Find me a flight.")
        browser.click("#messages li.waiting button")
        browser.until("#messages li.waiting", equals="")
        assert "Find me" not in _until_answered(browser, last="tell me to book one.")
        assert browser.complaints() == []
    assert [role for role, _ in _messages(committed_db)] == ["user", "assistant"]


def test_a_stop_keeps_what_was_said_and_the_waiting_message_is_answered(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    with serving(committed_db, SECONDS_PER_WORD=_SLOW) as server:
        _begin(browser, server.url, "What is Lisbon like?")
        browser.until("#messages li.assistant .text", at_least=20)
        _send(browser, "Find me a flight.")
        browser.until("#messages li.waiting", contains="Find me a flight.")
        browser.click("#stop")
        shown = _until_answered(browser, last="Shall I book it?")
        (_, (_, said), *_) = _messages(committed_db)
        assert said.startswith("Lisbon is a good")
        assert said.endswith("…")
        assert said in shown
        browser.reload()
        assert _until_answered(browser, last="Shall I book it?") == shown
        assert browser.complaints() == []
    assert [status for status, _ in _runs(committed_db)] == ["completed", "interrupted"]


def test_an_answer_that_was_stopped_before_its_first_word_can_be_made_anew(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    with serving(committed_db) as server:
        _begin(browser, server.url, "What is Lisbon like?")
        _until_answered(browser, last="tell me to book one.")
        store = DatabaseStateStore(committed_db.alias)
        store.truncate_messages(_session_id(committed_db), 1)
        browser.reload()
        browser.until("#messages li.problem", contains="The guide has stopped.")
        browser.click("#messages li.problem button")
        assert _until_answered(browser, last="tell me to book one.").count("What is Lisbon like?") == 1
    assert [role for role, _ in _messages(committed_db)] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("button", "answer", "is_booked"),
    [(1, "It is booked", True), (2, "I have not booked anything", False)],
)
def test_a_person_decides_in_the_page_and_the_agent_goes_on(
    committed_db: CommittedDatabase, browser: Browser, button: int, answer: str, is_booked: bool
) -> None:
    with serving(committed_db) as server:
        _begin(browser, server.url, "Book the early flight for two.")
        assert "flight: TP 1357" in browser.until("#messages li.asked", contains="book_flight")
        browser.reload()
        browser.until("#messages li.asked", contains="book_flight")
        _send(browser, "And what is the city like?")
        browser.until("#messages li.waiting", contains="the city like?")
        browser.click(f"#messages li.asked button:nth-of-type({button})")
        assert "trams" in _until_answered(browser, last=answer)
        assert browser.text("#messages li.asked") == browser.text("#messages li.waiting") == ""
        assert browser.complaints() == []
    store, session_id = DatabaseStateStore(committed_db.alias), _session_id(committed_db)
    booked = [effect.state for effect in store.list_effects(session_id).items]
    assert booked == (["done"] if is_booked else [])
    (call,) = store.session(session_id).load().completed_client_tool_calls.values()
    assert call["approved"] is is_booked


def test_a_chat_goes_on_after_its_server_was_killed_in_the_middle_of_an_answer(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    with serving(committed_db, SECONDS_PER_WORD=_SLOW) as server:
        _begin(browser, server.url, "What is Lisbon like?")
        browser.until("#messages li.assistant .text", at_least=20)
    browser.until("#messages li.problem", contains="connection was lost")
    with serving(committed_db, port=server.port):
        # The lock of the dead process is held until its term ends. Then another one begins by itself.
        _until_answered(browser, last="tell me to book one.")
        assert browser.text("#messages").count("Lisbon is a good choice") == 1
        assert browser.text("#messages li.problem") == ""
    assert [role for role, _ in _messages(committed_db)] == ["user", "assistant"]


def test_a_message_is_kept_while_the_server_is_away_and_sent_once(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    with serving(committed_db) as server:
        _begin(browser, server.url, "What is Lisbon like?")
        _until_answered(browser, last="tell me to book one.")
    _send(browser, "Thank you!")
    browser.until("#messages li.problem", contains="did not answer")
    with serving(committed_db, port=server.port):
        browser.run(
            "const compose = document.getElementById('compose');"
            "compose.requestSubmit(); compose.requestSubmit();"
        )
        browser.until("#messages li:nth-child(4) .text", contains="trams")
        _until_idle(browser)
        assert browser.run("return document.querySelector('#compose textarea').value") == ""
    assert [content for role, content in _messages(committed_db) if role == "user"] == [
        "What is Lisbon like?",
        "Thank you!",
    ]


_ANSWERED_LATE: Final = """
    const real = window.fetch;
    window.fetch = async (url, options) => {
      const response = await real(url, options);
      if (options?.method !== "POST") return response;
      const thread = url.replace("agui/", `threads/${JSON.parse(options.body).threadId}/`);
      while ((await (await real(thread)).json()).status === "running");
      return response;
    };"""


def test_a_budget_that_is_reached_is_explained_and_raised_and_the_chat_goes_on(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    budgets = Store(committed_db.alias).budgets
    budgets.set_budget(BUDGET, scope="agent_type", value=GUIDE, period="day", limit_tokens=50)
    with serving(committed_db) as server:
        _begin(browser, server.url, "What is Lisbon like?")
        _until_answered(browser, last="tell me to book one.")
        assert browser.text("#messages li.problem") == ""
        # The turn is over before the page looks at the thread, as on a slow connection.
        browser.run(_ANSWERED_LATE)
        _send(browser, "Find me a flight.")
        browser.until("#messages li.problem", contains="when somebody raises the limit")
        assert browser.text("#messages li.problem a") == ""
        address = browser.address()
        _sign_in(browser, server.url, committed_db)
        browser.open(address)
        browser.until("#messages li.problem a", contains="Raise the limit")
        assert "Find me a flight." in browser.text("#messages li.user:nth-child(3)")
        browser.click("#messages li.problem a")
        browser.until(".helix-confirm button", contains="Change the budget")
        browser.run("document.querySelector('[name=limit_tokens]').value = '5000'")
        browser.click(".helix-confirm button")
        browser.until_address(lambda shown: shown == address)
        assert _until_answered(browser, last="Shall I book it?").count("Find me a flight.") == 1
        assert browser.text("#messages li.problem") == ""
    assert [reason for _, reason in _runs(committed_db)] == ["end_turn", f"budget:{BUDGET}", "end_turn"]


def test_the_first_visitor_sets_the_budget_and_no_other_changes_it(committed_db: CommittedDatabase) -> None:
    with browser_on(committed_db) as visitor:
        visitor.open("/chat/")
        assert Store().budgets.status(BUDGET).limit_tokens == 2_000
        Store().budgets.set_budget(BUDGET, scope="agent_type", value=GUIDE, period="day", limit_tokens=9_000)
        visitor.open("/chat/")
        assert Store().budgets.status(BUDGET).limit_tokens == 9_000


def test_a_chat_is_shown_to_nobody_else(committed_db: CommittedDatabase, browser: Browser) -> None:
    with serving(committed_db, SECONDS_PER_WORD=_SLOW) as server:
        _begin(browser, server.url, "A secret.")
        browser.until("#messages li.assistant .text", at_least=1)
        with chromium() as stranger:
            stranger.open(browser.address())
            stranger.until("#messages li.problem", contains="belongs to another visitor")
            assert any("404" in complaint for complaint in stranger.until_complaints())
            assert "A secret." not in stranger.text("body")
            stranger.open(f"{server.url}/streams/{_session_id(committed_db)}/")
            assert "A secret." not in stranger.text("body")


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
        problem = browser.until("#messages li.problem", contains="ASGI server")
        assert "-m uvicorn" in problem
        assert "example_project.asgi:application" in problem
        assert browser.content_width() <= width
        assert browser.run("return document.querySelector('#compose textarea').value").startswith("What is")
        # The thread has not begun.
        complaints = browser.complaints()
        assert any("501" in complaint for complaint in complaints)
        assert all("501" in complaint or "404" in complaint for complaint in complaints)
