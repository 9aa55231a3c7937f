"""What a turn has reserved in budgets outlives transactions of the caller, midnight and its own worker."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, TypeVar

import pytest
from asgiref.sync import async_to_sync

from helix_store import BudgetExceeded, ConflictError, InMemoryStore, Store
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


# --- A turn that is refused when it is entered ----------------------------------------------------------

_APPROVED: Any = {"approved": True, "approval_id": "call"}


def _make_paused(store: AnyStore, session: SessionHandle) -> None:
    """Leave a session that waited, and whose call was answered."""
    with session.turn() as turn, turn.step() as step:
        step.ask_approval("call", "pay", 7)
    assert store.sessions.submit_tool_result(session.id, "call", **_APPROVED).outcome == "accepted"


def _suspend(store: AnyStore, session: SessionHandle) -> None:
    store.sessions.suspend(session.id, kind="suspended_step_partial", context={"page": 2})


_STATUSES: dict[str, Any] = {
    "answered": _make_paused,
    "suspended": _suspend,
    **{
        status: lambda store, session, status=status: store.sessions.update_status(session.id, status)
        for status in ("paused", "running", "interrupted")
    },
    "new": lambda store, session: None,
    "with a post": lambda store, session: session.post({"role": "user", "content": "Go on."}),
}
_SCOPES: dict[str, dict[str, Any]] = {
    "tenant": {"scope": "tenant"},
    "agent": {"scope": "agent_type", "value": "agent"},
    "user": {"scope": "user"},
    "tree": {"scope": "tree", "value": "refused"},
}
_ESTIMATES: dict[str, dict[str, Any]] = {
    "none": {},
    "tokens": {"estimate_tokens": 200},
    "dollars": {"estimate_usd": 200},
}
# Every status and every scope, each estimate of each kind of turn.
_REFUSALS = [
    *((status, "tenant", "none", "sync") for status in _STATUSES),
    *(("answered", scope, "none", "sync") for scope in _SCOPES if scope != "tenant"),
    *(("answered", "tenant", estimate, form) for estimate in _ESTIMATES for form in ("sync", "async")),
    ("answered", "tenant", "none", "in a transaction"),
    ("paused", "tenant", "none", "in a transaction"),
]


def _enter_refused(store: AnyStore, session: SessionHandle, form: str, estimate: dict[str, Any]) -> None:
    async def enter() -> None:
        async with session.turn(**estimate) as turn:
            assert isinstance(turn.stopped_by, BudgetExceeded)
            assert not turn.is_active

    if form == "async":
        async_to_sync(enter)()
        return
    block = store.transaction() if form == "in a transaction" else nullcontext()
    with block, session.turn(**estimate) as turn:
        assert isinstance(turn.stopped_by, BudgetExceeded)
        assert not turn.is_active


@for_each(("status", "scope", "estimate", "form"), _REFUSALS)
def test_a_turn_that_is_refused_at_its_entry_leaves_the_session_as_it_is(
    store: AnyStore, status: str, scope: str, estimate: str, form: str
) -> None:
    store.budgets.delete_budget("cap")
    session = store.new_session("refused", agent_type="agent", user_id="ada")
    _STATUSES[status](store, session)
    # Without an estimate, only a limit that is used up stops a turn.
    limits: dict[str, Any] = {"limit_usd": 100, "limit_tokens": 100 if estimate != "none" else 0}
    store.budgets.set_budget("small", **_SCOPES[scope], **limits)
    before, known = session.load(), len(store.sessions.list_runs(session.id))
    for number in (1, 2):
        _enter_refused(store, session, form, _ESTIMATES[estimate])
        assert session.load() == before
        run, *others = store.sessions.list_runs(session.id)
        assert len(others) + 1 == known + number
        assert (run.status, run.completion_reason) == ("interrupted", "budget:small")
        (stuck,) = store.find_stuck(conditions=["over_budget"])
        assert (stuck.session_id, stuck.detail) == ("refused", "small")
    store.budgets.set_budget("small", **_SCOPES[scope], limit_usd=1_000, limit_tokens=1_000)
    assert store.find_stuck(conditions=["over_budget"]) == []
    with session.turn(**_ESTIMATES[estimate]) as turn:
        assert turn.is_active
        assert {call: answer["approved"] for call, answer in turn.results.items()} == (
            {"call": True} if status == "answered" else {}
        )
        resumes = before.resume_count + (status in ("answered", "suspended"))
        assert (turn.state.status, turn.state.resume_count) == ("active", resumes)
        with turn.step() as step:
            if status == "answered":
                assert step.use_approval("call").input == 7
            step.end_turn()
