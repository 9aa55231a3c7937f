"""Answers that are made anew and messages that are edited, in the AI SDK."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connections

from helix_store import TurnInterrupted
from helix_store.contrib.chat import threads
from helix_store.contrib.chat.threads import Activity
from tests.chat.conftest import Chatting

Make = Callable[..., Chatting]


def _say(site: Chatting, text: str, message_id: str = "u1", **more: Any) -> Any:
    message = {"id": message_id, "role": "user", "parts": [{"type": "text", "text": text}]}
    return async_to_sync(site.request)("POST", "ai/", {"id": "t", "messages": [message], **more})


def _edit(site: Chatting, text: str, message_id: str = "u1") -> Any:
    return _say(site, text, message_id, messageId=message_id)


def _thread(site: Chatting) -> tuple[list[Any], list[Any]]:
    """What is said in the thread, and what waits."""
    thread = async_to_sync(site.json)("GET", "threads/t/")
    return [each["content"] for each in thread["messages"]], [each["content"] for each in thread["waiting"]]


def _activity(site: Chatting) -> Activity:
    return site.chat.activity(site.session("t").id, tenant=site.database.tenant)


@pytest.mark.parametrize("how", ["edit", "regenerate"])
def test_the_driver_of_a_message_made_anew_finds_the_thread_free(chatting: Make, how: str) -> None:
    def run_at_once(session_id: str, using: str, tenant: str) -> None:
        site.chat.drive(session_id, using=using, tenant=tenant)

    site = chatting(runner=run_at_once)
    _say(site, "one")
    first = async_to_sync(site.json)("GET", "threads/t/?format=ai")["messages"][-1]["id"]
    response = _edit(site, "two") if how == "edit" else _say(site, "one", trigger="regenerate-message")
    assert response.status_code == 200
    assert _activity(site) is Activity.IDLE
    said = "two" if how == "edit" else "one"
    assert _thread(site) == ([said, f"You said {said}."], [])
    assert async_to_sync(site.json)("GET", "threads/t/?format=ai")["messages"][-1]["id"] != first


@pytest.mark.parametrize("how", ["edit", "regenerate"])
def test_an_answer_of_a_session_that_has_ended_is_not_made_anew(chatting: Make, how: str) -> None:
    def answer(turn: Any, out: Any) -> None:
        with turn.step() as step:
            step.say({"role": "assistant", "content": "Bye."})
            step.finish({"answer": 42})

    site = chatting(answer=answer)
    _say(site, "one")
    site.drive("t")
    response = _edit(site, "two") if how == "edit" else _say(site, "one", trigger="regenerate-message")
    assert (response.status_code, json.loads(response.content)["code"]) == (410, "session_ended")
    assert _thread(site) == (["one", "Bye."], [])
    assert site.session("t").load().status == "completed"
    # A request that is repeated after the end joins.
    assert _edit(site, "one").status_code == 200


def test_an_edit_of_a_message_that_was_lost_is_its_first_post(chatting: Make) -> None:
    site = chatting()
    assert _edit(site, "one").status_code == 200
    assert _thread(site) == ([], ["one"])


def test_an_edit_of_a_message_that_waits_replaces_it(chatting: Make) -> None:
    site = chatting()
    _say(site, "one")
    for _ in range(2):  # a repeat changes nothing
        assert _edit(site, "two").status_code == 200
    assert _thread(site) == ([], ["two"])
    site.drive("t")
    assert _thread(site) == (["two", "You said two."], [])
    assert _edit(site, "two").status_code == 200
    assert _thread(site)[0] == ["two", "You said two."]


def test_an_edit_replaces_the_metadata(chatting: Make) -> None:
    site = chatting()
    message = {
        "id": "u1",
        "role": "user",
        "metadata": {"sent": 1},
        "parts": [{"type": "text", "text": "one"}],
    }
    async_to_sync(site.request)("POST", "ai/", {"id": "t", "messages": [message]})
    site.drive("t")
    message = {**message, "metadata": {"sent": 2}, "parts": [{"type": "text", "text": "two"}]}
    async_to_sync(site.request)("POST", "ai/", {"id": "t", "messages": [message], "messageId": "u1"})
    site.drive("t")
    assert async_to_sync(site.json)("GET", "threads/t/?format=ai")["messages"][0] == message


def test_an_edit_interrupts_the_answer_that_it_takes_back(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        if turn.messages()[-1]["content"] == "one":
            out.text("Begun ")
            has_begun.set()
            try:
                while not is_over.wait(0.01):
                    out.text("more ")
            except TurnInterrupted:
                interrupted.append(True)
                raise
        with turn.step() as step:
            step.say({"role": "assistant", "content": "Done."})
            step.end_turn()

    has_begun, is_over = threading.Event(), threading.Event()
    interrupted: list[bool] = []
    site = chatting(answer=answer)
    _say(site, "one")
    driving = threading.Thread(target=site.drive, args=("t",))
    driving.start()
    assert has_begun.wait(60)
    response = _edit(site, "two")
    is_over.set()
    driving.join()
    assert (response.status_code, interrupted) == (200, [True])
    site.drive("t")
    assert _thread(site) == (["two", "Done."], [])


def test_an_edit_restores_the_state_before_the_message_however_long_ago(
    chatting: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(turn: Any, out: Any) -> None:
        with turn.step() as step:
            step.state.custom_state["steps"] = step.state.custom_state.get("steps", 0) + 1
            step.say({"role": "assistant", "content": "Yes."})
            step.end_turn()

    monkeypatch.setattr(threads, "_PAGE", 2)
    site = chatting(answer=answer)
    for number in range(6):
        _say(site, f"{number}", f"u{number}")
        site.drive("t")
    assert _edit(site, "anew", "u2").status_code == 200
    assert site.session("t").load().custom_state == {"steps": 2}
    assert _thread(site) == (["0", "Yes.", "1", "Yes."], ["anew"])


@pytest.mark.parametrize("named", ["by-default", "its-answer", "its-message"])
def test_a_request_for_another_answer_that_is_repeated_joins_its_run(chatting: Make, named: str) -> None:
    def answer(turn: Any, out: Any) -> None:
        turns.append(turn)
        if len(turns) == 2:
            assert regenerate().status_code == 200  # the message has been received
            out.text("A part of the answer.")
        with turn.step() as step:
            step.say({"role": "assistant", "content": f"Answer {len(turns)}."})
            step.end_turn()

    def regenerate() -> Any:
        return _say(site, "one", trigger="regenerate-message", messageId=message_id)

    turns: list[Any] = []
    site = chatting(answer=answer)
    _say(site, "one")
    site.drive("t")
    message, first = async_to_sync(site.json)("GET", "threads/t/?format=ai")["messages"]
    message_id = {"its-answer": first["id"], "its-message": message["id"]}.get(named)
    for _ in range(2):  # the message waits
        assert regenerate().status_code == 200
    site.drive("t")
    site.drive("t")
    assert _thread(site) == (["one", "Answer 2."], [])
    runs = site.store.sessions.list_runs(site.session("t").id)
    assert [run.status for run in runs] == ["completed", "completed"]


@pytest.mark.parametrize("named", [None, "u1"])
@pytest.mark.parametrize("is_answered", [True, False])
def test_two_requests_for_another_answer_at_once_get_the_same(
    chatting: Make, named: str | None, is_answered: bool
) -> None:
    def overtake(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        result = execute(sql, params, many, context)
        if not overtaken and "_lock" in sql:
            # This request has seen that the thread is idle. Another one is faster.
            overtaken.append(threading.Thread(target=regenerate_and_drive))
            overtaken[0].start()
            assert (is_over if is_answered else has_begun).wait(60)
        return result

    def regenerate_and_drive() -> None:
        regenerate()
        site.drive("t")
        connections[site.database.alias].close()
        is_over.set()

    def answer(turn: Any, out: Any) -> None:
        turns.append(turn)
        if overtaken:
            has_begun.set()
            assert is_answered or may_end.wait(60)
        with turn.step() as step:
            step.say({"role": "assistant", "content": f"Answer {len(turns)}."})
            step.end_turn()

    def regenerate() -> Any:
        return _say(site, "one", trigger="regenerate-message", messageId=named)

    has_begun, may_end, is_over = threading.Event(), threading.Event(), threading.Event()
    overtaken: list[threading.Thread] = []
    turns: list[Any] = []
    site = chatting(answer=answer)
    _say(site, "one")
    site.drive("t")
    with connections[site.database.alias].execute_wrapper(overtake):
        assert regenerate().status_code == 200
    may_end.set()
    overtaken[0].join()
    site.drive("t")
    assert _thread(site) == (["one", "Answer 2."], [])


def test_the_answer_to_an_earlier_message_is_made_anew(chatting: Make) -> None:
    site = chatting()
    for number in (1, 2):
        _say(site, f"{number}", f"u{number}")
        site.drive("t")
    for _ in range(2):  # a repeat changes nothing
        assert _say(site, "1", trigger="regenerate-message", messageId="u1").status_code == 200
    site.drive("t")
    assert _thread(site) == (["1", "You said 1."], [])


def test_an_edit_is_stored_whole_or_not_at_all(chatting: Make) -> None:
    site = chatting()
    _say(site, "one")
    site.drive("t")
    # The message is too large to be posted, which is found out last.
    assert _edit(site, "x" * 2_000_000).status_code == 413
    assert _thread(site) == (["one", "You said one."], [])
