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
    long_tests = (
        "test_a_coroutine_function_needs_async_with",
        "test_a_deep_value_within_the_limit_is_taken_at_every_entrance",
        "test_a_larger_limit_holds_for_every_field_of_a_state",
        "test_a_page_holds_up_to_two_hundred_sessions",
        "test_a_patch_that_cannot_be_applied_changes_nothing",
        "test_a_payload_comes_back_exactly_wherever_it_was_put",
        "test_a_request_for_a_run_that_has_ended_is_refused",
        "test_a_session_of_another_tenant_is_as_unknown_as_one_that_does_not_exist",
        "test_a_small_graph_that_stands_for_a_huge_text_is_refused",
        "test_a_token_older_than_the_newest_is_fenced_out_and_writes_nothing",
        "test_a_value_that_is_not_plain_json_is_refused_at_every_entrance",
        "test_an_answer_in_the_state_does_not_switch_the_deadline_off",
        "test_an_answer_never_reaches_a_session_of_another_tree",
        "test_an_answer_switches_the_deadline_off_for_good",
        "test_an_answer_that_does_not_fit_is_refused_and_stores_nothing",
        "test_another_payload_under_the_same_id_is_refused",
        "test_copies_that_multiply_a_small_patch_are_refused",
        "test_failing_a_session_succeeds_whatever_the_reason_is",
        "test_only_the_lock_named_after_the_session_counts",
        "test_pruning_keeps_exactly_the_newest",
        "test_the_newest_token_may_write",
        "test_what_the_caller_assigns_is_saved_as_given",
    )
    """In the quick tier, these run on PostgreSQL, and not on SQLite too."""

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
