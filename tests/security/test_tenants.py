"""With the ids of another tenant every method answers as for ids that do not exist, and changes nothing.

The other ids are arguments: each alone beside own ones, and all of them in an empty tenant. Or the tenant has
stored them in its own session, and a call follows them.

The methods are found by reflection: a new one is tried without a word here, and a new parameter or class
fails these tests until the tables of `tenant_arguments` and `tenant_worlds` know it.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import Any, Final

import pytest
from django.test import override_settings

from helix_store.exceptions import (
    HelixStoreError,
    InvalidCursor,
    InvalidPayload,
    InvalidQuery,
    NotFoundError,
)
from tests.cells import Cells
from tests.databases import ALIASES, fresh_tenant
from tests.security.tenant_arguments import FOLLOWING, Names, arguments_of, choices_of
from tests.security.tenant_worlds import DatabaseTenants, MemoryTenants, Tenants, called

BACKENDS: Final = {
    "memory": {},
    **{vendor: {"FAST_PATHS": True} for vendor in ALIASES},
    **({"postgres portable": {"FAST_PATHS": False}} if "postgres" in ALIASES else {}),
}


@pytest.fixture(params=BACKENDS)
def tenants(request: pytest.FixtureRequest) -> Iterator[Tenants]:
    backend = request.param
    if backend == "memory":
        yield MemoryTenants()
        return
    database = request.getfixturevalue(f"{backend.split()[0]}_db")
    with override_settings(HELIX_STORE=BACKENDS[backend]):
        yield DatabaseTenants(database.alias)


@pytest.mark.thorough
def test_another_tenants_ids_are_ids_that_do_not_exist(
    tenants: Tenants, security_counts: Counter[str]
) -> None:
    assert tenants.own, "Its keys are lower than those of the others."
    victim = fresh_tenant()
    secret = tenants.fill(victim, "other")
    stored = tenants.dump(victim)
    nobody = tenants.names_of_nothing("nobody")
    with Cells() as cells:
        for store in tenants.stores:
            with cells.check(store.__name__):
                assert faults_of(tenants, store, secret, nobody, security_counts) == []
                assert tenants.dump(victim) == stored, "a call changed what the other tenant stored"


def faults_of(
    tenants: Tenants, store: type[Any], secret: Names, nobody: Names, counts: Counter[str]
) -> list[str]:
    """The calls that answer otherwise with ids of another tenant than with ids of nothing."""
    faults = []
    for method in without_twins(store):
        calls = [Call(tenants, store, method, *choice) for choice in choices(store, method)]
        own_ids = Call(tenants, store, method, calls[0].chosen | flags_of(store, method), frozenset())
        tried = [(each, way) for each in calls for way in (Call.beside_own_data, Call.in_an_empty_tenant)]
        for call, way in [*tried, (own_ids, Call.after_storing_the_ids)]:
            answers = [way(call, secret), way(call, nobody)]
            counts["tenant calls by reflection"] += 1
            if answers[0] != answers[1]:
                faults.append(f"{call} answers {answers[0]} instead of {answers[1]}")
    return faults


@pytest.mark.thorough
def test_with_its_own_ids_a_tenant_finds_what_it_stored(tenants: Tenants) -> None:
    """Else the test above would compare refusals of arguments that make no sense."""
    refused = (NotFoundError, InvalidCursor, InvalidPayload, InvalidQuery)
    faults = []
    for store, method in ((each, name) for each in tenants.stores for name in public_methods(each)):
        chosen, _ = next(choices(store, method))
        with tenants.trial() as (tenant, own):
            arguments = arguments_of(store, method, chosen, frozenset(), own=own, other=own)
            try:
                called(tenants.store(store, tenant), method, arguments)
            except refused as exc:
                faults.append(f"{store.__name__}.{method}: {exc!r}")
            except HelixStoreError:
                pass
    assert faults == []


def public_methods(store: type[Any]) -> list[str]:
    """The names of all public methods and properties, sync and async."""
    return [name for name in dir(store) if not name.startswith("_")]


def without_twins(store: type[Any]) -> list[str]:
    """The names without those async ones that only call the method of the same name in a thread."""

    def is_twin(name: str) -> bool:
        called = getattr(getattr(store, name), "__wrapped__", None)
        return called is not None and called is getattr(store, name[1:], None)

    return [name for name in public_methods(store) if not is_twin(name)]


def flags_of(store: type[Any], method: str) -> frozenset[str]:
    found = inspect.getattr_static(store, method)
    return (
        frozenset() if isinstance(found, property) else FOLLOWING & inspect.signature(found).parameters.keys()
    )


def choices(store: type[Any], method: str) -> Iterator[tuple[frozenset[str], frozenset[str]]]:
    if isinstance(inspect.getattr_static(store, method), property):
        yield frozenset(), frozenset()
    else:
        yield from choices_of(getattr(store, method))


@dataclass(frozen=True)
class Call:
    """A method with chosen parameters, some of them with ``others``' values."""

    tenants: Tenants
    store: type[Any]
    method: str
    chosen: frozenset[str]
    others: frozenset[str]

    def __str__(self) -> str:
        return f"{self.method}({', '.join(sorted(self.chosen))}) with the {sorted(self.others)} of others"

    def beside_own_data(self, other: Names) -> Any:
        with self.tenants.trial() as (tenant, own):
            return self._answer(tenant, own, other)

    def in_an_empty_tenant(self, other: Names) -> Any:
        with self.tenants.empty() as tenant:
            return self._answer(tenant, other, other)

    def after_storing_the_ids(self, other: Names) -> Any:
        with self.tenants.trial() as (tenant, own):
            self.tenants.refer(tenant, own, other)
            return self._answer(tenant, own, other)

    def _answer(self, tenant: str, own: Names, other: Names) -> Any:
        """What the method returns or raises, without what differs from call to call."""
        arguments = arguments_of(self.store, self.method, self.chosen, self.others, own=own, other=other)
        try:
            return comparable(called(self.tenants.store(self.store, tenant), self.method, arguments))
        except HelixStoreError as exc:
            return type(exc).__name__, comparable(str(exc))


DIFFERING: Final = re.compile(
    r"tenant-[0-9a-f]{32}"
    r"|(?<=-t)\d{13}-[0-9a-f]{6}"
    r"|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32}"
)
"""Tenants, the ends of checkpoint ids, and UUIDs."""


def comparable(value: Any) -> Any:
    if isinstance(value, str):
        return DIFFERING.sub("*", re.sub(r"\b(other|nobody)-", "foreign-", value))
    if value is None or isinstance(value, (bool, float, Decimal, Enum)):
        return value
    if isinstance(value, int):
        return "a time" if value > 10**11 else value
    if isinstance(value, datetime):
        return "a time"
    if isinstance(value, dict):
        return {comparable(key): comparable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [comparable(each) for each in value]
    if is_dataclass(value):
        # Keys of rows come from one sequence of all tenants.
        names = [
            each.name
            for each in fields(value)
            if (type(value).__name__, each.name) != ("StoredMessage", "id")
        ]
    else:
        public = [each for each in dir(type(value)) if not each.startswith("_")]
        names = [each for each in public if isinstance(getattr(type(value), each), property)]
    return type(value).__name__, {name: comparable(getattr(value, name)) for name in names}


def test_a_parameter_that_the_tables_do_not_know_is_named() -> None:
    class Store:
        def new_method(self, new_parameter: str) -> None: ...

    with pytest.raises(AssertionError, match=r"new_method has a new parameter 'new_parameter'\. Add it to"):
        list(choices_of(Store.new_method))
