"""Which run may start, and when one has ended."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from helix_store.core.types import RunStatus
from helix_store.exceptions import ConflictError

__all__ = ["SUPERSEDED", "check_no_other_runs", "check_supersedes", "end_of_run"]

SUPERSEDED: Final = "superseded"
"""Why a run ended that another one took the place of."""


def check_supersedes(running_token: int | None, *, supersede: bool, fencing_token: int | None) -> None:
    """Raise `ConflictError` unless a new run may take the place of the one that is running.

    It may when asked to, or with a newer token than the running run was started with: that run's worker has
    lost the lock. A run started without a token counts as one with token 0.
    """
    if not supersede and (fencing_token is None or fencing_token <= (running_token or 0)):
        raise ConflictError(
            "A run of this session is running; let it end, or start this one with supersede=True."
        )


def check_no_other_runs(running_run_id: str | None, run_id: str) -> None:
    """Raise `ConflictError` when a run is to be set running beside another one."""
    if running_run_id is not None and running_run_id != run_id:
        raise ConflictError("Another run of this session is running; end it before this one goes on.")


def end_of_run(status: RunStatus, ended_at: datetime | None, now: datetime) -> datetime | None:
    """When a run with this status ended: the first time counts, and a run that is running has not ended."""
    if status is RunStatus.RUNNING:
        return None
    return now if ended_at is None else ended_at
