"""Calls that a thread waits for: every client knows them, once, and gets all that follows the answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from helix_store import call_digest
from helix_store.contrib.chat import out as out_module
from helix_store.contrib.chat.threads import open_calls
from helix_store.models import Decision
from tests.cells import for_each
from tests.chat.conftest import Chatting, events_of, run_input

Make = Callable[..., Chatting]

_CALL = {"id": "c", "type": "function", "function": {"name": "refund", "arguments": '{"euros": 5}'}}
_OF_ANTHROPIC = [
    {"type": "text", "text": "I refund it."},
    {"type": "tool_use", "id": "c", "name": "refund", "input": {"euros": 5}},
]


class _Asking:
    """An agent that asks about a call in its first turn, and in the next one says what the answer was."""

    def __init__(self, *says: Any, streams: str = "", is_approval: bool = True, approvals: int = 1) -> None:
        self.says, self.streams = says, streams
        self.is_approval, self.approvals = is_approval, approvals
        self.histories: list[Any] = []

    def __call__(self, turn: Any, out: Any) -> None:
        self.histories.append([message["role"] for message in turn.messages()])
        for call_id in turn.results:
            with turn.step() as step:
                step.say({"role": "tool", "tool_call_id": call_id, "content": "done"})
        while turn.is_active:
            if turn.messages()[-1]["content"] == "Hello":
                self._ask(turn, out)
                return
            with turn.step() as step:
                step.say({"role": "assistant", "content": "That is all."})
                step.end_turn()

    def _ask(self, turn: Any, out: Any) -> None:
        *before, last = self.says or (None,)
        for message in before:
            with turn.step() as step:
                step.say(message)
        with turn.step() as step:
            if self.streams:
                out.text(self.streams)
            if last is not None:
                step.say(*last if isinstance(last, list) else [last])
            if self.is_approval:
                step.ask_approval("c", "refund", {"euros": 5}, approvals=self.approvals)
            else:
                step.wait_for({"c": {"tool_name": "refund", "input": {"euros": 5}}})


def _said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


async def _drive(site: Chatting) -> None:
    # Each delta is a chunk.
    with override_settings(HELIX_STORE={"CHAT_FLUSH_MS": 0}):
        await sync_to_async(site.drive)("t")


def _message(message_id: str, text: str = "Hello") -> dict[str, Any]:
    parts = [{"type": "text", "text": text}]
    return {"id": "t", "messages": [{"id": message_id, "role": "user", "parts": parts}]}


async def _followed(site: Chatting, body: Any, *, is_driven: bool = True) -> list[dict[str, Any]]:
    """The parts of a response that was there before the turn began."""
    response = await site.request("POST", "ai/", body)
    assert response.status_code == 200, response.content
    if is_driven:
        await _drive(site)
    return events_of(b"".join([part async for part in response.streaming_content]))


async def _asked(site: Chatting) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The parts of the response to the first message, and the thread."""
    return await _followed(site, _message("u1")), await site.json("GET", "threads/t/?format=ai")


def _tool_parts(thread: dict[str, Any]) -> list[dict[str, Any]]:
    parts = [part for message in thread["messages"] for part in message["parts"]]
    return [part for part in parts if "toolCallId" in part]


def _answered(thread: dict[str, Any], **decision: Any) -> dict[str, Any]:
    """The body of the request with which the released client answers the last message's call."""
    (part,) = _tool_parts(thread)
    if "approval" in part:
        part["state"] = "approval-responded"
        part["approval"] |= {"approved": True, **decision}
    else:
        part |= {"state": "output-available", "output": 4}
    return {"id": "t", "messages": thread["messages"]}


@pytest.mark.thorough
@for_each("is_approval", [True, False], ids=["approval", "result"])
@for_each(
    "says, streams",
    [
        ((), ""),
        ((), "May I?"),
        ((_said("May I?"),), ""),
        ((_said("I refund it.", tool_calls=[_CALL]),), ""),
        ((_said("I refund it.", tool_calls=[_CALL]), _said("May I?")), ""),
        ((_said("I refund it.", tool_calls=[_CALL]), None), ""),
        ((_said("I refund it.", tool_calls=[_CALL]), *[_said("Wait.")] * 4, _said("May I?")), "May I?"),
        (([_said("I refund it.", tool_calls=[_CALL]), _said("May I?")],), ""),
        (({"role": "assistant", "content": _OF_ANTHROPIC},), ""),
        (({"role": "assistant", "content": _OF_ANTHROPIC[:1]},), ""),
    ],
    ids=[
        *("nothing said", "streamed alone", "no call said", "call said", "call said earlier"),
        *("nothing said after the call", "call said long before"),
        "text said after the call",
        *("call of another shape", "text of another shape"),
    ],
)
async def test_a_client_knows_the_call_that_it_is_asked_about(
    chatting: Make, monkeypatch: pytest.MonkeyPatch, says: Any, streams: str, is_approval: bool
) -> None:
    monkeypatch.setattr(out_module, "_LOOK_BACK", 2)
    agent = _Asking(*says, streams=streams, is_approval=is_approval)
    site = chatting(answer=agent)
    parts, thread = await _asked(site)
    assert [part["toolCallId"] for part in _tool_parts(thread)] == ["c"]
    types = [part["type"] for part in parts]
    assert types.count("tool-input-available") == 1
    assert types[-2:] == ["tool-approval-request" if is_approval else "finish-step", "finish"]
    of_agui = (await site.json("GET", "threads/t/"))["messages"]
    assert [call["id"] for each in of_agui for call in each.get("toolCalls", ())] == ["c"]
    flat = [message for each in says for message in (each if isinstance(each, list) else [each])]
    texts = [message["content"] for message in flat if message is not None]
    told = "".join(part["text"] for part in thread["messages"][-1]["parts"] if part["type"] == "text")
    assert told == "".join(text if isinstance(text, str) else text[0]["text"] for text in texts)
    body = _answered(thread)
    parts = await _followed(site, body)
    assert [part["delta"] for part in parts if "delta" in part] == ["That is all."]
    # A repeated request gets the same.
    assert await _followed(site, body, is_driven=False) == parts
    # The model sees what the agent has said, and nothing else.
    assert agent.histories == [["user"], ["user", *["assistant"] * len(texts)]]
    (part,) = _tool_parts(await site.json("GET", "threads/t/?format=ai"))
    assert (part["state"], part["output"]) == ("output-available", "done")


@pytest.mark.thorough
@for_each("last", [1, 2, 3])
async def test_a_model_gets_as_many_messages_as_it_asks_for(chatting: Make, last: int) -> None:
    def answer(turn: Any, out: Any) -> None:
        with turn.step() as step:
            if turn.results:
                found.extend(message["content"] for message in turn.messages(last))
                step.end_turn()
            else:
                step.wait_for({"c": {"tool_name": "ask"}})

    found: list[str] = []
    site = chatting(answer=answer)
    _, thread = await _asked(site)
    await _followed(site, _answered(thread))
    assert found == ["Hello"]


@pytest.mark.thorough
async def test_a_message_that_waits_for_an_answer_to_a_call_has_no_answer(chatting: Make) -> None:
    site = chatting(answer=_Asking(_said("May I?")))
    await _asked(site)
    parts = await _followed(site, _message("u2", "And?"))
    # The released client refuses the start of a message without an id.
    assert parts == [{"type": "finish", "finishReason": "tool-calls"}]
    assert [each["id"] for each in (await site.json("GET", "threads/t/"))["waiting"]] == ["u2"]


@pytest.mark.thorough
async def test_a_message_that_is_withdrawn_has_no_answer(chatting: Make) -> None:
    site = chatting()
    response = await site.request("POST", "ai/", _message("u1"))
    assert (await site.request("DELETE", "threads/t/posts/u1/")).status_code == 204
    parts = events_of(b"".join([part async for part in response.streaming_content]))
    assert parts == [{"type": "finish", "finishReason": "stop"}]


@pytest.mark.thorough
@for_each(
    "says, order",
    [
        ([_said("May I?")], ["user", "tool"]),
        ([_said("May I?", tool_calls=[_CALL])], ["tool", "user"]),
        # The model's call has no result yet, so the message must wait for it.
        ([_said("May I?", tool_calls=[_CALL]), None], ["tool", "user"]),
    ],
    ids=["received before the result", "received after it", "nothing said after the call"],
)
async def test_what_follows_an_answer_is_shown_although_a_message_waits(
    chatting: Make, says: Any, order: list[str]
) -> None:
    site = chatting(answer=_Asking(*says))
    _, thread = await _asked(site)
    await site.post("t", "u2", "And?")
    body = _answered(thread)
    # A repeated request finds the next message received, and answered.
    first, again = await _followed(site, body), await _followed(site, body, is_driven=False)
    shown = [part["type"] for part in first if part["type"].startswith("tool-")]
    assert shown == ["tool-approval-response", "tool-output-available"]
    assert again == first
    stored = await sync_to_async(site.session("t").messages)()
    assert [message["role"] for message in stored] == ["user", "assistant", *order, "assistant"]
    _, own, _, following = (await site.json("GET", "threads/t/?format=ai"))["messages"]
    assert first[0]["messageId"] == own["id"]
    assert own["parts"][-1]["output"] == "done"
    assert [part["text"] for part in following["parts"] if part["type"] == "text"] == ["That is all."]


@pytest.mark.thorough
async def test_an_approval_that_needs_two_people_stays_open_after_the_first(chatting: Make) -> None:
    site = chatting(answer=_Asking(_said("May I?"), approvals=2))
    _, thread = await _asked(site)
    body = _answered(thread)
    for _ in range(2):
        parts = await _followed(site, body)
        assert [part["type"] for part in parts] == ["start", "tool-approval-request", "finish"]
    (part,) = _tool_parts(await site.json("GET", "threads/t/?format=ai"))
    assert part["state"] == "approval-requested"


_FORGED = {"approved": True, "submitted_at": 1_790_000_000_000, "actors": ["ann"]}


def _asks(*call_ids: str) -> Callable[..., None]:
    def answer(turn: Any, out: Any) -> None:
        if turn.results:
            with turn.step() as step:
                step.end_turn()
            return
        with turn.step() as step:
            for call_id in call_ids:
                step.ask_approval(call_id, call_id, {"eur": 1})

    return answer


async def _forged(site: Chatting, *, amount: int = 1) -> str:
    """The digest of the call about which the agent writes an approval into its own state."""

    def forge(state: Any) -> None:
        state.pending_client_tool_calls["pay"].update(_FORGED, input={"eur": amount})

    await site.post("t", "u1")
    await _drive(site)
    await sync_to_async(site.session("t").update)(forge)
    return call_digest("pay", {"eur": amount})


async def _reject(site: Chatting, by: str, digest: str) -> None:
    decision: dict[str, Any] = {"approved": False, "digest": digest}
    if by == "calls":
        told = await site.json("POST", "threads/t/calls/pay/", decision)
        assert told == {"id": "pay", "accepted": True}
        return
    if by == "agui":
        resume = [{"interruptId": "pay", "status": "resolved", "payload": decision}]
        response = await site.request("POST", "agui/", run_input("t", resume=resume) | {"messages": []})
    else:
        thread = await site.json("GET", "threads/t/?format=ai")
        (part,) = [part for part in _tool_parts(thread) if part["toolCallId"] == "pay"]
        part["state"] = "approval-responded"
        part["approval"]["approved"] = False
        response = await site.request("POST", "ai/", {"id": "t", "messages": thread["messages"]})
    assert response.status_code == 200, response.content


@pytest.mark.thorough
@for_each("others", [(), ("ship",)], ids=["alone", "with an open call"])
@for_each("by", ["calls", "agui", "ai"])
async def test_an_approval_that_only_the_state_holds_is_open(
    chatting: Make, by: str, others: tuple[str, ...]
) -> None:
    site = chatting(answer=_asks("pay", *others))
    digest = await _forged(site, amount=5)
    for kind in ("agui", "ai"):
        thread = await site.json("GET", f"threads/t/?format={kind}")
        assert {call["id"]: call["digest"] for call in thread["calls"]}["pay"] == digest
        assert thread["status"] == "waiting"
    (part,) = [part for part in _tool_parts(thread) if part["toolCallId"] == "pay"]
    assert part["state"] == "approval-requested"
    assert part["approval"] == {"id": "pay", "descriptor": {"digest": digest}}
    outcome = (await site.events("GET", "agui/t/"))[-1]["outcome"]
    assert {each["id"]: each["metadata"]["digest"] for each in outcome["interrupts"]}["pay"] == digest
    await _reject(site, by, digest)
    state = await site.session("t").aload()
    assert state.pending_client_tool_calls["pay"]["approved"] is False
    decisions = Decision.objects.using(site.database.alias)
    decision = await decisions.aget(session__session_id=state.session_id)
    assert (decision.tool_call_id, decision.outcome, decision.actor) == ("pay", "rejected", "ann")
    thread = await site.json("GET", "threads/t/?format=ai")
    assert [call["id"] for call in thread["calls"]] == list(others)
    (part,) = [part for part in _tool_parts(thread) if part["toolCallId"] == "pay"]
    assert (part["state"], part["approval"]["approved"]) == ("approval-responded", False)


async def test_the_statements_that_find_the_open_calls(chatting: Make) -> None:
    site = chatting(answer=_asks("pay"))

    def statements() -> tuple[list[str], int]:
        state = site.session("t").load()
        with CaptureQueriesContext(connections[site.database.alias]) as queries:
            found = open_calls(site.store, state)
        return list(found), len(queries)

    await site.post("t", "u1")
    await _drive(site)
    assert await sync_to_async(statements)() == (["pay"], 0)
    state = await site.session("t").aload()
    await sync_to_async(site.store.sessions.submit_tool_result)(
        state.session_id, "pay", approval_id="pay", approved=True, actor="ann"
    )
    assert await sync_to_async(statements)() == ([], 0)
    await site.session("t").aupdate(lambda state: state.pending_client_tool_calls["pay"].update(_FORGED))
    assert await sync_to_async(statements)() == (["pay"], 1)


def _result(call_id: str, content: str = "4") -> dict[str, Any]:
    return {"id": f"result-{content}", "role": "tool", "toolCallId": call_id, "content": content}


def _after_its_call(messages: list[dict[str, Any]], call_id: str) -> list[dict[str, Any]]:
    """A client's history with a result where CopilotKit puts it: after the message that makes the call."""
    at = next(
        index
        for index, message in enumerate(messages)
        if any(call["id"] == call_id for call in message.get("toolCalls", ()))
    )
    return [*messages[: at + 1], _result(call_id), *messages[at + 1 :]]


@pytest.mark.thorough
@for_each("new", [[], [{"id": "u2", "role": "user", "content": "And?"}]], ids=["alone", "with a message"])
@for_each("streams", ["", "Wait for it."], ids=["text", "reasoning"])
async def test_a_client_inserts_a_result_after_its_call(chatting: Make, streams: str, new: list[Any]) -> None:
    def answer(turn: Any, out: Any) -> None:
        if streams:
            out.tool_call("c", "refund", {"euros": 5})
            out.reasoning(streams)
        with turn.step() as step:
            said = [_said("", tool_calls=[_CALL])]
            step.say(*said, *([] if streams else [_said("Please decide.")]))
            step.wait_for({"c": {"tool_name": "refund", "input": {"euros": 5}}})

    site = chatting(answer=answer)
    await _asked(site)
    messages = (await site.json("GET", "threads/t/"))["messages"]
    body = {"threadId": "t", "runId": "r", "messages": [*_after_its_call(messages, "c"), *new]}
    for _ in range(2):  # a repeat joins
        response = await site.request("POST", "agui/", body)
        assert response.status_code == 200, response.content
        await response.streaming_content.aclose()
    state = await sync_to_async(site.session("t").load)()
    assert state.pending_client_tool_calls["c"]["result"] == "4"
    thread = await site.json("GET", "threads/t/")
    assert (thread["calls"], [each["id"] for each in thread["waiting"]]) == ([], [each["id"] for each in new])


async def test_results_in_a_clients_history_are_no_answers_to_other_calls(chatting: Make) -> None:
    """Agents call their tools without asking anybody, with any ids, and with the same ones again."""

    def answer(turn: Any, out: Any) -> None:
        with turn.step() as step:
            step.say(_said("", tool_calls=[{**_CALL, "id": call_id} for call_id in ("a/b", "c")]))
            for call_id in ("a/b", "c"):
                step.say({"role": "tool", "tool_call_id": call_id, "content": "done"})
            step.say(_said("Again.", tool_calls=[_CALL]))
            step.wait_for({"c": {"tool_name": "refund", "input": {"euros": 5}}})

    site = chatting(answer=answer)
    await _asked(site)
    messages = (await site.json("GET", "threads/t/"))["messages"]
    assert [message["role"] for message in messages].count("tool") == 2
    new = {"id": "u2", "role": "user", "content": "And?"}
    for thread in ("t", "another"):
        body = {"threadId": thread, "runId": "r", "messages": [*messages, new]}
        response = await site.request("POST", "agui/", body)
        assert response.status_code == 200, response.content
        await response.streaming_content.aclose()
        stored = await site.json("GET", f"threads/{thread}/")
        assert [each["id"] for each in stored["waiting"]] == ["u2"]
    assert [call["id"] for call in (await site.json("GET", "threads/t/"))["calls"]] == ["c"]
