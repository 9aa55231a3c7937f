"""The database usage store under the contract suite, on every database: with and without a transaction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext, override_settings

from helix_store.stores import DatabaseStateStore, DatabaseUsageStore
from helix_store.testing import UsageStoreContract
from helix_store.testing.usage import (
    AsyncUsageContract,
    RecordingContract,
    RollupContract,
    TimeSeriesContract,
    UsageArgumentContract,
    UsageDeletionContract,
    UsageEntryContract,
    UsageQueryContract,
    UsageTenantContract,
    UsageTests,
    UsageTreeContract,
)
from tests.databases import CommittedDatabase
from tests.selection import Variant


class OnADatabase(UsageTests):
    @pytest.fixture(autouse=True)
    def committed_database(self, committed_db: CommittedDatabase) -> None:
        self.database = committed_db

    def make_store(self, *, tenant: str = "") -> DatabaseUsageStore:
        return DatabaseUsageStore(self.database.alias, tenant=self.database.tenant + tenant)

    def make_state_store(self, *, tenant: str = "") -> DatabaseStateStore:
        return DatabaseStateStore(self.database.alias, tenant=self.database.tenant + tenant)

    @contextmanager
    def storage_untouched(self) -> Iterator[None]:
        with CaptureQueriesContext(self.database.connection) as captured:
            yield
        assert captured.captured_queries == []

    def leave_thread(self) -> None:
        connections.close_all()


class TestDatabaseUsageStore(OnADatabase, UsageStoreContract):
    """Each call is a transaction."""

    # They are above the back end.
    same_on_each_database = (AsyncUsageContract, UsageArgumentContract)
    long_tests = (
        "test_a_batch_is_kept_in_its_order",
        "test_a_batch_with_an_unknown_session_is_refused_whole",
        "test_cursors_lead_through_all_pages_once",
        "test_entries_recorded_by_many_at_once_all_count",
    )
    """In the quick tier, these run on PostgreSQL, and not on SQLite too."""


@pytest.mark.thorough
class TestDatabaseUsageStoreInACallersTransaction(
    OnADatabase,
    RecordingContract,
    UsageEntryContract,
    RollupContract,
    UsageTreeContract,
    UsageQueryContract,
    TimeSeriesContract,
    UsageDeletionContract,
    UsageTenantContract,
    AsyncUsageContract,
):
    """The same answers, and after every refusal a transaction that the caller can go on with.

    Arguments are left out: they are refused before there is a transaction.
    """

    # Other threads cannot see what the caller's transaction has not committed.
    variant = Variant(differs_in=(RecordingContract, UsageDeletionContract), never="at_once")

    @pytest.fixture(autouse=True)
    def callers_transaction(self, committed_database: None) -> Iterator[None]:
        with transaction.atomic(using=self.database.alias):
            yield
            transaction.set_rollback(True, using=self.database.alias)


@pytest.mark.thorough
class TestDatabaseUsageStoreWithoutFastPaths(OnADatabase, RecordingContract):
    """Recording on PostgreSQL where nothing is prepared; on SQLite nothing ever is."""

    same_on_each_database = (RecordingContract,)

    @pytest.fixture(autouse=True)
    def no_fast_paths(self) -> Iterator[None]:
        with override_settings(HELIX_STORE={"FAST_PATHS": False}):
            yield
