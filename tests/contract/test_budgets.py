"""The budget stores under the contract suite, on every back end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.test.utils import CaptureQueriesContext, override_settings

from helix_store import InMemoryStore, MemoryWorld, Store
from helix_store.testing import BudgetContract
from helix_store.testing.budgets import (
    BudgetArgumentContract,
    BudgetSpendingContract,
    BudgetTurnContract,
)
from tests.databases import CommittedDatabase
from tests.selection import Variant


class OnADatabase(BudgetContract):
    database: CommittedDatabase

    def make_store(self, *, tenant: str = "") -> Store:
        return Store(self.database.alias, tenant=self.database.tenant + tenant)

    @contextmanager
    def storage_untouched(self) -> Iterator[None]:
        with CaptureQueriesContext(self.database.connection) as captured:
            yield
        assert captured.captured_queries == []


class TestDatabaseBudgetStore(OnADatabase):
    # They are above the back end.
    same_on_each_database = (BudgetArgumentContract,)
    long_tests = ("test_a_loop_calls_the_model_no_more_often_than_the_budget_allows",)
    """In the quick tier, these run on PostgreSQL, and not on SQLite too."""

    @pytest.fixture(autouse=True)
    def committed_database(self, committed_db: CommittedDatabase) -> None:
        self.database = committed_db


@pytest.mark.thorough
class TestDatabaseBudgetStoreWithoutFastPaths(OnADatabase):
    """The portable forms on PostgreSQL; on SQLite every test runs them."""

    variant = Variant(differs_in=(BudgetTurnContract, BudgetSpendingContract))

    @pytest.fixture(autouse=True)
    def no_fast_paths(self, sound_postgres: CommittedDatabase) -> Iterator[None]:
        self.database = sound_postgres
        with override_settings(HELIX_STORE={"FAST_PATHS": False}):
            yield


class TestInMemoryBudgetStore(BudgetContract):
    only_on_databases = (BudgetArgumentContract,)

    @pytest.fixture(autouse=True)
    def one_world(self) -> None:
        self.world = MemoryWorld()

    def make_store(self, *, tenant: str = "") -> InMemoryStore:
        return InMemoryStore(tenant=tenant, world=self.world)
