"""Transactions whose COMMIT may receive no reply, and the search for their outcome. On PostgreSQL each
transaction of the store reads its number when it begins, in the same round trip as ``BEGIN``. If the reply to
COMMIT is lost, another connection asks the server for the outcome of that number. A server that has crashed,
or a promoted standby, may assign the same number again. The transaction therefore also reads the time of the
last statistics reset, which changes in both cases.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Final, TypeAlias

from django.db.backends.base.base import BaseDatabaseWrapper

from helix_store.engine.errors import mapped_errors
from helix_store.engine.statement import Statement
from helix_store.exceptions import OutcomeUnknown, StoreBusy, StoreTimeout, StoreUnavailable

Mark: TypeAlias = tuple[str, str]
"""The number of a transaction, and the server that assigned it."""

NO_ANSWER: Final = (OutcomeUnknown, StoreUnavailable, StoreBusy, StoreTimeout)

_PATIENCE_SECONDS: Final = 5.0
_FIRST_PAUSE_SECONDS: Final = 0.02
_LONGEST_PAUSE_SECONDS: Final = 0.5

_STATUS: Final = """
    SELECT CASE
        WHEN pg_catalog.pg_is_in_recovery() THEN NULL
        WHEN pg_catalog.pg_stat_get_bgwriter_stat_reset_time() = %(server)s::timestamptz
        THEN pg_catalog.pg_xact_status(%(number)s::xid8)
        ELSE 'another server'
    END"""
# A vanished client sends no COMMIT. The server may notice only hours later, and keeps the locks until then.
_END_IF_IDLE: Final = """
    SELECT pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity
    WHERE backend_xid = %(number)s::xid8::xid AND state LIKE 'idle in transaction%%'"""

# The lost transaction keeps its locks until the server notices that its client is gone, which can take hours.
WAIT_BRIEFLY: Final = Statement("SELECT pg_catalog.set_config('lock_timeout', '500ms', true)")
# Its statement may be running, or may arrive later from network buffers.
END_SESSION: Final = Statement(
    """
    SELECT pg_catalog.pg_terminate_backend(pid, 1000) FROM pg_catalog.pg_stat_activity
    WHERE pid = %(number)s::integer AND usename = current_user AND wait_event IS DISTINCT FROM 'SyncRep'
        AND backend_start < pg_catalog.clock_timestamp() - %(seconds)s::float8 * interval '1 second'"""
)


def has_committed(connection: BaseDatabaseWrapper, mark: Mark, lost: OutcomeUnknown) -> bool:
    """Return whether the transaction with this mark, whose COMMIT was ``lost``, was committed. Wait as long
    as the server does not know. Raises `OutcomeUnknown` with the number of the transaction.
    """
    number, server = mark
    parameters = {"number": number, "server": server}
    for pause in patient_pauses():
        try:
            status = _ask(connection, parameters)
        except NO_ANSWER:
            status = None
        if status in ("committed", "aborted"):
            return status == "committed"
        if status == "another server":
            break
        time.sleep(pause)
    raise OutcomeUnknown(f"xid-{number}") from lost.__cause__


def _ask(connection: BaseDatabaseWrapper, parameters: dict[str, str]) -> str | None:
    with mapped_errors(connection), connection.cursor() as cursor:
        cursor.execute(_STATUS, parameters)
        (status,) = cursor.fetchone()
        if status == "in progress":
            cursor.execute(_END_IF_IDLE, parameters)
    return None if status is None else str(status)


def patient_pauses() -> Iterator[float]:
    """Yield the pauses between attempts to reach a server that does not answer, for a few seconds."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield random.uniform(pause / 2, pause)  # noqa: S311  jitter, no secret
        if time.monotonic() >= deadline:
            return
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


# --- Ids of calls ------------------------------------------------------------------------------------

# If the reply to a one-statement write was lost, the write is found by the random id of its call
# (`engine.access.Call.id`), which it stores with its data. A row that many calls change keeps the ids of the
# most recent calls, newest first, so that a call can find its own id behind those of other writers.
CALL_ID_BYTES: Final = 9
CALL_IDS_LENGTH: Final = 255


def recorded(column: str, value: str = "''") -> str:
    """Return the SQL that adds the value of the call, ``%(call_id)s``, to a column of ids."""
    entry = f"%(call_id)s || ':' || {value} || ' '"
    return f"left({entry} || coalesce({column}, ''), {CALL_IDS_LENGTH})"


def recorded_value(call_ids: str | None, call_id: str) -> str | None:
    """Return the value that was recorded with a call, or ``None`` if the call never changed the row.

    Raises `OutcomeUnknown` if so many later calls are recorded that the column may have dropped this one.
    """
    kept = call_ids or ""
    for entry in kept.split(" "):
        found, _, value = entry.partition(":")
        if found == call_id:
            return value
    if len(kept) == CALL_IDS_LENGTH:
        raise OutcomeUnknown(call_id)
    return None
