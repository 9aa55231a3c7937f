"""A chat whose answer is traced: spans of its turns and steps, whatever the answer is and however it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import async_to_sync
from opentelemetry.trace import StatusCode

from helix_store.contrib.opentelemetry import traced_answer
from tests.cells import for_each
from tests.chat.conftest import Chatting
from tests.contrib.test_opentelemetry import Spans

Make = Callable[..., Chatting]


def _speak(turn: Any, out: Any) -> None:
    out.text("Yes.")
    with turn.step() as step:
        turn.tokens(model="gpt-4o", prompt=3, completion=2)
        step.say({"role": "assistant", "content": "Yes."})
        step.end_turn()


async def _speak_later(turn: Any, out: Any) -> None:
    out.text("Yes.")
    async with turn.step() as step:
        await turn.atokens(model="gpt-4o", prompt=3, completion=2)
        step.say({"role": "assistant", "content": "Yes."})
        step.end_turn()


class _Agent:
    async def __call__(self, turn: Any, out: Any) -> None:
        await _speak_later(turn, out)


def _driven(chatting: Make, answer: Any) -> tuple[Chatting, Spans]:
    spans = Spans()
    site = chatting(answer=traced_answer(answer, provider="openai", tracer_provider=spans.provider))
    async_to_sync(site.post)("t", "u1")
    site.drive("t")
    return site, spans


@for_each("answer", [_speak, _speak_later, _Agent()], ids=["function", "coroutine", "object"])
def test_the_turn_of_a_chat_is_a_span_with_its_steps(chatting: Make, answer: Any) -> None:
    site, spans = _driven(chatting, answer)
    assert [each["content"] for each in site.session("t").messages()] == ["Hello", "Yes."]
    turn, step = spans.all
    assert (turn.name, step.name) == (f"invoke_agent {site.chat.agent_type}", "step 1")
    assert step.parent is not None
    assert turn.context is not None
    assert step.parent.span_id == turn.context.span_id
    told = dict(turn.attributes or {})
    assert told["gen_ai.provider.name"] == "openai"
    assert told["gen_ai.conversation.id"] == site.session("t").id
    assert told["gen_ai.usage.input_tokens"] == 3
    assert turn.status.status_code is StatusCode.UNSET


def test_an_answer_that_fails_fails_its_span(chatting: Make) -> None:
    def fail(turn: Any, out: Any) -> None:
        raise RuntimeError("no")

    _, spans = _driven(chatting, fail)
    (turn,) = spans.all
    assert turn.status.status_code is StatusCode.ERROR
    assert (turn.attributes or {})["error.type"] == "RuntimeError"


def test_an_answer_that_is_stopped_does_not_fail(chatting: Make) -> None:
    def stop(turn: Any, out: Any) -> None:
        turn.session.store.request_interrupt(turn.session.id, reason="enough")
        with turn.step() as step:
            step.say({"role": "assistant", "content": "Too late."})

    site, spans = _driven(chatting, stop)
    assert [each["content"] for each in site.session("t").messages()] == ["Hello"]
    turn = spans.all[0]
    assert turn.status.status_code is StatusCode.UNSET
    assert (turn.attributes or {})["helix_store.stopped_by"] == "TurnInterrupted"
