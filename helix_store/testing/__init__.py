"""Contract suites for third-party stores. They require only pytest.

class TestMyStore(StateStoreContract):
    def make_store(self, *, tenant="", limits=None):
        return MyStore(tenant=tenant, limits=limits)

class TestMyPosts(PostContract):
    def make_store(self, *, tenant="", limits=None):
        return MyStoreWithPosts(tenant=tenant, limits=limits)

class TestMyEffects(EffectContract):
    def make_store(self, *, tenant="", limits=None):
        return MyStoreWithEffects(tenant=tenant, limits=limits)

class TestMyLockManager(LockManagerContract):
    def make_manager(self, *, tenant="", default_ttl_ms=None):
        return MyLockManager(tenant=tenant, default_ttl_ms=default_ttl_ms)

class TestMyUsageStore(UsageStoreContract):
    def make_store(self, *, tenant=""):
        return MyUsageStore(tenant=tenant)
    def make_state_store(self, *, tenant=""):
        return MyStore(tenant=tenant)

class TestMyBudgets(BudgetContract):
    def make_store(self, *, tenant=""):
        return MyStores(tenant=tenant)

class TestMyStreamManager(StreamManagerContract):
    def make_manager(self, *, tenant="", retention=None, writer_lease=None, limits=None):
        return MyStreamManager(tenant=tenant, retention=retention, writer_lease=writer_lease, limits=limits)
"""

import pytest

# Register before importing the suites, so that pytest shows the values of their failed assertions.
pytest.register_assert_rewrite(
    "helix_store.testing.budgets",
    "helix_store.testing.locks",
    "helix_store.testing.state_store",
    "helix_store.testing.streams",
    "helix_store.testing.usage",
)

from helix_store.testing.budgets import BudgetContract  # noqa: E402
from helix_store.testing.locks import LockManagerContract  # noqa: E402
from helix_store.testing.state_store import EffectContract, PostContract, StateStoreContract  # noqa: E402
from helix_store.testing.streams import StreamManagerContract  # noqa: E402
from helix_store.testing.usage import UsageStoreContract  # noqa: E402

__all__ = [
    "BudgetContract",
    "EffectContract",
    "LockManagerContract",
    "PostContract",
    "StateStoreContract",
    "StreamManagerContract",
    "UsageStoreContract",
]
