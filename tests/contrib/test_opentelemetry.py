"""Spans of turns, steps, tools, effects and waits: their names, attributes, parents and errors."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import override_settings
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace import StatusCode, get_current_span

from helix_store import InMemoryStore, Store
from helix_store.contrib import opentelemetry
from helix_store.contrib.opentelemetry import SCHEMA_URL, TracedTurn, traced
from helix_store.core.limits import MAX_BIGINT
from helix_store.exceptions import EffectUnknown
from helix_store.models import Effect
from tests.databases import CommittedDatabase


class Spans:
    """A provider that keeps the spans that have ended."""

    def __init__(self) -> None:
        self.provider = TracerProvider()
        self._exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def all(self) -> list[ReadableSpan]:
        """The spans in the order of their starts."""
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def named(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.all if span.name == name]
        return span

    def turn(self, session: Any, **given: Any) -> TracedTurn:
        return traced(session.turn(**given), tracer_provider=self.provider)


def _id(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def _trace(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.trace_id)


def _parent(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture(params=["database", "memory"])
def store(request: pytest.FixtureRequest, committed_db: CommittedDatabase) -> Any:
    if request.param == "memory":
        return InMemoryStore()
    return Store(committed_db.alias, tenant=committed_db.tenant)


def test_a_turn_with_steps_tools_and_effects_is_one_tree(store: Any, spans: Spans) -> None:
    session = store.new_session("trip", agent_type="travel")
    with traced(session.turn(), provider="openai", tracer_provider=spans.provider) as turn:
        for number in range(2):
            with turn.step() as step:
                turn.tokens(model="gpt-4o", prompt=100, completion=20, cached=50)
                if number == 0:
                    turn.tool("search", True, 250)
                    turn.tool("book", False, 10)
                    step.say({"role": "assistant", "content": "secret words"})
                else:
                    step.end_turn()
        run_id = turn.run.run_id
    assert {span.name for span in spans.all} == {
        *("invoke_agent travel", "step 1", "step 2", "execute_tool search", "execute_tool book")
    }
    root, first = spans.named("invoke_agent travel"), spans.named("step 1")
    assert dict(root.attributes or {}) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "travel",
        "gen_ai.conversation.id": "trip",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-4o",
        "gen_ai.usage.input_tokens": 200,
        "gen_ai.usage.output_tokens": 40,
        "gen_ai.usage.cache_read.input_tokens": 100,
        "helix_store.run.id": run_id,
        "helix_store.turn": 1,
        **({"helix_store.tenant": store.tenant} if store.tenant else {}),
    }
    assert (first.attributes or {})["gen_ai.usage.input_tokens"] == 100
    assert _parent(root) is None
    assert _parent(first) == _parent(spans.named("step 2")) == _id(root)
    tool = spans.named("execute_tool search")
    assert _parent(tool) == _id(first)
    assert (tool.end_time or 0) - (tool.start_time or 0) == 250_000_000
    assert tool.status.status_code is StatusCode.UNSET
    assert spans.named("execute_tool book").status.status_code is StatusCode.ERROR
    assert "secret words" not in "".join(span.to_json() for span in spans.all)
    assert len({_trace(span) for span in spans.all}) == 1


def test_a_call_may_have_any_duration(store: Any, spans: Spans) -> None:
    session = store.new_session("trip", agent_type="travel")
    with traced(session.turn(), tracer_provider=spans.provider) as turn, turn.step():
        turn.tool("search", True, MAX_BIGINT)
    assert spans.named("execute_tool search").start_time == 0


def test_a_suspended_session_continues_its_trace_in_another_process(
    committed_db: CommittedDatabase, spans: Spans
) -> None:
    store = Store(committed_db.alias, tenant=committed_db.tenant)
    session = store.new_session("trip", agent_type="travel")
    with spans.turn(session) as turn, turn.step() as step:
        step.state.tracing_context = {"own": "kept"}
        step.ask_approval("call-1", "book", {"to": "Oslo"})
    stored = session.load().tracing_context
    assert stored is not None
    assert (stored["own"], set(stored)) == ("kept", {"own", "traceparent", "helix_store.suspended_at"})
    store.sessions.submit_tool_result("trip", "call-1", approved=True, approval_id="call-1")
    session.post({"role": "user", "content": "And a hotel."})  # a turn that receives loads the state again
    elsewhere = Spans()
    with elsewhere.provider.get_tracer("web").start_as_current_span("request") as request:
        other = Store(committed_db.alias, tenant=committed_db.tenant).session("trip")
        with elsewhere.turn(other) as turn, turn.step() as step:
            step.end_turn()
    before, after = spans.named("invoke_agent travel"), elsewhere.named("invoke_agent travel")
    wait = elsewhere.named("wait")
    assert _trace(after) == _trace(wait) == _trace(before) != request.get_span_context().trace_id
    assert _parent(after) == _parent(wait) == _id(before)
    assert [link.context.span_id for link in after.links] == [request.get_span_context().span_id]
    assert (wait.attributes or {})["helix_store.wait.calls"] == ("call-1",)
    assert (spans.named("step 1").start_time or 0) <= (wait.start_time or 0) <= (wait.end_time or 0)
    # Its end is the end of the trace: the next message of the user begins another one.
    session.post({"role": "user", "content": "Thanks."})
    with elsewhere.turn(other) as turn, turn.step() as step:
        step.end_turn()
    assert _trace(elsewhere.all[-1]) != _trace(before)


def test_an_effect_is_a_tool_that_says_what_came_of_it(store: Any, spans: Spans) -> None:
    session = store.new_session("trip", agent_type="travel")
    with spans.turn(session) as turn:
        with turn.effect("pay-1", tool_name="charge", input={"card": "4242 4242"}) as effect:
            effect.done({"receipt": "A-17"})
        with turn.effect("pay-1", tool_name="charge", input={"card": "4242 4242"}) as effect:
            assert effect.result == {"receipt": "A-17"}
    first, again = (span for span in spans.all if span.name == "execute_tool charge")
    assert dict(first.attributes or {}) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "charge",
        "gen_ai.tool.call.id": "pay-1",
        "gen_ai.conversation.id": "trip",
        "helix_store.effect.key": effect.key,
        "helix_store.effect.attempt": 1,
        "helix_store.effect.was_done": False,
        "helix_store.effect.state": "done",
    }
    assert (again.attributes or {})["helix_store.effect.was_done"] is True
    assert "4242 4242" not in first.to_json() + again.to_json()
    assert _parent(first) == _id(spans.named("invoke_agent travel"))


def test_an_unknown_effect_is_an_error(committed_db: CommittedDatabase, spans: Spans) -> None:
    session = Store(committed_db.alias, tenant=committed_db.tenant).new_session("trip", agent_type="travel")
    with pytest.raises(TimeoutError), spans.turn(session) as turn, turn.effect("pay-1", tool_name="charge"):
        raise TimeoutError("no answer")
    effects = Effect.objects.using(committed_db.alias).filter(session__tenant=committed_db.tenant)
    assert effects.get().state == "unknown"
    with spans.turn(session) as turn, turn.effect("pay-1", tool_name="charge"):
        pytest.fail("an unknown effect is not attempted")
    failed, refused = (span for span in spans.all if span.name == "execute_tool charge")
    assert (failed.attributes or {})["error.type"] == "TimeoutError"
    assert (failed.attributes or {})["helix_store.effect.state"] == "unknown"
    assert (refused.attributes or {})["error.type"] == EffectUnknown.__name__
    stopped = [span for span in spans.all if span.name == "invoke_agent travel"][-1]
    assert (stopped.attributes or {})["helix_store.stopped_by"] == "EffectUnknown"
    assert stopped.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("has_details", [True, False])
def test_an_error_fails_the_spans_around_it(store: Any, spans: Spans, has_details: bool) -> None:
    session = store.new_session("trip", agent_type="travel")
    with (
        override_settings(HELIX_STORE={"RUN_ERROR_DETAILS": has_details}),
        pytest.raises(LookupError),
        spans.turn(session) as turn,
        turn.step(),
    ):
        raise LookupError("Ada said something private")
    assert [(span.status.status_code, (span.attributes or {})["error.type"]) for span in spans.all] == [
        (StatusCode.ERROR, "LookupError")
    ] * 2
    said = "".join(span.to_json() for span in spans.all)
    assert ("Ada said" in said) == has_details
    assert not get_current_span().get_span_context().is_valid


async def test_async_turns_have_the_same_spans(committed_db: CommittedDatabase, spans: Spans) -> None:
    store = Store(committed_db.alias, tenant=committed_db.tenant)
    session = await store.anew_session("trip", agent_type="travel")
    async with spans.turn(session) as turn, turn.step() as step:
        assert get_current_span().get_span_context().span_id == step._span.get_span_context().span_id
        await turn.atokens(model="gpt-4o", prompt=100, completion=20)
        await turn.atool("search", False, 1)
        await step.await_for({"call-1": {"tool_name": "ask"}})
    assert {span.name for span in spans.all} == {"invoke_agent travel", "step 1", "execute_tool search"}
    root, first, tool = (
        spans.named(name) for name in ("invoke_agent travel", "step 1", "execute_tool search")
    )
    assert (_parent(first), _parent(tool)) == (_id(root), _id(first))
    assert tool.status.status_code is StatusCode.ERROR
    for span in (root, first):
        told = dict(span.attributes or {})
        assert (told["gen_ai.request.model"], told["gen_ai.usage.input_tokens"]) == ("gpt-4o", 100)
    assert "traceparent" in ((await session.aload()).tracing_context or {})


def test_a_turn_that_is_not_active_has_no_span(store: Any, spans: Spans) -> None:
    session = store.new_session("trip", agent_type="travel")
    with spans.turn(session) as turn, turn.step() as step:
        step.wait_for({"call-1": {"tool_name": "ask"}})
    count = len(spans.all)
    with spans.turn(session) as turn:
        assert not turn.is_active
    assert len(spans.all) == count


def test_a_damaged_context_begins_another_trace(committed_db: CommittedDatabase, spans: Spans) -> None:
    session = Store(committed_db.alias, tenant=committed_db.tenant).new_session("trip", agent_type="travel")
    with session.turn() as plain, plain.step() as step:
        step.state.tracing_context = {"traceparent": "00-what", "helix_store.suspended_at": "yesterday"}
        step.wait_for({"call-1": {"tool_name": "ask"}})
    session.store.submit_tool_result("trip", "call-1", result="yes")
    with spans.turn(session) as turn, turn.step() as step:
        step.end_turn()
    assert [span.name for span in spans.all] == ["invoke_agent travel", "step 2"]
    assert _parent(spans.all[0]) is None


def test_the_attributes_are_those_of_the_pinned_conventions() -> None:
    assert SCHEMA_URL in {schema.value for schema in Schemas}
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    source = opentelemetry.__file__
    with open(source) as file:
        used = {word.strip('",:') for word in file.read().split() if word.startswith('"gen_ai.')}
    assert len(used) > 10
    assert used - known == set()
