"""A small agent loop on the store: each step is one transaction, and any worker can continue a session.

A worker may die at any time. The next one loads the session and continues from its history. A step that was
not committed has no effect.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from django.db import transaction

from example_project.events import Event, Report
from example_project.spending import Spending
from helix_store.core.types import (
    Message,
    Run,
    RunStatus,
    SessionState,
    SessionStatus,
    StepInfo,
)
from helix_store.exceptions import SessionNotFound
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore

__all__ = ["Agent", "AgentKind", "Model", "Reply", "ToolCall", "answer_approval", "existing_state"]


_DAYS_TO_DECIDE = 7
"""After this time the cleanup of expired sessions rejects the call."""


@dataclass(frozen=True)
class Reply:
    """The answer of a model, and the tokens that it used."""

    message: Message
    tokens: Mapping[str, int]


class Model(Protocol):
    def reply(self, history: Sequence[Message]) -> Reply: ...


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool, and the step in which its changes are staged."""

    store: DatabaseStateStore
    session_id: str
    agent_type: str
    step: StepInfo
    tool_call_id: str
    arguments: dict[str, Any]
    report: Report
    spending: Spending

    def stage(self, **changes: Any) -> None:
        """Stage changes to the custom state; the step promotes them."""
        staged = {"tool_call_id": self.tool_call_id, **changes}
        self.store.stage_changes(self.session_id, self.step.step_id, staged)
        text = f"{self.tool_call_id} staged its changes"
        self.report(Event("staged", self.agent_type, self.step.step_id, text))


Tool = Callable[[ToolCall], Any]


@dataclass(frozen=True)
class AgentKind:
    """An agent: its model, its tools, and the tools that a person must approve."""

    agent_type: str
    model: Model
    tools: Mapping[str, Tool]
    needs_approval: frozenset[str] = frozenset()


class Agent:
    """Runs sessions of one kind on a store."""

    def __init__(self, store: DatabaseStateStore, kind: AgentKind, *, report: Report) -> None:
        self.store = store
        self.kind = kind
        self.report = report
        self.usage = DatabaseUsageStore(store.alias, tenant=store.tenant)

    def run(self, session_id: str) -> SessionState:
        """Continue the session until it is finished or waits for a person. Safe to repeat.

        A run that is still open belongs to a worker that died, and is superseded.
        """
        state = existing_state(self.store, session_id)
        if state.status.is_terminal:
            open_run = self.store.get_current_run(session_id)
            if open_run is not None:
                self._end(open_run, state)
            return state
        if state.status is SessionStatus.PAUSED:
            if _waits(state):
                return state
            self.store.resume(session_id, expected_version=state.version)
        run = self.store.start_run(session_id, supersede=True)
        # Before the first step, not in the branch above: a worker may have died after `resume`.
        self.store.take_tool_results(session_id)
        state = self._step(session_id, run.run_id)
        while state.status is SessionStatus.ACTIVE:
            state = self._step(session_id, run.run_id)
        self._end(run, state)
        return state

    def _end(self, run: Run, state: SessionState) -> None:
        is_waiting = state.status is SessionStatus.PAUSED
        self.store.update_run(
            state.session_id,
            run.run_id,
            status=RunStatus.SUSPENDED_CLIENT_TOOL if is_waiting else RunStatus.COMPLETED,
            step_count=state.step_count,
            completion_reason="waits for an approval" if is_waiting else "answered",
        )
        outcome = "paused" if is_waiting else "finished"
        self._tell(outcome, f"step-{state.step_count}", f"turn {run.turn} {outcome}")

    def _step(self, session_id: str, run_id: str) -> SessionState:
        """Call the model unless tool calls are open, run the tool calls, and commit all of it at once."""
        state = existing_state(self.store, session_id)
        history = self.store.get_messages(session_id).messages
        step = StepInfo(f"step-{state.step_count + 1}", state.step_count + 1)
        # A worker that died in this step may have staged changes of calls that this attempt does not make.
        self.store.discard_staging(session_id, step.step_id)
        spending = Spending(self.usage, session_id, run_id, self.kind.agent_type)
        new_messages: list[Message] = []
        calls = _open_calls(history)
        if not calls:
            reply = self.kind.model.reply(history)
            self._tell("model", step.step_id, _said(reply.message))
            new_messages.append(reply.message)
            calls = reply.message.get("tool_calls", [])
            spending.tokens(step, reply.tokens)
        waiting = [call for call in calls if self._needs_approval(state, call)]
        if calls and not waiting:
            new_messages += self._results(state, step, calls, spending)
        elif not calls:
            state.status = SessionStatus.COMPLETED
            state.output = {"answer": new_messages[-1]["content"]}
        state.step_count = step.step_count
        # The step and its pause commit together.
        with transaction.atomic(using=self.store.alias):
            commit = self.store.save_state_and_promote_staging(
                session_id, state, new_messages, step, expected_version=state.version, run_id=run_id
            )
            if waiting:
                self._wait_for_approval(session_id, step, run_id, waiting)
        self._tell("step", step.step_id, f"committed as version {commit.new_version}")
        return existing_state(self.store, session_id) if waiting else state

    def _wait_for_approval(
        self, session_id: str, step: StepInfo, run_id: str, calls: Sequence[dict[str, Any]]
    ) -> None:
        self.store.suspend(
            session_id,
            kind=RunStatus.SUSPENDED_CLIENT_TOOL,
            context={"tool_call_ids": [call["id"] for call in calls]},
            pending={call["id"]: _pending(call, run_id) for call in calls},
            step_id=step.step_id,
        )

    def _needs_approval(self, state: SessionState, call: dict[str, Any]) -> bool:
        needs_approval = call["function"]["name"] in self.kind.needs_approval
        return needs_approval and call["id"] not in state.completed_client_tool_calls

    def _results(
        self, state: SessionState, step: StepInfo, calls: Sequence[dict[str, Any]], spending: Spending
    ) -> list[Message]:
        """Run the calls in parallel; their results are in the order of the calls."""
        with ThreadPoolExecutor(max_workers=len(calls)) as pool:
            return list(pool.map(lambda call: self._result(state, step, call, spending), calls))

    def _result(
        self, state: SessionState, step: StepInfo, call: dict[str, Any], spending: Spending
    ) -> Message:
        function = call["function"]
        decision = state.completed_client_tool_calls.get(call["id"])
        if decision is not None and not decision.get("approved"):
            result = {"refused": "A person did not approve this."}
        else:
            result = self._run_tool(state, step, call, spending)
        return {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": function["name"],
            "content": json.dumps(result),
        }

    def _run_tool(self, state: SessionState, step: StepInfo, call: dict[str, Any], spending: Spending) -> Any:
        name = call["function"]["name"]
        tool_call = ToolCall(
            store=self.store,
            session_id=state.session_id,
            agent_type=self.kind.agent_type,
            step=step,
            tool_call_id=call["id"],
            arguments=json.loads(call["function"]["arguments"]),
            report=self.report,
            spending=spending,
        )
        with spending.tool(step, call["id"], name):
            return self.kind.tools[name](tool_call)

    def _tell(self, kind: str, step_id: str, text: str) -> None:
        self.report(Event(kind, self.kind.agent_type, step_id, text))


def answer_approval(store: DatabaseStateStore, session_id: str, *, approved: bool) -> list[str]:
    """Answer each pending call of a session, in any process, and return the ids of the calls."""
    pending = existing_state(store, session_id).pending_client_tool_calls
    for tool_call_id, call in pending.items():
        store.submit_tool_result(session_id, tool_call_id, approved=approved, approval_id=call["approval_id"])
    return list(pending)


def existing_state(store: DatabaseStateStore, session_id: str) -> SessionState:
    """The state of a session. Raises `SessionNotFound`."""
    state = store.load_state(session_id)
    if state is None:
        raise SessionNotFound(session_id)
    return state


def _open_calls(history: Sequence[Message]) -> list[dict[str, Any]]:
    """The tool calls of the last message."""
    calls: list[dict[str, Any]] = history[-1].get("tool_calls", []) if history else []
    return calls


def _pending(call: dict[str, Any], run_id: str) -> dict[str, Any]:
    function = call["function"]
    return {
        "tool_name": function["name"],
        "input": json.loads(function["arguments"]),
        "run_id": run_id,
        "approval_id": f"approve-{call['id']}",
        "deadline": time.time_ns() // 1_000_000 + _DAYS_TO_DECIDE * 24 * 3_600_000,
        "on_expiry": "reject",
    }


def _waits(state: SessionState) -> bool:
    """Whether a call of the session has no answer yet."""
    return any("submitted_at" not in call for call in state.pending_client_tool_calls.values())


def _said(message: Message) -> str:
    names = [call["function"]["name"] for call in message.get("tool_calls", [])]
    return f"the model calls {' and '.join(names)}" if names else "the model answers"
