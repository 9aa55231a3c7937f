"""The database store under the contract suite, on every database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from helix_store.core.limits import Limits
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from helix_store.testing import StateStoreContract
from tests.databases import CommittedDatabase


class TestDatabaseStateStore(StateStoreContract):
    @pytest.fixture(autouse=True)
    def committed_database(self, committed_db: CommittedDatabase) -> None:
        self.database = committed_db

    def make_store(self, *, tenant: str = "", limits: Limits | None = None) -> DatabaseStateStore:
        return DatabaseStateStore(self.database.alias, tenant=self.database.tenant + tenant, limits=limits)

    def make_lock_manager(self, *, tenant: str = "") -> DatabaseLockManager:
        return DatabaseLockManager(self.database.alias, tenant=self.database.tenant + tenant)

    @contextmanager
    def storage_untouched(self) -> Iterator[None]:
        with CaptureQueriesContext(self.database.connection) as captured:
            yield
        assert captured.captured_queries == []

    def leave_thread(self) -> None:
        connections.close_all()
