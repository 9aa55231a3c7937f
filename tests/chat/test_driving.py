"""The driver: who takes turns, what is in the stream, and what is stored."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.management import call_command
from django.db import connections, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from helix_store import FencedOutError, StoreUnavailable, TurnInterrupted, announce_due_posts, announce_ready
from helix_store.contrib.chat import agui, aisdk, driver, threads
from helix_store.contrib.chat.stored import entries, without_own_keys
from helix_store.contrib.chat.turns import digest_of
from helix_store.models import Post, Stream
from helix_store.streams.manager import DatabaseStreamManager
from tests.cells import Cells, for_each
from tests.chat.conftest import Chatting, events_of, run_input
from tests.chat.held import held_by_ag_ui, held_by_the_ai_sdk
from tests.databases import CommittedDatabase

Make = Callable[..., Chatting]


def _begun(chatting: Chatting, thread: str = "t", content: str = "Hello") -> None:
    async_to_sync(chatting.post)(thread, "u1", content)


def _chunks(chatting: Chatting, thread: str = "t") -> list[dict[str, Any]]:
    session_id = chatting.chat.session_id("ann", thread)
    return [each.chunk for each in chatting.store.streams.read_after(session_id, 0)]


def _said(chatting: Chatting, thread: str = "t") -> list[tuple[str, Any]]:
    return [(each["role"], each["content"]) for each in chatting.session(thread).messages()]


def test_a_turn_answers_what_is_due_and_nothing_else(chatting: Make) -> None:
    site = chatting()
    _begun(site)
    assert site.drive("t") is True
    assert _said(site) == [("user", "Hello"), ("assistant", "You said Hello.")]
    assert site.drive("t") is True
    assert len(_said(site)) == 2
    assert [run.status for run in site.store.sessions.list_runs(site.session("t").id)] == ["completed"]


def test_nobody_drives_a_thread_that_somebody_drives(chatting: Make) -> None:
    site = chatting()
    _begun(site)
    with site.session("t").turn():
        assert site.drive("t") is False
    assert site.drive("t") is True


def test_a_driver_that_comes_second_leaves_the_thread_to_the_first(
    chatting: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def overtake(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        result = execute(sql, params, many, context)
        if not held and "_lock" in sql:
            # This driver has seen that nobody drives. Another one takes the lock before it does.
            thread = threading.Thread(target=acquire)
            thread.start()
            thread.join()
        return result

    def acquire() -> None:
        held.append(site.store.locks.acquire(site.session("t").id))
        connections[site.database.alias].close()

    held: list[Any] = []
    site = chatting()
    _begun(site)
    with connections[site.database.alias].execute_wrapper(overtake):
        assert site.drive("t") is False
    assert [record.message for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
    held[0].release()
    assert site.drive("t") is True
    assert _said(site)[-1] == ("assistant", "You said Hello.")


def test_a_message_that_arrives_meanwhile_is_answered_too(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        turns.append(turn.messages()[-1]["content"])
        if len(turns) == 1:
            turn.session.post({"role": "user", "content": "And?", "id": "u2"}, key="u2")
            # This turn does not look again.
            with turn.step() as step:
                step.say({"role": "assistant", "content": "One."})
            return
        with turn.step() as step:
            step.say({"role": "assistant", "content": "Two."})
            step.end_turn()

    turns: list[str] = []
    site = chatting(answer=answer)
    _begun(site)
    assert site.drive("t") is True
    assert [content for _, content in _said(site)][:3] == ["Hello", "One.", "And?"]


def test_ids_in_the_stream_are_stored_and_a_model_does_not_see_them(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        seen.append(turn.messages())
        out.reasoning("Well")
        out.text("Yes.")
        with turn.step() as step:
            step.say({"role": "assistant", "content": "Yes."})
            step.end_turn()

    seen: list[Any] = []
    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    stored = site.session("t").messages()[-1]
    assert stored["id"] == next(chunk["m"] for chunk in _chunks(site) if chunk["type"] == "text")
    assert stored["reasoning"] == "Well"
    assert seen == [[{"role": "user", "content": "Hello"}]]


@pytest.mark.thorough
def test_deltas_are_written_together(chatting: Make) -> None:
    deltas, seconds = 250, 1.0

    def answer(turn: Any, out: Any) -> None:
        begun = time.monotonic()
        for _ in range(deltas):
            out.text("x")
            time.sleep(seconds / deltas)  # a model's pace
        elapsed.append(time.monotonic() - begun)
        with turn.step() as step:
            step.say({"role": "assistant", "content": "x" * deltas})
            step.end_turn()

    elapsed: list[float] = []
    site = chatting(answer=answer)
    _begun(site)
    with CaptureQueriesContext(connections[site.database.alias]) as queries:
        site.drive("t")
    written = [chunk for chunk in _chunks(site) if chunk["type"] == "text"]
    assert "".join(chunk["d"] for chunk in written) == "x" * deltas
    # 25 writes a second. The machine may take longer than the model.
    assert len(written) <= 25 * elapsed[0] + 3
    # Once a second, a write also looks at its fence and for a request to stop.
    assert len(queries) <= 3 * len(written) + 2 * elapsed[0] + 35


@pytest.mark.thorough
def test_an_answer_of_a_thousand_deltas_costs_110_statements(postgres_db: CommittedDatabase) -> None:
    def answer(turn: Any, out: Any) -> None:
        if turn.messages()[-1]["content"] == "long":
            for _ in range(1000):
                out.text("x")
                time.sleep(0.004)  # a model's pace
        with turn.step() as step:
            step.say({"role": "assistant", "content": "x" * 1000})
            step.end_turn()

    counts = {}
    for wish in ("warm", "short", "long"):
        site = Chatting(postgres_db, answer=answer)
        _begun(site, content=wish)
        with CaptureQueriesContext(connections[site.database.alias]) as queries:
            site.drive("t")
        sent = [query["sql"] for query in queries if not query["sql"].startswith(("BEGIN", "COMMIT"))]
        appended = sum("_stream_chunk" in sql and "INSERT" in sql for sql in sent)
        written = [chunk for chunk in _chunks(site) if chunk["type"] == "text"]
        # Another thread writes for an agent that has fallen silent.
        counts[wish] = len(sent) + max(0, len(written) - appended)
    assert counts["long"] - counts["short"] <= 110


def test_the_last_delta_does_not_wait_for_the_next_one(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        out.text("One ")
        out.text("two.")
        until = time.monotonic() + 20
        while time.monotonic() < until and not is_written():
            threading.Event().wait(0.01)
        with turn.step() as step:
            step.say({"role": "assistant", "content": "One two."})
            step.end_turn()

    def is_written() -> bool:
        found.append("".join(chunk.get("d", "") for chunk in _chunks(site)))
        return found[-1] == "One two."

    found: list[str] = []
    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    assert found[-1] == "One two."


def test_a_stopped_turn_takes_back_what_it_said(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        out.text("Begun ")
        site.store.sessions.request_interrupt(turn.session.id, reason="enough")
        site.store.streams.write_sync(turn.session.id, [{"type": "stop"}])
        until = time.monotonic() + 20
        try:
            while time.monotonic() < until:
                out.text("more ")
        except TurnInterrupted as error:
            errors.append(error)
            raise

    errors: list[TurnInterrupted] = []
    site = chatting(answer=answer)
    _begun(site)
    assert site.drive("t") is True
    assert [error.reason for error in errors] == ["enough"]
    assert [run.status for run in site.store.sessions.list_runs(site.session("t").id)] == ["interrupted"]
    assert [chunk["type"] for chunk in _chunks(site)][-2:] == ["reset", "end"]
    assert _said(site) == [("user", "Hello")]


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_request_to_stop_that_comes_with_a_commit_breaks_no_answer(
    chatting: Make, has_ended: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(turn: Any, out: Any) -> None:
        with turn.step() as step:
            out.text("Yes.")
            turn.writer.flush()
            # Nothing is left to be written before the commit, so only its chunk shows the request.
            site.store.sessions.request_interrupt(turn.session.id, reason="enough")
            site.store.streams.write_sync(turn.session.id, [{"type": "stop"}])
            step.say({"role": "assistant", "content": "Yes."})
            if has_ended:
                step.end_turn()
        reached.append(turn.is_active)
        if turn.is_active:
            out.text("More.")
            turn.writer.flush()
            reached.append("after a write")

    reached: list[Any] = []
    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    assert reached == [not has_ended]
    (run,) = site.store.sessions.list_runs(site.session("t").id)
    assert run.status == ("completed" if has_ended else "interrupted")
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    assert _said(site) == [("user", "Hello"), ("assistant", "Yes.")]
    outcome = async_to_sync(site.events)("GET", "agui/t/")[-1]
    assert outcome["type"] == "RUN_FINISHED"


@pytest.mark.parametrize("has_ended", [True, False])
async def test_an_answer_is_complete_although_its_commit_is_not_written_to_the_stream(
    chatting: Make, has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_once(self: Any, session_id: str, chunks: Any, **options: Any) -> int:
        if any(chunk["type"] == "commit" for chunk in chunks) and not failures:
            failures.append(1)
            raise StoreUnavailable
        return int(write(self, session_id, chunks, **options))

    def answer(turn: Any, out: Any) -> None:
        with turn.step() as step:
            out.text("Well.")
            step.say({"role": "assistant", "content": "Well."})
            if has_ended:
                step.end_turn()
        if not has_ended:
            out.text("Yes.")
            turn.writer.flush()
            with turn.step() as step:
                step.say({"role": "assistant", "content": "Yes."})
                step.end_turn()

    failures: list[int] = []
    write = DatabaseStreamManager.write_sync
    monkeypatch.setattr(DatabaseStreamManager, "write_sync", fail_once)
    site = chatting(answer=answer)
    await site.post("t", "u1")
    response = await site.request("GET", "agui/t/")
    body = response.streaming_content
    text = await anext(body) + await anext(body)
    await sync_to_async(site.drive)("t")
    (run,) = await sync_to_async(site.store.sessions.list_runs)(site.session("t").id)
    assert (failures, run.status) == ([1], "completed")
    chunks = await sync_to_async(_chunks)(site)
    steps = [chunk for chunk in chunks if chunk["type"] in ("step", "commit", "reset")]
    kinds = [chunk["type"] for chunk in steps]
    assert kinds == ["step", "commit"] if has_ended else ["step", "commit", "step", "commit"]
    # The next step begins after the chunk that was written late, so that a reader finds its beginning.
    assert all(chunk["s"] > steps[1]["s"] for chunk in steps[2:])
    events = events_of(text + b"".join([part async for part in body]))
    assert events[-1]["type"] == "RUN_FINISHED"
    stored = (await site.json("GET", "threads/t/"))["messages"]
    shown = [event["messages"] for event in events if event["type"] == "MESSAGES_SNAPSHOT"][-1]
    assert [message["id"] for message in stored][: len(shown)] == [message["id"] for message in shown]
    assert len(shown) >= 2


@pytest.mark.thorough
def test_a_worker_that_has_lost_the_lock_is_refused(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        out.text("Begun ")
        site.store.locks.force_release(turn.session.id)
        taken.append(site.store.locks.acquire(turn.session.id))
        until = time.monotonic() + 20
        try:
            while time.monotonic() < until:
                out.text("more ")
        except FencedOutError as error:
            errors.append(error)
            raise

    taken: list[Any] = []
    errors: list[FencedOutError] = []
    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    taken[0].release()
    assert len(errors) == 1
    assert _said(site) == [("user", "Hello")]


def test_readers_load_a_step_only_if_it_says_something_else(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        wish = turn.messages()[-1]["content"]
        if wish != "silent":
            out.text("Yes.")
            out.tool_call("c", "look", {"a": 1})
        with turn.step() as step:
            call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
            calls = {} if wish == "without calls" else {"tool_calls": [call]}
            content = "No." if wish == "another text" else "Yes."
            step.say({"role": "assistant", "content": content, **calls})
            step.end_turn()

    cells = {"the same": False, "silent": False, "another text": True, "without calls": True}
    wrong = {}
    for wish, is_loaded in cells.items():
        site = chatting(answer=answer)
        _begun(site, content=wish)
        site.drive("t")
        commit = next(chunk for chunk in _chunks(site) if chunk["type"] == "commit")
        if commit["snapshot"] is not is_loaded:
            wrong[wish] = commit["snapshot"]
    assert not wrong


def _call(call_id: str = "k", arguments: str = '{"a": 1}', name: str = "look") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _history(site: Chatting) -> list[dict[str, Any]]:
    return list(threads.load_thread(site.store, site.session("t").id).messages)


def _in_ag_ui(stored: list[dict[str, Any]]) -> list[str]:
    """Each message as a line."""
    found = []
    for message in agui.messages_of(entries(stored)):
        calls = [f"{call['function']['name']}({call['id']})" for call in message.get("toolCalls", ())]
        found.append(" ".join([f"{message['role']}:", str(message["content"]), *calls]))
    return found


def _in_the_ai_sdk(stored: list[dict[str, Any]]) -> list[str]:
    """Each part of the answer as a line."""
    keys = ("text", "toolCallId", "output", "errorText", "data", "url")
    (answer,) = aisdk.messages_of(entries(stored), {})
    return [
        " ".join([part["type"], *(str(part[key]) for key in keys if key in part)])
        for part in answer["parts"]
        if part["type"] != "step-start"
    ]


def _require_that_clients_hold(said: list[dict[str, Any]], chunks: list[dict[str, Any]]) -> None:
    """A client of each protocol that follows the chunks of a step holds in the end what it has stored."""
    before = [{"role": "user", "content": "Hello", "id": "u1"}]
    events = agui.Events("t", "r", held=[("u1", "user")], now=lambda: 1, digest=digest_of)
    told = [*events.snapshot(entries(before), [], {})]
    parts = aisdk.Parts(after="u1")
    streamed = [*parts.begin(entries(before), {})]
    for chunk in chunks:
        stored = entries([*before, *said] if chunk["type"] in ("commit", "run") else before)
        told += events.take(chunk, stored, [], {}, has_thread=events.needs_thread(chunk))
        streamed += parts.take(chunk, stored, {}, has_thread=parts.needs_thread(chunk))
    assert held_by_ag_ui(told) == agui.messages_of(stored)
    (_, answer) = aisdk.messages_of(stored, {})
    assert held_by_the_ai_sdk(streamed) == answer["parts"]


def _steps(site: Chatting) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """The messages and the chunks of each step."""
    history, chunks = _history(site), _chunks(site)
    starts = [index for index, chunk in enumerate(chunks) if chunk["type"] == "step"]
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(chunks) - 1], strict=True), 1):
        said = [each for each in history if each.get("chat", {}).get("step") == number]
        yield said, chunks[start:end]


def _nothing(out: Any) -> None:
    pass


_BLOCKS = [
    {"type": "text", "text": "Hi there"},
    {"type": "tool_use", "id": "k", "name": "look", "input": {"a": 1}},
]
_THOUGHT = {"type": "thinking", "thinking": "Hm", "signature": "x"}


def _data_between(out: Any) -> None:
    out.text("Hi there")
    out.data("progress", 1)


def _helped(out: Any) -> None:
    with out.agent("helper") as sub:
        sub.text("I look.")
    out.text("Hi there")


def _thought(out: Any) -> None:
    out.reasoning("Hm")
    out.text("Hi there")


def _drawn(out: Any) -> None:
    out.text("Hi")
    out.file("https://e.org/a.png", "image/png")
    out.text(" there")


def _looked(out: Any) -> None:
    out.text("Hi there")
    out.tool_call("k", "look", {"a": 1})
    out.tool_result("k", "found")


def _looked_first(out: Any) -> None:
    out.tool_call("k", "look", {"a": 1})
    out.tool_result("k", "found")
    out.reasoning("Hm")
    out.text("Hi there")
    out.file("https://e.org/a.png", "image/png")
    out.data("progress", 1)


def _looked_before_the_rest(out: Any) -> None:
    out.data("progress", 0)
    _looked(out)
    out.reasoning("Hm")
    out.file("https://e.org/a.png", "image/png")
    out.data("progress", 1)
    out.tool_result("k", "found again")
    out.data("progress", 2)


# What is streamed, what is said, the history in AG-UI and in the AI SDK, and whether readers load it.
_SHAPES: dict[str, tuple[Callable[[Any], object], list[dict[str, Any]], list[str], list[str], bool]] = {
    "blocks and data": (
        _data_between,
        [{"role": "assistant", "content": _BLOCKS}],
        ["assistant: Hi there look(k)"],
        ["text Hi there", "data-progress 1", "tool-look k"],
        False,
    ),
    "blocks and a sub-agent": (
        _helped,
        [{"role": "assistant", "content": _BLOCKS}],
        ["assistant: I look.", "assistant: Hi there look(k)"],
        ["text Hi there", "tool-look k"],
        False,
    ),
    "blocks and reasoning": (
        _thought,
        [{"role": "assistant", "content": _BLOCKS}],
        ["reasoning: Hm", "assistant: Hi there look(k)"],
        ["reasoning Hm", "text Hi there", "tool-look k"],
        False,
    ),
    "a block of thinking that was streamed": (
        _thought,
        [{"role": "assistant", "content": [_THOUGHT, *_BLOCKS]}],
        ["reasoning: Hm", "assistant: Hi there look(k)"],
        ["reasoning Hm", "text Hi there", "tool-look k"],
        False,
    ),
    "reasoning_content that was streamed": (
        _thought,
        [{"role": "assistant", "content": "Hi there", "reasoning_content": "Hm"}],
        ["reasoning: Hm", "assistant: Hi there"],
        ["reasoning Hm", "text Hi there"],
        False,
    ),
    "a call that is a message": (
        lambda out: out.reasoning("Hm"),
        [{"role": "assistant", "type": "function_call", "call_id": "k", "name": "look", "arguments": "{}"}],
        ["reasoning: Hm", "assistant:  look(k)"],
        ["reasoning Hm", "tool-look k"],
        False,
    ),
    "a file within a block": (
        _drawn,
        [{"role": "assistant", "content": _BLOCKS[:1]}],
        ["assistant: Hi there"],
        ["text Hi", "file https://e.org/a.png", "text  there"],
        False,
    ),
    "a file that is streamed and said": (
        _drawn,
        [
            {
                "role": "assistant",
                "content": [
                    *_BLOCKS[:1],
                    {"type": "image_url", "image_url": {"url": "https://e.org/a.png"}},
                ],
            }
        ],
        ["assistant: Hi there"],
        ["text Hi", "file https://e.org/a.png", "text  there"],
        False,
    ),
    "blocks with another text": (
        _data_between,
        [{"role": "assistant", "content": [{"type": "text", "text": "Hello"}]}],
        ["assistant: Hello"],
        ["text Hello", "data-progress 1"],
        True,
    ),
    "blocks alone": (
        _nothing,
        [{"role": "assistant", "content": [_THOUGHT, *_BLOCKS]}],
        ["reasoning: Hm", "assistant: Hi there look(k)"],
        ["reasoning Hm", "text Hi there", "tool-look k"],
        False,
    ),
    "parts alone": (
        _nothing,
        [{"role": "assistant", "parts": [{"type": "text", "content": "Hi there"}]}],
        ["assistant: Hi there"],
        ["text Hi there"],
        False,
    ),
    "thinking beside the content alone": (
        _nothing,
        [{"role": "assistant", "content": "Hi there", "thinking": "Hm", "tool_calls": None}],
        ["reasoning: Hm", "assistant: Hi there"],
        ["reasoning Hm", "text Hi there"],
        False,
    ),
    "files alone": (
        _nothing,
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
                    {"type": "image_url", "image_url": {"url": "https://e.org/a.png"}},
                ],
            }
        ],
        [],
        ["file data:image/png;base64,aGk=", "file https://e.org/a.png"],
        False,
    ),
    "a refusal": (
        _nothing,
        [{"role": "assistant", "content": None, "refusal": "I cannot."}],
        ["assistant: I cannot."],
        ["text I cannot."],
        False,
    ),
    "other reasoning": (
        _thought,
        [{"role": "assistant", "content": "Hi there", "reasoning": "Well"}],
        ["reasoning: Well", "assistant: Hi there"],
        ["reasoning Well", "text Hi there"],
        True,
    ),
    "reasoning that was not streamed": (
        lambda out: out.text("Hi there"),
        [{"role": "assistant", "content": "Hi there", "reasoning": "Well"}],
        ["reasoning: Well", "assistant: Hi there"],
        ["reasoning Well", "text Hi there"],
        True,
    ),
    "a block of thinking that was not streamed": (
        lambda out: out.text("Hi there"),
        [{"role": "assistant", "content": [_THOUGHT, *_BLOCKS[:1]]}],
        ["reasoning: Hm", "assistant: Hi there"],
        ["reasoning Hm", "text Hi there"],
        True,
    ),
    "another input that is equal in Python": (
        lambda out: out.tool_call("k", "look", {"a": 1}),
        [{"role": "assistant", "content": "", "tool_calls": [_call(arguments='{"a": true}')]}],
        ["assistant:  look(k)"],
        ["tool-look k"],
        True,
    ),
    "another tool": (
        lambda out: out.tool_call("k", "look", {"a": 1}),
        [{"role": "assistant", "content": "", "tool_calls": [_call(name="find")]}],
        ["assistant:  find(k)"],
        ["tool-find k"],
        True,
    ),
    "a role of Gemini": (
        lambda out: out.text("Hi there"),
        [{"role": "model", "parts": [{"text": "Hi there"}]}],
        ["assistant: Hi there"],
        ["text Hi there"],
        False,
    ),
    "a role of LangChain": (
        _nothing,
        [{"role": "ai", "content": "Hi there", "tool_calls": [{"id": "k", "name": "look", "args": {}}]}],
        ["assistant: Hi there look(k)"],
        ["text Hi there", "tool-look k"],
        False,
    ),
    "results of Anthropic": (
        _looked,
        [
            {"role": "assistant", "content": _BLOCKS},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "k", "content": "found"}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "Done."}]},
        ],
        ["assistant: Hi there look(k)", "tool: found", "assistant: Done."],
        ["text Hi there", "tool-look k found", "text Done."],
        False,
    ),
    "a failure of Anthropic": (
        _looked,
        [
            {"role": "assistant", "content": _BLOCKS},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "k", "content": "found", "is_error": True}
                ],
            },
        ],
        ["assistant: Hi there look(k)", "tool: found"],
        ["text Hi there", "tool-look k found"],
        True,
    ),
    "two results in a message": (
        _nothing,
        [
            {"role": "assistant", "content": "", "tool_calls": [_call("a"), _call("b")]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "one"},
                    {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "2"}]},
                ],
            },
        ],
        ["assistant:  look(a) look(b)", "tool: one", "tool: 2"],
        ["tool-look a one", "tool-look b 2"],
        False,
    ),
    "results of Bedrock that were streamed": (
        lambda out: [
            *(out.tool_call(each, "look", {"a": 1}) for each in "ab"),
            *(out.tool_result(each, {"n": each}) for each in "ab"),
        ],
        [
            {"role": "assistant", "content": "", "tool_calls": [_call("a"), _call("b")]},
            {
                "role": "user",
                "content": [
                    {"toolResult": {"toolUseId": each, "content": [{"text": f'{{"n": "{each}"}}'}]}}
                    for each in "ab"
                ],
            },
        ],
        ["assistant:  look(a) look(b)", 'tool: {"n": "a"}', 'tool: {"n": "b"}'],
        ["tool-look a {'n': 'a'}", "tool-look b {'n': 'b'}"],
        False,
    ),
    "a result that is no text": (
        lambda out: [out.tool_call("k", "look", {"a": 1}), out.tool_result("k", {"n": 1})],
        [
            {"role": "assistant", "content": "", "tool_calls": [_call()]},
            {"role": "tool", "tool_call_id": "k", "content": {"n": 1}},
        ],
        ["assistant:  look(k)", 'tool: {"n": 1}'],
        ["tool-look k {'n': 1}"],
        False,
    ),
    "the result of a server's tool": (
        _nothing,
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "server_tool_use", "id": "k", "name": "web_search", "input": {}},
                    {"type": "web_search_tool_result", "tool_use_id": "k", "content": "found"},
                    {"type": "text", "text": "Done."},
                ],
            }
        ],
        ["assistant: Done. web_search(k)", "tool: found"],
        ["tool-web_search k found", "text Done."],
        False,
    ),
    "calls without ids": (
        _nothing,
        [
            {
                "role": "assistant",
                "id": "m",
                "content": "",
                "tool_calls": [{"function": {"name": "look", "arguments": {"a": n}}} for n in (1, 2)],
            },
            {"role": "tool", "tool_name": "look", "content": "one"},
            {"role": "tool", "tool_name": "look", "content": "two"},
        ],
        ["assistant:  look(m-call-1) look(m-call-2)", "tool: one", "tool: two"],
        ["tool-look m-call-1 one", "tool-look m-call-2 two"],
        False,
    ),
    "calls of Gemini that were streamed with ids": (
        lambda out: [
            *(out.tool_call(f"k{n}", "look", {"a": n}) for n in (1, 2)),
            out.tool_result("k1", {"n": 1}),
        ],
        [
            {
                "role": "model",
                "parts": [{"functionCall": {"name": "look", "args": {"a": n}}} for n in (1, 2)],
            },
            *(
                {"role": "user", "parts": [{"functionResponse": {"name": "look", "response": {"n": n}}}]}
                for n in (1, 2)
            ),
        ],
        ["assistant:  look(k1) look(k2)", 'tool: {"n": 1}', 'tool: {"n": 2}'],
        ["tool-look k1 {'n': 1}", "tool-look k2 {'n': 2}"],
        False,
    ),
    "a call that is said after the result of another one": (
        lambda out: [out.tool_call("k", "look", {"a": 1}), out.tool_result("k", "found")],
        [
            {"role": "assistant", "content": "", "tool_calls": [_call(), _call("z")]},
            {"role": "tool", "tool_call_id": "k", "content": "found"},
        ],
        ["assistant:  look(k) look(z)", "tool: found"],
        ["tool-look k found", "tool-look z"],
        False,
    ),
    "a call that was streamed in another message": (
        lambda out: out.tool_call("k", "look", {"a": 1}),
        [
            {"role": "assistant", "content": "First."},
            {"role": "assistant", "content": "", "tool_calls": [_call()]},
            {"role": "tool", "tool_call_id": "k", "content": "found"},
        ],
        ["assistant: First.", "assistant:  look(k)", "tool: found"],
        ["text First.", "tool-look k found"],
        True,
    ),
    "an answer that was streamed after a result that is not said": (
        _looked_first,
        [{"role": "assistant", "content": "Hi there"}],
        ["reasoning: Hm", "assistant: Hi there"],
        ["reasoning Hm", "text Hi there", "file https://e.org/a.png", "data-progress 1"],
        True,
    ),
    "parts that were streamed after the answer": (
        _looked_before_the_rest,
        [
            {"role": "assistant", "content": "Hi there", "tool_calls": [_call()]},
            {"role": "tool", "tool_call_id": "k", "content": "found"},
        ],
        ["assistant: Hi there look(k)", "tool: found", "reasoning: Hm"],
        [
            "data-progress 0",
            "text Hi there",
            "tool-look k found",
            "reasoning Hm",
            "file https://e.org/a.png",
            "data-progress 1",
            "data-progress 2",
        ],
        True,
    ),
    "parts that were streamed before the answer": (
        _looked_first,
        [{"role": "assistant", "content": "Bye"}, {"role": "assistant", "content": "Hi there"}],
        ["assistant: Bye", "reasoning: Hm", "assistant: Hi there"],
        ["text Bye", "reasoning Hm", "text Hi there", "file https://e.org/a.png", "data-progress 1"],
        True,
    ),
    "results that were streamed in another order": (
        lambda out: [
            *(out.tool_call(each, "look", {"a": 1}) for each in "ab"),
            *(out.tool_result(each, each) for each in "ba"),
        ],
        [
            {"role": "assistant", "content": "", "tool_calls": [_call("a"), _call("b")]},
            *({"role": "tool", "tool_call_id": each, "content": each} for each in "ab"),
        ],
        ["assistant:  look(a) look(b)", "tool: a", "tool: b"],
        ["tool-look a a", "tool-look b b"],
        True,
    ),
}


def test_a_step_of_any_shape_is_in_the_history_and_at_clients(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        for streams, says, *_ in _SHAPES.values():
            streams(out)
            with turn.step() as step:
                step.say(*says)

    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    with Cells() as cells:
        for (name, cell), (said, chunks) in zip(_SHAPES.items(), _steps(site), strict=True):
            _, says, of_agui, of_ai, is_loaded = cell
            with cells.check(name):
                assert _in_ag_ui(said) == of_agui
                assert _in_the_ai_sdk(said) == of_ai
                _require_that_clients_hold(said, chunks)
                assert chunks[-1]["snapshot"] is is_loaded
                # A model sees what was said.
                seen = [without_own_keys(message) for message in said]
                assert seen == [{key: value for key, value in each.items() if key != "id"} for each in says]


_LARGE = "x" * 3_000
_LARGE_CALL = {"role": "assistant", "content": "", "tool_calls": [_call(arguments='{"a": 1}')]}
_LARGE_RESULT = {"role": "tool", "tool_call_id": "k", "content": _LARGE}
_LARGE_FILE = f"data:image/png;base64,{'A' * 3_000}"
_DONE = {"role": "assistant", "content": "Done."}


def _found(out: Any) -> None:
    out.tool_call("k", "look", {"a": 1})
    out.tool_result("k", _LARGE)
    out.text("Done.")


def _helped_at_length(out: Any) -> None:
    with out.agent("helper") as sub:
        sub.tool_call("s", "look", {"q": _LARGE})
        sub.tool_result("s", _LARGE)
        sub.data("rows", _LARGE)
        sub.text(_LARGE)
    out.text("Done.")


# What is streamed, what is said, and whether readers load it.
_SIZES: dict[str, tuple[Callable[[Any], object], list[dict[str, Any]], bool]] = {
    "a result": (_found, [_LARGE_CALL, _LARGE_RESULT, _DONE], True),
    "a result that is not streamed": (_nothing, [_LARGE_CALL, _LARGE_RESULT, _DONE], True),
    "an error of the same size as a result": (
        _nothing,
        [_LARGE_CALL, {**_LARGE_RESULT, "error": _LARGE}, _DONE],
        True,
    ),
    "a file": (lambda out: out.file(_LARGE_FILE, "image/png"), [_DONE], True),
    "a file that is not streamed": (
        _nothing,
        [{"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": _LARGE_FILE}}]}],
        True,
    ),
    "data": (lambda out: out.data("rows", [_LARGE]), [_DONE], True),
    "transient data": (lambda out: out.data("rows", [_LARGE], transient=True), [_DONE], False),
    "a sub-agent": (_helped_at_length, [_DONE], True),
    "text": (lambda out: out.text(_LARGE), [{"role": "assistant", "content": _LARGE}], False),
    "text of control characters": (
        lambda out: [out.reasoning("\1" * 900), out.text("\0" * 900)],
        [{"role": "assistant", "content": "\0" * 900, "reasoning": "\1" * 900}],
        False,
    ),
    "text of emoji and lone surrogates": (
        _nothing,
        [{"role": "assistant", "content": "\ud83d\ude00\U0001f600é" * 500}],
        False,
    ),
    "the input of a call": (
        _nothing,
        [{**_LARGE_CALL, "tool_calls": [_call(arguments=f'["{_LARGE}"]')]}],
        False,
    ),
    "many messages": (_nothing, [_DONE] * 60, True),
    "many messages, one of which is not streamed": (
        _found,
        [_LARGE_CALL, _LARGE_RESULT, *[_DONE] * 60],
        True,
    ),
}


def test_what_is_too_large_for_the_stream_follows_with_the_step(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        for streams, says, _ in _SIZES.values():
            streams(out)
            with turn.step() as step:
                step.say(*says)

    site = chatting(answer=answer)
    _begun(site)
    with override_settings(HELIX_STORE={"LIMITS": {"max_chunk_bytes": 2_000}}):
        site.drive("t")
    with Cells() as cells:
        for (name, (_, says, is_loaded)), (said, chunks) in zip(_SIZES.items(), _steps(site), strict=True):
            with cells.check(name):
                assert [without_own_keys(message) for message in said] == says
                _require_that_clients_hold(said, chunks)
                (commit,) = [chunk for chunk in chunks if chunk["type"] == "commit"]
                assert commit["snapshot"] is is_loaded


def test_an_answer_as_large_as_a_message_may_be_is_streamed(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        out.tool_call("k", "look", {})
        out.tool_result("k", large)
        out.file(f"data:image/png;base64,{large}", "image/png")
        out.text("\1" * 60_000)
        with turn.step() as step:
            call = {"role": "assistant", "content": "", "tool_calls": [_call(arguments="{}")]}
            result = {"role": "tool", "tool_call_id": "k", "content": large}
            step.say(call, result, {"role": "assistant", "content": "\1" * 60_000})
            step.end_turn()

    large = "A" * 400_000
    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    assert [run.status for run in site.store.sessions.list_runs(site.session("t").id)] == ["completed"]
    ((said, chunks),) = _steps(site)
    assert len(said) == 3
    _require_that_clients_hold(said, chunks)


def test_data_that_are_no_json_are_refused(chatting: Make, caplog: pytest.LogCaptureFixture) -> None:
    def answer(turn: Any, out: Any) -> None:
        out.data("rows", float("nan"))
        _finish(turn, out)

    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    assert [run.status for run in site.store.sessions.list_runs(site.session("t").id)] == ["failed"]
    assert "NaN and infinity are not JSON" in caplog.text


@pytest.mark.parametrize("has_failed", [True, False], ids=["turn", "sub-agent"])
def test_a_large_error_is_told_in_short(chatting: Make, has_failed: bool) -> None:
    def answer(turn: Any, out: Any) -> None:
        try:
            with out.agent("helper"):
                raise ValueError("x" * 400_000)
        except ValueError:
            if has_failed:
                raise
        _finish(turn, out)

    site = chatting(answer=answer)
    _begun(site)
    with override_settings(DEBUG=True):
        site.drive("t")
    chunks = _chunks(site)
    errors = [chunk["error"] for chunk in chunks if "error" in chunk]
    assert [error[:15] for error in errors] == ["ValueError: xxx"] * (1 + has_failed)
    assert max(map(len, errors)) < 5_000
    assert chunks[-1]["type"] == "end"


def test_a_turn_with_too_much_usage_for_the_stream_ends_in_it(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        _finish(turn, out)
        for number in range(100):
            turn.tokens(model=f"model-{number}", prompt=1)

    site = chatting(answer=answer)
    _begun(site)
    with override_settings(HELIX_STORE={"LIMITS": {"max_chunk_bytes": 2_000}}):
        site.drive("t")
    end = _chunks(site)[-1]
    assert (end["type"], end["status"]) == ("end", "done")
    assert "usage" not in end


def test_a_call_that_a_step_asks_about_is_added_to_a_message_of_any_shape(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        out.text("Hi there")
        with turn.step() as step:
            step.say(shapes[turn.messages()[-1]["content"]])
            step.ask_approval("c", "pay", {"a": 1})

    text = {"type": "text", "text": "Hi there"}
    shapes: dict[str, dict[str, Any]] = {
        "text": {"role": "assistant", "content": "Hi there"},
        "blocks": {"role": "assistant", "content": [text]},
        "parts": {"role": "model", "parts": [{"text": "Hi there"}]},
    }
    with Cells() as cells:
        for shape in shapes:
            with cells.check(shape):
                site = chatting(answer=answer)
                _begun(site, content=shape)
                site.drive("t")
                (said,) = _history(site)[1:]
                assert _in_ag_ui([said]) == ["assistant: Hi there pay(c)"]
                assert without_own_keys(said) == shapes[shape]
                ((_, chunks),) = _steps(site)
                _require_that_clients_hold([said], chunks)
                assert not chunks[-1]["snapshot"]


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "not streamed"])
async def test_calls_without_ids_are_those_that_a_step_asks_about(chatting: Make, streams: bool) -> None:
    """They are shown once, and their results and decisions belong to them."""

    def answer(turn: Any, out: Any) -> None:
        with turn.step() as step:
            if turn.results:
                step.say({"role": "user", "parts": results}, {"role": "model", "parts": [{"text": "Paid."}]})
                step.end_turn()
                return
            step.say({"role": "model", "parts": [{"text": "I pay."}, *calls]})
            for n in (1, 2):
                if streams:
                    out.tool_call(f"k{n}", "pay", {"a": n})
                step.ask_approval(f"k{n}", "pay", {"a": n})

    calls = [{"functionCall": {"name": "pay", "args": {"a": n}}} for n in (1, 2)]
    results = [{"functionResponse": {"name": "pay", "response": {"paid": n}}} for n in (1, 2)]
    site = chatting(answer=answer)
    await site.post("t", "u1")
    await sync_to_async(site.drive)("t")
    asked = await site.json("GET", "threads/t/")
    for number, call in enumerate(asked["calls"]):
        given = {"approved": number == 0, "digest": call["digest"]}
        await site.json("POST", f"threads/t/calls/{call['id']}/", given)
    await sync_to_async(site.drive)("t")
    (_, shown) = (await site.json("GET", "threads/t/?format=ai"))["messages"]
    parts = [part for part in shown["parts"] if "toolCallId" in part]
    told = [
        (part["toolCallId"], part["state"], part.get("output"), part["approval"]["approved"])
        for part in parts
    ]
    assert told == [("k1", "output-available", {"paid": 1}, True), ("k2", "output-denied", None, False)]
    messages = (await site.json("GET", "threads/t/"))["messages"]
    made = [call["id"] for message in messages for call in message.get("toolCalls", ())]
    answered = [message["toolCallId"] for message in messages if message["role"] == "tool"]
    assert made == answered == ["k1", "k2"]
    chunks = await sync_to_async(_chunks)(site)
    assert [chunk["c"] for chunk in chunks if chunk["type"] in ("input", "result")] == [*made, *made]


@pytest.mark.parametrize("way", ["asks", "approves"])
def test_a_call_in_an_answer_of_another_shape_is_found_in_a_later_step(chatting: Make, way: str) -> None:
    def answer(turn: Any, out: Any) -> None:
        if turn.results:
            with turn.step() as step:
                result = {"type": "tool_result", "tool_use_id": "c", "content": "paid"}
                step.say({"role": "user", "content": [result]})
                step.end_turn()
            return
        with turn.step() as step:
            calls = [{"type": "tool_use", "id": each, "name": "pay", "input": {}} for each in "cd"]
            results = [{"type": "tool_result", "tool_use_id": "d", "content": "found"}]
            step.say({"role": "assistant", "content": calls}, {"role": "user", "content": results})
        with turn.step() as step:
            step.ask_approval("c", "pay", {})

    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    stored = _history(site)[1:]
    assert _in_ag_ui(stored) == ["assistant:  pay(c) pay(d)", "tool: found"]
    if way == "approves":
        (call,) = async_to_sync(site.json)("GET", "threads/t/")["calls"]
        given = {"approved": True, "digest": call["digest"]}
        async_to_sync(site.json)("POST", "threads/t/calls/c/", given)
        site.drive("t")
        (_, shown) = async_to_sync(site.json)("GET", "threads/t/?format=ai")["messages"]
        part = next(part for part in shown["parts"] if part.get("toolCallId") == "c")
        assert (part["state"], part["output"]) == ("output-available", "paid")
        assert part["approval"] == {"id": "c", "descriptor": {"digest": call["digest"]}, "approved": True}


@pytest.mark.parametrize("kind", ["results", "text"])
async def test_what_an_agent_says_as_a_users_message_leaves_the_user_alone(chatting: Make, kind: str) -> None:
    """Neither the client of a turn nor an answer that is made anew takes it for a message of the user."""

    def answer(turn: Any, out: Any) -> None:
        turns.append([message["role"] for message in turn.messages()])
        call = {"type": "tool_use", "id": f"c{len(turns)}", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "found"}
        with turn.step() as step:
            if kind == "results":
                step.say({"role": "assistant", "content": [call]}, {"role": "user", "content": [result]})
            else:
                step.say(
                    {"role": "assistant", "content": "I look again."},
                    {"role": "user", "content": "Look again."},
                )
        tools.append(turn.load_client().tools)
        with turn.step() as step:
            step.say({"role": "assistant", "content": "Done."})
            step.end_turn()

    turns: list[list[str]] = []
    tools: list[Any] = []
    site = chatting(answer=answer)
    await site.request("POST", "agui/", run_input("t", tools=[{"name": "confirm"}]))
    await sync_to_async(site.drive)("t")
    shown = (await site.json("GET", "threads/t/?format=ai"))["messages"]
    assert len(shown) == (2 if kind == "results" else 4)
    outputs = [part.get("output") for part in shown[1]["parts"] if part["type"] == "tool-look"]
    assert outputs == (["found"] if kind == "results" else [])
    body: dict[str, Any] = {"id": "t", "messages": [], "trigger": "regenerate-message"}
    for is_named in (False, True):
        newest = (await site.json("GET", "threads/t/?format=ai"))["messages"][-1]
        await site.request("POST", "ai/", {**body, "messageId": newest["id"]} if is_named else body)
        await sync_to_async(site.drive)("t")
    assert turns == [["user"]] * 3
    assert tools == [[{"name": "confirm"}]] * 3
    assert len((await site.json("GET", "threads/t/?format=ai"))["messages"]) == len(shown)


def test_an_error_takes_back_the_step_and_ends_the_run(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        out.text("Begun ")
        raise ValueError("secret")

    site = chatting(answer=answer)
    _begun(site)
    assert site.drive("t") is True
    assert [chunk["type"] for chunk in _chunks(site)][-2:] == ["reset", "end"]
    assert "secret" not in str(_chunks(site))
    assert [run.status for run in site.store.sessions.list_runs(site.session("t").id)] == ["failed"]


def test_an_unknown_effect_stops_a_thread_until_somebody_settles_it(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        with turn.effect("pay") as effect:
            if not effect.is_done:
                raise TimeoutError("no answer")
        with turn.step() as step:
            step.say({"role": "assistant", "content": effect.result})
            step.end_turn()

    site = chatting(answer=answer)
    _begun(site)
    session_id = site.session("t").id
    site.drive("t")
    async_to_sync(site.post)("t", "u2", "And now?")
    for _ in range(2):
        # The message waits, and no turn is begun in vain.
        assert site.drive("t") is True
        reasons = [run.completion_reason for run in site.store.sessions.list_runs(session_id)]
        assert reasons == ["effect:pay", "TimeoutError"]
    end = async_to_sync(site.events)("GET", "agui/t/")[-1]
    assert (end["type"], end["code"]) == ("RUN_ERROR", "effect_unknown")
    site.runs.clear()
    site.store.sessions.settle_effect(session_id, "pay", done=True, result="Paid.", actor="ann")
    assert site.runs == [session_id]
    site.drive("t")
    assert _said(site) == [("user", "Hello"), ("user", "And now?"), ("assistant", "Paid.")]


@pytest.mark.parametrize(
    "kind", ["own effect", "effect of the handle", "the same in a coroutine", "another's stop"]
)
def test_what_stops_a_turn_leaves_the_answers_to_the_next_one(chatting: Make, kind: str) -> None:
    seen: list[list[str]] = []

    def answer(turn: Any, out: Any) -> None:
        if turn.state.step_count == 0:
            with turn.step() as step:
                step.ask_approval("pay", "pay", {"eur": 1})
            return
        seen.append(list(turn.results))
        if kind == "another's stop" and len(seen) == 1:
            raise TurnInterrupted("cancel", "the session of a sub-agent was stopped")
        owner = turn if kind == "own effect" else turn.session
        with owner.effect("charge") as effect:
            if not effect.is_done:
                raise TimeoutError("no answer")
        with turn.step() as step:
            step.say({"role": "tool", "tool_call_id": "pay", "content": "Paid."})
            step.end_turn()

    async def coroutine(turn: Any, out: Any) -> None:
        await sync_to_async(answer)(turn, out)

    site = chatting(answer=coroutine if kind == "the same in a coroutine" else answer)
    _begun(site)
    site.drive("t")
    session = site.session("t")
    site.store.sessions.submit_tool_result(session.id, "pay", approved=True, approval_id="pay")
    for _ in range(3 if kind == "another's stop" else 2):
        site.drive("t")
        assert session.load().step_count == 1
        assert "pay" in session.load().pending_client_tool_calls
        threads.ask_again(site.store, session.id)
    newest, *_ = site.store.sessions.list_runs(session.id)
    assert (newest.status, newest.completion_reason) == ("interrupted", "effect:charge")
    site.store.sessions.settle_effect(session.id, "charge", done=True, result="Paid.", actor="ann")
    site.drive("t")
    assert all(calls == ["pay"] for calls in seen), seen
    assert (session.load().step_count, _said(site)[-1]) == (2, ("tool", "Paid."))


def test_a_budget_stops_a_thread_until_it_is_raised(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        with turn.step() as step:
            step.say({"role": "assistant", "content": "Yes."})
            step.end_turn()

    site = chatting(answer=answer)
    _begun(site)
    session_id, budgets = site.session("t").id, site.store.budgets
    budget: dict[str, Any] = {"scope": "agent_type", "value": site.chat.agent_type, "period": "day"}
    budgets.set_budget("small", **budget, limit_tokens=0)
    for number in (1, 2):
        assert site.drive("t") is True
        reasons = [run.completion_reason for run in site.store.sessions.list_runs(session_id)]
        assert reasons == ["budget:small"]
        # What nobody has answered stays waiting, and another message does not change that.
        thread = async_to_sync(site.json)("GET", "threads/t/")
        assert (thread["status"], thread["messages"]) == ("idle", [])
        assert [each["id"] for each in thread["waiting"]] == [f"u{each + 1}" for each in range(number)]
        end = async_to_sync(site.events)("POST", "agui/", run_input("t", "u2", "And?"))[-1]
        assert (end["type"], end["code"]) == ("RUN_ERROR", "budget_exceeded")
        end = async_to_sync(site.events)("GET", "agui/t/")[-1]
        assert (end["type"], end["code"]) == ("RUN_ERROR", "budget_exceeded")
    of_site: dict[str, Any] = {"using": site.database.alias, "tenant": site.database.tenant}
    assert announce_due_posts(**of_site) == 1
    budgets.set_budget("small", **budget, limit_tokens=100)
    site.runs.clear()
    announce_ready(**of_site)
    assert site.runs == [session_id]
    site.drive("t")
    assert _said(site) == [("user", "Hello"), ("user", "And?"), ("assistant", "Yes.")]
    thread = async_to_sync(site.json)("GET", "threads/t/")
    assert (thread["status"], thread["waiting"]) == ("idle", [])


def test_a_rolled_back_step_is_taken_back(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        try:
            with transaction.atomic(using=site.database.alias):
                with turn.step() as step:
                    step.say({"role": "assistant", "content": "Lost."})
                raise ConnectionError
        except ConnectionError:
            pass
        out.text("Kept.")
        with transaction.atomic(using=site.database.alias), turn.step() as step:
            step.say({"role": "assistant", "content": "Kept."})
            step.end_turn()

    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    assert _said(site) == [("user", "Hello"), ("assistant", "Kept.")]
    kinds = [chunk["type"] for chunk in _chunks(site)]
    assert kinds.count("commit") == 1
    assert kinds[-1] == "end"


@pytest.mark.thorough
def test_a_step_in_a_transaction_does_not_wait_for_the_thread_that_waits_for_it(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        out.text("Yes.")
        turn.writer.flush()
        waiting = threading.Thread(target=wait_for_the_transaction, args=(turn.writer,))
        with transaction.atomic(using=site.database.alias):
            waiting.start()
            assert is_writing.wait(60)
            out.text(" Really.")
            with turn.step() as step:
                step.say({"role": "assistant", "content": "Yes. Really."})
                step.end_turn()
        has_committed.set()
        waiting.join()

    def wait_for_the_transaction(writer: Any) -> None:
        # A write in another connection ends after the transaction.
        with writer._writing:
            is_writing.set()
            waited.append(has_committed.wait(10))

    waited: list[bool] = []
    is_writing, has_committed = threading.Event(), threading.Event()
    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    assert waited == [True]
    assert _said(site)[-1] == ("assistant", "Yes. Really.")
    (commit,) = [chunk for chunk in _chunks(site) if chunk["type"] == "commit"]
    assert commit["snapshot"] is True


def test_the_last_words_in_a_transaction_are_not_written_by_another_thread(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        with transaction.atomic(using=site.database.alias):
            out.text("Yes.")
            turn.writer.flush()
            out.text(" Really.")
            writing = threading.Thread(target=turn.writer.flush_in_background, daemon=True)
            writing.start()
            writing.join(10)
            waits.append(writing.is_alive())
        with turn.step() as step:
            step.say({"role": "assistant", "content": "Yes. Really."})
            step.end_turn()

    waits: list[bool] = []
    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    assert waits == [False]
    assert _said(site)[-1] == ("assistant", "Yes. Really.")


async def test_an_answer_can_be_a_coroutine_function(chatting: Make) -> None:
    async def answer(turn: Any, out: Any) -> None:
        while turn.is_active:
            async with out.aagent("helper") as sub:
                await sub.atext("Helping.")
            await out.areasoning("Well")
            await out.atext("Yes.")
            await out.atool_call("c", "look", {})
            await out.atool_result("c", 1)
            async with turn.step() as step:
                call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
                await step.asay(
                    {"role": "assistant", "content": "Yes.", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c", "content": "1"},
                )
                await step.aend_turn()

    site = chatting(answer=answer)
    await site.post("t", "u1")
    session_id = site.chat.session_id("ann", "t")
    assert await site.chat.adrive(session_id, tenant=site.database.tenant) is True
    thread = await site.json("GET", "threads/t/")
    assert [message["role"] for message in thread["messages"]] == [
        *("user", "assistant", "reasoning", "assistant", "tool"),
    ]


async def test_the_tokens_of_a_coroutine_function_are_stored_with_its_message(chatting: Make) -> None:
    async def answer(turn: Any, out: Any) -> None:
        async with turn.step() as step:
            await turn.atokens(model="gpt-4o", prompt=3, completion=2, duration=5)
            await step.asay({"role": "assistant", "content": "Yes."})
            await step.aend_turn()

    site = chatting(answer=answer)
    await site.post("t", "u1")
    await sync_to_async(site.drive)("t")
    (_, stored) = await site.session("t").amessages()
    assert stored["chat"]["usage"] == [{"model": "gpt-4o", "prompt": 3, "completion": 2}]
    (_, shown) = (await site.json("GET", "threads/t/?format=ai"))["messages"]
    assert shown["metadata"]["usage"] == {"inputTokens": 3, "outputTokens": 2, "totalTokens": 5}


async def test_a_coroutine_function_knows_the_client(chatting: Make) -> None:
    """Also the client of a message that arrives during its turn."""

    async def answer(turn: Any, out: Any) -> None:
        while turn.is_active:
            seen.append(turn.client.state)
            if len(seen) == 1:
                await site.request("POST", "agui/", run_input("t", "u2", state={"n": 2}))
            async with turn.step() as step:
                step.say({"role": "assistant", "content": "Yes."})
                step.end_turn()

    seen: list[Any] = []
    site = chatting(answer=answer)
    await site.request("POST", "agui/", run_input("t", state={"n": 1}))
    await site.chat.adrive(site.chat.session_id("ann", "t"), tenant=site.database.tenant)
    assert seen == [{"n": 1}, {"n": 2}]


async def test_a_coroutine_function_may_say_what_is_due_without_waiting(chatting: Make) -> None:
    async def answer(turn: Any, out: Any) -> None:
        async with turn.step() as step:
            with out.agent("helper") as sub:
                await sub.atext("Help")
                sub.text("ing.")
            step.say({"role": "assistant", "content": "Yes."})
            step.end_turn()

    site = chatting(answer=answer)
    await site.post("t", "u1")
    with override_settings(HELIX_STORE={"CHAT_FLUSH_MS": 0}):  # each write is due at once
        await site.chat.adrive(site.chat.session_id("ann", "t"), tenant=site.database.tenant)
    thread = await site.json("GET", "threads/t/")
    assert {each["content"] for each in thread["messages"]} == {"Hello", "Helping.", "Yes."}


def test_what_the_client_sends_is_passed_on_untrusted(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        seen.append(turn.client)
        with turn.step() as step:
            step.end_turn()

    seen: list[Any] = []
    site = chatting(answer=answer)
    tools = [{"name": "confirm", "description": "Ask", "parameters": {}}]
    run = {
        "threadId": "t",
        "runId": "r",
        "messages": [{"id": "u1", "role": "user", "content": "Hello"}],
        "tools": tools,
        "context": [{"description": "page", "value": "home"}],
        "state": {"a": 1},
        "forwardedProps": {"b": 2},
    }
    async_to_sync(site.request)("POST", "agui/", run)
    site.drive("t")
    assert seen[0].tools == tools
    assert seen[0].context == [{"description": "page", "value": "home"}]
    assert (seen[0].state, seen[0].forwarded_props) == ({"a": 1}, {"b": 2})


@pytest.mark.parametrize("has_progress", [True, False])
def test_an_agent_that_stores_nothing_is_not_called_for_ever(chatting: Make, has_progress: bool) -> None:
    def answer(turn: Any, out: Any) -> None:
        calls.append(1)
        if not calls[1:]:
            with turn.step() as step:
                step.wait_for({"c": {"tool_name": "ask", "input": {}}})
        elif has_progress:
            with turn.step() as step:
                step.end_turn()

    calls: list[int] = []
    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    site.store.sessions.submit_tool_result(site.session("t").id, "c", result=1)
    site.drive("t")
    assert len(calls) == 2


@pytest.mark.parametrize("ending", ["failure", "stop"])
def test_a_message_that_arrives_during_a_turn_without_a_step_is_answered(chatting: Make, ending: str) -> None:
    def answer(turn: Any, out: Any) -> None:
        answered.append(turn.messages()[-1]["content"])
        if len(answered) == 1:
            turn.session.post({"role": "user", "content": "And?", "id": "u2"}, key="u2")
            if ending == "failure":
                raise ValueError("nothing is stored")
            site.store.sessions.request_interrupt(turn.session.id)
        with turn.step() as step:
            step.say({"role": "assistant", "content": "Yes."})
            step.end_turn()

    answered: list[str] = []
    site = chatting(answer=answer)
    _begun(site)
    assert site.drive("t") is True
    assert answered == ["Hello", "And?"]


class _Paying:
    """An agent that asks for an approval, and whose turn after that ends without a step."""

    def __init__(self, ending: str) -> None:
        self.ending = ending
        self.turns: list[list[str]] = []

    def __call__(self, turn: Any, out: Any) -> None:
        self.turns.append(list(turn.results))
        if len(self.turns) == 1:
            with turn.step() as step:
                step.say({"role": "assistant", "content": "May I?"})
                step.ask_approval("c", "pay", {"euros": 5})
        elif len(self.turns) == 2:
            out.text("Paying")
            if self.ending == "failure":
                raise ValueError("the payment service is down")
            turn.session.store.request_interrupt(turn.session.id)
            with turn.step():
                pass
        else:
            with turn.step() as step:
                step.say({"role": "assistant", "content": "Paid."})
                step.end_turn()


async def _approved(site: Chatting) -> None:
    await site.post("t", "u1")
    await sync_to_async(site.drive)("t")
    (call,) = (await site.json("GET", "threads/t/"))["calls"]
    given = {"approved": True, "digest": call["digest"]}
    assert (await site.request("POST", "threads/t/calls/c/", given)).status_code == 200
    await sync_to_async(site.drive)("t")


@pytest.mark.parametrize(("ending", "outcome"), [("failure", "RUN_ERROR"), ("stop", "RUN_FINISHED")])
async def test_a_turn_that_ends_without_a_step_after_an_approval_is_not_repeated(
    chatting: Make, ending: str, outcome: str
) -> None:
    agent = _Paying(ending)
    site = chatting(answer=agent)
    await _approved(site)
    await sync_to_async(site.drive)("t")
    assert agent.turns == [[], ["c"]]
    assert (await site.json("GET", "threads/t/"))["status"] != "running"
    assert (await site.events("GET", "agui/t/"))[-1]["type"] == outcome
    # The next turn still gets the answer.
    await site.post("t", "u2", "And now?")
    await sync_to_async(site.drive)("t")
    assert agent.turns == [[], ["c"], ["c"]]
    assert (await site.json("GET", "threads/t/"))["messages"][-1]["content"] == "Paid."


async def test_an_answer_is_made_anew_after_a_turn_that_failed_with_an_approval(chatting: Make) -> None:
    agent = _Paying("failure")
    site = chatting(answer=agent)
    await _approved(site)
    await site.request("POST", "ai/", {"id": "t", "messages": [], "trigger": "regenerate-message"})
    await sync_to_async(site.drive)("t")
    assert agent.turns == [[], ["c"], []]


def test_a_message_that_no_turn_can_receive_has_one_turn(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            with turn.step() as step:
                step.say({"role": "assistant", "content": "", "tool_calls": [call]})
        raise ValueError("the call has no result")

    calls: list[int] = []
    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    async_to_sync(site.post)("t", "u2", "And now?")
    site.drive("t")
    assert (len(calls), len(site.session("t").posts().items)) == (2, 1)
    site.drive("t")
    assert len(calls) == 2
    assert async_to_sync(site.events)("GET", "agui/t/")[-1]["type"] == "RUN_ERROR"
    async_to_sync(site.post)("t", "u3", "Hello?")
    site.drive("t")
    assert len(calls) == 3


def test_a_message_from_the_beginning_of_a_turn_that_failed_is_answered(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        answered.append(turn.messages()[-1]["content"])
        if len(answered) == 1:
            raise ValueError("nothing is stored")
        _finish(turn, out)

    answered: list[str] = []
    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    async_to_sync(site.post)("t", "u2", "And?")
    # It arrived after the turn had looked for posts, and before its run began.
    (run,) = site.store.sessions.list_runs(site.session("t").id)
    Post.objects.using(site.database.alias).filter(
        session__session_id=run.session_id, state="waiting"
    ).update(posted_at=run.started_at - timedelta(milliseconds=1))
    site.drive("t")
    assert answered == ["Hello", "And?"]


def test_a_thread_whose_agent_writes_an_answer_beyond_the_calendar_rests_after_a_failure(
    chatting: Make,
) -> None:
    def answer(turn: Any, out: Any) -> None:
        if turn.results:
            raise TimeoutError("no answer")
        with turn.step() as step:
            step.wait_for({"weather": {"tool_name": "weather"}})

    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    session = site.session("t")
    site.store.sessions.submit_tool_result(session.id, "weather", result="fine")
    session.update(lambda state: state.pending_client_tool_calls["weather"].update(submitted_at=10**17))
    for _ in range(2):
        site.drive("t")
        assert len(site.store.sessions.list_runs(session.id)) == 2


@for_each("others", [[], ["weather"]], ids=["alone", "with an answered call"])
def test_a_thread_whose_agent_answers_its_own_approval_rests_until_a_person_does(
    chatting: Make, others: list[str]
) -> None:
    def answer(turn: Any, out: Any) -> None:
        results.append(sorted(turn.results))
        with turn.step() as step:
            if turn.results:
                step.end_turn()
                return
            step.ask_approval("pay", "pay", {"eur": 1})
            step.wait_for({name: {"tool_name": name} for name in others})

    results: list[list[str]] = []
    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    session, submit = site.session("t"), site.store.sessions.submit_tool_result
    site.runs.clear()
    forged = {"approved": True, "submitted_at": 1_790_000_000_000}
    session.update(lambda state: state.pending_client_tool_calls["pay"].update(forged))
    for name in others:
        submit(session.id, name, result="fine")
    site.drive("t")
    assert (site.runs, results) == ([], [[]])
    submit(session.id, "pay", approved=False, approval_id="pay")
    assert site.runs == [session.id]
    site.drive("t")
    assert results == [[], ["pay", *others]]


def test_a_crashed_thread_runs_again_when_somebody_asks_for_it(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        calls.append(1)
        if len(calls) < 3:
            raise ValueError("the model is down")
        _finish(turn, out)

    def run_again() -> None:
        options = {"tenant": site.database.tenant, "database": site.database.alias}
        call_command("helix_sessions", "run-again", site.session("t").id, **options, stdout=StringIO())

    calls: list[int] = []
    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    for turns in (2, 3):
        site.runs.clear()
        run_again()
        # The runner may be a queue: it only knows which thread to drive.
        assert site.runs == [site.session("t").id]
        for _ in range(2):
            site.drive("t")
            assert len(calls) == turns
    assert _said(site)[-1] == ("assistant", "Done.")
    run_again()
    site.drive("t")
    assert len(calls) == 3


def _finish(turn: Any, out: Any) -> None:
    with turn.step() as step:
        step.say({"role": "assistant", "content": "Done."})
        step.end_turn()


def test_what_is_said_after_the_deletion_of_a_thread_is_not_stored(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        out.text("One.")
        turn.writer.flush()
        turn.session.delete()
        out.text("Two.")
        turn.writer.flush()

    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    streams = Stream.objects.using(site.database.alias).filter(stream_id=site.session("t").id)
    assert list(streams) == []


def test_an_error_of_a_sub_agent_is_not_told(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        with suppress(KeyError), out.agent("researcher") as sub:
            sub.text("I look.")
            raise KeyError("secret")
        with turn.step() as step:
            step.say({"role": "assistant", "content": "No luck."})
            step.end_turn()

    site = chatting(answer=answer)
    _begun(site)
    site.drive("t")
    (end,) = [chunk for chunk in _chunks(site) if chunk["type"] == "agent_end"]
    assert end["error"] == "The agent failed."


@pytest.mark.parametrize("flush_ms", [0, 10_000], ids=["each chunk", "chunks together"])
async def test_sub_agents_are_told_however_their_steps_end(chatting: Make, flush_ms: int) -> None:
    def answer(turn: Any, out: Any) -> None:
        out.text("I ask. ")  # at once, and what follows it may wait
        with out.agent("first") as first:
            with suppress(KeyError), turn.step(), out.agent("second") as second:
                second.text("Well")
                raise KeyError
            first.text("Found. ")
            with turn.step() as step:
                step.say({"role": "assistant", "content": "They say: "})
            first.text("More. ")
        with turn.step() as step:
            step.end_turn()

    site = chatting(answer=answer)
    response = await site.request("POST", "agui/", run_input("t"))
    with override_settings(HELIX_STORE={"CHAT_FLUSH_MS": flush_ms}):
        await sync_to_async(site.drive)("t")
    events = events_of(b"".join([part async for part in response.streaming_content]))
    about = [event for event in events if event["type"].startswith("SUBAGENT_")]
    names = {event["subagentRunId"]: event["name"] for event in about if "name" in event}
    assert [(event["type"], names[event["subagentRunId"]]) for event in about] == [
        *(("SUBAGENT_STARTED", "first"), ("SUBAGENT_STARTED", "second"), ("SUBAGENT_ERROR", "second")),
        ("SUBAGENT_FINISHED", "first"),
    ]


def test_a_thread_that_somebody_has_paused_rests(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        calls.append(1)

    calls: list[int] = []
    site = chatting(answer=answer)
    _begun(site)
    site.store.sessions.update_status(site.session("t").id, "paused")
    assert site.drive("t") is True
    assert calls == []
    assert async_to_sync(site.json)("GET", "threads/t/")["status"] == "paused"


def test_the_client_of_a_long_turn_is_known_in_the_next_one(chatting: Make) -> None:
    def answer(turn: Any, out: Any) -> None:
        if turn.results:
            tools.extend(turn.client.tools)
            with turn.step() as step:
                step.end_turn()
            return
        with turn.step() as step:
            step.say(*({"role": "assistant", "content": f"{number}"} for number in range(25)))
            step.wait_for({"c": {"tool_name": "ask", "input": {}}})

    tools: list[Any] = []
    site = chatting(answer=answer)
    async_to_sync(site.request)("POST", "agui/", run_input("t", tools=[{"name": "confirm"}]))
    site.drive("t")
    site.store.sessions.submit_tool_result(site.session("t").id, "c", result=1)
    site.drive("t")
    assert tools == [{"name": "confirm"}]


@pytest.mark.thorough
def test_what_the_client_sends_with_an_answer_is_passed_on(chatting: Make) -> None:
    """It holds until the next message of a user."""

    def answer(turn: Any, out: Any) -> None:
        seen.append((turn.client.tools, turn.client.context, turn.client.state, turn.client.forwarded_props))
        with turn.step() as step:
            said = turn.messages()[-1]["content"]
            for call_id in turn.results:
                step.say({"role": "tool", "tool_call_id": call_id, "content": "done"})
            if turn.results or said == "next":
                step.end_turn()
            elif said == "approve":
                step.ask_approval("c", "pay", {})
            else:
                step.wait_for({"c": {"tool_name": "ask", "input": {}}})

    def ask(thread: str, address: str, body: dict[str, Any]) -> Any:
        common = run_input(thread) if address == "agui/" else {"id": thread}
        async_to_sync(site.request)("POST", address, {**common, **body})
        site.drive(thread)
        return seen[-1]

    seen: list[Any] = []
    site = chatting(answer=answer)
    old: dict[str, Any] = {"tools": [{"name": "old"}], "context": [{"value": "old"}], "state": {"old": 1}}
    new: dict[str, Any] = {"tools": [{"name": "new"}], "context": [{"value": "new"}], "state": {"new": 1}}
    result = {"messages": [{"id": "r", "role": "tool", "toolCallId": "c", "content": "4"}]}
    resume = {"messages": [], "resume": [{"interruptId": "c", "status": "cancelled"}]}
    part = {"type": "tool-ask", "toolCallId": "c", "state": "output-available", "input": {}, "output": 4}
    output = {"messages": [{"id": "a", "role": "assistant", "parts": [part]}]}
    of_old, of_new = ((*each.values(), None) for each in (old, new))
    answers: dict[str, tuple[str, str, dict[str, Any], Any]] = {
        "tool-message": ("ask", "agui/", {**result, **new}, of_new),
        "resumption": ("approve", "agui/", {**resume, **new}, of_new),
        "nothing-new": ("ask", "agui/", result, of_old),
        "tool-output": ("ask", "ai/", {**output, "page": 2}, ([], [], None, {"page": 2})),
    }
    wrong = {}
    for thread, (wish, address, body, expected) in answers.items():
        found = [
            ask(thread, "agui/", run_input(thread, content=wish, **old)),
            ask(thread, address, body),
            ask(thread, "agui/", run_input(thread, "u2", "next")),
        ]
        if found != [of_old, expected, ([], [], None, None)]:
            wrong[thread] = found
    assert wrong == {}


def test_more_messages_wait_than_a_page_of_posts(chatting: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_PAGE", 3)
    site = chatting()
    session, tomorrow = site.session("t"), datetime.now(UTC) + timedelta(days=1)
    _begun(site)
    site.drive("t")
    for number in range(7):
        message = {"role": "user", "content": f"{number}", "id": f"later{number}"}
        session.post(message, key=message["id"], not_before=tomorrow)
    thread = async_to_sync(site.json)("GET", "threads/t/")
    assert [each["id"] for each in thread["waiting"]] == [f"later{number}" for number in range(7)]
    async_to_sync(site.post)("t", "now", "Now")
    site.drive("t")
    assert _said(site)[-1] == ("assistant", "You said Now.")
    response = async_to_sync(site.request)("DELETE", "threads/t/posts/later6/")
    assert response.status_code == 204


def test_a_chat_is_found_although_another_one_was_imported_before(
    chatting: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, late = chatting(), chatting()
    monkeypatch.delitem(driver._chats, late.chat._prefix)

    class Urls:
        """The URLs of a project: importing them makes the chat."""

        @property
        def url_patterns(self) -> list[Any]:
            driver._chats[late.chat._prefix] = late.chat
            return []

    monkeypatch.setattr(driver, "get_resolver", Urls)
    late.store.sessions.create_session(late.session("t").id, agent_type=late.chat.agent_type)
    late.session("t").post({"role": "user", "content": "Hello", "id": "u1"}, key="u1")
    assert late.runs == [late.session("t").id]
    assert known.runs == []
