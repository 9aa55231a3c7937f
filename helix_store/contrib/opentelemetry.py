"""Spans for turns, steps, tools, effects and waits, by OpenTelemetry's conventions for generative AI.

The extra is ``opentelemetry``: at run time it needs the API only. Names of attributes are those of the
semantic conventions `SCHEMA_URL`, in which the part for generative AI is in development; a later version of
this package may follow a later one. No span contains a message, an input or a result.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Token
from functools import wraps
from types import TracebackType
from typing import Any, Final

from opentelemetry import context as contexts
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    TracerProvider,
    get_current_span,
    get_tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from helix_store import conf
from helix_store.core import validation
from helix_store.core.types import Duration
from helix_store.engine.async_twins import async_twin, is_async
from helix_store.exceptions import EffectUnknown, TurnInterrupted
from helix_store.stores.effect import OpenEffect
from helix_store.stores.step import Step
from helix_store.stores.turn import Turn

__all__ = ["TracedEffect", "TracedStep", "TracedTurn", "traced", "traced_answer"]

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
"""The version of the semantic conventions."""

SUSPENDED_AT: Final = "helix_store.suspended_at"
"""The key in the tracing context of a suspension: when it began, in nanoseconds since the epoch."""

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_USAGE: Final = {
    "prompt": "gen_ai.usage.input_tokens",
    "completion": "gen_ai.usage.output_tokens",
    "cached": "gen_ai.usage.cache_read.input_tokens",
    "cache_write": "gen_ai.usage.cache_creation.input_tokens",
    "reasoning": "gen_ai.usage.reasoning.output_tokens",
}
"""The attribute of each count of `Turn.tokens`."""


def traced(
    turn: Turn, *, provider: str | None = None, tracer_provider: TracerProvider | None = None
) -> TracedTurn:
    """Return a turn whose work is traced: use it as the turn itself, in ``with`` or ``async with``.

    ``provider`` is the name of the model's provider for ``gen_ai.provider.name``, such as ``"openai"``.
    Spans go to ``tracer_provider``, by default the global one. A turn that is not active has no span.

    Example::

        with traced(session.turn()) as turn:
            while turn.is_active:
                with turn.step() as step:
                    step.say({"role": "assistant", "content": "Hello!"})
                    step.end_turn()
    """
    tracer = get_tracer("helix_store", tracer_provider=tracer_provider, schema_url=SCHEMA_URL)
    return TracedTurn(turn, tracer, provider)


def traced_answer(
    answer: Callable[..., Any], *, provider: str | None = None, tracer_provider: TracerProvider | None = None
) -> Callable[..., Any]:
    """Return the answer of a chat whose turns are traced; the arguments are those of `traced`.

    Example::

        chat = Chat("support", traced_answer(answer, provider="openai"))
    """

    @contextmanager
    def begun(turn: Turn) -> Iterator[TracedTurn]:
        # The chat itself enters and exits the turn; only the span begins and ends here.
        found = traced(turn, provider=provider, tracer_provider=tracer_provider)
        found._begin_now()
        try:
            yield found
        except TurnInterrupted as exc:
            found._end_stopped(exc)
            raise
        except BaseException as exc:
            found._end(exc)
            raise
        found._end(None)

    if is_async(answer):

        @wraps(answer)
        async def traced_one(turn: Turn, *given: Any) -> None:
            with begun(turn) as found:
                await answer(found, *given)
    else:

        @wraps(answer)
        def traced_one(turn: Turn, *given: Any) -> None:
            with begun(turn) as found:
                answer(found, *given)

    return traced_one


class _Traced:
    """A wrapped object with a span from its entry to its exit. All other attributes are the object's."""

    def __init__(self, wrapped: Any, tracer: Tracer) -> None:
        self._wrapped = wrapped
        self._tracer = tracer
        self._span: Span | None = None
        self._attached: Token[Context] | None = None
        self._counts: Counter[str] = Counter()
        self._entered_at = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __enter__(self) -> Any:
        self._entered_at = time.time_ns()
        try:
            self._wrapped.__enter__()
        except BaseException as exc:
            self._not_entered(exc)
            raise
        self._begin()
        return self

    async def __aenter__(self) -> Any:
        self._entered_at = time.time_ns()
        try:
            await self._wrapped.__aenter__()
        except BaseException as exc:
            self._not_entered(exc)
            raise
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            is_quiet = bool(self._wrapped.__exit__(kind, error, trace))
        except BaseException as exc:
            self._end(exc)
            raise
        self._end(None if is_quiet else error)
        return is_quiet

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            is_quiet = bool(await self._wrapped.__aexit__(kind, error, trace))
        except BaseException as exc:
            self._end(exc)
            raise
        self._end(None if is_quiet else error)
        return is_quiet

    def _begin(self) -> None:
        """Start the span, after the object was entered."""
        raise NotImplementedError

    def _not_entered(self, error: BaseException) -> None:
        """Run if the object could not be entered. By default, there is no span."""

    def _attributes_at_end(self) -> Mapping[str, Any]:
        return {}

    def _start(
        self,
        name: str,
        attributes: Mapping[str, Any],
        *,
        context: Context | None = None,
        links: list[Link] | None = None,
    ) -> None:
        self._span = self._tracer.start_span(
            name,
            context=context,
            kind=SpanKind.INTERNAL,
            attributes={key: value for key, value in attributes.items() if value is not None},
            links=links,
            start_time=self._entered_at,
        )
        self._attached = contexts.attach(set_span_in_context(self._span))

    def _end(self, error: BaseException | None) -> None:
        span, attached = self._span, self._attached
        if span is None or attached is None:
            return
        self._span = self._attached = None
        contexts.detach(attached)
        counts = {name: count for name, count in self._counts.items() if count}
        span.set_attributes({**counts, **self._attributes_at_end()})
        if error is not None:
            _fail(span, error)
        span.end()


def _fail(span: Span, error: BaseException) -> None:
    span.set_attribute("error.type", type(error).__qualname__)
    if conf.run_error_details():
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, str(error)))
    else:
        # The message may quote a user.
        span.set_status(Status(StatusCode.ERROR))


class TracedTurn(_Traced):
    """A `Turn` with a span ``invoke_agent``, and spans for what happens in it; see `traced`.

    If the session was suspended by a traced step, the turn that resumes it belongs to the same trace, with a
    span for the wait, and a link to the span in which it begins, such as that of a request.
    """

    _wrapped: Turn

    def __init__(self, turn: Turn, tracer: Tracer, provider: str | None) -> None:
        super().__init__(turn, tracer)
        self._provider = provider
        self._steps: list[TracedStep] = []

    def step(self, step_id: str | None = None, **given: Any) -> TracedStep:
        """Return the next step, as `Turn.step` does."""
        return TracedStep(self._wrapped.step(step_id, **given), self)

    def effect(self, effect_id: str, **given: Any) -> TracedEffect:
        """Return an effect, as `Turn.effect` does."""
        return TracedEffect(self._wrapped.effect(effect_id, **given), self._tracer)

    def tokens(self, /, *, model: str, **given: Any) -> None:
        """Record the tokens of a model's answer, as `Turn.tokens` does, and add them to the open spans."""
        self._wrapped.tokens(model=model, **given)
        counts = {name: given[count] for count, name in _USAGE.items() if given.get(count)}
        for each in (self, *self._steps):
            each._counts.update(counts)
            if each._span is not None:
                each._span.set_attribute("gen_ai.request.model", model)

    def tool(self, name: str, success: bool, duration: Duration) -> None:
        """Record a tool call, as `Turn.tool` does, with a span that ends now."""
        self._wrapped.tool(name, success, duration)
        parent = self._steps[-1] if self._steps else self
        if parent._span is None:
            return
        now = time.time_ns()
        took = validation.milliseconds(duration, "duration")
        span = self._tracer.start_span(
            f"execute_tool {name}",
            context=set_span_in_context(parent._span),
            attributes={"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name},
            start_time=max(now - took * 1_000_000, 0),
        )
        if not success:
            span.set_attribute("error.type", "_OTHER")
            span.set_status(Status(StatusCode.ERROR))
        span.end(now)

    atokens = async_twin(tokens)
    atool = async_twin(tool)

    def _begin(self) -> None:
        turn = self._wrapped
        if turn.run is None:
            return
        tracing = turn.tracing or {}
        stored = _PROPAGATOR.extract(_texts(tracing), Context())
        has_trace = get_current_span(stored).get_span_context().is_valid
        current = get_current_span().get_span_context()
        state = turn.state
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": state.agent_type,
            "gen_ai.conversation.id": state.session_id,
            "gen_ai.provider.name": self._provider,
            "helix_store.tenant": getattr(turn.session.store, "tenant", None) or None,
            "helix_store.run.id": turn.run.run_id,
            "helix_store.turn": turn.run.turn,
            "helix_store.recovered.run.id": None if turn.recovered is None else turn.recovered.run_id,
        }
        if has_trace:
            self._add_wait(stored, tracing)
        self._start(
            f"invoke_agent {state.agent_type}",
            attributes,
            context=stored if has_trace else None,
            links=[Link(current)] if has_trace and current.is_valid else None,
        )

    def _begin_now(self) -> None:
        """Start the span of a turn that was entered before."""
        self._entered_at = time.time_ns()
        self._begin()

    def _end_stopped(self, by: TurnInterrupted) -> None:
        """End the span of a turn that is about to learn what stops it."""
        if self._span is not None:
            self._span.set_attribute("helix_store.stopped_by", type(by).__qualname__)
        self._end(None)

    def _add_wait(self, stored: Context, tracing: Mapping[str, Any]) -> None:
        since = tracing.get(SUSPENDED_AT)
        if type(since) is not int or not 0 < since <= self._entered_at:
            return
        calls = sorted(self._wrapped.results)
        attributes = {"gen_ai.conversation.id": self._wrapped.session.id, "helix_store.wait.calls": calls}
        wait = self._tracer.start_span("wait", context=stored, attributes=attributes, start_time=since)
        wait.end(self._entered_at)

    def _attributes_at_end(self) -> Mapping[str, Any]:
        stopped_by = self._wrapped.stopped_by
        return {} if stopped_by is None else {"helix_store.stopped_by": type(stopped_by).__qualname__}


def _texts(tracing: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in tracing.items() if isinstance(value, str)}


class TracedStep(_Traced):
    """A `Step` with a span, whose context is stored with the suspension if the step asks for something."""

    _wrapped: Step

    def __init__(self, step: Step, turn: TracedTurn) -> None:
        super().__init__(step, turn._tracer)
        self._turn = turn

    def _begin(self) -> None:
        step = self._wrapped
        self._start(
            f"step {step.number}",
            {
                "gen_ai.conversation.id": step.session.id,
                "helix_store.step.id": step.id,
                "helix_store.step.number": step.number,
            },
        )
        self._turn._steps.append(self)

    def _end(self, error: BaseException | None) -> None:
        if self in self._turn._steps:
            self._turn._steps.remove(self)
        super()._end(error)

    def wait_for(self, *given: Any, **named: Any) -> None:
        """Suspend the session when the step commits, as `Step.wait_for` does."""
        self._wrapped.wait_for(*given, **named)
        self._keep_context()

    async def await_for(self, *given: Any, **named: Any) -> None:
        """Async version of `wait_for`."""
        await self._wrapped.await_for(*given, **named)
        self._keep_context()

    def ask_approval(self, *given: Any, **named: Any) -> None:
        """Ask a person to approve a call, as `Step.ask_approval` does."""
        self._wrapped.ask_approval(*given, **named)
        self._keep_context()

    async def aask_approval(self, *given: Any, **named: Any) -> None:
        """Async version of `ask_approval`."""
        await self._wrapped.aask_approval(*given, **named)
        self._keep_context()

    def _keep_context(self) -> None:
        turn = self._turn._span
        if turn is None:
            return
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(turn))
        state = self._wrapped.state
        kept = {**(state.tracing_context or {}), **carrier, SUSPENDED_AT: time.time_ns()}
        state.tracing_context = kept if carrier else state.tracing_context


class TracedEffect(_Traced):
    """An effect with a span ``execute_tool``. The span names the idempotency key, but no input or result."""

    _wrapped: OpenEffect

    def _begin(self) -> None:
        effect = self._wrapped
        name = effect.tool_name or effect.id
        self._start(
            f"execute_tool {name}",
            {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": name,
                "gen_ai.tool.call.id": effect.id,
                "gen_ai.conversation.id": effect.session_id,
                "helix_store.effect.key": effect.key,
                "helix_store.effect.attempt": effect.attempt,
                "helix_store.effect.was_done": effect.is_done,
            },
        )

    def _not_entered(self, error: BaseException) -> None:
        if isinstance(error, EffectUnknown):
            self._begin()
            self._end(error)

    def _attributes_at_end(self) -> Mapping[str, Any]:
        state = self._wrapped.state
        # Whoever leaves the block without saying what happened leaves an unknown effect.
        return {"helix_store.effect.state": "unknown" if state == "started" else state}
