"""A step inside a transaction of the caller counts once that transaction commits, and not earlier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Final

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import DatabaseError, IntegrityError, connections, transaction

from helix_store.core import moments
from helix_store.core.types import Run, SessionState, SessionStatus
from helix_store.exceptions import ConflictError
from helix_store.handles import Step, Turn
from helix_store.models import InterruptRequest
from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from tests.cells import for_each
from tests.databases import CommittedDatabase
from tests.faults.proxy import Cut
from tests.faults.wires import Wire, opened_wire

CALLS: Final = {"call": {"tool_name": "ask", "input": {}}}


def finish(step: Step) -> None:
    step.finish("done")


def wait(step: Step) -> None:
    step.wait_for(CALLS)


def say(step: Step) -> None:
    step.say({"role": "assistant", "content": "hello"})


STEPS: Final[tuple[Callable[[Step], None], ...]] = (finish, wait, say)


class Kept(DatabaseStateStore):
    """The store with what a test reads back."""

    def state(self) -> SessionState:
        state = self.load_state("s")
        assert state is not None
        return state

    def last_run(self) -> Run:
        return self.list_runs("s")[0]

    def tokens(self) -> int:
        entries = DatabaseUsageStore(self.alias, tenant=self.tenant).get_entries("s")
        return sum(entry.tokens.total for entry in entries if entry.tokens is not None)


@pytest.fixture
def store(committed_db: CommittedDatabase) -> Kept:
    store = Kept(committed_db.alias, tenant=committed_db.tenant)
    store.create_session("s", agent_type="agent")
    return store


@pytest.fixture
def wire(postgres_db: CommittedDatabase) -> Iterator[Wire]:
    with opened_wire(postgres_db.alias, postgres_db.tenant) as wire:
        yield wire


def break_at_commit(alias: str) -> None:
    """Write a row of the application whose deferred foreign key fails when the transaction commits."""
    InterruptRequest.objects.using(alias).create(session_id=-1, kind="abort", requested_at=moments.now())


def lose_the_commit(turn: Turn, act: Callable[[Step], None], alias: str) -> None:
    def step_and_commit() -> None:
        with transaction.atomic(using=alias), turn.step() as step:
            act(step)
            break_at_commit(alias)

    turn.tokens(model="m", prompt=5, completion=6)
    with pytest.raises(IntegrityError):
        step_and_commit()


def require_nothing_of_it(turn: Turn) -> None:
    assert (turn.is_active, turn.state.step_count, turn.state.status) == (True, 0, SessionStatus.ACTIVE)


@for_each("act", STEPS)
def test_a_turn_forgets_a_step_whose_commit_fails(store: Kept, act: Callable[[Step], None]) -> None:
    with store.session("s").turn() as turn:
        lose_the_commit(turn, act, store.alias)
        require_nothing_of_it(turn)
    run = store.last_run()
    assert (store.state().step_count, run.step_count, run.status) == (0, 0, "completed")
    assert store.tokens() == 11


def test_a_turn_goes_on_after_a_step_whose_commit_fails(store: Kept) -> None:
    with store.session("s").turn() as turn:
        lose_the_commit(turn, finish, store.alias)
        with turn.step() as step:
            finish(step)
        assert not turn.is_active
    run, state = store.last_run(), store.state()
    assert (run.status, run.step_count, state.step_count, state.output) == ("completed", 1, 1, "done")
    assert store.tokens() == 11


def test_the_run_of_a_turn_that_ends_with_the_failed_commit_counts_what_is_stored(store: Kept) -> None:
    def drive() -> None:
        with store.session("s").turn() as turn, transaction.atomic(using=store.alias), turn.step() as step:
            say(step)
            break_at_commit(store.alias)

    with pytest.raises(IntegrityError):
        drive()
    assert (store.last_run().status, store.last_run().step_count) == ("failed", 0)


@for_each("act", STEPS)
def test_a_turn_forgets_a_step_whose_savepoint_is_rolled_back(
    store: Kept, act: Callable[[Step], None]
) -> None:
    with transaction.atomic(using=store.alias), store.session("s").turn() as turn:
        with turn.step() as first:
            say(first)
        turn.tokens(model="m", prompt=5, completion=6)
        with transaction.atomic(using=store.alias):
            with turn.step() as second:
                act(second)
            assert turn.is_active is (act is say)
            assert turn.state.step_count == 2
            transaction.set_rollback(True, using=store.alias)
        assert (turn.is_active, turn.state.step_count) == (True, 1)
        with turn.step() as again:
            assert again.number == 2
            say(again)
    assert (store.state().step_count, store.last_run().step_count, store.tokens()) == (2, 2, 11)
    assert store.last_run().status == "completed"


def test_steps_of_one_transaction_see_each_other(store: Kept) -> None:
    with store.session("s").turn() as turn:
        with transaction.atomic(using=store.alias):
            for number in (1, 2, 3):
                turn.tokens(model="m", prompt=number)
                with turn.step() as step:
                    assert step.number == number
                    say(step)
                assert turn.state.step_count == number
        assert (turn.is_active, turn.state.step_count) == (True, 3)
    assert (store.state().step_count, store.last_run().step_count, store.tokens()) == (3, 3, 6)


def test_a_turn_asks_what_is_stored_when_another_hook_fails_after_the_commit(store: Kept) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    def step_and_commit(turn: Turn) -> None:
        with transaction.atomic(using=store.alias):
            transaction.on_commit(fail, using=store.alias)
            turn.tokens(model="m", prompt=1)
            with turn.step() as step:
                finish(step)

    with store.session("s").turn() as turn:
        with pytest.raises(ZeroDivisionError):
            step_and_commit(turn)
        assert (turn.is_active, turn.state.status) == (False, SessionStatus.COMPLETED)
        with pytest.raises(ConflictError):
            turn.step()
    run = store.last_run()
    assert (run.status, run.step_count, store.tokens()) == ("completed", 1, 1)


@for_each("act", STEPS)
@for_each("cut", [Cut.BEFORE, Cut.AFTER], ids=lambda cut: cut.name.lower())
def test_a_turn_asks_what_is_stored_when_the_commit_is_cut_off(
    wire: Wire, cut: Cut, act: Callable[[Step], None]
) -> None:
    store = Kept(wire.alias, tenant=wire.tenant)
    store.create_session("s", agent_type="agent")

    def step_and_commit(turn: Turn) -> None:
        with transaction.atomic(using=wire.alias), turn.step() as step:
            act(step)
            wire.proxy.arm(cut)

    with store.session("s").turn() as turn:
        turn.tokens(model="m", prompt=5, completion=6)
        with pytest.raises(DatabaseError):
            step_and_commit(turn)
        wire.proxy.wait_for_cut()
        connections[wire.alias].close()
        is_stored = cut is Cut.AFTER
        assert turn.state.step_count == store.state().step_count == int(is_stored)
        assert turn.is_active is (act is say or not is_stored)
    run = store.last_run()
    waits = is_stored and act is wait
    assert run.status == ("suspended_client_tool" if waits else "completed")
    assert (run.step_count, store.tokens()) == (int(is_stored), 11)


def test_an_async_turn_forgets_a_step_whose_commit_fails(store: Kept) -> None:
    def fail_to_commit(turn: Turn) -> None:
        lose_the_commit(turn, finish, store.alias)

    async def drive() -> None:
        async with store.session("s").turn() as turn:
            await sync_to_async(fail_to_commit)(turn)
            require_nothing_of_it(turn)
            async with turn.step() as step:
                await step.await_for(CALLS)
            assert not turn.is_active

    async_to_sync(drive)()
    run = store.last_run()
    assert (run.status, run.step_count, store.tokens()) == ("suspended_client_tool", 1, 11)


def test_an_async_step_in_a_savepoint_that_is_rolled_back_is_forgotten(store: Kept) -> None:
    async def step_of(turn: Turn, act: Callable[[Step], Any]) -> int:
        async with turn.step() as step:
            act(step)
        return turn.state.step_count

    with transaction.atomic(using=store.alias), store.session("s").turn() as turn:
        with transaction.atomic(using=store.alias):
            assert async_to_sync(step_of)(turn, finish) == 1
            transaction.set_rollback(True, using=store.alias)
        assert turn.is_active
        assert async_to_sync(step_of)(turn, say) == 1
    assert (store.state().step_count, store.last_run().step_count) == (1, 1)


@pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.AFTER], ids=lambda cut: cut.name.lower())
def test_an_async_turn_asks_what_is_stored_when_the_commit_is_cut_off(wire: Wire, cut: Cut) -> None:
    store, is_stored = Kept(wire.alias, tenant=wire.tenant), cut is Cut.AFTER
    store.create_session("s", agent_type="agent")

    def step_and_commit(turn: Turn) -> None:
        with transaction.atomic(using=wire.alias), turn.step() as step:
            finish(step)
            wire.proxy.arm(cut)

    def lose_it(turn: Turn) -> None:
        with pytest.raises(DatabaseError):
            step_and_commit(turn)
        wire.proxy.wait_for_cut()
        connections[wire.alias].close()

    async def drive() -> None:
        async with store.session("s").turn() as turn:
            turn.tokens(model="m", prompt=5, completion=6)
            await sync_to_async(lose_it)(turn)
            # Code of an event loop cannot read the state; the next step does.
            with pytest.raises(ConflictError) if is_stored else nullcontext():
                async with turn.step() as step:
                    step.finish("again")
            assert (turn.is_active, turn.state.step_count) == (False, 1)

    async_to_sync(drive)()
    run = store.last_run()
    assert (run.status, run.step_count, store.state().step_count, store.tokens()) == ("completed", 1, 1, 11)
    assert store.state().output == ("done" if is_stored else "again")
