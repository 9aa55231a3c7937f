"""The sessions of ``manage.py demo``: a trip with two killed workers, one without, one up to its approval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from example_project.agent import Agent, answer_approval
from example_project.card_service import charges
from example_project.travel import PLANNER, start_trip
from example_project.worker import run_in_process, run_until_killed
from helix_store import Message, SessionNotFound, SessionState, Store
from helix_store.core.ids import new_id
from helix_store.core.usage import UsageRollup

__all__ = ["Emphasis", "TripSummary", "approve", "demonstrate_agent"]

Emphasis = Literal["none", "heading", "kill", "success"]


class Say(Protocol):
    """Report a line of progress."""

    def __call__(self, line: str, emphasis: Emphasis = "none") -> None: ...


@dataclass(frozen=True)
class TripSummary:
    """A session of the demo."""

    state: SessionState
    messages: list[Message]
    run_count: int
    spent: UsageRollup
    charge_count: int
    """How often the card service has charged for this trip."""

    def same_outcome(self, other: TripSummary) -> bool:
        """Return whether messages, state and number of steps are equal. Times and ids are not compared."""
        return self.messages == other.messages and all(
            getattr(self.state, name) == getattr(other.state, name)
            for name in ("status", "step_count", "message_count", "custom_state", "output")
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "session": self.state.session_id,
            "title": self.state.title,
            "status": str(self.state.status),
            "runs": self.run_count,
            "steps": self.state.step_count,
            "messages": self.state.message_count,
            "tree_tokens": self.spent.tokens.total,
            "tree_cost_usd": f"{self.spent.cost_usd:.4f}",
            "card_charges": self.charge_count,
        }


def demonstrate_agent(store: Store, alias: str, *, report: Say) -> list[TripSummary]:
    """Plan a trip with two workers that are killed, one without, and one up to its approval."""
    return [
        _with_killed_workers(store, alias, report),
        _undisturbed(store, report),
        _left_waiting(store, report),
    ]


def approve(session_id: str, *, using: str | None = None, tenant: str = "") -> str:
    """Approve what the session waits for, finish it, and return its answer. Safe to repeat."""
    store = Store(using, tenant=tenant)
    trip = _approved_and_finished(store, session_id, say=lambda line, emphasis="none": None)
    return str(trip.state.output["answer"])


def _with_killed_workers(store: Store, alias: str, say: Say) -> TripSummary:
    session_id = new_id()
    start_trip(store, session_id, title="Workers are killed and others continue")
    say(f"Session {session_id}: a worker is killed in the middle of its second step.", "heading")
    for event in run_until_killed(alias, store.tenant, session_id, kind="staged", step_id="step-2"):
        say(f"  {event}")
    say("  SIGKILL: the worker is dead in the middle of step-2, which is not committed.", "kill")
    _release_lock_of_dead_worker(store, session_id)
    say("Another process continues from step-1, which is committed, and repeats step-2.", "heading")
    for event in run_in_process(alias, store.tenant, session_id):
        say(f"  {event}")
    say(
        "It waits for a person, with nothing in memory anywhere. A third process approves and pays.",
        "heading",
    )
    paying = run_until_killed(alias, store.tenant, session_id, kind="acted", step_id="step-4", approves=True)
    for event in paying:
        say(f"  {event}")
    say("  SIGKILL: the worker is dead after the payment, whose result is not committed.", "kill")
    _release_lock_of_dead_worker(store, session_id)
    say(
        "The next worker does not pay again: it stops, because nobody knows whether the card was charged.",
        "heading",
    )
    _run_here(store, session_id, say)
    _settle(store, session_id, say)
    _run_here(store, session_id, say)
    return _summary(store, session_id)


def _release_lock_of_dead_worker(store: Store, session_id: str) -> None:
    # It would expire after 30 seconds, but the demo knows that the holder is dead.
    store.locks.force_release(session_id)


def _settle(store: Store, session_id: str, say: Say) -> None:
    """Do what a person does in the admin: look an unknown effect up at the service, and decide it."""
    say("A person looks the payment up at the card service, and settles the effect.", "heading")
    for effect in store.sessions.list_effects(session_id, states=["unknown"]).items:
        receipts = charges(effect.key)
        say(f"  {effect.id}: the card service lists {receipts}")
        result = receipts[0] if receipts else None
        store.sessions.settle_effect(
            session_id, effect.id, done=bool(receipts), result=result, actor="the demo"
        )


def _undisturbed(store: Store, say: Say) -> TripSummary:
    session_id = new_id()
    start_trip(store, session_id, title="Nothing goes wrong")
    say(f"Session {session_id}: nothing goes wrong.", "heading")
    _run_here(store, session_id, say)
    return _approved_and_finished(store, session_id, say)


def _left_waiting(store: Store, say: Say) -> TripSummary:
    session_id = new_id()
    start_trip(store, session_id, title="The booking waits for an approval")
    say(f"Session {session_id}: the booking is left waiting for an approval.", "heading")
    _run_here(store, session_id, say)
    return _summary(store, session_id)


def _run_here(store: Store, session_id: str, say: Say) -> None:
    Agent(store, PLANNER, report=lambda event: say(f"  {event}")).run(session_id)


def _approved_and_finished(store: Store, session_id: str, say: Say) -> TripSummary:
    for tool_call_id in answer_approval(store, session_id, approved=True):
        say(f"  {tool_call_id} is approved")
    _run_here(store, session_id, say)
    return _summary(store, session_id)


def _summary(store: Store, session_id: str) -> TripSummary:
    session = store.session(session_id)
    spent = session.usage(tree=True)
    if spent is None:
        raise SessionNotFound(session_id)
    charge_count = sum(len(charges(effect.key)) for effect in store.sessions.list_effects(session_id).items)
    runs = store.sessions.list_runs(session_id)
    return TripSummary(session.load(), session.messages(), len(runs), spent, charge_count)
