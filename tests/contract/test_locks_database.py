"""The database lock manager under the contract suite, on every database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from helix_store.stores import DatabaseLockManager
from helix_store.testing import LockManagerContract
from helix_store.testing.locks import AsyncLockContract, LockArgumentContract
from tests.databases import CommittedDatabase

pytestmark = pytest.mark.usefixtures("machine")


class TestDatabaseLockManager(LockManagerContract):
    # They are above the back end.
    same_on_each_database = (AsyncLockContract, LockArgumentContract)
    long_tests = (
        "test_a_lock_is_kept_alive_beyond_its_term",
        "test_a_refreshed_lock_outlives_its_first_term",
        "test_many_workers_get_each_token_once",
    )
    """In the quick tier, these run on PostgreSQL, and not on SQLite too."""

    @pytest.fixture(autouse=True)
    def committed_database(self, committed_db: CommittedDatabase) -> None:
        self.database = committed_db

    def make_manager(self, *, tenant: str = "", default_ttl_ms: int | None = None) -> DatabaseLockManager:
        theirs = tenant if type(tenant) is not str or not tenant else f"{self.database.tenant} {tenant}"
        return DatabaseLockManager(
            self.database.alias,
            tenant=self.database.tenant if theirs == "" else theirs,
            default_ttl_ms=default_ttl_ms,
        )

    @contextmanager
    def storage_untouched(self) -> Iterator[None]:
        with CaptureQueriesContext(self.database.connection) as captured:
            yield
        assert captured.captured_queries == []

    def leave_thread(self) -> None:
        connections.close_all()
