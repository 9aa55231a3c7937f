"""The outcome of a write whose reply to COMMIT was lost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

from helix_store.engine.database import Database
from helix_store.engine.statement import Statement
from helix_store.exceptions import OutcomeUnknown, StoreBusy, StoreTimeout, StoreUnavailable

__all__ = ["committed_once"]

R = TypeVar("R")

_PATIENCE_SECONDS: Final = 5.0
_FIRST_PAUSE_SECONDS: Final = 0.02
_LONGEST_PAUSE_SECONDS: Final = 0.5
_NO_ANSWER: Final = (OutcomeUnknown, StoreUnavailable, StoreBusy, StoreTimeout)

# The lost transaction keeps its locks until the server finds that its client is gone, which can take hours.
_WAIT_BRIEFLY: Final = Statement("SELECT pg_catalog.set_config('lock_timeout', '500ms', true)")


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
    try:
        return write()
    except OutcomeUnknown as exc:
        lost = exc

    def after_the_lost_one() -> R:
        if db.is_postgresql:
            db.execute(_WAIT_BRIEFLY, {})
        return again()

    deadline = time.monotonic() + _PATIENCE_SECONDS
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            return db.transaction(after_the_lost_one)
        except _NO_ANSWER:
            if time.monotonic() >= deadline:
                raise OutcomeUnknown(operation_id()) from lost.__cause__
        time.sleep(random.uniform(pause / 2, pause))  # noqa: S311  jitter, no secret
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
