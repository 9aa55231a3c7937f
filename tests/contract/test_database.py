"""The database store under the contract suite: by itself, and inside a caller's transaction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext, override_settings

from helix_store.core.limits import Limits
from helix_store.stores import DatabaseLockManager, DatabaseStateStore
from helix_store.testing import EffectContract, PostContract, StateStoreContract
from helix_store.testing.state_store import (
    ArgumentContract,
    AsyncTwinContract,
    CheckpointContract,
    FencingContract,
    IdentifierContract,
    OperationContract,
    SignatureContract,
    StepContract,
    UsedApprovalContract,
    VersionContract,
)
from tests.databases import CommittedDatabase
from tests.invariants import broken_invariants
from tests.selection import Variant, refuses_a_write


class DatabaseContract(PostContract, StateStoreContract):
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


class TestDatabaseStateStore(EffectContract, DatabaseContract):
    # They are above the back end.
    same_on_each_database = (ArgumentContract, AsyncTwinContract, IdentifierContract, SignatureContract)

    @pytest.fixture(autouse=True)
    def sound_database(self, sound_db: CommittedDatabase) -> None:
        """A tenant of its own, whose rows agree with each other in the end."""
        self.database = sound_db


@pytest.mark.thorough
class TestDatabaseStateStoreInACallersTransaction(DatabaseContract):
    """The same answers, and after every refusal a transaction that the caller can go on with."""

    # Other threads cannot see what the caller's transaction has not committed.
    variant = Variant(
        differs_in=(StepContract, VersionContract), differs_where=refuses_a_write, never="at_once"
    )

    @pytest.fixture(autouse=True)
    def callers_transaction(self, committed_db: CommittedDatabase) -> Iterator[None]:
        self.database = committed_db
        with transaction.atomic(using=self.database.alias):
            yield
            assert broken_invariants(self.database) == []
            transaction.set_rollback(True, using=self.database.alias)


@pytest.mark.thorough
class TestDatabaseStateStoreWithoutFastPaths(EffectContract, DatabaseContract):
    """The portable forms on PostgreSQL; on SQLite every test runs them."""

    variant = Variant(
        differs_in=(
            CheckpointContract,
            EffectContract,
            FencingContract,
            OperationContract,
            StepContract,
            UsedApprovalContract,
            VersionContract,
        ),
        differs_where=lambda names: "at_once" in names or refuses_a_write(names),
    )

    @pytest.fixture(autouse=True)
    def no_fast_paths(self, sound_postgres: CommittedDatabase) -> Iterator[None]:
        self.database = sound_postgres
        with override_settings(HELIX_STORE={"FAST_PATHS": False}):
            yield
