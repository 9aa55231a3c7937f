"""The actions that a person may take, shared by the admin, the management commands and code."""

from __future__ import annotations

from typing import Final

from helix_store.actions import answers, effects, sessions
from helix_store.actions.sessions import (
    BRANCH,
    POST,
    PRUNE_CHECKPOINTS,
    RESTORE,
    WITHDRAW_POST,
    SessionAction,
)

__all__ = ["SESSION_ACTIONS"]

SESSION_ACTIONS: Final[tuple[SessionAction, ...]] = (
    answers.ANSWER,
    effects.SETTLE,
    POST,
    WITHDRAW_POST,
    sessions.SET_STATUS,
    sessions.INTERRUPT,
    sessions.ABORT,
    sessions.CLEAR_INTERRUPT,
    sessions.MARK_FAILED,
    sessions.RUN_AGAIN,
    RESTORE,
    BRANCH,
    PRUNE_CHECKPOINTS,
    sessions.DELETE,
)
"""The session page offers actions with a label; `helix_sessions` offers actions with a help text."""
