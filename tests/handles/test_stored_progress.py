"""A turn follows the store: after a commit whose fate it did not see, and at the beginning of each step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final

import pytest

from helix_store.engine import statement as commits
from helix_store.exceptions import ConflictError, OutcomeUnknown
from helix_store.handles import SessionHandle, Step, Turn
from helix_store.stores import DatabaseStateStore
from tests.databases import CommittedDatabase
from tests.faults.proxy import Cut
from tests.faults.wires import Wire, opened_wire
from tests.handles.worlds import World, memory_world

ASK: Final = {"tool_name": "ask"}
HELLO: Final = {"role": "assistant", "content": "hello"}

ACTS: Final[dict[str, Callable[[Step], None]]] = {
    "say": lambda step: step.say(HELLO),
    "finish": lambda step: step.finish("done"),
    "fail": lambda step: step.fail("no"),
    "wait": lambda step: step.wait_for({"call": ASK}),
    "end_turn": lambda step: step.end_turn(),
}
ENDINGS: Final = {
    "say": ("active", "failed", "OutcomeUnknown"),
    "finish": ("completed", "completed", None),
    "fail": ("failed", "failed", "no"),
    "wait": ("paused", "suspended_client_tool", None),
    "end_turn": ("active", "completed", "end_turn"),
}
"""The status of the session, and the status and the reason of the run, if the commit was stored."""
NOT_STORED: Final = ("active", "failed", "OutcomeUnknown")
CELLS: Final = list(itertools.product(ACTS, (True, False), ("caught", "uncaught")))


class LosingReplies:
    """A third party's store that does not learn whether a step was stored, when it is told so."""

    def __init__(self, store: Any) -> None:
        self._elsewhere = store
        self.loses: bool | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._elsewhere, name)

    def save_state_and_promote_staging(self, *args: Any, **kwargs: Any) -> Any:
        if self.loses is False:
            raise OutcomeUnknown("lost")
        commit = self._elsewhere.save_state_and_promote_staging(*args, **kwargs)
        if self.loses:
            raise OutcomeUnknown("lost")
        return commit


class Lossy:
    """Sessions, and a way to lose the next commit, or its reply."""

    def turn(self, session_id: str) -> Turn:
        raise NotImplementedError

    def losing(self, *, is_stored: bool) -> AbstractContextManager[None]:
        raise NotImplementedError


class LossyMemory(Lossy):
    def __init__(self) -> None:
        self.world: World = memory_world()
        self.store: Any = LosingReplies(self.world.own)

    def turn(self, session_id: str) -> Turn:
        session = SessionHandle(self.store, session_id)
        return session.turn(locks=self.world.locks, usage=self.world.usage)

    @contextmanager
    def losing(self, *, is_stored: bool) -> Iterator[None]:
        self.store.loses = is_stored
        yield
        self.store.loses = None


class LossyWire(Lossy):
    def __init__(self, wire: Wire) -> None:
        self._proxy = wire.proxy
        self.store = DatabaseStateStore(wire.alias, tenant=wire.tenant)

    def turn(self, session_id: str) -> Turn:
        return self.store.session(session_id).turn()

    @contextmanager
    def losing(self, *, is_stored: bool) -> Iterator[None]:
        self._proxy.arm(Cut.AFTER if is_stored else Cut.BEFORE, goes_down=True)
        yield
        self._proxy.wait_for_cut()
        self._proxy.come_up()


def lose_a_commit(lossy: Any, act: str, is_stored: bool, how: str) -> str | None:
    """Drive a session whose second step is lost; return what is wrong afterwards, or ``None``."""
    session_id = f"{act} {is_stored} {how}"
    store = lossy.store
    store.create_session(session_id, agent_type="agent")
    faults: list[str] = []

    def lose(turn: Turn) -> None:
        lost = lossy.losing(is_stored=is_stored)
        with lost, pytest.raises(OutcomeUnknown) as raised, turn.step() as step:
            ACTS[act](step)
        if how == "uncaught":
            raise raised.value
        stored = store.load_state(session_id)
        if (turn.state.status, turn.state.step_count) != (stored.status, stored.step_count):
            faults.append(f"the turn has {turn.state.status}, the store {stored.status}")
        goes_on = act == "say" or not is_stored
        if turn.is_active is not goes_on:
            faults.append(f"is_active is {turn.is_active}")
        if not goes_on:
            with suppress(ConflictError), turn.step() as step:
                step.say(HELLO)
                faults.append("another step began")

    with suppress(OutcomeUnknown), lossy.turn(session_id) as turn:
        with turn.step() as step:
            step.say(HELLO)
        lose(turn)
    run = store.list_runs(session_id)[0]
    found = (store.load_state(session_id).status, run.status, run.completion_reason)
    expected = ENDINGS[act] if is_stored else NOT_STORED
    if how == "caught" and expected == NOT_STORED:
        expected = ("active", "completed", None)
    if found != expected:
        faults.append(f"{found} instead of {expected}")
    return f"{session_id}: {'; '.join(faults)}" if faults else None


@pytest.fixture(params=["a third party's store", "postgres"])
def lossy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lossy]:
    if request.param != "postgres":
        yield LossyMemory()
        return
    database: CommittedDatabase = request.getfixturevalue("postgres_db")
    monkeypatch.setattr(commits, "_PATIENCE_SECONDS", 0.1)
    with opened_wire(database.alias, database.tenant) as wire:
        yield LossyWire(wire)


@pytest.mark.thorough
def test_after_a_commit_of_unknown_fate_a_turn_has_the_progress_that_is_stored(lossy: Lossy) -> None:
    faults = [fault for cell in CELLS if (fault := lose_a_commit(lossy, *cell))]
    assert not faults, "\n".join(faults)


def test_a_step_does_not_begin_in_a_session_that_was_ended_elsewhere(world: World) -> None:
    for status in ("failed", "completed", "paused"):
        session = world.new_session(status)
        with pytest.raises(ConflictError), world.turn(session) as turn:
            with turn.step() as step:
                step.say(HELLO)
            world.store.update_status(status, status)
            with turn.step() as step:
                step.say(HELLO)
        assert (turn.state.status, turn.is_active) == (status, False)
        run = world.store.list_runs(status)[0]
        assert (world.loaded(status).step_count, run.step_count) == (1, 1)
        assert run.status == ("failed" if status == "failed" else "completed")
