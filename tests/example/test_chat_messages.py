"""The messages of the chat: the forms that send them, and the turns that answer them."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User

from example_project.chat import driver
from example_project.chat.allowance import BUDGET
from example_project.chat.driver import drive, say
from example_project.chat.guide import GUIDE
from example_project.chat.transcript import is_answered
from helix_store import Message, SessionStatus, Store, Turn
from helix_store.core.ids import new_id
from helix_store.streams.database import list_streams
from tests.admin.conftest import Browser, browser_on
from tests.cells import for_each
from tests.databases import CommittedDatabase


@pytest.fixture
def visitor(committed_db: CommittedDatabase) -> Iterator[Browser]:
    """A visitor of a server on which no turn begins by itself."""
    with browser_on(committed_db) as browser:
        yield browser
        for session in Store().list_sessions(agent_type=GUIDE).sessions:
            Store().session(session.session_id).delete()
        Store().budgets.delete_budget(BUDGET)


@pytest.fixture
def chat(visitor: Browser) -> str:
    """The address of a chat that has not begun."""
    page = visitor.open("/chat/")
    (form,) = [
        found for name, found in page.elements.started if name == "form" and found.get("id") == "compose"
    ]
    return str(form["action"])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "SECONDS_PER_WORD", 0)


def _send(visitor: Browser, address: str, text: str, *, key: str = "") -> Any:
    return visitor.client.post(address, {"text": text, "key": key or new_id()})


def _waiting(address: str) -> list[str]:
    posts = Store().session(_id_of(address)).posts().items
    return [post.message["content"] for post in posts if post.message is not None]


def _id_of(address: str) -> str:
    return address.rstrip("/").rpartition("/")[2]


def test_a_message_that_is_sent_twice_is_stored_once(visitor: Browser, chat: str) -> None:
    key = new_id()
    for _ in range(2):
        assert _send(visitor, chat, "What is Lisbon like?", key=key).status_code == 302
    assert _waiting(chat) == ["What is Lisbon like?"]
    page = visitor.open(chat)
    assert "You · waiting What is Lisbon like? Withdraw" in page.text
    assert "Go on" in page.text


def test_a_changed_message_is_not_taken_for_the_first_one(visitor: Browser, chat: str) -> None:
    key = new_id()
    _send(visitor, chat, "A flight to Lisbon.", key=key)
    answer = _send(visitor, chat, "A flight to Porto.", key=key)
    assert answer.status_code == 409
    assert "An earlier version of this message was sent." in answer.content.decode()
    assert "A flight to Porto.</textarea>" in answer.content.decode()
    assert key not in answer.content.decode()
    assert _waiting(chat) == ["A flight to Lisbon."]


@for_each("text", ["", " ", "x" * 2001])
def test_a_message_without_text_or_with_too_much_of_it_is_refused(
    visitor: Browser, chat: str, text: str
) -> None:
    _send(visitor, chat, "What is Lisbon like?")
    answer = _send(visitor, chat, text)
    assert answer.status_code == 409
    assert "1 to 2,000 characters" in answer.content.decode()
    assert len(_waiting(chat)) == 1


def test_a_message_to_a_chat_that_has_ended_is_refused_and_kept_in_the_page(
    visitor: Browser, chat: str
) -> None:
    _send(visitor, chat, "What is Lisbon like?")
    Store().sessions.update_status(_id_of(chat), SessionStatus.COMPLETED)
    answer = _send(visitor, chat, "Thank you!")
    assert answer.status_code == 409
    assert "This chat has ended." in answer.content.decode()
    assert "Thank you!</textarea>" in answer.content.decode()


def test_a_withdrawn_message_is_gone_and_a_received_one_is_not(visitor: Browser, chat: str) -> None:
    for text in ("First.", "Second."):
        _send(visitor, chat, text)
    session = Store().session(_id_of(chat))
    first, second = [post.post_id for post in session.posts().items]
    assert visitor.client.post(f"{chat}withdraw/", {"post_id": first}).status_code == 302
    assert _waiting(chat) == ["Second."]
    Store().sessions.receive_posts(session.id)
    answer = visitor.client.post(f"{chat}withdraw/", {"post_id": second})
    assert answer.status_code == 409
    assert "received this message already" in answer.content.decode()
    assert [message["content"] for message in session.messages()] == ["Second."]


def test_a_stop_names_its_run_and_comes_too_late_for_the_next_one(visitor: Browser, chat: str) -> None:
    _send(visitor, chat, "What is Lisbon like?")
    session = Store().session(_id_of(chat))
    with session.turn() as turn:
        run_id = "" if turn.run is None else turn.run.run_id
        assert f'name="run_id" value="{run_id}"' in visitor.open(chat).html
    answer = visitor.client.post(f"{chat}stop/", {"run_id": run_id})
    assert answer.status_code == 409
    assert "had stopped already" in answer.content.decode()
    assert session.store.check_interrupt(session.id) is None


def _stop_by_budget(chat: str) -> None:
    """Let an agent try to answer, whose budget is used up."""
    with Store().session(_id_of(chat)).turn() as turn, turn.step():
        pass


def test_a_used_up_budget_is_explained_until_it_allows_the_next_turn(visitor: Browser, chat: str) -> None:
    budgets = Store().budgets
    budgets.set_budget(BUDGET, scope="agent_type", value=GUIDE, period="day", limit_tokens=0)
    _send(visitor, chat, "What is Lisbon like?")
    _stop_by_budget(chat)
    page = visitor.open(chat)
    assert "The guide has used 0 of its 0 tokens of today." in page.text
    assert "Raise the limit" not in page.text
    visitor.client.force_login(User.objects.create_superuser(f"user-{uuid.uuid4()}"))
    assert "next=%2Fchat%2F" in visitor.client.get(chat).content.decode()
    budgets.set_budget(BUDGET, scope="agent_type", value=GUIDE, period="day", limit_tokens=5)
    assert "The agent has stopped. It can go on" in visitor.open(chat).text
    budgets.delete_budget(BUDGET)
    assert "The agent has stopped. It can go on" in visitor.open(chat).text


def test_the_first_message_sets_the_budget_and_no_other_changes_it(visitor: Browser, chat: str) -> None:
    _send(visitor, chat, "What is Lisbon like?")
    assert Store().budgets.status(BUDGET).limit_tokens == 2_000
    Store().budgets.set_budget(BUDGET, scope="agent_type", value=GUIDE, period="day", limit_tokens=9_000)
    _send(visitor, chat, "Thank you!")
    assert Store().budgets.status(BUDGET).limit_tokens == 9_000


@for_each("action", ["", "withdraw/", "stop/", "decide/", "go-on/"])
def test_nobody_else_acts_in_a_chat(visitor: Browser, chat: str, action: str) -> None:
    _send(visitor, chat, "What is Lisbon like?")
    visitor.client.logout()
    assert visitor.client.post(f"{chat}{action}").status_code == 404
    assert visitor.client.get(chat).status_code == 404


def test_a_message_between_the_last_look_of_a_turn_and_its_end_is_answered(
    committed_db: CommittedDatabase, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, session_id = Store(committed_db.alias, tenant=committed_db.tenant), f"chat-{uuid.uuid4()}"
    texts = ["What is Lisbon like?", "Thank you!"]

    def send() -> None:
        say(store, session_id, texts[0], key=texts.pop(0))
        drive(session_id=session_id, using=store.alias, tenant=store.tenant)

    def look_and_send(messages: list[Message]) -> bool:
        found = is_answered(messages)
        if found and texts:
            send()
        return found

    monkeypatch.setattr(driver, "is_answered", look_and_send)
    send()
    _until_nobody_drives(session_id)
    # Somebody wakes the chat although there is nothing to answer.
    drive(session_id=session_id, using=store.alias, tenant=store.tenant)
    _until_nobody_drives(session_id)
    session = store.session(session_id)
    assert session.posts().items == []
    assert [message["role"] for message in session.messages()] == ["user", "assistant"] * 2


def test_a_decision_between_the_last_commit_of_a_turn_and_its_end_is_carried_out(
    committed_db: CommittedDatabase, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, session_id = Store(committed_db.alias, tenant=committed_db.tenant), f"chat-{uuid.uuid4()}"
    answer = driver._answer

    def answer_and_decide(store: Store, turn: Turn) -> None:
        answer(store, turn)
        for call_id, call in turn.state.pending_client_tool_calls.items():
            store.sessions.submit_tool_result(
                session_id, call_id, approved=True, approval_id=call["approval_id"]
            )
            drive(session_id=session_id, using=store.alias, tenant=store.tenant)

    monkeypatch.setattr(driver, "_answer", answer_and_decide)
    say(store, session_id, "Please book it.", key="0")
    drive(session_id=session_id, using=store.alias, tenant=store.tenant)
    _until_nobody_drives(session_id)
    assert "It is booked" in store.session(session_id).messages(last=1)[0]["content"]


def test_the_stream_of_a_quiet_chat_is_not_taken_for_that_of_a_dead_writer(
    committed_db: CommittedDatabase, quick: None
) -> None:
    store, session_id = Store(committed_db.alias, tenant=committed_db.tenant), f"chat-{uuid.uuid4()}"
    say(store, session_id, "What is Lisbon like?", key="0")
    drive(session_id=session_id, using=store.alias, tenant=store.tenant)
    _until_nobody_drives(session_id)
    (stream,) = list_streams(using=store.alias, tenant=store.tenant).streams
    assert (stream.stream_id, stream.status, stream.writer) == (session_id, "active", "none")


def _until_nobody_drives(session_id: str) -> None:
    for thread in threading.enumerate():
        if thread.name == session_id:
            thread.join()
