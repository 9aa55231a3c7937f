"""What an error of the database becomes, as far as PostgreSQL and SQLite agree."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from django.db import IntegrityError, OperationalError, ProgrammingError, transaction
from django.db.transaction import TransactionManagementError

from helix_store.engine.errors import (
    is_retryable_transaction,
    is_unique_violation,
    mapped_errors,
    translate,
    violated_constraint,
)
from helix_store.exceptions import (
    HelixStoreError,
    IntegrityFault,
    OutcomeUnknown,
    StoreBusy,
    StoreUnavailable,
)
from helix_store.models import Lock
from tests.database.separate import execute, fetch, in_transaction
from tests.databases import CommittedDatabase

ROOT = Path(__file__).parent.parent.parent

CANARY = "canary-in-the-payload"


@pytest.fixture
def constrained(committed_db: CommittedDatabase) -> None:
    """A temporary table with a constraint of each kind."""
    execute(
        committed_db.connection,
        "CREATE TEMPORARY TABLE constrained ("
        " word text CONSTRAINT constrained_word_uniq UNIQUE,"
        " letter text CONSTRAINT constrained_letter_ck CHECK (length(letter) = 1),"
        " place integer NOT NULL DEFAULT 0 CONSTRAINT constrained_place_pk PRIMARY KEY)",
    )


def test_a_broken_unique_constraint_passes_unchanged(
    committed_db: CommittedDatabase, constrained: None
) -> None:
    connection = committed_db.connection
    execute(connection, "INSERT INTO constrained (word, place) VALUES ('once', 1)")
    with pytest.raises(IntegrityError) as raised, mapped_errors(connection, committing=True):
        execute(connection, "INSERT INTO constrained (word, place) VALUES ('once', 2)")
    assert is_unique_violation(raised.value)
    assert not is_retryable_transaction(raised.value)
    name = violated_constraint(raised.value)
    assert name == ("constrained_word_uniq" if committed_db.vendor == "postgresql" else None)


def test_a_second_row_under_a_primary_key_is_a_unique_violation_too(
    committed_db: CommittedDatabase, constrained: None
) -> None:
    connection = committed_db.connection
    execute(connection, "INSERT INTO constrained (place) VALUES (1)")
    with pytest.raises(IntegrityError) as raised, mapped_errors(connection):
        execute(connection, "INSERT INTO constrained (place) VALUES (1)")
    assert is_unique_violation(raised.value)


def test_a_broken_check_constraint_passes_unchanged_and_is_not_a_unique_violation(
    committed_db: CommittedDatabase, constrained: None
) -> None:
    connection = committed_db.connection
    with pytest.raises(IntegrityError) as raised, mapped_errors(connection):
        execute(connection, "INSERT INTO constrained (letter) VALUES ('two letters')")
    assert not is_unique_violation(raised.value)
    name = violated_constraint(raised.value)
    assert name == ("constrained_letter_ck" if committed_db.vendor == "postgresql" else None)


def test_a_fault_in_the_sql_passes_unchanged(committed_db: CommittedDatabase) -> None:
    with (
        pytest.raises((ProgrammingError, OperationalError)) as raised,
        mapped_errors(committed_db.connection),
    ):
        execute(committed_db.connection, "SELECT * FROM no_such_table")
    assert translate(raised.value, vendor=committed_db.vendor, committing=True) is None
    assert not is_retryable_transaction(raised.value)


def test_an_error_that_has_nothing_to_do_with_the_database_passes_unchanged(
    committed_db: CommittedDatabase,
) -> None:
    error = KeyError("mine")
    with pytest.raises(KeyError) as raised, mapped_errors(committed_db.connection):
        raise error
    assert raised.value is error


def test_django_refusing_a_broken_atomic_block_is_left_as_it_is(committed_db: CommittedDatabase) -> None:
    row = {"tenant": committed_db.tenant, "name": "once"}
    Lock.objects.using(committed_db.alias).create(**row)
    with transaction.atomic(using=committed_db.alias):
        with pytest.raises(IntegrityError):
            Lock.objects.using(committed_db.alias).create(**row)
        with pytest.raises(TransactionManagementError) as raised, mapped_errors(committed_db.connection):
            execute(committed_db.connection, "SELECT 1")
    # Django chains its refusal to what broke the block; that error is over.
    assert isinstance(raised.value.__cause__, IntegrityError)
    assert not is_unique_violation(raised.value)
    assert violated_constraint(raised.value) is None


def test_a_lone_surrogate_that_got_past_the_gate_is_an_integrity_fault_without_the_text(
    committed_db: CommittedDatabase,
) -> None:
    with pytest.raises(IntegrityFault) as raised, mapped_errors(committed_db.connection):
        execute(committed_db.connection, "SELECT %s", f"{CANARY}\ud800")
    # The error of Python has the whole text among its arguments.
    assert raised.value.__suppress_context__
    assert raised.value.__cause__ is None
    assert CANARY not in "".join(traceback.format_exception(raised.value))
    assert (raised.value.retryable, raised.value.applied) == (False, "no")


def test_an_integer_that_no_column_can_hold_is_an_integrity_fault(
    committed_db: CommittedDatabase, constrained: None
) -> None:
    with pytest.raises(IntegrityFault), mapped_errors(committed_db.connection):
        execute(committed_db.connection, "INSERT INTO constrained (place) VALUES (%s)", 2**63)


def test_an_error_explained_inside_is_not_explained_again_outside(committed_db: CommittedDatabase) -> None:
    busy = StoreBusy()
    with (
        pytest.raises(StoreBusy) as raised,
        mapped_errors(committed_db.connection, committing=True),
        mapped_errors(committed_db.connection),
    ):
        raise busy
    assert raised.value is busy


def test_a_connection_found_useless_inside_an_atomic_block_is_dropped_after_it(
    committed_db: CommittedDatabase,
) -> None:
    connection = committed_db.connection
    connection.ensure_connection()
    in_the_block = []

    def body() -> None:
        try:
            with mapped_errors(connection):
                raise StoreUnavailable
        finally:
            in_the_block.append(connection.connection is not None)

    with pytest.raises(StoreUnavailable):
        in_transaction(connection, body)
    assert in_the_block == [True]
    assert connection.connection is None
    assert fetch(connection, "SELECT 1") == [(1,)]


@pytest.mark.parametrize("error", [StoreBusy(None, database_code="55P03"), OutcomeUnknown("operation-7")])
def test_an_explained_error_survives_pickling_with_its_attributes(error: HelixStoreError) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301  pickled in this line
    assert type(copy) is type(error)
    assert copy.to_dict() == error.to_dict()


@pytest.mark.thorough
def test_errors_are_explained_where_psycopg_is_not_installed(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['psycopg'] = None\n"
        "import django; django.setup()\n"
        "from django.db import connection\n"
        "from helix_store.exceptions import StoreUnavailable\n"
        "from helix_store.engine.errors import mapped_errors\n"
        "connection.settings_dict['NAME'] = sys.argv[1]\n"
        "try:\n"
        "    with mapped_errors(connection): connection.ensure_connection()\n"
        "except StoreUnavailable as error: print(error.database_code)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "no such directory" / "file")],
        cwd=ROOT,
        env={**os.environ, "HELIX_TEST_DATABASES": "sqlite", "DJANGO_SETTINGS_MODULE": "tests.settings"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert finished.stdout == "SQLITE_CANTOPEN\n"
