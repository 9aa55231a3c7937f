"""Steps of turns with budgets: a budget for each user, and one for all sessions of a tenant."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from django.core.management import call_command

from benchmarks.bench import Bench
from benchmarks.evidence import Evidence
from benchmarks.figures import Target
from benchmarks.operations import Operation
from benchmarks.races import Case, Client, Comparison, Race
from benchmarks.sessions import AGENT_TYPE, WORKERS
from helix_store.models import UsageEntry
from helix_store.stores import Store

__all__ = ["CASES"]

STEPS_OF_A_TURN = 20
ESTIMATE = {"estimate_usd": "0.02", "estimate_tokens": 200}
FREE, USERS, TENANT = "without budgets", "budget for each user", "budget of the tenant"
BUDGETS: dict[str, dict[str, Any]] = {FREE: {}, USERS: {"scope": "user"}, TENANT: {"scope": "tenant"}}
"""By tenant. No limit is reached."""
SESSIONS = ("", "-2", "-3", "-4")


class SpendingSteps(Operation):
    """Turns in the sessions of one worker, who is a user. A step spends at most half of its estimate."""

    def __init__(self, worker: int, *, alias: str, tenant: str, **estimate: Any) -> None:
        self.store = Store(alias, tenant=tenant)
        self.estimate = estimate
        self.sessions = [self.store.session(f"session-{worker}{suffix}") for suffix in SESSIONS]

    def run(self, count: int) -> None:
        while count > 0:
            session = self.sessions[count % len(self.sessions)]
            with session.turn(**self.estimate) as turn:
                for _ in range(min(count, STEPS_OF_A_TURN)):
                    with turn.step() as step:
                        turn.tokens(model="model", prompt=90, completion=10, cost_usd="0.01")
                        step.say({"role": "assistant", "content": "answer " * 20})
            count -= STEPS_OF_A_TURN


def _sessions(alias: str) -> None:
    for tenant, budget in BUDGETS.items():
        store = Store(alias, tenant=tenant)
        for worker in range(WORKERS):
            for suffix in SESSIONS:
                store.new_session(
                    f"session-{worker}{suffix}", agent_type=AGENT_TYPE, user_id=f"user-{worker}"
                )
        if budget:
            store.budgets.set_budget("cap", limit_usd=1_000_000, limit_tokens=10**12, **budget)


def _postgres(bench: Bench) -> None:
    _sessions("default")


def _sqlite(bench: Bench) -> None:
    call_command("migrate", database="sqlite", verbosity=0, skip_checks=True)
    _sessions("sqlite")


def _client(alias: str, tenant: str, **estimate: Any) -> Client:
    return Client(
        operation=partial(SpendingSteps, alias=alias, tenant=tenant, **estimate),
        evidence=Evidence(
            f"SELECT count(*) FROM \"{UsageEntry._meta.db_table}\" WHERE tenant = '{tenant}'", (1,), alias
        ),
    )


def _race(name: str, alias: str, needs: Any, aliases: Sequence[str]) -> Race:
    capped = {
        f"{tenant}{ending}": (tenant, estimate)
        for tenant in (USERS, TENANT)
        for ending, estimate in (("", {}), (", with estimates", ESTIMATE))
    }
    return Race(
        contestants={
            FREE: _client(alias, FREE),
            **{leg: _client(alias, tenant, **estimate) for leg, (tenant, estimate) in capped.items()},
        },
        comparisons=[
            Comparison(
                path=f"{name}: step with a {leg}, {WORKERS} processes",
                of=leg,
                to=FREE,
                target=Target(0.8, 0.9) if leg == USERS else None,
            )
            for leg in capped
        ],
        needs=[needs],
        workers=WORKERS,
        aliases=aliases,
    )


CASES: Sequence[Case] = [
    _race("PostgreSQL", "default", _postgres, ["default"]),
    _race("SQLite", "sqlite", _sqlite, []),
]
