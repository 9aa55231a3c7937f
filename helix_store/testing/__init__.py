"""Contract suites for those who write a store of their own; they need pytest and nothing else.

class TestMyStore(StateStoreContract):
    def make_store(self, *, tenant="", limits=None):
        return MyStore(tenant=tenant, limits=limits)
"""

import pytest

# Before the suite is imported: assertions then show their values as they do in the reader's own tests.
pytest.register_assert_rewrite("helix_store.testing.state_store")

from helix_store.testing.state_store import StateStoreContract  # noqa: E402

__all__ = ["StateStoreContract"]
