"""Processes ask, edit, answer, expire, resume, use and crash: what runs was approved in that form, once."""

from __future__ import annotations

import json
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any, Final, NamedTuple

import pytest

from helix_store.cleanup import expired_session_cleanup
from helix_store.core.approvals import call_digest
from helix_store.core.types import SessionState
from helix_store.exceptions import (
    ApprovalUsed,
    ConflictError,
    StaleStateError,
    StoreBusy,
)
from helix_store.stores import DatabaseStateStore
from tests.databases import CommittedDatabase
from tests.faults.campaign import Trial, campaign
from tests.invariants import broken_invariants
from tests.processes import PROCESSES, WorkerDied, WorkerProcess

_SESSION: Final = "session"
_PROCESSES: Final = 8
_ACTIONS: Final = 14
_ACTORS: Final = ("ann", "bob", "eve", "joe")
_AMOUNTS: Final = 3
_LONG_AGO: Final = 1_600_000_000_000
_PATIENCE_SECONDS: Final = 60.0
_CALLS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "two": {"approvals": 2},
    "three, editable": {"approvals": 3, "editable": True},
    "editable": {"editable": True},
    "two, overdue": {"approvals": 2, "deadline": _LONG_AGO, "on_expiry": "reject"},
    "overdue": {"deadline": _LONG_AGO, "on_expiry": "fail"},
}


class Answered(NamedTuple):
    """What somebody was told after an answer. ``digest`` is that of the approved input."""

    call: str
    actor: str
    approved: bool
    digest: str
    outcome: str


class Crashed(Exception):
    """The step is lost."""


class _Client:
    """One process: it tells each final answer before it goes on, because it may crash."""

    def __init__(self, store: DatabaseStateStore, seed: int, tell: Callable[[Any], None]) -> None:
        self.store = store
        self.chance = random.Random(seed)  # noqa: S311  the same draws for the same seed
        self.tell = tell

    def work(self) -> None:
        actions = (self.ask, self.answer, self.answer, self.answer, self.replace, self.expire, self.resume)
        for _ in range(_ACTIONS):
            with suppress(ConflictError, StaleStateError, StoreBusy, Crashed):
                self.chance.choice((*actions, self.take, self.use, self.use, self.use))()

    def ask(self) -> None:
        call = self.chance.choice(list(_CALLS))
        asked = {"tool_name": "pay", "input": {"amount": 0}, "approval_id": call, **_CALLS[call]}
        if self.chance.random() < 0.5:
            self.store.add_pending_tool_calls(_SESSION, {call: asked})
        else:
            self.store.suspend(_SESSION, kind="suspended_client_tool", context={}, pending={call: asked})

    def answer(self) -> None:
        pending = self._state().pending_client_tool_calls
        if not pending:
            return
        name, call = self.chance.choice(list(pending.items()))
        actor, approved = self.chance.choice(_ACTORS), self.chance.random() < 0.9
        given: dict[str, Any] = {}
        digest = call["digest"]
        if approved and call.get("editable") and self.chance.random() < 0.3:
            given["input"] = {"amount": self.chance.randrange(_AMOUNTS)}
            digest = call_digest("pay", given["input"])
        outcome = self.store.submit_tool_result(
            _SESSION,
            name,
            approved=approved,
            approval_id=name,
            actor=actor,
            digest=call["digest"],
            **given,
        ).outcome
        self.tell(Answered(name, actor, approved, digest, outcome.value))

    def replace(self) -> None:
        """Write another input over that of an open call, as an agent with the state can."""
        state = self._state()
        for call in state.pending_client_tool_calls.values():
            if "submitted_at" not in call and self.chance.random() < 0.3:
                call["input"] = {"amount": self.chance.randrange(_AMOUNTS)}
        self.store.save_state(_SESSION, state, expected_version=state.version)

    def expire(self) -> None:
        summary = expired_session_cleanup(state_store=self.store, workspace_providers={})
        self.tell(summary.defaults_applied)

    def resume(self) -> None:
        self.store.resume(_SESSION)

    def take(self) -> None:
        self.store.take_tool_results(_SESSION)

    def use(self) -> None:
        """Use an approval and record it in the same step, unless the process crashes before the commit."""
        name, fate = self.chance.choice(list(_CALLS)), self.chance.random()
        with self.store.session(_SESSION).step() as step:
            call = step.use_approval(name)
            ran = [name, call.tool_name, call.input, call.digest, call.actors]
            step.say({"role": "tool", "content": json.dumps(ran)})
            if fate < 0.1:
                raise Crashed
            if fate < 0.15:
                os._exit(9)

    def _state(self) -> SessionState:
        state = self.store.load_state(_SESSION)
        assert state is not None
        return state


class _Seat:
    """A place for a client's process, which goes on to the next history unless it has crashed."""

    def __init__(self, alias: str, start: Barrier) -> None:
        self._arguments = (alias, start)
        self._fill()

    def _fill(self) -> None:
        self._orders, theirs = PROCESSES.Pipe()
        self._process = WorkerProcess(_serve, *self._arguments, theirs)
        theirs.close()

    def begin(self, tenant: str, seed: int) -> None:
        self._orders.send((tenant, seed))

    def told(self) -> tuple[list[Any], bool]:
        """What the client was told until its end, and whether that was a crash."""
        told: list[Any] = []
        try:
            while True:
                assert self._orders.poll(_PATIENCE_SECONDS), "a client does not answer"
                heard = self._orders.recv()
                if heard is None:
                    return told, False
                told.append(heard)
        except EOFError:
            error = self._process.outcome(_PATIENCE_SECONDS).error
            if not isinstance(error, WorkerDied):
                raise error or AssertionError("a client has stopped") from None
            self._fill()
            return told, True

    def close(self) -> None:
        self._process.kill()


def _serve(alias: str, start: Barrier, orders: Connection) -> None:
    while True:
        try:
            tenant, seed = orders.recv()
        except EOFError:
            return
        start.wait(_PATIENCE_SECONDS)
        _Client(DatabaseStateStore(alias, tenant=tenant), seed, orders.send).work()
        orders.send(None)


def faults_of(told: list[Any], ran: list[list[Any]], answered: int) -> list[str]:
    """Compare what people were told and what ran, as the committed steps recorded it."""
    faults = []
    answers = [each for each in told if isinstance(each, Answered)]
    accepted = Counter(each.call for each in answers if each.outcome == "accepted")
    given = defaultdict(set)
    for each in answers:
        if each.approved and each.outcome in ("accepted", "recorded"):
            given[each.call, each.digest].add(each.actor)
    final = {each.call: each for each in answers if each.outcome == "accepted"}
    faults += [f"{call}: {count} answers were accepted" for call, count in accepted.items() if count > 1]
    defaults = sum(each for each in told if isinstance(each, int))
    if sum(accepted.values()) + defaults != answered:
        faults.append(f"{accepted} and {defaults} defaults, but {answered} calls are answered")
    faults += [f"{call}: used {n} times" for call, n in Counter(name for name, *_ in ran).items() if n > 1]
    for name, tool_name, value, digest, actors in ran:
        if digest != call_digest(tool_name, value) or final[name].digest != digest:
            faults.append(f"{name}: ran {value}, which is not what was approved")
        if len(set(actors)) != len(actors) or len(actors) != _CALLS[name].get("approvals", 1):
            faults.append(f"{name}: approved by {actors}")
        if not set(actors) <= given[name, digest]:
            faults.append(f"{name}: {actors} are said to have approved {value}")
    return faults


def run_history(seats: list[_Seat], alias: str, tenant: str, trial: Trial) -> None:
    store = DatabaseStateStore(alias, tenant=tenant)
    store.create_session(_SESSION, agent_type="agent")
    for number, seat in enumerate(seats):
        seat.begin(tenant, trial.seed * _PROCESSES + number)
    told: list[Any] = []
    for seat in seats:
        heard, has_crashed = seat.told()
        told += heard
        trial.count("processes crashed", has_crashed)
    state = store.load_state(_SESSION)
    assert state is not None
    answered = len(state.completed_client_tool_calls) + sum(
        "submitted_at" in call for call in state.pending_client_tool_calls.values()
    )
    ran = [json.loads(message["content"]) for message in store.get_messages(_SESSION).messages]
    for each in told:
        trial.count(each.outcome if isinstance(each, Answered) else "defaults", _number(each))
    trial.count("used", len(ran))
    assert faults_of(told, ran, answered) == []
    for name in {name for name, *_ in ran}:
        with pytest.raises(ApprovalUsed), store.session(_SESSION).step() as step:
            step.use_approval(name)
    assert broken_invariants(CommittedDatabase(alias=alias, tenant=tenant)) == []


def _number(each: Any) -> int:
    return each if isinstance(each, int) else 1


def test_the_checker_finds_each_fault() -> None:
    digest, other = call_digest("pay", {"amount": 0}), call_digest("pay", {"amount": 1})
    sound = [Answered("plain", "ann", True, digest, "accepted")]
    ran: list[Any] = ["plain", "pay", {"amount": 0}, digest, ["ann"]]
    assert faults_of(sound, [ran], 1) == []
    assert len(faults_of(sound, [ran, ran], 1)) == 1
    assert len(faults_of(sound * 2, [ran], 2)) == 1
    assert len(faults_of(sound, [ran], 2)) == 1
    assert faults_of(sound, [[*ran[:2], {"amount": 1}, other, ["ann"]]], 1)
    assert len(faults_of(sound, [[*ran[:4], ["bob"]]], 1)) == 1
    assert faults_of(sound, [[*ran[:4], ["ann", "ann"]]], 1)


@pytest.mark.campaign
def test_what_runs_was_approved_in_that_form_and_runs_once(committed_db: CommittedDatabase) -> None:
    alias, tenant = committed_db.alias, committed_db.tenant
    name = "postgres" if committed_db.vendor == "postgresql" else "sqlite"
    start = PROCESSES.Barrier(_PROCESSES)
    with ExitStack() as stack, campaign("approvals", name, sizes=(2, 40, 2_000)) as made:
        seats = [stack.enter_context(closing(_Seat(alias, start))) for _ in range(_PROCESSES)]
        made.run(lambda trial: run_history(seats, alias, f"{tenant}-{trial.seed}", trial))
    assert made.counts["accepted"], made.counts
