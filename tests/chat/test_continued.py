"""A client of the AI SDK sends the answer that it holds, and gets what it lacks of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.test import override_settings

from helix_store.contrib.chat import aisdk
from helix_store.contrib.chat.agui import Outcome
from helix_store.contrib.chat.aisdk import Call, Parts, held_answer
from helix_store.contrib.chat.stored import Entry, entries
from tests.cells import for_each
from tests.chat.conftest import Chatting, events_of
from tests.chat.ui_message import merged

Make = Callable[..., Chatting]

_USER = {"role": "user", "content": "Hi", "id": "u"}
_TOKENS = {"usage": [{"prompt": 2, "completion": 1}]}


def _said(message_id: str, text: str, step: int, **more: Any) -> dict[str, Any]:
    own = {"step": step, **_TOKENS}
    return {"role": "assistant", "content": text, "id": message_id, "chat": own, **more}


def _call(call_id: str, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}}


_RUN: dict[str, Any] = {"type": "run"}


def _step(number: int) -> dict[str, Any]:
    return {"type": "step", "n": number}


def _text(message_id: str, delta: str, kind: str = "text", number: int = 0) -> dict[str, Any]:
    return {"type": kind, "m": message_id, "i": number, "d": delta}


def _input(message_id: str, call_id: str, name: str) -> list[dict[str, Any]]:
    start = {"type": "input", "m": message_id, "c": call_id, "name": name}
    return [
        {**start, "d": '{"a"'},
        {**start, "d": ": 1}"},
        {"type": "call", "m": message_id, "c": call_id},
    ]


def _commit(*said: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "commit", "snapshot": False, "received": [], "asked": [], "said": list(said), **more}


@dataclass
class _Story:
    """The chunks of an answer, and what is stored after each commit and in the end."""

    chunks: list[dict[str, Any]]
    stored: list[list[dict[str, Any]]]
    calls: dict[int, Call] = field(default_factory=dict)
    """The call that is open after a number of commits, or whose answer was not used yet."""

    def _commits(self, at: int) -> int:
        return sum(chunk["type"] == "commit" for chunk in self.chunks[:at])

    def entries_at(self, at: int) -> list[Entry]:
        """What is stored when the first chunks are in the stream."""
        steps = self.stored[: self._commits(at)]
        return entries([_USER, *(message for step in steps for message in step)])

    def calls_at(self, at: int) -> dict[str, Call]:
        call = self.calls.get(self._commits(at))
        return {} if call is None else {call.id: call}

    def start_at(self, at: int) -> int:
        """The number of the chunk with which the step begins that is open after the first chunks."""
        ends = [n for n in range(at) if self.chunks[n]["type"] in ("run", "commit", "reset")]
        return ends[-1] + 1 if ends else 0

    def response(self, parts: Parts, at: int) -> Iterator[tuple[int, Any]]:
        """The parts of a response that begins when the first chunks are there, with the number of chunks."""
        for part in parts.begin(self.entries_at(at), self.calls_at(at)):
            yield at, part
        for number in range(self.start_at(at), len(self.chunks)):
            chunk, arrived = self.chunks[number], max(at, number + 1)
            has_thread = parts.needs_thread(chunk)
            found = parts.take(chunk, self.entries_at(arrived), self.calls_at(arrived), has_thread=has_thread)
            for part in found:
                yield arrived, part
        last = len(self.chunks)
        calls = self.calls_at(last)
        for part in parts.take({"type": "run"}, self.entries_at(last), calls, has_thread=True):
            yield last, part
        for part in parts.finished(Outcome(interrupts=[{"id": call_id} for call_id in calls])):
            yield last, part

    def shown(self) -> dict[str, Any]:
        last = len(self.chunks)
        return aisdk.messages_of(self.entries_at(last), self.calls_at(last))[1]


_ASKED = Call(id="b", name="pay", input={"a": 1}, digest="d", approval="b")
_DECISION = {"approval": {"id": "b", "approved": True, "digest": "d"}}
_STORIES = {
    "two steps": _Story(
        chunks=[
            *(_RUN, _step(1), _text("m", "Well", "reasoning"), _text("m", "Ye")),
            *(_text("m", "s."), *_input("m", "c", "look"), _input("m", "d", "see")[0]),
            *(_input("m", "d", "see")[1:]),
            {"type": "result", "m": "r", "c": "c", "content": "1"},
            {"type": "data", "m": "m", "name": "n", "value": 1},
            _commit({"id": "m", "role": "assistant"}, {"id": "r", "role": "tool", "call": "c"}),
            *(_step(2), {"type": "result", "m": "s", "c": "d", "content": "2"}),
            *(_text("n", "So"), _text("n", "."), {"type": "file", "m": "n", "url": "/a", "media_type": "b"}),
            _commit({"id": "s", "role": "tool", "call": "d"}, {"id": "n", "role": "assistant"}),
        ],
        stored=[
            [
                _said("m", "Yes.", 1, reasoning="Well", tool_calls=[_call("c", "look"), _call("d", "see")])
                | {
                    "chat": {
                        "step": 1,
                        "parts": [
                            {"type": "reasoning", "length": 4},
                            {"type": "text", "length": 4},
                            *({"type": "call", "id": "c"}, {"type": "call", "id": "d"}),
                            {"type": "data", "name": "n", "value": 1},
                        ],
                        **_TOKENS,
                    }
                },
                {"role": "tool", "id": "r", "tool_call_id": "c", "content": "1", "chat": {"step": 1}},
            ],
            [
                {"role": "tool", "id": "s", "tool_call_id": "d", "content": "2", "chat": {"step": 2}},
                _said("n", "So.", 2)
                | {
                    "chat": {
                        "step": 2,
                        "parts": [
                            {"type": "text", "length": 3},
                            {"type": "file", "url": "/a", "media_type": "b"},
                        ],
                        **_TOKENS,
                    }
                },
            ],
        ],
    ),
    "a failed attempt": _Story(
        chunks=[
            *(_RUN, _step(1), _text("m", "One.")),
            _commit({"id": "m", "role": "assistant"}),
            *(_step(2), _text("x", "Tw"), *_input("x", "c", "look"), {"type": "reset"}),
            *(_step(2), _text("n", "Two."), *_input("n", "c", "look")),
            _commit({"id": "n", "role": "assistant"}),
        ],
        stored=[[_said("m", "One.", 1)], [_said("n", "Two.", 2, tool_calls=[_call("c", "look")])]],
    ),
    "a step that is stored otherwise": _Story(
        chunks=[
            *(_RUN, _step(1), _text("m", "One."), _text("m", "Two.")),
            _commit({"id": "m", "role": "assistant"}, snapshot=True),
        ],
        stored=[[_said("m", "Else.", 1)]],
    ),
    "two messages of a step": _Story(
        chunks=[
            *(_RUN, _step(1), _text("m", "One."), *_input("m", "c", "look")),
            *({"type": "result", "m": "r", "c": "c", "content": "1"}, _text("n", "Two.")),
            _commit(*({"id": each, "role": "assistant"} for each in "mrn")),
        ],
        stored=[
            [
                _said("m", "One.", 1, tool_calls=[_call("c", "look")]),
                {"role": "tool", "id": "r", "tool_call_id": "c", "content": "1", "chat": {"step": 1}},
                _said("n", "Two.", 1),
            ]
        ],
    ),
    "an open approval": _Story(
        chunks=[
            *(_RUN, _step(1), _text("m", "May I?"), *_input("m", "b", "pay")),
            _commit(
                {"id": "m", "role": "assistant"},
                asked=[{"id": "b", "name": "pay", "digest": "d", "approval": "b"}],
            ),
        ],
        stored=[[_said("m", "May I?", 1, tool_calls=[_call("b", "pay")])]],
        calls={1: _ASKED},
    ),
    "an approval that somebody else has given": _Story(
        chunks=[
            *(_RUN, _step(1), _text("m", "May I?"), *_input("m", "b", "pay")),
            _commit(
                {"id": "m", "role": "assistant"},
                asked=[{"id": "b", "name": "pay", "digest": "d", "approval": "b"}],
            ),
            *(_RUN, _step(2), _text("n", "Paid.")),
            {"type": "result", "m": "r", "c": "b", "content": "1"},
            _commit({"id": "n", "role": "assistant"}, {"id": "r", "role": "tool", "call": "b", **_DECISION}),
        ],
        stored=[
            [_said("m", "May I?", 1, tool_calls=[_call("b", "pay")])],
            [
                _said("n", "Paid.", 2),
                {
                    "role": "tool",
                    "id": "r",
                    "tool_call_id": "b",
                    "content": "1",
                    "chat": {"step": 2, **_DECISION},
                },
            ],
        ],
        calls={1: replace(_ASKED, approved=True)},
    ),
}


@pytest.mark.thorough
@for_each("name", list(_STORIES))
def test_a_client_that_was_cut_off_gets_the_rest_of_the_answer_that_it_sends(name: str) -> None:
    story = _STORIES[name]
    whole = list(story.response(Parts(after="u"), 0))
    expected = story.shown()
    assert merged(None, (part for _, part in whole)) == expected
    wrong = {}
    for length in range(1, len(whole) + 1):
        client = merged(None, (part for _, part in whole[:length]))
        for at in range(whole[length - 1][0], len(story.chunks) + 1):
            parts = Parts(held=held_answer(client))
            found = [part for _, part in story.response(parts, at)]
            if merged(client, found) != expected:
                wrong[length, at] = (client["parts"], found)
    assert not wrong, "\n".join(f"{cut}: {what}" for cut, what in list(wrong.items())[:3])


@for_each("name", list(_STORIES))
def test_a_client_that_has_everything_gets_nothing(name: str) -> None:
    story = _STORIES[name]
    at = len(story.chunks)
    parts = Parts(held=held_answer(json.loads(json.dumps(story.shown()))))
    found = [part["type"] for _, part in story.response(parts, at)]
    asked = ["tool-approval-request"] * len(story.calls_at(at))
    assert found == ["start", *asked, "finish"]


def test_an_answer_without_calls_is_continued_although_another_one_follows() -> None:
    later = {"role": "user", "content": "And?", "id": "later"}
    stored = entries([_USER, _said("m", "Yes.", 1), later, _said("n", "No.", 2)])
    _, own, _, newest = aisdk.messages_of(stored, {})
    for message, is_over in ((own, True), (newest, False)):
        parts = Parts(held=held_answer(message))
        found = [*parts.begin(stored, {}), *parts.finished(Outcome())]
        assert [part["type"] for part in found] == ["start", "finish"]
        assert (found[0]["messageId"], parts.is_over) == (message["id"], is_over)


@for_each(
    "answer", [{"state": "approval-responded", "approval": {"id": "b", "approved": True}}, {"output": 4}]
)
def test_a_client_that_sends_its_answer_alone_gets_what_follows(answer: dict[str, Any]) -> None:
    asking = _said("n", "May I?", 2)
    asking["chat"]["asks"] = ["b"]
    calling = _said("m", "", 1, tool_calls=[_call("b", "pay")])
    stored = entries([_USER, calling, asking, _said("o", "Yes.", 3)])
    part = {"type": "tool-pay", "toolCallId": "b", "state": "output-available", **answer}
    message = {"id": aisdk.messages_of(stored, {})[1]["id"], "role": "assistant", "parts": [part]}
    found = Parts(held=held_answer(message)).begin(stored, {})
    assert [each["delta"] for each in found if "delta" in each] == ["Yes."]


def test_a_decision_in_a_step_that_is_taken_back_is_told_again() -> None:
    story = _STORIES["an open approval"]
    message = story.shown()
    # A client need not send all that it holds.
    del message["parts"][2:]
    message["parts"][1] = {
        "type": "tool-pay",
        "toolCallId": "b",
        "input": {"a": 1},
        "state": "approval-responded",
        "approval": {"id": "b", "descriptor": {"digest": "d"}, "approved": True},
    }
    stored = [_USER, _said("m", "", 1, tool_calls=[_call("b", "pay"), _call("c", "look")])]
    calls = {"b": replace(_ASKED, approved=True)}
    parts = Parts(held=held_answer(message))
    found = [*parts.begin(entries(stored), {"b": _ASKED})]
    found += parts.take({"type": "run"}, entries(stored), calls, has_thread=True)
    found += parts.finished(Outcome())
    assert merged(message, found) == aisdk.messages_of(entries(stored), calls)[1]


@for_each(
    "parts",
    [
        [],
        [5, None, {"type": 5}, {"type": "tool-x", "toolCallId": ["c"]}],
        [{"type": "tool-else", "toolCallId": "b", "approval": 5, "state": {}}],
        [{"type": "step-start"}, {"toolCallId": "b", "approval": {"approved": []}}, {"type": "step-start"}],
    ],
)
def test_a_client_that_sends_anything_gets_the_answer(parts: list[Any]) -> None:
    story = _STORIES["an open approval"]
    message = {"id": 5, "role": "assistant", "parts": parts}
    found = [part for _, part in story.response(Parts(held=held_answer(message)), len(story.chunks))]
    assert [part["type"] for part in found if "step" not in part["type"]] == [
        *("start", "text-start", "text-delta", "text-end", "tool-input-available"),
        *("tool-approval-request", "finish"),
    ]


# --- Requests ----------------------------------------------------------------------------------------


def _asking(turn: Any, out: Any) -> None:
    for call_id in turn.results:
        with turn.step() as step:
            step.say({"role": "tool", "tool_call_id": call_id, "content": "done"})
    while turn.is_active:
        history = turn.messages()
        is_answered = history[-1]["role"] == "tool"
        out.reasoning("Well, ")
        out.text("One moment. " if is_answered else "May I? ")
        with turn.step() as step:
            step.say({"role": "assistant", "content": "One moment. " if is_answered else "May I? "})
            if not is_answered and "answer" in history[-1]["content"]:
                step.end_turn()
            elif not is_answered and "approval" in history[-1]["content"]:
                step.ask_approval("c", "pay", {"a": 1})
            elif not is_answered:
                step.wait_for({"c": {"tool_name": "pay", "input": {"a": 1}}})
        if is_answered:
            out.text("That ")
            out.text("is all.")
            with turn.step() as step:
                step.say({"role": "assistant", "content": "That is all."})
                step.end_turn()


async def _response(
    site: Chatting, *messages: dict[str, Any], is_driven: bool = False, **more: Any
) -> list[Any]:
    response = await site.request("POST", "ai/", {"id": "t", "messages": messages, **more})
    assert response.status_code == 200, response.content
    if is_driven:
        with override_settings(HELIX_STORE={"CHAT_FLUSH_MS": 0}):  # each delta is a chunk
            await sync_to_async(site.drive)("t")
    return events_of(b"".join([part async for part in response.streaming_content]))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["answer", "approval", "tool"])
async def test_a_request_with_the_answer_that_a_client_holds_doubles_nothing(
    chatting: Make, kind: str
) -> None:
    site = chatting(answer=_asking)

    async def stored() -> dict[str, Any]:
        message: dict[str, Any] = (await site.json("GET", "threads/t/?format=ai"))["messages"][-1]
        return message

    sent: dict[str, Any] | None = None
    user = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": kind}]}
    parts = await _response(site, user, is_driven=True)
    assert merged(None, parts) == await stored()
    if kind != "answer":
        sent = merged(None, parts)
        if kind == "approval":
            sent["parts"][-1] |= {"state": "approval-responded"}
            sent["parts"][-1]["approval"] |= {"approved": True}
        else:
            sent["parts"][-1] |= {"state": "output-available", "output": 4}
        parts = await _response(site, sent, is_driven=True)
    expected = await stored()
    assert merged(sent, parts) == expected
    wrong = {}
    for length in range(1, len(parts) + 1):
        client = merged(sent, parts[:length])
        rest = await _response(site, client)
        if merged(client, rest) != expected:
            wrong[length] = (client["parts"], rest)
    assert not wrong
    assert [part["type"] for part in await _response(site, expected)] == ["start", "finish"]


async def test_an_approval_is_answered_after_another_message_was_sent(chatting: Make) -> None:
    site = chatting(answer=_asking)
    users = [
        {"id": id, "role": "user", "parts": [{"type": "text", "text": text}]}
        for id, text in (("u1", "approval"), ("u2", "answer"))
    ]
    own = merged(None, await _response(site, users[0], is_driven=True))
    assert [part["type"] for part in await _response(site, users[1])] == ["finish"]
    part = own["parts"][-1]
    part |= {"state": "approval-responded", "approval": {**part["approval"], "approved": True}}
    # `sendMessage()` of the released client names the answer that it continues.
    sent = [users[0], own, users[1]]
    parts = await _response(site, *sent, messageId=own["id"], is_driven=True)
    stored = (await site.json("GET", "threads/t/?format=ai"))["messages"]
    assert merged(own, parts) == stored[1]
    assert [message["role"] for message in stored] == ["user", "assistant", "user", "assistant"]
    repeated = await _response(site, users[0], stored[1], users[1], messageId=own["id"])
    assert [part["type"] for part in repeated] == ["start", "finish"]
