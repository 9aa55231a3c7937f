"""The database stream manager under the contract suite: on every database, with notifications and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from helix_store.core.limits import Limits
from helix_store.stores import DatabaseLockManager, DatabaseStreamManager
from helix_store.testing import StreamManagerContract
from helix_store.testing.streams import (
    ReadingContract,
    StreamArgumentContract,
    StreamFencingContract,
    StreamLifeContract,
    WritingContract,
)
from tests.databases import CommittedDatabase
from tests.selection import Variant


class DatabaseStreams(StreamManagerContract):
    database: CommittedDatabase

    def make_manager(
        self,
        *,
        tenant: str = "",
        retention: timedelta | None = None,
        writer_lease: float | timedelta | None = None,
        limits: Limits | None = None,
    ) -> DatabaseStreamManager:
        return DatabaseStreamManager(
            self.database.alias,
            tenant=self.database.tenant + tenant,
            poll_interval=0.02,
            retention=retention,
            writer_lease=writer_lease,
            limits=limits,
        )

    def make_lock_manager(self) -> DatabaseLockManager:
        return DatabaseLockManager(self.database.alias, tenant=self.database.tenant)

    @contextmanager
    def storage_untouched(self) -> Iterator[None]:
        with CaptureQueriesContext(self.database.connection) as captured:
            yield
        assert captured.captured_queries == []


class TestDatabaseStreamManager(DatabaseStreams):
    # They are above the back end.
    same_on_each_database = (StreamArgumentContract,)
    long_tests = ("test_a_writer_that_is_used_as_a_context_beats",)
    """In the quick tier, these run on PostgreSQL, and not on SQLite too."""

    @pytest.fixture(autouse=True)
    def committed_database(self, committed_db: CommittedDatabase) -> None:
        self.database = committed_db


@pytest.mark.thorough
class TestDatabaseStreamManagerWithoutNotifications(DatabaseStreams):
    variant = Variant(differs_in=(ReadingContract,))

    @pytest.fixture(autouse=True)
    def committed_database(self, postgres_db: CommittedDatabase) -> Iterator[None]:
        self.database = postgres_db
        with override_settings(HELIX_STORE={"STREAMS": {"notify": False}}):
            yield


@pytest.mark.thorough
class TestDatabaseStreamManagerWithoutFastPaths(DatabaseStreams):
    """The portable forms on PostgreSQL; on SQLite every test runs them."""

    variant = Variant(differs_in=(StreamFencingContract, StreamLifeContract, WritingContract))

    @pytest.fixture(autouse=True)
    def committed_database(self, postgres_db: CommittedDatabase) -> Iterator[None]:
        self.database = postgres_db
        with override_settings(HELIX_STORE={"FAST_PATHS": False}):
            yield


@pytest.mark.thorough
class TestDatabaseStreamManagerInATransaction(DatabaseStreams):
    """In the caller's transaction, as in a test of a Django project: what is not committed is read too."""

    variant = Variant(differs_in=(ReadingContract, WritingContract))

    @pytest.fixture(autouse=True)
    def open_transaction(self, committed_db: CommittedDatabase) -> Iterator[None]:
        self.database = committed_db
        with transaction.atomic(using=committed_db.alias):
            yield
            transaction.set_rollback(True, using=committed_db.alias)
