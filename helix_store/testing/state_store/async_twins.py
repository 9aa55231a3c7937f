"""Tests that each method exists, takes the arguments of the contract and has an async counterpart."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync

from helix_store.core.contracts import (
    REQUIRED_METHODS,
    StateStore,
    require_state_store,
)
from helix_store.core.types import StagedChanges, SubSessionRef
from helix_store.exceptions import SessionNotFound, StaleStateError
from helix_store.testing.cells import table
from helix_store.testing.state_store.base import StoreTests
from helix_store.testing.state_store.calls import (
    CALLS,
    Call,
    outcome,
)
from helix_store.testing.state_store.samples import (
    contents,
    full_session,
    loaded,
    messages,
    step,
)

__all__ = ["AsyncTwinContract", "SignatureContract"]


class _Twins:
    """A store that is only called through its async methods, each call in a separate event loop."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        twin = getattr(self._store, f"a{name}")
        if name == "iter_messages":
            return lambda *args, **kwargs: async_to_sync(_all_of)(twin(*args, **kwargs))
        result: Callable[..., Any] = async_to_sync(twin)
        return result


async def _all_of(iterator: Any) -> list[Any]:
    return [item async for item in iterator]


class AsyncTwinContract(StoreTests):
    @table("call", CALLS)
    def test_a_twin_does_what_its_method_does(self, call: Call) -> None:
        """Call a method for one tenant and its twin for another one, after the same history for both."""
        plain, twins = self.make_store(tenant="plain"), self.make_store(tenant="twins")
        full_session(plain, "session")
        full_session(twins, "session")
        expected = outcome(call, plain, "session")
        assert type(outcome(call, _Twins(twins), "session")) is type(expected)
        assert twins.session_exists("session") == plain.session_exists("session")
        if plain.session_exists("session"):
            for store in (plain, twins):
                store.save_state("session", loaded(store, "session"))
            first, second = loaded(plain, "session"), loaded(twins, "session")
            second.created_at, second.updated_at = first.created_at, first.updated_at
            assert repr(second) == repr(first)
            assert twins.get_messages("session") == plain.get_messages("session")

    @table("call", CALLS, shared=True)
    def test_a_twin_answers_for_an_unknown_session_as_its_method_does(
        self, store: StateStore, call: Call
    ) -> None:
        assert outcome(call, _Twins(store), "nobody") == outcome(call, store, "nobody")

    def test_a_whole_step_can_be_made_asynchronously(self, store: Any) -> None:
        async def work() -> None:
            state = await store.acreate_session("session", agent_type="agent", custom_state={"list": []})
            run = await store.astart_run("session")
            staged = StagedChanges(tool_call_id="call", merge_changes={"list": [1]})
            await store.astage_changes("session", "step-1", staged)
            refs = [SubSessionRef(sub_session_id="sub", agent_type="agent")]
            await store.aadd_sub_session_refs("session", refs)
            commit = await store.asave_state_and_promote_staging(
                "session", state, messages(3), step(1), expected_version=1, run_id=run.run_id
            )
            assert commit.new_version == 2
            await store.aupdate_run("session", run.run_id, status="completed")
            page = await store.alist_sessions(agent_type="agent")
            assert [session.session_id for session in page.sessions] == ["session"]

        async_to_sync(work)()
        assert loaded(store, "session").custom_state == {"list": [1]}
        assert store.get_messages("session").messages == messages(3)
        assert store.get_current_run("session") is None

    def test_messages_can_be_iterated_asynchronously(self, store: Any, session_id: str) -> None:
        store.append_messages(session_id, messages(250))
        for chunk_size in (7, 100, 500):
            assert async_to_sync(_all_of)(
                store.aiter_messages(session_id, chunk_size=chunk_size)
            ) == messages(250)
        with pytest.raises(SessionNotFound):
            async_to_sync(_all_of)(store.aiter_messages("nobody"))

    def test_an_iteration_can_be_left_early(self, store: Any, session_id: str) -> None:
        store.append_messages(session_id, messages(5))

        async def first() -> Any:
            iterator = store.aiter_messages(session_id, chunk_size=2)
            try:
                return await anext(iterator)
            finally:
                await iterator.aclose()

        assert async_to_sync(first)() == messages(1)[0]
        assert store.append_messages(session_id, messages(1)) == 6

    def test_twins_raise_the_errors_of_their_methods(self, store: Any) -> None:
        full_session(store, "session")
        before = contents(store, "session")
        with pytest.raises(StaleStateError) as caught:
            async_to_sync(store.asave_state)("session", loaded(store, "session"), expected_version=1)
        assert caught.value.expected_version == 1
        assert contents(store, "session") == before

    def test_calls_gathered_in_one_loop_all_count(self, store: Any, session_id: str) -> None:
        async def work() -> Any:
            return await asyncio.gather(*(store.aincrement_step_count(session_id) for _ in range(8)))

        assert sorted(async_to_sync(work)()) == list(range(1, 9))
        assert loaded(store, session_id).step_count == 8


SYNCHRONOUS = [name for name in REQUIRED_METHODS if f"a{name}" in REQUIRED_METHODS]


class SignatureContract(StoreTests):
    def test_the_store_is_accepted_where_a_state_store_is_needed(self, store: StateStore) -> None:
        require_state_store(store)

    @table("name", SYNCHRONOUS, shared=True)
    def test_a_method_takes_the_arguments_of_the_contract(self, store: StateStore, name: str) -> None:
        """Check the parameters. A store may have additional ones if they are optional."""
        required = dict(inspect.signature(getattr(StateStore, name)).parameters)
        del required["self"]
        offered = inspect.signature(getattr(store, name)).parameters
        for parameter in required.values():
            assert parameter.name in offered, f"{name}() takes no {parameter.name}"
            assert offered[parameter.name].kind == parameter.kind
            assert offered[parameter.name].default == parameter.default
        for extra in offered.keys() - required.keys():
            assert offered[extra].default is not inspect.Parameter.empty, f"{name}() must not require {extra}"

    @table("name", SYNCHRONOUS, shared=True)
    def test_a_method_and_its_async_twin_take_the_same_arguments(self, store: StateStore, name: str) -> None:
        method, twin = getattr(store, name), getattr(store, f"a{name}")
        assert inspect.signature(twin).parameters == inspect.signature(method).parameters

    @table("name", SYNCHRONOUS, shared=True)
    def test_a_twin_is_asynchronous_and_its_method_is_not(self, store: StateStore, name: str) -> None:
        twin = getattr(store, f"a{name}")
        assert inspect.iscoroutinefunction(twin) or inspect.isasyncgenfunction(twin)
        assert not inspect.iscoroutinefunction(getattr(store, name))
