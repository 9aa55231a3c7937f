"""Every method is there, takes what the contract says, and has its async twin."""

from __future__ import annotations

import inspect

import pytest

from helix_store.core.contracts import (
    REQUIRED_METHODS,
    StateStore,
    require_state_store,
)
from helix_store.testing.state_store.base import StoreTests

__all__ = ["SignatureContract"]

SYNCHRONOUS = [name for name in REQUIRED_METHODS if hasattr(StateStore, name)]


class SignatureContract(StoreTests):
    def test_the_store_is_accepted_where_a_state_store_is_needed(self, store: StateStore) -> None:
        require_state_store(store)

    @pytest.mark.parametrize("name", SYNCHRONOUS)
    def test_a_method_takes_the_arguments_of_the_contract(self, store: StateStore, name: str) -> None:
        """A store may take more, as long as nobody has to give it."""
        required = dict(inspect.signature(getattr(StateStore, name)).parameters)
        del required["self"]
        offered = inspect.signature(getattr(store, name)).parameters
        for parameter in required.values():
            assert parameter.name in offered, f"{name}() takes no {parameter.name}"
            assert offered[parameter.name].kind == parameter.kind
            assert offered[parameter.name].default == parameter.default
        for extra in offered.keys() - required.keys():
            assert offered[extra].default is not inspect.Parameter.empty, f"{name}() must not require {extra}"

    @pytest.mark.parametrize("name", SYNCHRONOUS)
    def test_a_method_and_its_async_twin_take_the_same_arguments(self, store: StateStore, name: str) -> None:
        method, twin = getattr(store, name), getattr(store, f"a{name}")
        assert inspect.signature(twin).parameters == inspect.signature(method).parameters

    @pytest.mark.parametrize("name", SYNCHRONOUS)
    def test_a_twin_is_asynchronous_and_its_method_is_not(self, store: StateStore, name: str) -> None:
        twin = getattr(store, f"a{name}")
        assert inspect.iscoroutinefunction(twin) or inspect.isasyncgenfunction(twin)
        assert not inspect.iscoroutinefunction(getattr(store, name))
