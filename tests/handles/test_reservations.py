"""What a turn has reserved in budgets outlives transactions of the caller, midnight and its own worker."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, TypeVar

import pytest

from helix_store import ConflictError, InMemoryStore, Store
from helix_store.core.usage import cost_units
from helix_store.models import BudgetCounter, Run
from helix_store.stores import SessionHandle
from helix_store.testing.usage.base import tokens
from tests.cells import for_each
from tests.databases import ALIASES, CommittedDatabase


class Interruption(Exception):
    """An error of the caller's own."""


AnyStore = Store | InMemoryStore


@pytest.fixture(params=["memory", *ALIASES])
def store(request: pytest.FixtureRequest) -> AnyStore:
    """A store whose tenant may spend 10 dollars."""
    if request.param == "memory":
        return _capped(InMemoryStore())
    return _capped(_in(request.getfixturevalue(f"{request.param}_db")))


@pytest.fixture
def stored(committed_db: CommittedDatabase) -> Store:
    """The same in a database."""
    return _capped(_in(committed_db))


S = TypeVar("S", bound=AnyStore)


def _capped(store: S) -> S:
    store.budgets.set_budget("cap", scope="tenant", limit_usd=10)
    store.new_session("session", agent_type="agent")
    return store


def _in(database: CommittedDatabase) -> Store:
    return Store(database.alias, tenant=database.tenant)


@pytest.fixture
def session(store: AnyStore) -> SessionHandle:
    return store.session("session")


def standing(store: AnyStore) -> tuple[Any, Any]:
    status = store.budgets.status("cap")
    return status.spent_usd, status.held_usd


@for_each("estimates", [{"estimate_usd": "0.2", "estimate_tokens": 7}, {"estimate_usd": "0.2"}], ids=repr)
def test_the_run_stores_what_was_refused(stored: Store, estimates: dict[str, object]) -> None:
    store, session = stored, stored.session("session")
    store.budgets.set_budget("cap", scope="tenant", limit_usd="0.1")
    with session.turn(**estimates) as turn:  # type: ignore[arg-type]
        assert not turn.is_active
    run = Run.objects.using(store.alias).get(session__tenant=store.tenant)
    assert (run.refused_usd, run.refused_tokens) == (Decimal("0.2"), estimates.get("estimate_tokens", 0))
    with session.turn() as turn, turn.step(estimate_usd=3) as step:
        step.end_turn()
    run = Run.objects.using(store.alias).filter(session__tenant=store.tenant).latest("turn")
    assert (run.refused_usd, run.refused_tokens) == (3, 0)
    store.budgets.set_budget("cap", scope="tenant", limit_usd=9)
    with session.turn(estimate_usd=1) as turn, turn.step() as step:
        step.end_turn()
    run = Run.objects.using(store.alias).filter(session__tenant=store.tenant).latest("turn")
    assert (run.status, run.refused_usd, run.refused_tokens) == ("completed", None, None)


def test_a_turn_with_an_estimate_does_not_begin_in_a_transaction(
    store: AnyStore, session: SessionHandle
) -> None:
    with store.transaction():
        with pytest.raises(ConflictError, match=r"atomic\(\)"):
            session.turn(estimate_usd=1).__enter__()
        assert not store.locks.is_locked(session.id)
        with session.turn() as turn, turn.step() as step:
            step.end_turn()


@for_each("estimate", ["1", "4"])
def test_a_rollback_takes_back_no_reservation_of_what_was_spent(
    store: AnyStore, session: SessionHandle, estimate: str
) -> None:
    with session.turn(estimate_usd=1) as turn:
        with pytest.raises(Interruption), store.transaction():
            with turn.step(estimate_usd=estimate):
                turn.tokens(model="no-such-model", prompt=1, cost_usd=estimate)
            raise Interruption
        assert turn.is_active
        assert standing(store) == (Decimal(estimate), 1)
        with pytest.raises(Interruption), store.transaction():
            with turn.step(estimate_usd=10 - 2 * int(estimate)):
                turn.tokens(model="no-such-model", prompt=1, cost_usd=10 - 2 * int(estimate))
            raise Interruption
        with store.transaction(), turn.step() as step:
            step.say({"role": "assistant", "content": "hello"})
        assert standing(store) == (10 - int(estimate), 1)
    assert standing(store) == (10 - int(estimate), 0)
    assert session.load().step_count == 1


def test_a_rollback_before_a_usage_entry_reserves_again(store: AnyStore, session: SessionHandle) -> None:
    with session.turn(estimate_usd=1) as turn:
        with pytest.raises(Interruption), store.transaction():
            with turn.step():
                turn.tokens(model="no-such-model", prompt=1, cost_usd=1)
            raise Interruption
        turn.tokens(model="no-such-model", prompt=1, cost_usd=1)
        assert standing(store) == (1, 1)


def test_after_a_rollback_the_budgets_are_checked_again(store: AnyStore, session: SessionHandle) -> None:
    with session.turn() as turn:
        with pytest.raises(Interruption), store.transaction():
            with turn.step() as step:
                step.say({"role": "assistant", "content": "hello"})
            raise Interruption
        store.usage.record_entry(tokens("session", total=1, cost_usd=Decimal(10)))
        assert not turn.is_active
        assert turn.stopped_by is not None


def test_a_rollback_takes_back_a_refusal_that_it_caused(store: AnyStore, session: SessionHandle) -> None:
    with session.turn(estimate_usd=6) as turn:
        with pytest.raises(Interruption), store.transaction():
            store.usage.record_entry(
                {
                    "kind": "tokens",
                    "session_id": "session",
                    "step_count": 1,
                    "timestamp": 0,
                    "source": {"type": "agent", "name": "agent"},
                    "model": "no-such-model",
                    "tokens": {"prompt": 1, "total": 1},
                    "cost_usd": Decimal(5),
                }
            )
            with turn.step() as step:
                step.say({"role": "assistant", "content": "hello"})
            assert not turn.is_active
            raise Interruption
        assert turn.is_active
        assert turn.stopped_by is None
        assert standing(store) == (0, 6)


def test_a_hold_counts_after_midnight(stored: Store) -> None:
    store, session = stored, stored.session("session")
    store.budgets.set_budget("cap", scope="tenant", period="day", limit_usd=10)
    other = store.new_session("other", agent_type="agent")
    yesterday = (datetime.now(UTC) - timedelta(days=1)).date().isoformat()
    with session.turn(estimate_usd=6) as turn:
        with turn.step() as step:
            turn.tokens(model="no-such-model", prompt=1, cost_usd=4)
            step.say({"role": "assistant", "content": "hello"})
        counters = BudgetCounter.objects.using(store.alias).filter(tenant=store.tenant)
        # As if the step before had ended before midnight.
        assert counters.exclude(period="").update(period=yesterday) == 1
        assert standing(store) == (0, 6)
        with other.turn(estimate_usd=5) as refused:
            assert not refused.is_active
        with turn.step() as step:
            turn.tokens(model="no-such-model", prompt=1, cost_usd=6)
            step.end_turn()
    spent = dict(counters.exclude(period="").values_list("period", "spent_usd"))
    assert (spent.pop(yesterday), [*spent.values()]) == (4, [6])
    assert cost_units(standing(store)[0]) == cost_units(Decimal(6))
