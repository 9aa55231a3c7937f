"""The async form of handles, steps and turns does what the synchronous form does."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pkgutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from asgiref.sync import async_to_sync

import helix_store
from helix_store.exceptions import ConflictError, SessionBusy, StaleStateError, TurnInterrupted
from helix_store.handles import SessionHandle, Step, Turn
from helix_store.stores import InMemoryStateStore
from helix_store.stores.effect import OpenEffect
from tests.handles.worlds import World

ASK: dict[str, Any] = {"tool_name": "ask"}
HELLO = {"role": "user", "content": "hello"}
NO_TWIN = {
    SessionHandle: {"effect", "step", "turn"},
    Step: set(),
    Turn: {"effect", "step"},
}
"""Calls that return something with an async form."""
DELEGATES: dict[str, type] = {
    "TracedTurn": Turn,
    "TracedStep": Step,
    "TracedEffect": OpenEffect,
    "_ChatStep": Step,
}
"""What a class passes on the calls to that it does not have."""
NO_DELEGATES = {"_Traced", "_Twins", "_WithTypedValues", "GraphCheckpoint", "GraphSession", "StoredMessage"}
"""Classes that pass on no calls, or those of any object."""


@pytest.mark.parametrize("cls", NO_TWIN, ids=lambda cls: cls.__name__)
def test_every_call_has_a_twin(cls: type) -> None:
    names = {name for name, value in vars(cls).items() if inspect.isfunction(value) and name[0] != "_"}
    synchronous = {name for name in names if not inspect.iscoroutinefunction(getattr(cls, name))}
    assert names - synchronous == {f"a{name}" for name in synchronous - NO_TWIN[cls]}
    for name in synchronous - NO_TWIN[cls]:
        parameters = inspect.signature(getattr(cls, name)).parameters
        assert inspect.signature(getattr(cls, f"a{name}")).parameters == parameters


def test_every_call_on_a_database_has_a_twin() -> None:
    calls = {
        name: found
        for name in helix_store.__all__
        if inspect.isfunction(found := getattr(helix_store, name)) and "using" in found.__annotations__
    }
    batches = {"erase", "expired_session_cleanup", "prune_streams"}
    twins = {name for name, found in calls.items() if inspect.iscoroutinefunction(found)}
    assert twins == {f"a{name}" for name in calls.keys() - twins - batches}
    for name in twins:
        synchronous, asynchronous = (inspect.signature(calls[each]) for each in (name[1:], name))
        assert asynchronous == synchronous


def _classes() -> Iterator[type]:
    """The classes of the package, except those of frameworks that are not installed."""
    for module in pkgutil.walk_packages(helix_store.__path__, "helix_store."):
        if ".migrations" in module.name or module.name.endswith("__main__"):
            continue
        with suppress(ImportError):
            for value in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(value) and value.__module__ == module.name:
                    yield value


def _definer(name: str, classes: Sequence[type]) -> int:
    return next((number for number, cls in enumerate(classes) if name in vars(cls)), len(classes))


@pytest.mark.thorough
def test_a_class_that_overrides_a_call_overrides_its_twin() -> None:
    """Otherwise the async form does what the base class does, and not what the class adds."""
    delegating, overridden = set(), []
    for cls in _classes():
        classes = [each for each in cls.__mro__ if each.__module__.startswith("helix_store")]
        if any("__getattr__" in vars(each) for each in classes):
            delegating.add(cls.__qualname__)
            classes += DELEGATES.get(cls.__qualname__, object).__mro__
        names = {name for each in classes for name, value in vars(each).items() if inspect.isfunction(value)}
        for name in sorted(names):
            has_twin = name[0] != "_" and f"a{name}" in names
            if has_twin and _definer(name, classes) < _definer(f"a{name}", classes):
                overridden.append(f"{cls.__module__}.{cls.__qualname__}.{name}")
    assert overridden == []
    assert delegating - NO_DELEGATES == DELEGATES.keys()


def test_a_whole_turn_in_a_loop(world: World) -> None:
    async def work() -> SessionHandle:
        await world.store.acreate_session("session", agent_type="agent")
        session = world.session()
        assert await session.asay(HELLO) == 1
        async with world.turn(session) as turn:
            while turn.is_active:
                count = len(await turn.amessages())
                async with turn.step() as step:
                    await step.asay({"role": "assistant", "content": str(count)})
                    await asyncio.gather(
                        *(step.astage(f"call-{n}", merge_changes={f"{count}-{n}": n}) for n in range(3))
                    )
                    await turn.atokens(model="m", prompt=1)
                    await turn.atool("search", True, 20)
                    if count == 2:
                        await step.await_for({"call": ASK})
        assert (await session.aload()).status == "paused"
        assert await session.amessages(1) == [{"role": "assistant", "content": "2"}]
        return session

    session = async_to_sync(work)()
    state = session.load()
    assert state.custom_state == {f"{count}-{n}": n for count in (1, 2) for n in range(3)}
    assert world.store.list_runs("session")[0].status == "suspended_client_tool"
    assert len(world.usage.get_entries("session")) == 4
    assert world.locks.get_active_locks() == []


def test_errors_are_those_of_the_synchronous_form(world: World) -> None:
    async def work() -> None:
        session = world.session()
        async with world.turn(session) as turn:
            with pytest.raises(SessionBusy):
                await world.turn(world.session()).__aenter__()
            async with turn.step() as step:
                step.say(HELLO)
            with pytest.raises(ConflictError):
                await step.asay(HELLO)
            await world.store.arequest_interrupt("session", reason="lunch")
            with pytest.raises(TurnInterrupted):
                await turn.step().__aenter__()
            async with turn.step():
                pytest.fail("entered")
        with pytest.raises(StaleStateError):
            async with session.step() as step:
                await world.store.aupdate_status("session", "active")

    world.new_session()
    async_to_sync(work)()
    assert world.store.list_runs("session")[0].completion_reason == "lunch"
    assert world.locks.get_active_locks() == []


def test_an_update_in_a_loop_starts_again(world: World) -> None:
    session = world.new_session()
    seen = []

    def change(state: Any) -> None:
        seen.append(state.version)
        if len(seen) < 3:
            world.store.append_messages("session", [HELLO])
        state.title = "changed"

    assert async_to_sync(session.aupdate)(change).version == 4
    assert (seen, session.load().title) == ([1, 2, 3], "changed")


class Gate:
    """Holds the call of a store until it is opened, and tells when it has begun."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.begun, self.opened = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.begun.set()
        assert self.opened.wait(30)
        return self.call(*args, **kwargs)


@pytest.mark.parametrize("gated", ["enter", "start_run"])
def test_a_task_that_is_cancelled_while_it_enters_leaves_no_lock(gated: str) -> None:
    store = InMemoryStateStore()
    session = store.new_session("session", agent_type="agent")
    gate = Gate(getattr(session._stores, gated))
    setattr(session._stores, gated, gate)
    turn = session.turn()

    async def enter() -> None:
        async with turn:
            pytest.fail("entered")

    async def work() -> None:
        task = asyncio.create_task(enter())
        await asyncio.to_thread(gate.begun.wait, 30)
        task.cancel()
        asyncio.get_running_loop().call_later(0, gate.opened.set)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    assert not turn._locks.is_locked("session")
    (run,) = store.list_runs("session")
    assert (run.status, run.completion_reason) == ("failed", "CancelledError")


def test_a_task_that_is_cancelled_in_the_block_commits_nothing_and_releases_the_lock() -> None:
    store = InMemoryStateStore()
    session = store.new_session("session", agent_type="agent")
    turn = session.turn()

    async def work() -> None:
        reached = asyncio.Event()

        async def drive() -> None:
            async with turn, turn.step() as step:
                await step.astage("call", merge_changes={"n": 1})
                reached.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(drive())
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    assert not turn._locks.is_locked("session")
    assert session.load().version == 1
    assert store.get_staged_changes("session", "step-1") == []
    assert store.list_runs("session")[0].completion_reason == "CancelledError"
