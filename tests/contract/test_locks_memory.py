"""The in-memory lock manager under the contract suite, and what only it has."""

from __future__ import annotations

import pytest

from helix_store.stores import InMemoryLockManager, InMemoryStateStore, MemoryWorld
from helix_store.testing import LockManagerContract
from helix_store.testing.locks import AsyncLockContract, LockArgumentContract

pytestmark = pytest.mark.usefixtures("machine")


class TestInMemoryLockManager(LockManagerContract):
    # They are above the back end.
    only_on_databases = (AsyncLockContract, LockArgumentContract)

    @pytest.fixture(autouse=True)
    def one_world(self) -> None:
        self.world = MemoryWorld()

    def make_manager(self, *, tenant: str = "", default_ttl_ms: int | None = None) -> InMemoryLockManager:
        return InMemoryLockManager(tenant=tenant, world=self.world, default_ttl_ms=default_ttl_ms)


def test_managers_without_a_world_of_their_own_do_not_see_each_other() -> None:
    assert InMemoryLockManager().acquire("name") is not None
    assert InMemoryLockManager().acquire("name") is not None


def test_a_manager_without_a_world_is_not_heard_by_a_store() -> None:
    store = InMemoryStateStore()
    store.create_session("session", agent_type="agent")
    locks = InMemoryLockManager()
    for _ in range(2):
        with locks.wait_acquire("session", timeout_ms=0):
            pass
    assert store.append_messages("session", [{"role": "user"}], fencing_token=1) == 1


def test_clearing_frees_every_lock_of_the_tenant_and_forgets_no_token() -> None:
    world = MemoryWorld()
    ours, theirs = (InMemoryLockManager(world=world, tenant=tenant) for tenant in ("ours", "theirs"))
    held = ours.acquire("name")
    assert held is not None
    assert theirs.acquire("name") is not None
    ours.clear()
    ours.clear()
    assert ours.get_active_locks() == []
    assert theirs.is_locked("name")
    assert not held.release()
    again = ours.acquire("name")
    assert again is not None
    assert again.fencing_token > held.fencing_token
