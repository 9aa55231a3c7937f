"""Every SQLSTATE with a meaning for the store, raised by a server in answer to a statement and to COMMIT."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.engine.errors import is_retryable_transaction
from helix_store.exceptions import (
    HelixStoreError,
    IntegrityFault,
    NotSupportedOnBackend,
    OutcomeUnknown,
    StoreBusy,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    TenantMoved,
)
from tests.cells import for_each
from tests.database.separate import defer_to_commit, execute, in_transaction
from tests.databases import CommittedDatabase

CANARY = "canary-in-the-payload"

MEANINGS: dict[str, type[HelixStoreError]] = {
    "08000": StoreUnavailable,
    "08006": StoreUnavailable,
    "08P01": StoreUnavailable,
    "0A000": NotSupportedOnBackend,
    "22012": IntegrityFault,
    "25006": StoreUnavailable,
    "25P03": StoreUnavailable,
    "25P04": StoreTimeout,
    "40001": StoreBusy,
    "40P01": StoreBusy,
    "53100": StoreFull,
    "53200": StoreFull,
    "53300": StoreUnavailable,
    "54000": IntegrityFault,
    "54023": IntegrityFault,
    "55P03": StoreBusy,
    "57014": StoreTimeout,
    "57P01": StoreUnavailable,
    "57P02": StoreUnavailable,
    "57P03": StoreUnavailable,
    "57P04": StoreUnavailable,
    "57P05": StoreUnavailable,
    "58030": StoreUnavailable,
    "TM001": TenantMoved,
    "XX000": StoreUnavailable,
    "XX001": IntegrityFault,
    "XX002": IntegrityFault,
}
NOT_OURS = [
    "23503",
    "23505",
    "23514",
    "40002",
    "40003",
    "42501",
    "42601",
    "53400",
    "55000",
    "P0001",
]
OPEN_AT_COMMIT = {"08000", "08006", "08P01", "57014", "XX000"}


def _raise(code: str) -> str:
    return f"RAISE EXCEPTION '{CANARY}' USING ERRCODE = '{code}', DETAIL = '{CANARY}'"


def _body_that_raises(connection: BaseDatabaseWrapper, code: str) -> Callable[[], None]:
    return lambda: execute(connection, f"DO $$ BEGIN {_raise(code)}; END $$")


@for_each("code", MEANINGS)
def test_each_code_has_its_meaning_and_no_message_repeats_the_servers(
    postgres_db: CommittedDatabase, code: str
) -> None:
    with pytest.raises(MEANINGS[code]) as raised:
        in_transaction(postgres_db.connection, _body_that_raises(postgres_db.connection, code))
    assert type(raised.value) is MEANINGS[code]
    assert raised.value.attributes == {"database_code": code}
    assert raised.value.applied == "no"
    assert CANARY not in repr(raised.value.to_dict())


@for_each("code", MEANINGS)
def test_an_answer_to_commit_means_the_same_unless_its_code_leaves_the_outcome_open(
    postgres_db: CommittedDatabase, code: str
) -> None:
    connection = postgres_db.connection
    defer_to_commit(connection, _raise(code))
    expected = OutcomeUnknown if code in OPEN_AT_COMMIT else MEANINGS[code]
    with pytest.raises(expected) as raised:
        in_transaction(connection, lambda: execute(connection, "INSERT INTO deferring VALUES (1)"))
    assert type(raised.value) is expected
    assert CANARY not in repr(raised.value.to_dict())


@for_each("code", NOT_OURS)
def test_each_other_code_passes_unchanged(postgres_db: CommittedDatabase, code: str) -> None:
    with pytest.raises(Error) as raised:
        in_transaction(postgres_db.connection, _body_that_raises(postgres_db.connection, code))
    assert getattr(raised.value.__cause__, "sqlstate", None) == code
    assert not is_retryable_transaction(raised.value)


def test_only_three_codes_of_postgres_are_worth_running_the_same_transaction_again(
    postgres_db: CommittedDatabase,
) -> None:
    retryable = set()
    for code in [*MEANINGS, *NOT_OURS]:
        try:
            in_transaction(postgres_db.connection, _body_that_raises(postgres_db.connection, code))
        except (HelixStoreError, Error) as error:
            if is_retryable_transaction(error):
                retryable.add(code)
    assert retryable == {"40001", "40P01", "55P03"}
