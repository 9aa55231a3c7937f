"""The contract suites with four groups of tenants in two databases, which a router of the project chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import ClassVar
from zlib import crc32

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from helix_store.core.limits import Limits
from helix_store.models import Session
from helix_store.stores import (
    DatabaseLockManager,
    DatabaseStateStore,
    DatabaseStreamManager,
    DatabaseUsageStore,
)
from helix_store.testing import (
    LockManagerContract,
    StateStoreContract,
    StreamManagerContract,
    UsageStoreContract,
)
from tests.selection import Variant
from tests.shards.conftest import Pair
from tests.shards.routers import PLACES

GROUPS = ("north", "south", "east", "west")


# What SQLite adds to the router, other tests of this folder show.
pytestmark = pytest.mark.parametrize("pair_of_aliases", ["postgres"], indirect=True)


class Routed:
    """Stores without ``using``. The tenants of one test are in both databases."""

    variant = Variant()
    pair: Pair
    named: ClassVar[set[str]] = set()

    @pytest.fixture(autouse=True)
    def two_databases(self, routed: Pair, request: pytest.FixtureRequest) -> None:
        self.pair = routed
        self.turn = crc32(request.node.name.encode())

    def placed(self, tenant: str) -> str:
        group = GROUPS[(self.turn + crc32(tenant.encode())) % len(GROUPS)]
        name = f"{group}:{self.pair.tenant}{tenant}"
        self.named.add(name)
        return name

    @contextmanager
    def storage_untouched(self) -> Iterator[None]:
        with ExitStack() as stack:
            watched = [
                stack.enter_context(CaptureQueriesContext(connections[alias])) for alias in self.pair.aliases
            ]
            yield
        assert [each.captured_queries for each in watched] == [[], []]

    def leave_thread(self) -> None:
        connections.close_all()


class TestStateStore(Routed, StateStoreContract):
    def make_store(self, *, tenant: str = "", limits: Limits | None = None) -> DatabaseStateStore:
        return DatabaseStateStore(tenant=self.placed(tenant), limits=limits)

    def make_lock_manager(self, *, tenant: str = "") -> DatabaseLockManager:
        return DatabaseLockManager(tenant=self.placed(tenant))


class TestLockManager(Routed, LockManagerContract):
    def make_manager(self, *, tenant: str = "", default_ttl_ms: int | None = None) -> DatabaseLockManager:
        theirs = self.placed(tenant) if type(tenant) is str and len(tenant) < 100 else tenant
        return DatabaseLockManager(tenant=theirs, default_ttl_ms=default_ttl_ms)


class TestUsageStore(Routed, UsageStoreContract):
    def make_store(self, *, tenant: str = "") -> DatabaseUsageStore:
        return DatabaseUsageStore(tenant=self.placed(tenant))

    def make_state_store(self, *, tenant: str = "") -> DatabaseStateStore:
        return DatabaseStateStore(tenant=self.placed(tenant))


class TestStreamManager(Routed, StreamManagerContract):
    def make_manager(
        self,
        *,
        tenant: str = "",
        retention: timedelta | None = None,
        writer_lease: float | timedelta | None = None,
        limits: Limits | None = None,
    ) -> DatabaseStreamManager:
        return DatabaseStreamManager(
            tenant=self.placed(tenant),
            poll_interval=0.02,
            retention=retention,
            writer_lease=writer_lease,
            limits=limits,
        )

    def make_lock_manager(self) -> DatabaseLockManager:
        return DatabaseLockManager(tenant=self.placed(""))


def test_each_database_has_the_sessions_of_its_tenants_alone(routed: Pair) -> None:
    tenants = {group: f"{group}:{routed.tenant}" for group in GROUPS}
    stores = {group: DatabaseStateStore(tenant=tenant) for group, tenant in tenants.items()}
    for store in stores.values():
        store.create_session("session", agent_type="agent")
    assert {group: store.alias for group, store in stores.items()} == PLACES
    found = {
        alias: set(
            Session.objects.using(alias).filter(tenant__in=tenants.values()).values_list("tenant", flat=True)
        )
        for alias in routed.aliases
    }
    assert found == {
        routed.first: {tenants["north"], tenants["east"]},
        routed.second: {tenants["south"], tenants["west"]},
    }


@pytest.mark.parametrize(
    "make", [DatabaseStateStore, DatabaseLockManager, DatabaseUsageStore, DatabaseStreamManager]
)
def test_a_store_asks_the_router_once(routed: Pair, make: Callable[..., DatabaseStateStore]) -> None:
    store = make(tenant=f"south:{routed.tenant}")
    database = next(value.db for value in _parts(store) if hasattr(value, "db"))
    assert database.alias == routed.second
    PLACES["south"] = routed.first
    assert database.alias == routed.second
    assert DatabaseStateStore(tenant=f"south:{routed.tenant}").alias == routed.first


def _parts(store: object) -> list[object]:
    backend = vars(store)["_backend"]
    return [backend, *getattr(backend, "__dict__", {}).values(), getattr(backend, "sessions", None)]
