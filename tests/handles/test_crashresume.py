"""The loops of docs/effects.md under `crashresume`, an outside harness: it crashes the agent right after each
effect, before anything is stored, begins again, and compares what happened with a run without crashes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync
from crashresume import conform
from crashresume.core import Context

from helix_store.stores import SessionHandle, Store, Turn
from tests.databases import CommittedDatabase

JOBS: Final = ("job-1", "job-2", "job-3")


@dataclass
class Shop:
    """An agent that charges a card in each job. ``settles`` stands for a person who looks at the service."""

    ctx: Context
    store: Store
    way: str

    def __post_init__(self) -> None:
        session_id = self.ctx.run_id
        if not self.store.sessions.session_exists(session_id):
            self.store.new_session(session_id, agent_type="shop")
        self.session: SessionHandle = self.store.session(session_id)

    def step(self, job: str) -> None:
        work: Callable[[str], None] = async_to_sync(self._awork) if self.way == "async" else self._work
        work(job)
        for effect in self.store.sessions.find_unknown_effects():
            happened = effect.id in self.ctx.effects.keys()  # noqa: SIM118  a method of the log
            self.store.sessions.settle_effect(effect.session_id, effect.id, done=happened, result="found")
            work(job)

    def state(self) -> Any:
        state = self.session.load()
        return {"jobs": state.custom_state, "messages": state.message_count}

    def _options(self, job: str) -> dict[str, Any]:
        if self.way == "approval":
            return {"approval": True}
        options: dict[str, Any] = {"tool_name": "charge", "input": {"job": job}}
        if self.way == "reconcile":
            options["reconcile"] = self._ask
        return options

    def _ask(self, effect: Any) -> None:
        if effect.id in self.ctx.effects.keys():  # noqa: SIM118
            effect.done("found")
        else:
            effect.not_done()

    def _charge(self, effect: Any) -> str:
        # The harness compares the keys of sessions with different ids, so they do not contain the session.
        self.ctx.effect("charge", effect.input, key=effect.id)
        return "charged"

    def _approve(self, turn: Turn, job: str) -> bool:
        """Ask, and answer as a person does; return whether the turn can go on."""
        if self.way != "approval" or job in turn.results or self._is_asked(job):
            return True
        with turn.step() as step:
            step.ask_approval(job, "charge", {"job": job})
        return False

    def _is_asked(self, job: str) -> bool:
        return job in (self.session.load().completed_client_tool_calls or {})

    def _work(self, job: str) -> None:
        if job in self.session.load().custom_state:
            return
        with self.session.turn() as turn:
            if self._approve(turn, job):
                with turn.effect(job, **self._options(job)) as effect:
                    if not effect.is_done:
                        effect.done(self._charge(effect))
                with turn.step() as step:
                    step.state.custom_state[job] = "paid"
                    step.say({"role": "tool", "tool_call_id": job, "content": "paid"})
        if self.session.load().status == "paused":
            self.store.sessions.submit_tool_result(
                self.session.id, job, approved=True, approval_id=job, actor="ann"
            )
            self._work(job)

    async def _awork(self, job: str) -> None:
        if job in (await self.session.aload()).custom_state:
            return
        async with self.session.turn() as turn:
            async with turn.effect(job, **self._options(job)) as effect:
                if not effect.is_done:
                    await effect.adone(self._charge(effect))
            async with turn.step() as step:
                step.state.custom_state[job] = "paid"
                await step.asay({"role": "tool", "tool_call_id": job, "content": "paid"})


@pytest.mark.parametrize("way", ["settled by a person", "approval", "reconcile", "async"])
def test_no_effect_is_repeated_or_lost(committed_db: CommittedDatabase, way: str) -> None:
    store = Store(committed_db.alias, tenant=committed_db.tenant)
    report = conform(lambda ctx: Shop(ctx, store, way), inputs=JOBS)
    assert report.crash_points == len(JOBS)
    assert report.passed, str(report)


def test_the_harness_finds_what_a_loop_without_effects_repeats(committed_db: CommittedDatabase) -> None:
    store = Store(committed_db.alias, tenant=committed_db.tenant)

    class Careless(Shop):
        def _work(self, job: str) -> None:
            if job in self.session.load().custom_state:
                return
            with self.session.turn() as turn, turn.step() as step:
                self.ctx.effect("charge", job, key=job)
                step.state.custom_state[job] = "paid"

    report = conform(lambda ctx: Careless(ctx, store, "careless"), inputs=JOBS)
    assert [finding.kind for finding in report.findings] == ["effect_replayed"] * len(JOBS)
