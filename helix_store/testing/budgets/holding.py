"""Tests for turns: the amounts that a step holds, the limits that stop it, and the usage of its commit."""

from __future__ import annotations

import pickle
import time
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from helix_store.core.types import RunStatus, SessionStatus
from helix_store.exceptions import (
    BudgetExceeded,
    ConflictError,
    InvalidPayload,
    NotFoundError,
    TurnInterrupted,
)
from helix_store.locks import NoOpLockManager
from helix_store.testing.budgets.base import BudgetTests, amounts, now_ms, spent
from helix_store.testing.cells import table

__all__ = ["BudgetTurnContract"]

_HOLDS = {"estimate_usd": Decimal("0.1"), "estimate_tokens": 5}


class BudgetTurnContract(BudgetTests):
    @pytest.fixture
    def capped(self, store: Any, session: Any) -> Any:
        """Return the store, with a budget ``cap`` of its tenant."""
        store.budgets.set_budget("cap", scope="tenant", limit_usd=10, limit_tokens=1_000)
        return store

    def stopped(self, capped: Any, session: Any, **estimates: Any) -> BudgetExceeded:
        """Return the error that the first step of a turn raises, and check that it ended the turn."""
        version = session.load().version
        caught: BudgetExceeded | None = None
        with session.turn() as turn:
            try:
                with turn.step(**estimates):
                    pass
            except BudgetExceeded as exc:
                caught = exc
            assert caught is not None, "the step began"
            assert not turn.is_active
            with pytest.raises(BudgetExceeded):
                turn.step()
        run = capped.sessions.list_runs(session.id)[0]
        assert (run.status, run.completion_reason) == (RunStatus.INTERRUPTED, f"budget:{caught.name}")
        state = session.load()
        assert (state.status, state.version) == (SessionStatus.ACTIVE, version)
        return caught

    def test_a_step_holds_its_estimate_until_it_commits(self, capped: Any, session: Any) -> None:
        with session.turn(**_HOLDS) as turn:
            with turn.step() as step:
                assert amounts(capped.budgets.status("cap")) == (0, 0, Decimal("0.1"), 5)
                turn.tokens(model="no-such-model", prompt=3, cost_usd="0.07")
                step.say({"role": "assistant", "content": "hello"})
            # The commit has reserved the next step.
            assert amounts(capped.budgets.status("cap")) == (Decimal("0.07"), 3, Decimal("0.1"), 5)
            with turn.step(estimate_usd="0.2"):
                assert amounts(capped.budgets.status("cap"))[2:] == (Decimal("0.2"), 5)
        assert amounts(capped.budgets.status("cap")) == (Decimal("0.07"), 3, 0, 0)
        assert session.load().step_count == 2

    def test_a_failed_step_releases_its_hold_and_its_usage_counts(self, capped: Any, session: Any) -> None:
        def fail() -> None:
            with session.turn(**_HOLDS) as turn, turn.step():
                turn.tokens(model="no-such-model", prompt=3, cost_usd="0.07")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert amounts(capped.budgets.status("cap")) == (Decimal("0.07"), 3, 0, 0)

    def test_a_reached_limit_stops_the_next_step_and_raising_it_lets_the_session_continue(
        self, capped: Any, session: Any
    ) -> None:
        capped.usage.record_entry(spent(usd="10", tokens=1))
        error = self.stopped(capped, session)
        assert (error.name, error.limit, error.spent, error.held) == ("cap", 10, 10, 0)
        assert isinstance(error, TurnInterrupted)
        assert (error.kind, error.reason) == ("budget", "budget:cap")
        again = pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
        assert (type(again), again.attributes) == (BudgetExceeded, error.attributes)
        capped.budgets.set_budget("cap", scope="tenant", limit_usd=11)
        with session.turn() as turn, turn.step() as step:
            step.end_turn()
        assert session.load().step_count == 1

    def test_a_limit_of_tokens_stops_too(self, capped: Any, session: Any) -> None:
        capped.usage.record_entry(spent(usd="0", tokens=999))
        assert (self.stopped(capped, session, estimate_tokens=2).spent) == 999
        with session.turn() as turn, turn.step(estimate_tokens=1) as step:
            step.end_turn()

    def test_what_others_hold_is_not_given_twice(self, capped: Any, session: Any) -> None:
        other = capped.new_session("other", agent_type="writer")
        capped.usage.record_entry(spent(usd="9.9"))
        with session.turn() as turn, turn.step(estimate_usd="0.1"):
            error = self.stopped(capped, other, estimate_usd="0.1")
            assert (error.spent, error.held) == (Decimal("9.9"), Decimal("0.1"))
            assert self.stopped(capped, other).held == Decimal("0.1")
        with other.turn() as turn, turn.step(estimate_usd="0.1") as step:
            step.end_turn()

    def test_a_step_may_spend_more_than_its_estimate_which_stops_the_next_one(
        self, capped: Any, session: Any
    ) -> None:
        with session.turn() as turn:
            with turn.step(estimate_usd=1):
                turn.tokens(model="no-such-model", prompt=1, cost_usd=12)
            with pytest.raises(BudgetExceeded), turn.step():
                pass
        assert amounts(capped.budgets.status("cap")) == (12, 1, 0, 0)

    def test_every_budget_of_the_session_is_checked(self, capped: Any, session: Any) -> None:
        for scope, value in (("tree", "session"), ("user", None), ("agent_type", "writer")):
            capped.budgets.set_budget(f"a {scope}", scope=scope, value=value, limit_usd=0)
            assert self.stopped(capped, session).name == f"a {scope}"
            capped.budgets.delete_budget(f"a {scope}")
        for scope, value in (("tree", "no session"), ("user", "bob"), ("agent_type", "reader")):
            capped.budgets.set_budget(f"no {scope}", scope=scope, value=value, limit_usd=0)
        with session.turn() as turn, turn.step() as step:
            step.end_turn()
        assert session.load().step_count == 1

    def test_a_sub_agent_spends_from_the_tree(self, capped: Any, session: Any) -> None:
        capped.budgets.set_budget("tree", scope="tree", value="session", limit_usd=1)
        child = capped.new_session("child", agent_type="helper", parent_session_id="session")
        with child.turn() as turn, turn.step(estimate_usd=1) as step:
            assert self.stopped(capped, session, estimate_usd="0.5").name == "tree"
            step.end_turn()

    def test_a_hold_ends_with_the_term_of_its_lock(self, capped: Any, session: Any) -> None:
        turn = session.turn(ttl=timedelta(hours=1)).__enter__()
        turn.step(estimate_usd=10).__enter__()
        other = capped.new_session("other", agent_type="writer")
        assert self.stopped(capped, other).held == 10
        capped.locks.force_release("session")
        assert amounts(capped.budgets.status("cap")) == (0, 0, 0, 0)
        with other.turn() as later, later.step(estimate_usd=10) as step:
            assert capped.budgets.status("cap").held_usd == 10
            step.end_turn()

    def test_a_hold_ends_when_another_worker_takes_the_lock(self, capped: Any, session: Any) -> None:
        turn = session.turn(ttl=timedelta(hours=1)).__enter__()
        turn.step(estimate_usd=10).__enter__()
        capped.locks.force_release("session")
        with capped.session("session").turn() as later, later.step(estimate_usd=4) as step:
            assert capped.budgets.status("cap").held_usd == 4
            step.end_turn()
        assert capped.budgets.status("cap").held_usd == 0

    @table("of_turn", [{}, {"estimate_usd": 1}])
    @table("error", [None, ZeroDivisionError()])
    def test_a_worker_that_lost_its_lock_does_not_release_the_hold_of_its_successor(
        self, capped: Any, session: Any, error: Exception | None, of_turn: dict[str, Any]
    ) -> None:
        turn = session.turn(ttl=timedelta(hours=1), **of_turn).__enter__()
        step = turn.step(estimate_usd=10).__enter__()
        turn.tokens(model="no-such-model", prompt=3, cost_usd="0.07")
        capped.locks.force_release("session")
        with capped.session("session").turn() as later, later.step(estimate_usd=4) as successor:
            if error is not None:
                step.__exit__(type(error), error, None)
            turn.__exit__(None, None, None)
            assert amounts(capped.budgets.status("cap")) == (Decimal("0.07"), 3, 4, 0)
            successor.end_turn()
        assert capped.budgets.status("cap").held_usd == 0

    def test_budgets_of_another_tenant_do_not_matter(self, capped: Any, session: Any) -> None:
        other = self.make_store(tenant="-other")
        other.budgets.set_budget("cap", scope="tenant", limit_usd=1)
        other.budgets.set_budget("theirs", scope="tenant", limit_usd=1)
        with other.new_session("session", agent_type="writer").turn() as their_turn:
            with their_turn.step(estimate_usd="0.5"):
                their_turn.tokens(model="no-such-model", prompt=3, cost_usd="0.5")
            with their_turn.step(estimate_usd="0.1"), session.turn() as turn:
                with turn.step(estimate_usd=10) as step:
                    assert amounts(capped.budgets.status("cap")) == (0, 0, 10, 0)
                    step.end_turn()
                assert amounts(other.budgets.status("cap")) == (Decimal("0.5"), 3, Decimal("0.1"), 0)
        with pytest.raises(NotFoundError):
            capped.budgets.status("theirs")

    def test_a_lock_of_another_tenant_keeps_no_hold_alive(self, capped: Any, session: Any) -> None:
        session.turn(ttl=timedelta(hours=1)).__enter__().step(estimate_usd=10).__enter__()
        other = self.make_store(tenant="-other").new_session("session", agent_type="writer")
        with other.turn():
            capped.locks.force_release("session")
            assert capped.budgets.status("cap").held_usd == 0

    def test_the_next_turn_tries_again(self, capped: Any, session: Any) -> None:
        capped.budgets.set_budget("cap", scope="tenant", limit_usd=0)
        self.stopped(capped, session)
        self.stopped(capped, session)

    def test_an_uncaught_error_ends_the_turn_quietly(self, capped: Any, session: Any) -> None:
        capped.budgets.set_budget("cap", scope="tenant", limit_usd=0)
        with session.turn() as turn, turn.step() as step:
            step.end_turn()
        assert session.load().step_count == 0

    @table("estimates", [{"estimate_usd": -1}, {"estimate_tokens": 1.5}, {"estimate_usd": "x"}], shared=True)
    def test_wrong_estimates(self, session: Any, estimates: Any) -> None:
        with pytest.raises(InvalidPayload):
            session.turn(**estimates)
        with session.turn() as turn, pytest.raises(InvalidPayload):
            turn.step(**estimates)

    @table("is_model_first", [True, False])
    @table("estimates", [{}, {"estimate_usd": 1}, {"estimate_tokens": 1}])
    def test_a_loop_calls_the_model_no_more_often_than_the_budget_allows(
        self, store: Any, session: Any, is_model_first: bool, estimates: dict[str, Any]
    ) -> None:
        store.budgets.set_budget("small", scope="tenant", limit_usd=2, limit_tokens=20)
        calls = 0

        def call_model(turn: Any) -> dict[str, Any]:
            nonlocal calls
            calls += 1
            turn.tokens(model="no-such-model", prompt=10, cost_usd=1)
            return {"role": "assistant", "content": "hello"}

        for number in range(10):
            session.say({"role": "user", "content": str(number)})
            with session.turn(**estimates) as turn:
                while turn.is_active:
                    if is_model_first:
                        answer = call_model(turn)
                        with turn.step() as step:
                            step.say(answer)
                            step.end_turn()
                    else:
                        with turn.step() as step:
                            step.say(call_model(turn))
                            step.end_turn()
        assert calls == 2
        assert amounts(store.budgets.status("small")) == (2, 20, 0, 0)
        assert session.load().message_count == 12
        runs = store.sessions.list_runs(session.id)
        assert [run.completion_reason for run in runs] == ["budget:small"] * 8 + ["end_turn"] * 2

    @table("estimates", [{}, {"estimate_usd": 6}])
    def test_a_commit_that_reaches_the_limit_stops_the_turn_before_the_next_model_call(
        self, capped: Any, session: Any, estimates: dict[str, Any]
    ) -> None:
        with session.turn(**estimates) as turn:
            assert not turn.stopped_by
            with turn.step() as step:
                turn.tokens(model="no-such-model", prompt=3, cost_usd=5 if estimates else 10)
                step.say({"role": "assistant", "content": "hello"})
            assert not turn.is_active
            assert isinstance(turn.stopped_by, BudgetExceeded)
            assert amounts(capped.budgets.status("cap"))[2:] == (0, 0)
            with pytest.raises(BudgetExceeded) as caught:
                turn.step()
            assert caught.value is turn.stopped_by
            turn.step()
        run = capped.sessions.list_runs(session.id)[0]
        assert (run.status, run.completion_reason) == (RunStatus.INTERRUPTED, "budget:cap")
        assert (session.load().step_count, session.load().message_count) == (1, 1)

    def test_a_turn_that_a_budget_refuses_is_over_when_it_is_entered(self, capped: Any, session: Any) -> None:
        capped.usage.record_entry(spent(usd="9.9"))
        version = session.load().version
        with session.turn(estimate_usd="0.2") as turn:
            assert not turn.is_active
            assert turn.stopped_by.name == "cap"
        run = capped.sessions.list_runs(session.id)[0]
        assert (run.status, run.completion_reason) == (RunStatus.INTERRUPTED, "budget:cap")
        assert (session.load().status, session.load().version) == (SessionStatus.ACTIVE, version)

    @table("spends", ["nothing", "a tool", "tokens"])
    @table("others", ["spend", "hold"])
    @table("form", ["plain", "staged", "with a post", "with an operation id"])
    def test_a_commit_stops_the_turn_if_others_have_used_the_budget_up(
        self, capped: Any, session: Any, form: str, others: str, spends: str
    ) -> None:
        other = capped.new_session("other", agent_type="writer")
        holding = other.turn(ttl=timedelta(hours=1))
        with session.turn() as turn:
            if spends == "a tool":
                turn.tool("search", True, 1)
            elif spends == "tokens":
                turn.tokens(model="no-such-model", prompt=3, cost_usd="0.07")
            operation_id = "operation" if form.endswith("id") else None
            with turn.step(operation_id=operation_id) as step:
                step.say({"role": "assistant", "content": "hello"})
                if form == "staged":
                    step.stage("call", merge_changes={"n": 1})
                elif form == "with a post":
                    session.post({"role": "user", "content": "one more"})
                if others == "spend":
                    capped.usage.record_entry(spent("other", usd="10"))
                else:
                    holding.__enter__().step(estimate_usd=10).__enter__()
            assert not turn.is_active
            assert turn.stopped_by.name == "cap"
            with pytest.raises(BudgetExceeded):
                turn.step()
        run = capped.sessions.list_runs(session.id)[0]
        assert (run.status, run.completion_reason) == (RunStatus.INTERRUPTED, "budget:cap")
        assert session.load().step_count == 1
        capped.locks.force_release("other")

    @table("operation_id", [None, "operation"])
    def test_a_commit_that_changes_the_user_looks_at_the_budgets_of_the_new_one(
        self, store: Any, session: Any, operation_id: str | None
    ) -> None:
        store.new_session("other", agent_type="writer", user_id="bob")
        store.budgets.set_budget("cap", scope="user", limit_usd=10)
        store.usage.record_entry(spent("other", usd="10"))
        with session.turn() as turn:
            with turn.step() as step:
                step.say({"role": "assistant", "content": "hello"})
            assert turn.is_active
            with turn.step(operation_id=operation_id) as step:
                step.state.user_id = "bob"
            assert not turn.is_active

    def test_a_commit_looks_at_no_budget_of_others(self, store: Any, session: Any) -> None:
        for scope, value in (("tree", "other"), ("user", "bob"), ("agent_type", "reader")):
            store.budgets.set_budget(f"a {scope}", scope=scope, value=value, limit_usd=1)
        store.budgets.set_budget("cap", scope="tenant", limit_usd=10)
        store.new_session("other", agent_type="reader", user_id="bob")
        with session.turn() as turn:
            with turn.step() as step:
                step.say({"role": "assistant", "content": "hello"})
                store.usage.record_entry(spent("other", usd="5"))
            assert turn.is_active

    def test_an_answer_that_was_paid_for_is_stored(self, capped: Any, session: Any) -> None:
        with session.turn() as turn:
            with turn.step() as step:
                step.say({"role": "assistant", "content": "hello"})
            assert turn.is_active
            # The model answers meanwhile.
            capped.usage.record_entry(spent(usd="10"))
            with turn.step() as step:
                step.say({"role": "assistant", "content": "hello again"})
            assert not turn.is_active
        assert session.load().message_count == 2

    @table("estimates", [{}, {"estimate_usd": 1}])
    def test_a_turn_that_is_refused_at_its_start_leaves_posts_waiting(
        self, capped: Any, session: Any, estimates: dict[str, Any]
    ) -> None:
        post = {"role": "user", "content": "hello"}
        session.post(post)
        capped.usage.record_entry(spent(usd="9.5" if estimates else "10"))
        version = session.load().version
        for _ in range(2):
            with session.turn(**estimates, rest=False) as turn:
                assert turn.stopped_by.name == "cap"
                with pytest.raises(ConflictError):
                    turn.receive()
            assert session.load().version == version
            assert [each.message for each in session.posts().items] == [post]
        capped.budgets.set_budget("cap", scope="tenant", limit_usd=20)
        with session.turn(**estimates) as turn:
            assert turn.is_active
            assert turn.messages() == [post]

    def test_a_turn_that_a_budget_has_stopped_leaves_posts_waiting(self, capped: Any, session: Any) -> None:
        with session.turn() as turn:
            late = turn.step()
            with turn.step() as step:
                turn.tokens(model="no-such-model", prompt=3, cost_usd=10)
                step.say({"role": "assistant", "content": "hello"})
            session.post({"role": "user", "content": "one more"})
            capped.budgets.set_budget("cap", scope="tenant", limit_usd=20)
            with pytest.raises(ConflictError):
                turn.receive()
            with pytest.raises(BudgetExceeded):
                late.__enter__()
        assert [each.message["content"] for each in session.posts().items] == ["one more"]
        assert session.load().step_count == 1

    def test_a_turn_holds_its_estimate_from_its_start_to_its_end(self, capped: Any, session: Any) -> None:
        with session.turn(**_HOLDS):
            assert amounts(capped.budgets.status("cap")) == (0, 0, Decimal("0.1"), 5)
        assert amounts(capped.budgets.status("cap")) == (0, 0, 0, 0)

    @table("ending", ["end_turn", "finish", "fail", "wait_for"])
    def test_a_commit_that_ends_the_turn_reserves_nothing(
        self, capped: Any, session: Any, ending: str
    ) -> None:
        with session.turn(**_HOLDS) as turn:
            with turn.step() as step:
                asked = [{"call": {"tool_name": "ask"}}] if ending == "wait_for" else []
                getattr(step, ending)(*asked)
            assert not turn.is_active
            assert amounts(capped.budgets.status("cap")) == (0, 0, 0, 0)

    @table("ending", ["end_turn", "finish"])
    def test_a_commit_that_goes_on_with_a_post_reserves_the_next_step(
        self, capped: Any, session: Any, ending: str
    ) -> None:
        with session.turn(**_HOLDS) as turn:
            with turn.step() as step:
                session.post({"role": "user", "content": "one more"})
                getattr(step, ending)()
            assert turn.is_active
            assert amounts(capped.budgets.status("cap")) == (0, 0, Decimal("0.1"), 5)
            capped.usage.record_entry(spent(usd="9.95"))
            with turn.step() as step:
                session.post({"role": "user", "content": "and one more"})
                getattr(step, ending)()
            assert not turn.is_active
            assert turn.stopped_by.name == "cap"

    @table("usd", [None, "0.07", "9.95"])
    def test_a_failed_step_keeps_the_reservation_for_the_next_one_if_it_still_fits(
        self, capped: Any, session: Any, usd: str | None
    ) -> None:
        with session.turn(**_HOLDS) as turn:
            failing = turn.step().__enter__()
            if usd is not None:
                turn.tokens(model="no-such-model", prompt=3, cost_usd=usd)
            failing.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
            fits = usd != "9.95"
            expected = Decimal(usd or 0), 3 if usd else 0, *((Decimal("0.1"), 5) if fits else (0, 0))
            assert amounts(capped.budgets.status("cap")) == expected
            assert turn.is_active is fits
        assert amounts(capped.budgets.status("cap"))[2:] == (0, 0)

    @table("change", [{"period": "day"}, {"period": "month"}, {"limit_usd": 20}])
    def test_a_hold_survives_a_change_of_its_budget(
        self, capped: Any, session: Any, change: dict[str, Any]
    ) -> None:
        capped.usage.record_entry(spent(usd="1", tokens=10))
        with session.turn(**_HOLDS) as turn:
            given = {"scope": "tenant", "limit_usd": 10, "limit_tokens": 1_000}
            capped.budgets.set_budget("cap", **{**given, **change})
            assert amounts(capped.budgets.status("cap")) == (1, 10, Decimal("0.1"), 5)
            with turn.step():
                turn.tokens(model="no-such-model", prompt=3, cost_usd="0.07")
            assert amounts(capped.budgets.status("cap")) == (Decimal("1.07"), 13, Decimal("0.1"), 5)
            capped.budgets.set_budget("cap", **given)
            assert amounts(capped.budgets.status("cap")) == (Decimal("1.07"), 13, Decimal("0.1"), 5)
        assert amounts(capped.budgets.status("cap")) == (Decimal("1.07"), 13, 0, 0)

    @table(
        ("before", "after"),
        [(None, "ada"), ("ada", None), ("ada", "ada"), (None, "other"), ("ada", "other")],
    )
    def test_a_hold_survives_a_change_of_the_value_if_the_budget_still_applies(
        self, store: Any, session: Any, before: str | None, after: str | None
    ) -> None:
        given = {"scope": "user", "limit_usd": 10, "limit_tokens": 1_000}
        store.budgets.set_budget("cap", **given, value=before)
        with session.turn(**_HOLDS):
            store.budgets.set_budget("cap", **given, value=after)
            held = (0, 0) if after == "other" else (Decimal("0.1"), 5)
            assert amounts(store.budgets.status("cap", value=after or "ada"))[2:] == held
            if after == "other":
                store.budgets.set_budget("cap", **given, value=before)
                assert amounts(store.budgets.status("cap", value="ada"))[2:] == (0, 0)

    def test_a_new_budget_of_the_name_of_a_deleted_one_has_no_holds(self, capped: Any, session: Any) -> None:
        with session.turn(**_HOLDS):
            assert capped.budgets.delete_budget("cap")
            capped.budgets.set_budget("cap", scope="tenant", limit_usd=10)
            assert amounts(capped.budgets.status("cap")) == (0, 0, 0, 0)

    def test_an_estimate_of_nothing_replaces_the_reservation(self, capped: Any, session: Any) -> None:
        with session.turn(**_HOLDS) as turn, turn.step(estimate_usd=0, estimate_tokens=0):
            assert amounts(capped.budgets.status("cap")) == (0, 0, 0, 0)

    def test_a_session_with_another_user_holds_nothing_of_the_first(self, store: Any, session: Any) -> None:
        store.budgets.set_budget("cap", scope="user", limit_usd=10)
        with session.turn(estimate_usd=1) as turn:
            with turn.step() as step:
                step.state.user_id = "other"
            held = [store.budgets.status("cap", value=user).held_usd for user in ("ada", "other")]
            assert held == [0, 1]
        assert store.budgets.status("cap", value="other").held_usd == 0

    def test_an_estimate_needs_the_locks_of_the_store(self, capped: Any, session: Any) -> None:
        other = self.make_store(tenant="-other")
        for locks in (NoOpLockManager(), other.locks):
            with pytest.raises(ConflictError, match="locks="):
                session.turn(**_HOLDS, locks=locks).__enter__()
            with session.turn(locks=locks, rest=False) as turn:
                with pytest.raises(ConflictError, match="locks="):
                    turn.step(estimate_usd=1)
                with turn.step() as step:
                    step.end_turn()
        same = self.make_store().locks
        with session.turn(**_HOLDS, locks=same, rest=False):
            assert capped.budgets.status("cap").held_tokens == 5

    def test_usage_has_the_time_of_the_database(
        self, capped: Any, session: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before, a_day = now_ms(), 24 * 60 * 60
        clock = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: clock() - a_day * 1_000_000_000)
        with session.turn() as turn, turn.step() as step:
            turn.tokens(model="no-such-model", prompt=3, cost_usd="0.07")
            step.end_turn()
        (entry,) = capped.usage.get_entries(session.id)
        assert abs(entry.timestamp - before) < a_day * 1_000 / 2

    async def test_a_budget_stops_a_loop_in_an_event_loop(self, store: Any, session: Any) -> None:
        await store.budgets.aset_budget("small", scope="tenant", limit_usd=2)
        calls = 0
        async with session.turn(estimate_usd=1) as turn:
            while turn.is_active:
                calls += 1
                turn.tokens(model="no-such-model", prompt=10, cost_usd=1)
                async with turn.step() as step:
                    step.say({"role": "assistant", "content": "hello"})
        assert (calls, turn.stopped_by.name) == (2, "small")

    async def test_in_an_event_loop(self, capped: Any, session: Any) -> None:
        async with session.turn(**_HOLDS) as turn, turn.step() as step:
            turn.tokens(model="no-such-model", prompt=3, cost_usd="0.07")
            step.end_turn()
        assert amounts(await capped.budgets.astatus("cap")) == (Decimal("0.07"), 3, 0, 0)
