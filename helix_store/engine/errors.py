"""The translation of PostgreSQL's and SQLite's errors into errors of the store. SQLSTATE or
``sqlite_errorname`` decides the meaning, never a message. This module imports no driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.db import DataError, Error, InterfaceError, InternalError, OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

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

TENANT_MOVED: Final = "TM001"
"""The SQLSTATE of the triggers that refuse writes to a tenant while it is being moved. An SQLite trigger can
only raise a string, so the string begins with this code.
"""

# A code is looked up whole, then by its family: the class of the SQLSTATE or the primary code of SQLite.
_MEANINGS: Final[dict[str, type[HelixStoreError]]] = {
    "08": StoreUnavailable,  # connection exception
    "0A000": NotSupportedOnBackend,  # feature not supported: the planner of Citus, or another server
    "22": IntegrityFault,  # data exception
    "25006": StoreUnavailable,  # read-only transaction: the server is a standby, or has become one
    "25P03": StoreUnavailable,  # idle-in-transaction timeout
    "25P04": StoreTimeout,  # transaction timeout
    "40001": StoreBusy,  # serialization failure
    "40P01": StoreBusy,  # deadlock
    "53100": StoreFull,  # disk full
    "53200": StoreFull,  # out of memory, including memory for locks
    "53300": StoreUnavailable,  # too many connections
    "54": IntegrityFault,  # program limit exceeded
    "55P03": StoreBusy,  # lock not available
    "57014": StoreTimeout,  # statement timeout, or cancelled by a user
    "57P01": StoreUnavailable,  # administrator's shutdown
    "57P02": StoreUnavailable,  # crash shutdown
    "57P03": StoreUnavailable,  # starting up or shutting down
    "57P04": StoreUnavailable,  # database dropped
    "57P05": StoreUnavailable,  # idle session timeout
    "58030": StoreUnavailable,  # input or output error
    TENANT_MOVED: TenantMoved,
    "XX000": StoreUnavailable,  # internal error: a pooler or an extension lost its connection
    "XX001": IntegrityFault,  # corrupt data
    "XX002": IntegrityFault,  # corrupt index
    "SQLITE_BUSY": StoreBusy,
    "SQLITE_CANTOPEN": StoreUnavailable,
    "SQLITE_CORRUPT": IntegrityFault,
    "SQLITE_FULL": StoreFull,
    "SQLITE_INTERRUPT": StoreTimeout,
    "SQLITE_IOERR": StoreUnavailable,
    "SQLITE_LOCKED": StoreBusy,
    "SQLITE_NOTADB": IntegrityFault,
    "SQLITE_PROTOCOL": StoreBusy,  # a writer was stopped while it changed the index of the WAL
    "SQLITE_READONLY": StoreUnavailable,
    "SQLITE_TOOBIG": IntegrityFault,
}

_GIVEN_UP: Final = frozenset({"40001", "40P01"})
_RETRYABLE: Final = _GIVEN_UP | {"55P03", "SQLITE_BUSY", "SQLITE_BUSY_SNAPSHOT"}
# There is no such statement, or another one of that name: a pooler has changed the server's connection. The
# third code means that a returned column has changed its type.
_STALE_PREPARED: Final = frozenset({"26000", "42P05", "0A000"})
_UNIQUE: Final = frozenset({"23505", "SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY"})

# The server sends these only while a session waits for the next statement, so it never saw the COMMIT.
_ENDED_WHILE_IDLE: Final = frozenset({"25P03", "57P05"})

_REFUSED_VALUE: Final = (
    "The database refused a value that the store should have refused; nothing was written. "
    "Please report the database_code of this error."
)
_REFUSED_BY_DRIVER: Final = (
    "The driver cannot read a stored value, such as the time 'infinity', or cannot send a value; nothing was "
    "written. helix_doctor names the rows that cannot be read."
)
_NOT_SUPPORTED: Final = (
    "The database does not support a statement of this call. On Citus, set HELIX_STORE_CITUS in the entry of "
    "DATABASES."
)
_HELD_LOCK: Final = (
    "Another transaction holds the lock; try again shortly. If no retry succeeds, the client of that "
    "transaction may be gone: set idle_in_transaction_session_timeout."
)
_CORRUPT: Final = "The database found that its files are corrupt; restore them from a backup."
_ABORTED: Final = (
    "An earlier error has aborted the caller's transaction, which accepts no more statements. "
    "Leave its outermost atomic() block; to survive an error, catch it outside of a nested atomic() block."
)


def translate(
    error: Error, *, vendor: str, committing: bool = False, is_single_statement: bool = False
) -> HelixStoreError | TransactionManagementError | None:
    """Return the error to raise in place of ``error``, or ``None`` if ``error`` should propagate unchanged.

    For an integrity error it is ``None``, because only the operation that wrote the row can interpret a
    violated constraint. A transaction that was aborted earlier (25P02) becomes Django's
    `TransactionManagementError`, which Django raises in a block that it has marked as broken. It is a fault
    in the calling code and must not be retried.

    ``committing`` means that COMMIT may have been sent. In that case an error that leaves the outcome open
    becomes `OutcomeUnknown`; an error that is the server's answer to COMMIT keeps its usual meaning. With
    ``is_single_statement`` the transaction is one statement, which a timeout rolls back as a whole.
    """
    code = _code(error)
    if code == "25P02":
        return TransactionManagementError(_ABORTED)
    if committing and _leaves_outcome_open(error, code, vendor, is_single_statement):
        return OutcomeUnknown()
    meaning = _meaning(error, code, vendor)
    if meaning is None:
        return None
    return meaning(_message(meaning, code, vendor), database_code=code)


@contextmanager
def mapped_errors(connection: BaseDatabaseWrapper, *, committing: bool = False) -> Iterator[None]:
    """Raise the translation of a database error in a ``with`` block, as `raise_mapped` does."""
    try:
        yield
    except Exception as exc:
        raise_mapped(connection, exc, committing=committing)
        raise


def raise_mapped(
    connection: BaseDatabaseWrapper,
    exc: BaseException,
    *,
    committing: bool = False,
    is_single_statement: bool = False,
) -> None:
    """Raise the translation of a database error; for any other error, return.

    A lost or read-only connection is dropped outside of an atomic block, so the next call gets a new one.
    """
    if isinstance(exc, Error):
        translated = translate(
            exc, vendor=connection.vendor, committing=committing, is_single_statement=is_single_statement
        )
        if translated is None:
            return
        if isinstance(translated, StoreUnavailable | OutcomeUnknown) or _has_ended_session(exc):
            _drop(connection)
        # The driver's message quotes the value: psycopg's includes the DETAIL and CONTEXT of PostgreSQL.
        raise translated from (None if isinstance(translated, IntegrityFault) else exc)
    if isinstance(exc, StoreUnavailable | OutcomeUnknown):
        # This error was translated inside an atomic block, which has since ended.
        _drop(connection)
    elif isinstance(exc, UnicodeEncodeError | OverflowError):
        # Both drivers reject lone surrogates before the database gets them; SQLite's also rejects large
        # integers.
        raise IntegrityFault(_REFUSED_VALUE, database_code=None) from None


def is_retryable_transaction(error: BaseException) -> bool:
    """Return whether the same transaction can succeed if it is run again from its start.

    Only the owner of the outermost transaction may do this, and only a few times: before 55P03, each attempt
    waits for the whole ``lock_timeout``. It accepts Django's error or its translation.
    """
    return _code(error) in _RETRYABLE


def is_serialization_failure(error: BaseException) -> bool:
    """Return whether the database aborted a transaction immediately because of another one."""
    return _code(error) in _GIVEN_UP


def is_stale_prepared_statement(error: BaseException) -> bool:
    """Return whether a prepared statement did not run because the server lost it or its tables changed."""
    return _code(error) in _STALE_PREPARED


def is_unavailable(connection: BaseDatabaseWrapper, error: Error) -> bool:
    """Return whether a Django error means that the database cannot be reached, or does not accept writes."""
    return isinstance(translate(error, vendor=connection.vendor), StoreUnavailable)


def is_unique_violation(error: BaseException) -> bool:
    """Return whether a unique constraint or a primary key refused the row."""
    return _code(error) in _UNIQUE


def violated_constraint(error: BaseException) -> str | None:
    """Return the name of the constraint that refused the row, or ``None`` on SQLite, which reports none."""
    name = getattr(_diagnosis(error), "constraint_name", None)
    return None if name is None else str(name)


def _meaning(error: Error, code: str | None, vendor: str) -> type[HelixStoreError] | None:
    if code is not None:
        return _MEANINGS.get(code) or _MEANINGS.get(_family(code))
    if vendor == "sqlite":
        # If stored text is not UTF-8, Python's error has no code, and its message contains the text.
        return IntegrityFault if isinstance(error, OperationalError) else None
    if isinstance(error, OperationalError | InterfaceError | InternalError):
        # psycopg has no SQLSTATE for a connection that could not be opened, broke, violated the protocol or
        # was not free in the pool.
        return StoreUnavailable
    # psycopg refuses NUL in text before the server sees it, and times that Python cannot represent.
    return IntegrityFault if isinstance(error, DataError) else None


def _leaves_outcome_open(error: Error, code: str | None, vendor: str, is_single_statement: bool) -> bool:
    if code is None:
        return _meaning(error, code, vendor) is StoreUnavailable
    if code in _ENDED_WHILE_IDLE:
        return False
    if code == "57014":
        return not is_single_statement
    return _has_ended_session(error) or code == "XX000" or _family(code) in {"08", "SQLITE_IOERR"}


def _has_ended_session(error: Error) -> bool:
    return getattr(_diagnosis(error), "severity_nonlocalized", None) in {"FATAL", "PANIC"}


def _message(meaning: type[HelixStoreError], code: str | None, vendor: str) -> str | None:
    if code == "55P03":
        return _HELD_LOCK
    if meaning is NotSupportedOnBackend:
        return _NOT_SUPPORTED
    is_unreadable_row = code is None and vendor == "sqlite"
    if meaning is not IntegrityFault or is_unreadable_row:
        return None
    if code is None:
        return _REFUSED_BY_DRIVER
    is_corrupt_file = _family(code) in {"XX", "SQLITE_CORRUPT", "SQLITE_NOTADB"}
    return _CORRUPT if is_corrupt_file else _REFUSED_VALUE


def _family(code: str) -> str:
    return "_".join(code.split("_")[:2]) if code.startswith("SQLITE_") else code[:2]


def _code(error: BaseException) -> str | None:
    driver_error = _driver_error(error)
    code = getattr(driver_error, "sqlstate", None) or getattr(driver_error, "sqlite_errorname", None)
    if code == "SQLITE_CONSTRAINT_TRIGGER" and str(driver_error).startswith(TENANT_MOVED):
        return TENANT_MOVED
    return None if code is None else str(code)


def _diagnosis(error: BaseException) -> Any:
    return getattr(_driver_error(error), "diag", None)


def _driver_error(error: BaseException) -> BaseException | None:
    django_error = error.__cause__ if isinstance(error, HelixStoreError) else error
    return None if django_error is None else django_error.__cause__


def _drop(connection: BaseDatabaseWrapper) -> None:
    if connection.in_atomic_block:
        return
    if connection.vendor == "postgresql" and connection.connection is not None:
        # A pool reuses an open connection, even one to a server that has become a standby.
        connection.connection.close()
    connection.close()
