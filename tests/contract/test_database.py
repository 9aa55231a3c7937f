"""The database store under the contract suite: by itself, and inside a caller's transaction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext, override_settings

from helix_store.core.limits import Limits
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from helix_store.testing import StateStoreContract
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants


class DatabaseContract(StateStoreContract):
    database: CommittedDatabase

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


class TestDatabaseStateStore(DatabaseContract):
    @pytest.fixture(autouse=True)
    def sound_database(self, committed_db: CommittedDatabase) -> Iterator[None]:
        """A tenant of its own, whose rows agree with each other in the end."""
        self.database = committed_db
        yield
        assert broken_invariants(committed_db) == []


class TestDatabaseStateStoreInACallersTransaction(DatabaseContract):
    """The same answers, and after every refusal a transaction that the caller can go on with."""

    @pytest.fixture(autouse=True)
    def callers_transaction(self, committed_db: CommittedDatabase) -> Iterator[None]:
        self.database = committed_db
        with transaction.atomic(using=self.database.alias):
            yield
            assert broken_invariants(self.database) == []
            transaction.set_rollback(True, using=self.database.alias)

    def at_once(self, *calls: Any) -> Any:
        pytest.skip("other threads cannot see what the caller's transaction has not committed")


class TestDatabaseStateStoreWithoutFastPaths(DatabaseContract):
    """The portable forms on PostgreSQL; on SQLite every test runs them."""

    @pytest.fixture(autouse=True)
    def no_fast_paths(self, postgres_db: CommittedDatabase) -> Iterator[None]:
        self.database = postgres_db
        with override_settings(HELIX_STORE={"FAST_PATHS": False}):
            yield
        assert broken_invariants(postgres_db) == []
