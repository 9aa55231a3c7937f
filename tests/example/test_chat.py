"""The chat of the example project, in a real browser on a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from example_project.chat.allowance import BUDGET
from example_project.chat.guide import GUIDE
from helix_store import Store
from helix_store.stores import DatabaseStateStore
from tests.admin.test_clicking import _sign_in
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
    Store(committed_db.alias).budgets.delete_budget(BUDGET)


@pytest.fixture
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def _begin(browser: Browser, url: str, text: str) -> str:
    """Begin a chat, and return its id."""
    browser.open(f"{url}/chat/")
    _send(browser, text)
    browser.until_address(lambda address: "/chat/chat-" in address)
    return browser.address().rstrip("/").rpartition("/")[2]


def _send(browser: Browser, text: str) -> None:
    browser.fill("#compose textarea", text)
    browser.click("#compose button")


def _until_answered(browser: Browser, *, last: str) -> str:
    """Wait for the last entry and the end of the turn, and return the text of the page."""
    browser.until("#transcript li:last-child .text", contains=last)
    browser.until("#stop", equals="")
    return browser.text("#transcript")


def _messages(database: CommittedDatabase, session_id: str) -> list[tuple[str, str]]:
    messages = DatabaseStateStore(database.alias).session(session_id).messages()
    return [(message["role"], message["content"]) for message in messages]


def test_a_message_is_answered_while_one_reads_and_a_tool_is_shown(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    with serving(committed_db) as server:
        _begin(browser, server.url, "Find me a flight to Lisbon.")
        browser.until("#writing li.assistant .text", at_least=1)
        assert browser.text("#transcript li.tool") == ""
        browser.until("#transcript li.tool .text", contains="flight: TP 1357")
        browser.until("#writing .text", at_least=20)
        # The stream has words of a message that the page now shows as stored.
        browser.reload()
        live = _until_answered(browser, last="Shall I book it?")
        assert live.count("Let me look") == 1
        assert browser.text("#writing") == ""
        browser.reload()
        assert browser.text("#transcript").split() == live.split()
        _send(browser, "And what is the city like?")
        _until_answered(browser, last="trams")
        assert browser.text("#status") == ""
        assert browser.complaints() == []


def test_a_reload_in_the_middle_of_an_answer_neither_loses_nor_repeats_a_word(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    with serving(committed_db) as server:
        session_id = _begin(browser, server.url, "What is Lisbon like?")
        shown = ""
        for length in (10, 60, 110):
            shown = browser.until("#writing .text", at_least=length)
            browser.reload()
        _until_answered(browser, last="tell me to book one.")
        assert browser.text("#writing") == ""
        (_, (_, whole)) = _messages(committed_db, session_id)
        assert browser.text("#transcript").split() == f"YouWhat is Lisbon like? Guide{whole}".split()
        assert whole.startswith(shown)
        assert browser.complaints() == []


def test_a_message_during_an_answer_waits_in_every_browser_and_is_answered_by_the_same_turn(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    # On a busy machine, the answer must not end before the second browser has sent its message.
    with serving(committed_db, SECONDS_PER_WORD="0.15") as server, chromium() as other:
        session_id = _begin(browser, server.url, "What is Lisbon like?")
        other.open(f"{server.url}/chat/")
        other.take_cookies(browser)
        other.open(browser.address())
        other.until("#writing .text", at_least=1)
        _send(other, "Find me a flight.")
        for each in (other, browser):
            assert "waiting" in each.until("#waiting li", contains="Find me a flight.")
            assert "Find me" not in each.text("#transcript")
        for each in (other, browser):
            shown = _until_answered(each, last="Shall I book it?")
            assert shown.index("tell me to book one.") < shown.index("Find me a flight.")
            assert each.text("#waiting li") == ""
            assert each.complaints() == []
        # A browser in which nothing happens also learns of the next message.
        _send(browser, "Thank you!")
        _until_answered(other, last="trams")
    assert [run.status for run in DatabaseStateStore(committed_db.alias).list_runs(session_id)] == [
        "completed"
    ] * 2
    roles = [role for role, _ in _messages(committed_db, session_id)]
    assert roles == ["user", "assistant", "user", "assistant", "tool", "assistant", "user", "assistant"]


def test_a_withdrawn_message_is_not_answered(committed_db: CommittedDatabase, browser: Browser) -> None:
    with serving(committed_db) as server:
        session_id = _begin(browser, server.url, "What is Lisbon like?")
        _send(browser, "Find me a flight.")
        browser.until("#waiting li", contains="Find me a flight.")
        browser.click("#waiting button")
        browser.until("#waiting li", equals="")
        assert "Find me" not in _until_answered(browser, last="tell me to book one.")
        assert browser.complaints() == []
    assert [role for role, _ in _messages(committed_db, session_id)] == ["user", "assistant"]


def test_a_stop_keeps_what_was_said_and_a_waiting_message_which_the_next_turn_answers(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    with serving(committed_db) as server:
        session_id = _begin(browser, server.url, "What is Lisbon like?")
        browser.until("#writing .text", at_least=20)
        _send(browser, "Find me a flight.")
        browser.until("#waiting li", contains="Find me a flight.")
        browser.click("#stop button")
        browser.until("#go-on", contains="has stopped")
        store = DatabaseStateStore(committed_db.alias)
        assert [run.status for run in store.list_runs(session_id)] == ["interrupted"]
        (_, said) = _messages(committed_db, session_id)[-1]
        assert said.startswith("Lisbon is a good")
        assert said.endswith(" …")
        assert "Find me a flight." in browser.text("#waiting li")
        browser.reload()
        assert said in browser.text("#transcript")
        assert browser.text("#writing") == ""
        _send(browser, "To Lisbon, please.")
        _until_answered(browser, last="Shall I book it?")
        assert browser.text("#waiting li") == browser.text("#go-on") == ""
        assert browser.complaints() == []
    assert [content for role, content in _messages(committed_db, session_id) if role == "user"] == [
        "What is Lisbon like?",
        "Find me a flight.",
        "To Lisbon, please.",
    ]


@pytest.mark.parametrize(
    ("button", "answer", "is_booked"),
    [("approve", "It is booked", True), ("refuse", "I have not booked anything", False)],
)
def test_a_person_decides_in_the_page_and_the_agent_goes_on(
    committed_db: CommittedDatabase, browser: Browser, button: str, answer: str, is_booked: bool
) -> None:
    with serving(committed_db) as server:
        session_id = _begin(browser, server.url, "Book the early flight for two.")
        assert "flight: TP 1357" in browser.until("#question", contains="May the agent run book_flight?")
        browser.reload()
        _send(browser, "And what is the city like?")
        browser.until("#waiting li", contains="the city like?")
        browser.click(f"#approval button[value={button}]")
        assert "trams" in _until_answered(browser, last=answer)
        assert browser.text("#question") == browser.text("#waiting li") == ""
        assert browser.complaints() == []
    state = DatabaseStateStore(committed_db.alias).session(session_id).load()
    assert ("booking" in state.custom_state) is is_booked
    assert state.completed_client_tool_calls["call-1"]["approved"] is is_booked


def test_a_chat_goes_on_after_its_server_was_killed_in_the_middle_of_an_answer(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    with serving(committed_db) as server:
        session_id = _begin(browser, server.url, "What is Lisbon like?")
        browser.until("#writing .text", at_least=20)
    with serving(committed_db, port=server.port):
        # The lock of the dead process is held until its term ends. Then the page finds out by itself.
        browser.until("#go-on", contains="has stopped")
        browser.click("#go-on button")
        _until_answered(browser, last="tell me to book one.")
        assert browser.text("#transcript").count("Lisbon is a good choice") == 1
        assert browser.text("#writing") == ""
    assert [role for role, _ in _messages(committed_db, session_id)] == ["user", "assistant"]


def test_a_message_is_kept_while_the_server_is_away_and_sent_once(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    with serving(committed_db) as server:
        session_id = _begin(browser, server.url, "What is Lisbon like?")
        _until_answered(browser, last="tell me to book one.")
    _send(browser, "Thank you!")
    browser.until("#problem", contains="did not answer")
    with serving(committed_db, port=server.port):
        browser.run(
            "const compose = document.getElementById('compose');"
            "compose.requestSubmit(); compose.requestSubmit();"
        )
        browser.until("#transcript li:nth-child(4) .text", contains="trams")
        browser.until("#stop", equals="")
        assert browser.run("return document.querySelector('#compose textarea').value") == ""
    assert [content for role, content in _messages(committed_db, session_id) if role == "user"] == [
        "What is Lisbon like?",
        "Thank you!",
    ]


def test_a_budget_that_is_reached_is_explained_and_raised_and_the_chat_goes_on(
    committed_db: CommittedDatabase, browser: Browser
) -> None:
    budgets = Store(committed_db.alias).budgets
    budgets.set_budget(BUDGET, scope="agent_type", value=GUIDE, period="day", limit_tokens=50)
    with serving(committed_db) as server:
        session_id = _begin(browser, server.url, "What is Lisbon like?")
        _until_answered(browser, last="tell me to book one.")
        assert browser.text("#go-on") == ""
        _send(browser, "Find me a flight.")
        words = browser.until("#go-on", contains="when somebody raises the limit")
        assert "of its 50 tokens of today" in words
        assert "Find me a flight." in browser.text("#transcript li:last-child")
        assert browser.text("#go-on a") == ""
        _sign_in(browser, server.url, committed_db)
        browser.open(f"{server.url}/chat/{session_id}/")
        browser.click("#go-on a")
        browser.until(".helix-confirm button", contains="Change the budget")
        browser.run("document.querySelector('[name=limit_tokens]').value = '5000'")
        browser.click(".helix-confirm button")
        browser.until_address(lambda address: f"/chat/{session_id}/" in address)
        assert "The agent has stopped." in browser.text("#go-on")
        browser.click("#go-on button")
        _until_answered(browser, last="Shall I book it?")
        assert browser.text("#go-on") == ""
    runs = DatabaseStateStore(committed_db.alias).list_runs(session_id)
    assert [run.completion_reason for run in runs] == ["end_turn", f"budget:{BUDGET}", "end_turn"]


def test_a_chat_is_shown_to_nobody_else(committed_db: CommittedDatabase, browser: Browser) -> None:
    with serving(committed_db) as server:
        _begin(browser, server.url, "A secret.")
        browser.until("#writing .text", at_least=1)
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
