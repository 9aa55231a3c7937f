"""The in-memory store under the contract suite, and what only it has."""

from __future__ import annotations

import pytest

from helix_store.core.limits import Limits
from helix_store.engine.memory import MemoryWorld
from helix_store.locks import InMemoryLockManager
from helix_store.stores.store import InMemoryStateStore
from helix_store.testing import EffectContract, PostContract, StateStoreContract
from helix_store.testing.state_store import ArgumentContract, AsyncTwinContract, IdentifierContract
from helix_store.testing.state_store.samples import full_session


class TestInMemoryStateStore(EffectContract, PostContract, StateStoreContract):
    # They are above the back end.
    only_on_databases = (ArgumentContract, AsyncTwinContract, IdentifierContract)

    @pytest.fixture(autouse=True)
    def one_world(self) -> None:
        self.world = MemoryWorld()

    def make_store(self, *, tenant: str = "", limits: Limits | None = None) -> InMemoryStateStore:
        return InMemoryStateStore(tenant=tenant, limits=limits, world=self.world)

    def make_lock_manager(self, *, tenant: str = "") -> InMemoryLockManager:
        return InMemoryLockManager(tenant=tenant, world=self.world)


def test_stores_see_each_other_through_the_world_they_share_and_not_otherwise() -> None:
    world = MemoryWorld()
    InMemoryStateStore(world=world).create_session("session", agent_type="agent")
    assert InMemoryStateStore(world=world).session_exists("session")
    assert not InMemoryStateStore(world=MemoryWorld()).session_exists("session")
    assert not InMemoryStateStore().session_exists("session")


def test_the_ids_of_all_sessions_are_those_of_the_tenant() -> None:
    world = MemoryWorld()
    store = InMemoryStateStore(world=world)
    for name in ("b", "a", "c"):
        store.create_session(name, agent_type="agent")
    InMemoryStateStore(world=world, tenant="theirs").create_session("d", agent_type="agent")
    assert store.get_all_session_ids() == ["b", "a", "c"]


def test_get_sync_is_the_current_state() -> None:
    store = InMemoryStateStore()
    full_session(store, "session")
    assert store.get_sync("nobody") is None
    assert repr(store.get_sync("session")) == repr(store.load_state("session"))


def test_clearing_deletes_every_session_of_the_tenant_and_of_no_other() -> None:
    world = MemoryWorld()
    ours, theirs = (InMemoryStateStore(world=world, tenant=tenant) for tenant in ("ours", "theirs"))
    for store in (ours, theirs):
        full_session(store, "session")
    ours.clear()
    ours.clear()
    assert ours.get_all_session_ids() == []
    assert ours.load_state("session") is None
    assert theirs.get_all_session_ids() == ["session"]
