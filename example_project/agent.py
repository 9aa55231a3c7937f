"""A small agent on the store, with its model, its tools and its rule for approvals. The turn does the rest.

A worker may die at any time. The next turn continues from the stored history. A step that was not committed
is not visible. What leaves the database, such as a payment, is an effect, which no later worker repeats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Final, Protocol

from example_project.events import Event, Report
from example_project.spending import Spending
from helix_store import (
    Effect,
    EffectUnknown,
    Message,
    NotApproved,
    SessionState,
    SessionStatus,
    Step,
    Store,
    Turn,
)

__all__ = ["Agent", "AgentKind", "Model", "Reply", "ToolCall", "answer_approval"]


_TIME_TO_DECIDE: Final = timedelta(days=7)
"""After this time the cleanup of expired sessions rejects the call."""
_OUTCOMES: Final = {SessionStatus.PAUSED: "paused", SessionStatus.COMPLETED: "finished"}


@dataclass(frozen=True)
class Reply:
    """The answer of a model, and the tokens that it used."""

    message: Message
    tokens: Mapping[str, int]


class Model(Protocol):
    def reply(self, history: Sequence[Message]) -> Reply: ...


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool, in the step that promotes its changes."""

    store: Store
    step: Step
    tool_call_id: str
    arguments: dict[str, Any]
    report: Report
    spending: Spending
    outcome: Any = None
    """The result of the tool's effect, if it has one."""

    def stage(self, **changes: Any) -> None:
        """Stage changes to the custom state."""
        self.step.stage(self.tool_call_id, **changes)
        text = f"{self.tool_call_id} staged its changes"
        self.report(Event("staged", self.step.state.agent_type, self.step.id, text))


Tool = Callable[[ToolCall], Any]
Outside = Callable[[Effect], Any]
"""What a tool does outside of the database. It returns the result to store."""


@dataclass(frozen=True)
class AgentKind:
    """An agent: its model, its tools, and what some of them do outside of the database.

    The first answer without tool calls is the output of the session.
    """

    agent_type: str
    model: Model
    tools: Mapping[str, Tool] = field(default_factory=dict)
    effects: Mapping[str, Outside] = field(default_factory=dict)
    """What tools do outside of the database, before the step in which they run. A person must approve it."""


class Agent:
    """Runs sessions of one kind on a store."""

    def __init__(self, store: Store, kind: AgentKind, *, report: Report) -> None:
        self.store = store
        self.kind = kind
        self.report = report

    def run(self, session_id: str) -> SessionState:
        """Continue the session until it is finished or waits for a person. Safe to repeat.

        Raises `SessionBusy` while another worker drives the session.
        """
        with self.store.session(session_id).turn() as turn:
            while turn.is_active:
                effects = self.act(turn)
                with turn.step() as step:
                    self.advance(turn, step, effects)
                self._tell("step", step.id, f"committed as version {step.state.version}")
        if turn.run is not None:
            outcome = _OUTCOMES.get(turn.state.status, "stopped")
            text = f"turn {turn.run.turn} {outcome}"
            if isinstance(turn.stopped_by, EffectUnknown):
                text = f"{text}: {turn.stopped_by}"
            self._tell(outcome, f"step-{turn.state.step_count}", text)
        return turn.state

    def act(self, turn: Turn) -> dict[str, Effect]:
        """Do what the approved calls of the last message do outside of the database, each at most once.

        A step before this one has committed that message, so that every worker finds the same calls. Raises
        `EffectUnknown`, which ends the turn, if nobody knows whether an earlier worker has made a call.
        """
        effects: dict[str, Effect] = {}
        last = turn.messages(last=1) if self.kind.effects else []
        for call in _calls(last[0]) if last else []:
            outside = self.kind.effects.get(call["function"]["name"])
            if outside is None or call["id"] not in turn.results:
                continue
            with suppress(NotApproved), turn.effect(call["id"], approval=True) as effect:
                if not effect.is_done:
                    outcome = outside(effect)
                    self._tell(
                        "acted",
                        f"step-{turn.state.step_count + 1}",
                        f"{call['id']}: the service answers {outcome}",
                    )
                    effect.done(outcome)
                effects[call["id"]] = effect
        return effects

    def advance(self, turn: Turn, step: Step, effects: Mapping[str, Effect]) -> None:
        """Call the model unless tool calls are open, and run them; without any, that was the answer.

        ``effects`` are those of the open calls that a person has approved, as `act` returns them.
        """
        history = turn.messages()
        spending = Spending(self.store.usage, turn, step)
        calls = _calls(history[-1]) if history else []
        if not calls:
            reply = self.kind.model.reply(history)
            self._tell("model", step.id, _said(reply.message))
            spending.tokens(reply.tokens)
            step.say(reply.message)
            calls = _calls(reply.message)
            if not calls:
                step.finish(output={"answer": reply.message["content"]})
                return
        undecided = [call for call in calls if self._needs_approval(call) and call["id"] not in turn.results]
        if undecided:
            step.wait_for({call["id"]: _question(call) for call in undecided})
            return
        result = partial(self._result, effects, step, spending)
        with ThreadPoolExecutor(max_workers=len(calls)) as pool:
            step.say(*pool.map(result, calls))

    def _needs_approval(self, call: dict[str, Any]) -> bool:
        return call["function"]["name"] in self.kind.effects

    def _result(
        self, effects: Mapping[str, Effect], step: Step, spending: Spending, call: dict[str, Any]
    ) -> Message:
        name, effect = call["function"]["name"], effects.get(call["id"])
        if self._needs_approval(call) and effect is None:
            result = {"refused": "A person did not approve this."}
        else:
            # What a person approved may be another input than that of the model.
            arguments = _arguments(call) if effect is None else effect.input
            outcome = None if effect is None else effect.result
            with spending.tool(name):
                tool_call = ToolCall(self.store, step, call["id"], arguments, self.report, spending, outcome)
                result = self.kind.tools[name](tool_call)
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": json.dumps(result)}

    def _tell(self, kind: str, step_id: str, text: str) -> None:
        self.report(Event(kind, self.kind.agent_type, step_id, text))


def answer_approval(store: Store, session_id: str, *, approved: bool) -> list[str]:
    """Answer each pending call of a session, in any process, and return the ids of the calls."""
    pending = store.session(session_id).load().pending_client_tool_calls
    for tool_call_id, call in pending.items():
        store.sessions.submit_tool_result(
            session_id, tool_call_id, approved=approved, approval_id=call["approval_id"]
        )
    return list(pending)


def _calls(message: Message) -> list[dict[str, Any]]:
    """Return the tool calls of a message."""
    calls: list[dict[str, Any]] = message.get("tool_calls", [])
    return calls


def _arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = json.loads(call["function"]["arguments"])
    return arguments


def _question(call: dict[str, Any]) -> dict[str, Any]:
    return {
        "tool_name": call["function"]["name"],
        "input": _arguments(call),
        "deadline": _TIME_TO_DECIDE,
        "on_expiry": "reject",
    }


def _said(message: Message) -> str:
    names = [call["function"]["name"] for call in _calls(message)]
    return f"the model calls {' and '.join(names)}" if names else "the model answers"
