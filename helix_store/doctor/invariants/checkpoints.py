"""Invariants of a session and the rows of its states: versions, the current state, bases and deltas."""

from __future__ import annotations

from typing import Final

from helix_store.doctor import sql
from helix_store.doctor.registry import by_statement
from helix_store.models import Session

__all__ = ["CHECKS"]

CHECKS: Final = (
    by_statement("version-zero", Session, "session", sql.VERSION_ZERO),
    by_statement("checkpoint-from-the-future", Session, "checkpoint", sql.CHECKPOINT_FROM_THE_FUTURE),
    by_statement("checkpoint-beyond-history", Session, "checkpoint", sql.CHECKPOINT_BEYOND_HISTORY),
    by_statement("current-missing", Session, "session", sql.CURRENT_MISSING),
    by_statement("current-mistaken", Session, "session", sql.CURRENT_MISTAKEN),
    by_statement("state-unneeded", Session, "checkpoint", sql.STATE_UNNEEDED),
    by_statement("base-missing", Session, "checkpoint", sql.BASE_MISSING),
    by_statement("base-unsound", Session, "checkpoint", sql.BASE_UNSOUND),
    by_statement("base-named", Session, "checkpoint", sql.BASE_NAMED),
    by_statement("base-unneeded", Session, "checkpoint", sql.BASE_UNNEEDED),
    by_statement("operation-misfit", Session, "operation", sql.OPERATION_MISFIT),
)
