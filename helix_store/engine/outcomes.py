"""The outcome of a write whose reply to COMMIT was lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from helix_store.engine.commits import NO_ANSWER, patient_pauses
from helix_store.engine.database import Database
from helix_store.engine.statement import Statement
from helix_store.exceptions import OutcomeUnknown

__all__ = ["committed_once"]

R = TypeVar("R")

# The lost transaction keeps its locks until the server finds that its client is gone, which can take hours.
_WAIT_BRIEFLY: Final = Statement("SELECT pg_catalog.set_config('lock_timeout', '500ms', true)")


# Its statement may be under way, or come later from the buffers of the network.
_END_SESSION: Final = Statement(
    """
    SELECT pg_catalog.pg_terminate_backend(pid, 1000) FROM pg_catalog.pg_stat_activity
    WHERE pid = %(number)s::integer AND usename = current_user AND wait_event IS DISTINCT FROM 'SyncRep'
        AND backend_start < pg_catalog.clock_timestamp() - %(seconds)s::float8 * interval '1 second'"""
)


def committed_once(
    db: Database, write: Callable[[], R], again: Callable[[], R], *, operation_id: Callable[[], str | None]
) -> R:
    """The result of ``write``. When the reply to its COMMIT is lost, the result of ``again``.

    ``again`` runs in one transaction on another connection. It takes the lock that ``write`` had, so that
    ``write`` has ended, looks for what ``write`` stored, and writes it if it is not there. It is repeated
    for a few seconds while the server gives no answer; then `OutcomeUnknown` has the ``operation_id``.

    In a transaction of the caller nothing is repeated: the caller owns the commit.
    """
    if db.in_transaction:
        return write()
    session, began = db.session_number, time.monotonic()
    try:
        return write()
    except OutcomeUnknown as exc:
        lost = exc

    def after_the_lost_one() -> R:
        if db.is_postgresql:
            db.execute(_WAIT_BRIEFLY, {})
        return again()

    # With an id, its transaction was waited for already.
    for pause in patient_pauses() if lost.operation_id is None else (0.0,):
        try:
            if session:
                seconds = time.monotonic() - began
                db.read(_END_SESSION, {"number": session, "seconds": seconds})
            return db.transaction(after_the_lost_one)
        except NO_ANSWER as exc:
            if isinstance(exc, OutcomeUnknown) and exc.operation_id is not None:
                break
            time.sleep(pause)
    raise OutcomeUnknown(operation_id()) from lost.__cause__
